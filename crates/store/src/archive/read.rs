//! The members of an archive, found by their headers.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::ArchiveError;
use super::tar::{BLOCK, ExtendedHeader, MAX_EXTENDED, parse, parse_extended};
use crate::blobs::file::{FileBlob, open_file};
use crate::blobs::source::Blobs;
use crate::disk::os::FileExt;
use crate::format::blob::BlobRead;
use crate::{OpenError, Sha256};

/// Most members: a snapshot has at most 133, and as much padding.
const MAX_MEMBERS: usize = 4096;

/// The files in an archive and where they are.
pub(super) struct Members {
    path: PathBuf,
    file: Arc<File>,
    /// First byte and length of every file; `None` for a directory.
    members: BTreeMap<String, Option<(u64, u64)>>,
}

impl Members {
    /// Reads the headers.
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let io = |e| OpenError::io(path, e);
        let file = open_file(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        let members = BTreeMap::new();
        let mut out = Self { path: path.to_owned(), file: Arc::new(file), members };
        out.walk(len)?;
        if let Some(name) = out.overlap() {
            return Err(out.bad(ArchiveError::Overlap(name.to_owned())));
        }
        Ok(out)
    }

    pub(super) fn bad(&self, source: ArchiveError) -> OpenError {
        OpenError::Archive { path: self.path.clone(), source }
    }

    fn read_at(&self, out: &mut [u8], at: u64) -> Result<(), OpenError> {
        self.file.read_exact_at(out, at).map_err(|e| OpenError::io(&self.path, e))
    }

    /// Goes from header to header in a file of `len` bytes.
    fn walk(&mut self, len: u64) -> Result<(), OpenError> {
        let mut at = 0;
        let mut extended = ExtendedHeader::default();
        // A member may have one header more, and no file is made of headers alone.
        for _ in 0..3 * MAX_MEMBERS {
            let data = at + BLOCK;
            if data > len {
                return Err(self.bad(ArchiveError::Truncated(at)));
            }
            let mut block = [0; BLOCK as usize];
            self.read_at(&mut block, at)?;
            let Some(mut header) = parse(&block, at).map_err(|e| self.bad(e))? else {
                return Ok(());
            };
            if matches!(header.kind, b'0' | 0 | b'5') {
                let ExtendedHeader { path, size } = std::mem::take(&mut extended);
                header.name = path.unwrap_or(header.name);
                header.size = size.unwrap_or(header.size);
            }
            let size = if header.kind == b'5' { 0 } else { header.size };
            let next = data
                .checked_add(size)
                .filter(|end| *end <= len)
                .and_then(|end| end.checked_next_multiple_of(BLOCK))
                .ok_or_else(|| self.bad(ArchiveError::Truncated(at)))?;
            match header.kind {
                b'0' | 0 => self.insert(&header.name, at, Some((data, size)))?,
                b'5' => self.insert(&header.name, at, None)?,
                b'x' | b'g' => {
                    let read = self.read_extended(at, size)?;
                    if header.kind == b'x' {
                        extended = read;
                    } else if read != ExtendedHeader::default() {
                        return Err(self.bad(ArchiveError::Extended(at)));
                    }
                }
                kind => return Err(self.bad(ArchiveError::Kind { at, kind: char::from(kind) })),
            }
            at = next;
        }
        Err(self.bad(ArchiveError::TooMany(MAX_MEMBERS)))
    }

    fn read_extended(&self, at: u64, size: u64) -> Result<ExtendedHeader, OpenError> {
        let bad = || self.bad(ArchiveError::Extended(at));
        if size > MAX_EXTENDED {
            return Err(bad());
        }
        let mut bytes = vec![0; size as usize];
        self.read_at(&mut bytes, at + BLOCK)?;
        parse_extended(&bytes).ok_or_else(bad)
    }

    fn insert(&mut self, name: &[u8], at: u64, place: Option<(u64, u64)>) -> Result<(), OpenError> {
        let Some(plain) = plain_name(name, place.is_none()) else {
            let name = String::from_utf8_lossy(&name[..name.len().min(100)]).into_owned();
            return Err(self.bad(ArchiveError::Name { at, name }));
        };
        if self.members.len() >= MAX_MEMBERS {
            return Err(self.bad(ArchiveError::TooMany(MAX_MEMBERS)));
        }
        if plain.is_empty() {
            // The archive's own directory, as `tar -c .` writes it.
            return Ok(());
        }
        match self.members.insert(plain.clone(), place) {
            // Tools that pack directories may name one twice.
            None => Ok(()),
            Some(None) if place.is_none() => Ok(()),
            Some(_) => Err(self.bad(ArchiveError::Duplicate(plain))),
        }
    }

    /// A file that is a directory of others.
    fn overlap(&self) -> Option<&str> {
        let is_file = |name: &str| matches!(self.members.get(name), Some(Some(_)));
        self.members.keys().find_map(|name| {
            name.match_indices('/').map(|(at, _)| &name[..at]).find(|above| is_file(above))
        })
    }

    fn find(&self, name: &str) -> Result<(u64, u64), OpenError> {
        match self.members.get(name) {
            Some(Some(place)) => Ok(*place),
            _ => Err(self.bad(ArchiveError::Missing(name.to_owned()))),
        }
    }

    /// Reads a small member whole.
    pub(super) fn small(
        &self,
        name: &str,
        what: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, OpenError> {
        let (start, size) = self.find(name)?;
        if size > limit {
            return Err(OpenError::TooLarge { what, size, limit });
        }
        // The member is within the file, which bounds this.
        let mut bytes = vec![0; size as usize];
        self.read_at(&mut bytes, start)?;
        Ok(bytes)
    }
}

impl Blobs for Members {
    fn read(&self, what: &'static str, digest: Sha256, limit: u64) -> Result<Vec<u8>, OpenError> {
        self.small(&blob_name(digest), what, limit)
    }

    fn open(&self, digest: Sha256) -> Result<Box<dyn BlobRead>, OpenError> {
        let (start, size) = self.find(&blob_name(digest))?;
        Ok(Box::new(FileBlob::part(self.file.clone(), start, size)))
    }
}

pub(super) fn blob_name(digest: Sha256) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Maximum bytes of a name. No file of a snapshot has half as many.
const MAX_NAME: usize = 256;

/// The name without `./` in front, if it is a short relative path without detours.
fn plain_name(name: &[u8], is_dir: bool) -> Option<String> {
    if name.len() > MAX_NAME {
        return None;
    }
    let mut name = std::str::from_utf8(name).ok()?;
    while let Some(rest) = name.strip_prefix("./") {
        name = rest;
    }
    if is_dir {
        name = name.strip_suffix('/').unwrap_or(name);
        if name.is_empty() || name == "." {
            return Some(String::new());
        }
    }
    let plain =
        |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
    name.split('/').all(plain).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::plain_name;

    #[test]
    fn only_names_inside_the_archive_are_plain() {
        for good in ["index.json", "./index.json", "blobs/sha256/ab", ".padding-0"] {
            assert!(plain_name(good.as_bytes(), false).is_some(), "{good}");
        }
        for bad in ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "a/./b", "./", "..", "a\0b"]
        {
            assert_eq!(plain_name(bad.as_bytes(), false), None, "{bad}");
        }
        assert_eq!(plain_name(b"\xff", false), None);
        assert_eq!(plain_name("a/".repeat(200).as_bytes(), true), None);
        assert_eq!(plain_name(b"./", true).as_deref(), Some(""));
        assert_eq!(plain_name(b"blobs/", true).as_deref(), Some("blobs"));
    }
}
