//! The proxy of one connection: it reads each request of the guest, checks it, and passes it to the
//! rule's server.
//!
//! Promises: the server sees only requests that a rule allows, in the form that was checked, and
//! only the server of a rule gets its secret. Nothing of a connection outlives its guest's end: the
//! proxy ends when that is closed. A redirect is passed to the guest, whose next request is checked
//! by itself; another protocol is refused. May break it: a server that sends a secret back in its
//! response.
//!
//! It is a thread with two sockets, and reads heads itself: a library that repairs ambiguous heads
//! would hide them.

mod quota;
mod relay;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::destination::{DENIED, DestinationQuery};
use crate::filter::EgressFilter;
use crate::log::{ConnectionLog, ConnectionRecord, Outcome};
use crate::peer::Peer;
use crate::request_head::{HeaderList, MAX_HEAD, RequestHead};
use crate::rule::Rule;
use crate::tls;

use quota::ProxyPermit;
pub use quota::ProxyQuota;
use relay::{RelayEnd, request_to_sent};

/// Stack of a thread that serves one connection.
const STACK: usize = 512 << 10;
/// Time for a handshake, and for a head from its first byte.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Time without a byte in either direction.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Time and bytes of further input from a refused guest.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1 << 20;

/// A server whose requests are checked.
#[derive(Clone, Debug)]
pub struct ProxiedServer {
    name: String,
    port: u16,
    first: Rule,
    others: Vec<Rule>,
    /// The filter of its guest, with headers for its requests.
    filter: Option<EgressFilter>,
}

/// A failure of a connection that the guest is not sent as a response.
enum Stop {
    /// The guest has closed it, or it is over.
    Over,
    /// A refusal or failure, for the log.
    Because(Outcome, String),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Because(Outcome::Failed, error.to_string())
    }
}

/// A refusal or failure that the guest is sent as a response.
struct Refusal {
    status: u16,
    reason: String,
    /// The reason for the log, where the guest may not have it.
    detail: Option<String>,
}

impl Refusal {
    fn new(status: u16, reason: String) -> Self {
        Self { status, reason, detail: None }
    }
}

impl ProxiedServer {
    pub(crate) fn new(name: &str, port: u16, first: Rule, others: Vec<Rule>) -> Self {
        Self { name: name.to_owned(), port, first, others, filter: None }
    }

    /// The same for a guest with a filter.
    pub(crate) fn filtered(mut self, filter: EgressFilter) -> Self {
        self.filter = Some(filter);
        self
    }

    /// The headers of the filter for its requests.
    fn filter_headers(&self) -> &[(String, Vec<u8>)] {
        self.filter.as_ref().map_or(&[], |filter| filter.headers(&self.name))
    }

    fn record(&self, outcome: Outcome) -> ConnectionRecord {
        ConnectionRecord::new(&*self.name, self.port, outcome)
    }

    /// Starts to serve a connection of a guest with this quota, and returns the guest's end of it,
    /// which does not block. Its end is the end of the proxy.
    ///
    /// # Errors
    /// When the guest or the present owner has too many, or the host has no threads or descriptors.
    pub fn serve(&self, log: &ConnectionLog, quota: &ProxyQuota) -> io::Result<UnixStream> {
        let (guest, own) = UnixStream::pair()?;
        guest.set_nonblocking(true)?;
        own.set_nonblocking(true)?;
        let own = Arc::new(own);
        let permit = quota.permit(own.clone()).map_err(io::Error::other)?;
        let (server, log) = (self.clone(), log.clone());
        let work = move || match server.accept(own) {
            Ok(guest) => {
                let (upstream, is_gone) = (None, false);
                ProxiedConnection { server, log, guest, upstream, is_gone, permit }.run();
            }
            Err(reason) => log.record(server.record(Outcome::Failed).reason(reason)),
        };
        std::thread::Builder::new()
            .name("afresh-egress".to_owned())
            .stack_size(STACK)
            .spawn(work)?;
        Ok(guest)
    }

    /// The guest's side, before a handshake.
    fn accept(&self, socket: Arc<UnixStream>) -> Result<Peer, String> {
        let Some(authority) = self.first.authority() else {
            return Ok(Peer::new(socket.into(), None));
        };
        let tls = tls::guest_side(authority, &self.name)?;
        Ok(Peer::new(socket.into(), Some(tls.into())))
    }

    /// The server's side, before a handshake. The end of `guest` ends the attempt.
    fn connect(&self, guest: BorrowedFd<'_>) -> Result<Peer, String> {
        let mut server = self.first.to().server(DestinationQuery::Name(&self.name), self.port);
        if let Some(filter) = &self.filter
            && filter.leaves_to_addresses(&self.name)
        {
            server = server.filtered(filter.clone());
        }
        let error = |number| match number {
            DENIED => "a rule of this guest denies its addresses".to_owned(),
            number => io::Error::from_raw_os_error(number).to_string(),
        };
        let socket = server.connect(guest).map_err(error)?.into();
        if !self.first.tls() {
            return Ok(Peer::new(socket, None));
        }
        let tls = tls::server_side(&self.name, self.first.roots())?;
        Ok(Peer::new(socket, Some(tls.into())))
    }

    /// The value of `Host`.
    fn host(&self) -> String {
        match self.port == self.first.usual_port() {
            true => self.name.clone(),
            false => format!("{}:{}", self.name, self.port),
        }
    }
}

/// Whether new bytes may end a head, or make it invalid.
fn may_end_head(input: &[u8], seen: usize) -> bool {
    let fresh = &input[seen.saturating_sub(3)..];
    input.len() >= MAX_HEAD || fresh.windows(2).any(|two| two == b"\n\n" || two == b"\n\r")
}

/// A connection in service.
struct ProxiedConnection {
    server: ProxiedServer,
    log: ConnectionLog,
    guest: Peer,
    /// The server's side, once there was a request.
    upstream: Option<Peer>,
    /// Whether the guest's end is closed.
    is_gone: bool,
    permit: ProxyPermit,
}

impl ProxiedConnection {
    fn run(mut self) {
        let end = self.serve();
        if self.permit.has_given_up() {
            let reason = "another owner needed its place, and its own has the most connections";
            return self.log.record(self.server.record(Outcome::Failed).reason(reason));
        }
        match end {
            Ok(()) | Err(Stop::Over) => {}
            Err(Stop::Because(outcome, reason)) => {
                // An alert of TLS may wait.
                let _ = self.guest.flush();
                self.log.record(self.server.record(outcome).reason(reason));
            }
        }
    }

    fn serve(&mut self) -> Result<(), Stop> {
        self.shake_hands()?;
        self.log.record(self.server.record(Outcome::Allowed));
        while let Some(read) = self.next_head()? {
            self.permit.note_request();
            let lasts = match read {
                Ok(head) => self.exchange(head)?,
                Err(reason) => {
                    self.log.record(self.server.record(Outcome::Refused).reason(reason));
                    self.refuse(&Refusal::new(400, format!("the request is refused: {reason}")));
                    false
                }
            };
            if !lasts {
                break;
            }
            self.permit.note_idle();
        }
        self.guest.end();
        Ok(())
    }

    /// Waits until a side can move something. An error when it takes too long, or the guest's end
    /// is closed.
    fn wait(&mut self, until: Instant) -> Result<(), Stop> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Stop::Because(
                Outcome::Failed,
                "a side was silent for too long".to_owned(),
            ));
        }
        self.look(left)
    }

    /// As [`ProxiedConnection::wait`], for `length` at most, which is no error.
    fn look(&mut self, length: Duration) -> Result<(), Stop> {
        let timeout = Timespec::try_from(length).ok();
        let guest = PollFd::from_borrowed_fd(self.guest.fd(), self.guest.wanted());
        let mut fds = vec![guest];
        // A socket without interest would report its end all the time.
        if let Some(upstream) =
            self.upstream.as_ref().filter(|upstream| !upstream.wanted().is_empty())
        {
            fds.push(PollFd::from_borrowed_fd(upstream.fd(), upstream.wanted()));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        // Both directions are closed: half an end is no hangup. Until its end was read, more may be
        // read.
        let hangup = fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR);
        self.is_gone |= hangup && !self.guest.wanted().contains(PollFlags::IN);
        if self.is_gone { Err(Stop::Over) } else { Ok(()) }
    }

    fn shake_hands(&mut self) -> Result<(), Stop> {
        let until = Instant::now() + HEAD_TIMEOUT;
        let refused = |error: io::Error| {
            Stop::Because(Outcome::Refused, format!("no TLS for this host: {error}"))
        };
        while self.guest.is_handshaking() {
            let moved =
                self.guest.fill().map_err(refused)? | self.guest.flush().map_err(refused)?;
            if self.guest.has_ended && self.guest.is_handshaking() {
                return Err(Stop::Because(
                    Outcome::Failed,
                    "the guest has ended the handshake".to_owned(),
                ));
            }
            if !moved {
                self.wait(until)?;
            }
        }
        Ok(())
    }

    /// The head of the next request; nothing at the end of the connection.
    fn next_head(&mut self) -> Result<Option<Result<RequestHead, &'static str>>, Stop> {
        let mut until =
            Instant::now() + if self.guest.input.is_empty() { IDLE_TIMEOUT } else { HEAD_TIMEOUT };
        let mut seen = 0;
        loop {
            // The server may have ended the connection, or sent what belongs to no request: the
            // next request has another. An update of keys has to be answered.
            let is_over = |up: &mut Peer| {
                up.fill().is_err() || up.flush().is_err() || up.has_ended || !up.input.is_empty()
            };
            if self.upstream.as_mut().is_some_and(is_over) {
                self.upstream = None;
            }
            let input = &self.guest.input;
            if may_end_head(input, seen) {
                match RequestHead::parse(input) {
                    Err(reason) => return Ok(Some(Err(reason))),
                    Ok(None) => {}
                    Ok(Some((head, len))) => {
                        self.guest.take(len);
                        return Ok(Some(Ok(head)));
                    }
                }
            }
            seen = input.len();
            if self.guest.has_ended {
                return if seen == 0 { Ok(None) } else { Ok(Some(Err("it ends in its head"))) };
            }
            let moved = self.guest.fill()? | self.guest.flush()?;
            if seen == 0 && !self.guest.input.is_empty() {
                until = Instant::now() + HEAD_TIMEOUT;
            }
            if !moved {
                self.wait(until)?;
            }
        }
    }

    /// Sends all output to the guest.
    fn drain(&mut self) -> Result<(), Stop> {
        // It is not read here, so its end would be reported all the time.
        let upstream = self.upstream.take();
        loop {
            self.guest.flush()?;
            if self.guest.is_flushed() {
                break;
            }
            self.wait(Instant::now() + IDLE_TIMEOUT)?;
            self.guest.fill()?;
        }
        self.upstream = upstream;
        Ok(())
    }

    /// Sends a response that says why a request is refused.
    fn refuse(&mut self, refusal: &Refusal) {
        let phrase = match refusal.status {
            400 => "Bad Request",
            403 => "Forbidden",
            _ => "Bad Gateway",
        };
        let text = format!("afresh: {}\n", refusal.reason);
        let head = format!(
            "HTTP/1.1 {} {phrase}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {}\r\n\
             connection: close\r\n\r\n",
            refusal.status,
            text.len()
        );
        self.guest.output.extend([head.as_bytes(), text.as_bytes()].concat());
        self.upstream = None;
        // A guest that still sends would lose the response if its end were closed at once.
        let until = Instant::now() + LINGER_TIMEOUT;
        let mut dropped = 0;
        while dropped < LINGER_BYTES && !self.guest.has_ended {
            let Ok(flushed) = self.guest.flush() else { return };
            if self.guest.is_flushed() {
                self.guest.end();
            }
            let Ok(filled) = self.guest.fill() else { return };
            dropped += self.guest.input.len();
            self.guest.input.clear();
            if !flushed && !filled && self.wait(until).is_err() {
                return;
            }
        }
    }

    /// The rule and the headers for a request.
    fn check(&mut self, head: &RequestHead) -> Result<(Rule, HeaderList), Refusal> {
        let server = &self.server;
        let refused = |reason: String| Refusal::new(403, reason);
        if !head.is_for(&server.name, server.port, server.first.usual_port()) {
            let reason =
                format!("the request's Host is not {}, which the connection is for", server.host());
            return Err(refused(reason));
        }
        let mut rules = std::iter::once(&server.first).chain(&server.others);
        let rule = rules.find(|rule| rule.allows(head)).ok_or_else(|| {
            let path: String = head.target.path().chars().take(200).collect();
            refused(format!("no rule allows {} {path} at {}", head.method, server.host()))
        })?;
        let headers = rule.headers(head.headers.clone(), self.server.filter_headers());
        let headers = headers.map_err(|reason| Refusal {
            detail: Some(reason),
            ..Refusal::new(502, "this host cannot read the credential of the rule".to_owned())
        })?;
        Ok((rule.clone(), headers))
    }

    /// Makes the server's side, unless it lasts from the request before.
    fn reach(&mut self) -> Result<Result<(), Refusal>, Stop> {
        if self.upstream.is_some() {
            return Ok(Ok(()));
        }
        let failed = |why: String, host: String| {
            Refusal::new(502, format!("no connection to {host}: {why}"))
        };
        match self.server.connect(self.guest.fd()) {
            Ok(upstream) => self.upstream = Some(upstream),
            Err(why) => return Ok(Err(failed(why, self.server.host()))),
        }
        let until = Instant::now() + HEAD_TIMEOUT;
        while let Some(upstream) =
            self.upstream.as_mut().filter(|upstream| upstream.is_handshaking())
        {
            let moved = upstream.flush().and_then(|sent| Ok(upstream.fill()? | sent));
            let ended = upstream.has_ended && upstream.is_handshaking();
            match moved {
                Err(error) => return Ok(Err(failed(error.to_string(), self.server.host()))),
                Ok(_) if ended => {
                    let why = "it has ended the handshake".to_owned();
                    return Ok(Err(failed(why, self.server.host())));
                }
                Ok(true) => {}
                Ok(false) => {
                    // Input of the guest waits, up to its bound. An update of keys is answered.
                    self.guest.fill()?;
                    self.guest.flush()?;
                    self.wait(until)?;
                }
            }
        }
        Ok(Ok(()))
    }

    /// Serves one request. Returns whether the connection lasts.
    fn exchange(&mut self, head: RequestHead) -> Result<bool, Stop> {
        let path = head.target.path().to_owned();
        let record =
            |server: &ProxiedServer, outcome| server.record(outcome).request(&head.method, &path);
        let ready = match self.check(&head) {
            Ok(ready) => self.reach()?.map(|()| ready),
            Err(refusal) => Err(refusal),
        };
        let (rule, headers) = match ready {
            Ok(ready) => ready,
            Err(refusal) => {
                let outcome =
                    if refusal.status == 403 { Outcome::Refused } else { Outcome::Failed };
                let reason = refusal.detail.as_ref().unwrap_or(&refusal.reason);
                self.log.record(record(&self.server, outcome).reason(&**reason));
                self.refuse(&refusal);
                return Ok(false);
            }
        };
        // A connection takes time: a guest that was reset since has sent nothing.
        self.guest.fill()?;
        self.look(Duration::ZERO)?;
        if rule.logs_requests() || self.log.takes_requests() {
            let text = rule.text();
            self.log.record(
                record(&self.server, Outcome::Allowed).reason(format!("by the rule for {text}")),
            );
        }
        if head.expects_continue {
            self.guest.output.extend(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        let sent = request_to_sent(&head, &self.server.host(), &headers);
        let Some(upstream) = &mut self.upstream else { return Err(Stop::Over) };
        upstream.output.extend(sent);
        match self.relay(&head) {
            Ok(lasts) => Ok(lasts),
            Err(RelayEnd::Stop(stop)) => Err(stop),
            Err(RelayEnd::Server { reason, begun }) => {
                self.log.record(record(&self.server, Outcome::Failed).reason(&*reason));
                if !begun {
                    let reason = format!("{} failed: {reason}", self.server.host());
                    self.refuse(&Refusal::new(502, reason));
                    return Ok(false);
                }
                self.upstream = None;
                self.drain()?;
                // Without an orderly end the guest notices that the body is cut off.
                Err(Stop::Over)
            }
        }
    }
}
