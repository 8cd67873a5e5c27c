//! The packed files of a zip. One is never unpacked to more than its stated length, and never into
//! memory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};

use ::zip::ZipArchive;

use crate::read_at::FileExt;

/// A file shared by several readers, each with its own position.
#[derive(Clone, Debug)]
pub(crate) struct PositionedFile {
    pub(crate) file: Arc<File>,
    pub(crate) at: u64,
}

impl Read for PositionedFile {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = self.file.read_at(out, self.at)?;
        self.at += len as u64;
        Ok(len)
    }
}

impl Seek for PositionedFile {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.file.metadata()?.len().checked_add_signed(by),
        };
        self.at = at.ok_or(std::io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// A zip whose files can be unpacked, into a temporary file that all of them share.
#[derive(Debug)]
pub(crate) struct PackedZip {
    zip: ZipArchive<PositionedFile>,
    unpacked: Mutex<Option<UnpackedFiles>>,
}

/// Unpacked files, one behind the other.
#[derive(Clone, Debug)]
struct UnpackedFiles {
    file: Arc<File>,
    len: u64,
}

impl PackedZip {
    pub(crate) fn new(zip: ZipArchive<PositionedFile>) -> Self {
        Self { zip, unpacked: Mutex::new(None) }
    }

    /// Unpacks a file, whose number of bytes must equal `size`. Returns its place in the temporary
    /// file.
    pub(crate) fn unpack(&self, number: usize, size: u64) -> Result<u64, String> {
        let failed = |error: std::io::Error| error.to_string();
        let mut unpacked = self.unpacked.lock().unwrap_or_else(PoisonError::into_inner);
        let files = match &mut *unpacked {
            Some(files) => files,
            none => {
                let file = Arc::new(tempfile::tempfile().map_err(failed)?);
                none.insert(UnpackedFiles { file, len: 0 })
            }
        };
        let mut out = &*files.file;
        out.seek(SeekFrom::Start(files.len)).map_err(failed)?;
        let mut zip = self.zip.clone();
        let entry = zip.by_index(number).map_err(|error| error.to_string())?;
        // Reading one more byte checks the checksum at its end.
        let len = std::io::copy(&mut entry.take(size + 1), &mut out).map_err(failed)?;
        check_len(len, size)?;
        let place = files.len;
        files.len += len;
        Ok(place)
    }

    /// Reads from a place in the temporary file.
    pub(crate) fn read(&self, place: u64, out: &mut [u8]) -> Result<(), String> {
        let unpacked = self.unpacked.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let files = unpacked.ok_or("it was not unpacked")?;
        files.file.read_exact_at(out, place).map_err(|error| error.to_string())
    }
}

/// All bytes of a small file of a zip, whose number must equal `size`.
pub(crate) fn unpack_small(
    zip: &mut ZipArchive<PositionedFile>,
    number: usize,
    size: u64,
) -> Result<Vec<u8>, String> {
    let entry = zip.by_index(number).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    entry.take(size + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    check_len(bytes.len() as u64, size)?;
    Ok(bytes)
}

fn check_len(len: u64, size: u64) -> Result<(), String> {
    match len == size {
        true => Ok(()),
        false => Err("a file in it has another length than stated".to_owned()),
    }
}
