//! Listens to the answers of an object store, because the clients' errors omit parts of them: the
//! status, and when the server wants to be asked again. A client that repeats requests itself is
//! charged for its retries here, by a [`RetryLedger`].

use std::sync::Arc;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

use super::retry;
use super::retry_ledger::RetryLedger;

/// Makes clients that report their answers to [`retry`].
#[derive(Debug)]
pub(super) struct ListeningConnector {
    /// For a client that repeats requests itself.
    pub(super) ledger: Option<Arc<RetryLedger>>,
}

#[derive(Debug)]
struct Listener {
    client: HttpClient,
    ledger: Option<Arc<RetryLedger>>,
}

impl HttpConnector for ListeningConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Listener { client, ledger: self.ledger.clone() }))
    }
}

#[async_trait]
impl HttpService for Listener {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let attempt = self.ledger.as_ref().map(|ledger| ledger.begin(&request)).transpose()?;
        let outcome = self.client.execute(request).await;
        if let Ok(response) = &outcome
            && !response.status().is_success()
        {
            retry::heard_from(response.status(), response.headers());
        }
        if let (Some(ledger), Some(attempt)) = (&self.ledger, attempt) {
            ledger.end(attempt, &outcome);
        }
        outcome
    }
}
