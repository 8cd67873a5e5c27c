//! What all archives have in common: a list of what is where, and bytes that are read when they are asked for.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use crate::error::{LayerError, Refused};
use crate::layer::{Item, LayerLimits, What};
use crate::node::Time;
use crate::zip::Packed;

/// Where an archive's file has its bytes.
#[derive(Debug)]
pub(crate) enum Stored {
    /// As they are, from an offset of the archive on, and how many.
    Plain(u64, u64),
    /// By number in a zip, how many, and unpacked once they were asked for.
    Packed(usize, u64, OnceLock<Arc<Vec<u8>>>),
}

/// An archive: a zip, a tar, one layer of an image.
#[derive(Debug)]
pub(crate) struct Archive {
    /// What errors call it.
    pub(crate) name: String,
    pub(crate) items: Vec<Item>,
    pub(crate) files: Vec<Stored>,
    pub(crate) data: File,
    pub(crate) packed: Option<Packed>,
    /// What its owner says that it is.
    pub(crate) known_as: Option<String>,
    digest: OnceLock<[u8; 32]>,
}

impl Archive {
    pub(crate) fn new(
        name: String,
        items: Vec<Item>,
        files: Vec<Stored>,
        data: File,
        packed: Option<Packed>,
    ) -> Self {
        Self { name, items, files, data, packed, known_as: None, digest: OnceLock::new() }
    }

    /// A single file, as it is, under a name.
    pub(crate) fn file(path: &Path, name: &[u8]) -> Result<Self, LayerError> {
        let said = path.display().to_string();
        let failed = |source| LayerError::Read { path: said.clone(), source };
        let data = File::open(path).map_err(failed)?;
        let about = data.metadata().map_err(failed)?;
        if !about.is_file() {
            return Err(LayerError::Bad { path: said, why: "it is no file".to_owned() });
        }
        let time = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let time = time.map_or_else(Time::default, |since| {
            Time::from_nanos(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
        });
        let len = about.len();
        let item = Item { path: name.to_vec(), what: What::File(0, len), mode: 0o444, time };
        Ok(Self::new(said, vec![item], vec![Stored::Plain(0, len)], data, None))
    }

    /// How long a file is.
    pub(crate) fn len(&self, file: u32) -> Option<u64> {
        self.files.get(file as usize).map(|file| match file {
            Stored::Plain(_, len) | Stored::Packed(_, len, _) => *len,
        })
    }

    /// Reads; the archive is as long as it was when it was opened, or the read fails.
    pub(crate) fn read(&self, file: u32, at: u64, out: &mut [u8]) -> Result<(), Refused> {
        let failed = |why: String| Refused::Layer(format!("{}: {why}", self.name));
        let copy = |bytes: &[u8], out: &mut [u8]| {
            let part = usize::try_from(at).ok().and_then(|at| bytes.get(at..at + out.len()));
            out.copy_from_slice(part.ok_or_else(|| failed("it is shorter than it says".into()))?);
            Ok(())
        };
        match self.files.get(file as usize).ok_or(Refused::Missing)? {
            Stored::Plain(from, _) => {
                self.data.read_exact_at(out, from + at).map_err(|e| failed(e.to_string()))
            }
            Stored::Packed(number, size, unpacked) => {
                if unpacked.get().is_none() {
                    let packed = self.packed.as_ref().ok_or(Refused::Missing)?;
                    let bytes = packed.unpack(*number, *size).map_err(failed)?;
                    // Two that unpack it at the same time have the same bytes.
                    let _ = unpacked.set(Arc::new(bytes));
                }
                copy(unpacked.get().ok_or(Refused::Missing)?, out)
            }
        }
    }

    /// What tells this archive from others.
    pub(crate) fn digest(&self) -> Result<[u8; 32], std::io::Error> {
        if let Some(digest) = self.digest.get() {
            return Ok(*digest);
        }
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 16];
        let mut at = 0;
        loop {
            match self.data.read_at(&mut buffer, at) {
                Ok(0) => break,
                Ok(len) => {
                    hash.update(&buffer[..len]);
                    at += len as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(*self.digest.get_or_init(|| hash.finalize().into()))
    }
}

/// Counts what an archive claims.
pub(crate) struct Counter<'a> {
    name: &'a str,
    limits: LayerLimits,
    bytes: u64,
    files: u64,
}

impl<'a> Counter<'a> {
    pub(crate) fn new(name: &'a str, limits: &LayerLimits) -> Self {
        Self { name, limits: *limits, bytes: 0, files: 0 }
    }

    /// One more file, of so many bytes.
    pub(crate) fn add(&mut self, bytes: u64) -> Result<(), LayerError> {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        let over = |what, most| LayerError::Limit { path: self.name.to_owned(), what, most };
        if self.files > self.limits.files {
            return Err(over("files", self.limits.files));
        }
        if self.bytes > self.limits.bytes {
            return Err(over("bytes", self.limits.bytes));
        }
        Ok(())
    }
}
