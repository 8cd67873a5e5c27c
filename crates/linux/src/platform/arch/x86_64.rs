//! x86-64.

pub(crate) mod calls;
pub(crate) mod frame;
pub(in crate::platform) mod inside;
mod leave_inside;
pub(in crate::platform) mod stub;
pub(in crate::platform) mod vdso;

use std::io;

use crate::platform::PlatformError;

/// The machine of ELF files (`EM_X86_64`).
pub(in crate::platform) const ELF_MACHINE: u16 = 62;
/// `AUDIT_ARCH_X86_64`.
pub(in crate::platform) const AUDIT_ARCH: u32 = 0xc000_003e;
/// Bytes of the instruction that calls.
pub(in crate::platform) const CALL_LEN: u64 = 2;
/// Values of which the kernel takes the low 32 bits for the result of an interrupted call when a
/// signal comes: none, since the result has a separate register.
pub(in crate::platform) const RESTARTS: std::ops::Range<i32> = 0..0;
/// One past the last address of user memory with four levels of page tables.
pub(in crate::platform) const TOP: u64 = 0x7fff_ffff_f000;
/// Whether [`inside`] has code that answers calls.
pub(crate) const ANSWERS_INSIDE: bool = true;

/// Requires the processor to have what the stub needs: it loads bases by instruction.
pub(in crate::platform) fn require() -> Result<(), PlatformError> {
    let (_, capabilities) = rustix::param::linux_hwcap();
    if capabilities & 2 == 0 {
        return Err(PlatformError::missing(
            "FSGSBASE",
            io::Error::from_raw_os_error(libc::ENOTSUP),
            "a processor of 2012 or later and Linux 5.9 or newer are needed",
        ));
    }
    Ok(())
}

/// Calls of the zygote, number and arguments, that set up the processor for guests.
pub(in crate::platform) fn zygote_calls() -> Vec<[u64; 7]> {
    Vec::new()
}

/// Processor features in the auxiliary vector: `AT_HWCAP`. Programs query those of x86-64 by
/// instruction.
pub(crate) fn features() -> Option<u64> {
    None
}
