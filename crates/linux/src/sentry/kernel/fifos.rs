//! Named pipes. An open for reading waits for a writer and the other way round; then both share a
//! channel, as for a pipe.
//!
//! Promises: all descriptors of one file share one channel, also after its names are removed. A
//! waiting open counts as an end of the channel, so early writes are not lost; it stops counting
//! when the wait or its process ends.

use afresh_files::{Access, Node};
use rustix::io::Errno;

use crate::sentry::kernel::channels::Channel;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::open_fifo::PendingOpen;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Thread, Wait, WaitReason};

/// The named pipe that a thread waits to open.
pub(in crate::sentry) fn opening(thread: &Thread) -> Option<&PendingOpen> {
    match &thread.wait {
        Some(Wait { reason: WaitReason::Fifo(opening), .. }) => Some(opening),
        _ => None,
    }
}

impl Kernel {
    /// The channel of a named pipe that a process has open or waits to open.
    pub(in crate::sentry) fn fifo_channel(&self, node: Node) -> Option<u64> {
        let open =
            self.table.descriptions().filter_map(|(_, description)| match &description.open {
                FileObject::Fifo(fifo) => Some(fifo),
                _ => None,
            });
        let threads = self.processes.threads();
        let waiting = threads.filter_map(|(_, thread)| opening(thread)).map(|o| &o.fifo);
        open.chain(waiting).find(|fifo| fifo.open.node == node).map(|fifo| fifo.channel)
    }

    /// A further end of a named pipe's channel, or of a new one.
    pub(in crate::sentry) fn join_fifo(
        &mut self,
        known: Option<u64>,
        access: Access,
    ) -> Result<u64, Errno> {
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

    /// Notifies the waiters of a channel that the other end is open.
    pub(in crate::sentry) fn meet(&mut self, channel: u64, access: Access) {
        for description in self.table.descriptions_mut() {
            if let FileObject::Fifo(fifo) = &mut description.open
                && fifo.channel == channel
                && access.write
            {
                fifo.unmet = false;
            }
        }
        let all = self.processes.threads_mut();
        for wait in all.flat_map(|threads| threads.values_mut()).filter_map(|t| t.wait.as_mut()) {
            if let WaitReason::Fifo(PendingOpen { fifo, .. }) = &wait.reason
                && fifo.channel == channel
                && (fifo.open.access.read && access.write || fifo.open.access.write && access.read)
            {
                wait.woken = true;
            }
        }
    }

    /// Cancels a wait: one to open a named pipe, or one that holds files.
    pub(crate) fn give_up(&mut self, wait: Option<Wait>) {
        let Some(Wait { reason, held, .. }) = wait else { return };
        if let WaitReason::Fifo(PendingOpen { fifo, .. }) = reason {
            self.forget(Some(Description::new(FileObject::Fifo(fifo), 0)));
        }
        self.release_held(held);
    }

    /// Cancels the waits of all threads of the current process except one.
    pub(in crate::sentry) fn give_up_all(&mut self, but: Option<u32>) {
        let threads = self.processes.current.threads.iter();
        let holds =
            |thread: &Thread| thread.wait.as_ref().is_some_and(|wait| !wait.held.is_empty());
        let ends = |thread: &Thread| opening(thread).is_some() || holds(thread);
        let waits = threads.filter(|(id, thread)| Some(*id) != but && ends(thread));
        for id in waits.map(|(id, _)| id).collect::<Vec<_>>() {
            let wait =
                self.processes.current.threads.get_mut(id).and_then(|thread| thread.wait.take());
            self.give_up(wait);
        }
    }
}
