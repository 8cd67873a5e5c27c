//! Files of the host that must be kept although the guest has removed or replaced them.
//!
//! Promises: a file that a program of the host has made, changed or replaced since the guest saw it
//! is found, unless its size and time of modification are the same.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use afresh::files::{Change, FileChange, HostFile, Kind, Node, Tree};
use rustix::fs::{Mode, OFlags, openat};

use super::staged_files::{below, node_at};

/// Whether the host file `name`, which `change` removes or replaces, is not the one that the guest
/// has seen.
pub(super) fn was_changed(
    folder: &OwnedFd,
    name: &OsStr,
    (before, change): (&Tree, &FileChange),
) -> bool {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(present) = openat(folder, name, flags, Mode::empty()) else { return false };
    match node_at(before, &change.path) {
        Ok(node) => {
            let seen = before.seen_host_file(node);
            let is_seen = |seen: HostFile| {
                HostFile::of(&File::from(present)).is_ok_and(|file| file.has_content_of(&seen))
            };
            let is_file = before.stat(node).is_ok_and(|stat| stat.kind == Kind::File);
            is_file && !seen.is_none_or(is_seen)
        }
        // It was made after the guest had looked for it. Directories are joined.
        Err(_) => change.kind != Kind::Directory,
    }
}

/// Files that the guest has moved out of the directories that are written.
pub(super) struct MovedFiles(HashMap<Node, PathBuf>);

impl MovedFiles {
    pub(super) fn new(tops: &[PathBuf], changes: &[FileChange], after: &Tree) -> Self {
        let outside = |change: &&FileChange| {
            change.change != Change::Removed && tops.iter().all(|top| below(top, change).is_none())
        };
        let place = |change: &FileChange| {
            let path = PathBuf::from(OsStr::from_bytes(&change.path));
            Some((node_at(after, &change.path).ok()?, path))
        };
        Self(changes.iter().filter(outside).filter_map(place).collect())
    }

    /// The removals below `top`, by their number among `changes`, that are not done, with a reason
    /// for those that are not below another one.
    pub(super) fn omitted_removals(
        &self,
        before: &Tree,
        top: &Path,
        changes: &[FileChange],
    ) -> HashMap<usize, Option<String>> {
        let mut kept = HashMap::new();
        if self.0.is_empty() {
            return kept;
        }
        let mut last: Option<&Path> = None;
        for (index, change) in changes.iter().enumerate() {
            if change.change != Change::Removed || below(top, change).is_none() {
                continue;
            }
            let Some(place) = node_at(before, &change.path).ok().and_then(|node| self.0.get(&node))
            else {
                continue;
            };
            let path = Path::new(OsStr::from_bytes(&change.path));
            let is_below = last.is_some_and(|last| path.starts_with(last));
            let reason = || format!("moved to {}, which is not written", place.display());
            kept.insert(index, (!is_below).then(reason));
            if !is_below {
                last = Some(path);
            }
        }
        kept
    }
}
