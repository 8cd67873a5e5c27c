//! What every call needs: the guest's memory, bytes in and out. An address is the guest's word; what is not there is `EFAULT`.

use rustix::io::Errno;

use super::{PAGE, PATH_LEN, Served};
use crate::platform::Process;

/// So many bytes of the guest's.
pub(super) fn copy_in(process: &Process, address: u64, len: usize) -> Served<Vec<u8>> {
    let mut bytes = vec![0; len];
    if process.read(address, &mut bytes)? { Ok(bytes) } else { Err(Errno::FAULT.into()) }
}

/// Bytes to the guest.
pub(super) fn copy_out(process: &mut Process, address: u64, bytes: &[u8]) -> Served<()> {
    if process.write(address, bytes)? { Ok(()) } else { Err(Errno::FAULT.into()) }
}

/// A word of the guest's.
pub(super) fn word_in(process: &Process, address: u64) -> Served<u64> {
    let mut bytes = [0; 8];
    if process.read(address, &mut bytes)? {
        Ok(u64::from_le_bytes(bytes))
    } else {
        Err(Errno::FAULT.into())
    }
}

/// A path: bytes up to a zero, at most a page's worth.
pub(super) fn path_in(process: &Process, address: u64) -> Served<Vec<u8>> {
    let mut path = Vec::new();
    while path.len() < PATH_LEN {
        let at = address.wrapping_add(path.len() as u64);
        // Up to the end of a page: what lies behind it may not be there.
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
