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
            let Ok(present) = HostFile::of(&File::from(present)) else { return true };
            match before.stat(node).map(|stat| stat.kind) {
                Ok(Kind::Directory) => !present.is_directory(),
                _ => before.seen_host_file(node).is_some_and(|seen| !present.has_content_of(&seen)),
            }
        }
        // It was made after the guest had looked for it. Directories are joined.
        Err(_) => change.kind != Kind::Directory,
    }
}

/// Files whose old names stay on the host, because the guest has moved them and they are not
/// written under their new names, with the reason.
pub(super) struct MovedFiles(HashMap<Node, String>);

impl MovedFiles {
    pub(super) fn new(tops: &[PathBuf], changes: &[FileChange], after: &Tree) -> Self {
        let outside = |change: &&FileChange| {
            change.change != Change::Removed && tops.iter().all(|top| below(top, change).is_none())
        };
        let place = |change: &FileChange| {
            let path = Path::new(OsStr::from_bytes(&change.path)).display();
            let reason = format!("moved to {path}, which is not written");
            Some((node_at(after, &change.path).ok()?, reason))
        };
        Self(changes.iter().filter(outside).filter_map(place).collect())
    }

    /// Keeps the files whose bytes could not be read for their new names.
    pub(super) fn keep<'p>(
        &mut self,
        after: &Tree,
        top: &Path,
        lost: impl Iterator<Item = &'p PathBuf>,
    ) {
        for path in lost {
            let path = top.join(path);
            if let Ok(node) = node_at(after, path.as_os_str().as_bytes()) {
                let reason = format!("moved to {}, which could not be read", path.display());
                self.0.insert(node, reason);
            }
        }
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
            let Some(reason) =
                node_at(before, &change.path).ok().and_then(|node| self.0.get(&node))
            else {
                continue;
            };
            let path = Path::new(OsStr::from_bytes(&change.path));
            let is_below = last.is_some_and(|last| path.starts_with(last));
            kept.insert(index, (!is_below).then(|| reason.clone()));
            if !is_below {
                last = Some(path);
            }
        }
        kept
    }
}
