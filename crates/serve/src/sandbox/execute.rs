//! Running code in E2B's shape: `/execute`, whose answer is a line of JSON for each thing that came of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};

use super::language::{Outcome, Stream};
use super::one::run;
use super::registry::Sandboxes;
use super::routes::{Answer, Inside, answer, json};
use crate::refusal::Refusal;

type All = State<Arc<Sandboxes>>;

/// The one context that a sandbox has.
const CONTEXT: &str = "default";

#[derive(Deserialize)]
pub(super) struct Code {
    code: String,
    language: Option<String>,
    context_id: Option<String>,
}

fn known_context(id: Option<&str>) -> Result<(), Refusal> {
    match id {
        None | Some(CONTEXT) => Ok(()),
        Some(other) => {
            let message = format!("the context {other} was not found; a sandbox has `{CONTEXT}`");
            Err(Refusal::new(StatusCode::NOT_FOUND, message))
        }
    }
}

pub(super) async fn execute(State(all): All, Inside(sandbox): Inside, body: Bytes) -> Answer {
    let wanted: Code = json(&body)?;
    known_context(wanted.context_id.as_deref())?;
    let template = all.template(&sandbox.template).clone();
    let names = template.language.names();
    if let Some(language) = wanted.language.as_deref().filter(|name| !names.contains(name)) {
        let message = format!("this sandbox runs {}, not {language}", names.join(" or "));
        return Err(Refusal::new(StatusCode::BAD_REQUEST, message));
    }
    let own = sandbox.clone();
    let outcome = all
        .with(&sandbox, move |session| {
            let mut mark = own.mark.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let how = (template.language, template.config.call.as_str());
            run(session, how, &wanted.code, &mut mark)
        })
        .await?;
    let number = sandbox.runs.fetch_add(1, Ordering::Relaxed) + 1;
    let mut response = Response::new(Body::from(lines(&outcome, number)));
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// What came of code, a line each, in the order in which it happened.
fn lines(outcome: &Outcome, number: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let now = u64::try_from(now).unwrap_or(u64::MAX);
    let mut lines = vec![json!({"type": "number_of_executions", "execution_count": number})];
    for (stream, text) in &outcome.printed {
        let stream = match stream {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        };
        lines.push(json!({"type": stream, "text": text, "timestamp": now}));
    }
    if let Some(value) = &outcome.value {
        let mut line = json!({"type": "result", "text": value.text, "is_main_result": true});
        if let Some(json @ (Value::Object(_) | Value::Array(_))) = &value.json {
            line["json"] = json.clone();
        }
        lines.push(line);
    }
    if let Some(error) = &outcome.error {
        let (name, value, traceback) = (&error.name, &error.value, &error.traceback);
        lines.push(json!({"type": "error", "name": name, "value": value, "traceback": traceback}));
    }
    lines.push(json!({"type": "end_of_execution"}));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn context(all: &Sandboxes, template: &str) -> Value {
    let language = all.template(template).language.names()[0];
    json!({"id": CONTEXT, "language": language, "cwd": "/"})
}

pub(super) async fn contexts(State(all): All, Inside(sandbox): Inside) -> Answer {
    Ok(answer(StatusCode::OK, &json!([context(&all, &sandbox.template)])))
}

pub(super) async fn no_context(Inside(_): Inside) -> Refusal {
    let message = "a sandbox has one context; fork the sandbox for another";
    Refusal::new(StatusCode::NOT_IMPLEMENTED, message)
}

/// Takes the sandbox back to how its template is.
pub(super) async fn restart(
    State(all): All,
    Inside(sandbox): Inside,
    Path(id): Path<String>,
) -> Answer {
    known_context(Some(&id))?;
    all.with(&sandbox, |session| {
        let root = session.tree().first().map(|state| state.id);
        let root =
            root.ok_or_else(|| Refusal::new(StatusCode::CONFLICT, "its root was dropped"))?;
        session.rollback(root).map_err(|error| super::one::refused(&error))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
