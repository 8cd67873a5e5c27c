//! New files of the host, under names that no program can guess until they get their own.
//!
//! Promises: nothing that the host has is changed before [`StagedFiles::put`], and afterwards
//! nothing of the guest is read from the host. Names that were not given are removed when the
//! [`StagedFiles`] are dropped.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use afresh::files::{Change, FileChange, Kind, Node, Refused, Tree};
use anyhow::Context;
use rustix::fs::{AtFlags, Mode, OFlags, fchmod, mkdirat, openat, renameat, symlinkat, unlinkat};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::attributes::{Attributes, copy_attributes, is_plain, read_attributes, set_attributes};
use super::conflicts::was_changed;
use super::host::{is_directory, open_below, open_directory, open_file, parent, remove};

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;

/// The path of a change below a directory of the host.
pub(super) fn below(top: &Path, change: &FileChange) -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(&change.path));
    path.strip_prefix(top).ok().filter(|rest| !rest.as_os_str().is_empty()).map(Path::to_owned)
}

/// A new file or link under a temporary name.
struct Partial {
    /// Its directory, from the root. The nearest one to its place that exists.
    folder: PathBuf,
    name: String,
}

/// A path that is added or changed, with all that the host needs for it.
pub(super) struct StagedChange {
    pub(super) path: PathBuf,
    kind: Kind,
    mode: Mode,
    had: Attributes,
    has: Attributes,
    /// None for directories, and for files that differ in mode and attributes alone.
    partial: Option<Partial>,
    /// Attributes that are not written.
    others: Vec<String>,
}

/// Added and changed files of one directory of the host.
pub(super) struct StagedFiles {
    root: OwnedFd,
    /// In all temporary names.
    number: u64,
    changes: Vec<StagedChange>,
    /// Files that the host has changed during the run.
    conflicts: Vec<PathBuf>,
    /// Files whose bytes could not be read, with the reason.
    lost: Vec<(PathBuf, String)>,
    /// Temporary names that were given out.
    partials: usize,
    directories: Vec<(PathBuf, Mode)>,
}

impl StagedFiles {
    /// Stages those changes that are below `top`, which is open as `root`.
    pub(super) fn new(
        root: OwnedFd,
        top: &Path,
        changes: &[FileChange],
        trees: (&Tree, &Tree),
    ) -> anyhow::Result<Self> {
        let mut number = [0; 8];
        getrandom(&mut number, GetRandomFlags::empty())?;
        let number = u64::from_le_bytes(number);
        let (conflicts, lost, directories) = (Vec::new(), Vec::new(), Vec::new());
        let (changed, partials) = (Vec::new(), 0);
        let mut staged =
            Self { root, number, changes: changed, conflicts, lost, partials, directories };
        for change in changes.iter().filter(|change| change.change != Change::Removed) {
            let Some(path) = below(top, change) else { continue };
            let place = parent(&staged.root, &path);
            if place.is_ok_and(|(folder, name)| was_changed(&folder, name, (trees.0, change))) {
                staged.conflicts.push(path);
                continue;
            }
            match staged.stage(&path, change, trees) {
                Ok(change) => staged.changes.push(change),
                // Bytes of the host that are there no more. The host itself refuses with an errno.
                Err(error) if error.is::<Refused>() => staged.lost.push((path, error.to_string())),
                Err(error) => {
                    let named = format!("writing {} back", top.join(&path).display());
                    return Err(error.context(named));
                }
            }
        }
        Ok(staged)
    }

    pub(super) fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// Files that a program of the host has changed during the run. They stay as they are.
    pub(super) fn conflicts(&self) -> &[PathBuf] {
        &self.conflicts
    }

    /// Files whose bytes could not be read, with the reason.
    pub(super) fn lost(&self) -> &[(PathBuf, String)] {
        &self.lost
    }

    /// The changes, to put each.
    pub(super) fn take(&mut self) -> Vec<StagedChange> {
        std::mem::take(&mut self.changes)
    }

    /// Directories that [`StagedFiles::put`] left open to their owner, with their modes. Those
    /// within others come first.
    pub(super) fn closed_directories(&self) -> impl Iterator<Item = (&Path, Mode)> {
        let all = self.directories.iter().rev().map(|(path, mode)| (path.as_path(), *mode));
        all.filter(|(_, mode)| !mode.contains(Mode::RWXU))
    }
}

impl StagedFiles {
    /// Reads all of one change from the guest, and writes its content under a temporary name.
    fn stage(
        &mut self,
        path: &Path,
        change: &FileChange,
        (before, after): (&Tree, &Tree),
    ) -> anyhow::Result<StagedChange> {
        let (node, mode) = mode_of(after, &change.path)?;
        let mut staged = StagedChange {
            path: path.to_owned(),
            kind: change.kind,
            mode,
            had: read_attributes(before, &change.path)?,
            has: read_attributes(after, &change.path)?,
            partial: None,
            others: Vec::new(),
        };
        match change.kind {
            Kind::Link => {
                let target = after.read_link(node)?;
                let target = OsStr::from_bytes(&target);
                let (partial, ()) =
                    self.make_partial(path, |folder, name| symlinkat(target, folder, name))?;
                staged.partial = Some(partial);
            }
            Kind::File => {
                let old = match parent(&self.root, path) {
                    Ok((folder, name)) => open_file(&folder, name)?,
                    Err(_) => None,
                };
                // Another name of the file may be outside of the directory.
                let stays = old.as_ref().is_some_and(|(_, stat)| {
                    (change.change, change.bytes, stat.st_nlink) == (Change::Changed, 0, 1)
                });
                if stays {
                    return Ok(staged);
                }
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                let (partial, file) = self.make_partial(path, |folder, name| {
                    openat(folder, name, flags, Mode::RUSR | Mode::WUSR)
                })?;
                let old = old.map(|(file, _)| file);
                match fill(file.into(), (after, node), old, &mut staged) {
                    Ok(()) => staged.partial = Some(partial),
                    Err(error) => {
                        self.remove_partial(&partial);
                        return Err(error);
                    }
                }
            }
            _ => {}
        }
        Ok(staged)
    }

    /// Makes something under a temporary name, as near to its place as the host allows now: its
    /// directory may be a new one, or one that the guest has opened to its owner.
    fn make_partial<T>(
        &mut self,
        path: &Path,
        make: impl Fn(&OwnedFd, &str) -> Result<T, Errno>,
    ) -> Result<(Partial, T), Errno> {
        let name = format!(".afresh-{:016x}-{}", self.number, self.partials);
        self.partials += 1;
        let mut folder = path.parent().unwrap_or(Path::new(""));
        loop {
            match open_below(&self.root, folder).and_then(|at| make(&at, &name)) {
                Ok(made) => return Ok((Partial { folder: folder.to_owned(), name }, made)),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS)
                    if !folder.as_os_str().is_empty() =>
                {
                    folder = folder.parent().unwrap_or(Path::new(""));
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn remove_partial(&self, partial: &Partial) {
        if let Ok(folder) = open_below(&self.root, &partial.folder) {
            let _ = unlinkat(&folder, &partial.name, AtFlags::empty());
        }
    }

    /// Makes one path what it is in the guest. A directory can be written by its owner until
    /// [`StagedFiles::closed_directories`] are closed. Returns what was not written of it. After an
    /// error it can be put again, or must be [discarded](StagedFiles::discard).
    pub(super) fn put(&mut self, change: &StagedChange) -> anyhow::Result<Vec<String>> {
        let mut others = self.put_all_but_others(change)?;
        others.extend_from_slice(&change.others);
        Ok(others)
    }

    /// Removes the new content of a path that could not be put.
    pub(super) fn discard(&self, change: &StagedChange) {
        if let Some(partial) = &change.partial {
            self.remove_partial(partial);
        }
    }

    fn put_all_but_others(&mut self, change: &StagedChange) -> anyhow::Result<Vec<String>> {
        if !matches!(change.kind, Kind::Directory | Kind::Link | Kind::File) {
            return Ok(vec![format!("{:?}", change.kind)]);
        }
        let (folder, name) = parent(&self.root, &change.path)?;
        let known = is_directory(&folder, name);
        if known.is_ok_and(|known| known != (change.kind == Kind::Directory)) {
            remove(&folder, name)?;
        }
        if let Some(partial) = &change.partial {
            let from = open_below(&self.root, &partial.folder)?;
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = (change.kind == Kind::File)
                .then(|| openat(&from, &partial.name, flags, Mode::empty()))
                .transpose()?;
            renameat(&from, &partial.name, &folder, name)?;
            // Not before: the directory of its temporary name may be open to other users.
            file.map_or(Ok(()), |file| fchmod(file, change.mode))?;
            return Ok(Vec::new());
        }
        if change.kind == Kind::Directory {
            self.directories.push((change.path.clone(), change.mode));
            let had = match mkdirat(&folder, name, change.mode | Mode::RWXU) {
                Ok(()) => &[],
                Err(Errno::EXIST) => &change.had[..],
                Err(error) => return Err(error.into()),
            };
            let made = open_directory(&folder, name)?;
            fchmod(&made, change.mode | Mode::RWXU)?;
            return Ok(set_attributes(&made, had, &change.has));
        }
        let (file, stat) = open_file(&folder, name)?.context("it is no longer a file")?;
        let open = Mode::from_raw_mode(stat.st_mode & 0o777) | Mode::RUSR | Mode::WUSR;
        fchmod(&file, open)?;
        let others = set_attributes(&file, &change.had, &change.has);
        fchmod(&file, change.mode)?;
        Ok(others)
    }
}

impl Drop for StagedFiles {
    fn drop(&mut self) {
        for partial in self.changes.iter().filter_map(|change| change.partial.as_ref()) {
            self.remove_partial(partial);
        }
    }
}

/// Gives a new file the content and attributes of a guest file. It has the attributes of the host
/// file that it will replace, too.
fn fill(
    mut file: File,
    (tree, node): (&Tree, Node),
    old: Option<File>,
    staged: &mut StagedChange,
) -> anyhow::Result<()> {
    copy_content(tree, node, &mut file)?;
    match old {
        Some(old) => {
            staged.others = copy_attributes(&old, &file)?;
            staged.had.retain(|(name, _)| is_plain(name));
        }
        None => staged.had.clear(),
    }
    staged.others.extend(set_attributes(&file, &staged.had, &staged.has));
    Ok(())
}

/// Copies the content of a guest file to an empty one of the host.
fn copy_content(tree: &Tree, node: Node, file: &mut File) -> anyhow::Result<()> {
    tree.refresh(node);
    let size = tree.stat(node)?.size;
    let mut piece = vec![0; PIECE];
    for part in tree.stored_ranges(node)? {
        let end = part.end.min(size);
        let mut at = part.start;
        file.seek(SeekFrom::Start(at))?;
        while at < end {
            let len = (end - at).min(PIECE as u64) as usize;
            let len = tree.read(node, at, &mut piece[..len])?;
            if len == 0 {
                return Err(Refused::Layer("it has become shorter".to_owned()).into());
            }
            file.write_all(&piece[..len])?;
            at += len as u64;
        }
    }
    file.set_len(size)?;
    Ok(())
}

/// The file at a path of a tree, which is not followed if it is a link.
pub(super) fn node_at(tree: &Tree, path: &[u8]) -> Result<Node, Refused> {
    let path = Path::new(OsStr::from_bytes(path));
    let above = tree.find(path.parent().unwrap_or(Path::new("/")).as_os_str().as_bytes())?;
    tree.lookup(above, path.file_name().unwrap_or_default().as_bytes())
}

/// A guest file, and the bits of its mode that the host takes. The bit with which files of a
/// directory belong to their users is one of them.
pub(super) fn mode_of(tree: &Tree, path: &[u8]) -> anyhow::Result<(Node, Mode)> {
    let node = node_at(tree, path)?;
    let stat = tree.stat(node)?;
    let taken = if stat.kind == Kind::Directory { 0o1777 } else { 0o777 };
    Ok((node, Mode::from_raw_mode(stat.mode & taken)))
}
