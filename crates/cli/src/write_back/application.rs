//! Giving staged files their names on the host, and removing others.
//!
//! Promises: an old name of a file is removed only once the file has all its new names, in
//! whichever of the directories these are, so that bytes which the guest has only moved are always
//! somewhere. A failure of one path stops no other.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use afresh::files::{Change, FileChange, Node, Tree};
use rustix::fs::fchmod;
use rustix::io::Errno;

use super::conflicts::{MovedFiles, was_changed};
use super::host::{open_directory, parent, remove};
use super::staged_files::{StagedChange, StagedFiles, below, node_at};
use super::{CHANGED, put_top};
use crate::output::one_line;

/// A file that has not got its new name yet, with the reason.
type PendingPut = (StagedChange, String);

/// An old name that is not removed yet, with the reason.
type PendingRemoval<'a> = (&'a FileChange, PathBuf, String);

/// The changes of all directories of the host.
pub(super) struct Application<'a> {
    directories: Vec<DirectoryApplication<'a>>,
    moved: &'a MovedFiles,
}

impl<'a> Application<'a> {
    pub(super) fn new(
        staged: Vec<(&'a Path, StagedFiles)>,
        changes: &'a [FileChange],
        trees: (&'a Tree, &'a Tree),
        moved: &'a MovedFiles,
    ) -> Self {
        let directory = |(top, staged)| DirectoryApplication::new(top, staged, changes, trees);
        Self { directories: staged.into_iter().map(directory).collect(), moved }
    }

    /// Does all of them. Returns what was not written.
    pub(super) fn run(mut self) -> Vec<String> {
        // A file may take the place of a directory, or come into one that takes the place of a
        // file.
        loop {
            let before = self.pending();
            self.directories.iter_mut().for_each(DirectoryApplication::put);
            let mut unwritten = HashMap::new();
            for directory in &self.directories {
                directory.add_unwritten(&mut unwritten);
            }
            for directory in &mut self.directories {
                directory.remove(&unwritten, self.moved);
            }
            if self.pending() == before {
                break;
            }
        }
        self.directories.into_iter().flat_map(DirectoryApplication::finish).collect()
    }

    /// The number of names that are not given, and of those that are not removed.
    fn pending(&self) -> (usize, usize) {
        let puts = self.directories.iter().map(|directory| directory.puts.len()).sum();
        (puts, self.directories.iter().map(|directory| directory.removals.len()).sum())
    }
}

/// The changes of one directory of the host.
struct DirectoryApplication<'a> {
    top: &'a Path,
    staged: StagedFiles,
    changes: &'a [FileChange],
    before: &'a Tree,
    after: &'a Tree,
    puts: Vec<PendingPut>,
    removals: Vec<PendingRemoval<'a>>,
    failures: Vec<String>,
}

impl<'a> DirectoryApplication<'a> {
    fn new(
        top: &'a Path,
        mut staged: StagedFiles,
        changes: &'a [FileChange],
        (before, after): (&'a Tree, &'a Tree),
    ) -> Self {
        let puts = staged.take().into_iter().map(|change| (change, String::new())).collect();
        // Names in a directory come before it.
        let removed = changes.iter().rev().filter(|change| change.change == Change::Removed);
        let place = |change: &'a FileChange| Some((change, below(top, change)?, String::new()));
        let removals = removed.filter_map(place).collect();
        let failures = Vec::new();
        Self { top, staged, changes, before, after, puts, removals, failures }
    }

    /// Applies the rest, and returns what was not written.
    fn finish(mut self) -> Vec<String> {
        for path in self.staged.conflicts().to_vec() {
            self.report(&path, &CHANGED);
        }
        for (path, reason) in self.staged.lost().to_vec() {
            self.report(&path, &reason);
        }
        for (change, reason) in std::mem::take(&mut self.puts) {
            self.staged.discard(&change);
            self.report(&change.path, &reason);
        }
        let mut last: Option<PathBuf> = None;
        for (_, path, reason) in std::mem::take(&mut self.removals).into_iter().rev() {
            // One report for a directory and all below it.
            if !last.as_ref().is_some_and(|last| path.starts_with(last)) {
                self.report(&path, &reason);
                last = Some(path);
            }
        }
        self.close_directories();
        match put_top(self.staged.root(), self.top, self.changes, (self.before, self.after)) {
            Ok(others) => others.iter().for_each(|name| self.report(Path::new(""), name)),
            Err(error) => self.report(Path::new(""), &format!("{error:#}")),
        }
        self.failures
    }

    fn report(&mut self, path: &Path, error: &dyn Display) {
        // The guest chose the names of files and of attributes.
        let (path, error) = (self.top.join(path).display().to_string(), error.to_string());
        self.failures.push(format!("{} ({})", one_line(&path), one_line(&error)));
    }

    /// Gives files their names. Those that have not got them stay pending.
    fn put(&mut self) {
        for (change, _) in std::mem::take(&mut self.puts) {
            match self.staged.put(&change) {
                Ok(others) => others.iter().for_each(|name| self.report(&change.path, name)),
                Err(error) => self.puts.push((change, format!("{error:#}"))),
            }
        }
    }

    /// Removes old names, but not of the files `unwritten`. Those that stay are pending.
    fn remove(&mut self, unwritten: &HashMap<Node, String>, moved: &MovedFiles) {
        let waiting: HashSet<&Path> = self.puts.iter().map(|(change, _)| &*change.path).collect();
        let mut pending = Vec::new();
        for (change, path, _) in std::mem::take(&mut self.removals) {
            let node = node_at(self.before, &change.path).ok();
            let place = node.and_then(|node| {
                unwritten.get(&node).map(String::as_str).or_else(|| moved.place(node))
            });
            if let Some(place) = place {
                let reason = format!("moved to {place}, which is not written");
                pending.push((change, path, reason));
                continue;
            }
            // Another file has the name by now.
            if node_at(self.after, &change.path).is_ok() && !waiting.contains(&*path) {
                continue;
            }
            let gone =
                parent(self.staged.root(), &path).and_then(|(folder, name)| {
                    match was_changed(&folder, name, (self.before, change)) {
                        true => Ok(Some(CHANGED.to_owned())),
                        false => remove(&folder, name).map(|()| None),
                    }
                });
            match gone {
                Ok(None) | Err(Errno::NOENT) => {}
                Ok(Some(reason)) => pending.push((change, path, reason)),
                Err(error) => pending.push((change, path, error.to_string())),
            }
        }
        self.removals = pending;
    }

    /// Adds the files that do not have all their new names here, and one of those.
    fn add_unwritten(&self, unwritten: &mut HashMap<Node, String>) {
        let pending = self.puts.iter().map(|(change, _)| &change.path);
        let lost = self.staged.lost().iter().map(|(path, _)| path);
        for path in pending.chain(lost).chain(self.staged.conflicts()) {
            let path = self.top.join(path);
            if let Ok(node) = node_at(self.after, path.as_os_str().as_bytes()) {
                unwritten.insert(node, path.display().to_string());
            }
        }
    }

    /// The owner may lose the right to write a directory once its entries are written.
    fn close_directories(&mut self) {
        let directories: Vec<_> =
            self.staged.closed_directories().map(|(path, mode)| (path.to_owned(), mode)).collect();
        for (path, mode) in directories {
            let made = parent(self.staged.root(), &path)
                .and_then(|(folder, name)| open_directory(&folder, name));
            if let Err(error) = made.and_then(|made| fchmod(made, mode)) {
                self.report(&path, &error);
            }
        }
    }
}
