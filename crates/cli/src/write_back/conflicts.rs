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
    let Ok(present) = HostFile::of(&File::from(present)) else { return true };
    match node_at(before, &change.path) {
        Ok(node) => match before.stat(node).map(|stat| stat.kind) {
            Ok(Kind::Directory) => !present.is_directory(),
            _ => before.seen_host_file(node).is_some_and(|seen| !present.has_content_of(&seen)),
        },
        // It was made after the guest had looked for it. Two directories are joined.
        Err(_) => change.kind != Kind::Directory || !present.is_directory(),
    }
}

/// Files that the guest has moved out of the directories that are written, and their new places.
pub(super) struct MovedFiles(HashMap<Node, String>);

impl MovedFiles {
    pub(super) fn new(tops: &[PathBuf], changes: &[FileChange], after: &Tree) -> Self {
        let outside = |change: &&FileChange| {
            change.change != Change::Removed && tops.iter().all(|top| below(top, change).is_none())
        };
        let place = |change: &FileChange| {
            let path = Path::new(OsStr::from_bytes(&change.path)).display();
            Some((node_at(after, &change.path).ok()?, path.to_string()))
        };
        Self(changes.iter().filter(outside).filter_map(place).collect())
    }

    /// The new place of a file, if it is outside.
    pub(super) fn place(&self, node: Node) -> Option<&str> {
        self.0.get(&node).map(String::as_str)
    }
}
