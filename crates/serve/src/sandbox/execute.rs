//! Running code in E2B's shape: `/execute`, whose answer is a line of JSON for each event,
//! and begins as soon as the code prints something.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use afresh_interpreter::{Answer as GuestAnswer, Stream};
use axum::extract::{Path, State};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};

use super::connect::went_back;
use super::registry::Sandboxes;
use super::requests::ExecuteRequest;
use super::routes::{Answer, AuthorizedSandbox, answer, json};
use super::streaming::{Shape, run_streaming};
use crate::error_response::ErrorResponse;

type All = State<Arc<Sandboxes>>;

/// The one context that a sandbox has.
const CONTEXT: &str = "default";

fn known_context(id: Option<&str>) -> Result<(), ErrorResponse> {
    match id {
        None | Some(CONTEXT) => Ok(()),
        Some(other) => {
            let message = format!("the context {other} was not found; a sandbox has `{CONTEXT}`");
            Err(ErrorResponse::new(StatusCode::NOT_FOUND, message))
        }
    }
}

pub(super) async fn execute(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    body: Bytes,
) -> Answer {
    let wanted: ExecuteRequest = json(&body)?;
    known_context(wanted.context_id.as_deref())?;
    let template = all.template(&sandbox.template).clone();
    let names = template.language.names;
    if let Some(language) = wanted.language.as_deref().filter(|name| !names.contains(name)) {
        let message = format!("this sandbox runs {}, not {language}", names.join(" or "));
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    let shape = Shape { head, tell, last };
    let mut response = run_streaming(all, sandbox, wanted.code, shape).await?;
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
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

fn context(all: &Sandboxes, template: &str) -> Value {
    let language = all.template(template).language.name();
    json!({"id": CONTEXT, "language": language, "cwd": "/"})
}

pub(super) async fn contexts(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
) -> Answer {
    Ok(answer(StatusCode::OK, &json!([context(&all, &sandbox.template)])))
}

pub(super) async fn no_context(AuthorizedSandbox(_): AuthorizedSandbox) -> ErrorResponse {
    let message = "a sandbox has one context; fork the sandbox for another";
    ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, message)
}

/// Takes the sandbox back to how its template is.
pub(super) async fn restart(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    Path(id): Path<String>,
) -> Answer {
    known_context(Some(&id))?;
    let commands = sandbox.commands.clone();
    all.with(&sandbox, move |session| {
        let root = session.tree().first().map(|state| state.id);
        let root =
            root.ok_or_else(|| ErrorResponse::new(StatusCode::CONFLICT, "its root was dropped"))?;
        session.rollback(root).map_err(|error| super::sandbox::refused(&error))?;
        commands.dismiss(&went_back());
        Ok(())
    })
    .await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
