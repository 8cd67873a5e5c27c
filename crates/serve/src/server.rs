//! The listeners and their connections, on hyper and tokio.
//!
//! Promises: connections are bounded, and so is the time for the head of a request and for each
//! part of an answer that is taken, so clients that stall hold nothing for long. Connections of an
//! address beyond its limit take no places of others. A server that ends first announces it
//! (`/readyz`, and `connection: close` on answers), then takes no more connections, and answers
//! every request that reached it before it exits. May break it: a client whose next request crosses
//! the end of its idle connection, as with every server of HTTP/1.1; it has to send that one again.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::response::IntoResponse;
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;

use crate::config::Config;
use crate::connection_permit::ConnectionPermit;
use crate::deadline::deadline_after;
use crate::error::ServeError;
use crate::error_response::ErrorResponse;
#[cfg(feature = "fleet")]
use crate::fleet::FleetHost;
use crate::health::Health;
use crate::service::{Audience, Phase, ServerState};

/// Maximum bytes of the head of a request, and of the buffers of a connection. Each open one may
/// have as many in memory before its client shows a key. hyper has a limit of heads alone, but with
/// it requests that a stranger sends in a row fill the larger buffer.
///
/// Bytes that pass through hyper alone cost more than with 64 KiB: 256 MiB that are uploaded 14 ms
/// of CPU time (18 % of client and server), and downloads in the pieces of files nothing.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Bytes of an answer that the kernel holds for a client that does not read. It counts each twice.
/// Without a limit they grow to 4 MiB, and those of all connections together can take the host's
/// memory for TCP.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Connections that the kernel completes before the server accepts them, at most
/// `net.core.somaxconn`. Tokio asks for 128. Clients beyond that wait for a second, after which
/// their kernels try again.
const ACCEPT_BACKLOG: i32 = 4096;
/// Time for which a closing server waits for the first bytes on a new connection.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum connections that are refused at the same time with an answer. Further ones are closed
/// without one.
const MAX_REFUSED_CONNECTIONS: usize = 64;
/// Time for which a refused connection is open for its answer.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks at instances that are idle.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// A server that has its guests and its address, and takes connections once it [runs](Server::run).
pub struct Server {
    shared: Arc<ServerState>,
    listener: TcpListener,
    admin: Option<TcpListener>,
    config: Config,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("config", &self.config).finish_non_exhaustive()
    }
}

/// A handle on a running server; cheap to clone.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<ServerState>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("phase", &*self.shared.phase.borrow()).finish()
    }
}

impl Handle {
    /// Opens the guests of `config` and exchanges those of the server for them. Every request is
    /// answered by the guests of before or by the new ones. So are the keys of sandboxes, and the
    /// certificate for new connections, where the server has either. New sandboxes are made from
    /// the new templates. Addresses and bounds stay as they are.
    ///
    /// # Errors
    /// [`ServeError`]; the server continues with all that it has.
    pub async fn reload(&self, config: &Config) -> Result<(), ServeError> {
        self.shared.reload(config).await
    }

    /// Counts and records a reload whose configuration cannot be read. The server continues with
    /// all that it has, and opens its audit log again.
    pub fn record_failed_reload(&self) {
        self.shared.begin_reload();
        self.shared.end_reload(false);
    }

    /// Sandboxes that are live, or have a call, and are lost in part if the process ends now.
    #[must_use]
    pub fn unsaved_sandboxes(&self) -> usize {
        self.shared.sandboxes.as_ref().map_or(0, |routes| routes.sandboxes.count_unsaved())
    }

    /// Ends the server once it has answered every request that reached it.
    pub fn shutdown(&self) {
        self.shared.shutdown();
    }
}

async fn listen(addr: SocketAddr) -> Result<TcpListener, ServeError> {
    let listener = TcpListener::bind(addr).await;
    let listener = listener.map_err(|source| ServeError::Listen { addr, source })?;
    // A second call changes the length of the queue.
    if let Err(error) = rustix::net::listen(&listener, ACCEPT_BACKLOG) {
        tracing::warn!(%error, "bursts of more than 128 connections wait");
    }
    // Accepted connections inherit it.
    if let Err(error) = set_socket_send_buffer_size(&listener, SEND_BUFFER_BYTES) {
        tracing::warn!(%error, "the buffers of connections in the kernel have its own limit");
    }
    Ok(listener)
}

fn local(listener: &TcpListener, asked: SocketAddr) -> SocketAddr {
    listener.local_addr().unwrap_or(asked)
}

impl Server {
    /// Opens the guests and takes the address.
    ///
    /// # Errors
    /// [`ServeError`], with the guest or the address.
    pub async fn bind(config: Config) -> Result<Self, ServeError> {
        if config.guests.is_empty() && config.sandboxes.is_none() {
            return Err(ServeError::Nothing);
        }
        let shared = Arc::new(ServerState::open(&config).await?);
        let listener = listen(config.addr).await?;
        let admin = match config.admin {
            Some(addr) => Some(listen(addr).await?),
            None => None,
        };
        #[cfg(feature = "oidc")]
        if let Some(routes) = &shared.sandboxes {
            routes.sandboxes.config.keys.watch_issuers();
        }
        #[cfg(feature = "fleet")]
        if let Some(fleet) = &shared.fleet {
            fleet.begin(&(shared.clone() as Arc<dyn FleetHost>)).await?;
        }
        Ok(Self { shared, listener, admin, config })
    }

    /// Address for requests.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        local(&self.listener, self.config.addr)
    }

    /// Address for operations.
    #[must_use]
    pub fn admin(&self) -> SocketAddr {
        self.admin.as_ref().map_or_else(|| self.addr(), |admin| local(admin, self.config.addr))
    }

    /// Whether requests come in encrypted.
    #[must_use]
    pub fn is_https(&self) -> bool {
        #[cfg(feature = "tls")]
        return self.shared.tls.is_some();
        #[cfg(not(feature = "tls"))]
        false
    }

    /// A handle that works while it runs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle { shared: self.shared.clone() }
    }

    /// Serves until it is asked to end, and then until every request that reached it is answered.
    /// Returns whether all sandboxes are saved.
    #[must_use = "a server that could not save its sandboxes has failed"]
    pub async fn run(self) -> bool {
        let Self { shared, listener, admin, config } = self;
        #[cfg(feature = "tls")]
        let tls = shared.tls.clone();
        let operations = admin.is_none();
        let sweeping = tokio::spawn(sweep(shared.clone()));
        let admin = admin.map(|admin| {
            let config = Config { max_concurrent_connections: 64, ..config.clone() };
            tokio::spawn(accept_all(
                shared.clone(),
                admin,
                Audience::Operations,
                config,
                #[cfg(feature = "tls")]
                None,
            ))
        });
        accept_all(
            shared.clone(),
            listener,
            Audience::Requests { operations },
            config,
            #[cfg(feature = "tls")]
            tls,
        )
        .await;
        sweeping.abort();
        let saved = match &shared.sandboxes {
            Some(routes) => routes.sandboxes.save_all().await,
            None => true,
        };
        #[cfg(feature = "fleet")]
        if let Some(fleet) = &shared.fleet {
            fleet.leave().await;
        }
        if let Some(routes) = &shared.sandboxes {
            routes.sandboxes.release();
        }
        if let Some(admin) = admin {
            // It has the same phases, and was waited for.
            let _ = admin.await;
        }
        shared.flush_audit().await;
        saved
    }
}

/// Looks after idle instances and sandboxes.
async fn sweep(shared: Arc<ServerState>) {
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        for site in &shared.table().sites {
            site.sweep();
        }
        if let Some(routes) = &shared.sandboxes {
            routes.sandboxes.sweep();
        }
        Health::probe(&shared);
    }
}

/// The client of a connection.
struct Client {
    peer: IpAddr,
    /// The answer to its request, if its address has too many connections.
    refusal: Option<ErrorResponse>,
}

/// A connection in the gauge of open ones, until it is dropped.
struct OpenConnection(Arc<ServerState>);

impl OpenConnection {
    fn count(shared: &Arc<ServerState>) -> Self {
        shared.metrics.connections.inc();
        Self(shared.clone())
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.metrics.connections.dec();
    }
}

/// One listener, and the connections that came in by it.
struct ConnectionAcceptor {
    shared: Arc<ServerState>,
    audience: Audience,
    config: Arc<Config>,
    places: Arc<Semaphore>,
    /// Places of connections that are refused, which take none of the others.
    refusals: Arc<Semaphore>,
    connections: JoinSet<()>,
    #[cfg(feature = "tls")]
    tls: Option<crate::tls::Acceptor>,
}

impl ConnectionAcceptor {
    /// Waits for a place, then for a connection, and serves it.
    async fn accept_one(&mut self, listener: &TcpListener) {
        let place = loop {
            tokio::select! {
                place = self.places.clone().acquire_owned() => break place,
                Some(_) = self.connections.join_next() => {}
            }
        };
        let Ok(place) = place else { return };
        let accepted = loop {
            tokio::select! {
                accepted = listener.accept() => break accepted,
                Some(_) = self.connections.join_next() => {}
            }
        };
        match accepted {
            Ok((stream, peer)) => {
                let peer = peer.ip();
                match self.shared.addresses.connect(peer) {
                    Err(refusal) if self.audience != Audience::Operations => {
                        self.shared.metrics.refused_addresses.inc();
                        drop(place);
                        let Ok(place) = self.refusals.clone().try_acquire_owned() else { return };
                        let client = Client { peer, refusal: Some(refusal) };
                        let refusing = self.serve(stream, place, client);
                        self.connections.spawn(async move {
                            // A client that sends no request holds nothing of others.
                            let _ = tokio::time::timeout(REFUSAL_TIMEOUT, refusing).await;
                        });
                    }
                    address => {
                        let serving = self.serve(stream, place, Client { peer, refusal: None });
                        self.connections.spawn(async move {
                            let _address = address;
                            serving.await;
                        });
                    }
                }
            }
            Err(error) => {
                // Too many open files, most likely: connections that end make room.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    /// Serves one connection to its end.
    fn serve(
        &self,
        stream: TcpStream,
        place: OwnedSemaphorePermit,
        client: Client,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (shared, config, audience) = (self.shared.clone(), self.config.clone(), self.audience);
        #[cfg(feature = "tls")]
        let tls = self.tls.clone();
        let place = ConnectionPermit::new(place);
        async move {
            let _open = OpenConnection::count(&shared);
            // Answers go out when they are written.
            let _ = stream.set_nodelay(true);
            #[cfg(feature = "tls")]
            match tls {
                None => connection(stream, &shared, audience, &config, &place, &client).await,
                Some(tls) => match tls.accept(stream, config.head_timeout).await {
                    Ok(stream) => {
                        connection(stream, &shared, audience, &config, &place, &client).await
                    }
                    Err(error) => tracing::debug!(%error, "no handshake"),
                },
            }
            #[cfg(not(feature = "tls"))]
            connection(stream, &shared, audience, &config, &place, &client).await;
        }
    }
}

async fn accept_all(
    shared: Arc<ServerState>,
    listener: TcpListener,
    audience: Audience,
    config: Config,
    #[cfg(feature = "tls")] tls: Option<crate::tls::Acceptor>,
) {
    let mut phase = shared.phase.subscribe();
    let places = Arc::new(Semaphore::new(config.max_concurrent_connections.max(1)));
    let (drain, grace) = (config.drain, config.grace);
    let mut accepting = ConnectionAcceptor {
        shared: shared.clone(),
        audience,
        config: Arc::new(config),
        places,
        refusals: Arc::new(Semaphore::new(MAX_REFUSED_CONNECTIONS)),
        connections: JoinSet::new(),
        #[cfg(feature = "tls")]
        tls,
    };
    loop {
        tokio::select! {
            () = accepting.accept_one(&listener) => {}
            _ = phase.wait_for(|phase| *phase != Phase::Running) => break,
        }
    }
    let drained = deadline_after(Instant::now(), drain).into();
    while tokio::time::timeout_at(drained, accepting.accept_one(&listener)).await.is_ok() {}
    // Clients in the kernel's queue believe that they are connected.
    while tokio::time::timeout(Duration::ZERO, accepting.accept_one(&listener)).await.is_ok() {}
    drop(listener);
    shared.phase.send_replace(Phase::Closing);
    if let Some(routes) = &shared.sandboxes {
        routes.sandboxes.end_subscriptions();
    }
    let mut connections = accepting.connections;
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(grace, ended).await.is_err() {
        tracing::warn!(left = connections.len(), "requests were not over in time, and are ended");
        connections.shutdown().await;
    }
}

async fn connection<S: AsyncRead + AsyncWrite + Send + 'static>(
    stream: S,
    shared: &Arc<ServerState>,
    audience: Audience,
    config: &Config,
    place: &ConnectionPermit,
    client: &Client,
) {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(config.body_timeout));
    let begun = AtomicBool::new(false);
    let service = service_fn(|mut request| {
        begun.store(true, Ordering::Relaxed);
        request.extensions_mut().insert(place.clone());
        let refusal = client.refusal.clone();
        async move {
            Ok::<_, Infallible>(match refusal {
                None => shared.answer(audience, request, client.peer).await,
                Some(refusal) => {
                    let mut response = refusal.into_response();
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                    response
                }
            })
        }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(config.head_timeout)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(Box::pin(stream)), service)
        .with_upgrades();
    let mut serving = pin!(serving);
    let mut phase = shared.phase.subscribe();
    let closing = async {
        // Fails only when there is no server any more.
        let _ = phase.wait_for(|phase| *phase == Phase::Closing).await;
        let patience = tokio::time::Instant::now() + FIRST_BYTE_TIMEOUT;
        while !begun.load(Ordering::Relaxed) && tokio::time::Instant::now() < patience {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let result = tokio::select! {
        result = serving.as_mut() => result,
        () = closing => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection broke off");
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::sockopt::socket_send_buffer_size;

    use super::*;

    #[tokio::test]
    async fn a_burst_of_connections_does_not_wait_for_the_server() {
        let longest = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        let longest: usize = longest.trim().parse().unwrap();
        let listener = listen(([127, 0, 0, 1], 0).into()).await.unwrap();
        let addr = listener.local_addr().unwrap();
        // The server accepts none of them. A client's kernel tries again after a second.
        let connect = |_| std::net::TcpStream::connect_timeout(&addr, Duration::from_millis(900));
        let clients: Vec<_> = (0..longest.min(400)).map(connect).collect();
        assert!(clients.iter().all(Result::is_ok), "of {} clients", clients.len());
    }

    #[tokio::test]
    async fn the_kernel_holds_little_of_an_answer_that_is_not_read() {
        let listener = listen(([127, 0, 0, 1], 0).into()).await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        // A host may allow less (`net.core.wmem_max`).
        assert!(socket_send_buffer_size(&stream).unwrap() <= 2 * SEND_BUFFER_BYTES);
    }
}
