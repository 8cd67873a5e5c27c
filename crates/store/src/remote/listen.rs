//! Listens to the answers of an object store, because the clients' errors omit parts of them: the
//! status, and when the server wants to be asked again.

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

use super::retry;

/// Makes clients that report their answers to [`retry`].
#[derive(Debug)]
pub(super) struct Listening;

#[derive(Debug)]
struct Listener(HttpClient);

impl HttpConnector for Listening {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Listener(ReqwestConnector::default().connect(options)?)))
    }
}

#[async_trait]
impl HttpService for Listener {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.0.execute(request).await?;
        if !response.status().is_success() {
            retry::heard_from(response.status(), response.headers());
        }
        Ok(response)
    }
}
