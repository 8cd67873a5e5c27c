//! Copies from and to the guest's memory. Addresses come from the guest; unmapped ones are `EFAULT`.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::{PAGE, PATH_LEN, SyscallResult};

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

/// A path: bytes up to a zero, at most a page's worth.
pub(in crate::sentry) fn path_in(process: &Process, address: u64) -> SyscallResult<Vec<u8>> {
    let mut path = Vec::new();
    while path.len() < PATH_LEN {
        let at = address.wrapping_add(path.len() as u64);
        // Up to the end of a page: the next page may not be mapped.
        let len = (PAGE - at % PAGE).min(256).min((PATH_LEN - path.len()) as u64);
        let piece = copy_in(process, at, len as usize)?;
        if let Some(end) = piece.iter().position(|&byte| byte == 0) {
            path.extend(&piece[..end]);
            return Ok(path);
        }
        path.extend(piece);
    }
    Err(Errno::NAMETOOLONG.into())
}
