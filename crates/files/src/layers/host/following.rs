//! Which host file a file shows, and since when.
//!
//! A program of the host may change or replace a file while guests use it. A file that no tree has
//! copied then shows the new version. A tree with a copy of its attributes refers to the bytes of
//! the version that it has copied, and does not get those of another one: parts of two versions
//! would make a file that was never there.
//!
//! Promises: a read returns bytes of one version, except a read during which the host writes. May
//! break it: a host that changes a file twice within the resolution of its times.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use super::host_file::{HostFile, times_of};
use super::{HostDirectory, HostEntry};
use crate::nodes::inode::Inode;
use crate::nodes::node::{Kind, Node};

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

    /// Shows the present version of a file. One that cannot be opened stays as it was seen.
    pub(crate) fn follow(&self, node: Node) {
        if !self.is_captured.load(Ordering::Acquire) {
            self.show_present(node, false);
        }
    }

    fn show_present(&self, node: Node, is_capture: bool) {
        let is_file = |inode: &Arc<Inode>| inode.kind() == Kind::File;
        let shown =
            |here: &HostEntry| here.seen.filter(|_| here.inode.as_ref().is_some_and(is_file));
        let (seen, path) = {
            let known = self.lock_entries();
            let Some(seen) = known.get(&node).and_then(shown) else { return };
            let Ok(path) = super::path_of(&known, node) else { return };
            (seen, path)
        };
        let Ok((_, stat)) = self.stat_at(&path) else { return };
        let present = HostFile::of_stat(&stat);
        if present == seen || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return;
        }
        if present.file != seen.file {
            self.lock_open().retain(|(other, _)| *other != node);
        }
        let mut known = self.lock_entries();
        // A file that is captured has one version from now on.
        if self.is_captured.load(Ordering::Acquire) && !is_capture {
            return;
        }
        let Some(here) = known.get_mut(&node).filter(|here| shown(here).is_some()) else { return };
        let Some(inode) = &mut here.inode else { return };
        let inode = Arc::make_mut(inode);
        inode.body = present.body(node);
        (inode.mode, inode.times) = (stat.st_mode & 0o7777, times_of(&stat));
        here.seen = Some(present);
    }

    /// The host file that a file shows, if a guest has looked at it.
    pub(crate) fn seen_file(&self, node: Node) -> Option<HostFile> {
        self.lock_entries().get(&node)?.seen
    }

    /// Shows the present version of each file that was looked at, and no later one.
    pub(crate) fn stop_following(&self) {
        self.captured.get_or_init(|| {
            let seen = |(node, here): (&Node, &HostEntry)| here.seen.map(|_| *node);
            let nodes: Vec<Node> = {
                let known = self.lock_entries();
                self.is_captured.store(true, Ordering::Release);
                known.iter().filter_map(seen).collect()
            };
            nodes.into_iter().for_each(|node| self.show_present(node, true));
        });
    }
}
