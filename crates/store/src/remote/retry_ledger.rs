//! Charges a client that repeats requests itself for its retries.
//!
//! Such a client repeats only some of the failed requests, and does not mark what it repeats. So
//! the ledger notes failures, and takes the tokens of the [`RetryBudget`] when the same request
//! begins again. Requests are the same if method and address are.
//!
//! Promises: first attempts, and failures without a retry, are free. May break it: a request that
//! is the same as another one in flight, or as one that failed without a retry less than
//! [`FAILURE_LIFETIME`] ago.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpResponse};
use reqwest::{Method, StatusCode};

use super::error::with_causes;
use super::retry_budget::{RETRY_COST, RetryBudget, TIMEOUT_COST};

/// Longest pause of the client before a retry.
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(15);
/// How long a failure is kept for a retry: twice the longest pause, for a host that is busy.
const FAILURE_LIFETIME: Duration = Duration::from_secs(2 * MAX_PAUSE.as_secs());

/// The failures that a retry may follow.
#[derive(Debug)]
pub(super) struct RetryLedger {
    budget: Arc<RetryBudget>,
    /// Attempts that the client makes of a request.
    max_attempts: u32,
    failures: Mutex<HashMap<RequestKey, Failure>>,
}

type RequestKey = (Method, String);

#[derive(Debug)]
struct Failure {
    /// Attempts so far.
    attempts: u32,
    /// Tokens of a retry.
    cost: u32,
    why: String,
    at: Instant,
}

/// An attempt that is under way.
#[derive(Debug)]
pub(super) struct LedgerAttempt {
    key: RequestKey,
    number: u32,
    /// Tokens that were taken for it.
    cost: u32,
}

/// The error of a retry that must not be made.
#[derive(Debug, thiserror::Error)]
#[error("{0}; it was not tried again, because most of the last requests to this store failed")]
struct RetryRefused(String);

impl RetryLedger {
    pub(super) fn new(budget: Arc<RetryBudget>, max_attempts: u32) -> Self {
        Self { budget, max_attempts, failures: Mutex::default() }
    }

    fn failures(&self) -> MutexGuard<'_, HashMap<RequestKey, Failure>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the tokens of `request` if it is a retry.
    ///
    /// # Errors
    /// If there are too few. The error has the reason of the attempt before, and a kind that the
    /// client does not repeat.
    pub(super) fn begin(&self, request: &HttpRequest) -> Result<LedgerAttempt, HttpError> {
        let key = (request.method().clone(), request.uri().to_string());
        let failure = self.failures().remove(&key);
        match failure.filter(|failure| failure.at.elapsed() < FAILURE_LIFETIME) {
            None => Ok(LedgerAttempt { key, number: 1, cost: 0 }),
            Some(Failure { attempts, cost, .. }) if self.budget.take(cost) => {
                Ok(LedgerAttempt { key, number: attempts + 1, cost })
            }
            Some(failure) => Err(HttpError::new(HttpErrorKind::Unknown, RetryRefused(failure.why))),
        }
    }

    /// Notes how `attempt` ended.
    pub(super) fn end(&self, attempt: LedgerAttempt, outcome: &Result<HttpResponse, HttpError>) {
        let Some(cost) = retry_cost(outcome) else {
            // An answer that refuses the request is one of a working server.
            if outcome.is_ok() {
                self.budget.note_success(attempt.cost);
            }
            return;
        };
        if attempt.number >= self.max_attempts {
            return;
        }
        let why = match outcome {
            Ok(response) => format!("the store answered {}", response.status()),
            Err(error) => with_causes(error),
        };
        let failure = Failure { attempts: attempt.number, cost, why, at: Instant::now() };
        let mut failures = self.failures();
        // Some failures have no retry.
        failures.retain(|_, failure| failure.at.elapsed() < FAILURE_LIFETIME);
        failures.insert(attempt.key, failure);
    }
}

/// The cost of a retry that the client makes after this outcome, if it makes one.
fn retry_cost(outcome: &Result<HttpResponse, HttpError>) -> Option<u32> {
    let status = match outcome {
        Ok(response) => response.status(),
        Err(error) => {
            return match error.kind() {
                HttpErrorKind::Timeout | HttpErrorKind::Interrupted => Some(TIMEOUT_COST),
                HttpErrorKind::Connect | HttpErrorKind::Request => Some(RETRY_COST),
                _ => None,
            };
        }
    };
    let passing = [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status);
    (status.is_server_error() || passing).then_some(RETRY_COST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(path: &str) -> HttpRequest {
        let mut request = HttpRequest::new(String::new().into());
        *request.uri_mut() = format!("https://store.test/{path}").parse().unwrap();
        request
    }

    fn answer(status: u16) -> Result<HttpResponse, HttpError> {
        let mut response = HttpResponse::new(String::new().into());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        Ok(response)
    }

    fn broken(kind: HttpErrorKind) -> Result<HttpResponse, HttpError> {
        Err(HttpError::new(kind, std::io::Error::other("broken")))
    }

    fn ledger() -> RetryLedger {
        RetryLedger::new(Arc::default(), 3)
    }

    #[test]
    fn only_attempts_after_a_failure_of_the_same_request_take_tokens() {
        let ledger = ledger();
        let retries = || ledger.budget.counts().retries;
        for (number, expected) in [(1, 0), (2, 1), (3, 2), (1, 2)] {
            let attempt = ledger.begin(&request("a")).unwrap();
            assert_eq!((attempt.number, retries()), (number, expected));
            ledger.end(attempt, &answer(503));
        }
        let attempt = ledger.begin(&request("b")).unwrap();
        ledger.end(attempt, &broken(HttpErrorKind::Timeout));
        assert_eq!(retries(), 2);
        let attempt = ledger.begin(&request("b")).unwrap();
        assert_eq!((attempt.cost, retries()), (TIMEOUT_COST, 3));
        ledger.end(attempt, &answer(200));
        assert_eq!(ledger.begin(&request("b")).unwrap().number, 1);
    }

    #[test]
    fn a_retry_without_tokens_is_refused_with_the_reason_of_the_failure() {
        let ledger = ledger();
        let attempt = ledger.begin(&request("a")).unwrap();
        ledger.end(attempt, &broken(HttpErrorKind::Timeout));
        while ledger.budget.take(RETRY_COST) {}
        let error = ledger.begin(&request("a")).unwrap_err();
        assert_eq!(error.kind(), HttpErrorKind::Unknown);
        let text = with_causes(&error);
        assert!(text.contains("broken; it was not tried again"), "{text}");
        // The next one is a first attempt.
        assert_eq!(ledger.begin(&request("a")).unwrap().number, 1);
    }

    #[test]
    fn only_answers_add_tokens() {
        let ledger = ledger();
        let start = Instant::now();
        let refill = |outcome: &dyn Fn() -> Result<HttpResponse, HttpError>| {
            while ledger.budget.take(RETRY_COST) {}
            for _ in 0..400 {
                let attempt = ledger.begin(&request("a")).unwrap();
                ledger.end(attempt, &outcome());
            }
            (0..).take_while(|_| ledger.budget.take(RETRY_COST)).count() as u64
        };
        let taken = refill(&|| broken(HttpErrorKind::Decode));
        assert!(taken <= 1 + start.elapsed().as_secs(), "{taken}");
        assert!(refill(&|| answer(404)) >= 79);
    }
}
