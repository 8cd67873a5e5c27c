//! The frame of a signal on x86-64 (`struct rt_sigframe`), and the registers in it.

use crate::platform::stub;

/// Offset of the context in a frame, after the return address of a handler.
const CONTEXT: usize = 8;
/// Offset of the registers in a frame.
const REGISTERS: usize = CONTEXT + 40;
/// Bytes of a frame without the vector registers and the signal information.
pub(crate) const FRAME_LEN: usize = REGISTERS + 32 * 8 + 8;
/// Offset of the signal mask that is restored.
pub(crate) const MASK: usize = REGISTERS + 32 * 8;
/// Offset of the signal information (`siginfo_t`).
pub(crate) const INFO: usize = FRAME_LEN;
/// Its length.
pub(crate) const INFO_LEN: usize = 128;
/// The last place in the control area for a frame with its `siginfo_t`.
pub(in crate::platform) const LAST_FRAME: usize = stub::CONTROL_LEN - FRAME_LEN - INFO_LEN;
/// Frames begin at multiples of this.
pub(in crate::platform) const FRAME_ALIGN: usize = 8;
/// Where the alternate stack is noted.
pub(crate) const STACK: usize = CONTEXT + 16;
/// Selectors are in the frame, and meant (`UC_SIGCONTEXT_SS`, `UC_STRICT_RESTORE_SS`).
const FLAGS: u64 = 6;
/// User code and stack, as Linux has them on x86-64.
pub(crate) const USER_SELECTORS: u64 = 0x33 | 0x2b << 48;
/// Nothing but that interrupts are on.
pub(crate) const CLEAR_FLAGS: u64 = 0x202;

/// Registers, by their place in `ucontext.h`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Register {
    R8 = 0,
    R9 = 1,
    R10 = 2,
    Rdi = 8,
    Rsi = 9,
    Rdx = 12,
    Rax = 13,
    Rcx = 14,
    Rsp = 15,
    Rip = 16,
    Flags = 17,
    Selectors = 18,
    /// Where the state of the vector registers is.
    Vectors = 23,
}

impl Register {
    /// The next instruction.
    pub(crate) const POINTER: Self = Self::Rip;
    pub(crate) const STACK: Self = Self::Rsp;
    /// The number of a system call.
    pub(crate) const NUMBER: Self = Self::Rax;
    /// The result of a system call.
    pub(crate) const RESULT: Self = Self::Rax;
    /// The arguments of a system call, in their order.
    pub(crate) const ARGUMENTS: [Self; 6] =
        [Self::Rdi, Self::Rsi, Self::Rdx, Self::R10, Self::R8, Self::R9];

    /// The number of general registers at the beginning of a frame: all but flags and selectors.
    pub(crate) const GENERAL: usize = 17;

    /// Its offset in a frame.
    pub(crate) const fn offset(self) -> usize {
        REGISTERS + 8 * self as usize
    }
}

/// The first error of the bases of a snapshot's thread, if any. `wrgsbase` takes any canonical
/// address, and the stub would fault on another. Some processors have addresses of 57 bits, all of
/// 48.
pub(in crate::platform) fn check_bases(bases: [u64; 2]) -> Result<(), &'static str> {
    let is_canonical = |base: u64| (base << 16) as i64 >> 16 == base as i64;
    if bases.into_iter().all(is_canonical) {
        Ok(())
    } else {
        Err("a thread has a segment base that is not an address of 48 bits")
    }
}

/// Offset of the first frame: anywhere in the stack, since the kernel has put none there yet.
pub(in crate::platform) const START: usize = stub::CONTROL_LEN - 2048;

/// The frame from which a program starts: all other registers, those for vectors too, are as after
/// a reset.
pub(in crate::platform) fn start(entry: u64, stack: u64) -> Vec<u8> {
    let mut bytes = vec![0; FRAME_LEN];
    let mut put = |offset: usize, word: u64| {
        bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
    };
    put(CONTEXT, FLAGS);
    // The signal stack that stays in force.
    put(CONTEXT + 16, stub::SIGNAL_STACK);
    put(CONTEXT + 32, stub::SIGNAL_STACK_LEN as u64);
    put(Register::Rip.offset(), entry);
    put(Register::Rsp.offset(), stack);
    put(Register::Flags.offset(), CLEAR_FLAGS);
    put(Register::Selectors.offset(), USER_SELECTORS);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_are_addresses_that_every_processor_loads() {
        let check = |base| [[base, 0], [0, base]].map(check_bases);
        for base in [0, stub::GUEST.end, (1 << 47) - 1, !0 << 47, u64::MAX] {
            assert_eq!(check(base), [Ok(()); 2], "{base:#x}");
        }
        for base in [1 << 47, (!0 << 47) - 1, 1 << 56, 1 << 63] {
            assert!(check(base).iter().all(Result::is_err), "{base:#x}");
        }
    }
}
