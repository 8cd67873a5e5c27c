//! Memory that several see: shared mappings of files, and of no file, which are those of a file without a name.
//!
//! Each process that maps such a file has a copy of its bytes. One process runs at any time, so it is enough that a
//! process that stops writes its changes to the file (*publish*), and the next one reads those of others (*absorb*):
//! the file itself is the truth between them. Calls that read or write the file do the same around themselves. The
//! contents that a process last read are remembered (*absorbed*), so that it looks only at later changes, and not at
//! all shared memory.
//!
//! Promises: a process that runs sees all earlier writes of others. May break it: two mappings of one part of a file
//! in one process, which are refused if one of them can be written.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use afresh_files::{FileBytes, Node, Tree};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::platform::{PlatformError, Process};
use crate::ranges::Ranges;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::{Kernel, Sentry, SyscallResult};

/// Bytes that are compared at a time.
const CHUNK_SIZE: u64 = 1 << 18;

/// Which bytes a shared mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Share {
    pub(crate) node: Node,
    /// The offset in the file of the first address: the same for every part of a mapping.
    pub(crate) ahead: u64,
}

impl Share {
    pub(in crate::sentry) fn new(node: Node, start: u64, offset: u64) -> Self {
        Self { node, ahead: offset.wrapping_sub(start) }
    }

    /// The offset in the file of the byte at an address.
    pub(crate) fn offset(self, address: u64) -> u64 {
        address.wrapping_add(self.ahead)
    }
}

/// Contents of shared files as a process last absorbed them, except for parts in which it was behind even then.
#[derive(Clone, Debug, Default)]
pub(crate) struct Absorbed(Arc<BTreeMap<Node, FileState>>);

/// The content of a file, and the parts that were behind.
type FileState = (FileBytes, Vec<Range<u64>>);

/// In which parts a process may have other bytes than shared files.
pub(crate) type Behind = BTreeMap<Node, Vec<Range<u64>>>;

impl Absorbed {
    /// Parts in which it is behind the files' present content.
    pub(crate) fn behind(&self, tree: &Tree) -> Behind {
        self.0.keys().filter_map(|node| Some((*node, self.behind_in(*node, tree)?))).collect()
    }

    /// The parts of a file that may be others than a process has; `None` for all of it.
    fn behind_in(&self, node: Node, tree: &Tree) -> Option<Vec<Range<u64>>> {
        let (then, before) = self.0.get(&node)?;
        // Each part once, even if it is listed several times.
        let mut parts = Ranges::default();
        let changed = tree.changed_since(node, then).ok()?;
        changed.into_iter().chain(before.iter().cloned()).for_each(|part| parts.insert(part));
        Some(parts.iter().collect())
    }

    /// All that the files hold now, but for these parts.
    pub(crate) fn but(behind: Behind, tree: &Tree) -> Self {
        let bytes = |(node, parts)| Some((node, (tree.bytes_of(node).ok()?, parts)));
        Self(Arc::new(behind.into_iter().filter_map(bytes).collect()))
    }
}

/// All are equal: they are hints, and no state.
impl PartialEq for Absorbed {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Absorbed {}

/// A part of memory that is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) range: Range<u64>,
    pub(crate) share: Share,
    pub(crate) protection: u64,
}

impl Shared {
    fn writes(&self) -> bool {
        self.protection & libc::PROT_WRITE as u64 != 0
    }

    /// The part of it that the file has bytes for.
    fn within(&self, tree: &Tree) -> Range<u64> {
        let size = tree.stat(self.share.node).map_or(0, |stat| stat.size);
        let len = size.saturating_sub(self.share.offset(self.range.start));
        self.range.start..self.range.end.min(self.range.start.saturating_add(len))
    }
}

/// A page of shared memory whose bytes others have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChangedPage {
    pub(crate) at: u64,
    /// As far as the file reaches.
    pub(crate) bytes: Vec<u8>,
    /// The protection of its mapping.
    pub(crate) protection: u64,
}

impl ChangedPage {
    /// Whether the guest may write there.
    pub(crate) fn is_writable(&self) -> bool {
        self.protection & libc::PROT_WRITE as u64 != 0
    }
}

/// The bytes of a file at the addresses of `memory`.
fn filed(tree: &Tree, shared: &Shared, at: u64, memory: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    // Unreadable pages were never written.
    let read = tree.read(shared.share.node, shared.share.offset(at), &mut bytes).unwrap_or(0);
    bytes[read..].fill(0);
    bytes
}

/// Whether a file that is opened with these flags loses its bytes.
fn cuts(flags: u64) -> bool {
    flags & libc::O_TRUNC as u64 != 0
}

impl Kernel {
    /// The shared memory that belongs to a process.
    fn shared_of(&self, memory: u32) -> Vec<Shared> {
        match self.family.own.memory == memory {
            true => self.layout.shared(),
            false => {
                self.family.layout(memory).map(crate::sentry::Layout::shared).unwrap_or_default()
            }
        }
    }

    /// Publishes writes of `process`, whose memory is that of `memory`.
    pub(crate) fn publish(&mut self, process: &Process, memory: u32) -> Result<(), PlatformError> {
        let now = crate::sentry::kernel::time::now();
        for shared in self.shared_of(memory).into_iter().filter(Shared::writes) {
            let part = shared.within(&self.tree);
            if part.is_empty() {
                continue;
            }
            // It has not written parts without private pages.
            let whole = part.start..part.end.next_multiple_of(PAGE);
            for held in process.private(whole)? {
                let held = held.start..held.end.min(part.end);
                for at in held.clone().step_by(CHUNK_SIZE as usize) {
                    let mut here = vec![0; (held.end - at).min(CHUNK_SIZE) as usize];
                    if !process.read(at, &mut here)? {
                        continue;
                    }
                    let there = filed(&self.tree, &shared, at, &here);
                    for (index, (new, old)) in
                        here.chunks(PAGE as usize).zip(there.chunks(PAGE as usize)).enumerate()
                    {
                        if new != old {
                            let offset = shared.share.offset(at + index as u64 * PAGE);
                            // Without room for it there, it stays this process's own.
                            let _ = self.tree.write(shared.share.node, offset, new, now);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The present contents of the shared files.
    pub(crate) fn shared_bytes(&self) -> Absorbed {
        let all = self.shares.iter().map(|node| (*node, Vec::new()));
        Absorbed::but(all.collect(), &self.tree)
    }

    /// Parts of shared memory whose bytes in the file may differ from the absorbed ones.
    fn changed(&self, shared: &Shared, absorbed: &Absorbed) -> Vec<Range<u64>> {
        let all = shared.within(&self.tree);
        let behind = absorbed.behind_in(shared.share.node, &self.tree);
        let Some(behind) = behind else { return vec![all] };
        let begin = shared.share.offset(all.start);
        let placed = behind.into_iter().map(|part| {
            let at = |offset: u64| all.start.saturating_add(offset.saturating_sub(begin));
            at(part.start)..at(part.end).min(all.end)
        });
        placed.filter(|part| part.start < part.end).collect()
    }

    /// The memory of the current process, which runs in `process`, that others have changed since it had `absorbed`
    /// it: pages with their new bytes.
    pub(crate) fn news(
        &self,
        process: &Process,
        absorbed: &Absorbed,
    ) -> Result<Vec<ChangedPage>, PlatformError> {
        let mut news = Vec::new();
        for shared in self.layout.shared() {
            let parts = self.changed(&shared, absorbed);
            let at_once = |part: Range<u64>| {
                let end = part.end;
                part.step_by(CHUNK_SIZE as usize).map(move |at| (at, (end - at).min(CHUNK_SIZE)))
            };
            for (at, len) in parts.into_iter().flat_map(at_once) {
                let mut here = vec![0; len as usize];
                if !process.read(at, &mut here)? {
                    continue;
                }
                let there = filed(&self.tree, &shared, at, &here);
                for (index, (new, old)) in
                    there.chunks(PAGE as usize).zip(here.chunks(PAGE as usize)).enumerate()
                {
                    if new != old {
                        let page = at + index as u64 * PAGE;
                        let protection = shared.protection;
                        news.push(ChangedPage { at: page, bytes: new.to_vec(), protection });
                    }
                }
            }
        }
        Ok(news)
    }

    /// Whether any memory is shared.
    pub(crate) fn shares(&self) -> bool {
        !self.shares.is_empty()
    }

    /// Lets go of files that no process has mapped any more.
    pub(crate) fn drop_unshared(&mut self) {
        if self.shares.is_empty() && self.system_v.is_empty() {
            return;
        }
        let layouts = || std::iter::once(&self.layout).chain(self.family.layouts());
        let mapped: Vec<Node> =
            layouts().flat_map(|layout| layout.shared()).map(|s| s.share.node).collect();
        let (kept, gone): (BTreeSet<Node>, BTreeSet<Node>) =
            self.shares.iter().partition(|node| mapped.contains(node));
        self.shares = kept;
        self.system_v.drop_unmapped(&mapped, &mut self.tree);
        gone.into_iter().for_each(|node| self.tree.release(node));
    }

    /// Keeps a file while it is mapped.
    pub(in crate::sentry) fn keep_shared(&mut self, node: Node) -> Result<(), Errno> {
        if !self.shares.contains(&node) {
            self.tree.hold(node).map_err(|refused| refused.errno())?;
            self.shares.insert(node);
        }
        Ok(())
    }
}

impl Sentry {
    /// Publishes writes of the current process to shared memory.
    pub(in crate::sentry) fn publish(&mut self, process: &Process) -> SyscallResult<()> {
        if !self.state.shares.is_empty() {
            let memory = self.state.family.own.memory;
            self.change().publish(process, memory)?;
        }
        Ok(())
    }

    /// Applies changes of shared files to the current process since it absorbed them. Those of memory that it may not write take the
    /// stub, and wait for that.
    fn absorb(&mut self, process: &mut Process, before: &Absorbed) -> SyscallResult<()> {
        for page in self.state.news(process, before)? {
            if page.is_writable() {
                process.write(page.at, &page.bytes)?;
            } else {
                self.unwritable.push(page);
            }
        }
        Ok(())
    }

    /// Whether a descriptor is open on a file that is mapped somewhere.
    fn is_shared(&self, descriptor: u64) -> bool {
        match self.state.table.get(descriptor).map(|description| &description.open) {
            Ok(FileObject::File(open)) => self.state.shares.contains(&open.node),
            _ => false,
        }
    }

    /// Serves a call so that it and shared memory agree.
    pub(in crate::sentry) fn in_step(
        &mut self,
        process: &mut Process,
        call: &crate::platform::Call,
    ) -> SyscallResult {
        if self.state.shares.is_empty() {
            return self.dispatch(process, call);
        }
        let a = call.args;
        let touches = |start: u64, len: u64| {
            let end = start.saturating_add(len);
            self.state.layout.shared().iter().any(|s| s.range.start < end && start < s.range.end)
        };
        let (reads, writes) = match call.number {
            libc::SYS_read
            | libc::SYS_readv
            | libc::SYS_pread64
            | libc::SYS_preadv
            | libc::SYS_preadv2 => (self.is_shared(a[0]), false),
            libc::SYS_write
            | libc::SYS_writev
            | libc::SYS_pwrite64
            | libc::SYS_pwritev
            | libc::SYS_pwritev2
            | libc::SYS_ftruncate
            | libc::SYS_fallocate => (self.is_shared(a[0]), self.is_shared(a[0])),
            libc::SYS_sendfile => {
                (self.is_shared(a[0]) || self.is_shared(a[1]), self.is_shared(a[0]))
            }
            libc::SYS_copy_file_range | libc::SYS_splice => {
                (self.is_shared(a[0]) || self.is_shared(a[2]), self.is_shared(a[2]))
            }
            libc::SYS_truncate | libc::SYS_creat | libc::SYS_openat2 => (true, true),
            // The program that runs next may be what it has just written.
            libc::SYS_execve | libc::SYS_execveat => (true, false),
            // Other flags of an open do not change a file's content.
            libc::SYS_open => (cuts(a[1]), cuts(a[1])),
            libc::SYS_openat => (cuts(a[2]), cuts(a[2])),
            libc::SYS_mmap => {
                let named = a[3] & libc::MAP_ANONYMOUS as u64 == 0;
                (named && self.is_shared(a[4]) || touches(a[0], a[1]), false)
            }
            // The new place may replace shared memory as well.
            libc::SYS_mremap => (touches(a[0], a[1]) || touches(a[4], a[2]), false),
            libc::SYS_munmap | libc::SYS_mprotect | libc::SYS_msync => (touches(a[0], a[1]), false),
            libc::SYS_shmat | libc::SYS_shmdt => (true, false),
            _ => (false, false),
        };
        if reads {
            self.publish(process)?;
        }
        // The process is up to date with the files.
        let before = writes.then(|| self.state.shared_bytes());
        let outcome = self.dispatch(process, call)?;
        if let Some(before) = before {
            self.absorb(process, &before)?;
        }
        if matches!(
            call.number,
            libc::SYS_mmap | libc::SYS_munmap | libc::SYS_mremap | libc::SYS_shmdt
        ) {
            self.change().drop_unshared();
        }
        Ok(outcome)
    }
}
