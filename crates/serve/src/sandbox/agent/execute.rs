//! Running code in E2B's shape: `/execute`, whose answer is a line of JSON for each event,
//! and begins as soon as the code prints something.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use afresh_interpreter::{Answer as GuestAnswer, CELL, RUN, Stream};
use axum::extract::State;
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::sandbox::agent::contexts::known_context;
use crate::sandbox::agent::streaming::{Shape, run_streaming};
use crate::sandbox::bodies::requests::ExecuteRequest;
use crate::sandbox::http::answer::{Answer, json};
use crate::sandbox::http::authorization::AuthorizedSandbox;
use crate::sandbox::life::registry::Sandboxes;
use crate::sandbox::life::sandbox::Sandbox;

type All = State<Arc<Sandboxes>>;

pub(crate) async fn execute(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    body: Bytes,
) -> Answer {
    let wanted: ExecuteRequest = json(&body)?;
    let source = match all.template(&sandbox.template).config.linux {
        true => (CELL, cell(&sandbox, wanted)?),
        false => (RUN, plain(&all, &sandbox, wanted)?),
    };
    let shape = Shape { head, tell, show, last };
    let mut response = run_streaming(all, sandbox, source, shape).await?;
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
    let names = all.template(&sandbox.template).language.names;
    if let Some(language) = wanted.language.as_deref().filter(|name| !names.contains(name)) {
        return bad(format!("this sandbox runs {}, not {language}", names.join(" or ")));
    }
    Ok(wanted.code)
}

/// The line for a result, which the guest made: an object in JSON, of one line.
fn show(result: &[u8]) -> Option<Vec<u8>> {
    let fields = result.strip_prefix(b"{")?.strip_suffix(b"}")?;
    if result.contains(&b'\n') || serde_json::from_slice::<IgnoredAny>(result).is_err() {
        return None;
    }
    let comma: &[u8] = if fields.is_empty() { b"" } else { b"," };
    Some([b"{\"type\":\"result\"", comma, fields, b"}\n"].concat())
}

fn line(said: &Value) -> Vec<u8> {
    format!("{said}\n").into_bytes()
}

fn head(number: u64) -> Vec<u8> {
    line(&json!({"type": "number_of_executions", "execution_count": number}))
}

/// The line for output.
fn tell(stream: Stream, text: &[u8]) -> Vec<u8> {
    let kind = match stream {
        // Code itself has no terminal.
        Stream::Stdout | Stream::Terminal => "stdout",
        Stream::Stderr => "stderr",
    };
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
    line(&json!({"type": kind, "text": String::from_utf8_lossy(text), "timestamp": nanos}))
}

/// The lines for the result of code.
fn last(answer: &GuestAnswer) -> Vec<u8> {
    let came = match answer {
        GuestAnswer::Done => None,
        GuestAnswer::Value(shown) => {
            let mut said = json!({"type": "result", "text": shown.text, "is_main_result": true});
            if let Some(json @ (Value::Object(_) | Value::Array(_))) = &shown.json {
                said["json"] = json.clone();
            }
            Some(said)
        }
        GuestAnswer::Threw(thrown) => Some(json!({
            "type": "error",
            "name": thrown.name,
            "value": thrown.message,
            "traceback": thrown.traceback(),
        })),
    };
    let end = json!({"type": "end_of_execution"});
    came.iter().chain([&end]).flat_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_of_a_guest_is_one_line_and_no_other() {
        let shown = |text: &str| show(text.as_bytes()).map(|line| String::from_utf8(line).unwrap());
        let line = "{\"type\":\"result\",\"text\":\"1\"}\n";
        assert_eq!(shown("{\"text\":\"1\"}").as_deref(), Some(line));
        assert_eq!(shown("{}").as_deref(), Some("{\"type\":\"result\"}\n"));
        for wrong in ["", "{", "[]", "{\"a\":1}\n{}", "{\"a\":}", "{} {}", "{\"a\"}", "1"] {
            assert_eq!(shown(wrong), None, "{wrong}");
        }
    }
}
