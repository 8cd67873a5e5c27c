//! Bodies and answers of requests, in JSON.

use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use serde::de::DeserializeOwned;

use crate::error_response::ErrorResponse;
use crate::sandbox::tenants::entry_size::{check_label_bytes, encoded_length};

/// The answer of a handler.
pub(crate) type Answer = Result<Response, ErrorResponse>;

/// An answer in JSON.
pub(crate) fn answer(status: StatusCode, value: &serde_json::Value) -> Response {
    (status, axum::Json(value)).into_response()
}

/// A body as JSON; nothing is an empty object.
pub(crate) fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ErrorResponse> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| {
        ErrorResponse::new(
            StatusCode::BAD_REQUEST,
            format!("the body is not what it should be: {error}"),
        )
    })
}

/// Refuses names that are too long, since they are stored with the sandbox.
pub(crate) fn check_label_lengths<'a>(
    names: impl IntoIterator<Item = &'a String>,
) -> Result<(), ErrorResponse> {
    check_label_bytes(names.into_iter().map(|name| encoded_length(name)).sum())
}

/// Milliseconds since 1970, as RFC 3339 writes them.
pub(crate) fn rfc3339(time: std::time::SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}
