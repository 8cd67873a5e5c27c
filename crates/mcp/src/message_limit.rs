//! Limits of the messages of clients: bodies of requests over HTTP, and lines on standard input.
//!
//! Promises: a message has at most 1 MiB. One that carries code, a file or the input of a command
//! has at most 16 MiB, nearly all of it in strings, because other JSON takes up to 100 times its
//! bytes in memory. Messages together take a bounded amount of memory until their calls have ended;
//! beyond it they are refused, over HTTP with 503. A body takes memory as it arrives, not as its
//! head claims.

use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header::RETRY_AFTER;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, TryStreamExt};
use rmcp::model::Extensions;
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
/// The time in seconds after which a refused client may retry.
const RETRY_AFTER_SECOND: HeaderValue = HeaderValue::from_static("1");
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

/// The permits for the memory of a message. The request has them as an extension, and its call
/// takes them from there until it has ended, also where the client has left. An answer over HTTP
/// has them, too.
#[derive(Clone, Debug)]
pub(crate) struct MessagePermits {
    _held: Arc<(Option<OwnedSemaphorePermit>, OwnedSemaphorePermit)>,
}

impl MessagePermits {
    /// The permits of a message with these extensions: those of a line are among them, and those of
    /// a body are among the extensions of its request.
    pub(crate) fn of(message: &Extensions) -> Option<Self> {
        let of_request = || message.get::<Parts>().and_then(|request| request.extensions.get());
        message.get().or_else(of_request).cloned()
    }
}

/// A body that arrives, with the permits for its buffer.
#[derive(Default)]
struct ArrivingBody {
    bytes: Vec<u8>,
    permits: Option<OwnedSemaphorePermit>,
}

impl ArrivingBody {
    /// Appends bytes. The buffer doubles, so that a permit is not taken for each small piece.
    fn append(&mut self, piece: &[u8], memory: &MessageMemory) -> Result<(), MessageRefusal> {
        let length = self.bytes.len() + piece.len();
        if length > MAX_BODY {
            return Err(MessageRefusal::TooLarge);
        }
        let capacity = self.bytes.capacity();
        if length > capacity {
            let wanted = length.max(2 * capacity).min(MAX_BODY);
            let permits = memory.take(wanted - capacity).ok_or(MessageRefusal::NoMemory)?;
            match &mut self.permits {
                Some(held) => held.merge(permits),
                none => *none = Some(permits),
            }
            self.bytes.reserve_exact(wanted - self.bytes.len());
        }
        self.bytes.extend_from_slice(piece);
        Ok(())
    }
}

/// The memory for messages.
#[derive(Clone, Debug)]
pub(crate) struct MessageMemory(Arc<Semaphore>);

impl Default for MessageMemory {
    fn default() -> Self {
        Self::new(MAX_MEMORY)
    }
}

impl MessageMemory {
    /// Memory of so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes / PERMIT)))
    }

    /// Permits for so many bytes; `None` where they are not free.
    fn take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let permits = u32::try_from(bytes.div_ceil(PERMIT)).unwrap_or(u32::MAX);
        Arc::clone(&self.0).try_acquire_many_owned(permits).ok()
    }

    /// Whether no message has a permit.
    #[cfg(test)]
    pub(crate) fn is_free(&self) -> bool {
        self.0.available_permits() == MAX_MEMORY / PERMIT
    }

    /// Passes on a request within the limits.
    pub(crate) async fn limit(self, request: Request, next: Next) -> Response {
        match self.receive(request).await {
            Ok((request, permits)) => next.run(request).await.map(|body| hold(body, permits)),
            Err(refusal) => refusal.into_response(),
        }
    }

    /// A request with its whole body, and the permits for its memory.
    pub(crate) async fn receive(
        &self,
        request: Request,
    ) -> Result<(Request, MessagePermits), MessageRefusal> {
        let (mut head, body) = request.into_parts();
        if body.size_hint().lower() > MAX_BODY as u64 {
            return Err(MessageRefusal::TooLarge);
        }
        let arrived = tokio::time::timeout(ARRIVAL_TIMEOUT, self.collect(body)).await;
        let ArrivingBody { bytes, permits: arriving } =
            arrived.map_err(|_| MessageRefusal::Late)??;
        let whole = Bytes::from(bytes);
        let parsed = self.charge(&whole)?;
        let permits = MessagePermits { _held: Arc::new((arriving, parsed)) };
        head.extensions.insert(permits.clone());
        Ok((Request::from_parts(head, whole.into()), permits))
    }

    /// The permits for a line within the limits. The reader has one buffer for all lines.
    pub(crate) fn admit(&self, line: &[u8]) -> Result<MessagePermits, MessageRefusal> {
        let parsed = self.charge(line)?;
        Ok(MessagePermits { _held: Arc::new((None, parsed)) })
    }

    /// The permits for a message once it is parsed: its bytes become strings of the same length.
    fn charge(&self, whole: &[u8]) -> Result<OwnedSemaphorePermit, MessageRefusal> {
        let structure = structure(whole);
        if whole.len() > MAX_PLAIN_BODY && (structure > MAX_STRUCTURE || !may_be_long(whole)) {
            return Err(MessageRefusal::TooLarge);
        }
        let parsed = self.take(whole.len() + structure * STRUCTURE_WEIGHT);
        parsed.ok_or(MessageRefusal::NoMemory)
    }

    async fn collect(&self, body: Body) -> Result<ArrivingBody, MessageRefusal> {
        let mut arriving = ArrivingBody::default();
        let mut pieces = body.into_data_stream();
        loop {
            match pieces.try_next().await.map_err(|_| MessageRefusal::Broken)? {
                Some(piece) => arriving.append(&piece, self)?,
                None => return Ok(arriving),
            }
        }
    }
}

/// Keeps the permits until the answer has ended.
fn hold(body: Body, permits: MessagePermits) -> Body {
    Body::from_stream(body.into_data_stream().map(move |data| {
        let _held = &permits;
        data
    }))
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageRefusal {
    TooLarge,
    NoMemory,
    Late,
    Broken,
}

impl Display for MessageRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge => write!(
                f,
                "a message has at most {MAX_PLAIN_BODY} bytes; one with code, a file or input has \
                 at most {MAX_BODY}, of which {MAX_STRUCTURE} are not in strings"
            ),
            Self::NoMemory => {
                f.write_str("the messages of all clients take too much memory; retry later")
            }
            Self::Late => f.write_str("the body did not arrive in time"),
            Self::Broken => f.write_str("the body did not arrive whole"),
        }
    }
}

impl IntoResponse for MessageRefusal {
    fn into_response(self) -> Response {
        let status = match self {
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NoMemory => StatusCode::SERVICE_UNAVAILABLE,
            Self::Late => StatusCode::REQUEST_TIMEOUT,
            Self::Broken => StatusCode::BAD_REQUEST,
        };
        let mut response = (status, format!("{self}\n")).into_response();
        if self == Self::NoMemory {
            response.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_SECOND);
        }
        response
    }
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
    use axum::middleware::from_fn;
    use axum::routing::post;
    use axum::{BoxError, Router};
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
    async fn a_body_takes_memory_as_it_arrives() {
        let memory = MessageMemory::default();
        let _others = memory.take(MAX_MEMORY - (64 << 10)).unwrap();
        // As with a chunked body, its length is not known.
        let (sender, pieces) = tokio::sync::mpsc::channel::<Bytes>(1);
        let pieces = futures_util::stream::unfold(pieces, async |mut pieces| {
            Some((Ok::<_, std::convert::Infallible>(pieces.recv().await?), pieces))
        });
        let request = Request::new(Body::from_stream(pieces));
        let receiving = memory.receive(request);
        let sending = async {
            sender.send(Bytes::from_static(b"\"")).await.unwrap();
            for _ in 0..100 {
                sender.send(Bytes::from_static(b"0123456789")).await.unwrap();
            }
            drop(sender);
        };
        let (received, ()) = tokio::join!(receiving, sending);
        let (request, permits) = received.unwrap();
        assert_eq!(request.into_body().size_hint().exact(), Some(1001));
        // One that fills the memory is refused while it arrives.
        let endless = futures_util::stream::repeat_with(|| Ok::<_, BoxError>(vec![b' '; 4096]));
        let refused = memory.receive(Request::new(Body::from_stream(endless))).await;
        assert_eq!(refused.unwrap_err(), MessageRefusal::NoMemory);
        drop(permits);
        drop(memory.take(64 << 10).unwrap());
    }

    #[tokio::test]
    async fn long_messages_carry_code_and_messages_share_a_bounded_memory() {
        let memory = MessageMemory::default();
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
