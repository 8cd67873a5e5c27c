//! Commands in a sandbox, in the shape of E2B's agent: Connect's streams with JSON.
//!
//! A sandbox of a Linux program runs them; what a command has left running ends with it, so that the sandbox can be frozen
//! between two. So there is no process to be asked about later.

use std::collections::BTreeMap;
use std::sync::Arc;

use afresh_interpreter::{Answer as Came, COMMAND, Stream, Thrown};
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::envd::connect;
use super::registry::Sandboxes;
use super::routes::Inside;
use super::telling::{Shape, told};

/// What is said of a message that ends a stream.
const LAST: u8 = 2;
/// How long a client may have a command run, in its own words.
const TIMEOUT: &str = "connect-timeout-ms";

#[derive(Deserialize)]
struct Start {
    process: Process,
    pty: Option<Value>,
    #[serde(default)]
    stdin: bool,
}

#[derive(Deserialize)]
struct Process {
    cmd: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    envs: BTreeMap<String, String>,
    cwd: Option<String>,
}

/// The agent's operations on processes.
pub(super) async fn process(
    State(all): State<Arc<Sandboxes>>,
    Inside(sandbox): Inside,
    Path(method): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let unknown = |why: &str| {
        let message = format!("{method} is not there in this sandbox: {why}");
        connect(StatusCode::NOT_IMPLEMENTED, "unimplemented", &message)
    };
    if !all.template(&sandbox.template).config.linux {
        return unknown("it evaluates code, and has no processes");
    }
    match method.as_str() {
        "Start" => {}
        "List" => return axum::Json(json!({ "processes": [] })).into_response(),
        "SendSignal" | "SendInput" | "CloseStdin" | "Connect" | "Update" => {
            let message = "there is no such process: none outlives its command";
            return connect(StatusCode::NOT_FOUND, "not_found", message);
        }
        _ => return unknown("it is not known"),
    }
    let start = match asked(&body) {
        Ok(start) => start,
        Err(why) => return connect(StatusCode::BAD_REQUEST, "invalid_argument", &why),
    };
    if start.pty.is_some() || start.stdin {
        return unknown("commands have no terminal here, and no input");
    }
    let limit = headers.get(TIMEOUT).and_then(|limit| limit.to_str().ok()?.parse::<f64>().ok());
    let source = json!({
        "cmd": start.process.cmd,
        "args": start.process.args,
        "envs": start.process.envs,
        "cwd": start.process.cwd,
        "timeout": limit.map(|limit| limit / 1000.0),
    });
    // Clients wait for its number before they go on.
    let shape = Shape { head, at_once: true, tell, last };
    match told(all, sandbox, (COMMAND, source.to_string()), shape).await {
        Ok(mut response) => {
            let kind = HeaderValue::from_static("application/connect+json");
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        Err(refusal) => refusal.into_response(),
    }
}

/// What is asked, in the one message of a stream.
fn asked(body: &[u8]) -> Result<Start, String> {
    let (head, message) = body.split_first_chunk::<5>().ok_or("the stream has no message")?;
    if head[0] != 0 {
        return Err("a message comes as it is: without compression".to_owned());
    }
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let message = message.get(..length).ok_or("the message breaks off")?;
    serde_json::from_slice(message).map_err(|error| error.to_string())
}

fn message(flags: u8, said: &Value) -> Vec<u8> {
    let said = said.to_string();
    let length = u32::try_from(said.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[flags], &length[..], said.as_bytes()].concat()
}

fn event(event: &Value) -> Vec<u8> {
    message(0, &json!({ "event": event }))
}

fn head(number: u64) -> Vec<u8> {
    event(&json!({"start": {"pid": number}}))
}

fn tell(stream: Stream, bytes: &[u8]) -> Vec<u8> {
    let name = match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    };
    event(&json!({"data": {name: STANDARD.encode(bytes)}}))
}

/// How a command ended, and the end of the stream.
fn last(came: &Came) -> Vec<u8> {
    let failed =
        |code: &str, why: String| message(LAST, &json!({"error": {"code": code, "message": why}}));
    match came {
        Came::Value(shown) => {
            let status = shown.json.as_ref().and_then(Value::as_i64).unwrap_or(-1);
            let end = match status {
                0.. => {
                    json!({"exitCode": status, "exited": true, "status": format!("exit status {status}")})
                }
                _ => {
                    json!({"exitCode": 128 - status, "exited": false, "status": format!("signal {}", -status)})
                }
            };
            [event(&json!({ "end": end })), message(LAST, &json!({}))].concat()
        }
        Came::Done => failed("deadline_exceeded", "the command ran longer than it may".to_owned()),
        Came::Threw(Thrown { name, message, .. }) => match name.as_str() {
            "TimeoutError" => failed("deadline_exceeded", message.clone()),
            "FileNotFoundError" => failed("not_found", message.clone()),
            _ => failed("aborted", format!("{name}: {message}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_and_written_as_connect_has_them() {
        let start = message(0, &json!({"process": {"cmd": "/bin/bash", "args": ["-c", "x"]}}));
        assert_eq!(asked(&start).unwrap().process.args, ["-c", "x"]);
        for wrong in [&b""[..], b"\0\0\0\0", b"\x01\0\0\0\0", b"\0\0\0\0\x09{}", b"\0\0\0\0\x02{}"]
        {
            assert!(asked(wrong).is_err(), "{wrong:?}");
        }
        let shown = |json: Value| {
            Came::Value(afresh_interpreter::Shown { text: String::new(), json: Some(json) })
        };
        let text = |came: &Came| String::from_utf8_lossy(&last(came)).into_owned();
        assert!(text(&shown(json!(3))).contains(r#""exitCode":3,"exited":true"#));
        assert!(text(&shown(json!(-9))).contains(r#""exitCode":137,"exited":false"#));
        assert!(text(&Came::Done).contains("deadline_exceeded"));
        assert!(last(&shown(json!(0))).ends_with(b"\x02\0\0\0\x02{}"));
    }
}
