//! The tree from outside: whole files by their paths, for the host that provides files and takes
//! results.
//!
//! Paths begin at the root, with or without a slash, and follow symbolic links within the tree.

use crate::error::Refused;
use crate::nodes::node::{Kind, Node, Stat, Time};
use crate::trees::path::Walk;
use crate::trees::tree::{DirEntry, New, Tree};

/// Bytes of holes that any file may have to be read whole.
const MIN_HOLES: u64 = 1 << 20;
/// Maximum bytes of holes in a file that is read whole, unless it stores more than that.
const MAX_HOLES: u64 = 16 << 20;

impl Tree {
    /// The node at a path, after following its last link.
    ///
    /// # Errors
    /// As [`Tree::walk`]; [`Refused::Missing`].
    pub fn find(&self, path: impl AsRef<[u8]>) -> Result<Node, Refused> {
        match path.as_ref() {
            b"" => Ok(Self::ROOT),
            path => self.walk(path, Walk::new(Self::ROOT))?.node(),
        }
    }

    /// Attributes of the node at a path, as of `stat`.
    ///
    /// # Errors
    /// As [`Tree::find`].
    pub fn stat_path(&self, path: impl AsRef<[u8]>) -> Result<Stat, Refused> {
        self.stat(self.find(path)?)
    }

    /// The names in the directory at a path, in order.
    ///
    /// # Errors
    /// As [`Tree::find`] and [`Tree::list`].
    pub fn list_path(&self, path: impl AsRef<[u8]>) -> Result<Vec<DirEntry>, Refused> {
        self.list(self.find(path)?)
    }

    /// All bytes of a file of at most `most` bytes. A hole costs its writer nothing, so the memory
    /// for the result follows the stored bytes: holes may have as many bytes as are stored, or 16
    /// MiB, or the tree's budget where that is between 1 and 16 MiB.
    ///
    /// # Errors
    /// [`Refused::TooLarge`] for a longer or sparser file, before memory is allocated for it.
    /// [`Tree::read`] reads it in parts. As [`Tree::find`] and [`Tree::read`].
    pub fn read_path(&self, path: impl AsRef<[u8]>, most: u64) -> Result<Vec<u8>, Refused> {
        let node = self.find(path)?;
        self.refresh(node);
        let stat = self.stat(node)?;
        let size = if stat.kind == Kind::File { stat.size } else { 0 };
        let holes = size.saturating_sub(stat.stored);
        let may = self.budget.bytes.clamp(MIN_HOLES, MAX_HOLES).max(stat.stored);
        if size > most || holes > may {
            return Err(Refused::TooLarge);
        }
        let mut bytes = vec![0; usize::try_from(size).map_err(|_| Refused::TooLarge)?];
        let len = self.read(node, 0, &mut bytes)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Replaces or creates a whole file, and creates missing directories above it. When it
    /// does not fit the tree stays as it was.
    ///
    /// # Errors
    /// [`Refused::Full`]; as [`Tree::walk`] and [`Tree::create`].
    pub fn write_path(
        &mut self,
        path: impl AsRef<[u8]>,
        bytes: &[u8],
        now: Time,
    ) -> Result<Node, Refused> {
        let mut new = self.clone();
        let node = new.place_file(path.as_ref(), now)?;
        new.set_size(node, 0, now)?;
        if new.write(node, 0, bytes, now)? < bytes.len() {
            return Err(Refused::Full);
        }
        *self = new;
        Ok(node)
    }

    fn place_file(&mut self, path: &[u8], now: Time) -> Result<Node, Refused> {
        if let Some(at) = path.iter().rposition(|b| *b == b'/') {
            self.make_directories(&path[..at], now)?;
        }
        let place = self.walk(path, Walk::new(Self::ROOT))?;
        match place.found {
            Some((node, Kind::File)) => Ok(node),
            Some((_, Kind::Directory)) => Err(Refused::IsDirectory),
            Some(_) => Err(Refused::Invalid),
            None => self.create(place.directory, &place.name, New::File, 0o644, now),
        }
    }

    /// Makes the directory at a path, with those above it that are missing.
    ///
    /// # Errors
    /// [`Refused::NotDirectory`] when something else is in the way; as [`Tree::create`].
    pub fn make_directories(&mut self, path: impl AsRef<[u8]>, now: Time) -> Result<Node, Refused> {
        let mut at = Self::ROOT;
        for name in path.as_ref().split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            let place = self.walk(name, Walk::new(at))?;
            at = match place.found {
                Some((node, Kind::Directory)) => node,
                Some(_) => return Err(Refused::NotDirectory),
                None => self.create(place.directory, &place.name, New::Directory, 0o755, now)?,
            };
        }
        Ok(at)
    }

    /// Removes what is at a path: a file, a link, or a directory with everything in it.
    ///
    /// # Errors
    /// [`Refused::Missing`]; [`Refused::Busy`] for the root.
    pub fn remove_path(&mut self, path: impl AsRef<[u8]>, now: Time) -> Result<(), Refused> {
        let place = self.walk(path.as_ref(), Walk::new(Self::ROOT).name())?;
        let (node, kind) = place.found.ok_or(Refused::Missing)?;
        if kind != Kind::Directory {
            return self.remove_file_at(&place, now);
        }
        if node == Self::ROOT {
            return Err(Refused::Busy);
        }
        self.clear(node)?;
        self.remove_directory(place.directory, &place.name, now)
    }
}
