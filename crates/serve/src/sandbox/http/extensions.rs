//! Extensions to E2B: named checkpoints, rollbacks, the tree of states, and differences.
//!
//! `openapi.json` describes it, and a test holds it against the routes.

use afresh::snapshot::SnapshotInfo;
use axum::extract::{Path, Query};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::sandbox::agent::connect::went_back;
use crate::sandbox::http::authorization::TenantSandbox;
use crate::sandbox::http::response::{Answer, answer, check_label_lengths, json};
use crate::sandbox::http::session_error::refused;
use crate::sandbox::request_body::checkpoint_requests::{CheckpointName, RollbackTarget};

/// The OpenAPI description of the operations.
const OPENAPI: &str = include_str!("openapi.json");

/// Maximum states in a sandbox tree: each holds pages, and a name.
const MAX_STATES: usize = 1000;

/// Maximum ranges of pages in a difference.
const MAX_RANGES: usize = 1000;

#[derive(Deserialize)]
pub(crate) struct DiffRequest {
    from: String,
    to: String,
}

pub(crate) async fn checkpoint(chosen: TenantSandbox, body: Bytes) -> Answer {
    let CheckpointName { name } = json(&body)?;
    if name.is_empty() {
        return Err(ErrorResponse::new(
            StatusCode::BAD_REQUEST,
            "the checkpoint has no name: set `name`",
        ));
    }
    check_label_lengths([&name])?;
    let (all, sandbox) = chosen.sandbox()?;
    // It keeps the present memory and files.
    all.check_memory(&sandbox.tenant, 1)?;
    let own = sandbox.clone();
    let made = all
        .with(&sandbox, move |session| {
            if session.tree().len() >= MAX_STATES {
                let message =
                    format!("a sandbox has at most {MAX_STATES} states; drop a checkpoint");
                return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
            }
            let id = session.checkpoint(&name).map_err(|error| refused(&error))?;
            own.note_checkpoints(session);
            Ok(json!({"checkpointID": id.to_string(), "name": name}))
        })
        .await?;
    Ok(answer(StatusCode::CREATED, &made))
}

pub(crate) async fn drop_checkpoint(
    chosen: TenantSandbox,
    Path((_, checkpoint)): Path<(String, String)>,
) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    let own = sandbox.clone();
    all.with(&sandbox, move |session| {
        let state = session.find_state(&checkpoint).map_err(|error| refused(&error))?;
        if session.tree().iter().any(|info| info.id == state && info.name.is_none()) {
            let message = format!(
                "the state {state} is no checkpoint: it has no name, and is dropped once no sandbox \
                 needs it"
            );
            return Err(ErrorResponse::new(StatusCode::CONFLICT, message));
        }
        let dropped = session.drop_checkpoint(state);
        own.note_checkpoints(session);
        dropped.map_err(|error| refused(&error))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(crate) async fn rollback(chosen: TenantSandbox, body: Bytes) -> Answer {
    let RollbackTarget { to } = json(&body)?;
    let (all, sandbox) = chosen.sandbox()?;
    let own = sandbox.clone();
    let at = all
        .with(&sandbox, move |session| {
            let state = session.find_state(&to);
            let state = state.map_err(|error| refused(&error))?;
            own.roll_back(session, state, &went_back())
        })
        .await?;
    Ok(answer(StatusCode::OK, &json!({"checkpointID": at.to_string()})))
}

/// A state of the tree. A state that only sandboxes stand on, or can be undone to, has no name.
fn state(info: &SnapshotInfo) -> Value {
    json!({
        "checkpointID": info.id.to_string(),
        "parentID": info.parent.map(|parent| parent.to_string()),
        "name": info.name,
        "storedPages": info.stored_pages,
        "ownPages": info.own_pages,
        "ownBytes": info.own_bytes,
    })
}

pub(crate) async fn tree(chosen: TenantSandbox) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    let tree = all
        .with(&sandbox, |session| {
            let states: Vec<Value> = session.tree().iter().map(state).collect();
            Ok(json!({"at": session.at().to_string(), "states": states}))
        })
        .await?;
    Ok(answer(StatusCode::OK, &tree))
}

pub(crate) async fn diff(
    chosen: TenantSandbox,
    Query(DiffRequest { from, to }): Query<DiffRequest>,
) -> Answer {
    let (all, sandbox) = chosen.sandbox()?;
    let differs = all
        .with(&sandbox, move |session| {
            let state = |text: &str| session.find_state(text).map_err(|error| refused(&error));
            let found = session.diff(state(&from)?, state(&to)?);
            let found = found.map_err(|error| refused(&error))?;
            let ranges = found.ranges.iter().take(MAX_RANGES).map(|(memory, range)| {
                json!({"memory": memory, "start": range.start, "end": range.end()})
            });
            let ranges: Vec<Value> = ranges.collect();
            Ok(json!({
                "pages": found.pages,
                "bytes": found.bytes,
                "state": found.state,
                "ranges": ranges,
            }))
        })
        .await?;
    Ok(answer(StatusCode::OK, &differs))
}

pub(crate) async fn openapi() -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, kind)], OPENAPI).into_response()
}
