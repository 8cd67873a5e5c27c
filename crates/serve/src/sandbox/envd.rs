//! What E2B's agent answers within a sandbox, as far as there is something to answer.

use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use serde_json::json;

use super::routes::{Inside, answer};

/// The sandbox is there.
pub(super) async fn health(_: Inside) -> StatusCode {
    StatusCode::NO_CONTENT
}

/// An operation of Connect that these sandboxes have not.
pub(super) async fn not_there(_: Inside, Path(method): Path<String>) -> Response {
    let message = format!(
        "{method} is not there in this sandbox: it runs code, and has no processes or files"
    );
    answer(StatusCode::NOT_IMPLEMENTED, &json!({"code": "unimplemented", "message": message}))
        .into_response()
}
