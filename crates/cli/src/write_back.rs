//! Lists changed files of a guest, or writes them to the host.
//!
//! Everything new is first written beside its place, under a name that no program can guess. Only
//! when all of it is on the host are files renamed and removed: the guest may have moved files of
//! the host without reading them, and their content is still under their old names. An old name is
//! removed once the file has its new one.
//!
//! Promises: nothing outside the given directories is changed, whatever links the guest or another
//! program of the host has made there, and a file has its old content or its new one. Where new
//! content cannot be written, the host keeps all that it had. A later error concerns one path: all
//! others are written. Bits that give rights of the owner (setuid, setgid) are not written. Holes
//! of a file stay holes, so that it takes no more room on the host than the guest had. Extended
//! attributes `user.*` are written, and others, such as access control lists, are reported, as are
//! those that give rights in stores of images and those that the host refuses. If only mode and
//! attributes of a file have changed, it stays the same file of the host. A file that a program of
//! the host has changed since the guest saw it is kept and reported, and so is one that the guest
//! has moved to a place that is not written.
//!
//! May break it: a program of the host that changes the files meanwhile, and the end of this one,
//! which leaves files named `.afresh-…`.

mod application;
mod attributes;
mod conflicts;
mod host;
mod staged_files;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use afresh::files::{Change, FileChange, FileDifference, Tree};
use anyhow::Context;
use rustix::fs::fchmod;

use application::Application;
use attributes::{read_attributes, set_attributes};
use conflicts::MovedFiles;
use host::{open_below, open_root};
use staged_files::{StagedFiles, below, mode_of, node_at};

/// Paths that an error names.
const MAX_NAMED: usize = 20;
/// Why a file of the host is kept as it is.
const CHANGED: &str = "a program of the host has made or changed it during the run";

/// Changes between two states of guest files, without directories that the sentry serves.
pub(crate) fn changes(before: &Tree, after: &Tree) -> anyhow::Result<Vec<FileChange>> {
    let FileDifference { changes, truncated, .. } = before.diff(after)?;
    anyhow::ensure!(!truncated, "the program has changed more files than can be listed");
    let own = |change: &FileChange| {
        ["/dev/", "/proc/"].iter().any(|top| change.path.starts_with(top.as_bytes()))
    };
    Ok(changes.into_iter().filter(|change| !own(change)).collect())
}

/// The number of changes within directories.
pub(crate) fn count(tops: &[PathBuf], changes: &[FileChange]) -> usize {
    let within = |change: &&FileChange| tops.iter().any(|top| below(top, change).is_some());
    changes.iter().filter(within).count()
}

/// The path of a file of the host that the program has moved without reading it: the tree refers to
/// its old place.
pub(crate) fn first_moved(
    tops: &[PathBuf],
    changes: &[FileChange],
    after: &Tree,
) -> Option<String> {
    let is_moved = |change: &&FileChange| {
        let content = change.change == Change::Added || change.bytes > 0;
        let within = tops.iter().any(|top| below(top, change).is_some());
        let node = || after.find(&change.path).ok();
        content && within && node().is_some_and(|node| after.host_file(node).is_some())
    };
    changes.iter().find(is_moved).map(|change| escape(&change.path))
}

/// Lists changes, one a line. Control characters, backslashes and bytes that are no UTF-8 are
/// escaped, so that a name cannot pretend to be a line.
pub(crate) fn list(changes: &[FileChange], out: &mut dyn Write) -> std::io::Result<()> {
    for change in changes {
        let letter = match change.change {
            Change::Added => "A",
            Change::Removed => "D",
            _ => "M",
        };
        writeln!(out, "{letter} {}", escape(&change.path))?;
    }
    Ok(())
}

fn escape(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character.is_control() || character == '\\' {
                text.extend(character.escape_default());
            } else {
                text.push(character);
            }
        }
        text.extend(chunk.invalid().escape_ascii().map(char::from));
    }
    text
}

/// Writes the changes below `tops`, directories of the host, to the host: those that lead from the
/// first tree to the second.
///
/// # Errors
/// When some content could not be written, and then nothing is changed; otherwise when a path could
/// not be changed, after all others.
pub(crate) fn write_back(
    tops: &[PathBuf],
    changes: &[FileChange],
    trees: (&Tree, &Tree),
) -> anyhow::Result<()> {
    let moved = MovedFiles::new(tops, changes, trees.1);
    let is_same = |top: &Path| {
        let [before, after] =
            [trees.0, trees.1].map(|tree| node_at(tree, top.as_os_str().as_bytes()));
        before.is_err() || before == after
    };
    if let Some(top) = tops.iter().find(|top| !is_same(top)) {
        anyhow::bail!(
            "{}: the program has moved or removed the directory itself, so nothing is written",
            top.display()
        );
    }
    let staged = tops.iter().map(|top| {
        let root = open_root(top).with_context(|| top.display().to_string())?;
        StagedFiles::new(root, top, changes, trees).map(|staged| (top.as_path(), staged))
    });
    let staged = staged.collect::<anyhow::Result<Vec<_>>>()?;
    let mut failures = Application::new(staged, changes, trees, &moved).run();
    let more = failures.len().saturating_sub(MAX_NAMED);
    failures.truncate(MAX_NAMED);
    if more > 0 {
        failures.push(format!("{more} more"));
    }
    anyhow::ensure!(
        failures.is_empty(),
        "not written to the host: {}. `--write-back` writes files, directories, symbolic links, and \
         attributes user.* that give no rights",
        failures.join(", ")
    );
    Ok(())
}

/// Gives the directory `top` itself its mode and attributes, if the guest has changed them. Returns
/// the attributes that were not written.
fn put_top(
    root: &OwnedFd,
    top: &Path,
    changes: &[FileChange],
    (before, after): (&Tree, &Tree),
) -> anyhow::Result<Vec<String>> {
    let path = top.as_os_str().as_bytes();
    let is_changed = |change: &FileChange| change.path == path && change.change == Change::Changed;
    if !changes.iter().any(is_changed) {
        return Ok(Vec::new());
    }
    let directory = open_below(root, Path::new(""))?;
    let (had, has) = (read_attributes(before, path)?, read_attributes(after, path)?);
    let others = set_attributes(&directory, &had, &has);
    let ((_, was), (_, is)) = (mode_of(before, path)?, mode_of(after, path)?);
    if was != is {
        fchmod(&directory, is)?;
    }
    Ok(others)
}
