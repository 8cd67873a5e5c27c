//! Which host file a file shows, and since when.
//!
//! A program of the host may change or replace a file while guests use it. A file that no tree has
//! copied then has the new size, times and bytes. One whose copied attributes refer to its bytes
//! has none until it is written anew: parts of two versions would make a file that was never there.
//!
//! Promises: a read returns bytes of one version, except a read during which the host writes. May
//! break it: a host that changes a file twice within the resolution of its times.

use std::fs::File;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, Stat};
use rustix::io::Errno;

use super::{HostDirectory, HostEntry};
use crate::error::Refused;
use crate::nodes::content::Content;
use crate::nodes::inode::{Body, Inode};
use crate::nodes::node::{Kind, Node, Time, Times};
use crate::nodes::source::Source;

/// The identity of a host file at a point in time. Two that are equal have the same bytes, if they
/// [are settled](HostFile::is_settled).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostFile {
    /// Device and number.
    file: (u64, u64),
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, u64),
    changed: (i64, u64),
    is_directory: bool,
}

/// Seconds within which a file may change twice and have the same times.
const RACY: i64 = 2;

impl HostFile {
    pub(super) fn of_stat(stat: &Stat) -> Self {
        Self {
            file: (stat.st_dev, stat.st_ino),
            size: stat.st_size.max(0) as u64,
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
            is_directory: FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
        }
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.is_directory
    }

    /// The identity of an open file, which may be opened with `O_PATH`.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn of(file: &File) -> std::io::Result<Self> {
        Ok(Self::of_stat(&rustix::fs::fstat(file)?))
    }

    /// Whether the two are one file with the same size and time of modification. Other names and
    /// modes make no difference.
    #[must_use]
    pub fn has_content_of(&self, other: &Self) -> bool {
        (self.file, self.size, self.modified) == (other.file, other.size, other.modified)
    }

    /// Its length.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether a further change would show in its times: those of a file that has just been changed
    /// may stay as they are.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let now = Time::now().seconds;
        self.changed.0.max(self.modified.0).saturating_add(RACY) < now
    }
}

/// Why the present version of a file is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// A guest opens it, or reads it by its path: it is what its path names.
    Opened,
    /// A guest that has it open reads it: it stays the same host file.
    Held,
    /// Its directory is saved: it stays the same host file as long as that is open.
    Captured,
}

/// The times of a host file, as its [`Stat`] has them.
pub(super) fn times_of(stat: &Stat) -> Times {
    let time = |seconds: i64, nanos: u64| Time { seconds, nanos: nanos as u32 };
    Times {
        accessed: time(stat.st_atime, stat.st_atime_nsec),
        modified: time(stat.st_mtime, stat.st_mtime_nsec),
        changed: time(stat.st_ctime, stat.st_ctime_nsec),
    }
}

impl HostDirectory {
    /// Whether the host lets this process read a file. Other errors appear when it is read.
    pub(crate) fn is_readable(&self, node: Node) -> bool {
        if self.is_kept() || self.file(node).is_ok() {
            return true;
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let opened = self.path(node).map(|path| self.open_at(&path, flags));
        !matches!(opened, Ok(Err(Errno::ACCESS | Errno::PERM)))
    }

    /// Shows the present version of a file, unless a tree refers to the bytes of another one. A
    /// file that cannot be opened stays as it was seen.
    pub(crate) fn follow(&self, node: Node, occasion: Occasion) {
        if !self.is_kept() && self.captured.get().is_none() {
            self.show_present(node, occasion);
        }
    }

    fn show_present(&self, node: Node, occasion: Occasion) {
        let is_file = |inode: &Arc<Inode>| inode.kind() == Kind::File;
        let follows = |here: &HostEntry| {
            here.seen.filter(|_| !here.is_pinned && here.inode.as_ref().is_some_and(is_file))
        };
        let Some(seen) = self.lock_entries().get(&node).and_then(follows) else { return };
        if occasion == Occasion::Opened {
            self.close_replaced(node, &seen);
        }
        let Ok((file, present)) = self.file(node) else { return };
        let is_another = present.file != seen.file && occasion == Occasion::Held;
        if present == seen || is_another {
            return;
        }
        let Ok(stat) = rustix::fs::fstat(&*file) else { return };
        let mut known = self.lock_entries();
        let Some(here) = known.get_mut(&node).filter(|here| follows(here).is_some()) else {
            return;
        };
        let Some(inode) = &mut here.inode else { return };
        let inode = Arc::make_mut(inode);
        inode.body = Body::File(Content::of(Source::Host(node), stat.st_size.max(0) as u64));
        (inode.mode, inode.times) = (stat.st_mode & 0o7777, times_of(&stat));
        here.seen = Some(HostFile::of_stat(&stat));
    }

    /// Closes the file `seen` if its path names another one by now.
    fn close_replaced(&self, node: Node, seen: &HostFile) {
        let is_open = |open: &[(Node, Arc<File>)]| open.iter().any(|(other, _)| *other == node);
        if !is_open(&self.lock_open()) {
            return;
        }
        let Ok(path) = self.path(node) else { return };
        let Ok((_, stat)) = self.stat_at(&path) else { return };
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if is_file && (stat.st_dev, stat.st_ino) != seen.file {
            self.lock_open().retain(|(other, _)| *other != node);
        }
    }

    /// Whether a file is still the host file `held`, whatever its size is by now.
    pub(crate) fn is_same_file(&self, node: Node, held: &HostFile) -> bool {
        self.is_kept() || self.file(node).is_ok_and(|(_, present)| present.file == held.file)
    }

    /// Notes that a tree refers to the bytes of a file that it has seen.
    pub(crate) fn pin(&self, node: Node) {
        if let Some(here) = self.lock_entries().get_mut(&node) {
            here.is_pinned = true;
        }
    }

    /// Fails if a tree refers to bytes of a file that has changed since.
    pub(super) fn check_pinned(&self, node: Node, present: &HostFile) -> Result<(), Refused> {
        let known = self.lock_entries();
        let pinned = known.get(&node).filter(|here| here.is_pinned).and_then(|here| here.seen);
        match pinned.is_none_or(|seen| seen.has_content_of(present)) {
            true => Ok(()),
            false => {
                let path = self.path.join(super::path_of(&known, node)?);
                Err(Refused::ChangedOnHost(path.display().to_string()))
            }
        }
    }

    /// The host file that a file shows, if a guest has looked at it.
    pub(crate) fn seen_file(&self, node: Node) -> Option<HostFile> {
        self.lock_entries().get(&node)?.seen
    }

    /// Shows the present version of each file that was looked at, and no later one.
    pub(crate) fn stop_following(&self) {
        self.captured.get_or_init(|| {
            let seen = |(node, here): (&Node, &HostEntry)| here.seen.map(|_| *node);
            let nodes: Vec<Node> = self.lock_entries().iter().filter_map(seen).collect();
            nodes.into_iter().for_each(|node| self.show_present(node, Occasion::Captured));
        });
    }
}
