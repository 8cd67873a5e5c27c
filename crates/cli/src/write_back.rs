//! Lists changed files of a guest, or writes them to the host.
//!
//! Promises: nothing outside the given directory is changed, whatever links the guest or another
//! program of the host has made there, and a file has its old content or its new one. Bits that
//! give rights of the owner (setuid, setgid) are not written. Holes of a file stay holes, so that
//! it takes no more room on the host than the guest had. Extended attributes `user.*` are written,
//! and others, such as access control lists, are reported.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use afresh::files::{Change, FileChange, FileDifference, Kind, Tree};
use anyhow::Context;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, XattrFlags, fchmod, fremovexattr, fsetxattr,
    mkdirat, open, openat, openat2, renameat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;
/// The name of a file or link until it is whole.
const PARTIAL: &str = ".afresh-partial";
/// The beginning of extended attributes that give no rights.
const PLAIN: &[u8] = b"user.";

/// Changes between two states of guest files, without directories that the sentry serves.
pub(crate) fn changes(before: &Tree, after: &Tree) -> anyhow::Result<Vec<FileChange>> {
    let FileDifference { changes, truncated, .. } = before.diff(after)?;
    anyhow::ensure!(!truncated, "the program has changed more files than can be listed");
    let own = |change: &FileChange| {
        ["/dev/", "/proc/"].iter().any(|top| change.path.starts_with(top.as_bytes()))
    };
    Ok(changes.into_iter().filter(|change| !own(change)).collect())
}

/// Lists changes, one a line.
pub(crate) fn list(changes: &[FileChange], out: &mut dyn Write) -> std::io::Result<()> {
    for change in changes {
        let letter = match change.change {
            Change::Added => "A",
            Change::Removed => "D",
            _ => "M",
        };
        writeln!(out, "{letter} {}", String::from_utf8_lossy(&change.path))?;
    }
    Ok(())
}

/// Writes those changes that are below `top`, a host directory, to the host: those that lead from
/// the first tree to the second.
pub(crate) fn write_back(
    top: &Path,
    changes: &[FileChange],
    (before, after): (&Tree, &Tree),
) -> anyhow::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
    let root = open(top, flags, Mode::empty()).with_context(|| top.display().to_string())?;
    let below = |change: &FileChange| {
        let path = Path::new(OsStr::from_bytes(&change.path));
        path.strip_prefix(top).ok().filter(|rest| !rest.as_os_str().is_empty()).map(Path::to_owned)
    };
    let named = |path: &Path| format!("writing {} back", top.join(path).display());
    // Directories become empty first, and exist before what is in them.
    for change in changes.iter().rev().filter(|change| change.change == Change::Removed) {
        let Some(path) = below(change) else { continue };
        let gone = parent(&root, &path).and_then(|(folder, name)| remove(&folder, name));
        match gone {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error).with_context(|| named(&path)),
        }
    }
    let mut unwritten = Vec::new();
    for change in changes.iter().filter(|change| change.change != Change::Removed) {
        let Some(path) = below(change) else { continue };
        if !matches!(change.kind, Kind::Directory | Kind::Link | Kind::File) {
            unwritten.push(format!("{} ({:?})", path.display(), change.kind));
            continue;
        }
        let others = put(&root, &path, change, (before, after)).with_context(|| named(&path))?;
        unwritten.extend(others.iter().map(|name| format!("{} ({name})", path.display())));
    }
    anyhow::ensure!(
        unwritten.is_empty(),
        "only files, directories, symbolic links and attributes user.* are written to the host. All \
         of them are in {}; the program has also made {}",
        top.display(),
        unwritten.join(", ")
    );
    Ok(())
}

/// The directory that a path is in, by no link, and the last name.
fn parent<'p>(root: &OwnedFd, path: &'p Path) -> Result<(OwnedFd, &'p OsStr), Errno> {
    let name = path.file_name().ok_or(Errno::INVAL)?;
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat2(root, above.unwrap_or(Path::new(".")), flags, Mode::empty(), how)?;
    Ok((folder, name))
}

fn is_directory(folder: &OwnedFd, name: &OsStr) -> Result<bool, Errno> {
    let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

fn remove(folder: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    let flags = if is_directory(folder, name)? { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    unlinkat(folder, name, flags)
}

/// The extended attributes of a path in a tree, by name; none of a link or of a missing file.
fn attributes(tree: &Tree, path: &[u8]) -> anyhow::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let Ok(node) = tree.find(path) else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    for name in tree.attribute_names(node)? {
        if let Some(value) = tree.attribute(node, &name)? {
            all.push((name.to_vec(), value.to_vec()));
        }
    }
    Ok(all)
}

/// Gives a host file or directory its plain attributes, and removes those that it `had`. Returns
/// the names of others.
fn set_attributes(
    file: impl AsFd,
    had: &[(Vec<u8>, Vec<u8>)],
    has: &[(Vec<u8>, Vec<u8>)],
) -> anyhow::Result<Vec<String>> {
    let is_plain = |name: &[u8]| name.starts_with(PLAIN);
    for (name, _) in had.iter().filter(|(name, _)| is_plain(name)) {
        if !has.iter().any(|(other, _)| other == name) {
            match fremovexattr(&file, &name[..]) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    let mut others = Vec::new();
    for (name, value) in has {
        let text = String::from_utf8_lossy(name).into_owned();
        if is_plain(name) {
            let set = fsetxattr(&file, &name[..], value, XattrFlags::empty());
            set.with_context(|| format!("setting the attribute {text}"))?;
        } else {
            others.push(text);
        }
    }
    Ok(others)
}

/// Makes one name what it is in the guest. Returns the names of attributes that are not written.
fn put(
    root: &OwnedFd,
    path: &Path,
    change: &FileChange,
    (before, after): (&Tree, &Tree),
) -> anyhow::Result<Vec<String>> {
    let (folder, name) = parent(root, path)?;
    let above = Path::new(OsStr::from_bytes(&change.path)).parent().unwrap_or(Path::new("/"));
    let above = after.find(above.as_os_str().as_bytes())?;
    let node = after.lookup(above, name.as_bytes())?;
    let mode = Mode::from_raw_mode(after.stat(node)?.mode & 0o777);
    let known = is_directory(&folder, name);
    if known.is_ok_and(|known| known != (change.kind == Kind::Directory)) {
        remove(&folder, name)?;
    }
    match change.kind {
        Kind::Directory => {
            match mkdirat(&folder, name, mode) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let made = openat(&folder, name, flags, Mode::empty())?;
            let had = attributes(before, &change.path)?;
            let others = set_attributes(&made, &had, &attributes(after, &change.path)?)?;
            fchmod(made, mode)?;
            return Ok(others);
        }
        Kind::Link => {
            let target = after.read_link(node)?;
            let _ = unlinkat(&folder, PARTIAL, AtFlags::empty());
            symlinkat(OsStr::from_bytes(&target), &folder, PARTIAL)?;
            renameat(&folder, PARTIAL, &folder, name)?;
        }
        Kind::File => {
            let _ = unlinkat(&folder, PARTIAL, AtFlags::empty());
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let mut file = File::from(openat(&folder, PARTIAL, flags, Mode::RUSR | Mode::WUSR)?);
            let size = after.stat(node)?.size;
            let mut piece = vec![0; PIECE];
            for part in after.stored_ranges(node)? {
                let end = part.end.min(size);
                let mut at = part.start;
                file.seek(SeekFrom::Start(at))?;
                while at < end {
                    let len = (end - at).min(PIECE as u64) as usize;
                    let len = after.read(node, at, &mut piece[..len])?;
                    anyhow::ensure!(len > 0, "it has become shorter");
                    file.write_all(&piece[..len])?;
                    at += len as u64;
                }
            }
            file.set_len(size)?;
            let others = set_attributes(&file, &[], &attributes(after, &change.path)?)?;
            fchmod(&file, mode)?;
            renameat(&folder, PARTIAL, &folder, name)?;
            return Ok(others);
        }
        kind => anyhow::bail!("{kind:?} is no kind of file that is written to the host"),
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use afresh::files::{Budget, New, Time};

    use super::*;

    #[test]
    fn holes_stay_holes_and_other_nodes_than_files_are_reported_after_all_files() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        let inside = |name: &str| top.join(name).to_str().unwrap().to_owned();
        let (before, now) = (Tree::new(Budget::default()), Time::default());
        let mut after = before.clone();
        let node = after.write_path(inside("holes"), b"first", now).unwrap();
        after.write(node, 1 << 33, b"last", now).unwrap();
        after.set_size(node, 1 << 35, now).unwrap();
        let above = after.find(inside("")).unwrap();
        after.create(above, b"a-pipe", New::Device(1), 0o600, now).unwrap();
        let listed = changes(&before, &after).unwrap();
        let told = write_back(&top, &listed, (&before, &after)).unwrap_err().to_string();
        assert!(told.contains("a-pipe (Device)"), "{told}");
        let stat = std::fs::metadata(top.join("holes")).unwrap();
        assert_eq!(stat.len(), 1 << 35);
        assert!(stat.blocks() * 512 < 1 << 20, "{}", stat.blocks());
        let mut file = File::open(top.join("holes")).unwrap();
        let mut found = [0; 4];
        file.seek(SeekFrom::Start(1 << 33)).unwrap();
        std::io::Read::read_exact(&mut file, &mut found).unwrap();
        assert_eq!(&found, b"last");
    }

    #[test]
    fn modes_and_plain_attributes_are_written_and_others_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        let host = File::open(&top).unwrap();
        if fsetxattr(&host, "user.old", b"x", XattrFlags::empty()) == Err(Errno::NOTSUP) {
            return println!("SKIPPED: the file system of {} has no attributes", top.display());
        }
        let inside = |name: &str| top.join(name).to_str().unwrap().to_owned();
        let (mut before, now) = (Tree::new(Budget::default()), Time::default());
        let file = before.write_path(inside("below/file"), b"bytes", now).unwrap();
        let below = before.find(inside("below")).unwrap();
        let mut after = before.clone();
        let names = |path: &str| -> Vec<String> {
            let mut list = vec![0; 256];
            let len = rustix::fs::listxattr(top.join(path), &mut list[..]).unwrap();
            let all = String::from_utf8_lossy(&list[..len]).into_owned();
            let own = all.split_terminator('\0').filter(|name| name.starts_with("user."));
            own.map(str::to_owned).collect()
        };
        let mut write = |change: &dyn Fn(&mut Tree)| {
            change(&mut after);
            let listed = changes(&before, &after).unwrap();
            let written = write_back(&top, &listed, (&before, &after));
            before = after.clone();
            written.map_err(|error| error.to_string())
        };
        write(&|tree| {
            tree.set_mode(file, 0o4751, now).unwrap();
            for node in [file, below] {
                tree.set_attribute(node, b"user.one", Some(b"1"), now).unwrap();
                tree.set_attribute(node, b"user.two", Some(b""), now).unwrap();
            }
        })
        .unwrap();
        write(&|tree| {
            tree.set_mode(below, 0o710, now).unwrap();
            tree.set_attribute(file, b"user.two", None, now).unwrap();
            tree.set_attribute(below, b"user.two", None, now).unwrap();
        })
        .unwrap();
        assert_eq!(
            (names("below"), names("below/file")),
            (vec!["user.one".to_owned()], vec!["user.one".to_owned()])
        );
        let mode = |path: &str| std::fs::metadata(top.join(path)).unwrap().mode() & 0o7777;
        assert_eq!((mode("below"), mode("below/file")), (0o710, 0o751));
        let told = write(&|tree| {
            tree.set_attribute(file, b"system.posix_acl_access", Some(b"list"), now).unwrap();
        });
        let told = told.unwrap_err();
        assert!(told.contains("below/file (system.posix_acl_access)"), "{told}");
        assert_eq!(names("below/file"), ["user.one"]);
    }
}
