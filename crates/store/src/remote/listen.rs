//! Listens to the answers of an object store, because the clients' errors omit parts of them: the
//! status, and when the server wants to be asked again. A client that repeats requests itself also
//! charges its retries to the [`RetryBudget`] here.

use std::sync::Arc;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use reqwest::StatusCode;

use super::retry;
use super::retry_budget::{RETRY_COST, RetryBudget, TIMEOUT_COST};

/// Makes clients that report their answers to [`retry`].
#[derive(Debug)]
pub(super) struct Listening {
    /// Budget for a client that repeats requests itself.
    pub(super) budget: Option<Arc<RetryBudget>>,
}

#[derive(Debug)]
struct Listener {
    client: HttpClient,
    budget: Option<Arc<RetryBudget>>,
}

/// The error of an attempt after which the client must not try again.
#[derive(Debug, thiserror::Error)]
#[error("{0}; it was not tried again, because most of the last requests to this store failed")]
struct RetryRefused(String);

impl HttpConnector for Listening {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Listener { client, budget: self.budget.clone() }))
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

#[async_trait]
impl HttpService for Listener {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let outcome = self.client.execute(request).await;
        if let Ok(response) = &outcome
            && !response.status().is_success()
        {
            retry::heard_from(response.status(), response.headers());
        }
        let Some(budget) = &self.budget else { return outcome };
        match retry_cost(&outcome) {
            Some(cost) if !budget.take(cost) => {
                let why = match outcome {
                    Ok(response) => format!("the store answered {}", response.status()),
                    Err(error) => super::error::with_causes(&error),
                };
                // A kind that the client does not repeat.
                Err(HttpError::new(HttpErrorKind::Unknown, RetryRefused(why)))
            }
            Some(_) => outcome,
            None => {
                budget.note_success(0);
                outcome
            }
        }
    }
}
