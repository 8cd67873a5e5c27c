//! Files of the host by paths below a directory, without following a link.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, open, openat, openat2, statat,
    unlinkat,
};
use rustix::io::Errno;

/// Opens a directory that paths begin in.
pub(super) fn open_root(top: &Path) -> Result<OwnedFd, Errno> {
    open(top, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a directory below the root; the root itself for an empty path.
pub(super) fn open_below(root: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(root, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), how)
}

/// The directory that a path is in, and the last name.
pub(super) fn parent<'p>(root: &OwnedFd, path: &'p Path) -> Result<(OwnedFd, &'p OsStr), Errno> {
    let name = path.file_name().ok_or(Errno::INVAL)?;
    let folder = open_below(root, path.parent().unwrap_or(Path::new("")))?;
    Ok((folder, name))
}

pub(super) fn is_directory(folder: &OwnedFd, name: &OsStr) -> Result<bool, Errno> {
    let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Removes a file or an empty directory.
pub(super) fn remove(folder: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    let flags = if is_directory(folder, name)? { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    unlinkat(folder, name, flags)
}

/// Opens a directory by a name that is no link.
pub(super) fn open_directory(folder: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(folder, name, flags, Mode::empty())
}

/// Opens a regular file by a name that is no link, if there is one and it can be read.
pub(super) fn open_file(folder: &OwnedFd, name: &OsStr) -> Result<Option<(File, Stat)>, Errno> {
    // A pipe would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = openat(folder, name, flags, Mode::empty()) else { return Ok(None) };
    let stat = fstat(&file)?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok(is_file.then(|| (File::from(file), stat)))
}
