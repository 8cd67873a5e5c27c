//! Connections from outside to programs that listen in a sandbox, and their bytes.
//!
//! Promises: waiting bytes are bounded on either side and counted, and a slow client delays only
//! the program that writes to it. A rollback ends the connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use afresh::linux::InboundConnection;
use afresh::{CallError, Lease};
use bytes::{Buf, Bytes, BytesMut};
use tokio::sync::{Notify, mpsc};

use crate::body::count_until_dropped;
use crate::budget::Budget;
use crate::lock::lock;
use crate::sandbox::tenants::accounts::ConnectionGuard;

/// Bytes that wait to be taken by a program, before the last ones that fit.
pub(crate) const MAX_INBOX_BYTES: usize = 32 << 10;
/// Maximum bytes of one piece of output.
const MAX_PIECE_BYTES: usize = 64 << 10;

/// The connections into one sandbox.
#[derive(Default)]
pub(crate) struct Tunnels {
    pub(crate) all: Mutex<Vec<Arc<Tunnel>>>,
    /// Bytes have passed, or wait, since the last turn.
    pub(crate) moved: AtomicBool,
}

/// One of them.
pub(crate) struct Tunnel {
    pub(crate) dialed: InboundConnection,
    pub(crate) inbox: Mutex<BytesMut>,
    /// The inbox has room again, or it is over.
    pub(crate) room: Notify,
    pub(crate) over: AtomicBool,
    pub(crate) outbox: mpsc::Sender<Bytes>,
    /// Output counts here until the client has it.
    pub(crate) memory: Budget,
    /// It counts in the budgets of connections.
    pub(crate) _permit: ConnectionGuard,
}

impl Tunnel {
    pub(crate) async fn send(&self, bytes: &[u8]) {
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
    fn exchange(&self, lease: &mut Lease<'_>) -> Result<ExchangeOutcome, CallError> {
        let mut inbox = lock(&self.inbox);
        let permit = match self.outbox.try_reserve() {
            Ok(permit) => Some(permit),
            Err(mpsc::error::TrySendError::Full(())) => None,
            Err(mpsc::error::TrySendError::Closed(())) => return Ok(ExchangeOutcome::Over),
        };
        let room = if permit.is_some() { MAX_PIECE_BYTES } else { 0 };
        let through = lease.exchange(self.dialed, &inbox, room)?;
        let moved = through.taken > 0 || !through.given.is_empty();
        if through.taken > 0 {
            inbox.advance(through.taken);
            self.room.notify_one();
        }
        if let Some(permit) = permit.filter(|_| !through.given.is_empty()) {
            let mut share = self.memory.share();
            if !share.add(through.given.len()) {
                tracing::warn!(
                    "a connection to a program ends: its tenant's clients leave too many bytes waiting"
                );
                return Ok(ExchangeOutcome::Over);
            }
            permit.send(count_until_dropped(through.given.into(), share));
        }
        Ok(match (through.ended, moved) {
            (true, _) => ExchangeOutcome::Over,
            (_, true) => ExchangeOutcome::Something,
            _ => ExchangeOutcome::Nothing,
        })
    }
}

/// The outcome of an exchange.
#[derive(PartialEq, Eq)]
enum ExchangeOutcome {
    Nothing,
    Something,
    Over,
}

impl Tunnels {
    /// Passes waiting bytes in both directions, and closes connections that are over or belong to
    /// earlier states.
    pub(crate) fn exchange(&self, lease: &mut Lease<'_>) -> Result<(), CallError> {
        let mut all = lock(&self.all);
        let mut failed = None;
        all.retain(|line| {
            let passed = line.exchange(lease).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                ExchangeOutcome::Over
            });
            self.moved.fetch_or(passed != ExchangeOutcome::Nothing, Ordering::Relaxed);
            if passed == ExchangeOutcome::Over {
                line.end();
            }
            passed != ExchangeOutcome::Over
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let known: Vec<_> = all.iter().map(|line| line.dialed).collect();
        lease.close_other_connections(&known)
    }

    /// Ends all of them.
    pub(crate) fn clear(&self) {
        lock(&self.all).drain(..).for_each(|line| line.end());
        self.moved.store(false, Ordering::Relaxed);
    }

    /// Whether any exist.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.all).is_empty()
    }
}
