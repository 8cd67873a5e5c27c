//! Lists changed files of a guest, or writes them to the host.
//!
//! Promises: nothing outside the given directory is changed, whatever links the guest or another
//! program of the host has made there, and a file has its old content or its new one. Bits that
//! give rights of the owner (setuid, setgid) are not written. Holes of a file stay holes, so that
//! it takes no more room on the host than the guest had. Extended attributes `user.*` are written,
//! and others, such as access control lists, are reported, as are those that give rights in stores
//! of images and those that the host refuses. If only mode and attributes of a file have changed,
//! it stays the same file of the host.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use afresh::files::{Change, FileChange, FileDifference, Kind, Node, Tree};
use anyhow::Context;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, XattrFlags, fchmod, fgetxattr, flistxattr,
    fremovexattr, fsetxattr, fstat, mkdirat, open, openat, openat2, renameat, statat, symlinkat,
    unlinkat,
};
use rustix::io::Errno;

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;
/// The name of a file or link until it is whole.
const PARTIAL: &str = ".afresh-partial";
/// The beginning of extended attributes that give no rights.
const PLAIN: &[u8] = b"user.";
/// Beginnings of those that give rights where programs of the host keep owners and modes in them:
/// stores of container images, overlay file systems and 9P servers.
const RIGHTS: [&[u8]; 5] = [
    b"user.containers.",
    b"user.fuseoverlayfs.",
    b"user.overlay.",
    b"user.rootlesscontainers",
    b"user.virtfs.",
];
/// Bytes that the names of all attributes of a file have at most, and a value (`XATTR_LIST_MAX`).
const MAX_NAMES: usize = 64 << 10;
const MAX_VALUE: usize = 64 << 10;

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
    let (mut unwritten, mut directories) = (Vec::new(), Vec::new());
    for change in changes.iter().filter(|change| change.change != Change::Removed) {
        let Some(path) = below(change) else { continue };
        if !matches!(change.kind, Kind::Directory | Kind::Link | Kind::File) {
            unwritten.push(format!("{} ({:?})", path.display(), change.kind));
            continue;
        }
        let others = put(&root, &path, change, (before, after)).with_context(|| named(&path))?;
        unwritten.extend(others.iter().map(|name| format!("{} ({name})", path.display())));
        if change.kind == Kind::Directory {
            directories.push((path, mode_of(after, &change.path)?.1));
        }
    }
    // The owner may lose the right to write a directory once its entries are written.
    for (path, mode) in directories.iter().rev().filter(|(_, mode)| !mode.contains(Mode::RWXU)) {
        let made = parent(&root, path).and_then(|(folder, name)| open_directory(&folder, name));
        made.and_then(|made| fchmod(made, *mode)).with_context(|| named(path))?;
    }
    anyhow::ensure!(
        unwritten.is_empty(),
        "only files, directories, symbolic links and attributes user.* that give no rights are \
         written to the host, which may refuse an attribute. The others are in {}; the program has \
         also made {}",
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

/// Attributes by name.
type Attributes = [(Vec<u8>, Vec<u8>)];

/// Whether an attribute is written to the host.
fn is_plain(name: &[u8]) -> bool {
    name.starts_with(PLAIN) && !RIGHTS.iter().any(|rights| name.starts_with(rights))
}

/// Gives a host file or directory the plain attributes in which the two lists differ, and removes
/// those that only the first one has. Returns the names of others, and of those that the host
/// refuses.
fn set_attributes(file: impl AsFd, had: &Attributes, has: &Attributes) -> Vec<String> {
    let mut others = Vec::new();
    let mut report = |name: &[u8], error: Option<Errno>| {
        let name = String::from_utf8_lossy(name);
        others.push(error.map_or(name.to_string(), |error| format!("{name}: {error}")));
    };
    for (name, _) in had.iter().filter(|(name, _)| !has.iter().any(|(other, _)| other == name)) {
        if !is_plain(name) {
            report(name, None);
            continue;
        }
        match fremovexattr(&file, &name[..]) {
            // A file system without attributes has none to remove.
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            Err(error) => report(name, Some(error)),
        }
    }
    for both @ (name, value) in has.iter().filter(|both| !had.contains(both)) {
        if !is_plain(name) {
            report(&both.0, None);
        } else if let Err(error) = fsetxattr(&file, &name[..], value, XattrFlags::empty()) {
            report(name, Some(error));
        }
    }
    others
}

/// Copies the plain attributes of a host file to the one that replaces it. Returns the names of
/// those that the host refuses.
fn copy_attributes(from: &File, to: &File) -> Result<Vec<String>, Errno> {
    let mut names = vec![0; MAX_NAMES];
    let len = match flistxattr(from, &mut names[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        len => len?,
    };
    let mut has = Vec::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| is_plain(name)) {
        let mut value = vec![0; MAX_VALUE];
        let len = fgetxattr(from, name, &mut value[..])?;
        value.truncate(len);
        has.push((name.to_vec(), value));
    }
    Ok(set_attributes(to, &[], &has))
}

/// A regular file of the host by a name that is no link, if there is one and it can be read.
fn host_file(folder: &OwnedFd, name: &OsStr) -> Result<Option<(File, Stat)>, Errno> {
    // A pipe would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = openat(folder, name, flags, Mode::empty()) else { return Ok(None) };
    let stat = fstat(&file)?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok(is_file.then(|| (File::from(file), stat)))
}

/// Makes a file or link under the name [`PARTIAL`] and gives it its own name, or leaves nothing.
fn replace<T>(
    folder: &OwnedFd,
    name: &OsStr,
    make: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let _ = unlinkat(folder, PARTIAL, AtFlags::empty());
    let made = make().and_then(|made| {
        renameat(folder, PARTIAL, folder, name)?;
        Ok(made)
    });
    if made.is_err() {
        let _ = unlinkat(folder, PARTIAL, AtFlags::empty());
    }
    made
}

/// Copies the content of a guest file to an empty one of the host.
fn copy_content(tree: &Tree, node: Node, file: &mut File) -> anyhow::Result<()> {
    let size = tree.stat(node)?.size;
    let mut piece = vec![0; PIECE];
    for part in tree.stored_ranges(node)? {
        let end = part.end.min(size);
        let mut at = part.start;
        file.seek(SeekFrom::Start(at))?;
        while at < end {
            let len = (end - at).min(PIECE as u64) as usize;
            let len = tree.read(node, at, &mut piece[..len])?;
            anyhow::ensure!(len > 0, "it has become shorter");
            file.write_all(&piece[..len])?;
            at += len as u64;
        }
    }
    file.set_len(size)?;
    Ok(())
}

/// The mode of a guest file that the host takes.
fn mode_of(tree: &Tree, path: &[u8]) -> anyhow::Result<(Node, Mode)> {
    let path = Path::new(OsStr::from_bytes(path));
    let above = tree.find(path.parent().unwrap_or(Path::new("/")).as_os_str().as_bytes())?;
    let node = tree.lookup(above, path.file_name().unwrap_or_default().as_bytes())?;
    Ok((node, Mode::from_raw_mode(tree.stat(node)?.mode & 0o777)))
}

/// Opens a directory of the host by a name that is no link.
fn open_directory(folder: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(folder, name, flags, Mode::empty())
}

/// Makes one name what it is in the guest. A directory can be written by its owner until
/// [`write_back`] ends. Returns the names of attributes that are not written.
fn put(
    root: &OwnedFd,
    path: &Path,
    change: &FileChange,
    (before, after): (&Tree, &Tree),
) -> anyhow::Result<Vec<String>> {
    let (folder, name) = parent(root, path)?;
    let (node, mode) = mode_of(after, &change.path)?;
    let known = is_directory(&folder, name);
    if known.is_ok_and(|known| known != (change.kind == Kind::Directory)) {
        remove(&folder, name)?;
    }
    let mut had = attributes(before, &change.path)?;
    let has = attributes(after, &change.path)?;
    match change.kind {
        Kind::Directory => {
            match mkdirat(&folder, name, mode | Mode::RWXU) {
                Ok(()) => had.clear(),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let made = open_directory(&folder, name)?;
            fchmod(&made, mode | Mode::RWXU)?;
            Ok(set_attributes(&made, &had, &has))
        }
        Kind::Link => {
            let target = after.read_link(node)?;
            replace(&folder, name, || {
                Ok(symlinkat(OsStr::from_bytes(&target), &folder, PARTIAL)?)
            })?;
            Ok(Vec::new())
        }
        Kind::File => {
            let old = host_file(&folder, name)?;
            // Another name of the file may be outside of the directory.
            if let Some((file, stat)) = &old
                && (change.change, change.bytes, stat.st_nlink) == (Change::Changed, 0, 1)
            {
                let open = Mode::from_raw_mode(stat.st_mode & 0o777) | Mode::RUSR | Mode::WUSR;
                fchmod(file, open)?;
                let others = set_attributes(file, &had, &has);
                fchmod(file, mode)?;
                return Ok(others);
            }
            replace(&folder, name, || {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                let file = openat(&folder, PARTIAL, flags, Mode::RUSR | Mode::WUSR)?;
                let mut file = File::from(file);
                copy_content(after, node, &mut file)?;
                let mut others = Vec::new();
                match &old {
                    Some((old, _)) => {
                        others = copy_attributes(old, &file)?;
                        had.retain(|(name, _)| is_plain(name));
                    }
                    None => had.clear(),
                }
                others.extend(set_attributes(&file, &had, &has));
                fchmod(&file, mode)?;
                Ok(others)
            })
        }
        kind => anyhow::bail!("{kind:?} is no kind of file that is written to the host"),
    }
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

    /// A directory of the host with attributes, and its path.
    fn folder_with_attributes() -> Option<(tempfile::TempDir, std::path::PathBuf)> {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        let host = File::open(&top).unwrap();
        if fsetxattr(&host, "user.old", b"x", XattrFlags::empty()) == Err(Errno::NOTSUP) {
            println!("SKIPPED: the file system of {} has no attributes", top.display());
            return None;
        }
        Some((folder, top))
    }

    fn value(path: &Path, name: &str) -> Option<Vec<u8>> {
        let mut value = vec![0; 256];
        let len = fgetxattr(File::open(path).unwrap(), name, &mut value[..]).ok()?;
        value.truncate(len);
        Some(value)
    }

    #[test]
    fn an_attribute_that_the_host_refuses_or_that_gives_rights_is_reported_and_all_else_written() {
        let Some((_folder, top)) = folder_with_attributes() else { return };
        let inside = |name: &str| top.join(name).to_str().unwrap().to_owned();
        let (before, now) = (Tree::new(Budget::default()), Time::default());
        let mut after = before.clone();
        let first = after.write_path(inside("closed/first"), b"1", now).unwrap();
        after.write_path(inside("last"), b"2", now).unwrap();
        let rights = ["user.containers.override_stat", "user.overlay.opaque", "user.virtfs.uid"];
        for name in rights {
            after.set_attribute(first, name.as_bytes(), Some(b"0:0:4755"), now).unwrap();
        }
        // No name is empty in Linux.
        after.set_attribute(first, b"user.", Some(b"x"), now).unwrap();
        after.set_attribute(first, b"user.plain", Some(b"y"), now).unwrap();
        let closed = after.find(inside("closed")).unwrap();
        after.set_attribute(closed, b"user.plain", Some(b"z"), now).unwrap();
        after.set_mode(closed, 0o555, now).unwrap();
        let listed = changes(&before, &after).unwrap();
        let told = write_back(&top, &listed, (&before, &after)).unwrap_err().to_string();
        for name in rights {
            assert!(told.contains(&format!("closed/first ({name})")), "{told}");
            assert_eq!(value(&top.join("closed/first"), name), None);
        }
        assert!(told.contains("closed/first (user.: "), "{told}");
        assert_eq!(value(&top.join("closed/first"), "user.plain"), Some(b"y".to_vec()));
        assert_eq!(value(&top.join("closed"), "user.plain"), Some(b"z".to_vec()));
        assert_eq!(std::fs::metadata(top.join("closed")).unwrap().mode() & 0o7777, 0o555);
        assert_eq!(std::fs::read(top.join("last")).unwrap(), b"2");
        assert!(!top.join("closed").join(PARTIAL).exists());
        std::fs::set_permissions(
            top.join("closed"),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
    }

    #[test]
    fn a_file_with_new_attributes_alone_stays_and_a_new_one_has_those_of_the_host() {
        let Some((_folder, top)) = folder_with_attributes() else { return };
        let path = top.join("file");
        let inside = path.to_str().unwrap();
        let (mut before, now) = (Tree::new(Budget::default()), Time::default());
        let node = before.write_path(inside, b"guest", now).unwrap();
        std::fs::write(&path, b"newer").unwrap();
        let host = File::open(&path).unwrap();
        fsetxattr(&host, "user.host", b"h", XattrFlags::empty()).unwrap();
        let inode = host.metadata().unwrap().ino();
        let mut after = before.clone();
        after.set_attribute(node, b"user.guest", Some(b"g"), now).unwrap();
        after.set_mode(node, 0o440, now).unwrap();
        let listed = changes(&before, &after).unwrap();
        write_back(&top, &listed, (&before, &after)).unwrap();
        let stat = std::fs::metadata(&path).unwrap();
        assert_eq!((stat.ino(), stat.mode() & 0o7777), (inode, 0o440));
        assert_eq!(std::fs::read(&path).unwrap(), b"newer");
        let both = || (value(&path, "user.host"), value(&path, "user.guest"));
        assert_eq!(both(), (Some(b"h".to_vec()), Some(b"g".to_vec())));
        // A file with two names may be outside of the directory, too.
        std::fs::hard_link(&path, top.join("other")).unwrap();
        let before = after.clone();
        after.set_mode(node, 0o400, now).unwrap();
        let listed = changes(&before, &after).unwrap();
        write_back(&top, &listed, (&before, &after)).unwrap();
        assert_eq!(std::fs::metadata(top.join("other")).unwrap().mode() & 0o7777, 0o440);
        assert_eq!(std::fs::read(&path).unwrap(), b"guest");
        assert_eq!(both(), (Some(b"h".to_vec()), Some(b"g".to_vec())));
    }
}
