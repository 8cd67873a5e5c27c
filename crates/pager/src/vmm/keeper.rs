//! A second process that outlives a pager which is killed, and closes the memory of its VMMs.
//!
//! The keeper holds a copy of every VMM's userfaultfd. While it does, missing pages stay missing:
//! the kernel would give out zero pages once the last copy is closed. When the pager ends without
//! releasing a VMM, the keeper poisons the missing pages, so that touching one raises SIGBUS, or
//! ends a VMM that does not allow that.
//!
//! A VMM sends its handshake and runs on: Firecracker never looks at the socket again. So the
//! keeper also holds the sockets of doors, and connections whose handshake the pager has not handed
//! over. It takes the handshakes in them itself when the pager has ended.
//!
//! Promises: a VMM that has sent its handshake never reads a zero page in place of content, and
//! never waits without end, when its pager is killed at any moment.
//!
//! May break it: the keeper being killed together with the pager; a VMM that keeps its userfaultfd
//! open, as Firecracker does, waits then. And a handshake in several parts, while the pager has a
//! part of it. A socket that a service manager holds is not held here: the next pager serves it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use afresh_sys::socket::{self, Peer};
use afresh_sys::{Uffd, UffdMode, fork};
use serde_json::{Value, json};

use super::VmmOptions;
use super::handshake::{Handshake, Mapping, receive};
use super::serve::{poison, unregister};

/// A pager's connection to its keeper. Clones share it.
#[derive(Clone, Debug)]
pub struct Keeper {
    stream: Arc<Mutex<UnixStream>>,
    next: Arc<AtomicU64>,
}

/// A door or a VMM in the keeper, until this is dropped.
#[derive(Debug)]
pub(super) struct KeeperEntry {
    keeper: Keeper,
    id: u64,
    /// The process that serves it. A child of a fork releases nothing.
    generation: u32,
}

impl Keeper {
    /// Starts `command` as the keeper. Its program calls [`keep`] with its standard input. Its
    /// process group is a new one, so that signals of a terminal do not end it.
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

    fn entry(&self) -> KeeperEntry {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        KeeperEntry { keeper: self.clone(), id, generation: fork::generation() }
    }

    /// Hands over a copy of the socket of a door.
    pub(super) fn hold_door(&self, socket: BorrowedFd<'_>) -> io::Result<KeeperEntry> {
        let entry = self.entry();
        self.send(&format!("{}\n", json!({ "door": entry.id })), &[socket])?;
        Ok(entry)
    }

    /// Hands over a VMM that has connected. Where the keeper has ended,
    /// [`KeeperEntry::hold`] returns that.
    pub(super) fn greet(&self, stream: &UnixStream, process: &Peer) -> KeeperEntry {
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

impl KeeperEntry {
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
        self.keeper.send(&line, &[uffd.as_fd(), process.as_fd()])
    }
}

impl Drop for KeeperEntry {
    fn drop(&mut self) {
        if self.generation != fork::generation() {
            return;
        }
        // A keeper that has ended holds nothing.
        let _ = self.keeper.send(&format!("{}\n", json!({ "release": self.id })), &[]);
    }
}

/// A VMM in the keeper.
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

/// An entry of the keeper.
enum HeldItem {
    Door(UnixListener),
    /// A VMM whose handshake the pager has not handed over.
    Connection(UnixStream, Peer),
    Vm(HeldVm),
}

impl HeldItem {
    fn close(self) {
        match self {
            HeldItem::Vm(vm) => vm.close(),
            HeldItem::Connection(stream, process) => refuse(&stream, process),
            HeldItem::Door(socket) => close_door(&socket),
        }
    }
}

/// Takes the handshake of a VMM that will not be served, if it sends one, and closes its memory.
pub(super) fn refuse(stream: &UnixStream, process: Peer) {
    let stop = AtomicBool::new(false);
    match receive(stream, usize::MAX, &VmmOptions::new(&stop)) {
        Ok(Handshake { mappings, uffd, .. }) => HeldVm { uffd, process, mappings }.close(),
        Err(refusal) if refusal.waits => process.end(),
        // It waits for nothing.
        Err(_) => {}
    }
}

/// Refuses the VMMs that have connected and were not accepted, and all that would.
fn close_door(socket: &UnixListener) {
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

/// The work of the keeper: holds the doors and VMMs of the pager behind `stream`, and closes those
/// that it has not released when it ends.
///
/// # Errors
/// An error of the stream, or a message that is no pager's. All were closed before.
pub fn keep(stream: &UnixStream) -> io::Result<()> {
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
            if let Some(id) = message["door"].as_u64() {
                held.insert(id, HeldItem::Door(next()?.into()));
            } else if let Some(id) = message["greet"].as_u64() {
                held.insert(id, HeldItem::Connection(next()?.into(), next()?.into()));
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

fn mappings(list: &Value) -> Vec<Mapping> {
    let one = |entry: &Value| {
        let number = |at: usize| entry[at].as_u64().and_then(|n| usize::try_from(n).ok());
        Some(Mapping { base: number(0)?, pages: number(1)?, offset: 0, unit: number(2)? })
    };
    list.as_array().into_iter().flatten().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_child_of_the_pager_releases_nothing_and_waits_for_no_lock() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let keeper = Keeper { stream: Arc::new(Mutex::new(ours)), next: Arc::default() };
        let mut entry = Some(keeper.entry());
        let held = keeper.stream.lock().unwrap();
        assert!(afresh_sys::child_passes(|| entry.take().is_some()));
        drop(held);
        theirs.set_nonblocking(true).unwrap();
        let said = theirs.read(&mut [0; 64]).map_err(|error| error.kind());
        assert_eq!(said, Err(io::ErrorKind::WouldBlock));
    }
}
