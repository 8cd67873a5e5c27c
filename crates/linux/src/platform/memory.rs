//! Reads and writes the memory of guest processes.

use std::collections::VecDeque;

use rustix::process::Pid;

use super::PlatformError;

/// Ranges that the kernel is given at a time (`IOV_MAX`).
const RANGES: usize = 1024;

/// Copies from ranges of the process (start, length), one after the other; `false` when a part of
/// them cannot be read.
pub(crate) fn read(
    pid: Pid,
    ranges: &[(u64, usize)],
    mut out: &mut [u8],
) -> Result<bool, PlatformError> {
    let mut left: VecDeque<_> = ranges.iter().map(|&(start, len)| remote(start, len)).collect();
    while !out.is_empty() {
        let count = left.len().min(RANGES);
        let given = &left.make_contiguous()[..count];
        let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
        // SAFETY: the local vector is one live, exclusively borrowed slice, at least of the
        // requested size; the kernel checks the remote ones.
        let n = unsafe {
            let (pid, count) = (pid.as_raw_nonzero().get(), count as libc::c_ulong);
            libc::process_vm_readv(pid, &local, 1, given.as_ptr(), count, 0)
        };
        let mut moved = moved(n, "process_vm_readv")?;
        if moved == 0 {
            return Ok(false);
        }
        out = &mut out[moved..];
        while let Some(first) = left.front_mut() {
            if moved < first.iov_len {
                *first = remote(first.iov_base.addr() as u64 + moved as u64, first.iov_len - moved);
                break;
            }
            moved -= first.iov_len;
            left.pop_front();
        }
    }
    Ok(true)
}

/// Copies `bytes` to `address` of the process; `false` when a part of the range cannot be written.
pub(crate) fn write(pid: Pid, address: u64, bytes: &[u8]) -> Result<bool, PlatformError> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        let local = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
        let remote = remote(address.wrapping_add(done as u64), rest.len());
        // SAFETY: the kernel only reads the local vector, which is one live slice; it checks the
        // remote one.
        let n = unsafe {
            libc::process_vm_writev(pid.as_raw_nonzero().get(), &local, 1, &remote, 1, 0)
        };
        match moved(n, "process_vm_writev")? {
            0 => return Ok(false),
            n => done += n,
        }
    }
    Ok(true)
}

fn remote(address: u64, len: usize) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::without_provenance_mut(address as usize), iov_len: len }
}

/// Bytes moved; none means that the guest's address was bad.
fn moved(n: isize, what: &'static str) -> Result<usize, PlatformError> {
    if let Ok(n) = usize::try_from(n) {
        return Ok(n);
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EFAULT) => Ok(0),
        Some(libc::EPERM | libc::ENOSYS) => Err(PlatformError::missing(
            what,
            error,
            "let this process reach its children's memory: the seccomp profile and Yama's ptrace_scope must allow it",
        )),
        _ => Err(PlatformError::Kernel { what, error }),
    }
}
