//! The server over streamable HTTP.
//!
//! Promises: a request without the token is refused before its body is read, where one is set, and
//! so is a request from a web page. Bodies have [limits](crate::message_limit). A request with a
//! foreign `Host` is refused, so that a page cannot reach a server on loopback by DNS rebinding.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, ORIGIN, WWW_AUTHENTICATE};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use rmcp::ServerHandler;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::answering_service::AnsweringService;
use crate::message_limit::{MAX_BODY, MessageMemory};
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
        let router = router(self.answering(), token, hosts, ending.clone());
        let serving = axum::serve(listener, router).with_graceful_shutdown(async move {
            end.await;
            // Ends the streams of clients, which otherwise stay open.
            ending.cancel();
        });
        serving.await
    }
}

/// The routes of a server: `/mcp`.
fn router(
    server: AnsweringService<impl ServerHandler + Clone>,
    token: Option<&str>,
    hosts: &[String],
    ending: CancellationToken,
) -> Router {
    let loopback = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    let config = StreamableHttpServerConfig::default()
        .with_allowed_hosts(loopback.into_iter().chain(hosts.iter().cloned()))
        .enforce_origin_validation()
        .with_cancellation_token(ending)
        .with_max_request_body_bytes(MAX_BODY);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(server.clone()), sessions, config);
    let memory = MessageMemory::default();
    let router = Router::new()
        .route_service("/mcp", service)
        .layer(from_fn(move |request, next| memory.clone().limit(request, next)))
        .layer(from_fn(refuse_pages));
    let Some(token) = token else { return router };
    let expected: [u8; 32] = Sha256::digest(format!("Bearer {token}")).into();
    router.layer(from_fn(move |request, next| authorize(expected, request, next)))
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;
    use crate::answering_service::testing::{PanickingServer, initialize};

    const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

    /// Sends a message, and reads the answer until it has this text. A stream of events stays open.
    async fn post(addr: std::net::SocketAddr, headers: &str, body: &Value, until: &str) -> String {
        let (body, mut answer) = (body.to_string(), Vec::new());
        let head = format!(
            "POST /mcp HTTP/1.1\r\nHost: {addr}\r\nContent-Type: application/json\r\n\
             Accept: application/json, text/event-stream\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        loop {
            let text = String::from_utf8_lossy(&answer).into_owned();
            if text.contains(until) {
                return text;
            }
            let read = timeout(ANSWER_TIMEOUT, stream.read_buf(&mut answer)).await;
            assert_ne!(read.expect("an answer").unwrap(), 0, "{text}");
        }
    }

    #[tokio::test]
    async fn a_request_over_http_whose_handler_panics_is_answered() {
        let server = AnsweringService::new(PanickingServer, 1);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let router = router(server, None, &[], CancellationToken::new());
        let serving = tokio::spawn(axum::serve(listener, router).into_future());
        let begun = post(addr, "", &initialize(), "\"serverInfo\"").await;
        let session = begun.lines().find(|line| line.starts_with("mcp-session-id:")).unwrap();
        let headers = format!("{session}\r\nMCP-Protocol-Version: 2025-06-18\r\n");
        let note = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        post(addr, &headers, &note, "202").await;
        let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
        let answer = post(addr, &headers, &list, "the server failed").await;
        assert!(answer.contains("\"code\":-32603"), "{answer}");
        serving.abort();
    }
}
