//! New connections to programs that listen in a sandbox, and the bytes between them and a client.
//!
//! Promises: the buffers of a connection count in the memory for bodies, in the part of the tenant
//! of the sandbox: those of a fixed size from its beginning, and output of the program while it
//! waits. A connection that does not fit is refused, and one whose output does not fit ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, mpsc};

use crate::budget::Budget;
use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::connections::tunnels::{MAX_INBOX_BYTES, Tunnel};
use crate::sandbox::http::session_error::refused;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::lifecycle::undo_point::Operation;
use crate::sandbox::tenants::accounts::Accounts;

/// Bytes of each pipe between a connection and its client.
const PIPE_BYTES: usize = 16 << 10;
/// Maximum bytes of a request or an answer that its HTTP connection buffers.
pub(crate) const MAX_HTTP_BUFFER_BYTES: usize = 32 << 10;
/// Bytes that are copied at a time in each direction once a connection speaks another protocol.
pub(crate) const COPY_BYTES: usize = 8 << 10;
/// Bytes of the buffers of one connection: two pipes and the buffer that reads from one, the inbox,
/// and those of HTTP and of another protocol.
const CONNECTION_BYTES: usize =
    3 * PIPE_BYTES + MAX_INBOX_BYTES + PIPE_BYTES + MAX_HTTP_BUFFER_BYTES + 2 * COPY_BYTES;
/// Pieces of output that wait for a client.
const MAX_WAITING_PIECES: usize = 4;
/// Maximum connections into one sandbox.
const MAX_CONNECTIONS: usize = 256;

/// A connection to a program that listens on a port of a sandbox.
pub(crate) async fn dial(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    port: u16,
    memory: Budget,
) -> Result<DuplexStream, ErrorResponse> {
    let (outbox, given) = mpsc::channel(MAX_WAITING_PIECES);
    let permit = all.accounts.connect(&sandbox.tenant)?;
    let mut buffers = memory.share();
    if !buffers.add(CONNECTION_BYTES) {
        return Err(ErrorResponse::no_connection_memory());
    }
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
        let line = Tunnel { dialed, inbox, room, over, outbox, memory, _permit: permit };
        let line = Arc::new(line);
        lock(&lines.all).push(line.clone());
        lines.moved.store(true, Ordering::Relaxed);
        Ok(line)
    });
    let line = dialing.await?;
    let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
    // The sandbox has the other end; every removal of that ends this one.
    let weak = Arc::downgrade(&line);
    let pumping = pump(Arc::downgrade(all), sandbox.clone(), weak, given, theirs);
    tokio::spawn(async move {
        pumping.await;
        drop(buffers);
    });
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
            all.wake(&sandbox);
        }
    };
    let count = |add: &dyn Fn(&Accounts)| {
        if let Some(all) = all.upgrade() {
            add(&all.accounts);
        }
    };
    let (mut reader, mut writer) = tokio::io::split(client);
    let up = async {
        let mut buffer = BytesMut::with_capacity(PIPE_BYTES);
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
