//! Counting instructions, for benchmarks (`perf_event_open`).

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};

use crate::{Call, SysError, inject};

/// Counts the instructions of the thread that opened it, in user mode and in the kernel.
#[derive(Debug)]
pub struct Instructions {
    counter: File,
}

/// The first version of `struct perf_event_attr`, which every kernel accepts.
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

const HARDWARE: u32 = 0;
const COUNT_INSTRUCTIONS: u64 = 1;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
/// `PERF_FLAG_FD_CLOEXEC`.
const CLOSE_ON_EXEC: libc::c_ulong = 8;

impl Instructions {
    /// Starts counting.
    ///
    /// # Errors
    /// `EACCES` or `EPERM` where `kernel.perf_event_paranoid` or seccomp forbids it, `ENOENT` where
    /// the processor's counters are unavailable, as in many virtual machines.
    pub fn start() -> Result<Self, SysError> {
        inject::gate(Call::Perf)?;
        let attributes = Attributes {
            kind: HARDWARE,
            size: size_of::<Attributes>() as u32,
            config: COUNT_INSTRUCTIONS,
            sample_period: 0,
            sample_type: 0,
            read_format: 0,
            flags: EXCLUDE_HYPERVISOR,
            wakeup_events: 0,
            breakpoint_type: 0,
            breakpoint_address: 0,
        };
        // SAFETY: the structure has its stated size and lives through the call; 0 and -1 name this
        // thread on any processor, -1 no group.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                std::ptr::from_ref(&attributes),
                0,
                -1,
                -1,
                CLOSE_ON_EXEC,
            )
        };
        if fd < 0 {
            return Err(SysError::last(Call::Perf));
        }
        // SAFETY: the kernel just returned this descriptor, and this is its only owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
        Ok(Self { counter: File::from(fd) })
    }

    /// Instructions so far.
    ///
    /// # Errors
    /// An error of `read`, which a counter that could be opened does not return.
    pub fn count(&self) -> Result<u64, SysError> {
        let mut bytes = [0; 8];
        (&self.counter).read_exact(&mut bytes).map_err(|_| SysError::last(Call::Perf))?;
        Ok(u64::from_ne_bytes(bytes))
    }
}
