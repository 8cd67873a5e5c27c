//! Memory that several see: shared mappings of files, and of no file, which are those of a file
//! without a name.
//!
//! A file that can be written through such a mapping is live: all its shared mappings show one
//! memory file ([`crate::shared_files`]). One that is only read is mapped like a private file, so
//! that all guests share its pages; a call that changes it makes it live.
//!
//! Promises: processes see each other's writes at once, and calls on the file see them as well. May
//! break it: a change of a file in the tree outside [`Sentry::in_step`] and [`Sentry::with_files`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use afresh_files::{FileBytes, Node, Tree};
use rustix::io::Errno;

use crate::platform::{Call, PlatformError, Process, calls};
use crate::ranges::{Ranges, bytes_beside};
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::{Description, FileObject};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::now;
use crate::sentry::mm::file_backing::SharedMapping;
use crate::sentry::mm::layout::Layout;
use crate::sentry::mm::stub_calls::Content;
use crate::sentry::result::{SyscallError, SyscallResult};
use crate::shared_files::{Repopulated, max_live_size};
use crate::shared_memory_file::{LiveMapping, MAX_OFFSET};

/// Whether a file that is opened with these flags loses its bytes.
fn cuts(flags: u64) -> bool {
    flags & libc::O_TRUNC as u64 != 0
}

/// Whether a protection lets writes through.
pub(in crate::sentry) fn writes(protection: u64) -> bool {
    protection & libc::PROT_WRITE as u64 != 0
}

impl Kernel {
    /// Files of shared mappings of any process.
    fn mapped_files(&self) -> BTreeSet<Node> {
        let layouts = std::iter::once(&self.layout).chain(self.processes.layouts());
        layouts.flat_map(Layout::shared).map(|shared| shared.share.node).collect()
    }

    /// Files that some process can write through a shared mapping.
    pub(crate) fn writable_shares(&self) -> BTreeSet<Node> {
        let layouts = std::iter::once(&self.layout).chain(self.processes.layouts());
        let shared = layouts.flat_map(Layout::shared);
        shared.filter(|shared| writes(shared.protection)).map(|shared| shared.share.node).collect()
    }

    /// The parts of files that some process shares.
    fn mapped_parts(&self) -> BTreeMap<Node, Ranges> {
        let mut mapped: BTreeMap<Node, Ranges> = BTreeMap::new();
        for layout in std::iter::once(&self.layout).chain(self.processes.layouts()) {
            for SharedMapping { range, share, .. } in layout.shared() {
                let (from, to) = (share.offset(range.start), share.offset(range.end));
                mapped.entry(share.node).or_default().insert(from..to);
            }
        }
        mapped
    }

    /// The parts of one file that some process shares.
    fn mapped_parts_of(&self, node: Node) -> Ranges {
        let mut mapped = Ranges::default();
        for layout in std::iter::once(&self.layout).chain(self.processes.layouts()) {
            for SharedMapping { range, share, .. } in layout.shared() {
                if share.node == node {
                    mapped.insert(share.offset(range.start)..share.offset(range.end));
                }
            }
        }
        mapped
    }

    /// Counts the shared bytes that processes have mapped, each once, and bytes of live files that
    /// take memory without a mapping: `unmapped` finds them. The tree has `stored` bytes of live
    /// files.
    fn count_parts<E>(
        &mut self,
        stored: u64,
        unmapped: impl FnOnce(&Tree, &BTreeMap<Node, Ranges>) -> Result<u64, E>,
    ) -> Result<(), E> {
        let mapped = self.mapped_parts();
        let bytes =
            |ranges: &Ranges| ranges.iter().map(|range| range.end - range.start).sum::<u64>();
        let unmapped = unmapped(&self.tree, &mapped)?;
        self.shared_bytes = mapped.values().map(bytes).sum::<u64>().saturating_add(unmapped);
        self.stored_shares = stored;
        self.count_memory();
        Ok(())
    }

    /// Counts a change of a live file's memory: bytes that are mapped count already.
    fn count_change(&mut self, node: Node, change: &Repopulated) {
        if change.filled.is_empty() && change.freed.is_empty() {
            return;
        }
        let mapped = self.mapped_parts_of(node);
        let bytes = |ranges: &Ranges| bytes_beside(ranges.iter().collect(), &mapped);
        let all = self.shared_bytes.saturating_add(bytes(&change.filled));
        self.shared_bytes = all.saturating_sub(bytes(&change.freed));
        self.count_memory();
    }

    /// Counts the shared bytes of a thawed guest, whose files `live` get the bytes of the tree.
    /// Returns the bytes of memory that it needs.
    pub(crate) fn count_thawed(&mut self, live: &BTreeSet<Node>) -> u64 {
        let memory = |node: &Node| Some(self.tree.bytes_of(*node).ok()?.memory());
        let stored = live.iter().filter_map(memory).sum();
        let counted = self.count_parts(stored, |tree, mapped| {
            let stored = |node: &Node| Some((tree.stored_ranges(*node).ok()?, mapped.get(node)?));
            let stored = live.iter().filter_map(stored);
            Ok::<_, std::convert::Infallible>(stored.map(|(all, own)| bytes_beside(all, own)).sum())
        });
        let Ok(()) = counted;
        self.layout.bytes_everywhere()
    }

    /// Whether a file stays when its last shared mapping goes.
    fn outlasts_mappings(&self, node: Node) -> bool {
        self.tree.stat(node).is_ok_and(|stat| stat.links > 0) || self.tree.hold_count(node) > 1
    }

    /// Lets go of files that no process has mapped any more.
    pub(crate) fn drop_unshared(&mut self) {
        if self.shares.is_empty() && self.system_v.is_empty() {
            return;
        }
        let mapped = self.mapped_files();
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
    /// Keeps a file for a shared mapping of its bytes in `range`, and makes it live if the mapping
    /// can be written.
    pub(in crate::sentry) fn keep_mapped(
        &mut self,
        node: Node,
        range: Range<u64>,
        protection: u64,
    ) -> SyscallResult<()> {
        if writes(protection) {
            self.make_live(node, range, true)?;
        }
        Ok(self.change().keep_shared(node)?)
    }

    /// Makes a file live, before its bytes in `range` are mapped; guest processes can write it
    /// then, if it `opens`.
    pub(in crate::sentry) fn make_live(
        &mut self,
        node: Node,
        range: Range<u64>,
        opens: bool,
    ) -> Result<(), Errno> {
        let (mut mapped, mut room) = (Ranges::default(), 0);
        let before = !self.shared.has(node);
        if before {
            (mapped, room) = self.room_beside(node, range);
        }
        self.shared.add(&self.state.tree, node, opens, &mapped, room)?;
        self.unattached |= before && self.state.shares.contains(&node);
        Ok(())
    }

    /// Makes files live that are mapped, so that guest processes can write them.
    pub(in crate::sentry) fn make_all_live(&mut self, nodes: BTreeSet<Node>) -> Result<(), Errno> {
        let new: Vec<Node> =
            nodes.into_iter().filter(|node| !self.shared.is_written(*node)).collect();
        if new.is_empty() {
            return Ok(());
        }
        // Once for all of them.
        let mut mapped = self.state.mapped_parts();
        let layout = &self.state.layout;
        let room = layout.limit().saturating_sub(layout.bytes_everywhere());
        for node in new {
            let before = !self.shared.has(node);
            let (parts, room) = match before {
                true => (mapped.remove(&node).unwrap_or_default(), room),
                false => (Ranges::default(), 0),
            };
            self.shared.add(&self.state.tree, node, true, &parts, room)?;
            self.unattached |= before && self.state.shares.contains(&node);
        }
        Ok(())
    }

    /// The mapped parts of a file, with `range`, and the memory that the limit leaves for its other
    /// bytes.
    fn room_beside(&self, node: Node, range: Range<u64>) -> (Ranges, u64) {
        let mut mapped = self.state.mapped_parts_of(node);
        let new = bytes_beside(vec![range.clone()], &mapped);
        mapped.insert(range);
        let layout = &self.state.layout;
        (mapped, layout.limit().saturating_sub(layout.bytes_everywhere()).saturating_sub(new))
    }

    /// Fails, before a call changes files, if the memory limit leaves no room to make one of them
    /// live.
    fn check_room(&self, process: &Process, call: &Call, written: &[Node]) -> SyscallResult<()> {
        let a = call.args;
        let named = |directory: u64, path: u64| {
            let node = self.follow(process, directory, path, true);
            node.into_iter().filter(|node| written.contains(node)).collect()
        };
        let changed: Vec<Node> = match call.number {
            // These empty a file, which takes no memory then, but one of the live files.
            calls::SYS_creat | calls::SYS_open | libc::SYS_openat | libc::SYS_openat2
                if self.shared.has_room() =>
            {
                Vec::new()
            }
            libc::SYS_openat | libc::SYS_openat2 => named(a[0], a[1]),
            calls::SYS_creat | calls::SYS_open | libc::SYS_truncate => {
                named(libc::AT_FDCWD as u64, a[0])
            }
            _ => written.to_vec(),
        };
        changed.into_iter().try_for_each(|node| self.check_room_for(node, 0..0))
    }

    /// Fails, before bytes of a file in `range` are written, if the memory limit or the host leaves
    /// no room to make it live with them.
    pub(in crate::sentry) fn check_room_for(
        &self,
        node: Node,
        range: Range<u64>,
    ) -> SyscallResult<()> {
        if !self.state.shares.contains(&node) {
            return Ok(());
        }
        if self.shared.has(node) {
            return self.check_growth(node, range);
        }
        if self.state.tree.stat(node)?.size > max_live_size() {
            return Err(Errno::FBIG.into());
        }
        if !self.shared.has_room() {
            return Err(Errno::NOMEM.into());
        }
        let (mapped, room) = self.room_beside(node, 0..0);
        let mut held = self.state.tree.stored_ranges(node)?;
        held.push(range);
        if bytes_beside(held, &mapped) > room { Err(Errno::NOMEM.into()) } else { Ok(()) }
    }

    /// Fails if the memory limit leaves no room for pages of a live file at `range` that take no
    /// memory yet.
    fn check_growth(&self, node: Node, range: Range<u64>) -> SyscallResult<()> {
        let holes = self.shared.holes(node, range)?;
        if holes.is_empty() {
            return Ok(());
        }
        let (mapped, room) = self.room_beside(node, 0..0);
        match bytes_beside(holes.iter().collect(), &mapped) > room {
            true => Err(Errno::NOMEM.into()),
            false => Ok(()),
        }
    }

    /// Maximum size of a file by the limits of the host. Shared memory is a file of this process,
    /// which must keep to its limit of files.
    pub(in crate::sentry) fn host_size_limit(&self, node: Node) -> u64 {
        if self.state.shares.contains(&node) { max_live_size() } else { u64::MAX }
    }

    /// Makes a file live that a call has changed, also beyond the memory limit: the call is done.
    /// The memory counts.
    fn show_change(&mut self, node: Node) -> Result<(), PlatformError> {
        let mapped = self.state.mapped_parts_of(node);
        self.shared
            .add(&self.state.tree, node, false, &mapped, u64::MAX)
            .map_err(|error| PlatformError::kernel("making shared memory", error))?;
        self.unattached = true;
        self.count_shared()
    }

    /// Counts shared memory: mapped bytes, each once, and others of live files.
    pub(crate) fn count_shared(&mut self) -> Result<(), PlatformError> {
        let Self { state, shared, .. } = self;
        let state = std::sync::Arc::make_mut(state);
        state.count_parts(shared.stored_bytes(), |_, mapped| shared.unmapped_bytes(mapped))
    }

    /// Counts bytes of live files in the tree, which their memory has as well.
    fn count_stored(&mut self) {
        let stored = self.shared.stored_bytes();
        if stored != self.state.stored_shares {
            let state = self.change();
            state.stored_shares = stored;
            state.count_memory();
        }
    }

    /// The bytes that a shared mapping of a file begins with; `EOVERFLOW` for bytes that no file
    /// has.
    pub(in crate::sentry) fn shared_content(
        &mut self,
        node: Node,
        offset: u64,
        len: u64,
        protection: u64,
    ) -> SyscallResult<Content> {
        if offset.checked_add(len).is_none_or(|end| end > MAX_OFFSET) {
            return Err(Errno::OVERFLOW.into());
        }
        match self.shared.get(node) {
            Some(memory) => Ok(Content::Shared(memory.clone(), offset, len, protection)),
            None => self.content_of(node, offset, len, protection),
        }
    }

    /// The mappings of live files in a layout.
    pub(crate) fn live_mappings(&self, layout: &Layout) -> Vec<LiveMapping> {
        if self.shared.is_empty() {
            return Vec::new();
        }
        let attached = layout.shared().into_iter().filter_map(|shared| {
            let memory = self.shared.get(shared.share.node)?.clone();
            let offset = shared.share.offset(shared.range.start);
            let (range, protection) = (shared.range, shared.protection);
            Some(LiveMapping { range, protection, offset, memory })
        });
        attached.collect()
    }

    /// Writes shared memory to these files.
    fn publish(&mut self, nodes: impl IntoIterator<Item = Node>) -> Result<(), PlatformError> {
        nodes.into_iter().try_for_each(|node| self.publish_part(node, 0..u64::MAX))
    }

    /// Writes shared memory to a file: its pages at `range`.
    pub(in crate::sentry) fn publish_part(
        &mut self,
        node: Node,
        range: Range<u64>,
    ) -> Result<(), PlatformError> {
        if self.shared.is_written(node) {
            let tree = &mut std::sync::Arc::make_mut(&mut self.state).tree;
            self.shared.publish(tree, node, range, now())?;
            self.count_stored();
        }
        Ok(())
    }

    /// Shows changes of a live file in its memory, which counts.
    fn refresh_shared(&mut self, node: Node) -> Result<(), PlatformError> {
        let change = self.shared.refresh(&self.state.tree, node)?;
        if !change.filled.is_empty() || !change.freed.is_empty() {
            self.change().count_change(node, &change);
        }
        self.count_stored();
        Ok(())
    }

    /// Writes all shared memory to the file tree.
    pub(crate) fn publish_all(&mut self) -> Result<(), PlatformError> {
        self.publish(self.shared.nodes())
    }

    /// Writes shared memory to files that others than its mappings can reach.
    pub(crate) fn publish_lasting(&mut self) -> Result<(), PlatformError> {
        if self.shared.is_empty() {
            return Ok(());
        }
        self.publish(self.lasting())
    }

    /// Files of shared mappings that others can reach.
    fn lasting(&self) -> Vec<Node> {
        let shares = self.state.shares.iter().copied();
        shares.filter(|node| self.state.outlasts_mappings(*node)).collect()
    }

    /// Drops the memory of files that no process has mapped any more, and counts the rest.
    pub(crate) fn prune_shared(&mut self) -> Result<(), PlatformError> {
        let shares = &self.state.shares;
        self.shared.retain(|node| shares.contains(&node));
        if shares.is_empty() && self.state.shared_bytes == 0 {
            return Ok(());
        }
        self.count_shared()
    }

    /// Lets go of files that no process has mapped any more.
    pub(in crate::sentry) fn drop_unshared(&mut self) -> Result<(), PlatformError> {
        let state = &self.state;
        // A file may be live for a mapping that was not made.
        if state.shares.is_empty() && state.system_v.is_empty() && self.shared.is_empty() {
            return Ok(());
        }
        let mapped = self.state.mapped_files();
        let mut gone = self.lasting();
        gone.retain(|node| !mapped.contains(node));
        self.publish(gone)?;
        self.change().drop_unshared();
        self.prune_shared()
    }

    /// Changes the state from outside the guest, so that files and shared memory agree.
    pub(crate) fn with_files<T>(
        &mut self,
        change: impl FnOnce(&mut Kernel) -> T,
    ) -> Result<T, PlatformError> {
        self.publish_all()?;
        let done = change(self.change());
        self.shared.nodes().into_iter().try_for_each(|node| self.refresh_shared(node))?;
        Ok(done)
    }

    /// The file behind a descriptor, if that is mapped somewhere.
    fn shared_node(&self, descriptor: u64) -> Option<Node> {
        match &self.state.table.get(descriptor).ok()?.open {
            FileObject::File(open) => {
                Some(open.node).filter(|node| self.state.shares.contains(node))
            }
            _ => None,
        }
    }

    /// The parts of shared files whose bytes in the tree a call uses, other than by
    /// [`Sentry::bytes_at`] and [`Sentry::put`]. A change of a size uses the page of the new or old
    /// end.
    fn used_parts(&self, call: &Call) -> Vec<(Node, Range<u64>)> {
        let a = call.args;
        let of = |descriptor: u64| self.shared_node(descriptor).into_iter();
        let size = |node: Node| self.state.tree.stat(node).map_or(0, |stat| stat.size);
        let end = |node: Node, new: u64| {
            let end = size(node).min(new);
            (node, end..end.saturating_add(1))
        };
        match call.number {
            libc::SYS_ftruncate => of(a[0]).map(|node| end(node, a[1])).collect(),
            libc::SYS_truncate => self.lasting().into_iter().map(|node| end(node, a[1])).collect(),
            libc::SYS_fallocate => {
                let clears = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_PUNCH_HOLE;
                let cleared = match a[1] as i32 & clears {
                    0 => 0..0,
                    _ => a[2]..a[2].saturating_add(a[3]),
                };
                of(a[0]).flat_map(|node| [(node, cleared.clone()), end(node, u64::MAX)]).collect()
            }
            // The program that runs next may be what it has just written.
            libc::SYS_execve | libc::SYS_execveat => {
                self.lasting().into_iter().map(|node| (node, 0..u64::MAX)).collect()
            }
            libc::SYS_mmap if a[3] & libc::MAP_ANONYMOUS as u64 == 0 => {
                of(a[4]).map(|node| (node, a[5]..a[5].saturating_add(a[1]))).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The shared files that a call changes.
    fn changed_files(&self, call: &Call) -> Vec<Node> {
        let a = call.args;
        let to = |descriptor: u64| {
            let writes = self.state.table.get(descriptor).is_ok_and(Description::writes);
            self.shared_node(descriptor).filter(|_| writes).into_iter().collect()
        };
        match call.number {
            libc::SYS_write
            | libc::SYS_writev
            | libc::SYS_pwrite64
            | libc::SYS_pwritev
            | libc::SYS_pwritev2
            | libc::SYS_ftruncate
            | libc::SYS_fallocate
            | libc::SYS_sendfile => to(a[0]),
            libc::SYS_copy_file_range | libc::SYS_splice => to(a[2]),
            libc::SYS_truncate | calls::SYS_creat | libc::SYS_openat2 => self.lasting(),
            // Other flags of an open do not change a file's content.
            calls::SYS_open if cuts(a[1]) => self.lasting(),
            libc::SYS_openat if cuts(a[2]) => self.lasting(),
            _ => Vec::new(),
        }
    }

    /// Serves a call so that it and shared memory agree. A call that has changed something does not
    /// fail afterwards.
    pub(in crate::sentry) fn in_step(
        &mut self,
        process: &mut Process,
        call: &Call,
    ) -> SyscallResult {
        if self.state.shares.is_empty() {
            return self.dispatch(process, call);
        }
        for (node, part) in self.used_parts(call) {
            self.publish_part(node, part)?;
        }
        let written = self.changed_files(call);
        self.check_room(process, call, &written)?;
        let before: Vec<(Node, Option<FileBytes>)> =
            written.into_iter().map(|node| (node, self.state.tree.bytes_of(node).ok())).collect();
        let shared = self.state.layout.shared_bytes();
        let outcome = self.dispatch(process, call);
        if matches!(outcome, Err(SyscallError::Broken(_))) {
            return outcome;
        }
        // Also after an error: a call may have changed a file before it.
        for (node, before) in before {
            if self.shared.has(node) {
                self.refresh_shared(node)?;
                continue;
            }
            let changed = before.map(|before| self.state.tree.changed_since(node, &before));
            if changed.is_some_and(|parts| parts.is_ok_and(|parts| !parts.is_empty())) {
                self.show_change(node)?;
            }
        }
        let replaces = match call.number {
            libc::SYS_mmap => call.args[3] & libc::MAP_FIXED as u64 != 0,
            libc::SYS_mremap | libc::SYS_shmdt => true,
            _ => false,
        };
        if replaces || shared != self.state.layout.shared_bytes() {
            self.drop_unshared()?;
        }
        outcome
    }
}
