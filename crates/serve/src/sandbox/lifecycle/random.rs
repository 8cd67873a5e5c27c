//! Random names of sandboxes.

use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::random::hex_digits;

/// Random bytes, as text.
pub(crate) fn random(bytes: usize) -> Result<String, ErrorResponse> {
    hex_digits(bytes).ok_or_else(|| {
        let message = "the host has no randomness to name a sandbox with";
        ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message)
    })
}
