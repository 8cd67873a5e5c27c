//! Connect's protocol with JSON, as E2B's agent speaks it: the messages of a stream, each after its
//! length, and errors.

use std::time::Duration;

use afresh_interpreter::{Stream, Thrown};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error_response::{ErrorResponse, RefusalReason};
use crate::sandbox::http::response::answer;
use crate::sandbox::request_body::requests::ConnectMessages;

/// Flag of a message that ends a stream.
const LAST: u8 = 2;
/// The client's time limit of a stream, in Connect's own words.
const LIMIT: &str = "connect-timeout-ms";
/// Maximum bytes of one line of output that is handed over whole.
const MAX_LINE_BYTES: usize = 64 << 10;
/// Longest limit that is one.
const MAX_TIMEOUT_MILLIS: f64 = 86_400_000.0 * 365.0;

/// The error of an operation, as a client gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConnectError {
    code: &'static str,
    why: String,
    /// Its form outside Connect.
    refusal: Option<ErrorResponse>,
}

impl ConnectError {
    /// `code` is an error code of Connect.
    pub(crate) fn new(code: &'static str, why: impl Into<String>) -> Self {
        Self { code, why: why.into(), refusal: None }
    }

    /// The reason.
    pub(crate) fn why(&self) -> &str {
        &self.why
    }

    /// Whether the sandbox was never called.
    pub(crate) fn is_refused(&self) -> bool {
        self.refusal.is_some()
    }

    /// An error that the guest's half of commands threw.
    pub(crate) fn of(thrown: &Thrown) -> Self {
        let Thrown { name, message, .. } = thrown;
        match name.as_str() {
            "TimeoutError" => Self::new("deadline_exceeded", message),
            "FileNotFoundError" | "NotADirectoryError" => Self::new("not_found", message),
            "PermissionError" => Self::new("permission_denied", message),
            "ValueError" => Self::new("failed_precondition", message),
            "BlockingIOError" => Self::new("resource_exhausted", message),
            _ => Self::new("aborted", format!("{name}: {message}")),
        }
    }
}

/// The end of command streams after a client's rollback.
pub(crate) fn went_back() -> ConnectError {
    ConnectError::new("aborted", "the sandbox was taken back to another state")
}

impl ConnectError {
    /// The answer to a request for a stream: an error of Connect is the end of the stream then, and
    /// not a status.
    pub(crate) fn into_stream(self) -> Response {
        if self.is_refused() {
            return self.into_response();
        }
        let mut response = Response::new(broken_off(&self).into());
        response.extensions_mut().insert(RefusalReason(self.why));
        let kind = HeaderValue::from_static("application/connect+json");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}

impl From<ErrorResponse> for ConnectError {
    fn from(refusal: ErrorResponse) -> Self {
        Self { refusal: Some(refusal.clone()), ..Self::new("unavailable", refusal.message) }
    }
}

impl IntoResponse for ConnectError {
    fn into_response(self) -> Response {
        if let Some(refusal) = self.refusal {
            return refusal.into_response();
        }
        let status = match self.code {
            "not_found" => StatusCode::NOT_FOUND,
            "already_exists" => StatusCode::CONFLICT,
            "internal" => StatusCode::INTERNAL_SERVER_ERROR,
            "permission_denied" => StatusCode::FORBIDDEN,
            "unauthenticated" => StatusCode::UNAUTHORIZED,
            "deadline_exceeded" => StatusCode::GATEWAY_TIMEOUT,
            "resource_exhausted" => StatusCode::TOO_MANY_REQUESTS,
            "aborted" => StatusCode::CONFLICT,
            "unavailable" => StatusCode::SERVICE_UNAVAILABLE,
            "unimplemented" => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::BAD_REQUEST,
        };
        refused(status, self.code, &self.why)
    }
}

/// A refusal in Connect's form.
pub(crate) fn refused(status: StatusCode, code: &str, message: &str) -> Response {
    let mut response = answer(status, &json!({"code": code, "message": message}));
    response.extensions_mut().insert(RefusalReason(message.to_owned()));
    response
}

/// The request in a stream of one message.
pub(crate) fn decode_stream_request<T: DeserializeOwned>(body: &[u8]) -> Result<T, ConnectError> {
    let mut all = messages(body)?;
    match (all.pop(), all.is_empty()) {
        (Some(asked), true) => Ok(asked),
        (last, _) => {
            let count = all.len() + usize::from(last.is_some());
            Err(invalid(format!("the stream has {count} messages instead of one")))
        }
    }
}

/// The requests in the messages of a stream.
pub(crate) fn messages<T: DeserializeOwned>(body: &[u8]) -> Result<Vec<T>, ConnectError> {
    let parse = |message: &[u8]| {
        serde_json::from_slice(message).map_err(|error| invalid(error.to_string()))
    };
    ConnectMessages(body).map(|message| message.map_err(invalid).and_then(parse)).collect()
}

fn invalid(why: impl Into<String>) -> ConnectError {
    ConnectError::new("invalid_argument", why)
}

/// The time limit that a client sets.
pub(crate) fn limit(headers: &hyper::HeaderMap) -> Option<Duration> {
    let limit: f64 = headers.get(LIMIT)?.to_str().ok()?.parse().ok()?;
    let limit = Some(limit).filter(|limit| *limit > 0.0 && *limit < MAX_TIMEOUT_MILLIS);
    limit.map(|limit| Duration::from_secs_f64(limit / 1000.0))
}

pub(crate) fn message(flags: u8, said: &Value) -> Vec<u8> {
    let said = said.to_string();
    let length = u32::try_from(said.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[flags], &length[..], said.as_bytes()].concat()
}

fn event(event: &Value) -> Vec<u8> {
    message(0, &json!({ "event": event }))
}

/// The first message on a command's stream: its number.
pub(crate) fn started(number: u32) -> Vec<u8> {
    event(&json!({"start": {"pid": number}}))
}

/// Its output.
pub(crate) fn printed(stream: Stream, bytes: &[u8]) -> Vec<u8> {
    let name = match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
        Stream::Terminal => "pty",
    };
    event(&json!({"data": {name: STANDARD.encode(bytes)}}))
}

/// All of a stream was taken: the answer to it.
pub(crate) fn end_of_stream() -> Vec<u8> {
    [message(0, &json!({})), message(LAST, &json!({}))].concat()
}

/// It runs on, and has printed nothing for a while.
pub(crate) fn keepalive() -> Vec<u8> {
    event(&json!({"keepalive": {}}))
}

/// The use of a sandbox while a client followed a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandCost {
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
    /// Peak of the bytes that its processes have mapped together, if it is known.
    pub(crate) peak_memory: Option<u64>,
    /// Bytes of output.
    pub(crate) output_bytes: u64,
}

/// It has ended, with this status: negative for a signal. And the end of the stream. Clients of E2B
/// pass over the cost.
pub(crate) fn ended(status: i32, cost: Option<CommandCost>) -> Vec<u8> {
    let mut end = match status {
        0.. => {
            json!({"exitCode": status, "exited": true, "status": format!("exit status {status}")})
        }
        _ => {
            let signal = status.unsigned_abs();
            json!({"exitCode": signal.saturating_add(128), "exited": false, "status": format!("signal {signal}")})
        }
    };
    if let Some(cost) = cost {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        end["cost"] = json!({
            "wall_ms": milliseconds(cost.wall),
            "cpu_ms": milliseconds(cost.cpu),
            "peak_memory": cost.peak_memory,
            "output_bytes": cost.output_bytes,
        });
    }
    [event(&json!({ "end": end })), message(LAST, &json!({}))].concat()
}

/// Follows the events of a command to its end: its exit code. Output of each stream is handed over
/// as text, line by line where it has lines.
pub(crate) async fn follow(
    mut events: impl Body<Data = Bytes, Error = std::convert::Infallible> + Unpin,
    mut hear: impl FnMut(Stream, &str),
) -> Result<i64, String> {
    let mut streams =
        [(Stream::Stdout, "stdout", Vec::new()), (Stream::Stderr, "stderr", Vec::new())];
    let (mut status, mut failure) = (None, None);
    while let Some(frame) = events.frame().await {
        let Ok(frame) = frame;
        let Ok(piece) = frame.into_data() else { continue };
        for message in ConnectMessages(&piece).flatten() {
            let said: Value = serde_json::from_slice(message).unwrap_or_default();
            for (stream, name, begun) in &mut streams {
                let Some(data) = said["event"]["data"][*name].as_str() else { continue };
                begun.extend(STANDARD.decode(data).unwrap_or_default());
                let end = begun.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let whole = if begun.len() - end > MAX_LINE_BYTES { begun.len() } else { end };
                let lines: Vec<u8> = begun.drain(..whole).collect();
                hear(*stream, &String::from_utf8_lossy(&lines));
            }
            if let Some(code) = said["event"]["end"]["exitCode"].as_i64() {
                status = Some(code);
            }
        }
        if status.is_none()
            && let Some(why) = broken(&piece)
        {
            failure = Some(why);
            break;
        }
    }
    // Lines without an end, also where the command was cut off.
    for (stream, _, begun) in &streams {
        hear(*stream, &String::from_utf8_lossy(begun));
    }
    let lost = || "the command was lost with its sandbox".to_owned();
    status.ok_or_else(|| failure.unwrap_or_else(lost))
}

/// The reason in the last message of a stream that broke off.
fn broken(piece: &[u8]) -> Option<String> {
    let said: Value = serde_json::from_slice(piece.get(5..)?).ok()?;
    Some(said["error"]["message"].as_str()?.to_owned())
}

/// The end of a stream before its command ended.
pub(crate) fn broken_off(failed: &ConnectError) -> Vec<u8> {
    message(LAST, &json!({"error": {"code": failed.code, "message": failed.why}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_and_written_as_connect_has_them() {
        let start = message(0, &json!({"process": {"cmd": "/bin/bash"}}));
        assert_eq!(decode_stream_request::<Value>(&start).unwrap()["process"]["cmd"], "/bin/bash");
        for wrong in [&b""[..], b"\0\0\0\0", b"\x01\0\0\0\0", b"\0\0\0\0\x09{}", b"\0\0\0\0\x02{}x"]
        {
            assert!(decode_stream_request::<Value>(wrong).is_err(), "{wrong:?}");
        }
        let two = [start.clone(), start].concat();
        assert!(
            decode_stream_request::<Value>(&two).is_err()
                && messages::<Value>(&two).unwrap().len() == 2
        );
        let text = |status| String::from_utf8_lossy(&ended(status, None)).into_owned();
        assert!(text(3).contains(r#""exitCode":3,"exited":true"#));
        assert!(text(-9).contains(r#""exitCode":137,"exited":false"#));
        assert!(ended(0, None).ends_with(b"\x02\0\0\0\x02{}"));
        let (wall, cpu) = (Duration::from_secs(2), Duration::from_millis(5));
        let cost = CommandCost { wall, cpu, peak_memory: Some(4096), output_bytes: 3 };
        let with_cost = String::from_utf8_lossy(&ended(0, Some(cost))).into_owned();
        let has = |part: &str| with_cost.contains(part);
        assert!(has(r#""cost":{""#) && has(r#""cpu_ms":5.0"#) && has(r#""wall_ms":2000.0"#));
        assert!(has(r#""peak_memory":4096"#) && has(r#""output_bytes":3"#));
        assert!(ended(i32::MIN, None).ends_with(b"\x02\0\0\0\x02{}"));
        let thrown =
            |name: &str| Thrown { name: name.to_owned(), message: "why".to_owned(), trace: None };
        let late =
            String::from_utf8(broken_off(&ConnectError::of(&thrown("TimeoutError")))).unwrap();
        assert!(late.starts_with('\x02') && late.contains("deadline_exceeded"));
        let status = |name| ConnectError::of(&thrown(name)).into_response().status();
        assert_eq!(status("FileNotFoundError"), StatusCode::NOT_FOUND);
        assert_eq!(status("ValueError"), StatusCode::BAD_REQUEST);
        let refusal = ErrorResponse::busy(StatusCode::BAD_GATEWAY, "later");
        assert_eq!(ConnectError::from(refusal).into_response().status(), StatusCode::BAD_GATEWAY);
    }

    #[tokio::test]
    async fn output_without_a_line_end_precedes_a_failure() {
        let failed = ConnectError::new("deadline_exceeded", "too late");
        for (end, why) in [
            (broken_off(&failed), "too late"),
            (Vec::new(), "the command was lost with its sandbox"),
        ] {
            let stream =
                [printed(Stream::Stderr, b"one\nthe ca"), printed(Stream::Stderr, b"use"), end];
            let body = http_body_util::StreamBody::new(futures_util::stream::iter(
                stream.map(|piece| Ok(http_body::Frame::data(Bytes::from(piece)))),
            ));
            let mut heard = String::new();
            let ended = follow(body, |_, text| heard.push_str(text)).await;
            assert_eq!((ended, heard.as_str()), (Err(why.to_owned()), "one\nthe cause"));
        }
    }

    #[test]
    fn a_limit_is_a_number_of_milliseconds() {
        let of = |text: &str| {
            let mut headers = hyper::HeaderMap::new();
            headers.insert(LIMIT, text.parse().unwrap());
            limit(&headers)
        };
        assert_eq!(of("1500"), Some(Duration::from_millis(1500)));
        for none in ["0", "-1", "NaN", "inf", "1e300", "soon"] {
            assert_eq!(of(none), None, "{none}");
        }
    }
}
