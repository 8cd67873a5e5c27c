//! Running code in E2B's shape: `/execute`, whose answer is a line of JSON for each event,
//! and begins as soon as the code prints something.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use afresh::CallCost;
use afresh_interpreter::{Answer as GuestAnswer, CELL, RUN, Stream};
use axum::Extension;
use axum::extract::State;
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::body::Meter;
use crate::error_response::ErrorResponse;
use crate::sandbox::agent::contexts::known_context;
use crate::sandbox::agent::streaming::{ResponseEncoding, run_streaming};
use crate::sandbox::http::authorization::AuthorizedSandbox;
use crate::sandbox::http::response::{Answer, json};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::request_body::requests::ExecuteRequest;

type All = State<Arc<Sandboxes>>;

pub(crate) async fn execute(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    Extension(meter): Extension<Meter>,
    body: Bytes,
) -> Answer {
    let wanted: ExecuteRequest = json(&body)?;
    let source = match all.template_of(&sandbox).config.linux {
        true => (CELL, cell(&sandbox, wanted)?),
        false => (RUN, plain(&all, &sandbox, wanted)?),
    };
    let encoding = ResponseEncoding { head, encode_output, encode_result, last };
    let mut response = run_streaming(all, sandbox, source, (encoding, meter.budget())).await?;
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// Code for a guest with contexts, as it reads it.
fn cell(sandbox: &Sandbox, wanted: ExecuteRequest) -> Result<String, ErrorResponse> {
    let mut envs = sandbox.settings.envs.clone();
    envs.extend(wanted.env_vars.unwrap_or_default().0);
    let cell = json!({
        "code": wanted.code,
        "language": wanted.language,
        "context": wanted.context_id,
        "envs": envs,
    });
    Ok(cell.to_string())
}

/// Code for a guest that has one context and no environment.
fn plain(
    all: &Sandboxes,
    sandbox: &Sandbox,
    wanted: ExecuteRequest,
) -> Result<String, ErrorResponse> {
    known_context(wanted.context_id.as_deref())?;
    let bad = |message: String| Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    if wanted.env_vars.is_some_and(|envs| !envs.0.is_empty()) {
        return bad("`env_vars` needs a template of a Linux program".to_owned());
    }
    let names = all.template_of(sandbox).language.names;
    if let Some(language) = wanted.language.as_deref().filter(|name| !names.contains(name)) {
        return bad(format!("this sandbox runs {}, not {language}", names.join(" or ")));
    }
    Ok(wanted.code)
}

/// The line for a result, which the guest made: an object in JSON, of one line.
fn encode_result(result: &[u8]) -> Option<Vec<u8>> {
    let fields = result.strip_prefix(b"{")?.strip_suffix(b"}")?;
    if result.contains(&b'\n') || serde_json::from_slice::<IgnoredAny>(result).is_err() {
        return None;
    }
    let comma: &[u8] = if fields.is_empty() { b"" } else { b"," };
    Some([b"{\"type\":\"result\"", comma, fields, b"}\n"].concat())
}

fn line(said: &impl Serialize) -> Vec<u8> {
    // Values of JSON, and structs of them, are always written.
    let mut line = serde_json::to_vec(said).unwrap_or_default();
    line.push(b'\n');
    line
}

fn head(number: u64) -> Vec<u8> {
    line(&json!({"type": "number_of_executions", "execution_count": number}))
}

/// The line for output.
fn encode_output(stream: Stream, text: &[u8]) -> Vec<u8> {
    let kind = match stream {
        // Code itself has no terminal.
        Stream::Stdout | Stream::Terminal => "stdout",
        Stream::Stderr => "stderr",
    };
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
    line(&json!({"type": kind, "text": String::from_utf8_lossy(text), "timestamp": nanos}))
}

/// The cost of a call. Bytes that a client did not take are not known.
fn cost(cost: &CallCost) -> Value {
    json!({
        "wall_ms": cost.wall.as_secs_f64() * 1e3,
        "cpu_ms": cost.cpu.as_secs_f64() * 1e3,
        "peak_memory": cost.peak_memory,
        "input_bytes": cost.input_bytes,
        "output_bytes": cost.output_bytes,
    })
}

/// The line for a value. It borrows the value, which may take much memory.
#[derive(Serialize)]
struct ValueLine<'a> {
    r#type: &'static str,
    text: &'a str,
    is_main_result: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    json: Option<&'a Value>,
}

/// The lines for the result of code. Clients of E2B read the type of the last one alone.
fn last(answer: &GuestAnswer, spent: Option<&CallCost>) -> Vec<u8> {
    let mut lines = match answer {
        GuestAnswer::Done => Vec::new(),
        GuestAnswer::Value(shown) => line(&ValueLine {
            r#type: "result",
            text: &shown.text,
            is_main_result: true,
            json: shown.json.as_ref().filter(|json| json.is_object() || json.is_array()),
        }),
        GuestAnswer::Threw(thrown) => line(&json!({
            "type": "error",
            "name": thrown.name,
            "value": thrown.message,
            "traceback": thrown.traceback(),
        })),
    };
    let mut end = json!({"type": "end_of_execution"});
    if let Some(spent) = spent {
        end["cost"] = cost(spent);
    }
    lines.extend(line(&end));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_one_line_before_the_end() {
        for (json, wanted) in [
            (json!([1]), r#"{"type":"result","text":"x","is_main_result":true,"json":[1]}"#),
            (json!(1), r#"{"type":"result","text":"x","is_main_result":true}"#),
        ] {
            let value =
                afresh_interpreter::RenderedValue { text: "x".to_owned(), json: Some(json) };
            let lines = String::from_utf8(last(&GuestAnswer::Value(value), None)).unwrap();
            assert_eq!(lines, format!("{wanted}\n{{\"type\":\"end_of_execution\"}}\n"));
        }
    }

    #[test]
    fn a_result_of_a_guest_is_one_line_and_no_other() {
        let shown = |text: &str| {
            encode_result(text.as_bytes()).map(|line| String::from_utf8(line).unwrap())
        };
        let line = "{\"type\":\"result\",\"text\":\"1\"}\n";
        assert_eq!(shown("{\"text\":\"1\"}").as_deref(), Some(line));
        assert_eq!(shown("{}").as_deref(), Some("{\"type\":\"result\"}\n"));
        for wrong in ["", "{", "[]", "{\"a\":1}\n{}", "{\"a\":}", "{} {}", "{\"a\"}", "1"] {
            assert_eq!(shown(wrong), None, "{wrong}");
        }
    }
}
