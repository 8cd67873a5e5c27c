//! Giving staged files their names on the host, and removing others.
//!
//! Promises: an old name of a file is removed only once the file has all its new names, so that
//! bytes which the guest has only moved are always somewhere. What can be done is done, whatever
//! fails beside it.

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

/// The changes of one directory of the host.
pub(super) struct Application<'a> {
    top: &'a Path,
    staged: StagedFiles,
    changes: &'a [FileChange],
    before: &'a Tree,
    after: &'a Tree,
    moved: &'a MovedFiles,
    failures: Vec<String>,
}

/// A file that has not got its new name yet, with the reason.
type PendingPut = (StagedChange, String);

impl<'a> Application<'a> {
    pub(super) fn new(
        top: &'a Path,
        staged: StagedFiles,
        changes: &'a [FileChange],
        (before, after): (&'a Tree, &'a Tree),
        moved: &'a MovedFiles,
    ) -> Self {
        Self { top, staged, changes, before, after, moved, failures: Vec::new() }
    }

    /// Does all of them. Returns what was not written.
    pub(super) fn run(mut self) -> Vec<String> {
        for path in self.staged.conflicts().to_vec() {
            self.report(&path, &CHANGED);
        }
        for (path, reason) in self.staged.lost().to_vec() {
            self.report(&path, &reason);
        }
        let mut puts: Vec<PendingPut> =
            self.staged.take().into_iter().map(|c| (c, String::new())).collect();
        let mut removals = self.removals();
        // A file may take the place of a directory, or come into one that takes the place of a
        // file.
        loop {
            let before = (puts.len(), removals.len());
            puts = self.put(puts);
            removals = self.remove(removals, &puts);
            if (puts.len(), removals.len()) == before {
                break;
            }
        }
        for (change, reason) in puts {
            self.staged.discard(&change);
            self.report(&change.path, &reason);
        }
        let mut last: Option<PathBuf> = None;
        for (_, path, reason) in removals.into_iter().rev() {
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

    /// Gives files their names. Returns those that have not got them.
    fn put(&mut self, puts: Vec<PendingPut>) -> Vec<PendingPut> {
        let mut pending = Vec::new();
        for (change, _) in puts {
            match self.staged.put(&change) {
                Ok(others) => others.iter().for_each(|name| self.report(&change.path, name)),
                Err(error) => pending.push((change, format!("{error:#}"))),
            }
        }
        pending
    }

    /// Names that the guest has removed, those in a directory before it.
    fn removals(&self) -> Vec<(&'a FileChange, PathBuf, String)> {
        let removed = self.changes.iter().rev().filter(|change| change.change == Change::Removed);
        let place =
            |change: &'a FileChange| Some((change, below(self.top, change)?, String::new()));
        removed.filter_map(place).collect()
    }

    /// Removes old names. Returns those that stay, with the reason.
    fn remove(
        &mut self,
        removals: Vec<(&'a FileChange, PathBuf, String)>,
        puts: &[PendingPut],
    ) -> Vec<(&'a FileChange, PathBuf, String)> {
        let unwritten = self.unwritten(puts);
        let waiting: HashSet<&Path> = puts.iter().map(|(change, _)| &*change.path).collect();
        let mut pending = Vec::new();
        for (change, path, _) in removals {
            let node = node_at(self.before, &change.path).ok();
            let place = node.and_then(|node| {
                unwritten.get(&node).map(String::as_str).or_else(|| self.moved.place(node))
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
        pending
    }

    /// Files that do not have all their new names, and one of those.
    fn unwritten(&self, puts: &[PendingPut]) -> HashMap<Node, String> {
        let pending = puts.iter().map(|(change, _)| &change.path);
        let lost = self.staged.lost().iter().map(|(path, _)| path);
        let paths = pending.chain(lost).chain(self.staged.conflicts());
        let node = |path: &PathBuf| {
            let path = self.top.join(path);
            Some((
                node_at(self.after, path.as_os_str().as_bytes()).ok()?,
                path.display().to_string(),
            ))
        };
        paths.filter_map(node).collect()
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
