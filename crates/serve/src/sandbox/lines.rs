//! Connections from outside to what listens within a sandbox, and what goes through them.
//!
//! What it promises: what waits on either side is bounded; whoever does not take what a program writes has only that program wait. When a
//! sandbox goes to another state, its connections end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use afresh::linux::Dialed;
use afresh::{CallError, Lease};
use bytes::{Buf, Bytes, BytesMut};
use hyper::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, mpsc};

use super::one::{Sandbox, refused};
use super::registry::{Sandboxes, Turn, lock};
use crate::refusal::Refusal;

/// Bytes that wait to be taken by a program.
const INBOX: usize = 64 << 10;
/// Most bytes of one piece of what it writes, and how many wait for a client.
const PIECE: usize = 64 << 10;
const PIECES: usize = 4;
/// Most connections into one sandbox.
const LINES: usize = 256;

/// The connections into one sandbox.
#[derive(Default)]
pub(super) struct Lines {
    all: Mutex<Vec<Arc<Line>>>,
    /// Something has gone through since it was last asked.
    moved: AtomicBool,
}

/// One of them.
struct Line {
    dialed: Dialed,
    inbox: Mutex<BytesMut>,
    /// The inbox has room again, or it is over.
    room: Notify,
    over: AtomicBool,
    outbox: mpsc::Sender<Bytes>,
}

impl Line {
    async fn send(&self, bytes: &[u8]) {
        while !self.over.load(Ordering::Acquire) {
            {
                let mut inbox = lock(&self.inbox);
                if inbox.len() < INBOX {
                    inbox.extend_from_slice(bytes);
                    return;
                }
            }
            self.room.notified().await;
        }
    }

    /// Whoever waits for room has none to wait for.
    fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.room.notify_one();
    }

    /// Passes on what it can. It is over where the client is gone, or the program has hung up.
    fn exchange(&self, lease: &mut Lease<'_>) -> Result<Passed, CallError> {
        let mut inbox = lock(&self.inbox);
        let permit = match self.outbox.try_reserve() {
            Ok(permit) => Some(permit),
            Err(mpsc::error::TrySendError::Full(())) => None,
            Err(mpsc::error::TrySendError::Closed(())) => return Ok(Passed::Over),
        };
        let room = if permit.is_some() { PIECE } else { 0 };
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
            (true, _) => Passed::Over,
            (_, true) => Passed::Something,
            _ => Passed::Nothing,
        })
    }
}

/// What an exchange has come to.
#[derive(PartialEq, Eq)]
enum Passed {
    Nothing,
    Something,
    Over,
}

impl Lines {
    /// Passes on what waits on either side, and hangs up what is over or was left by earlier states.
    pub(super) fn exchange(&self, lease: &mut Lease<'_>) -> Result<(), CallError> {
        let mut all = lock(&self.all);
        let mut failed = None;
        all.retain(|line| {
            let passed = line.exchange(lease).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                Passed::Over
            });
            self.moved.fetch_or(passed != Passed::Nothing, Ordering::Relaxed);
            if passed == Passed::Over {
                line.end();
            }
            passed != Passed::Over
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let known: Vec<_> = all.iter().map(|line| line.dialed).collect();
        lease.hang_up_strangers(&known)
    }

    /// Whether something has gone through since this was last asked, so that the sandbox may go on.
    pub(super) fn moved(&self) -> bool {
        self.moved.swap(false, Ordering::Relaxed)
    }

    /// Ends all of them.
    pub(super) fn clear(&self) {
        lock(&self.all).drain(..).for_each(|line| line.end());
    }

    /// Whether there are any.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.all).is_empty()
    }
}

/// A connection to what listens on a port of a sandbox.
pub(super) async fn dial(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    port: u16,
) -> Result<DuplexStream, Refusal> {
    let (outbox, given) = mpsc::channel(PIECES);
    let own = sandbox.clone();
    let dialing = all.turn(sandbox, Turn::Connection, move |session| {
        let lines = &own.commands.lines;
        if lock(&lines.all).len() >= LINES {
            let message = format!("the sandbox has {LINES} connections already; try again");
            return Err(Refusal::busy(StatusCode::TOO_MANY_REQUESTS, message));
        }
        let dialed = session.with(|lease| lease.dial(port)).map_err(|error| refused(&error))?;
        let dialed = dialed.ok_or_else(|| {
            let message = format!("nothing listens on port {port} of the sandbox");
            Refusal::new(StatusCode::BAD_GATEWAY, message)
        })?;
        let (inbox, room, over) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
        let line = Arc::new(Line { dialed, inbox, room, over, outbox });
        lock(&lines.all).push(line.clone());
        lines.moved.store(true, Ordering::Relaxed);
        Ok(line)
    });
    let line = dialing.await?;
    let (ours, theirs) = tokio::io::duplex(PIECE);
    // The sandbox has the other; whatever clears that ends this one.
    let weak = Arc::downgrade(&line);
    tokio::spawn(pump(Arc::downgrade(all), sandbox.clone(), weak, given, theirs));
    Ok(ours)
}

/// Carries what goes through a connection to and from its client, until either hangs up.
async fn pump(
    all: Weak<Sandboxes>,
    sandbox: Arc<Sandbox>,
    line: Weak<Line>,
    mut given: mpsc::Receiver<Bytes>,
    client: DuplexStream,
) {
    let wake = || {
        if let Some(all) = all.upgrade() {
            all.goes_on(&sandbox, Some(Duration::ZERO));
        }
    };
    let (mut reader, mut writer) = tokio::io::split(client);
    let up = async {
        let mut buffer = BytesMut::with_capacity(PIECE);
        // A client of HTTP that writes no more is gone.
        while let Ok(1..) = reader.read_buf(&mut buffer).await {
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
            if writer.write_all(&bytes).await.is_err() {
                return;
            }
            // There is room for more.
            wake();
        }
        let _ = writer.shutdown().await;
    };
    tokio::select! {
        () = down => {}
        () = up => {}
    }
    // What is closed on this side is hung up in the sandbox's next turn.
    drop(given);
    wake();
}
