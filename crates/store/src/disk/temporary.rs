//! Files that are written under a name of chance, and get their own when they are whole and
//! durable.
//!
//! Promises: no two writers ever have one name, also where process ids repeat, as in containers
//! that share a directory. A writer that is dropped leaves nothing, one that is killed at most a
//! file that begins with [`TEMPORARY`].
//!
//! Memory is full of secrets, so what is written is for its owner alone, whatever the umask. In a
//! store others may read what the owner lets them: files have the rights of the directory that they
//! are in.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::path::Path;

use afresh_sys::crash::{point, synced};
use tempfile::{Builder, NamedTempFile};

use crate::SaveError;
use crate::disk::os::{DirBuilderExt, mode, set_mode};

/// The prefix of temporary names; no digest begins so.
pub(crate) const TEMPORARY: &str = ".tmp-";
/// Characters of chance in a name.
const CHANCE: usize = 20;

/// A new file in `dir`, with a name that begins with `before` and [`TEMPORARY`].
pub(crate) fn create(dir: &Path, before: &std::ffi::OsStr) -> io::Result<NamedTempFile> {
    let mut prefix = before.to_owned();
    prefix.push(TEMPORARY);
    create_named(dir, &prefix)
}

/// A new file in `dir`, with a name that begins with `prefix`.
pub(crate) fn create_named(dir: &Path, prefix: &std::ffi::OsStr) -> io::Result<NamedTempFile> {
    point();
    let mut builder = Builder::new();
    builder.prefix(prefix).rand_bytes(CHANCE);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600));
    builder.tempfile_in(dir)
}

/// As [`create`], with nothing before.
pub(crate) fn create_in(dir: &Path) -> io::Result<NamedTempFile> {
    create(dir, "".as_ref())
}

/// The mode bits for readers of a file in `dir`: its owner, and those whom the directory lets in.
/// Others never write.
pub(crate) fn readers(dir: &Path) -> u32 {
    // A directory that does not say is for its owner.
    fs::metadata(dir).map_or(0, |meta| mode(&meta) & 0o044) | 0o400
}

/// Makes a directory that only its owner may enter, unless it is there already.
pub(crate) fn new_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Makes the names in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    sync_open_dir(open_dir(dir)?)
}

/// Opens a directory to make its names durable.
fn open_dir(dir: &Path) -> io::Result<Option<File>> {
    // Windows opens no directory as a file, and writes names to its log by itself.
    if cfg!(unix) { File::open(dir).map(Some) } else { Ok(None) }
}

/// Makes the names in an open directory durable.
fn sync_open_dir(dir: Option<File>) -> io::Result<()> {
    point();
    if let Some(dir) = dir {
        dir.sync_all()?;
        synced(&dir);
    }
    Ok(())
}

/// The directory of `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A temporary file in `dir` with these bytes, durable except for its name. Readers of `readable`
/// may read it.
pub(crate) fn write_synced(dir: &Path, bytes: &[u8], readable: &Path) -> io::Result<NamedTempFile> {
    let mut file = create_in(dir)?;
    point();
    file.write_all(bytes)?;
    set_mode(file.as_file(), 0o200 | readers(readable))?;
    point();
    file.as_file().sync_all()?;
    synced(file.as_file());
    Ok(file)
}

/// Replaces the file at `path`, which those read who may read `dir`.
pub(crate) fn replace_file(path: &Path, dir: &Path, bytes: &[u8]) -> Result<(), SaveError> {
    (|| {
        let file = write_synced(parent(path), bytes, dir)?;
        // After the rename it could fail for lack of descriptors.
        let names = open_dir(parent(path))?;
        point();
        file.persist(path).map_err(|e| e.error)?;
        sync_open_dir(names)
    })()
    .map_err(|e| SaveError::io(path, e))
}

/// The error of creating a file at `path`, where nothing may be.
pub(crate) fn new_file_error(path: &Path, error: io::Error) -> SaveError {
    let error = match error.kind() {
        io::ErrorKind::AlreadyExists => {
            io::Error::new(error.kind(), "it exists already: choose another name, or remove it")
        }
        _ => error,
    };
    SaveError::io(path, error)
}

/// Makes a file for its owner alone, which is whole and durable when it appears at `path`, where
/// nothing may be.
pub(crate) fn new_file(
    path: &Path,
    write: impl FnOnce(&File) -> Result<(), SaveError>,
) -> Result<(), SaveError> {
    let io = |e: io::Error| new_file_error(path, e);
    if fs::symlink_metadata(path).is_ok() {
        return Err(io(io::ErrorKind::AlreadyExists.into()));
    }
    let dir = parent(path);
    let file = create_in(dir).map_err(io)?;
    point();
    write(file.as_file())?;
    point();
    file.as_file().sync_all().map_err(io)?;
    synced(file.as_file());
    point();
    file.persist_noclobber(path).map_err(|e| io(e.error))?;
    sync_dir(dir).map_err(io)
}
