//! Random names.

use hyper::StatusCode;

use crate::error_response::ErrorResponse;

/// Random bytes, as text.
pub(super) fn random(bytes: usize) -> Result<String, ErrorResponse> {
    let mut random = vec![0; bytes];
    let filled = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(bytes) {
        let message = "the host has no randomness to name a sandbox with";
        return Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, message));
    }
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
