//! A second process that outlives a pager which is killed, and closes the memory of its VMMs.
//!
//! The keeper holds a copy of every VMM's userfaultfd. While it does, missing pages stay missing:
//! the kernel would give out zero pages once the last copy is closed. When the pager ends without
//! releasing a VMM, the keeper poisons the missing pages, so that touching one raises SIGBUS, or
//! ends a VMM that does not allow that.
//!
//! Promises: a VMM whose handshake was taken never reads a zero page in place of content, and never
//! waits without end, when its pager is killed at any moment.
//!
//! May break it: the keeper being killed together with the pager. A VMM that keeps its userfaultfd
//! open, as Firecracker does, waits then.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use afresh_sys::socket::{self, Peer};
use afresh_sys::{Uffd, UffdMode};
use serde_json::{Value, json};

use super::handshake::Mapping;
use super::serve::{poison, unregister};

/// A pager's connection to its keeper. Clones share it.
#[derive(Clone, Debug)]
pub struct Keeper {
    stream: Arc<Mutex<UnixStream>>,
    next: Arc<AtomicU64>,
}

/// The keeping of a VMM, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct KeptVm {
    keeper: Keeper,
    id: u64,
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

    /// Hands a VMM over.
    pub(super) fn hold(
        &self,
        process: &Peer,
        uffd: &Uffd,
        mappings: &[Mapping],
    ) -> io::Result<KeptVm> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mappings: Value =
            mappings.iter().map(|of| json!([of.base, of.pages, of.unit])).collect();
        let line = format!("{}\n", json!({ "hold": id, "mappings": mappings }));
        self.send(&line, &[uffd.as_fd(), process.as_fd()])?;
        Ok(KeptVm { keeper: self.clone(), id })
    }

    fn send(&self, line: &str, fds: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        socket::send(&stream, line.as_bytes(), fds).map_err(io::Error::other)
    }
}

impl Drop for KeptVm {
    fn drop(&mut self) {
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
    /// Sees to it that no missing page is ever read.
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

/// The work of the keeper: holds the VMMs of the pager behind `stream`, and closes those that it
/// has not released when it ends.
///
/// # Errors
/// An error of the stream, or a message that is no pager's. The VMMs were closed before.
pub fn keep(stream: &UnixStream) -> io::Result<()> {
    let mut held = BTreeMap::new();
    let result = follow(stream, &mut held);
    held.values().for_each(HeldVm::close);
    result
}

/// Takes messages until the pager has ended.
fn follow(stream: &UnixStream, held: &mut BTreeMap<u64, HeldVm>) -> io::Result<()> {
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
            } else if fds.len() >= 2 {
                let mut two = fds.drain(..2);
                if let (Some(id), Some(uffd), Some(process)) =
                    (message["hold"].as_u64(), two.next(), two.next())
                {
                    let uffd = Uffd::from_fd(uffd, UffdMode::Events);
                    let mappings = mappings(&message["mappings"]);
                    held.insert(id, HeldVm { uffd, process: Peer::from(process), mappings });
                }
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
