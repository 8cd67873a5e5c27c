//! The connections of clients over HTTP, on hyper and tokio.
//!
//! Promises: connections are bounded, and so is the time for the head of a request, between two
//! requests, and for each part of an answer that is taken. At the limit the oldest connection
//! without an [admitted](Connection::admit) request gives way to a new one, so strangers keep no
//! client out. May break it: clients, whose connections stay while they use them.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{Id, JoinSet};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;

/// Maximum connections, if the process may have twice as many descriptors.
const MAX_CONNECTIONS: usize = 512;
/// Maximum bytes of the head of a request, and of the buffers of a connection.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Time limit for the head of a request, from the start of the connection or the answer before.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a client to take a part of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause after a connection that could not be accepted: too many files are open, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The limits of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    pub(crate) connections: usize,
    pub(crate) head_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
        Self { connections: MAX_CONNECTIONS.min(half).max(1), head_timeout: HEAD_TIMEOUT }
    }
}

/// A connection, which is an extension of its requests.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    is_admitted: AtomicBool,
    evicted: CancellationToken,
}

impl Connection {
    /// Notes a request of a client: the connection no longer gives way to others.
    pub(crate) fn admit(&self) {
        self.is_admitted.store(true, Ordering::Relaxed);
    }

    fn is_admitted(&self) -> bool {
        self.is_admitted.load(Ordering::Relaxed)
    }
}

/// The connections of a listener.
struct ConnectionTable {
    limits: ConnectionLimits,
    /// The oldest first.
    connections: VecDeque<(Id, Arc<Connection>)>,
    tasks: JoinSet<()>,
}

impl ConnectionTable {
    /// The place of the oldest connection without an admitted request.
    fn oldest_stranger(&self) -> Option<usize> {
        self.connections.iter().position(|(_, connection)| !connection.is_admitted())
    }

    /// Whether another connection is within the limit, or one would give way to it.
    fn has_room(&self) -> bool {
        self.connections.len() < self.limits.connections || self.oldest_stranger().is_some()
    }

    /// Serves a connection. At the limit another one gives way.
    fn add(&mut self, stream: TcpStream, router: Router, ending: CancellationToken) {
        if self.connections.len() >= self.limits.connections
            && let Some(oldest) = self.oldest_stranger()
            && let Some((_, connection)) = self.connections.remove(oldest)
        {
            connection.evicted.cancel();
        }
        let connection = Arc::new(Connection::default());
        let head_timeout = self.limits.head_timeout;
        let serving = serve_one(stream, router, Arc::clone(&connection), head_timeout, ending);
        self.connections.push_back((self.tasks.spawn(serving).id(), connection));
    }

    /// Waits for the end of a connection.
    async fn end_one(&mut self) {
        let ended = match self.tasks.join_next_with_id().await {
            None => return std::future::pending().await,
            Some(Ok((id, ()))) => id,
            Some(Err(error)) => error.id(),
        };
        self.connections.retain(|(id, _)| *id != ended);
    }
}

/// Answers the requests of all connections until `end` is ready, and then those that have begun.
/// `ending` is cancelled in between.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    ending: CancellationToken,
    end: impl Future<Output = ()>,
) {
    let mut table = ConnectionTable { limits, connections: VecDeque::new(), tasks: JoinSet::new() };
    let mut end = pin!(end);
    loop {
        let has_room = table.has_room();
        tokio::select! {
            () = &mut end => break,
            () = table.end_one() => {}
            accepted = listener.accept(), if has_room => match accepted {
                Ok((stream, _)) => table.add(stream, router.clone(), ending.clone()),
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
        }
    }
    drop(listener);
    ending.cancel();
    while table.tasks.join_next().await.is_some() {}
}

/// Answers the requests of a connection.
async fn serve_one(
    stream: TcpStream,
    router: Router,
    connection: Arc<Connection>,
    head_timeout: Duration,
    ending: CancellationToken,
) {
    // Answers are sent when they are written.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let router = router.layer(Extension(Arc::clone(&connection)));
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(router));
    let mut serving = pin!(serving);
    tokio::select! {
        // An error is the client's.
        _ = serving.as_mut() => {}
        () = connection.evicted.cancelled() => {}
        () = ending.cancelled() => {
            serving.as_mut().graceful_shutdown();
            let _ = serving.await;
        }
    }
}
