//! The endpoint of operations: `/healthz`, `/readyz` and `/metrics` over HTTP/1.1.
//!
//! Promises: only these paths are read, and nothing is changed. Each connection has one request, a
//! time limit and a limit of bytes, and the number of connections has a limit. No answer names an
//! object or a namespace.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::health::Monitor;

/// Connections at once.
const MAX_CONNECTIONS: usize = 64;
/// Time for one connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of the head of a request.
const MAX_HEAD_BYTES: usize = 8 << 10;
/// Pause after an error of the listener, such as one of too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const TEXT: &str = "text/plain; charset=utf-8";
/// The type of [`Monitor::text`].
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// An answer: its status, its type and its body.
type Answer = (&'static str, &'static str, String);

/// Answers requests. Ends never.
pub async fn serve(listener: TcpListener, monitor: Arc<Monitor>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let place = places.clone().acquire_owned().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "no connection for metrics is accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let monitor = monitor.clone();
        tokio::spawn(async move {
            // A client that leaves ends its connection.
            let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection(stream, &monitor)).await;
            drop(place);
        });
    }
}

async fn connection(mut stream: TcpStream, monitor: &Monitor) -> std::io::Result<()> {
    let mut head = Vec::new();
    let answer = loop {
        let end = head.windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(end) = end {
            break answer(&String::from_utf8_lossy(&head[..end]), monitor);
        }
        if head.len() >= MAX_HEAD_BYTES {
            break ("431 Request Header Fields Too Large", TEXT, "too large\n".to_owned());
        }
        let mut part = [0; 1024];
        let length = stream.read(&mut part).await?;
        if length == 0 {
            return Ok(());
        }
        head.extend_from_slice(&part[..length]);
    };
    let (status, kind, body) = answer;
    let is_head = head.starts_with(b"HEAD ");
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n",
        body.len()
    );
    // At once: two writes wait for each other's acknowledgement.
    let body = if is_head { "" } else { &body };
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    stream.shutdown().await
}

fn answer(head: &str, monitor: &Monitor) -> Answer {
    let mut words = head.lines().next().unwrap_or_default().split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    if !matches!(method, "GET" | "HEAD") {
        return ("405 Method Not Allowed", TEXT, "only GET and HEAD\n".to_owned());
    }
    match target.split('?').next().unwrap_or_default() {
        "/healthz" => {
            let dead = monitor.dead_loops();
            if dead.is_empty() {
                return ("200 OK", TEXT, "alive\n".to_owned());
            }
            let text = format!("these loops stand still: {}\n", dead.join(", "));
            ("503 Service Unavailable", TEXT, text)
        }
        "/readyz" => ready(monitor),
        "/metrics" => ("200 OK", METRICS, monitor.text()),
        _ => ("404 Not Found", TEXT, "/healthz, /readyz or /metrics\n".to_owned()),
    }
}

fn ready(monitor: &Monitor) -> Answer {
    let faults: String = monitor
        .checks()
        .into_iter()
        .filter_map(|(check, fault)| Some(format!("{check}: {}\n", fault?)))
        .collect();
    if !faults.is_empty() {
        return ("503 Service Unavailable", TEXT, faults);
    }
    let role = if monitor.holds_lease() { "the lease is held" } else { "standing by" };
    ("200 OK", TEXT, format!("ready: {role}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends bytes to an endpoint: the answer.
    async fn ask(monitor: &Arc<Monitor>, request: &[u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(listener, monitor.clone()));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        serving.abort();
        answer
    }

    #[tokio::test]
    async fn paths_methods_and_sizes_have_their_answers() {
        let monitor = Arc::new(Monitor::default());
        // All of it is read: a connection that ends before would be reset.
        let long = format!("{:a<1$}", "GET / HTTP/1.1\r\nA: ", MAX_HEAD_BYTES);
        for (request, status, part) in [
            ("GET /healthz HTTP/1.1\r\n\r\n", "200 OK", "alive"),
            ("GET /healthz?verbose HTTP/1.1\r\nHost: a\r\n\r\n", "200 OK", "alive"),
            ("GET /readyz HTTP/1.1\r\n\r\n", "503 Service", "server: the afresh server was not"),
            ("GET /metrics HTTP/1.1\r\n\r\n", "200 OK", "afresh_kube_lease_held 0\n"),
            ("GET /else HTTP/1.1\r\n\r\n", "404 Not Found", "/readyz"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method", "GET"),
            (&long, "431 Request", "too large"),
        ] {
            let answer = ask(&monitor, request.as_bytes()).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {answer}");
            assert!(answer.contains(part), "{request}: {answer}");
        }
        let answer = ask(&monitor, b"HEAD /healthz HTTP/1.1\r\n\r\n").await;
        assert!(answer.ends_with("\r\n\r\n") && answer.contains("Content-Length: 6"), "{answer}");
        monitor.note_lease(true);
        let answer = ask(&monitor, b"GET /metrics HTTP/1.1\r\n\r\n").await;
        assert!(answer.contains("afresh_kube_lease_held 1\n"), "{answer}");
    }

    #[tokio::test]
    async fn idle_connections_leave_room_for_a_probe() {
        let monitor = Arc::new(Monitor::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(listener, monitor));
        let mut idle = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("alive\n"), "{answer}");
        serving.abort();
    }
}
