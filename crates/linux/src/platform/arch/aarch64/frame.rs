//! The frame of a signal on arm64 (`struct rt_sigframe`), and the registers in it.

use crate::platform::stub;

/// Offset of the signal information (`siginfo_t`).
pub(crate) const INFO: usize = 0;
/// Its length.
pub(crate) const INFO_LEN: usize = 128;
/// Offset of the context, `struct ucontext`.
pub(crate) const CONTEXT: usize = INFO_LEN;
/// Where the alternate stack is noted.
pub(crate) const STACK: usize = CONTEXT + 16;
/// Offset of the signal mask that is restored.
pub(crate) const MASK: usize = CONTEXT + 40;
/// Offset of the registers, behind the address of a fault.
const REGISTERS: usize = CONTEXT + 176 + 8;
/// Offset of the records with the vector registers and others.
pub(crate) const RECORDS: usize = CONTEXT + 176 + 288;
/// Their maximum length.
pub(crate) const RECORDS_LEN: usize = 4096;
/// Bytes of a frame.
pub(crate) const FRAME_LEN: usize = RECORDS + RECORDS_LEN;
/// The last place in the control area for a frame.
pub(in crate::platform) const LAST_FRAME: usize = stub::CONTROL_LEN - FRAME_LEN;
/// Frames begin at multiples of this.
pub(in crate::platform) const FRAME_ALIGN: usize = 16;
/// The record of the vector registers: `FPSIMD_MAGIC`, and its length.
pub(crate) const VECTORS_MAGIC: u32 = 0x4650_8001;
pub(crate) const VECTORS_LEN: usize = 528;

/// Registers, by their place in `struct sigcontext`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Register {
    X0 = 0,
    X1 = 1,
    X2 = 2,
    X3 = 3,
    X4 = 4,
    X5 = 5,
    X8 = 8,
    X29 = 29,
    X30 = 30,
    Sp = 31,
    Pc = 32,
    Pstate = 33,
}

impl Register {
    /// The next instruction.
    pub(crate) const POINTER: Self = Self::Pc;
    pub(crate) const STACK: Self = Self::Sp;
    /// The number of a system call.
    pub(crate) const NUMBER: Self = Self::X8;
    /// The result of a system call.
    pub(crate) const RESULT: Self = Self::X0;
    /// The arguments of a system call, in their order.
    pub(crate) const ARGUMENTS: [Self; 6] =
        [Self::X0, Self::X1, Self::X2, Self::X3, Self::X4, Self::X5];

    /// The number of registers from [`Register::X0`] on: all but the state of the processor.
    pub(crate) const GENERAL: usize = 33;

    /// Its offset in a frame.
    pub(crate) const fn offset(self) -> usize {
        REGISTERS + 8 * self as usize
    }
}

/// The first error of the bases of a snapshot's thread, if any. `TPIDR_EL0` takes any value, and
/// nothing loads the second.
pub(in crate::platform) fn check_bases([_, second]: [u64; 2]) -> Result<(), &'static str> {
    if second == 0 { Ok(()) } else { Err("a thread has a second base, which arm64 lacks") }
}

/// Offset of the first frame: anywhere in the stack, since the kernel has put none there yet.
pub(in crate::platform) const START: usize = LAST_FRAME - 512;

/// The frame from which a program starts: all other registers, those for vectors too, are as after
/// a reset.
pub(in crate::platform) fn start(entry: u64, stack: u64) -> Vec<u8> {
    let mut bytes = vec![0; FRAME_LEN];
    let mut put = |offset: usize, word: u64| {
        bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
    };
    // The signal stack that stays in force.
    put(STACK, stub::SIGNAL_STACK);
    put(STACK + 16, stub::SIGNAL_STACK_LEN as u64);
    put(Register::Pc.offset(), entry);
    put(Register::Sp.offset(), stack);
    put(RECORDS, u64::from(VECTORS_MAGIC) | (VECTORS_LEN as u64) << 32);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_c_library() {
        let context = CONTEXT + std::mem::offset_of!(libc::ucontext_t, uc_mcontext);
        assert_eq!(context + std::mem::offset_of!(libc::mcontext_t, regs), REGISTERS);
        assert_eq!(context + std::mem::offset_of!(libc::mcontext_t, pc), Register::Pc.offset());
        assert_eq!(CONTEXT + std::mem::offset_of!(libc::ucontext_t, uc_stack), STACK);
        assert_eq!(CONTEXT + std::mem::offset_of!(libc::ucontext_t, uc_sigmask), MASK);
        assert_eq!(RECORDS % 16, 0);
    }
}
