//! Failures of guests, as clients and the log see them.

pub(crate) use afresh::describe_error as describe;
use afresh::wasm;
use hyper::StatusCode;

use crate::error_response::ErrorResponse;

/// Why a guest did not answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// It took too long.
    #[error("the guest exceeded its time limit")]
    Timeout,
    /// The request does not fit the guest.
    #[error("the request does not fit the guest: {0}")]
    Request(String),
    /// It trapped, or returned an invalid answer.
    #[error("the guest failed: {0}")]
    Guest(String),
    /// No instance is available.
    #[error("no instance is available: {0}")]
    Instance(String),
    /// The host failed.
    #[error("the host failed: {0}")]
    Host(String),
}

/// The answer for a failure of this host, which is logged.
pub(crate) fn internal(error: &(dyn std::error::Error + 'static)) -> ErrorResponse {
    ErrorResponse::logged(StatusCode::INTERNAL_SERVER_ERROR, error)
}

impl Failure {
    /// Its name in metrics.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Request(_) => "request",
            Self::Guest(_) => "guest",
            Self::Instance(_) => "instance",
            Self::Host(_) => "host",
        }
    }
}

impl From<wasm::CallError> for Failure {
    fn from(error: wasm::CallError) -> Self {
        use wasm::CallError as Error;
        let text = describe(&error);
        match error {
            Error::Timeout(_) => Self::Timeout,
            Error::NoSuchExport { .. } | Error::NotARoot { .. } | Error::Arguments { .. } => {
                Self::Request(text)
            }
            Error::Trap { .. }
            | Error::Exception(_)
            | Error::OutOfFuel(_)
            | Error::Exit(_)
            | Error::Interface(_) => Self::Guest(text),
            _ => Self::Host(text),
        }
    }
}

impl From<wasm::WarmError> for Failure {
    fn from(error: wasm::WarmError) -> Self {
        Self::Instance(describe(&error))
    }
}

impl From<afresh::CallError> for Failure {
    fn from(error: afresh::CallError) -> Self {
        use afresh::CallError as Error;
        let text = describe(&error);
        match error {
            Error::Timeout { .. } => Self::Timeout,
            Error::Request { .. } => Self::Request(text),
            Error::Guest { .. } => Self::Guest(text),
            Error::Lease(_) => Self::Instance(text),
            _ => Self::Host(text),
        }
    }
}

impl From<Failure> for ErrorResponse {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Timeout => Self::timeout(),
            Failure::Request(_) => {
                Self::new(StatusCode::BAD_REQUEST, "the guest refuses this request; see its log")
            }
            Failure::Guest(_) => Self::guest(),
            Failure::Instance(_) => Self::unavailable(),
            Failure::Host(_) => Self::host(),
        }
    }
}
