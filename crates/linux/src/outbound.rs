//! Connections of guests to the outside, at the sentry: host sockets between their channels.
//!
//! Promises: connections are made only to granted servers; a guest waits only for its own servers,
//! and within its time; none of these connections outlives the state that it was made in: a reset,
//! a rollback or a fork finds them closed. May break it: servers, which see the data that a call
//! has sent though the call is undone.

use std::cell::Cell;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use afresh_egress::{
    ConnectionLog, ConnectionRecord, DENIED, DestinationQuery, EgressFilter, EgressPolicy, Outcome,
    ProxyQuota, Route, Server, StreamSocket,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::sentry::Kernel;

/// Connections of a guest at a time.
const LINES: usize = 256;
/// Maximum connections of a guest from clients of its published ports. Idle clients leave the rest
/// to connections that the guest makes.
const MAX_ADMITTED: usize = LINES / 2;
/// Maximum connections of all guests of this process: each takes descriptors.
const ALL_LINES: usize = 8192;
/// Connections that are made at a time, each by a thread: of a guest, and of all. Others wait for
/// their turn.
const MAKERS: usize = 16;
const ALL_MAKERS: usize = 128;
/// How soon one that waits for others' threads looks again.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The port of the name server, in records of names.
const DNS_PORT: u16 = 53;
/// The reason of a refusal by a filter.
const DENIAL: &str = "a rule of this guest denies it";
/// Bytes that are moved at a time.
const PIECE: usize = 16 << 10;

/// One unit of a quota in this process; returned when it is dropped.
#[derive(Debug)]
struct ProcessQuota(&'static AtomicUsize);

impl ProcessQuota {
    fn of(count: &'static AtomicUsize, most: usize) -> Option<Self> {
        let share = Self(count);
        (count.fetch_add(1, Ordering::Relaxed) < most).then_some(share)
    }
}

impl Drop for ProcessQuota {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

thread_local! {
    /// Bytes that were sent and not taken yet.
    static SENT: Cell<u64> = const { Cell::new(0) };
}

/// Bytes that guests have sent to servers outside while this thread ran them, since the last call.
/// Bytes of a call that is undone count as well.
#[must_use]
pub fn take_outbound_bytes() -> u64 {
    SENT.take()
}

static LIVE: AtomicUsize = AtomicUsize::new(0);
static MAKING_NOW: AtomicUsize = AtomicUsize::new(0);

/// A connection, with the channels of its guest socket.
#[derive(Debug)]
struct OutboundConnection {
    /// The channel that the guest reads.
    from: u64,
    /// The channel that it writes.
    to: u64,
    link: Link,
    /// Whether it is the server's turn: nothing has come since something was sent, or ever.
    owed: bool,
    /// The filter that it was made under.
    filter: Option<EgressFilter>,
    /// Whether a client of a published port made it.
    is_admitted: bool,
    _share: ProcessQuota,
}

#[derive(Debug)]
enum Link {
    /// It is not begun yet.
    Waiting(Server, ConnectionRecord),
    /// It is being made. The other end of the stream is closed when that is done.
    Making(Receiver<Result<StreamSocket, i32>>, UnixStream),
    Made(StreamSocket),
}

impl Link {
    /// A connection to the proxy, which is there already.
    fn proxied(stream: UnixStream) -> std::io::Result<Self> {
        let (ours, _) = UnixStream::pair()?;
        let (done, made) = sync_channel(1);
        // There is room for one.
        let _ = done.send(Ok(stream.into()));
        Ok(Self::Making(made, ours))
    }
}

/// The way of a connection, and the filter that admitted it.
#[derive(Debug)]
pub(crate) struct FilteredRoute {
    route: Route,
    filter: Option<EgressFilter>,
}

/// Limits of one guest that its processes and connections share. A reset does not renew them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutboundLimits {
    /// The guest's own log, with its rate.
    log: ConnectionLog,
    proxies: ProxyQuota,
}

/// All connections of a guest, and its granted destinations.
#[derive(Debug)]
pub(crate) struct OutboundConnections {
    pub(crate) policy: EgressPolicy,
    list: Vec<OutboundConnection>,
    pub(crate) limits: OutboundLimits,
}

impl OutboundConnections {
    pub(crate) fn new(policy: EgressPolicy) -> Self {
        let log = policy.log().cloned().unwrap_or_default();
        let limits = OutboundLimits { log, ..OutboundLimits::default() };
        Self { policy, list: Vec::new(), limits }
    }

    /// The log of the caller, or this guest's own.
    fn log(&self) -> ConnectionLog {
        ConnectionLog::present().unwrap_or_else(|| self.limits.log.clone())
    }

    /// The way of a connection, if it is granted, and the caller's filter admits it, with that
    /// filter. A refusal is logged.
    pub(crate) fn route(&self, asked: DestinationQuery<'_>, port: u16) -> Option<FilteredRoute> {
        let filter = EgressFilter::present();
        let found = match &filter {
            Some(filter) => self.policy.filtered_route(asked, port, filter),
            None => self.policy.route(asked, port),
        };
        if found.is_none() {
            let is_granted = filter.is_some() && self.policy.route(asked, port).is_some();
            let record = ConnectionRecord::of(asked, port, Outcome::Refused);
            self.log().record(record.reason(if is_granted { DENIAL } else { "it is not granted" }));
        }
        Some(FilteredRoute { route: found?, filter })
    }

    /// Whether a name is granted, and the caller's filter admits it. A refusal is logged.
    pub(crate) fn knows(&self, name: &str) -> bool {
        let granted = self.policy.knows(name);
        let known =
            granted && EgressFilter::present().is_none_or(|filter| filter.admits_name(name));
        if !known {
            let record = ConnectionRecord::new(name, DNS_PORT, Outcome::Refused);
            self.log().record(record.reason(if granted {
                DENIAL
            } else {
                "the name is not granted"
            }));
        }
        known
    }

    /// Begins to connect along `route`, for a socket with these channels; false where there are too
    /// many already.
    pub(crate) fn begin(
        &mut self,
        FilteredRoute { route, filter }: FilteredRoute,
        asked: ConnectionRecord,
        from: u64,
        to: u64,
    ) -> bool {
        let share = ProcessQuota::of(&LIVE, ALL_LINES).filter(|_| self.list.len() < LINES);
        let Some(share) = share else {
            self.log().record(asked.failed("the guest or this host has too many connections"));
            return false;
        };
        let link = match route {
            Route::Direct(server) => Link::Waiting(server, asked),
            Route::Proxied(server) => {
                let served = server.serve(&self.log(), &self.limits.proxies);
                match served.and_then(Link::proxied) {
                    Ok(link) => link,
                    Err(error) => {
                        self.log().record(asked.failed(format!("it has no proxy: {error}")));
                        return false;
                    }
                }
            }
        };
        self.list.push(OutboundConnection {
            from,
            to,
            link,
            owed: true,
            filter,
            is_admitted: false,
            _share: share,
        });
        self.start();
        true
    }

    /// Whether there is room for a connection of a client of a published port.
    pub(crate) fn admits(&self) -> bool {
        let admitted = self.list.iter().filter(|line| line.is_admitted).count();
        admitted < MAX_ADMITTED && self.list.len() < LINES
    }

    /// Takes such a connection, for a guest socket with these channels. Returns it where there are
    /// too many already.
    pub(crate) fn admit(&mut self, stream: TcpStream, from: u64, to: u64) -> Result<(), TcpStream> {
        let share = ProcessQuota::of(&LIVE, ALL_LINES).filter(|_| self.admits());
        let Some(share) = share else { return Err(stream) };
        let (link, filter) = (Link::Made(stream.into()), EgressFilter::present());
        self.list.push(OutboundConnection {
            from,
            to,
            link,
            owed: false,
            filter,
            is_admitted: true,
            _share: share,
        });
        Ok(())
    }

    /// Starts to make those that wait for it, as many as there may be.
    fn start(&mut self) {
        let making = self.list.iter().filter(|line| matches!(line.link, Link::Making(..))).count();
        let log = self.log();
        let waiting = self.list.iter_mut().filter(|line| matches!(line.link, Link::Waiting(..)));
        for line in waiting.take(MAKERS.saturating_sub(making)) {
            let Some(share) = ProcessQuota::of(&MAKING_NOW, ALL_MAKERS) else { return };
            let Link::Waiting(server, asked) = &line.link else { continue };
            let (server, asked, log) = (server.clone(), asked.clone(), log.clone());
            let Ok((ours, theirs)) = UnixStream::pair() else { return };
            let (done, made) = sync_channel(1);
            let work = move || {
                let connected = server.connect(theirs.as_fd());
                log.record(match connected {
                    Ok(_) => asked,
                    Err(DENIED) => asked.refused(DENIAL),
                    Err(number) => asked.failed(Error::from_raw_os_error(number).to_string()),
                });
                // It may not be needed any more.
                let _ = done.send(connected.map(StreamSocket::from));
                drop((theirs, share));
            };
            let thread = std::thread::Builder::new().name("afresh-connect".to_owned()).spawn(work);
            if thread.is_err() {
                return;
            }
            line.link = Link::Making(made, ours);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether a server's answer is due that a guest still waits for.
    pub(crate) fn is_owed(&self, state: &Kernel) -> bool {
        self.list.iter().any(|line| line.owed && !state.line_is_deaf(line.from))
    }

    /// All of them; none are left here.
    pub(crate) fn take(&mut self) -> Self {
        let (policy, limits) = (self.policy.clone(), self.limits.clone());
        Self { policy, list: std::mem::take(&mut self.list), limits }
    }

    /// Closes all of them. Bytes in their channels belong to another state.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Moves bytes in both directions. Returns whether the guest sees a change.
    pub(crate) fn pump(&mut self, state: &mut Arc<Kernel>) -> bool {
        // Asked for all at once: this is done before each call of a guest that has any.
        let ready = self.poll(state, &[], Duration::ZERO);
        let (mut news, mut ready) = (false, ready.into_iter());
        let filter = EgressFilter::present();
        self.list.retain_mut(|line| {
            if line.filter != filter {
                // Its guest has another filter since then.
                line.cut(state);
                news = true;
                return false;
            }
            if !ready.next().unwrap_or(false) && !line.is_left(state) {
                return true;
            }
            let (moved, lasts) = line.pump(state);
            news |= moved;
            lasts
        });
        self.start();
        news
    }

    /// Waits until something can be moved, for `length` at most.
    pub(crate) fn wait(&self, state: &Kernel, length: Duration) {
        self.wait_with(state, &[], length);
    }

    /// As [`OutboundConnections::wait`], or until one of `others` is readable.
    pub(crate) fn wait_with(&self, state: &Kernel, others: &[BorrowedFd<'_>], length: Duration) {
        let waits = self.list.iter().any(|line| matches!(line.link, Link::Waiting(..)));
        // However it ends, all is looked at again.
        self.poll(state, others, if waits { length.min(POLL_INTERVAL) } else { length });
    }

    /// Which of them can move something, once any can, one of `others` is readable, or `length` is
    /// over.
    fn poll(&self, state: &Kernel, others: &[BorrowedFd<'_>], length: Duration) -> Vec<bool> {
        let wanted: Vec<_> = self.list.iter().map(|line| line.wanted(state)).collect();
        // A socket without interest would report its end all the time.
        let asked = self.list.iter().zip(&wanted).filter(|(_, wanted)| !wanted.is_empty());
        let mut fds: Vec<_> = asked
            .filter_map(|(line, wanted)| Some(PollFd::from_borrowed_fd(line.fd()?, *wanted)))
            .collect();
        fds.extend(others.iter().map(|other| PollFd::from_borrowed_fd(*other, PollFlags::IN)));
        let timeout = Timespec::try_from(length).ok();
        // A failure shows at the next read or write.
        let failed = poll(&mut fds, timeout.as_ref()).is_err();
        let mut ready = fds.iter().map(|fd| failed || !fd.revents().is_empty());
        wanted.iter().map(|wanted| !wanted.is_empty() && ready.next().unwrap_or(false)).collect()
    }
}

impl OutboundConnection {
    /// Ends it for the guest, as by a reset of the server.
    fn cut(&self, state: &mut Arc<Kernel>) {
        let state = Arc::make_mut(state);
        match &self.link {
            Link::Waiting(..) | Link::Making(..) => {
                state.line_failed(self.from, self.to, libc::ECONNRESET);
            }
            Link::Made(_) => {
                state.line_broke(self.from);
                state.line_ends(self.from, self.to);
            }
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.link {
            Link::Waiting(..) => None,
            Link::Making(_, wake) => Some(wake.as_fd()),
            Link::Made(stream) => Some(stream.as_fd()),
        }
    }

    /// The events to wait for.
    fn wanted(&self, state: &Kernel) -> PollFlags {
        let when = |holds: bool, flags| if holds { flags } else { PollFlags::empty() };
        match &self.link {
            Link::Waiting(..) => PollFlags::empty(),
            Link::Making(..) => PollFlags::IN,
            Link::Made(_) => {
                when(state.line_room(self.from) > 0, PollFlags::IN)
                    | when(state.line_bytes(self.to), PollFlags::OUT)
            }
        }
    }

    /// Whether the guest has closed an end that we still have.
    fn is_left(&self, state: &Kernel) -> bool {
        state.line_is_deaf(self.from) || state.line_is_shut(self.to)
    }

    /// Whether something was moved, and whether the connection lasts.
    fn pump(&mut self, state: &mut Arc<Kernel>) -> (bool, bool) {
        if let Link::Waiting(..) = &self.link {
            let left = state.line_is_deaf(self.from);
            if left {
                Arc::make_mut(state).line_ends(self.from, self.to);
            }
            return (false, !left);
        }
        if let Link::Making(made, _) = &self.link {
            let made = match made.try_recv() {
                Ok(made) => made,
                Err(TryRecvError::Empty) => return (false, true),
                Err(TryRecvError::Disconnected) => Err(libc::EIO),
            };
            match made {
                Ok(stream) => {
                    self.link = Link::Made(stream);
                    Arc::make_mut(state).line_is_made(self.from);
                }
                Err(error) => {
                    Arc::make_mut(state).line_failed(self.from, self.to, error);
                    return (true, false);
                }
            }
            let (_, lasts) = self.pump(state);
            return (true, lasts);
        }
        let sent = self.send(state);
        let heard = self.hear(state);
        let lasts = state.has_line(self.from) || state.has_line(self.to);
        (sent | heard, lasts)
    }

    fn stream(&mut self) -> Option<&mut StreamSocket> {
        match &mut self.link {
            Link::Made(stream) => Some(stream),
            Link::Waiting(..) | Link::Making(..) => None,
        }
    }

    /// Sends the bytes that the guest has written.
    fn send(&mut self, state: &mut Arc<Kernel>) -> bool {
        let to = self.to;
        let Some(stream) = self.stream() else { return false };
        let mut moved = false;
        loop {
            let piece = state.line_peek(to, PIECE);
            if piece.is_empty() {
                break;
            }
            match stream.write(&piece) {
                Ok(len) => {
                    SENT.set(SENT.get().saturating_add(len as u64));
                    Arc::make_mut(state).line_sent(to, len);
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    // A response may have come before, as to a body that the server does not want.
                    Arc::make_mut(state).let_line_go(to);
                    moved = true;
                    break;
                }
            }
        }
        if state.line_is_shut(to) {
            // It may be closed already, which the guest learns when it reads.
            let _ = stream.shutdown(Shutdown::Write);
            Arc::make_mut(state).let_line_go(to);
            moved = true;
        }
        self.owed |= moved;
        moved
    }

    /// Passes received bytes to the guest, as far as it has room.
    fn hear(&mut self, state: &mut Arc<Kernel>) -> bool {
        let (from, to) = (self.from, self.to);
        let Some(stream) = self.stream() else { return false };
        if state.line_is_deaf(from) {
            // A guest that has closed the socket reads no more.
            let _ = stream.shutdown(Shutdown::Read);
            Arc::make_mut(state).let_line_go(from);
            self.owed = false;
            return true;
        }
        let (mut buffer, mut moved) = ([0; PIECE], false);
        loop {
            let room = state.line_room(from).min(PIECE);
            if room == 0 {
                break;
            }
            match stream.read(&mut buffer[..room]) {
                Ok(0) => {
                    Arc::make_mut(state).let_line_go(from);
                    (self.owed, moved) = (false, true);
                    break;
                }
                Ok(len) => {
                    Arc::make_mut(state).line_came(from, &buffer[..len]);
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let state = Arc::make_mut(state);
                    if error.kind() == ErrorKind::ConnectionReset {
                        state.line_broke(from);
                    }
                    state.line_ends(from, to);
                    return true;
                }
            }
        }
        if moved {
            self.owed = false;
        }
        moved
    }
}
