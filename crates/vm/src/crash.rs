//! Why a guest crashed.
//!
//! A guest has no interrupt table, so that any fault stops the vCPU with its registers as they
//! were. The reason follows from them: a page fault has replaced the sentinel that every call
//! starts with in CR2; for any other fault the instruction decides.

use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::memory::GuestMemory;

/// CR2 at the start of every call: no page fault can leave this, for it is not canonical.
pub(crate) const NO_FAULT: u64 = 0x0bad_0000_0000_0000;

/// A guest crash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("guest crashed: {reason} at RIP {}, CR2 {}", hex(*rip), hex(*cr2))]
#[non_exhaustive]
pub struct Crash {
    /// Address of the instruction that faulted; `None` where the processor lost it (AMD SVM resets
    /// the vCPU at a shutdown).
    pub rip: Option<u64>,
    /// The address of the page fault, if it was one.
    pub cr2: Option<u64>,
    /// The cause, as far as the registers and the instruction show it.
    pub reason: CrashReason,
}

/// Why a guest crashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CrashReason {
    /// An access near address 0.
    #[error("null pointer access")]
    NullPointer,
    /// An access just below the stack.
    #[error("stack overflow")]
    StackOverflow,
    /// A write to memory that the guest can only read.
    #[error("write to read-only memory")]
    ReadOnly,
    /// Execution of memory that holds no code.
    #[error("execution of data")]
    Execute,
    /// An access to an address that is not mapped.
    #[error("access to unmapped memory")]
    Unmapped,
    /// `ud2` or another invalid opcode.
    #[error("invalid opcode (abort)")]
    InvalidOpcode,
    /// A division by zero or with an overflowing quotient.
    #[error("division error")]
    Division,
    /// A breakpoint or software interrupt.
    #[error("software interrupt or breakpoint")]
    Interrupt,
    /// A privileged instruction, a forbidden port or a non-canonical address.
    #[error("general protection fault")]
    Protection,
}

fn hex(value: Option<u64>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| format!("{value:#x}"))
}

/// Finds the cause of a shutdown from the registers.
pub(crate) fn classify(
    regs: &kvm_regs,
    sregs: &kvm_sregs,
    code_selector: u16,
    memory: &GuestMemory,
    stack_floor: u64,
) -> Crash {
    // A vCPU that was reset by the processor no longer has the guest's code segment.
    if sregs.cs.selector != code_selector {
        return Crash { rip: None, cr2: None, reason: CrashReason::Protection };
    }
    let rip = Some(regs.rip);
    if sregs.cr2 != NO_FAULT {
        let address = sregs.cr2;
        let readable = memory.map().check(address, 1, false).is_ok();
        let reason = if address < 0x10000 {
            CrashReason::NullPointer
        } else if address == regs.rip {
            CrashReason::Execute
        } else if address < stack_floor && address >= stack_floor - crate::PAGE {
            CrashReason::StackOverflow
        } else if readable {
            CrashReason::ReadOnly
        } else {
            CrashReason::Unmapped
        };
        return Crash { rip, cr2: Some(address), reason };
    }
    let (mut code, mut before) = ([0; 4], [0]);
    let reason = match memory.read(regs.rip, &mut code) {
        Ok(()) => by_instruction(code),
        Err(_) => CrashReason::Protection,
    };
    // A breakpoint may leave RIP behind it.
    let _ = memory.read(regs.rip.wrapping_sub(1), &mut before);
    let reason = match reason {
        CrashReason::Protection if before == [0xcc] => CrashReason::Interrupt,
        other => other,
    };
    Crash { rip, cr2: None, reason }
}

fn by_instruction(code: [u8; 4]) -> CrashReason {
    // Skip operand-size and REX prefixes.
    let start = code.iter().position(|byte| *byte != 0x66 && byte & 0xf0 != 0x40).unwrap_or(0);
    let byte = |offset: usize| code.get(start + offset).copied().unwrap_or(0);
    match (byte(0), byte(1)) {
        (0x0f, 0x0b | 0xb9 | 0xff | 0x05) => CrashReason::InvalidOpcode,
        (0xf6 | 0xf7, modrm) if modrm & 0x30 == 0x30 => CrashReason::Division,
        (0xcc | 0xcd | 0xf1, _) => CrashReason::Interrupt,
        _ => CrashReason::Protection,
    }
}
