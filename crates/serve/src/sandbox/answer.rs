//! Bodies and answers of requests, in JSON.

use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use serde::de::DeserializeOwned;

use crate::error_response::ErrorResponse;

/// The answer of a handler.
pub(super) type Answer = Result<Response, ErrorResponse>;

/// An answer in JSON.
pub(super) fn answer(status: StatusCode, value: &serde_json::Value) -> Response {
    (status, axum::Json(value)).into_response()
}

/// A body as JSON; nothing is an empty object.
pub(super) fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ErrorResponse> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| {
        ErrorResponse::new(
            StatusCode::BAD_REQUEST,
            format!("the body is not what it should be: {error}"),
        )
    })
}

/// Maximum bytes of all labels of a sandbox together.
const MAX_LABEL_BYTES: usize = 16 << 10;

/// Refuses names that are too long, since they are stored with the sandbox.
pub(super) fn short<'a>(names: impl IntoIterator<Item = &'a String>) -> Result<(), ErrorResponse> {
    let bytes: usize = names.into_iter().map(String::len).sum();
    if bytes > MAX_LABEL_BYTES {
        let message =
            format!("names, labels and rules have {bytes} bytes; they may have {MAX_LABEL_BYTES}");
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
    }
    Ok(())
}

/// Milliseconds since 1970, as RFC 3339 writes them.
pub(super) fn rfc3339(time: std::time::SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}
