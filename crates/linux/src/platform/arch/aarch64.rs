//! arm64.

pub(crate) mod calls;
pub(crate) mod frame;
pub(in crate::platform) mod inside;
pub(in crate::platform) mod stub;
pub(in crate::platform) mod vdso;

use std::io;

use crate::platform::PlatformError;

/// The machine of ELF files (`EM_AARCH64`).
pub(in crate::platform) const ELF_MACHINE: u16 = 183;
/// `AUDIT_ARCH_AARCH64`.
pub(in crate::platform) const AUDIT_ARCH: u32 = 0xc000_00b7;
/// Bytes of the instruction that calls.
pub(in crate::platform) const CALL_LEN: u64 = 4;
/// Values of which the kernel takes the low 32 bits for the result of an interrupted call when a
/// signal comes: `ERESTART_RESTARTBLOCK` to `ERESTARTSYS`. Arguments and results share a register,
/// so that the filter raises no SIGSYS for a call with such a first argument: the handler would
/// find another argument, or the call before the next instruction.
pub(in crate::platform) const RESTARTS: std::ops::Range<i32> = -516..-511;
/// One past the last address of user memory of 48 bits. The kernel maps nothing above without a
/// hint.
pub(in crate::platform) const TOP: u64 = 1 << 48;
/// Whether [`inside`] has code that answers calls.
pub(crate) const ANSWERS_INSIDE: bool = false;

/// The largest `AT_MINSIGSTKSZ` of a processor whose state fits into each frame: the frame, its
/// record and 16 bytes.
const MAX_FRAME_STACK: usize = frame::FRAME_LEN + 32;
/// Keys of pointer authentication, by instructions and data (`HWCAP_PACA`).
const PACA: u64 = 1 << 30;
const PR_PAC_SET_ENABLED_KEYS: u64 = 60;
/// All keys but the generic one, which has no switch.
const KEYS: u64 = 15;
/// Features that programs see. A snapshot lists them, and the registers of a frame are their only
/// state. So not SVE, pointer authentication, and the registers that name the
/// processor (`HWCAP_CPUID`).
const FEATURES: u64 = {
    let (fp, asimd, aes, pmull, sha1, sha2) = (1, 1 << 1, 1 << 3, 1 << 4, 1 << 5, 1 << 6);
    let (crc32, atomics, fphp, asimdhp, rdm) = (1 << 7, 1 << 8, 1 << 9, 1 << 10, 1 << 12);
    let (lrcpc, sha3, dot_product, sha512) = (1 << 15, 1 << 17, 1 << 20, 1 << 21);
    let (fhm, unaligned_atomics) = (1 << 23, 1 << 25);
    let crypto = aes | pmull | sha1 | sha2 | crc32 | sha3 | sha512;
    fp | asimd
        | atomics
        | fphp
        | asimdhp
        | rdm
        | lrcpc
        | dot_product
        | fhm
        | unaligned_atomics
        | crypto
};

/// Processors with a register that a frame need not hold: a reset from a frame without its record
/// would keep its value. `FPMR` is the mode of numbers of 8 bits, and `POR_EL0` has permissions of
/// memory.
const UNHELD: [(u64, &str); 2] = [
    (1 << 48, "a processor without FPMR is needed"),
    (1 << 63, "a processor without POE is needed"),
];

/// The reason against a processor with these features (`AT_HWCAP2`), if any.
fn reason_against(features: u64) -> Option<&'static str> {
    UNHELD.iter().find_map(|(feature, reason)| (features & feature != 0).then_some(*reason))
}

/// Requires frames that hold all registers of a program, and of one size: those of matrix registers
/// (SME), and of vectors of more than 64 bytes, are larger while a thread uses them.
pub(in crate::platform) fn require() -> Result<(), PlatformError> {
    if let Some(reason) = reason_against(rustix::param::linux_hwcap().1 as u64) {
        return Err(PlatformError::missing(
            "signal frames that hold all registers",
            io::Error::from_raw_os_error(libc::ENOTSUP),
            reason,
        ));
    }
    if rustix::param::linux_minsigstksz() > MAX_FRAME_STACK {
        return Err(PlatformError::missing(
            "signal frames of one size",
            io::Error::from_raw_os_error(libc::E2BIG),
            "a processor without SME, with SVE vectors of at most 64 bytes, is needed",
        ));
    }
    Ok(())
}

/// Calls of the zygote, number and arguments, that set up the processor for guests. Signed
/// addresses in the memory of a guest would be wrong in a process with other keys.
pub(in crate::platform) fn zygote_calls() -> Vec<[u64; 7]> {
    if rustix::param::linux_hwcap().0 as u64 & PACA == 0 {
        return Vec::new();
    }
    vec![[libc::SYS_prctl as u64, PR_PAC_SET_ENABLED_KEYS, KEYS, 0, 0, 0, 0]]
}

/// Processor features in the auxiliary vector: `AT_HWCAP`.
pub(crate) fn features() -> Option<u64> {
    Some(rustix::param::linux_hwcap().0 as u64 & FEATURES)
}

impl crate::platform::process::Process {
    /// No code inside answers calls on arm64, so no thread is there.
    pub(crate) fn leave_inside(&mut self, _steps: bool) -> Result<bool, PlatformError> {
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_with_registers_that_a_frame_need_not_hold_is_refused() {
        assert_eq!(reason_against(0), None);
        assert_eq!(reason_against(!(1 << 48 | 1 << 63)), None);
        assert!(reason_against(1 << 48).is_some_and(|reason| reason.contains("FPMR")));
        assert!(reason_against(1 << 63).is_some_and(|reason| reason.contains("POE")));
    }
}
