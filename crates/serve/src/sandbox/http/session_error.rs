//! Errors of sessions as answers to clients.

use afresh::SessionError;
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::failure::describe;

/// The answer to a client for a refusal of its session.
pub(crate) fn refused(error: &SessionError) -> ErrorResponse {
    let status = match error {
        SessionError::Tree(_) => StatusCode::NOT_FOUND,
        SessionError::Guest(_) => StatusCode::BAD_REQUEST,
        SessionError::NoFiles(_) => StatusCode::NOT_IMPLEMENTED,
        SessionError::Failed { .. } => StatusCode::CONFLICT,
        SessionError::Call(afresh::CallError::Request { .. }) => StatusCode::BAD_REQUEST,
        // Other errors may name things of this host.
        SessionError::Call(afresh::CallError::Lease(_)) => {
            let logged = ErrorResponse::logged(StatusCode::SERVICE_UNAVAILABLE, error);
            return ErrorResponse { later: true, ..logged };
        }
        _ => return ErrorResponse::logged(StatusCode::INTERNAL_SERVER_ERROR, error),
    };
    ErrorResponse::new(status, describe(error))
}
