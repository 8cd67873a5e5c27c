//! Connections that a guest has made to the outside, as the sentry has them: sockets of the host's between its channels.
//!
//! Promises: nothing is connected to but what was granted; a guest waits for nobody but its own servers, and within its time;
//! none of these connections outlives the state that it was made in: a reset, a rollback or a fork finds them closed. May
//! break it: servers, which see what a call has sent though the call is undone.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::personality::State;
use crate::reach::{Destination, Server};

/// Connections of a guest at a time.
const LINES: usize = 256;
/// How long it may take to make one.
const MAKING: Duration = Duration::from_secs(30);
/// Bytes that are moved at a time.
const PIECE: usize = 16 << 10;

/// A connection. Its channels are those of a socket of the guest's.
#[derive(Debug)]
struct Line {
    /// What the guest reads.
    from: u64,
    /// What it writes.
    to: u64,
    link: Link,
    /// Whether it is the server's turn: nothing has come since something was sent, or ever.
    owed: bool,
}

#[derive(Debug)]
enum Link {
    /// It is being made. The other end of the stream is let go when that is done.
    Making(Receiver<Result<TcpStream, i32>>, UnixStream),
    Made(TcpStream),
}

/// All of a guest's, and where it may connect to.
#[derive(Debug)]
pub(crate) struct Lines {
    pub(crate) granted: Arc<[Destination]>,
    list: Vec<Line>,
}

/// The number of an error that the kernel or a resolver gave.
fn number(error: &std::io::Error) -> i32 {
    match error.kind() {
        ErrorKind::TimedOut => libc::ETIMEDOUT,
        _ => error.raw_os_error().unwrap_or(libc::EHOSTUNREACH),
    }
}

fn make(server: &Server) -> Result<TcpStream, i32> {
    let addresses = server.addresses().map_err(|error| number(&error))?;
    let mut last = libc::EHOSTUNREACH;
    for address in addresses {
        match TcpStream::connect_timeout(&address, MAKING) {
            Ok(stream) => {
                // What the guest writes it has gathered itself.
                let set = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
                return set.map(|()| stream).map_err(|error| number(&error));
            }
            Err(error) => last = number(&error),
        }
    }
    Err(last)
}

impl Lines {
    pub(crate) fn new(granted: Arc<[Destination]>) -> Self {
        Self { granted, list: Vec::new() }
    }

    /// Begins to connect to a server, for a socket with these channels; false where there are too many already.
    pub(crate) fn begin(&mut self, server: Server, from: u64, to: u64) -> bool {
        if self.list.len() >= LINES {
            return false;
        }
        let Ok((ours, theirs)) = UnixStream::pair() else { return false };
        let (done, making) = sync_channel(1);
        let work = move || {
            // Nobody may want it any more.
            let _ = done.send(make(&server));
            drop(theirs);
        };
        let thread = std::thread::Builder::new().name("afresh-connect".to_owned()).spawn(work);
        if thread.is_err() {
            return false;
        }
        self.list.push(Line { from, to, link: Link::Making(making, ours), owed: true });
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether a server's answer is due.
    pub(crate) fn is_owed(&self) -> bool {
        self.list.iter().any(|line| line.owed)
    }

    /// Closes all of them. What is left in the state of their channels is another state's.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Moves what can be moved, both ways. Whether the guest sees something new.
    pub(crate) fn pump(&mut self, state: &mut Arc<State>) -> bool {
        let mut news = false;
        self.list.retain_mut(|line| {
            let (moved, lasts) = line.pump(state);
            news |= moved;
            lasts
        });
        news
    }

    /// Waits until something can be moved, for `length` at most.
    pub(crate) fn wait(&self, state: &State, length: Duration) {
        let interest = |line: &Line| match &line.link {
            Link::Making(..) => PollFlags::IN,
            Link::Made(_) => {
                let (room, bytes) = (state.line_room(line.from), state.line_bytes(line.to));
                let when = |holds: bool, flags| if holds { flags } else { PollFlags::empty() };
                when(room > 0, PollFlags::IN) | when(bytes, PollFlags::OUT)
            }
        };
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        for line in &self.list {
            let interest = interest(line);
            match &line.link {
                Link::Making(_, wake) => fds.push(PollFd::from_borrowed_fd(wake.as_fd(), interest)),
                // One that the guest has no room for would wake us all the time.
                Link::Made(_) if interest.is_empty() => {}
                Link::Made(stream) => {
                    fds.push(PollFd::from_borrowed_fd(stream.as_fd(), interest));
                }
            }
        }
        // However it ends, it is looked at again.
        let _ = poll(&mut fds, Timespec::try_from(length).ok().as_ref());
    }
}

impl Line {
    /// Whether something was moved, and whether the connection lasts.
    fn pump(&mut self, state: &mut Arc<State>) -> (bool, bool) {
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

    fn stream(&mut self) -> Option<&mut TcpStream> {
        match &mut self.link {
            Link::Made(stream) => Some(stream),
            Link::Making(..) => None,
        }
    }

    /// What the guest has written goes out.
    fn send(&mut self, state: &mut Arc<State>) -> bool {
        let (from, to) = (self.from, self.to);
        let Some(stream) = self.stream() else { return false };
        let mut moved = false;
        loop {
            let piece = state.line_peek(to, PIECE);
            if piece.is_empty() {
                break;
            }
            match stream.write(&piece) {
                Ok(len) => {
                    Arc::make_mut(state).line_sent(to, len);
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    Arc::make_mut(state).line_ends(from, to);
                    return true;
                }
            }
        }
        if state.line_is_shut(to) {
            // It may be gone already, which the guest hears of when it reads.
            let _ = stream.shutdown(Shutdown::Write);
            Arc::make_mut(state).let_line_go(to);
            moved = true;
        }
        self.owed |= moved;
        moved
    }

    /// What has come goes to the guest, as far as it has room.
    fn hear(&mut self, state: &mut Arc<State>) -> bool {
        let (from, to) = (self.from, self.to);
        let Some(stream) = self.stream() else { return false };
        if state.line_is_deaf(from) {
            // Nobody reads it; a guest that has closed the socket has done with it.
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
                Err(_) => {
                    Arc::make_mut(state).line_ends(from, to);
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
