//! Contexts of code in E2B's shape: made, listed, restarted and removed.
//!
//! Promises: code in one context does not see the names of another. A guest of a Linux program has
//! many, another one has `default` alone, whose restart takes the code back to that of the template
//! and keeps the files.

use std::sync::Arc;

use afresh_interpreter::Answer as GuestAnswer;
use axum::extract::{Path, State};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::http::authorization::AuthorizedSandbox;
use crate::sandbox::http::response::{Answer, answer, check_label_lengths, json};
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::{Sandbox, command};
use crate::sandbox::request_body::requests::ContextRequest;

type All = State<Arc<Sandboxes>>;

/// The context of code that names none.
const CONTEXT: &str = "default";

/// Refuses a context that a guest without further ones does not have.
pub(crate) fn known_context(id: Option<&str>) -> Result<(), ErrorResponse> {
    match id {
        None | Some(CONTEXT) => Ok(()),
        Some(other) => {
            let message =
                format!("the context {other} was not found; this sandbox has `{CONTEXT}`");
            Err(ErrorResponse::new(StatusCode::NOT_FOUND, message))
        }
    }
}

fn has_contexts(all: &Sandboxes, sandbox: &Sandbox) -> bool {
    all.template_of(sandbox).config.linux
}

/// Asks the guest about its contexts.
async fn ask(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    wanted: Value,
) -> Result<Value, ErrorResponse> {
    let language = all.template_of(sandbox).language;
    let (own, mut router) = (sandbox.clone(), all.output_router(sandbox));
    all.with(sandbox, move |session| {
        let mut mark = lock(&own.mark);
        match command(session, language, &wanted, &mut mark, &mut router)? {
            GuestAnswer::Value(shown) => Ok(shown.json.unwrap_or_default()),
            GuestAnswer::Done => Ok(Value::Null),
            GuestAnswer::Threw(thrown) => {
                let status = match thrown.name.as_str() {
                    "TimeoutError" => StatusCode::GATEWAY_TIMEOUT,
                    "ValueError" | "NotADirectoryError" => StatusCode::BAD_REQUEST,
                    _ => StatusCode::INTERNAL_SERVER_ERROR,
                };
                Err(ErrorResponse::new(status, thrown.message))
            }
        }
    })
    .await
}

pub(crate) async fn list(State(all): All, AuthorizedSandbox(sandbox): AuthorizedSandbox) -> Answer {
    let listed = match has_contexts(&all, &sandbox) {
        true => ask(&all, &sandbox, json!({"op": "list_contexts"})).await?,
        false => {
            let language = all.template_of(&sandbox).language.name();
            json!([{"id": CONTEXT, "language": language, "cwd": "/"}])
        }
    };
    Ok(answer(StatusCode::OK, &listed))
}

pub(crate) async fn create(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    body: Bytes,
) -> Answer {
    let wanted: ContextRequest = json(&body)?;
    check_label_lengths(wanted.language.iter().chain(&wanted.cwd))?;
    if !has_contexts(&all, &sandbox) {
        let message = "a sandbox that is no Linux program has one context; fork it for another";
        return Err(ErrorResponse::new(StatusCode::NOT_IMPLEMENTED, message));
    }
    let (language, cwd) = (wanted.language, wanted.cwd);
    let wanted =
        json!({"op": "create_context", "id": random(16)?, "language": language, "cwd": cwd});
    Ok(answer(StatusCode::OK, &ask(&all, &sandbox, wanted).await?))
}

/// Does something with one context of a guest that has several.
async fn change(all: &Arc<Sandboxes>, sandbox: &Arc<Sandbox>, op: &str, id: String) -> Answer {
    let found = ask(all, sandbox, json!({"op": op, "id": id})).await?;
    if found != Value::Bool(true) {
        let message = format!("the context {id} was not found");
        return Err(ErrorResponse::new(StatusCode::NOT_FOUND, message));
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(crate) async fn remove(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    Path(id): Path<String>,
) -> Answer {
    if !has_contexts(&all, &sandbox) {
        known_context(Some(&id))?;
        let message = "the first context stays; restart it to empty it";
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    change(&all, &sandbox, "remove_context", id).await
}

pub(crate) async fn restart(
    State(all): All,
    AuthorizedSandbox(sandbox): AuthorizedSandbox,
    Path(id): Path<String>,
) -> Answer {
    if has_contexts(&all, &sandbox) {
        return change(&all, &sandbox, "restart_context", id).await;
    }
    known_context(Some(&id))?;
    all.restart_code(&sandbox).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
