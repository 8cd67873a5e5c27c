//! The server over streamable HTTP.
//!
//! Promises: a request without the token is refused before its body is read, where one is set, and
//! so is a request from a web page. Bodies have [limits](crate::body_limit). A request with a
//! foreign `Host` is refused, so that a page cannot reach a server on loopback by DNS rebinding.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, ORIGIN, WWW_AUTHENTICATE};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::body_limit::{BodyMemory, MAX_BODY};
use crate::server::Server;

impl Server {
    /// Answers clients over HTTP until `end` is ready. Clients show `token` as a bearer token, if
    /// it is set. `hosts` are the names and addresses that clients use for the server, in addition
    /// to those of loopback.
    ///
    /// # Errors
    /// As [`axum::serve()`].
    pub async fn serve_http(
        self,
        listener: TcpListener,
        token: Option<&str>,
        hosts: &[String],
        end: impl Future<Output = ()> + Send + 'static,
    ) -> std::io::Result<()> {
        let ending = CancellationToken::new();
        let router = self.router(token, hosts, ending.clone());
        let serving = axum::serve(listener, router).with_graceful_shutdown(async move {
            end.await;
            // Ends the streams of clients, which otherwise stay open.
            ending.cancel();
        });
        serving.await
    }

    /// The routes of the server: `/mcp`.
    fn router(self, token: Option<&str>, hosts: &[String], ending: CancellationToken) -> Router {
        let loopback = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
        let config = StreamableHttpServerConfig::default()
            .with_allowed_hosts(loopback.into_iter().chain(hosts.iter().cloned()))
            .enforce_origin_validation()
            .with_cancellation_token(ending)
            .with_max_request_body_bytes(MAX_BODY);
        let sessions = Arc::new(LocalSessionManager::default());
        let service = StreamableHttpService::new(move || Ok(self.clone()), sessions, config);
        let memory = BodyMemory::default();
        let router = Router::new()
            .route_service("/mcp", service)
            .layer(from_fn(move |request, next| memory.clone().limit(request, next)))
            .layer(from_fn(refuse_pages));
        let Some(token) = token else { return router };
        let expected: [u8; 32] = Sha256::digest(format!("Bearer {token}")).into();
        router.layer(from_fn(move |request, next| authorize(expected, request, next)))
    }
}

/// Refuses requests of web pages, which browsers mark with the page's origin. The transport would
/// refuse them only after their bodies had taken memory.
async fn refuse_pages(request: Request, next: Next) -> Response {
    match request.headers().contains_key(ORIGIN) {
        true => (StatusCode::FORBIDDEN, "requests of web pages are refused\n").into_response(),
        false => next.run(request).await,
    }
}

/// Passes a request on that shows the token. The digests take equal time to compare wherever they
/// differ in the token.
async fn authorize(expected: [u8; 32], request: Request, next: Next) -> Response {
    let shown = request.headers().get(AUTHORIZATION).map(|shown| Sha256::digest(shown.as_bytes()));
    if shown.is_some_and(|shown| shown[..] == expected) {
        return next.run(request).await;
    }
    let challenge = [(WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, challenge, "the request does not show the server's token\n")
        .into_response()
}
