//! Named pipes: names in the tree that programs meet at. Who opens one for reading waits for somebody who writes, and the other way
//! round; what they share from then on is a channel like any pipe's.
//!
//! Promises: all who have one file open share one channel, whatever becomes of its names. Who waits to be met counts as an end
//! already, so nothing that is written meanwhile is lost; it stops counting where its wait is broken off or its process ends.

use std::sync::Arc;

use afresh_files::{Access, Kind, New, Node, OpenFile};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::channels::Channel;
use super::devices::{FIFO, SOCKET};
use super::table::{Description, Open};
use super::threads::{On, Thread, Wait};
use super::{DONE, Outcome, Person, Served, State, clock_calls};
use crate::platform::Process;

/// A named pipe that is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fifo {
    pub(crate) channel: u64,
    /// Its file, and which ends of the channel are meant.
    pub(crate) open: OpenFile,
    /// Whether nobody has written since it was opened: then no end is told.
    pub(crate) unmet: bool,
}

impl Fifo {
    /// The ends that it has of its channel, and whether it writes them.
    pub(crate) fn ends(&self) -> Vec<(u64, bool)> {
        let Access { read, write, .. } = self.open.access;
        let end = |has: bool, writes: bool| has.then_some((self.channel, writes));
        end(read, false).into_iter().chain(end(write, true)).collect()
    }
}

/// One that is opened as soon as there is somebody at the other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opening {
    pub(crate) fifo: Fifo,
    /// The directory that it was found in, and its name there.
    pub(crate) found: Option<(Node, Vec<u8>)>,
}

/// What a thread waits to open.
pub(super) fn opening(thread: &Thread) -> Option<&Opening> {
    match &thread.wait {
        Some(Wait { on: On::Fifo(opening), .. }) => Some(opening),
        _ => None,
    }
}

impl State {
    /// The channel of a named pipe that somebody has open, or waits to.
    fn fifo_channel(&self, node: Node) -> Option<u64> {
        let open =
            self.table.descriptions().filter_map(|(_, description)| match &description.open {
                Open::Fifo(fifo) => Some(fifo),
                _ => None,
            });
        let threads = self.threads.iter().chain(self.family.other_threads());
        let waiting = threads.filter_map(|(_, thread)| opening(thread)).map(|o| &o.fifo);
        open.chain(waiting).find(|fifo| fifo.open.node == node).map(|fifo| fifo.channel)
    }

    /// A further end of a named pipe's channel, or of a new one.
    fn join_fifo(&mut self, known: Option<u64>, access: Access) -> Result<u64, Errno> {
        let id = match known {
            Some(id) => id,
            None => {
                let id = self.channels.add().ok_or(Errno::NFILE)?;
                if let Some(Channel { readers, writers, .. }) = self.channels.get_mut(id) {
                    (*readers, *writers) = (0, 0);
                }
                id
            }
        };
        for (has, writes) in [(access.read, false), (access.write, true)] {
            if has {
                self.channels.join(id, writes);
            }
        }
        Ok(id)
    }

    /// Tells those at a channel that somebody has come.
    fn meet(&mut self, channel: u64, access: Access) {
        for description in self.table.descriptions_mut() {
            if let Open::Fifo(fifo) = &mut description.open
                && fifo.channel == channel
                && access.write
            {
                fifo.unmet = false;
            }
        }
        let all = self.family.threads_mut().chain([&mut self.threads]);
        for wait in all.flat_map(|threads| threads.values_mut()).filter_map(|t| t.wait.as_mut()) {
            if let On::Fifo(Opening { fifo, .. }) = &wait.on
                && fifo.channel == channel
                && (fifo.open.access.read && access.write || fifo.open.access.write && access.read)
            {
                wait.woken = true;
            }
        }
    }

    /// A wait that is given up: whoever was about to open a named pipe does not.
    pub(super) fn give_up(&mut self, wait: Option<Wait>) {
        if let Some(Wait { on: On::Fifo(Opening { fifo, .. }), .. }) = wait {
            self.forget(Some(Description::new(Open::Fifo(fifo), 0)));
        }
    }

    /// Gives up what the threads of the current process wait for, but for one's.
    pub(super) fn give_up_all(&mut self, but: Option<u32>) {
        let waits = self
            .threads
            .iter()
            .filter(|(id, thread)| Some(*id) != but && opening(thread).is_some());
        for id in waits.map(|(id, _)| id).collect::<Vec<_>>() {
            let wait = self.threads.get_mut(id).and_then(|thread| thread.wait.take());
            self.give_up(wait);
        }
    }
}

impl Person {
    /// Opens a named pipe, or waits for the other end.
    pub(super) fn open_fifo(
        &mut self,
        node: Node,
        access: Access,
        flags: i32,
        found: Option<(Node, Arc<[u8]>)>,
    ) -> Served {
        self.state.table.check_room()?;
        let known = self.state.fifo_channel(node);
        let ends = known.and_then(|id| self.state.channels.get(id));
        let (readers, writers) = ends.map_or((0, 0), |channel| (channel.readers, channel.writers));
        let waits = flags & libc::O_NONBLOCK == 0;
        if access.write && !access.read && readers == 0 && !waits {
            return Err(Errno::NXIO.into());
        }
        let state = self.change();
        let open = state.tree.open(node, access)?;
        let channel = match state.join_fifo(known, access) {
            Ok(channel) => channel,
            Err(errno) => {
                state.tree.close(open);
                return Err(errno.into());
            }
        };
        state.meet(channel, access);
        let fifo = Fifo { channel, open, unmet: !access.write && writers == 0 };
        let met = match (access.read, access.write) {
            (true, false) => writers > 0,
            (false, true) => readers > 0,
            _ => true,
        };
        if met || !waits {
            return self.add_found(Open::Fifo(fifo), flags, found);
        }
        let found = found.map(|(above, name)| (above, name.to_vec()));
        Ok(Outcome::Wait(Wait::new(On::Fifo(Opening { fifo, found }), None)))
    }

    /// What the current call has waited to open, which somebody has met.
    pub(super) fn met(&mut self, flags: i32) -> Option<Served> {
        if !matches!(self.resumed, Some(Wait { on: On::Fifo(_), .. })) {
            return None;
        }
        let Some(Wait { on: On::Fifo(Opening { mut fifo, found }), .. }) = self.resumed.take()
        else {
            return None;
        };
        fifo.unmet = false;
        let found = found.map(|(above, name)| (above, name.into()));
        Some(self.add_found(Open::Fifo(fifo), flags, found))
    }

    /// `mknod`: a named pipe, an empty file, or the name of a socket that nobody has. Devices are the host's to give.
    pub(super) fn make_node(&mut self, process: &Process, at: u64, path: u64, mode: u64) -> Served {
        let new = match mode as u32 & libc::S_IFMT {
            0 | libc::S_IFREG => New::File,
            libc::S_IFIFO => New::Device(FIFO),
            libc::S_IFSOCK => New::Device(SOCKET),
            libc::S_IFCHR | libc::S_IFBLK | libc::S_IFDIR => return Err(Errno::PERM.into()),
            _ => return Err(Errno::INVAL.into()),
        };
        let place = self.place(process, at, path)?;
        self.state.may_make(&place)?;
        let mode = mode as u32 & 0o7777 & !self.state.umask;
        self.change().tree.create_at(&place, new, mode, clock_calls::now())?;
        self.change().tell_made(&place);
        Ok(DONE)
    }
}

impl Opening {
    /// Whether it is what a guest could wait to open, in a tree that has its file.
    pub(super) fn is_sound(&self, kind: Kind, device: u64) -> bool {
        let short = self.found.as_ref().is_none_or(|(_, name)| name.len() <= super::NAME);
        short && kind == Kind::Device && device == FIFO
    }
}
