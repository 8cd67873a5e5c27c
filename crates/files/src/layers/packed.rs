//! The packed files of a zip. One is never unpacked to more than its stated length.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;

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

/// A zip whose files can be unpacked.
#[derive(Debug)]
pub(crate) struct PackedZip(pub(crate) ZipArchive<PositionedFile>);

impl PackedZip {
    /// All bytes of a file, whose number must equal `size`.
    pub(crate) fn unpack(&self, number: usize, size: u64) -> Result<Vec<u8>, String> {
        let mut archive = self.0.clone();
        let file = archive.by_index(number).map_err(|e| e.to_string())?;
        let mut bytes = Vec::new();
        // Reading one more byte checks the checksum at its end.
        file.take(size + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        if bytes.len() as u64 != size {
            return Err("a file in it has another length than stated".to_owned());
        }
        Ok(bytes)
    }
}
