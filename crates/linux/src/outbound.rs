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
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use afresh_egress::{
    ConnectionLog, ConnectionOwner, ConnectionRecord, DENIED, DestinationQuery, EgressFilter,
    EgressPolicy, Outcome, ProxyQuota, Route, Server, SharedLimit, SharedPlace, StreamSocket,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::sentry::Kernel;

/// Connections of a guest at a time.
const LINES: usize = 256;
/// Maximum connections of a guest from clients of its published ports. Idle clients leave the rest
/// to connections that the guest makes.
const MAX_ADMITTED: usize = LINES / 2;
/// Connections of all guests of this process: each takes descriptors.
static ALL_LINES: SharedLimit = SharedLimit::new(8192);
/// Connections that are made at a time, each by a thread: of a guest, and of all. Others wait for
/// their turn.
const MAKERS: usize = 16;
static ALL_MAKERS: SharedLimit = SharedLimit::new(128);
/// How soon one that waits for others' threads looks again.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The port of the name server, in records of names.
const DNS_PORT: u16 = 53;
/// The reason of a refusal by a filter.
const DENIAL: &str = "a rule of this guest denies it";
/// Bytes that are moved at a time.
const PIECE: usize = 16 << 10;

thread_local! {
    /// Bytes that were sent and not taken yet.
    static SENT: Cell<u64> = const { Cell::new(0) };
}

/// Returns the bytes that guests of this thread have sent to servers outside since the last call.
/// Bytes of undone calls count as well.
#[must_use]
pub fn take_outbound_bytes() -> u64 {
    SENT.take()
}

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
    /// Its place among those of this process.
    place: SharedPlace,
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

    /// A place for one more connection, for the owner of the guest that runs.
    fn place(&self) -> Result<SharedPlace, String> {
        if self.list.len() >= LINES {
            return Err(format!("the guest has {LINES} connections already"));
        }
        let place = ALL_LINES.take(&ConnectionOwner::present());
        place.map_err(|refusal| format!("too many connections: {refusal}"))
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
        let place = match self.place() {
            Ok(place) => place,
            Err(reason) => {
                self.log().record(asked.failed(reason));
                return false;
            }
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
            place,
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
        let place = self.place().ok().filter(|_| self.admits());
        let Some(place) = place else { return Err(stream) };
        let (link, filter) = (Link::Made(stream.into()), EgressFilter::present());
        self.list.push(OutboundConnection {
            from,
            to,
            link,
            owed: false,
            filter,
            is_admitted: true,
            place,
        });
        Ok(())
    }

    /// Starts to make those that wait for it, as many as there may be.
    fn start(&mut self) {
        let making = self.list.iter().filter(|line| matches!(line.link, Link::Making(..))).count();
        let log = self.log();
        let waiting = self.list.iter_mut().filter(|line| matches!(line.link, Link::Waiting(..)));
        for line in waiting.take(MAKERS.saturating_sub(making)) {
            let Ok(maker) = ALL_MAKERS.take(line.place.owner()) else { continue };
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
                drop((theirs, maker));
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
            let is_ready = ready.next().unwrap_or(false);
            if line.filter != filter {
                // Its guest has another filter since then.
                line.cut(state);
                news = true;
                return false;
            }
            if !is_ready && !line.is_left(state) {
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

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::time::Instant;

    use afresh_egress::NetGrant;

    use super::*;

    const NAME: DestinationQuery<'static> = DestinationQuery::Name("a.test");
    /// Guests that together have more connections to make than one owner may at a time.
    const GUESTS: usize = 7;

    /// A listener that completes no further connection, and its clients.
    fn full_listener() -> (TcpListener, Vec<TcpStream>) {
        use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        listen(&socket, 0).unwrap();
        let listener = TcpListener::from(socket);
        let address = listener.local_addr().unwrap();
        let brief = Duration::from_millis(500);
        let clients = std::iter::from_fn(|| TcpStream::connect_timeout(&address, brief).ok());
        let clients = clients.take(64).collect();
        (listener, clients)
    }

    fn guest(listener: &TcpListener) -> OutboundConnections {
        let grant = format!("a.test:80={}", listener.local_addr().unwrap());
        let grant: NetGrant = grant.parse().unwrap();
        OutboundConnections::new([grant].into_iter().collect())
    }

    fn begin(guest: &mut OutboundConnections, channel: u64) -> bool {
        let route = guest.route(NAME, 80).unwrap();
        let record = ConnectionRecord::of(NAME, 80, Outcome::Allowed);
        guest.begin(route, record, channel, channel + 1)
    }

    fn making(guest: &OutboundConnections) -> usize {
        guest.list.iter().filter(|line| matches!(line.link, Link::Making(..))).count()
    }

    #[test]
    fn connections_of_an_owner_to_a_silent_server_leave_others_theirs() {
        let (one, two) = (ConnectionOwner::new("one"), ConnectionOwner::new("two"));
        let (full, _clients) = full_listener();
        let mut guests: Vec<_> = (0..GUESTS).map(|_| guest(&full)).collect();
        one.within(|| {
            for guest in &mut guests {
                (0..MAKERS as u64).for_each(|at| assert!(begin(guest, at * 2)));
            }
        });
        assert_eq!(guests.iter().map(making).sum::<usize>(), 96);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = guest(&listener);
        two.within(|| assert!(begin(&mut other, 0)));
        let Link::Making(made, _) = &other.list[0].link else { panic!("{other:?}") };
        made.recv().unwrap().unwrap();
        // Another guest of the first owner has to wait for the end of these.
        let mut further = guest(&full);
        one.within(|| assert!(begin(&mut further, 0)));
        assert_eq!(making(&further), 0);
        drop(guests);
        let until = Instant::now() + Duration::from_secs(60);
        while making(&further) == 0 {
            assert!(Instant::now() < until, "no connection begins");
            std::thread::sleep(POLL_INTERVAL);
            further.start();
        }
    }
}
