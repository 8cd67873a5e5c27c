//! Every way in which a request is answered by the server instead of a guest: a status, and why, as JSON.
//!
//! What it promises: what a client is told names what it can do about it, and nothing of other clients or of
//! this host. What went wrong inside is logged.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http_body_util::Full;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use serde_json::json;

use crate::gate::Turned;

/// Why a request was not answered by whom it was for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// Whether the same request may succeed later.
    pub(crate) later: bool,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), later: false }
    }

    /// One that may be tried again.
    pub(crate) fn busy(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), later: true }
    }

    pub(crate) fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "no guest answers for this path")
    }

    pub(crate) fn too_large(most: usize) -> Self {
        let message = format!("the body is larger than the {most} bytes that this route takes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    pub(crate) fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "the body took too long to arrive")
    }

    pub(crate) fn no_memory() -> Self {
        let message = "the server holds as much of other requests as it may; try again";
        Self::busy(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub(crate) fn timeout() -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "the guest took longer than this route allows")
    }

    pub(crate) fn guest() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the guest failed")
    }

    pub(crate) fn host() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the server failed to run the guest")
    }

    pub(crate) fn unavailable() -> Self {
        let message = "no instance of the guest can be had; try again";
        Self::busy(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}

impl From<Turned> for Refusal {
    fn from(turned: Turned) -> Self {
        match turned {
            Turned::LineFull => Self::busy(
                StatusCode::TOO_MANY_REQUESTS,
                "as many requests of this route wait as may; send fewer at a time",
            ),
            Turned::TooLate => Self::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "no place became free in the time that this route allows; try again",
            ),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let text = json!({"code": self.status.as_u16(), "message": self.message}).to_string();
        let mut response = Response::new(Body::new(Full::from(text)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.later {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
