//! A guest's memory as calls see it: numbers, vectors of buffers, paths. A pointer outside of it is
//! a trap.

use afresh_files::Refused;
use wasmtime::{Caller, Memory};

use super::errno;
use crate::host::Host;
use crate::host::memories::HostMemories;

/// Bytes of a path.
const PATH: usize = 4096;
/// Buffers of one call.
pub(super) const PARTS: u32 = 1024;

/// How a call fails: with a number, or permanently.
pub(super) enum Fail {
    Errno(u16),
    Trap(wasmtime::Error),
}

impl From<u16> for Fail {
    fn from(errno: u16) -> Self {
        Self::Errno(errno)
    }
}

impl From<Refused> for Fail {
    fn from(refused: Refused) -> Self {
        Self::Errno(match refused {
            Refused::Missing => errno::ENOENT,
            Refused::Exists => errno::EEXIST,
            Refused::NotDirectory => errno::ENOTDIR,
            Refused::IsDirectory => errno::EISDIR,
            Refused::NotEmpty => errno::ENOTEMPTY,
            Refused::Invalid => errno::EINVAL,
            Refused::Full => errno::ENOSPC,
            Refused::TooLarge => errno::EFBIG,
            Refused::NameTooLong => errno::ENAMETOOLONG,
            Refused::Loop => errno::ELOOP,
            Refused::NotPermitted => errno::EPERM,
            Refused::Denied => errno::EACCES,
            Refused::NotOpen => errno::EBADF,
            Refused::Busy => errno::EBUSY,
            Refused::TooManyLinks => errno::EMLINK,
            Refused::CrossDevice => errno::EXDEV,
            #[cfg(unix)]
            Refused::Host(error) => of_host(error.raw_os_error()),
            _ => errno::EIO,
        })
    }
}

/// The number for a host error that no variant of [`Refused`] has.
#[cfg(unix)]
fn of_host(error: i32) -> u16 {
    use std::io::ErrorKind;
    match std::io::Error::from_raw_os_error(error).kind() {
        ErrorKind::WouldBlock => errno::EAGAIN,
        ErrorKind::QuotaExceeded => errno::EDQUOT,
        ErrorKind::OutOfMemory => errno::ENOMEM,
        ErrorKind::ReadOnlyFilesystem => errno::EROFS,
        ErrorKind::ExecutableFileBusy => errno::ETXTBSY,
        ErrorKind::Unsupported => errno::ENOTSUP,
        _ => match error {
            // ENFILE and EMFILE, for which there is no kind.
            23 => errno::ENFILE,
            24 => errno::EMFILE,
            _ => errno::EIO,
        },
    }
}

/// The result of a call for the guest.
pub(super) fn answer(result: Result<(), Fail>) -> wasmtime::Result<i32> {
    match result {
        Ok(()) => Ok(0),
        Err(Fail::Errno(errno)) => Ok(i32::from(errno)),
        Err(Fail::Trap(error)) => Err(error),
    }
}

/// The memory that pointers of a call point into.
pub(super) fn of(caller: &mut Caller<'_, Host>) -> wasmtime::Result<Memory> {
    caller
        .get_export("memory")
        .and_then(wasmtime::Extern::into_memory)
        .ok_or_else(|| wasmtime::Error::msg("the guest exports no memory that is its own"))
}

/// The bytes of that memory. Calls wait for the pages that they read.
pub(super) struct Bytes<'a> {
    bytes: &'a mut [u8],
    memories: HostMemories,
}

impl<'a> Bytes<'a> {
    pub(super) fn new(bytes: &'a mut [u8], host: &Host) -> Self {
        Self { bytes, memories: host.memories() }
    }

    /// Bytes to read.
    pub(super) fn read(&self, at: i32, len: u32) -> Result<&[u8], Fail> {
        let bytes = self.slice(at, len)?;
        self.memories.fetch(bytes).map_err(Fail::Trap)?;
        Ok(bytes)
    }

    /// Bytes that are only measured, or that were read before.
    pub(super) fn slice(&self, at: i32, len: u32) -> Result<&[u8], Fail> {
        let at = at as u32 as usize;
        let slice = at.checked_add(len as usize).and_then(|end| self.bytes.get(at..end));
        slice.ok_or_else(|| outside(at))
    }

    pub(super) fn slice_mut(&mut self, at: i32, len: u32) -> Result<&mut [u8], Fail> {
        let at = at as u32 as usize;
        let slice = at.checked_add(len as usize).and_then(|end| self.bytes.get_mut(at..end));
        slice.ok_or_else(|| outside(at))
    }

    pub(super) fn u32(&self, at: i32) -> Result<u32, Fail> {
        let bytes = self.read(at, 4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    pub(super) fn write_bytes(&mut self, at: i32, bytes: &[u8]) -> Result<(), Fail> {
        self.slice_mut(at, bytes.len() as u32)?.copy_from_slice(bytes);
        Ok(())
    }

    pub(super) fn put_u32(&mut self, at: i32, value: u32) -> Result<(), Fail> {
        self.write_bytes(at, &value.to_le_bytes())
    }

    pub(super) fn put_u64(&mut self, at: i32, value: u64) -> Result<(), Fail> {
        self.write_bytes(at, &value.to_le_bytes())
    }

    /// The addresses and lengths of buffers; all of them are within the memory.
    pub(super) fn parts(&self, at: i32, count: i32) -> Result<Vec<(i32, u32)>, Fail> {
        let count = count as u32;
        if count > PARTS {
            return Err(errno::EINVAL.into());
        }
        let mut parts = Vec::with_capacity(count as usize);
        for index in 0..count {
            let entry = at.wrapping_add((index * 8) as i32);
            let (start, len) = (self.u32(entry)? as i32, self.u32(entry.wrapping_add(4))?);
            self.read(start, len)?;
            parts.push((start, len));
        }
        Ok(parts)
    }

    /// Waits for the buffers of a call that others make, who judge addresses and counts.
    pub(super) fn fetch_parts(&self, at: i32, count: i32) -> wasmtime::Result<()> {
        for index in 0..count as u32 {
            let entry = at.wrapping_add(index.wrapping_mul(8) as i32);
            let Ok(part) = self.slice(entry, 8) else { break };
            self.memories.fetch(part)?;
            let word =
                |at| u32::from_le_bytes([part[at], part[at + 1], part[at + 2], part[at + 3]]);
            if let Ok(bytes) = self.slice(word(0) as i32, word(4)) {
                self.memories.fetch(bytes)?;
            }
        }
        Ok(())
    }

    /// A path or a target, which is text.
    pub(super) fn text(&self, at: i32, len: i32) -> Result<Vec<u8>, Fail> {
        if len as u32 as usize > PATH {
            self.slice(at, len as u32)?;
            return Err(errno::ENAMETOOLONG.into());
        }
        let bytes = self.read(at, len as u32)?;
        if std::str::from_utf8(bytes).is_err() {
            return Err(errno::EILSEQ.into());
        }
        Ok(bytes.to_vec())
    }
}

fn outside(at: usize) -> Fail {
    Fail::Trap(wasmtime::Error::msg(format!(
        "a pointer of a WASI call ({at:#x}) is outside the guest's memory"
    )))
}
