//! A second process that outlives a pager which is killed, and closes the memory of its VMMs.
//!
//! The watchdog holds a copy of every VMM's userfaultfd. While it does, missing pages stay missing:
//! the kernel would give out zero pages once the last copy is closed. When the pager ends without
//! releasing a VMM, the watchdog poisons the missing pages, so that touching one raises SIGBUS, or
//! ends a VMM that does not allow that.
//!
//! A VMM sends its handshake and runs on: Firecracker never looks at the socket again. So the
//! watchdog also holds the sockets of endpoints, and connections whose handshake the pager has not
//! handed over. It takes the handshakes in them itself when the pager has ended. It is the watchdog
//! that accepts connections, and it passes them to the pager: no connection is the pager's alone.
//!
//! Promises: a VMM that has sent its handshake never reads a zero page in place of content, and
//! never waits without end, when its pager is killed at any moment.
//!
//! May break it: the watchdog being killed together with the pager, or between its accepting a
//! connection and passing it on; a VMM that keeps its userfaultfd open, as Firecracker does, waits
//! then. A socket that a service manager holds is not closed here: the next pager serves it.
//!
//! A handshake whose first part the pager has read cannot be read again. The pager reports such a
//! handshake to the watchdog first, and the watchdog ends its VMM if the pager is killed.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use afresh_sys::errno::{EAGAIN, EINVAL, EMFILE};
use afresh_sys::socket::{self, Peer};
use afresh_sys::{Uffd, UffdMode, fork, poll};
use serde_json::{Value, json};

use super::VmmOptions;
use super::connection::Connection;
use super::handshake::{Handshake, Mapping, receive};
use super::listener::Listener;
use super::registration::{poison, unregister};

/// Maximum time of one wait for the watchdog before a stop is noticed.
const TICK: Duration = Duration::from_millis(50);
/// Bytes of an answer: the number of an error, or zero with the descriptors of a VMM.
const ANSWER: usize = 4;
/// Descriptors that the watchdog has of a VMM at most: socket or userfaultfd, and process, and
/// those of a message.
const DESCRIPTORS: usize = 4;

/// A pager's connection to its watchdog. Clones share it.
#[derive(Clone, Debug)]
pub struct Watchdog {
    stream: Arc<Mutex<UnixStream>>,
    next: Arc<AtomicU64>,
}

/// An endpoint or a VMM in the watchdog, until this is dropped.
#[derive(Debug)]
pub(super) struct WatchdogEntry {
    watchdog: Watchdog,
    id: u64,
    /// The process that serves it. A child of a fork releases nothing.
    generation: u32,
}

impl Watchdog {
    /// Starts `command` as the watchdog. Its program calls [`run_watchdog`] with its standard
    /// input. Its process group is a new one, so that signals of a terminal do not end it.
    ///
    /// # Errors
    /// An error of starting a process.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let child =
            command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0).spawn()?;
        // It ends after this process, or is reaped by init.
        drop(child);
        Ok(Self { stream: Arc::new(Mutex::new(ours)), next: Arc::default() })
    }

    fn entry(&self) -> WatchdogEntry {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        WatchdogEntry { watchdog: self.clone(), id, generation: fork::generation() }
    }

    /// Hands over a copy of the socket of an endpoint. Those that a service manager holds stay open
    /// when the pager has ended.
    pub(super) fn hold_endpoint(&self, listener: &Listener) -> io::Result<WatchdogEntry> {
        let entry = self.entry();
        let socket = listener.socket().as_fd();
        // Neither process waits in `accept` where the other was faster.
        socket::set_nonblocking(socket).map_err(io::Error::other)?;
        let line = json!({ "endpoint": entry.id, "closes": listener.is_own() });
        self.send(&format!("{line}\n"), &[socket])?;
        Ok(entry)
    }

    /// Has the watchdog accept a VMM at an endpoint; `None` where none has connected. Once
    /// `is_over`, a VMM that comes is left to the watchdog.
    pub(super) fn accept(
        &self,
        endpoint: &WatchdogEntry,
        is_over: impl Fn() -> bool,
    ) -> Result<Option<Connection>, AcceptError> {
        let (ours, theirs) = UnixStream::pair().map_err(AcceptError::Refused)?;
        let entry = self.entry();
        let line = format!("{}\n", json!({ "accept": endpoint.id, "greet": entry.id }));
        self.send(&line, &[theirs.as_fd()]).map_err(|_| AcceptError::Ended)?;
        drop(theirs);
        let mut fds = Vec::new();
        let answer = loop {
            match poll::readable([ours.as_fd()], TICK) {
                Ok([false]) if is_over() => {
                    // It is closed when this process has ended.
                    std::mem::forget(entry);
                    return Ok(None);
                }
                Ok([false]) => {}
                Ok([true]) => {
                    let mut answer = [0; ANSWER];
                    let received = socket::receive(&ours, &mut answer, &mut fds);
                    break received
                        .map(|len| (len == ANSWER).then_some(i32::from_le_bytes(answer)));
                }
                Err(error) => break Err(error),
            }
        };
        let error = match (answer, fds.pop(), fds.pop()) {
            (Ok(None), ..) => return Err(AcceptError::Ended),
            (Ok(Some(0)), Some(process), Some(stream)) => {
                let (stream, process) = (stream.into(), process.into());
                return Ok(Some(Connection { stream, process, kept: Some(entry) }));
            }
            (Ok(Some(EAGAIN)), ..) => return Ok(None),
            (Ok(Some(0)), ..) => io::Error::from_raw_os_error(EMFILE),
            (Ok(Some(errno)), ..) => return Err(AcceptError::refused(errno)),
            (Err(error), ..) => io::Error::other(error),
        };
        // The watchdog has a VMM, and this process lacks its descriptors.
        entry.abandon();
        Err(AcceptError::Refused(error))
    }

    /// Hands over a VMM that has connected. Where the watchdog has ended,
    /// [`WatchdogEntry::hold`] returns that.
    pub(super) fn greet(&self, stream: &UnixStream, process: &Peer) -> WatchdogEntry {
        let entry = self.entry();
        let line = format!("{}\n", json!({ "greet": entry.id }));
        let _ = self.send(&line, &[stream.as_fd(), process.as_fd()]);
        entry
    }

    fn send(&self, line: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        socket::send(&stream, line.as_bytes(), fds).map_err(io::Error::other)
    }
}

/// Why no VMM was accepted.
pub(super) enum AcceptError {
    /// The watchdog has ended.
    Ended,
    /// The VMM stays in the queue of the endpoint, or the watchdog closes its memory.
    Refused(io::Error),
}

impl AcceptError {
    fn refused(errno: i32) -> Self {
        Self::Refused(io::Error::from_raw_os_error(errno))
    }
}

impl WatchdogEntry {
    /// Has the watchdog close the memory of a VMM that is not served.
    fn abandon(self) {
        let _ = self.watchdog.send(&format!("{}\n", json!({ "refuse": self.id })), &[]);
        std::mem::forget(self);
    }

    /// Reports that the handshake comes in parts, and that the next one is taken out of the stream.
    /// Where the watchdog has ended, [`WatchdogEntry::hold`] returns that.
    pub(super) fn begin_parts(&self) {
        let _ = self.watchdog.send(&format!("{}\n", json!({ "parts": self.id })), &[]);
    }

    /// Hands over the memory of a VMM.
    pub(super) fn hold(
        &mut self,
        process: &Peer,
        uffd: &Uffd,
        mappings: &[Mapping],
    ) -> io::Result<()> {
        let mappings: Value =
            mappings.iter().map(|of| json!([of.base, of.pages, of.unit])).collect();
        let line = format!("{}\n", json!({ "hold": self.id, "mappings": mappings }));
        self.watchdog.send(&line, &[uffd.as_fd(), process.as_fd()])
    }
}

impl Drop for WatchdogEntry {
    fn drop(&mut self) {
        if self.generation != fork::generation() {
            return;
        }
        // A watchdog that has ended holds nothing.
        let _ = self.watchdog.send(&format!("{}\n", json!({ "release": self.id })), &[]);
    }
}

/// A VMM in the watchdog.
struct HeldVm {
    uffd: Uffd,
    process: Peer,
    mappings: Vec<Mapping>,
}

impl HeldVm {
    /// Ensures that no missing page is ever read.
    fn close(&self) {
        let closed =
            self.mappings.iter().all(|of| poison(&self.uffd, of.base, (0, of.pages), of.unit));
        if closed {
            unregister(&self.uffd, self.mappings.iter().map(|of| (of.base, of.pages)));
        } else {
            self.process.end();
        }
    }
}

/// An entry of the watchdog.
enum HeldItem {
    /// An endpoint, and whether it closes with the pager.
    Endpoint(UnixListener, bool),
    /// A VMM whose handshake the pager has not handed over.
    Connection(UnixStream, Peer),
    /// A VMM of whose handshake the pager has a part, and maybe the only other userfaultfd.
    PartialConnection(Peer),
    Vm(HeldVm),
}

impl HeldItem {
    fn close(self) {
        match self {
            HeldItem::Vm(vm) => vm.close(),
            HeldItem::Connection(stream, process) => refuse(&stream, process),
            HeldItem::PartialConnection(process) => process.end(),
            HeldItem::Endpoint(socket, true) => close_endpoint(&socket),
            HeldItem::Endpoint(_, false) => {}
        }
    }
}

/// Takes the handshake of a VMM that will not be served, if it sends one, and closes its memory.
pub(super) fn refuse(stream: &UnixStream, process: Peer) {
    let stop = AtomicBool::new(false);
    match receive(stream, usize::MAX, &VmmOptions::new(&stop), || {}) {
        Ok(Handshake { mappings, uffd, .. }) => HeldVm { uffd, process, mappings }.close(),
        Err(refusal) if refusal.waits => process.end(),
        // It waits for nothing.
        Err(_) => {}
    }
}

/// Refuses the VMMs that have connected and were not accepted, and all that would.
fn close_endpoint(socket: &UnixListener) {
    if socket::refuse_connections(socket).is_err() || socket.set_nonblocking(true).is_err() {
        return;
    }
    std::thread::scope(|scope| {
        while let Ok((stream, _)) = socket.accept() {
            if let Ok(process) = Peer::of(&stream) {
                scope.spawn(move || refuse(&stream, process));
            }
        }
    });
}

/// The work of the watchdog: holds the endpoints and VMMs of the pager behind `stream`, and closes
/// those that it has not released when it ends.
///
/// # Errors
/// An error of the stream, or a message that is no pager's. All were closed before.
pub fn run_watchdog(stream: &UnixStream) -> io::Result<()> {
    let mut held = BTreeMap::new();
    let result = follow(stream, &mut held);
    // Side by side: a connection may stay silent for its time.
    std::thread::scope(|scope| {
        held.into_values().for_each(|held| _ = scope.spawn(|| held.close()));
    });
    result
}

/// Takes messages until the pager has ended.
fn follow(stream: &UnixStream, held: &mut BTreeMap<u64, HeldItem>) -> io::Result<()> {
    let (mut text, mut part, mut fds) = (Vec::new(), [0; 4096], Vec::new());
    loop {
        let received = socket::receive(stream, &mut part, &mut fds).map_err(io::Error::other)?;
        if received == 0 {
            return Ok(());
        }
        for byte in &part[..received] {
            if *byte != b'\n' {
                text.push(*byte);
                continue;
            }
            let message: Value = serde_json::from_slice(&text)?;
            text.clear();
            if let Some(id) = message["release"].as_u64() {
                held.remove(&id);
                continue;
            }
            let mut next = || {
                let fd = (!fds.is_empty()).then(|| fds.remove(0));
                fd.ok_or(io::Error::from(io::ErrorKind::InvalidData))
            };
            if let Some(id) = message["endpoint"].as_u64() {
                let closes = message["closes"] != false;
                held.insert(id, HeldItem::Endpoint(next()?.into(), closes));
            } else if let Some(endpoint) = message["accept"].as_u64() {
                let id = message["greet"].as_u64().ok_or(io::ErrorKind::InvalidData)?;
                accept_at(held, (endpoint, id), &next()?.into());
            } else if let Some(id) = message["refuse"].as_u64() {
                held.remove(&id).into_iter().for_each(close_aside);
            } else if let Some(id) = message["greet"].as_u64() {
                held.insert(id, HeldItem::Connection(next()?.into(), next()?.into()));
            } else if let Some(id) = message["parts"].as_u64() {
                match held.remove(&id) {
                    Some(HeldItem::Connection(_, process)) => {
                        held.insert(id, HeldItem::PartialConnection(process));
                    }
                    other => held.extend(other.map(|item| (id, item))),
                }
            } else if let Some(id) = message["hold"].as_u64() {
                let uffd = Uffd::from_fd(next()?, UffdMode::Events);
                let (process, mappings) = (next()?.into(), mappings(&message["mappings"]));
                held.insert(id, HeldItem::Vm(HeldVm { uffd, process, mappings }));
            } else {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }
}

/// Accepts a VMM at an endpoint, holds it under `id`, and passes it to the pager behind `reply`.
fn accept_at(held: &mut BTreeMap<u64, HeldItem>, (endpoint, id): (u64, u64), reply: &UnixStream) {
    let accepted = match held.get(&endpoint) {
        Some(HeldItem::Endpoint(socket, _)) => accept(socket),
        _ => Err(io::ErrorKind::InvalidData.into()),
    };
    // A pager that has ended takes no answer, and the VMM is closed with the others.
    let _ = match accepted {
        Ok((stream, process)) => {
            let fds = [stream.as_fd(), process.as_fd()];
            let sent = socket::send(reply, &0_i32.to_le_bytes(), &fds);
            held.insert(id, HeldItem::Connection(stream, process));
            sent
        }
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(EINVAL);
            socket::send(reply, &errno.to_le_bytes(), &[])
        }
    };
}

/// The next VMM of an endpoint, which stays in the queue unless there are descriptors for all of
/// it.
fn accept(socket: &UnixListener) -> io::Result<(UnixStream, Peer)> {
    let room: Vec<_> = (0..DESCRIPTORS).map(|_| socket.try_clone()).collect::<Result<_, _>>()?;
    drop(room);
    let (stream, _) = socket.accept()?;
    // Fails where it has ended.
    let process = Peer::of(&stream).map_err(|_| io::Error::from_raw_os_error(EAGAIN))?;
    Ok((stream, process))
}

/// Closes an entry while others are looked after.
fn close_aside(item: HeldItem) {
    let (give, take) = mpsc::channel::<HeldItem>();
    let aside = std::thread::Builder::new().name("afresh-close".to_owned());
    match aside.spawn(move || take.into_iter().for_each(HeldItem::close)) {
        Ok(_) => _ = give.send(item),
        Err(_) => item.close(),
    }
}

fn mappings(list: &Value) -> Vec<Mapping> {
    let one = |entry: &Value| {
        let number = |at: usize| entry[at].as_u64().and_then(|n| usize::try_from(n).ok());
        Some(Mapping { base: number(0)?, pages: number(1)?, offset: 0, unit: number(2)? })
    };
    list.as_array().into_iter().flatten().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::process::Child;

    use super::*;

    /// A waiting program, its entry in the watchdog, and both ends of its connection.
    fn connected(watchdog: &Watchdog) -> (Child, WatchdogEntry, [UnixStream; 2]) {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let (stream, vmm) = UnixStream::pair().unwrap();
        let entry = watchdog.greet(&stream, &pidfd.into());
        (child, entry, [stream, vmm])
    }

    #[test]
    fn a_vmm_whose_handshake_comes_in_parts_ends_with_its_pager() {
        for (first, ends) in [("[", true), ("", false)] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let watchdog = Watchdog { stream: Arc::new(Mutex::new(ours)), next: Arc::default() };
            let (mut child, entry, [stream, mut vmm]) = connected(&watchdog);
            vmm.write_all(first.as_bytes()).unwrap();
            drop(vmm);
            let stop = AtomicBool::new(false);
            if ends {
                let refused = receive(&stream, 8, &VmmOptions::new(&stop), || entry.begin_parts());
                assert!(refused.is_err(), "a part is missing");
            }
            // The pager is killed: it releases nothing.
            std::mem::forget(entry);
            watchdog.stream.lock().unwrap().shutdown(Shutdown::Both).unwrap();
            run_watchdog(&theirs).unwrap();
            if ends {
                assert!(!child.wait().unwrap().success());
            } else {
                assert!(child.try_wait().unwrap().is_none(), "it waits for no memory");
                child.kill().unwrap();
                child.wait().unwrap();
            }
        }
    }

    #[test]
    fn a_child_of_the_pager_releases_nothing_and_waits_for_no_lock() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let watchdog = Watchdog { stream: Arc::new(Mutex::new(ours)), next: Arc::default() };
        let mut entry = Some(watchdog.entry());
        let held = watchdog.stream.lock().unwrap();
        assert!(afresh_sys::child_passes(|| entry.take().is_some()));
        drop(held);
        theirs.set_nonblocking(true).unwrap();
        let said = theirs.read(&mut [0; 64]).map_err(|error| error.kind());
        assert_eq!(said, Err(io::ErrorKind::WouldBlock));
    }
}
