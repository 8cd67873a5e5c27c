//! Connections from outside to programs that listen in a sandbox, and their bytes.
//!
//! Promises: waiting bytes are bounded on either side, and a slow client delays only the program
//! that writes to it. A rollback ends the connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use afresh::linux::InboundConnection;
use afresh::{CallError, Lease};
use bytes::{Buf, Bytes, BytesMut};
use hyper::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, mpsc};

use super::accounts::{Accounts, ConnectionGuard};
use super::registry::Sandboxes;
use super::sandbox::Sandbox;
use super::session_error::refused;
use super::undo_point::Operation;
use crate::error_response::ErrorResponse;
use crate::lock::lock;

/// Bytes that wait to be taken by a program.
const MAX_INBOX_BYTES: usize = 64 << 10;
/// Maximum bytes of one piece of output, and pieces that wait for a client.
const MAX_PIECE_BYTES: usize = 64 << 10;
const MAX_WAITING_PIECES: usize = 4;
/// Maximum connections into one sandbox.
const MAX_CONNECTIONS: usize = 256;

/// The connections into one sandbox.
#[derive(Default)]
pub(super) struct Tunnels {
    all: Mutex<Vec<Arc<Tunnel>>>,
    /// Bytes have passed since the last question.
    moved: AtomicBool,
}

/// One of them.
struct Tunnel {
    dialed: InboundConnection,
    inbox: Mutex<BytesMut>,
    /// The inbox has room again, or it is over.
    room: Notify,
    over: AtomicBool,
    outbox: mpsc::Sender<Bytes>,
    /// It counts in the budgets of connections.
    _permit: ConnectionGuard,
}

impl Tunnel {
    async fn send(&self, bytes: &[u8]) {
        while !self.over.load(Ordering::Acquire) {
            {
                let mut inbox = lock(&self.inbox);
                if inbox.len() < MAX_INBOX_BYTES {
                    inbox.extend_from_slice(bytes);
                    return;
                }
            }
            self.room.notified().await;
        }
    }

    /// Senders that wait for room stop waiting.
    fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.room.notify_one();
    }

    /// Passes on as much as it can. The tunnel ends when the client left or the program hung up.
    fn exchange(&self, lease: &mut Lease<'_>) -> Result<Transferred, CallError> {
        let mut inbox = lock(&self.inbox);
        let permit = match self.outbox.try_reserve() {
            Ok(permit) => Some(permit),
            Err(mpsc::error::TrySendError::Full(())) => None,
            Err(mpsc::error::TrySendError::Closed(())) => return Ok(Transferred::Over),
        };
        let room = if permit.is_some() { MAX_PIECE_BYTES } else { 0 };
        let through = lease.exchange(self.dialed, &inbox, room)?;
        let moved = through.taken > 0 || !through.given.is_empty();
        if through.taken > 0 {
            inbox.advance(through.taken);
            self.room.notify_one();
        }
        if let Some(permit) = permit.filter(|_| !through.given.is_empty()) {
            permit.send(through.given.into());
        }
        Ok(match (through.ended, moved) {
            (true, _) => Transferred::Over,
            (_, true) => Transferred::Something,
            _ => Transferred::Nothing,
        })
    }
}

/// The outcome of an exchange.
#[derive(PartialEq, Eq)]
enum Transferred {
    Nothing,
    Something,
    Over,
}

impl Tunnels {
    /// Passes waiting bytes in both directions, and closes connections that are over or belong to
    /// earlier states.
    pub(super) fn exchange(&self, lease: &mut Lease<'_>) -> Result<(), CallError> {
        let mut all = lock(&self.all);
        let mut failed = None;
        all.retain(|line| {
            let passed = line.exchange(lease).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                Transferred::Over
            });
            self.moved.fetch_or(passed != Transferred::Nothing, Ordering::Relaxed);
            if passed == Transferred::Over {
                line.end();
            }
            passed != Transferred::Over
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let known: Vec<_> = all.iter().map(|line| line.dialed).collect();
        lease.close_other_connections(&known)
    }

    /// Whether bytes have passed since the last question, so that the sandbox may continue.
    pub(super) fn moved(&self) -> bool {
        self.moved.swap(false, Ordering::Relaxed)
    }

    /// Ends all of them.
    pub(super) fn clear(&self) {
        lock(&self.all).drain(..).for_each(|line| line.end());
    }

    /// Whether any exist.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.all).is_empty()
    }
}

/// A connection to a program that listens on a port of a sandbox.
pub(super) async fn dial(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    port: u16,
) -> Result<DuplexStream, ErrorResponse> {
    let (outbox, given) = mpsc::channel(MAX_WAITING_PIECES);
    let permit = all.accounts.connect(&sandbox.tenant)?;
    let own = sandbox.clone();
    let dialing = all.turn(sandbox, Operation::Connection, move |session| {
        let lines = &own.commands.lines;
        if lock(&lines.all).len() >= MAX_CONNECTIONS {
            let message =
                format!("the sandbox has {MAX_CONNECTIONS} connections already; try again");
            return Err(ErrorResponse::busy(StatusCode::TOO_MANY_REQUESTS, message));
        }
        let dialed =
            session.with(|lease| Ok(lease.dial(port)?)).map_err(|error| refused(&error))?;
        let dialed = dialed.ok_or_else(|| {
            let message = format!("nothing listens on port {port} of the sandbox");
            ErrorResponse::new(StatusCode::BAD_GATEWAY, message)
        })?;
        let (inbox, room, over) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
        let line = Arc::new(Tunnel { dialed, inbox, room, over, outbox, _permit: permit });
        lock(&lines.all).push(line.clone());
        lines.moved.store(true, Ordering::Relaxed);
        Ok(line)
    });
    let line = dialing.await?;
    let (ours, theirs) = tokio::io::duplex(MAX_PIECE_BYTES);
    // The sandbox has the other end; every removal of that ends this one.
    let weak = Arc::downgrade(&line);
    tokio::spawn(pump(Arc::downgrade(all), sandbox.clone(), weak, given, theirs));
    Ok(ours)
}

/// Carries the bytes of a connection to and from its client, until either side closes.
async fn pump(
    all: Weak<Sandboxes>,
    sandbox: Arc<Sandbox>,
    line: Weak<Tunnel>,
    mut given: mpsc::Receiver<Bytes>,
    client: DuplexStream,
) {
    let wake = || {
        if let Some(all) = all.upgrade() {
            all.goes_on(&sandbox, Some(Duration::ZERO));
        }
    };
    let count = |add: &dyn Fn(&Accounts)| {
        if let Some(all) = all.upgrade() {
            add(&all.accounts);
        }
    };
    let (mut reader, mut writer) = tokio::io::split(client);
    let up = async {
        let mut buffer = BytesMut::with_capacity(MAX_PIECE_BYTES);
        // An HTTP client that writes no more has left.
        while let Ok(1..) = reader.read_buf(&mut buffer).await {
            count(&|accounts| accounts.add_received(&sandbox.tenant, buffer.len() as u64));
            match line.upgrade() {
                Some(line) => line.send(&buffer).await,
                None => return,
            }
            buffer.clear();
            wake();
        }
    };
    let down = async {
        while let Some(bytes) = given.recv().await {
            // A connection lasts no longer than the budget of its tenant.
            let may =
                all.upgrade().is_none_or(|all| all.accounts.check_sent(&sandbox.tenant).is_ok());
            if !may || writer.write_all(&bytes).await.is_err() {
                return;
            }
            count(&|accounts| accounts.add_sent(&sandbox.tenant, bytes.len() as u64));
            // There is room for more.
            wake();
        }
        let _ = writer.shutdown().await;
    };
    tokio::select! {
        () = down => {}
        () = up => {}
    }
    // A connection that is closed on this side is closed in the sandbox's next turn.
    drop(given);
    wake();
}
