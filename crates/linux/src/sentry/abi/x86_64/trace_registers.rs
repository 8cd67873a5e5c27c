//! The registers of a stopped thread on x86-64, as its tracer reads and writes them.
//!
//! Promises: a tracer sets no value that a signal frame of the thread itself could not set: flags
//! and vector registers are checked, and the segment selectors stay.

use rustix::io::Errno;

use super::signal_frame::{
    EXTENDED, HEADER_LEN, LEGACY, MXCSR, USER_FLAGS, vectors, vectors_offset,
};
use crate::platform::layout::{CLEAR_FLAGS, USER_SELECTORS};
use crate::platform::{GUEST, Process, Register};
use crate::sentry::abi::GivenRegisters;

/// Whether threads can be traced on this processor.
pub(in crate::sentry) const TRACES: bool = true;
/// `AUDIT_ARCH_X86_64`.
pub(in crate::sentry) const AUDIT_ARCH: u32 = 0xc000_003e;
/// Bytes of `struct user_regs_struct`, and of `struct user`.
pub(in crate::sentry) const GENERAL_LEN: usize = 27 * 8;
pub(in crate::sentry) const USER_LEN: u64 = 928;
/// The debug registers in `struct user`.
pub(in crate::sentry) const DEBUG: std::ops::Range<u64> = 848..912;
/// Addresses of the kernel begin above.
pub(in crate::sentry) const LAST_ADDRESS: u64 = 0x7fff_ffff_efff;

/// Words of `struct user_regs_struct`, by the places of registers in a frame.
const PLACES: [(usize, usize); 18] = [
    (0, 7),
    (1, 6),
    (2, 5),
    (3, 4),
    (4, 10),
    (5, 11),
    (6, 3),
    (7, 2),
    (8, 1),
    (9, 0),
    (10, 13),
    (11, 14),
    (12, 12),
    (13, 9),
    (14, 8),
    (16, 16),
    (18, 17),
    (19, 15),
];
const RESULT: usize = 10;
const ORIGINAL: usize = 15;
const CODE: usize = 17;
const FLAGS: usize = 18;
const STACK: usize = 20;
const FS_BASE: usize = 21;
const GS_BASE: usize = 22;

const TRAP_FLAG: u64 = 0x100;
/// The mask of MXCSR where the processor names none, and where that is.
const MXCSR_MASK: u32 = 0xffbf;
const MXCSR_MASK_AT: usize = 28;

fn word(bytes: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(bytes[8 * index..8 * index + 8].try_into().expect("8 bytes"))
}

/// The general registers, with the number of the call and the result that the tracer sees.
pub(in crate::sentry) fn general(
    process: &Process,
    original: i64,
    result: Option<i64>,
) -> Option<Vec<u8>> {
    let frame = process.frame_bytes();
    let first = Register::R8.offset();
    let mut words = [0u64; GENERAL_LEN / 8];
    for (index, place) in PLACES {
        words[index] = word(&frame[first..], place);
    }
    if let Some(result) = result {
        words[RESULT] = result as u64;
    }
    words[ORIGINAL] = original as u64;
    words[CODE] = USER_SELECTORS & 0xffff;
    words[STACK] = USER_SELECTORS >> 48;
    let bases = process.bases;
    (words[FS_BASE], words[GS_BASE]) = (bases.tls, bases.second);
    Some(words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// Sets the general registers, but for the result of a call.
pub(in crate::sentry) fn set_general(
    process: &mut Process,
    bytes: &[u8],
) -> Result<GivenRegisters, Errno> {
    if bytes.len() != GENERAL_LEN {
        return Err(Errno::IO);
    }
    let bases = [word(bytes, FS_BASE), word(bytes, GS_BASE)];
    let selectors = [CODE, STACK, 23, 24, 25, 26].map(|index| word(bytes, index));
    let is_kernels = |selector: u64| selector != 0 && selector & 3 != 3;
    if bases.iter().any(|base| *base >= GUEST.end) || selectors.into_iter().any(is_kernels) {
        return Err(Errno::IO);
    }
    let first = Register::R8.offset();
    for (index, place) in PLACES.into_iter().filter(|(index, _)| ![RESULT, FLAGS].contains(index)) {
        process.write_frame(first + 8 * place, &word(bytes, index).to_le_bytes());
    }
    let flags = word(bytes, FLAGS) & USER_FLAGS | CLEAR_FLAGS;
    process.set_register(Register::Flags, flags);
    (process.bases.tls, process.bases.second) = (bases[0], bases[1]);
    Ok(GivenRegisters {
        // The kernel keeps 32 bits of it.
        original: word(bytes, ORIGINAL) as i64,
        result: word(bytes, RESULT) as i64,
    })
}

/// Has the thread make one instruction, or any number of them.
pub(in crate::sentry) fn set_step(process: &mut Process, steps: bool) {
    let flags = process.register(Register::Flags) & !TRAP_FLAG;
    process.set_register(Register::Flags, if steps { flags | TRAP_FLAG } else { flags });
}

/// The vector registers: those of `FXSAVE`, or all in the format of `XSAVE`.
pub(in crate::sentry) fn vectors_of(process: &Process, extended: bool) -> Option<Vec<u8>> {
    let frame = process.frame_bytes();
    let all = vectors(&frame, process.frame_address())?;
    let mut state = match extended {
        true if all.len() > LEGACY => all[..all.len() - 4].to_vec(),
        true => return None,
        false => all[..LEGACY].to_vec(),
    };
    let features: [u8; 8] = state[EXTENDED + 8..EXTENDED + 16].try_into().ok()?;
    state[EXTENDED..LEGACY].fill(0);
    if extended {
        state[EXTENDED..EXTENDED + 8].copy_from_slice(&features);
    }
    Some(state)
}

/// Sets the vector registers.
pub(in crate::sentry) fn set_vectors(
    process: &mut Process,
    bytes: &[u8],
    extended: bool,
) -> Result<(), Errno> {
    let frame = process.frame_bytes();
    let address = process.frame_address();
    let (Some(all), Some(place)) = (vectors(&frame, address), vectors_offset(&frame, address))
    else {
        return Err(Errno::IO);
    };
    let has_header = all.len() > LEGACY;
    let expected = match extended {
        true if has_header => all.len() - 4,
        true => return Err(Errno::NODEV),
        false => LEGACY,
    };
    if bytes.len() != expected {
        return Err(Errno::FAULT);
    }
    let int = |bytes: &[u8], at: usize| {
        u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
    };
    let mask = match int(all, MXCSR_MASK_AT) {
        0 => MXCSR_MASK,
        mask => mask,
    };
    if int(bytes, MXCSR) & !mask != 0 {
        return Err(Errno::INVAL);
    }
    if extended {
        let features = word(&all[EXTENDED + 8..], 0);
        let header = &bytes[LEGACY..LEGACY + HEADER_LEN];
        if word(header, 0) & !features != 0 || header[8..].iter().any(|byte| *byte != 0) {
            return Err(Errno::INVAL);
        }
    }
    process.write_frame(place, &bytes[..MXCSR_MASK_AT]);
    process.write_frame(place + MXCSR_MASK_AT + 4, &bytes[MXCSR_MASK_AT + 4..EXTENDED]);
    if extended {
        process.write_frame(place + LEGACY, &bytes[LEGACY..]);
    } else if has_header {
        // The parts of the x87 unit and of SSE are present.
        let present = word(&all[LEGACY..], 0) | 3;
        process.write_frame(place + LEGACY, &present.to_le_bytes());
    }
    Ok(())
}
