//! Losses of power, for tests of durability: a record of the files and directories that were
//! synced, and the directory as it would be without everything else.
//!
//! Promises: the files that [`survivors`] restores were synced before the process ended. It assumes
//! the worst: no file keeps bytes and no directory keeps names that were not synced. May break it:
//! a second thread that writes while another one syncs.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static RECORD: OnceLock<PathBuf> = OnceLock::new();

/// Records in the directory `record` each sync of this process from now on. If the directory is
/// new, everything in `root` counts as synced; otherwise the record of earlier processes continues.
/// Both directories are of one file system.
///
/// # Errors
/// Those of the file system.
pub fn record(root: &Path, record: &Path) -> io::Result<()> {
    let created = fs::create_dir(record);
    let record = RECORD.get_or_init(|| record.to_owned());
    match created {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        created => created?,
    }
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => directories.push(entry.path()),
                false => note(record, &File::open(entry.path())?)?,
            }
        }
        note(record, &File::open(&directory)?)?;
    }
    Ok(())
}

/// Notes that `file`, a file or a directory, was synced.
pub(crate) fn synced(file: &File) {
    if let Some(record) = RECORD.get() {
        note(record, file).expect("the record of syncs cannot be written");
    }
}

fn note(record: &Path, file: &File) -> io::Result<()> {
    let meta = file.metadata()?;
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let mut text = String::new();
    if meta.is_dir() {
        for entry in fs::read_dir(&path)? {
            let entry = entry?;
            let kind = if entry.file_type()?.is_dir() { 'd' } else { 'f' };
            let name = entry.file_name().into_string().map_err(|_| io::ErrorKind::InvalidData)?;
            text += &format!("{kind} {} {name}\n", entry.metadata()?.ino());
        }
    } else {
        // A second name keeps the bytes and the number of the file.
        match fs::hard_link(&path, record.join(meta.ino().to_string())) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => text = meta.len().to_string(),
        }
    }
    fs::write(record.join(format!("{}.synced", meta.ino())), text)
}

/// Whether all bytes of `file` were synced, by the record of a process.
///
/// # Errors
/// Those of the file system.
pub fn is_synced(file: &Path, record: &Path) -> io::Result<bool> {
    let meta = fs::metadata(file)?;
    match fs::read_to_string(record.join(format!("{}.synced", meta.ino()))) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        len => Ok(len?.parse() == Ok(meta.len())),
    }
}

/// Writes the remains of `root` after a loss of power to the new directory `to`, by the record of a
/// process.
///
/// # Errors
/// Those of the file system.
pub fn survivors(root: &Path, record: &Path, to: &Path) -> io::Result<()> {
    restore(record, fs::metadata(root)?.ino(), to)
}

fn restore(record: &Path, number: u64, to: &Path) -> io::Result<()> {
    let synced = |number: u64| fs::read_to_string(record.join(format!("{number}.synced")));
    fs::create_dir(to)?;
    for line in synced(number).unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ' ');
        let (Some(kind), Some(number), Some(name)) = (fields.next(), fields.next(), fields.next())
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let number: u64 = number.parse().map_err(io::Error::other)?;
        let path = to.join(name);
        if kind == "d" {
            restore(record, number, &path)?;
            continue;
        }
        let len: usize = synced(number).ok().and_then(|len| len.parse().ok()).unwrap_or(0);
        let bytes = fs::read(record.join(number.to_string())).unwrap_or_default();
        fs::write(path, &bytes[..len.min(bytes.len())])?;
    }
    Ok(())
}
