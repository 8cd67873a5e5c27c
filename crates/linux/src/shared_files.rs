//! Memory files behind shared mappings.
//!
//! A file that some process may write through a shared mapping is *live*: its bytes are in a memory file, and every
//! shared mapping of it, in any process of the guest, is a shared mapping of that file. So processes see each other's
//! writes at once, and a switch between them copies nothing.
//!
//! The file tree learns of those writes when it must: before a call on the file, and before a checkpoint
//! ([`SharedFiles::publish`]). Changes of the tree go to the memory file ([`SharedFiles::refresh`]), and a reset writes
//! the bytes of the warm state back ([`SharedFiles::restore`]).
//!
//! Promises: after each of these, memory and tree have the same bytes. May break it: a change of a file in the tree
//! while it is live without a `publish` before and a `refresh` after.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use afresh_files::{Budget, FileBytes, Node, Refused, Time, Tree};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{Memfd, PAGE_SIZE, SysError};
use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread};

use crate::platform::PlatformError;

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes that are compared at a time.
const CHUNK_SIZE: u64 = 256 << 10;

/// The memory of a live file, which shared mappings show.
#[derive(Debug)]
pub(crate) struct SharedFile(Memfd);

impl SharedFile {
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reads `out.len()` bytes from `offset` on; beyond the end they are zero.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), PlatformError> {
        let mut done = 0;
        while done < out.len() {
            match pread(&self.0, &mut out[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(error) => return Err(PlatformError::kernel("reading shared memory", error)),
            }
        }
        out[done..].fill(0);
        Ok(())
    }

    /// The next part from `from` on that takes memory.
    fn next_data(&self, from: u64) -> Result<Option<Range<u64>>, PlatformError> {
        let failed = |error| PlatformError::kernel("looking for shared memory", error);
        let start = match seek(&self.0, SeekFrom::Data(from)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        Ok(Some(start..seek(&self.0, SeekFrom::Hole(start)).map_err(failed)?))
    }

    /// All parts that take memory.
    fn data(&self) -> Result<Vec<Range<u64>>, PlatformError> {
        let (mut parts, mut from) = (Vec::new(), 0);
        while let Some(part) = self.next_data(from)? {
            from = part.end;
            parts.push(part);
        }
        Ok(parts)
    }
}

/// A shared mapping of a live file in a host process.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    pub(crate) range: Range<u64>,
    pub(crate) protection: u64,
    /// The offset in the file of the first address.
    pub(crate) offset: u64,
    pub(crate) memory: Arc<SharedFile>,
}

impl PartialEq for Attachment {
    fn eq(&self, other: &Self) -> bool {
        self.range == other.range
            && (self.protection, self.offset) == (other.protection, other.offset)
            && Arc::ptr_eq(&self.memory, &other.memory)
    }
}

impl Eq for Attachment {}

impl Attachment {
    /// The call that makes it; `descriptor` is the memory file's in the process.
    pub(crate) fn order(&self, descriptor: u64) -> [u64; 7] {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let Range { start, end } = self.range;
        let number = libc::SYS_mmap as u64;
        [number, start, end - start, self.protection, flags as u64, descriptor, self.offset]
    }

    /// The part of it at `range`.
    pub(crate) fn part(&self, range: Range<u64>) -> Self {
        Self { offset: self.offset + (range.start - self.range.start), range, ..self.clone() }
    }

    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }
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
}

/// The live files of a guest.
#[derive(Debug, Default)]
pub(crate) struct SharedFiles(BTreeMap<Node, LiveFile>);

fn refused(error: Refused) -> PlatformError {
    PlatformError::kernel("reading a shared file", error.errno())
}

fn failed(error: SysError) -> PlatformError {
    PlatformError::kernel("writing shared memory", std::io::Error::from_raw_os_error(error.errno))
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
        let size = tree.stat(node).map_err(errno)?.size;
        let lacking = |error: SysError| Errno::from_raw_os_error(error.errno);
        let memory = Memfd::new(c"afresh-shared").map_err(lacking)?;
        memory.set_len(size as usize).map_err(lacking)?;
        // The same size without bytes.
        let mut empty = Tree::new(Budget::default());
        let hole = empty.create_unnamed(0o600, Time::default()).map_err(errno)?;
        empty.set_size(hole, size, Time::default()).map_err(errno)?;
        let synced = empty.bytes_of(hole).map_err(errno)?;
        Ok(Self { memory: Arc::new(SharedFile(memory)), synced, size, written: false })
    }

    /// Sets the size of the memory. Bytes that the guest wrote beyond the end of the file are lost, as on any Linux.
    fn resize(&mut self, size: u64) -> Result<(), PlatformError> {
        let whole = self.size.next_multiple_of(PAGE);
        if self.written && whole != self.size {
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
    fn refresh(&mut self, tree: &Tree, node: Node) -> Result<(), PlatformError> {
        let parts = tree.changed_since(node, &self.synced).map_err(refused)?;
        let size = tree.stat(node).map_err(refused)?.size;
        if parts.is_empty() && size == self.size {
            return Ok(());
        }
        if size != self.size {
            self.resize(size)?;
        }
        self.write_back(tree, node, parts)?;
        self.synced = tree.bytes_of(node).map_err(refused)?;
        Ok(())
    }

    /// Makes the memory equal to the file, whatever was written to it.
    fn restore(&mut self, tree: &Tree, node: Node) -> Result<(), PlatformError> {
        if self.written {
            self.resize(tree.stat(node).map_err(refused)?.size)?;
            let changed = tree.changed_since(node, &self.synced).map_err(refused)?;
            self.write_back(tree, node, changed.into_iter().chain(self.memory.data()?))?;
            self.synced = tree.bytes_of(node).map_err(refused)?;
            return Ok(());
        }
        self.refresh(tree, node)
    }

    /// Writes differing pages to the file.
    fn publish(&mut self, tree: &mut Tree, node: Node, now: Time) -> Result<(), PlatformError> {
        if !self.written {
            return Ok(());
        }
        let (mut there, mut here) = (Vec::new(), Vec::new());
        let mut changed = false;
        let data = self.memory.data()?.into_iter().map(|part| part.start..part.end.min(self.size));
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

/// Writes memory that a guest has already paid for: the limit of memory bounds it, so it also goes beyond the budget of
/// the tree, which then has no room until files are removed.
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

    /// Makes a file live, which guest processes may write then if it `opens`.
    ///
    /// # Errors
    /// `ENOMEM` where the host has no memory for it, or it is more than `most` bytes.
    pub(crate) fn add(
        &mut self,
        tree: &Tree,
        node: Node,
        opens: bool,
        most: u64,
    ) -> Result<(), Errno> {
        if let Some(live) = self.0.get_mut(&node) {
            live.written |= opens;
            return Ok(());
        }
        let mut live = LiveFile::new(tree, node)?;
        let parts = tree.changed_since(node, &live.synced).map_err(|error| error.errno())?;
        if parts.iter().map(|part| part.end - part.start).sum::<u64>() > most {
            return Err(Errno::NOMEM);
        }
        live.refresh(tree, node).map_err(|_| Errno::NOMEM)?;
        live.written = opens;
        self.0.insert(node, live);
        Ok(())
    }

    /// Writes what guest processes wrote to the memory of a file to the tree.
    pub(crate) fn publish(
        &mut self,
        tree: &mut Tree,
        node: Node,
        now: Time,
    ) -> Result<(), PlatformError> {
        self.0.get_mut(&node).map_or(Ok(()), |live| live.publish(tree, node, now))
    }

    /// Whether guest processes may have written a file's memory.
    pub(crate) fn is_written(&self, node: Node) -> bool {
        self.0.get(&node).is_some_and(|live| live.written)
    }

    /// Shows changes of a file in the tree in its memory.
    pub(crate) fn refresh(&mut self, tree: &Tree, node: Node) -> Result<(), PlatformError> {
        self.0.get_mut(&node).map_or(Ok(()), |live| live.refresh(tree, node))
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
        self.0.retain(|node, _| live.contains(node));
        for &node in live {
            if let Some(file) = self.0.get_mut(&node) {
                if !planted::is(Bug::Shared) {
                    file.restore(tree, node)?;
                }
                continue;
            }
            self.add(tree, node, true, u64::MAX)
                .map_err(|error| PlatformError::kernel("making shared memory", error))?;
        }
        Ok(())
    }

    /// The first file whose memory differs from the tree, and where.
    pub(crate) fn differing(&self, tree: &Tree) -> Result<Option<(Node, u64)>, PlatformError> {
        let (mut there, mut here) = (Vec::new(), Vec::new());
        for (&node, live) in &self.0 {
            let stat = tree.stat(node).map_err(refused)?;
            if stat.size != live.size {
                return Ok(Some((node, live.size.min(stat.size))));
            }
            let changed = tree.changed_since(node, &live.synced).map_err(refused)?;
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
