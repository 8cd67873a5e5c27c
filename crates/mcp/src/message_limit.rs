//! Limits of the bodies of requests over HTTP.
//!
//! Promises: a message has at most 1 MiB. One that carries code, a file or the input of a command
//! has at most 16 MiB, nearly all of it in strings, because other JSON takes up to 100 times its
//! bytes in memory. Messages together take a bounded amount of memory until their calls have ended;
//! beyond it they are refused with 503. A body takes memory as it arrives, not as its head claims.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, TryStreamExt};
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

/// The permits for the memory of a message. The request has them as an extension, and its call
/// takes them from there until it has ended, also where the client has left. The answer has them,
/// too.
#[derive(Clone, Debug)]
pub(crate) struct MessagePermits {
    _held: Arc<(Option<OwnedSemaphorePermit>, OwnedSemaphorePermit)>,
}

impl MessagePermits {
    /// The permits of the message in this request.
    pub(crate) fn of(request: &Parts) -> Option<Self> {
        request.extensions.get().cloned()
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
    fn append(&mut self, piece: &[u8], memory: &BodyMemory) -> Result<(), BodyRefusal> {
        let length = self.bytes.len() + piece.len();
        if length > MAX_BODY {
            return Err(BodyRefusal::TooLarge);
        }
        let capacity = self.bytes.capacity();
        if length > capacity {
            let wanted = length.max(2 * capacity).min(MAX_BODY);
            let permits = memory.take(wanted - capacity).ok_or(BodyRefusal::NoMemory)?;
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
    ) -> Result<(Request, MessagePermits), BodyRefusal> {
        let (mut head, body) = request.into_parts();
        if body.size_hint().lower() > MAX_BODY as u64 {
            return Err(BodyRefusal::TooLarge);
        }
        let arrived = tokio::time::timeout(ARRIVAL_TIMEOUT, self.collect(body)).await;
        let ArrivingBody { bytes, permits: arriving } =
            arrived.map_err(|_| BodyRefusal::Late)??;
        let whole = Bytes::from(bytes);
        let structure = structure(&whole);
        if whole.len() > MAX_PLAIN_BODY && (structure > MAX_STRUCTURE || !may_be_long(&whole)) {
            return Err(BodyRefusal::TooLarge);
        }
        // The bytes are parsed into strings of the same length.
        let parsed = self.take(whole.len() + structure * STRUCTURE_WEIGHT);
        let parsed = parsed.ok_or(BodyRefusal::NoMemory)?;
        let held = Arc::new((arriving, parsed));
        let permits = MessagePermits { _held: held };
        head.extensions.insert(permits.clone());
        Ok((Request::from_parts(head, whole.into()), permits))
    }

    async fn collect(&self, body: Body) -> Result<ArrivingBody, BodyRefusal> {
        let mut arriving = ArrivingBody::default();
        let mut pieces = body.into_data_stream();
        loop {
            match pieces.try_next().await.map_err(|_| BodyRefusal::Broken)? {
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

/// Why a body is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyRefusal {
    TooLarge,
    NoMemory,
    Late,
    Broken,
}

impl IntoResponse for BodyRefusal {
    fn into_response(self) -> Response {
        match self {
            Self::TooLarge => {
                let why = format!(
                    "a message has at most {MAX_PLAIN_BODY} bytes; one with code, a file or input \
                     has at most {MAX_BODY}, of which {MAX_STRUCTURE} are not in strings\n"
                );
                (StatusCode::PAYLOAD_TOO_LARGE, why).into_response()
            }
            Self::NoMemory => {
                let why = "the messages of all clients take too much memory; retry later\n";
                let later = [(RETRY_AFTER, RETRY_SECONDS)];
                (StatusCode::SERVICE_UNAVAILABLE, later, why).into_response()
            }
            Self::Late => {
                (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time\n").into_response()
            }
            Self::Broken => {
                (StatusCode::BAD_REQUEST, "the body did not arrive whole\n").into_response()
            }
        }
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
        let memory = BodyMemory::default();
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
        assert_eq!(refused.unwrap_err(), BodyRefusal::NoMemory);
        drop(permits);
        drop(memory.take(64 << 10).unwrap());
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
