//! `/proc/sysvipc`: the message queues, semaphores and shared memory that have keys and numbers.

use std::collections::BTreeMap;
use std::fmt::Write;

use afresh_files::Node;

use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::Layout;

/// A file of the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sentry) enum IpcFile {
    Messages,
    Semaphores,
    SharedMemory,
}

/// The names of the files.
pub(in crate::sentry) const NAMES: [(&str, IpcFile); 3] =
    [("msg", IpcFile::Messages), ("sem", IpcFile::Semaphores), ("shm", IpcFile::SharedMemory)];

impl IpcFile {
    pub(in crate::sentry) fn named(name: &[u8]) -> Option<Self> {
        NAMES.iter().find(|(known, _)| known.as_bytes() == name).map(|(_, file)| *file)
    }
}

impl Kernel {
    /// The text of a file. Its length is bounded by the numbers of objects.
    pub(in crate::sentry) fn ipc_text(&self, file: IpcFile) -> String {
        let [user, group] = self.seen_owner(None);
        let owners = format!("{user:>5} {group:>5} {user:>5} {group:>5}");
        let mut text = String::new();
        // Writing to a string does not fail.
        match file {
            IpcFile::Messages => {
                text += "       key      msqid perms      cbytes       qnum lspid lrpid   uid   gid  cuid  cgid      stime      rtime      ctime\n";
                for (id, queue) in self.queues.listed() {
                    let ((bytes, messages), times) = (queue.held_size(), queue.times);
                    let [sender, receiver] = queue.last;
                    let _ = writeln!(
                        text,
                        "{:>10} {id:>10}  {:>4o}  {bytes:>10} {messages:>10} {sender:>5} {receiver:>5} {owners} {:>10} {:>10} {:>10}",
                        queue.key as i32, queue.mode, times[0], times[1], times[2],
                    );
                }
            }
            IpcFile::Semaphores => {
                text += "       key      semid perms      nsems   uid   gid  cuid  cgid      otime      ctime\n";
                for (id, set) in self.semaphores.listed() {
                    let _ = writeln!(
                        text,
                        "{:>10} {id:>10}  {:>4o} {:>10} {owners} {:>10} {:>10}",
                        set.key as i32,
                        set.mode,
                        set.list.len(),
                        set.times[0],
                        set.times[1],
                    );
                }
            }
            IpcFile::SharedMemory => {
                text += "       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime      ctime                   rss                  swap\n";
                let attached = self.attachments();
                for (id, segment) in self.system_v.listed() {
                    let count = attached.get(&segment.node).copied().unwrap_or_default();
                    let ([at, dt, ct], size) = (segment.times, segment.size);
                    let _ = writeln!(
                        text,
                        "{:>10} {id:>10}  {:>4o} {size:>21} {:>5} {:>5}  {count:>5} {owners} {at:>10} {dt:>10} {ct:>10} {:>21} {:>21}",
                        segment.key as i32,
                        segment.mode_bits(),
                        segment.maker,
                        segment.last,
                        segment.stored_size(),
                        0,
                    );
                }
            }
        }
        text
    }

    /// The number of attachments of each file of shared memory.
    fn attachments(&self) -> BTreeMap<Node, u64> {
        let mut counts = BTreeMap::new();
        let layouts = std::iter::once(&self.layout).chain(self.processes.layouts());
        for shared in layouts.flat_map(Layout::shared) {
            if shared.share.offset(shared.range.start) == 0 {
                *counts.entry(shared.share.node).or_default() += 1;
            }
        }
        counts
    }
}
