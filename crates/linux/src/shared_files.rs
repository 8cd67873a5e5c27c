//! Memory files behind shared mappings.
//!
//! A file that some process may write through a shared mapping is *live*: its bytes are in a memory
//! file, and every shared mapping of it, in any process of the guest, is a shared mapping of that
//! file. So processes see each other's writes at once, and a switch between them copies nothing.
//!
//! The file tree learns of those writes when it must: before a call changes the same pages, and
//! before a checkpoint ([`SharedFiles::publish`]). A read takes them from memory
//! ([`SharedFiles::read_over`]). Changes of the tree go to the memory file
//! ([`SharedFiles::refresh`]), and a reset writes the bytes of the warm state back
//! ([`SharedFiles::restore`]).
//!
//! Promises: after each of these, memory and tree have the same bytes in the pages concerned; after
//! a reset only bytes that the tree stores take memory; and the work is proportional to the pages
//! concerned, not to the size of a file. Holes cost nothing. May break it: a change of a
//! file in the tree while it is live without a `publish` of its pages before and a `refresh` after.
//! If its size changes, the page of the old end is among them.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use afresh_files::{Budget, FileBytes, Node, Refused, Time, Tree};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{Memfd, PAGE_SIZE, SysError};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::platform::PlatformError;
use crate::ranges::{Ranges, bytes_beside, parts_beside};
use crate::shared_memory_file::{MAX_OFFSET, PAGE, SharedFile, failed};

/// Bytes that are compared at a time.
const CHUNK_SIZE: u64 = 256 << 10;
/// Longest change of a file that is compared as a whole. Of a longer one holes are skipped.
const MAX_WHOLE_CHANGE: u64 = 4 << 20;

/// Maximum live files of a guest.
const MAX_LIVE_FILES: u64 = 1024;

/// Live files that a guest may have: an eighth of the descriptors of this process, because each
/// takes one.
fn max_live_files() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (descriptors / 8).min(MAX_LIVE_FILES) as usize
}

/// Maximum size of a live file: the limit of files of this process (`RLIMIT_FSIZE`), in whole
/// pages.
pub(crate) fn max_live_size() -> u64 {
    getrlimit(Resource::Fsize).current.map_or(u64::MAX, |limit| limit / PAGE * PAGE)
}

/// A live file.
#[derive(Debug)]
struct LiveFile {
    memory: Arc<SharedFile>,
    /// The bytes in the tree that the memory has, except for later writes of guest processes.
    synced: FileBytes,
    size: u64,
    /// Whether guest processes may have written the memory.
    written: bool,
    /// Bytes that take memory outside mapped parts, and those parts, where they are counted.
    /// Accesses of guest processes do not change them.
    unmapped: Option<(Ranges, u64)>,
}

/// Pages of a memory file that a change of its file has given memory, and others whose memory it
/// has freed.
#[derive(Debug, Default)]
pub(crate) struct Repopulated {
    pub(crate) filled: Ranges,
    pub(crate) freed: Ranges,
}

/// The live files of a guest.
#[derive(Debug, Default)]
pub(crate) struct SharedFiles(BTreeMap<Node, LiveFile>);

fn refused(error: Refused) -> PlatformError {
    PlatformError::kernel("reading a shared file", error.errno())
}

/// The parts of `part` of at most [`CHUNK_SIZE`] bytes.
fn chunks(part: Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let end = part.end;
    part.step_by(CHUNK_SIZE as usize).map(move |at| (at, (end - at).min(CHUNK_SIZE) as usize))
}

impl LiveFile {
    /// Empty memory of the size of a file. Nothing of it is written yet.
    fn new(tree: &Tree, node: Node) -> Result<Self, Errno> {
        let errno = |error: Refused| error.errno();
        let size = tree.stat(node).map_err(errno)?.size.min(MAX_OFFSET);
        let lacking = |_: SysError| Errno::NOMEM;
        let memory = Memfd::new(c"afresh-shared").map_err(lacking)?;
        memory.set_len(size as usize).map_err(lacking)?;
        // The same size without bytes.
        let mut empty = Tree::new(Budget::default());
        let hole = empty.create_unnamed(0o600, Time::default()).map_err(errno)?;
        empty.set_size(hole, size, Time::default()).map_err(errno)?;
        let synced = empty.bytes_of(hole).map_err(errno)?;
        Ok(Self {
            memory: Arc::new(SharedFile(memory)),
            synced,
            size,
            written: false,
            unmapped: None,
        })
    }

    /// Sets the size of the memory. Bytes that the guest wrote beyond the end of the file are lost,
    /// as on any Linux.
    fn resize(&mut self, size: u64) -> Result<(), PlatformError> {
        let whole = self.size.next_multiple_of(PAGE);
        if self.written && whole != self.size && self.memory.holes(self.size..whole)?.is_empty() {
            self.memory.0.set_len(whole as usize).map_err(failed)?;
            let tail = vec![0; (whole - self.size) as usize];
            self.memory.0.write_at(&tail, self.size as usize).map_err(failed)?;
            self.memory.0.set_len(self.size as usize).map_err(failed)?;
        }
        if size != self.size {
            self.memory.0.set_len(size as usize).map_err(failed)?;
            self.size = size;
        }
        Ok(())
    }

    /// Bytes that take memory outside `mapped` parts. It looks for memory only in the parts that
    /// were mapped or unmapped since the last count, and compares all parts of the two counts.
    fn count_unmapped(&mut self, mapped: &Ranges) -> Result<u64, PlatformError> {
        let bytes = match &self.unmapped {
            Some((before, bytes)) if before == mapped => return Ok(*bytes),
            Some((before, bytes)) => {
                let mut bytes = *bytes;
                for part in parts_beside(before, mapped) {
                    bytes = bytes.saturating_add(self.memory.resident_within(part)?);
                }
                for part in parts_beside(mapped, before) {
                    bytes = bytes.saturating_sub(self.memory.resident_within(part)?);
                }
                bytes
            }
            None => bytes_beside(self.memory.data()?, mapped),
        };
        self.unmapped = Some((mapped.clone(), bytes));
        Ok(bytes)
    }

    /// As [`Self::refresh`], and counts the change.
    fn refresh_counted(&mut self, tree: &Tree, node: Node) -> Result<Repopulated, PlatformError> {
        let counted = self.unmapped.take();
        let change = self.refresh(tree, node)?;
        self.unmapped = counted.map(|(mapped, bytes)| {
            let beside = |ranges: &Ranges| bytes_beside(ranges.iter().collect(), &mapped);
            let (filled, freed) = (beside(&change.filled), beside(&change.freed));
            (mapped, bytes.saturating_add(filled).saturating_sub(freed))
        });
        Ok(change)
    }

    /// Gives the memory the bytes of the file in `parts`, where it has others.
    fn write_back(
        &self,
        tree: &Tree,
        node: Node,
        parts: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<(), PlatformError> {
        let (mut there, mut here) = (Vec::new(), Vec::new());
        let parts = parts.into_iter().map(|part| part.start..part.end.min(self.size));
        for (at, len) in parts.flat_map(chunks) {
            there.resize(len, 0);
            here.resize(len, 0);
            let read = tree.read(node, at, &mut there).map_err(refused)?;
            there[read..].fill(0);
            self.memory.read(at, &mut here)?;
            let mut differing: Option<Range<usize>> = None;
            let write = |run: Range<usize>| {
                let offset = at as usize + run.start;
                self.memory.0.write_at(&there[run], offset).map_err(failed)
            };
            for (index, (new, old)) in
                there.chunks(PAGE_SIZE).zip(here.chunks(PAGE_SIZE)).enumerate()
            {
                let page = index * PAGE_SIZE..index * PAGE_SIZE + new.len();
                if new == old {
                    differing.take().map_or(Ok(()), write)?;
                } else {
                    differing = Some(differing.map_or(page.start, |run| run.start)..page.end);
                }
            }
            differing.map_or(Ok(()), write)?;
        }
        Ok(())
    }

    /// Takes the file's bytes over where they differ from those that the memory had.
    fn refresh(&mut self, tree: &Tree, node: Node) -> Result<Repopulated, PlatformError> {
        let parts = tree.changed_since(node, &self.synced).map_err(refused)?;
        let size = tree.stat(node).map_err(refused)?.size.min(MAX_OFFSET);
        let mut change = Repopulated::default();
        if parts.is_empty() && size == self.size {
            return Ok(change);
        }
        if size != self.size {
            let cut = size.next_multiple_of(PAGE)..self.size.next_multiple_of(PAGE);
            let freed = self.memory.data_within(cut)?;
            freed.into_iter().for_each(|part| change.freed.insert(part));
            self.resize(size)?;
        }
        let parts = self.without_holes(tree, node, parts)?;
        for part in &parts {
            let holes = self.memory.holes(part.start..part.end.min(self.size))?;
            holes.iter().for_each(|hole| change.filled.insert(hole));
        }
        self.write_back(tree, node, parts)?;
        for hole in change.filled.iter().collect::<Vec<_>>() {
            // Zeros were not written.
            self.memory.holes(hole)?.iter().for_each(|hole| change.filled.remove(hole));
        }
        self.synced = tree.bytes_of(node).map_err(refused)?;
        Ok(change)
    }

    /// The parts of `changed` where file or memory may have other bytes than zeros.
    fn without_holes(
        &self,
        tree: &Tree,
        node: Node,
        changed: Vec<Range<u64>>,
    ) -> Result<Vec<Range<u64>>, PlatformError> {
        if changed.iter().all(|part| part.end.saturating_sub(part.start) <= MAX_WHOLE_CHANGE) {
            return Ok(changed);
        }
        let mut held = Ranges::default();
        let stored = tree.stored_ranges(node).map_err(refused)?;
        stored.into_iter().chain(self.memory.data()?).for_each(|part| held.insert(part));
        Ok(changed.into_iter().flat_map(|part| held.within(part)).collect())
    }

    /// Makes the memory equal to the file, whatever was written to it. Pages that guest processes
    /// have touched take no memory any more, unless the file stores them.
    fn restore(&mut self, tree: &Tree, node: Node) -> Result<(), PlatformError> {
        self.unmapped = None;
        let stored = tree.stored_ranges(node).map_err(refused)?;
        self.memory.release_all_but(&stored)?;
        if self.written {
            self.resize(tree.stat(node).map_err(refused)?.size.min(MAX_OFFSET))?;
            let changed = tree.changed_since(node, &self.synced).map_err(refused)?;
            let changed = self.without_holes(tree, node, changed)?;
            self.write_back(tree, node, changed.into_iter().chain(self.memory.data()?))?;
            self.synced = tree.bytes_of(node).map_err(refused)?;
            return Ok(());
        }
        self.refresh(tree, node).map(drop)
    }

    /// Writes differing pages of `range` to the file.
    fn publish(
        &mut self,
        tree: &mut Tree,
        node: Node,
        range: Range<u64>,
        now: Time,
    ) -> Result<(), PlatformError> {
        let range = range.start / PAGE * PAGE..range.end.min(self.size).next_multiple_of(PAGE);
        if !self.written || range.is_empty() {
            return Ok(());
        }
        let (mut there, mut here) = (Vec::new(), Vec::new());
        let mut changed = false;
        // The holes of a short range are not looked for.
        let data = match range.end - range.start <= CHUNK_SIZE {
            true => vec![range],
            false => self.memory.data_within(range)?,
        };
        let data = data.into_iter().map(|part| part.start..part.end.min(self.size));
        for (at, len) in data.flat_map(chunks) {
            there.resize(len, 0);
            here.resize(len, 0);
            let read = tree.read(node, at, &mut there).map_err(refused)?;
            there[read..].fill(0);
            self.memory.read(at, &mut here)?;
            for (index, (new, old)) in
                here.chunks(PAGE_SIZE).zip(there.chunks(PAGE_SIZE)).enumerate()
            {
                if new != old {
                    write_paid(tree, node, at + index as u64 * PAGE, new, now)?;
                    changed = true;
                }
            }
        }
        if changed {
            self.synced = tree.bytes_of(node).map_err(refused)?;
        }
        Ok(())
    }
}

/// Writes memory that a guest has already paid for: the limit of memory bounds it, so it also goes
/// beyond the budget of the tree, which then has no room until files are removed.
fn write_paid(
    tree: &mut Tree,
    node: Node,
    offset: u64,
    bytes: &[u8],
    now: Time,
) -> Result<(), PlatformError> {
    match tree.write(node, offset, bytes, now) {
        Ok(done) if done == bytes.len() => return Ok(()),
        Ok(_) | Err(Refused::Full) => {}
        Err(error) => return Err(refused(error)),
    }
    let budget = tree.budget();
    *tree = tree.clone().with_budget(Budget { bytes: u64::MAX, files: u64::MAX });
    let written = tree.write(node, offset, bytes, now).map_err(refused);
    *tree = tree.clone().with_budget(budget);
    written.map(drop)
}

impl SharedFiles {
    /// Bytes of live files that take memory outside their `mapped` parts.
    pub(crate) fn unmapped_bytes(
        &mut self,
        mapped: &BTreeMap<Node, Ranges>,
    ) -> Result<u64, PlatformError> {
        let (mut bytes, none) = (0, Ranges::default());
        for (node, live) in &mut self.0 {
            bytes += live.count_unmapped(mapped.get(node).unwrap_or(&none))?;
        }
        Ok(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn has(&self, node: Node) -> bool {
        self.0.contains_key(&node)
    }

    pub(crate) fn get(&self, node: Node) -> Option<&Arc<SharedFile>> {
        self.0.get(&node).map(|live| &live.memory)
    }

    pub(crate) fn nodes(&self) -> BTreeSet<Node> {
        self.0.keys().copied().collect()
    }

    /// Whether a further file may become live.
    pub(crate) fn has_room(&self) -> bool {
        self.0.len() < max_live_files()
    }

    /// Makes a file live, which guest processes may write then if it `opens`. Bytes at `mapped` are
    /// paid for.
    ///
    /// # Errors
    /// `ENOMEM` where the host has no memory for it, its other bytes are more than `most`, or the
    /// guest has as many live files as it may.
    pub(crate) fn add(
        &mut self,
        tree: &Tree,
        node: Node,
        opens: bool,
        mapped: &Ranges,
        most: u64,
    ) -> Result<(), Errno> {
        if let Some(live) = self.0.get_mut(&node) {
            live.written |= opens;
            return Ok(());
        }
        let stored = tree.stored_ranges(node).map_err(|error| error.errno())?;
        if !self.has_room() || bytes_beside(stored, mapped) > most {
            return Err(Errno::NOMEM);
        }
        let mut live = LiveFile::new(tree, node)?;
        live.refresh(tree, node).map_err(|_| Errno::NOMEM)?;
        live.written = opens;
        self.0.insert(node, live);
        Ok(())
    }

    /// Writes pages that guest processes wrote to the memory of a file to the tree: those of
    /// `range`.
    pub(crate) fn publish(
        &mut self,
        tree: &mut Tree,
        node: Node,
        range: Range<u64>,
        now: Time,
    ) -> Result<(), PlatformError> {
        self.0.get_mut(&node).map_or(Ok(()), |live| live.publish(tree, node, range, now))
    }

    /// Replaces bytes of a file, read from the tree at `offset`, by those that guest processes have
    /// written to its memory.
    pub(crate) fn read_over(
        &self,
        node: Node,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), PlatformError> {
        let Some(live) = self.0.get(&node).filter(|live| live.written) else { return Ok(()) };
        let len = live.size.saturating_sub(offset).min(bytes.len() as u64);
        live.memory.read(offset, &mut bytes[..len as usize])
    }

    /// The pages of a file at `range` that take no memory.
    pub(crate) fn holes(&self, node: Node, range: Range<u64>) -> Result<Ranges, PlatformError> {
        self.0.get(&node).map_or(Ok(Ranges::default()), |live| live.memory.holes(range))
    }

    /// Bytes of live files that the tree stores as well.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.0.values().map(|live| live.synced.memory()).sum()
    }

    /// Whether guest processes may have written a file's memory.
    pub(crate) fn is_written(&self, node: Node) -> bool {
        self.0.get(&node).is_some_and(|live| live.written)
    }

    /// Shows changes of a file in the tree in its memory.
    pub(crate) fn refresh(
        &mut self,
        tree: &Tree,
        node: Node,
    ) -> Result<Repopulated, PlatformError> {
        let none = || Ok(Repopulated::default());
        self.0.get_mut(&node).map_or_else(none, |live| live.refresh_counted(tree, node))
    }

    /// Keeps only files of this kind.
    pub(crate) fn retain(&mut self, keeps: impl Fn(Node) -> bool) {
        self.0.retain(|node, _| keeps(*node));
    }

    /// Brings the memory to the state of `tree`, in which the files `live` are live.
    pub(crate) fn restore(
        &mut self,
        tree: &Tree,
        live: &BTreeSet<Node>,
    ) -> Result<(), PlatformError> {
        if live.len() > max_live_files() {
            return Err(PlatformError::Missing {
                what: "it has more shared memory files than an eighth of the descriptors",
                error: Errno::MFILE.into(),
                way_out: "raise ulimit -n",
            });
        }
        self.0.retain(|node, _| live.contains(node));
        for &node in live {
            if let Some(file) = self.0.get_mut(&node) {
                if !planted::is(Bug::Shared) {
                    file.restore(tree, node)?;
                }
                continue;
            }
            self.add(tree, node, true, &Ranges::default(), u64::MAX)
                .map_err(|error| PlatformError::kernel("making shared memory", error))?;
        }
        Ok(())
    }

    /// The first file whose memory differs from the tree, and where.
    pub(crate) fn differing(&self, tree: &Tree) -> Result<Option<(Node, u64)>, PlatformError> {
        let (mut there, mut here) = (Vec::new(), Vec::new());
        for (&node, live) in &self.0 {
            let stat = tree.stat(node).map_err(refused)?;
            if stat.size.min(MAX_OFFSET) != live.size {
                return Ok(Some((node, live.size.min(stat.size))));
            }
            let changed = tree.changed_since(node, &live.synced).map_err(refused)?;
            let changed = live.without_holes(tree, node, changed)?;
            let parts = changed.into_iter().chain(live.memory.data()?);
            let parts = parts.map(|part| part.start..part.end.min(live.size));
            for (at, len) in parts.flat_map(chunks) {
                there.resize(len, 0);
                here.resize(len, 0);
                let read = tree.read(node, at, &mut there).map_err(refused)?;
                there[read..].fill(0);
                live.memory.read(at, &mut here)?;
                if let Some(index) = here.iter().zip(&there).position(|(one, two)| one != two) {
                    return Ok(Some((node, at + index as u64)));
                }
            }
        }
        Ok(None)
    }
}
