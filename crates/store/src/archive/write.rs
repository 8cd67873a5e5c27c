//! Writes an archive, member by member, in one pass.
//!
//! The temporary file is locked while it is written, so that the next writer of the same path can
//! distinguish files of killed writers from unfinished ones.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use afresh_sys::crash::{point, synced};
use tempfile::TempPath;

use super::read::{Members, blob_name};
use super::tar::{BLOCK, header};
use super::{index_of, only_snapshot};
use crate::blobs::file::BlobWriter;
use crate::blobs::source::read_manifest;
use crate::disk::os::{FileExt, has_name, set_mode};
use crate::disk::temporary::{self, TEMPORARY, parent, sync_dir};
use crate::format::index::Encoding;
use crate::format::manifest::{INDEX_FILE, LAYOUT_FILE, LAYOUT_TEXT};
use crate::layers::blob_sink::{BlobSink, copy_blob};
use crate::{Layer, OpenError, SaveError, Sha256};

/// Alignment of raw layers, that of pages.
const PAGE_ALIGN: u64 = 4096;
/// Alignment of large raw layers, that of huge pages. The padding is a hole in the file.
const HUGE_ALIGN: u64 = 2 << 20;
/// Minimum pages of a layer that is aligned to huge pages (16 MiB).
const MIN_HUGE_ALIGNED: u64 = 4096;

/// An archive that is being written.
pub(super) struct ArchiveWriter {
    path: PathBuf,
    temporary: TempPath,
    file: File,
    /// Where the next header goes.
    at: u64,
    blobs: HashSet<Sha256>,
    paddings: usize,
}

/// The directory of `path`, and what the temporary names of its writers begin with.
fn beside(path: &Path) -> Result<(&Path, OsString), SaveError> {
    let name = path.file_name().ok_or_else(|| {
        SaveError::io(path, io::Error::new(io::ErrorKind::InvalidInput, "not the name of a file"))
    })?;
    let mut prefix = OsString::from(".");
    prefix.push(name);
    Ok((parent(path), prefix))
}

/// Removes the unlocked temporary files that killed writers of the same path left.
fn sweep(dir: &Path, prefix: &OsString) -> io::Result<()> {
    let mut wanted = prefix.clone();
    wanted.push(TEMPORARY);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.as_encoded_bytes().starts_with(wanted.as_encoded_bytes()) {
            continue;
        }
        // Another writer may sweep, or finish, at the same time.
        let Ok(file) = crate::blobs::file::open_file(&entry.path()) else { continue };
        match file.try_lock() {
            Ok(()) => drop(fs::remove_file(entry.path())),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(())
}

/// Creates a temporary file and locks it.
fn create(dir: &Path, prefix: &OsString) -> io::Result<(TempPath, File)> {
    loop {
        let (file, path) = temporary::create(dir, prefix)?.into_parts();
        file.lock()?;
        // Swept between creation and lock?
        if has_name(&file)? {
            return Ok((path, file));
        }
    }
}

/// Whether the archive at `path` may be replaced; `false` if nothing is there.
///
/// # Errors
/// [`SaveError::Link`], [`SaveError::UnreadableTarget`] for other files, and
/// [`SaveError::ForeignFile`] for everything else.
pub(super) fn is_replaceable(path: &Path) -> Result<bool, SaveError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(SaveError::io(path, error)),
        Ok(meta) if meta.is_symlink() => return Err(SaveError::Link(path.to_owned())),
        // A pipe would wait for its writer.
        Ok(meta) if !meta.is_file() => return Err(SaveError::ForeignFile(path.to_owned())),
        Ok(_) => {}
    }
    let found = Members::open(path)
        .and_then(|members| read_manifest(&members, only_snapshot(&members)?).map(drop));
    match found {
        Ok(()) => Ok(true),
        // Another writer has moved it by now.
        Err(error) if error.is_missing_file() => Ok(false),
        Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            Err(SaveError::io(path, source))
        }
        Err(error) => {
            let source = Box::new(error);
            Err(SaveError::UnreadableTarget { path: path.to_owned(), source })
        }
    }
}

/// Gives a file its name, in place of an archive only. A file that appears in that time stays.
fn persist(mut file: TempPath, path: &Path) -> Result<(), SaveError> {
    let io = |error| SaveError::io(path, error);
    loop {
        if is_replaceable(path)? {
            return file.persist(path).map_err(|e| io(e.error));
        }
        match file.persist_noclobber(path) {
            Ok(()) => return Ok(()),
            // Perhaps another writer of the same archive.
            Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => file = e.path,
            Err(e) => return Err(io(e.error)),
        }
    }
}

impl ArchiveWriter {
    pub(super) fn create(path: &Path) -> Result<Self, SaveError> {
        let (dir, prefix) = beside(path)?;
        is_replaceable(path)?;
        // A file that cannot be removed only takes space.
        let _ = sweep(dir, &prefix);
        let (temporary, file) = create(dir, &prefix).map_err(|e| SaveError::io(path, e))?;
        let (blobs, path) = (HashSet::new(), path.to_owned());
        let mut archive = Self { path, temporary, file, at: 0, blobs, paddings: 0 };
        archive.member(LAYOUT_FILE, LAYOUT_TEXT.as_bytes())?;
        Ok(archive)
    }

    fn io(&self, error: io::Error) -> SaveError {
        SaveError::io(&self.temporary, error)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> Result<(), SaveError> {
        point();
        self.file.write_all_at(bytes, at).map_err(|e| self.io(e))
    }

    fn member(&mut self, name: &str, bytes: &[u8]) -> Result<(), SaveError> {
        self.write_at(&header(name, bytes.len() as u64), self.at)?;
        self.write_at(bytes, self.at + BLOCK)?;
        self.at = (self.at + BLOCK + bytes.len() as u64).next_multiple_of(BLOCK);
        Ok(())
    }

    /// Writes a padding member, whose content is a hole, so that the next member's content is at a
    /// multiple of `align`.
    fn align(&mut self, align: u64) -> Result<(), SaveError> {
        if !(self.at + BLOCK).is_multiple_of(align) {
            let behind = self.at + 2 * BLOCK;
            let hole = behind.next_multiple_of(align) - behind;
            let name = format!(".padding-{}", self.paddings);
            self.write_at(&header(&name, hole), self.at)?;
            self.paddings += 1;
            self.at += BLOCK + hole;
        }
        Ok(())
    }

    /// Writes `index.json` and the end, makes all of it durable, and gives it its name.
    pub(super) fn finish(
        mut self,
        id: Sha256,
        manifest_len: u64,
        name: Option<&str>,
    ) -> Result<(), SaveError> {
        self.member(INDEX_FILE, &index_of(id, manifest_len, name)?)?;
        let Self { path, temporary, file, at, .. } = self;
        let io = |error| SaveError::io(&path, error);
        (|| {
            point();
            // Two blocks of zeros end an archive.
            file.set_len(at + 2 * BLOCK)?;
            set_mode(&file, 0o400)?;
            point();
            file.sync_all()
        })()
        .map_err(io)?;
        synced(&file);
        point();
        persist(temporary, &path)?;
        sync_dir(parent(&path)).map_err(io)
    }
}

impl BlobSink for ArchiveWriter {
    fn begin(&mut self, pages: Option<(Encoding, u64)>) -> Result<BlobWriter, SaveError> {
        if let Some((Encoding::Raw, pages)) = pages {
            self.align(if pages >= MIN_HUGE_ALIGNED { HUGE_ALIGN } else { PAGE_ALIGN })?;
        }
        let mut file = self.file.try_clone().map_err(|e| self.io(e))?;
        file.seek(SeekFrom::Start(self.at + BLOCK)).map_err(|e| self.io(e))?;
        Ok(BlobWriter::part(file, &self.temporary))
    }

    fn end(&mut self, mut blob: BlobWriter) -> Result<(Sha256, u64), SaveError> {
        let (digest, len) = blob.close()?;
        if self.blobs.insert(digest) {
            self.write_at(&header(&blob_name(digest), len), self.at)?;
            self.at = (self.at + BLOCK + len).next_multiple_of(BLOCK);
        } else {
            // It is there already.
            point();
            self.file.set_len(self.at).map_err(|e| self.io(e))?;
        }
        Ok((digest, len))
    }

    fn keep(&mut self, layer: &Layer) -> Result<(), SaveError> {
        if self.blobs.contains(&layer.digest()) { Ok(()) } else { copy_blob(self, layer) }
    }
}
