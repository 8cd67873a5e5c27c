//! Copies from and to the guest's memory. Addresses come from the guest; unmapped ones are
//! `EFAULT`.

use std::ops::Range;

use rustix::io::Errno;

use crate::platform::{PlatformError, Process};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::mm::layout::{Mapping, PAGE};
use crate::sentry::name_lengths::PATH_LEN;
use crate::sentry::result::SyscallResult;

impl Kernel {
    /// Whether the current process may write `len` bytes at `start`. Memory beyond the end of a
    /// file faults even so.
    pub(crate) fn is_writable(&self, start: u64, len: usize) -> bool {
        let place = start..start.saturating_add(len as u64);
        place.is_empty() || self.layout.allows(&place, libc::PROT_WRITE as u64)
    }

    /// Whether a write of `len` bytes at `start` cannot fault: the memory is writable, not shared,
    /// not sparse, and not beyond the end of a mapped file.
    pub(crate) fn has_plain_memory(&self, start: u64, len: usize) -> bool {
        let place = start..start.saturating_add(len as u64);
        let is_plain = |part: &Range<u64>, mapping: &Mapping| {
            let in_file = mapping.origin.is_none_or(|origin| {
                let size = self.tree.stat(origin.node).map_or(0, |stat| stat.size);
                origin.offset(part.end) <= size.next_multiple_of(PAGE)
            });
            mapping.share.is_none() && !mapping.is_sparse() && in_file
        };
        let parts = || self.layout.parts(&place);
        self.is_writable(start, len)
            && parts().iter().all(|(part, mapping)| is_plain(part, mapping))
    }
}

/// Bytes of guest memory.
pub(in crate::sentry) fn copy_in(
    process: &Process,
    address: u64,
    len: usize,
) -> SyscallResult<Vec<u8>> {
    let mut bytes = vec![0; len];
    if process.read(address, &mut bytes)? { Ok(bytes) } else { Err(Errno::FAULT.into()) }
}

/// Bytes to the guest.
pub(in crate::sentry) fn copy_out(
    process: &mut Process,
    address: u64,
    bytes: &[u8],
) -> SyscallResult<()> {
    if process.write(address, bytes)? { Ok(()) } else { Err(Errno::FAULT.into()) }
}

/// A word of guest memory.
pub(in crate::sentry) fn word_in(process: &Process, address: u64) -> SyscallResult<u64> {
    let mut bytes = [0; 8];
    if process.read(address, &mut bytes)? {
        Ok(u64::from_le_bytes(bytes))
    } else {
        Err(Errno::FAULT.into())
    }
}

/// A string: bytes up to a zero. `None` if none of its first `limit` bytes is one.
pub(in crate::sentry) fn string_in(
    process: &Process,
    address: u64,
    limit: usize,
) -> SyscallResult<Option<Vec<u8>>> {
    let mut string = Vec::new();
    while string.len() < limit {
        let at = address.wrapping_add(string.len() as u64);
        // Up to the end of a page: the next page may not be mapped.
        let len = (PAGE - at % PAGE).min(256).min((limit - string.len()) as u64);
        let piece = copy_in(process, at, len as usize)?;
        if let Some(end) = piece.iter().position(|&byte| byte == 0) {
            string.extend(&piece[..end]);
            return Ok(Some(string));
        }
        string.extend(piece);
    }
    Ok(None)
}

/// A path, with at most [`PATH_LEN`] bytes.
pub(in crate::sentry) fn path_in(process: &Process, address: u64) -> SyscallResult<Vec<u8>> {
    Ok(string_in(process, address, PATH_LEN)?.ok_or(Errno::NAMETOOLONG)?)
}

/// A page of guest memory that was read last.
#[derive(Default)]
struct ReadPage {
    start: Option<u64>,
    bytes: Vec<u8>,
}

impl ReadPage {
    /// The bytes from `address` to the end of its page.
    fn rest(&mut self, process: &Process, address: u64) -> SyscallResult<&[u8]> {
        let start = address - address % PAGE;
        if self.start != Some(start) {
            (self.start, self.bytes) = (None, copy_in(process, start, PAGE as usize)?);
            self.start = Some(start);
        }
        Ok(&self.bytes[(address - start) as usize..])
    }
}

/// Reads pointers and strings of a process that stands still, with one call for those of a page.
pub(in crate::sentry) struct PageReader<'a> {
    process: &'a Process,
    words: ReadPage,
    strings: ReadPage,
}

impl<'a> PageReader<'a> {
    pub(in crate::sentry) fn new(process: &'a Process) -> Self {
        Self { process, words: ReadPage::default(), strings: ReadPage::default() }
    }

    /// A word.
    pub(in crate::sentry) fn word(&mut self, address: u64) -> SyscallResult<u64> {
        match self.words.rest(self.process, address)?.first_chunk() {
            Some(bytes) => Ok(u64::from_le_bytes(*bytes)),
            None => word_in(self.process, address),
        }
    }

    /// Bytes up to a zero, fewer than `limit`; `E2BIG` without a zero among them.
    pub(in crate::sentry) fn string(
        &mut self,
        address: u64,
        limit: usize,
    ) -> SyscallResult<Vec<u8>> {
        let mut string = Vec::new();
        while string.len() < limit {
            let at = address.wrapping_add(string.len() as u64);
            let piece = self.strings.rest(self.process, at)?;
            let Some(end) = piece.iter().position(|&byte| byte == 0) else {
                string.extend(piece);
                continue;
            };
            string.extend(&piece[..end]);
            if string.len() < limit {
                return Ok(string);
            }
        }
        Err(Errno::TOOBIG.into())
    }
}

/// The length of the part of a range that is in its first page.
fn first_page(start: u64, len: usize) -> usize {
    len.min((PAGE - start % PAGE) as usize)
}

/// Bytes up to the first page that cannot be read.
pub(crate) fn read_some(process: &Process, start: u64, len: u64) -> Result<Vec<u8>, PlatformError> {
    let mut bytes = vec![0; len as usize];
    if process.read(start, &mut bytes)? {
        return Ok(bytes);
    }
    let mut done = 0;
    while done < bytes.len() {
        let at = start.wrapping_add(done as u64);
        let part = first_page(at, bytes.len() - done);
        if !process.read(at, &mut bytes[done..done + part])? {
            break;
        }
        done += part;
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// Writes bytes up to the first page that cannot be written, and returns their number.
pub(crate) fn write_some(
    process: &mut Process,
    start: u64,
    bytes: &[u8],
) -> Result<u64, PlatformError> {
    if process.write(start, bytes)? {
        return Ok(bytes.len() as u64);
    }
    let mut done = 0;
    while done < bytes.len() {
        let at = start.wrapping_add(done as u64);
        let part = first_page(at, bytes.len() - done);
        if !process.write(at, &bytes[done..done + part])? {
            break;
        }
        done += part;
    }
    Ok(done as u64)
}
