//! Every way in which a request is answered by the server instead of a guest: a status, and why, as
//! JSON.
//!
//! Promises: the message to a client names the way out, and reveals nothing of other clients or of
//! this host. Internal errors are logged.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http_body_util::Full;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use serde_json::json;

use crate::concurrency::RejectionReason;
use crate::disk_full::is_disk_full;
use afresh::describe_error as describe;

/// Seconds after which a client may try again, where the server knows no better.
const RETRY_SECONDS: u64 = 1;

/// The owner of a budget that a request exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BudgetOwner {
    Tenant,
    Server,
    Address,
}

impl BudgetOwner {
    fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Server => "server",
            Self::Address => "address",
        }
    }
}

/// A budget that is used up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BudgetExcess {
    pub(crate) owner: BudgetOwner,
    /// The key of the configuration that sets it, or the name of a fixed limit.
    pub(crate) name: &'static str,
    pub(crate) limit: u64,
    pub(crate) used: u64,
    /// Seconds until the budget may have room again.
    pub(crate) retry_after: u64,
    /// The way out.
    pub(crate) advice: &'static str,
}

/// The reason why the server answers in place of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ErrorResponse {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// Whether the same request may succeed later.
    pub(crate) later: bool,
    /// The budget that the request exceeds.
    pub(crate) budget: Option<Box<BudgetExcess>>,
    /// The id of the sandbox that was not found, in the form of E2B's edge.
    pub(crate) sandbox: Option<Box<str>>,
}

impl ErrorResponse {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), later: false, budget: None, sandbox: None }
    }

    /// One that may be tried again.
    pub(crate) fn busy(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), later: true, budget: None, sandbox: None }
    }

    /// Whether the request may have had its effect.
    pub(crate) fn is_unknown(&self) -> bool {
        self.status == StatusCode::GATEWAY_TIMEOUT
    }

    /// Whether a budget of the tenant is used up, in which the tenant can make room.
    pub(crate) fn is_of_tenant(&self) -> bool {
        self.budget.as_ref().is_some_and(|excess| excess.owner == BudgetOwner::Tenant)
    }

    /// Time after which the same request may succeed, if it may.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let seconds = self.budget.as_ref().map_or(RETRY_SECONDS, |excess| excess.retry_after);
        self.later.then_some(Duration::from_secs(seconds))
    }

    /// The answer after work that the host may not answer for any more, since its lease is unsure.
    pub(crate) fn unknown_outcome() -> Self {
        Self::new(
            StatusCode::GATEWAY_TIMEOUT,
            "this host is not sure that the sandbox is still its own, and the outcome of this request is unknown: \
             read the state of the sandbox before you send it again",
        )
    }

    /// A refusal for a budget: 429 for a client's own, 503 for one of all clients together.
    pub(crate) fn over_budget(excess: BudgetExcess) -> Self {
        let status = match excess.owner {
            BudgetOwner::Tenant | BudgetOwner::Address => StatusCode::TOO_MANY_REQUESTS,
            BudgetOwner::Server => StatusCode::SERVICE_UNAVAILABLE,
        };
        let (owner, BudgetExcess { name, limit, used, retry_after, advice, .. }) =
            (excess.owner.name(), &excess);
        let message = format!(
            "the {owner}'s budget `{name}` is used up: {used} of {limit}; {advice}, or try again after {retry_after} s"
        );
        Self { budget: Some(Box::new(excess)), ..Self::busy(status, message) }
    }

    /// A failure inside the server. Its text may name files of this host, so it goes to the log,
    /// under the number that the client gets.
    pub(crate) fn logged(status: StatusCode, error: &(dyn std::error::Error + 'static)) -> Self {
        let mut bytes = [0; 8];
        // Without randomness the number is the same as another's, at worst.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
        let number = format!("{:016x}", u64::from_ne_bytes(bytes));
        tracing::error!(number, why = describe(error), "a request failed inside the server");
        if is_disk_full(error) {
            return Self::disk_full();
        }
        Self::new(status, format!("the server failed; its log has the cause under {number}"))
    }

    /// Nothing could be written. The sandbox is as it was.
    pub(crate) fn disk_full() -> Self {
        Self::busy(
            StatusCode::INSUFFICIENT_STORAGE,
            "the disk of the server is full, and nothing was saved; try again once there is room",
        )
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
        let message = "the server holds as much of your other requests, or of all requests, as it may; send fewer or \
                       smaller ones at a time, or try again";
        Self::busy(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// A request that may not be sent again has run, and its answer does not fit.
    pub(crate) fn no_answer_memory() -> Self {
        let message = "the request has run, and the server has no memory for its answer, since it holds as much of your \
                       other requests, or of all requests, as it may; read the state of the sandbox before you send \
                       it again";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The buffers of another connection to a program do not fit.
    #[cfg(linux_guests)]
    pub(crate) fn no_connection_memory() -> Self {
        let message = "the connections to programs of this tenant, or all requests, fill the memory for bodies; \
                       close some connections, or try again (the operator of this host can raise `max-buffered-mib`)";
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
        let message = "no instance of the guest is available; try again";
        Self::busy(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}

impl From<RejectionReason> for ErrorResponse {
    fn from(turned: RejectionReason) -> Self {
        match turned {
            RejectionReason::LineFull => Self::busy(
                StatusCode::TOO_MANY_REQUESTS,
                "as many requests of this route wait as may; send fewer at a time",
            ),
            RejectionReason::TooLate => Self::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "no place became free in the time that this route allows; try again",
            ),
        }
    }
}

/// The reason of a refusal, for the log.
#[derive(Clone, Debug)]
pub(crate) struct RefusalReason(pub(crate) String);

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let mut text = json!({"code": self.status.as_u16(), "message": self.message});
        if let Some(excess) = &self.budget {
            text["budget"] = json!({
                "owner": excess.owner.name(),
                "name": excess.name,
                "limit": excess.limit,
                "used": excess.used,
                "retryAfter": excess.retry_after,
            });
        }
        let retry_after = self.retry_after();
        let mut reason = self.message;
        if let Some(sandbox) = &self.sandbox {
            text["sandboxId"] = json!(sandbox);
            reason = format!("{reason}: {sandbox}");
        }
        let text = text.to_string();
        let mut response = Response::new(Body::new(Full::from(text)));
        *response.status_mut() = self.status;
        response.extensions_mut().insert(RefusalReason(reason));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(wait) = retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(wait.as_secs()));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_inside_the_server_names_no_file_to_its_client() {
        let error = std::io::Error::other("/secret/place/of/the/host: denied");
        let refusals = [(); 2].map(|()| ErrorResponse::logged(StatusCode::BAD_GATEWAY, &error));
        for refusal in &refusals {
            assert_eq!(refusal.status, StatusCode::BAD_GATEWAY);
            assert!(!refusal.message.contains("secret") && !refusal.message.contains("denied"));
        }
        assert_ne!(refusals[0].message, refusals[1].message, "each has its own number");
    }

    #[test]
    fn a_budget_is_named_with_its_limit_and_use_and_the_time_to_retry() {
        for (owner, status) in [(BudgetOwner::Tenant, 429), (BudgetOwner::Server, 503)] {
            let refusal = ErrorResponse::over_budget(BudgetExcess {
                owner,
                name: "sent-mib",
                limit: 5,
                used: 7,
                retry_after: 30,
                advice: "send less",
            });
            assert!(refusal.message.contains("`sent-mib` is used up: 7 of 5; send less"));
            let response = refusal.into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers()[RETRY_AFTER], "30");
        }
    }

    #[test]
    fn a_full_disk_is_named_and_another_try_may_succeed() {
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let within = std::io::Error::other(full);
        let refusal = ErrorResponse::logged(StatusCode::INTERNAL_SERVER_ERROR, &within);
        assert_eq!((refusal.status.as_u16(), refusal.later), (507, true));
        assert!(refusal.message.contains("disk"), "{}", refusal.message);
    }
}
