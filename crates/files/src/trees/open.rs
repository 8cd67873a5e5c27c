//! An open file: its node, its position, and its access rights. Plain data that is copied along
//! with its tree.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Refused;
use crate::nodes::node::{Kind, Node, Time};
use crate::trees::tree::{DirEntry, Tree};

/// Access rights of an open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// Bytes can be read.
    pub read: bool,
    /// Bytes can be written.
    pub write: bool,
    /// Every write goes to the end.
    pub append: bool,
}

impl Access {
    /// Reading only.
    #[must_use]
    pub fn reading() -> Self {
        Self { read: true, ..Self::default() }
    }

    /// Reading and writing.
    #[must_use]
    pub fn both() -> Self {
        Self { read: true, write: true, append: false }
    }
}

/// From where a position counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whence {
    /// The beginning.
    Start,
    /// Where the file stands.
    Current,
    /// The end.
    End,
    /// The next bytes that are not in a hole, from a position counted from the beginning.
    Data,
    /// The next hole, from a position counted from the beginning; there is one at the end of every
    /// file.
    Hole,
}

/// A file, directory or other kind of inode that is open in a tree.
///
/// It holds its file. It is copied together with its tree, and means the same in the copy. Code
/// that copies one within a tree ([`Tree::hold`]) or drops one without [`Tree::close`] changes the
/// count of holders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SavedOpen", into = "SavedOpen")]
pub struct OpenFile {
    /// What is open.
    pub node: Node,
    /// Where the next read or write begins.
    pub offset: u64,
    /// Its access rights.
    pub access: Access,
    /// The last listing of a directory.
    pub(crate) listing: Option<Listing>,
}

/// Entries that follow one another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The position of the first.
    first: u64,
    entries: Arc<[DirEntry]>,
}

/// Maximum entries of one call, which each open directory keeps.
const BATCH: usize = 128;

/// A name, and its target.
type SavedEntry = (Vec<u8>, Node, Kind);

#[derive(Serialize, Deserialize)]
struct SavedOpen {
    node: Node,
    offset: u64,
    access: Access,
    listing: Option<(u64, Vec<SavedEntry>)>,
}

impl From<OpenFile> for SavedOpen {
    fn from(open: OpenFile) -> Self {
        let OpenFile { node, offset, access, listing } = open;
        let listing = listing.map(|Listing { first, entries }| {
            let entries = entries.iter().map(|e| (e.name.to_vec(), e.node, e.kind));
            (first, entries.collect())
        });
        Self { node, offset, access, listing }
    }
}

impl From<SavedOpen> for OpenFile {
    fn from(saved: SavedOpen) -> Self {
        let SavedOpen { node, offset, access, listing } = saved;
        let listing = listing.map(|(first, entries)| {
            let entries = entries.into_iter().take(BATCH);
            let entry = |(name, node, kind): SavedEntry| DirEntry { name: name.into(), node, kind };
            // Positions are counted on from it.
            Listing { first: first.min(u64::MAX / 2), entries: entries.map(entry).collect() }
        });
        Self { node, offset: offset.min(i64::MAX as u64), access, listing }
    }
}

impl Tree {
    /// Opens a file or directory, and holds it.
    ///
    /// # Errors
    /// [`Refused::IsDirectory`] for writing into a directory; [`Refused::Denied`] for a host file
    /// that this process may not read.
    pub fn open(&mut self, node: Node, access: Access) -> Result<OpenFile, Refused> {
        let kind = self.stat(node)?.kind;
        if kind == Kind::Directory && (access.write || access.append) {
            return Err(Refused::IsDirectory);
        }
        if kind == Kind::File && access.read && !self.is_readable(node) {
            return Err(Refused::Denied);
        }
        self.hold(node)?;
        Ok(OpenFile { node, offset: 0, access, listing: None })
    }

    /// Closes a file from [`Tree::open`].
    pub fn close(&mut self, open: OpenFile) {
        self.release(open.node);
    }
}

impl OpenFile {
    /// Reads at the position, and advances it by the same number of bytes.
    ///
    /// # Errors
    /// [`Refused::NotOpen`]; as [`Tree::read`].
    pub fn read(&mut self, tree: &Tree, out: &mut [u8]) -> Result<usize, Refused> {
        let len = self.read_at(tree, self.offset, out)?;
        self.offset += len as u64;
        Ok(len)
    }

    /// Reads from a position.
    ///
    /// # Errors
    /// As [`OpenFile::read`].
    pub fn read_at(&self, tree: &Tree, at: u64, out: &mut [u8]) -> Result<usize, Refused> {
        match self.access.read {
            true => tree.read(self.node, at, out),
            false => Err(Refused::NotOpen),
        }
    }

    /// Writes at the position, or at the end if the file is open for appending, and advances by the
    /// same number of bytes.
    ///
    /// # Errors
    /// [`Refused::NotOpen`]; as [`Tree::write`].
    pub fn write(&mut self, tree: &mut Tree, bytes: &[u8], now: Time) -> Result<usize, Refused> {
        if self.access.append {
            self.offset = tree.stat(self.node)?.size;
        }
        let len = self.write_at(tree, self.offset, bytes, now)?;
        self.offset += len as u64;
        Ok(len)
    }

    /// Writes at a position; of a file that is appended to, at its end.
    ///
    /// # Errors
    /// As [`OpenFile::write`].
    pub fn write_at(
        &self,
        tree: &mut Tree,
        at: u64,
        bytes: &[u8],
        now: Time,
    ) -> Result<usize, Refused> {
        if !self.access.write {
            return Err(Refused::NotOpen);
        }
        let at = if self.access.append { tree.stat(self.node)?.size } else { at };
        tree.write(self.node, at, bytes, now)
    }

    /// Moves the position, which may be beyond the end.
    ///
    /// # Errors
    /// [`Refused::Invalid`] for a position before the beginning; [`Refused::Missing`] where no more
    /// bytes or holes follow.
    pub fn seek(&mut self, tree: &Tree, whence: Whence, by: i64) -> Result<u64, Refused> {
        let base = match whence {
            Whence::Start => 0,
            Whence::Current => self.offset,
            Whence::End => tree.stat(self.node)?.size,
            Whence::Data | Whence::Hole => {
                let from = u64::try_from(by).map_err(|_| Refused::Missing)?;
                let found = tree.next_run(self.node, from, whence == Whence::Data)?;
                self.offset = found;
                return Ok(found);
            }
        };
        let at = base.checked_add_signed(by).filter(|at| *at <= i64::MAX as u64);
        self.offset = at.ok_or(Refused::Invalid)?;
        Ok(self.offset)
    }

    /// The next entries of a directory from a position on, `.` and `..` first: each with the
    /// position after it. 0 is the beginning. A call may return only some of them; the end is an
    /// empty result. Names are in order, so that those which come or go between two calls displace
    /// no other.
    ///
    /// # Errors
    /// [`Refused::NotDirectory`].
    pub fn entries(
        &mut self,
        tree: &Tree,
        from: u64,
    ) -> Result<impl Iterator<Item = (u64, DirEntry)> + use<>, Refused> {
        let parent = tree.parent(self.node)?;
        let mut batch = Vec::new();
        for (position, name, node) in [(0, &b"."[..], self.node), (1, &b".."[..], parent)] {
            if position >= from {
                batch.push(DirEntry { name: name.into(), node, kind: Kind::Directory });
            }
        }
        let room = BATCH - batch.len();
        match self.listing.as_ref().and_then(|listing| listing.name_before(from)) {
            // After the last call's end, even if the directory has changed.
            Some(name) => batch.extend(tree.list_after(self.node, name, room)?),
            None => {
                let skip = usize::try_from(from.saturating_sub(2)).unwrap_or(usize::MAX);
                batch.extend(tree.list_from(self.node, skip, room)?);
            }
        }
        let entries: Arc<[DirEntry]> = batch.into();
        self.listing = Some(Listing { first: from, entries: entries.clone() });
        let from = from.min(u64::MAX / 2);
        let positions =
            (0..entries.len()).map(move |at| (from + at as u64 + 1, entries[at].clone()));
        Ok(positions)
    }
}

impl Listing {
    /// The name of the entry before a position; `None` for the first two, which are not names.
    fn name_before(&self, position: u64) -> Option<&[u8]> {
        let at = usize::try_from(position.checked_sub(self.first.checked_add(1)?)?).ok()?;
        let entry = self.entries.get(at)?;
        (position > 2).then_some(&*entry.name)
    }
}
