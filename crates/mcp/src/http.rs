//! The server over streamable HTTP.
//!
//! Promises: a request without the token is refused before its body is read, where one is set, and
//! so is a request from a web page. Bodies have [limits](crate::message_limit), and so have
//! [connections](crate::connections) and [sessions](crate::bounded_sessions). A request with a
//! foreign `Host` is refused, so that a page cannot reach a server on loopback by DNS rebinding.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, ORIGIN, WWW_AUTHENTICATE};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use rmcp::ServerHandler;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::answering_service::AnsweringService;
use crate::bounded_sessions::BoundedSessions;
use crate::connections::{self, Connection, ConnectionLimits};
use crate::message_limit::{MAX_BODY, MessageMemory};
use crate::server::Server;

impl Server {
    /// Answers clients over HTTP until `end` is ready. Clients show `token` as a bearer token, if
    /// it is set. `hosts` are the names and addresses that clients use for the server, in addition
    /// to those of loopback.
    pub async fn serve_http(
        self,
        listener: TcpListener,
        token: Option<&str>,
        hosts: &[String],
        end: impl Future<Output = ()>,
    ) {
        // Ends the streams of clients, which otherwise stay open.
        let ending = CancellationToken::new();
        let router = router(self.answering(), token, hosts, ending.clone());
        connections::serve(listener, router, ConnectionLimits::default(), ending, end).await;
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
    let sessions = Arc::new(BoundedSessions::default());
    let service = StreamableHttpService::new(move || Ok(server.clone()), sessions, config);
    let memory = MessageMemory::default();
    let router = Router::new()
        .route_service("/mcp", service)
        .layer(from_fn(move |request, next| memory.clone().limit(request, next)))
        .layer(from_fn(refuse_pages));
    let router = router.layer(from_fn(admit));
    let Some(token) = token else { return router };
    let expected: [u8; 32] = Sha256::digest(format!("Bearer {token}")).into();
    router.layer(from_fn(move |request, next| authorize(expected, request, next)))
}

/// Notes that the connection is a client's.
async fn admit(request: Request, next: Next) -> Response {
    if let Some(connection) = request.extensions().get::<Arc<Connection>>() {
        connection.admit();
    }
    next.run(request).await
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
    use std::net::SocketAddr;
    use std::time::Duration;

    use serde_json::{Value, json};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;
    use crate::answering_service::testing::{PanickingServer, initialize};

    const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

    /// Sends a message.
    async fn send(addr: SocketAddr, headers: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        let head = format!(
            "POST /mcp HTTP/1.1\r\nHost: {addr}\r\nContent-Type: application/json\r\n\
             Accept: application/json, text/event-stream\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stream
    }

    /// Reads the answer until it has this text. A stream of events stays open.
    async fn read_until(stream: &mut TcpStream, until: &str) -> String {
        let mut answer = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&answer).into_owned();
            if text.contains(until) {
                return text;
            }
            let read = timeout(ANSWER_TIMEOUT, stream.read_buf(&mut answer)).await;
            assert_ne!(read.expect("an answer").unwrap(), 0, "{text}");
        }
    }

    /// Sends a message, and reads the answer until it has this text.
    async fn post(addr: SocketAddr, headers: &str, body: &Value, until: &str) -> String {
        read_until(&mut send(addr, headers, body).await, until).await
    }

    /// Waits until the server has ended a connection.
    async fn wait_for_end(stream: &mut TcpStream) {
        let ended = timeout(ANSWER_TIMEOUT, stream.read(&mut [0; 1024])).await.expect("an end");
        assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    }

    /// A server with the token `secret`, and limits of its connections.
    async fn start(limits: ConnectionLimits) -> (SocketAddr, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let server = AnsweringService::new(PanickingServer, 1);
        let ending = CancellationToken::new();
        let router = router(server, Some("secret"), &[], ending.clone());
        let serving = connections::serve(listener, router, limits, ending, std::future::pending());
        (addr, tokio::spawn(serving))
    }

    const TOKEN: &str = "Authorization: Bearer secret\r\n";

    #[tokio::test]
    async fn idle_connections_of_strangers_keep_no_client_out() {
        const LIMIT: usize = 4;
        let limits = ConnectionLimits { connections: LIMIT, ..ConnectionLimits::default() };
        let (addr, serving) = start(limits).await;
        let mut client = send(addr, TOKEN, &initialize()).await;
        read_until(&mut client, "\"serverInfo\"").await;
        let mut strangers = Vec::new();
        for _ in 0..2 * LIMIT {
            strangers.push(TcpStream::connect(addr).await.unwrap());
        }
        // Requests without the token are those of strangers as well.
        strangers.push(send(addr, "", &initialize()).await);
        read_until(strangers.last_mut().unwrap(), "401").await;
        post(addr, TOKEN, &initialize(), "\"serverInfo\"").await;
        for oldest in &mut strangers[..LIMIT] {
            wait_for_end(oldest).await;
        }
        // The connection of a client stays, and the next request on it is answered.
        let again = format!("DELETE /mcp HTTP/1.1\r\nHost: {addr}\r\n{TOKEN}\r\n");
        client.write_all(again.as_bytes()).await.unwrap();
        read_until(&mut client, "HTTP/1.1 4").await;
        serving.abort();
    }

    #[tokio::test]
    async fn connections_without_the_head_of_a_request_are_ended() {
        let head_timeout = Duration::from_millis(50);
        let limits = ConnectionLimits { head_timeout, ..ConnectionLimits::default() };
        let (addr, serving) = start(limits).await;
        let mut silent = TcpStream::connect(addr).await.unwrap();
        wait_for_end(&mut silent).await;
        let mut slow = TcpStream::connect(addr).await.unwrap();
        slow.write_all(b"POST /mcp HTTP/1.1\r\nHost:").await.unwrap();
        let ended = timeout(ANSWER_TIMEOUT, slow.read_to_end(&mut Vec::new())).await;
        ended.expect("an end").unwrap_or_default();
        serving.abort();
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
