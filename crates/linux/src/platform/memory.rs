//! Reads and writes the memory of guest processes.

use std::collections::VecDeque;
use std::ops::Range;

use rustix::process::Pid;

use super::PlatformError;
use super::process::Process;

/// Ranges that the kernel is given at a time (`IOV_MAX`).
const RANGES: usize = 1024;

/// Copies from ranges of the process (start, length), one after the other; `false` when a part of
/// them cannot be read.
fn read(pid: Pid, ranges: &[(u64, usize)], mut out: &mut [u8]) -> Result<bool, PlatformError> {
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
fn write(pid: Pid, address: u64, bytes: &[u8]) -> Result<bool, PlatformError> {
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

impl Process {
    pub(crate) fn read(&self, address: u64, out: &mut [u8]) -> Result<bool, PlatformError> {
        self.read_ranges(&[(address, out.len())], out)
    }

    /// Reads ranges (start, length), one after the other, into `out`, which has their total length.
    pub(crate) fn read_ranges(
        &self,
        ranges: &[(u64, usize)],
        out: &mut [u8],
    ) -> Result<bool, PlatformError> {
        ranges.iter().try_for_each(|&(start, len)| self.bring(start, len as u64))?;
        let read = read(self.born.pid, ranges, out).map_err(|error| self.ended_or(error));
        if let (Ok(false), &[(start, len)]) = (&read, ranges) {
            self.refused.set(Some((start, start.saturating_add(len as u64))));
        }
        read
    }

    /// The memory that could not be read or written last. It is returned once.
    pub(crate) fn take_refused(&self) -> Option<Range<u64>> {
        self.refused.take().map(|(start, end)| start..end)
    }

    /// Writes guest memory; the pages count as written.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<bool, PlatformError> {
        let range = address..address.saturating_add(bytes.len() as u64);
        self.bring(address, bytes.len() as u64)?;
        if let Some(track) = &mut self.track {
            track.touch(range.clone())?;
        }
        let written = write(self.born.pid, address, bytes);
        let written = written.map_err(|error| self.ended_or(error));
        self.refused.set(matches!(written, Ok(false)).then_some((range.start, range.end)));
        written
    }
}
