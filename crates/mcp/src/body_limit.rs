//! Limits of the bodies of requests over HTTP.
//!
//! Promises: a message has at most 1 MiB. One that carries code, a file or the input of a command
//! has at most 16 MiB, nearly all of it in strings, because other JSON takes up to 100 times its
//! bytes in memory. Messages together take a bounded amount of memory from their arrival to their
//! answer; beyond it they are refused with 503.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum bytes of a message that carries code, a file or input.
pub(crate) const MAX_BODY: usize = 16 << 20;
/// Maximum bytes of other messages.
const MAX_PLAIN_BODY: usize = 1 << 20;
/// Maximum bytes outside the strings of a message above [`MAX_PLAIN_BODY`].
const MAX_STRUCTURE: usize = 64 << 10;
/// Bytes of memory for a byte of JSON outside strings.
const STRUCTURE_WEIGHT: usize = 100;
/// Maximum memory of all messages.
const MAX_MEMORY: usize = 256 << 20;
/// Bytes of memory of one permit.
const PERMIT: usize = 1 << 10;
/// Time limit for the arrival of a body.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Seconds after which a refused client may retry.
const RETRY_SECONDS: &str = "1";
/// The tools whose arguments may be long.
const LONG_TOOLS: [&str; 3] = ["run_code", "run_command", "write_file"];

/// The parts of a message that decide how long it may be.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    method: std::borrow::Cow<'a, str>,
    #[serde(borrow)]
    params: Parameters<'a>,
}

#[derive(Deserialize)]
struct Parameters<'a> {
    #[serde(borrow)]
    name: std::borrow::Cow<'a, str>,
}

/// The permits for the memory of a message. The request has them as an extension, which belongs to
/// the message until its call has ended, also where the client has left. The answer has them, too.
type Permits = Arc<[OwnedSemaphorePermit; 2]>;

/// The memory for bodies.
#[derive(Clone, Debug)]
pub(crate) struct BodyMemory(Arc<Semaphore>);

impl Default for BodyMemory {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_MEMORY / PERMIT)))
    }
}

impl BodyMemory {
    /// Permits for so many bytes; `None` where they are not free.
    fn take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let permits = u32::try_from(bytes.div_ceil(PERMIT)).unwrap_or(u32::MAX);
        Arc::clone(&self.0).try_acquire_many_owned(permits).ok()
    }

    /// Passes on a request within the limits.
    pub(crate) async fn limit(self, request: Request, next: Next) -> Response {
        match self.receive(request).await {
            Ok((request, permits)) => next.run(request).await.map(|body| hold(body, permits)),
            Err(refusal) => refusal,
        }
    }

    /// A request with its whole body, and the permits for its memory.
    async fn receive(&self, request: Request) -> Result<(Request, Permits), Response> {
        let (mut head, body) = request.into_parts();
        let length = body.size_hint().upper().and_then(|upper| usize::try_from(upper).ok());
        let length = length.unwrap_or(MAX_BODY);
        if length > MAX_BODY {
            return Err(too_large());
        }
        let arriving = self.take(length).ok_or_else(no_memory)?;
        let whole = tokio::time::timeout(ARRIVAL_TIMEOUT, to_bytes(body, length)).await;
        let late = |_| (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time\n");
        let whole = whole.map_err(|elapsed| late(elapsed).into_response())?;
        let whole = whole.map_err(|_| too_large())?;
        let structure = structure(&whole);
        if whole.len() > MAX_PLAIN_BODY && (structure > MAX_STRUCTURE || !may_be_long(&whole)) {
            return Err(too_large());
        }
        // The bytes are parsed into strings of the same length.
        let parsed = self.take(whole.len() + structure * STRUCTURE_WEIGHT);
        let parsed = parsed.ok_or_else(no_memory)?;
        let permits: Permits = Arc::new([arriving, parsed]);
        head.extensions.insert(Arc::clone(&permits));
        Ok((Request::from_parts(head, whole.into()), permits))
    }
}

/// Keeps the permits until the answer has ended.
fn hold(body: Body, permits: Permits) -> Body {
    Body::from_stream(body.into_data_stream().map(move |data| {
        let _held = &permits;
        data
    }))
}

fn no_memory() -> Response {
    let why = "the messages of all clients take too much memory; retry later\n";
    (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, RETRY_SECONDS)], why).into_response()
}

fn too_large() -> Response {
    let why = format!(
        "a message has at most {MAX_PLAIN_BODY} bytes; one with code, a file or input has at most \
         {MAX_BODY}, of which {MAX_STRUCTURE} are not in strings\n"
    );
    (StatusCode::PAYLOAD_TOO_LARGE, why).into_response()
}

/// Bytes of JSON that are not the content of strings.
fn structure(json: &[u8]) -> usize {
    let (mut count, mut is_string, mut is_escaped) = (0, false, false);
    for &byte in json {
        count += usize::from(!is_string || (byte == b'"' && !is_escaped));
        if byte == b'"' && !is_escaped {
            is_string = !is_string;
        }
        is_escaped = is_string && byte == b'\\' && !is_escaped;
    }
    count
}

/// Whether a message calls a tool that takes code, a file or input.
fn may_be_long(message: &[u8]) -> bool {
    serde_json::from_slice(message).is_ok_and(|message: Envelope<'_>| {
        message.method == "tools/call" && LONG_TOOLS.contains(&&*message.params.name)
    })
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::middleware::from_fn;
    use axum::routing::post;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn bytes_outside_strings_are_counted() {
        for (json, wanted) in
            [(&br#"{"a":[1,"x\"y\\",""]}"#[..], 14), (br#""\\\"""#, 2), (b"\"open", 1), (b"", 0)]
        {
            assert_eq!(structure(json), wanted, "{}", String::from_utf8_lossy(json));
        }
    }

    fn call(tool: &str, arguments: &str) -> String {
        format!(r#"{{"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments}}}}}"#)
    }

    /// The status and the head of the answer.
    async fn send(to: std::net::SocketAddr, body: &str) -> String {
        let mut stream = TcpStream::connect(to).await.unwrap();
        let head = format!(
            "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // A refusal may come before the body is read.
        let _ = stream.write_all(body.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[tokio::test]
    async fn long_messages_carry_code_and_messages_share_a_bounded_memory() {
        let memory = BodyMemory::default();
        let limiter = memory.clone();
        let router = Router::new()
            .route("/", post(|body: String| async move { body.len().to_string() }))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .layer(from_fn(move |request, next| limiter.clone().limit(request, next)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let serving = tokio::spawn(axum::serve(listener, router).into_future());

        let long = format!(r#"{{"code":"{}"}}"#, "x".repeat(MAX_PLAIN_BODY));
        let zeros = format!(r#"{{"code":[{}0]}}"#, "0,".repeat(MAX_PLAIN_BODY));
        for (body, status) in [
            (call("run_code", &long), "200"),
            (call("tree", &long), "413"),
            (call("run_code", &zeros), "413"),
            (call("run_code", &zeros[..MAX_PLAIN_BODY / 2]), "200"),
        ] {
            let answer = send(to, &body).await;
            assert_eq!(answer.split(' ').nth(1), Some(status), "{answer}");
        }
        let others = memory.take(MAX_MEMORY - (1 << 20)).unwrap();
        let refused = send(to, &call("run_code", &long)).await.to_lowercase();
        assert!(
            refused.starts_with("http/1.1 503") && refused.contains("retry-after: 1"),
            "{refused}"
        );
        assert!(send(to, &call("tree", "{}")).await.starts_with("HTTP/1.1 200"));
        drop(others);
        assert!(send(to, &call("run_code", &long)).await.starts_with("HTTP/1.1 200"));
        // Each answer has returned its permits.
        drop(memory.take(MAX_MEMORY).unwrap());
        serving.abort();
    }
}
