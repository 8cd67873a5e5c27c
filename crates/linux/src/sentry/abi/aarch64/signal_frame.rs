//! The frame of a handler on arm64, on the stack of the guest.
//!
//! It has the general registers and the vector registers of 128 bits. The kernel keeps further
//! state, such as that of SVE, in the frame of the stub, and the auxiliary vector does not name
//! it: a handler loses it.

use crate::platform::{INFO, INFO_LEN, INSIDE, Process, Register, layout};
use crate::sentry::abi::{HandlerFrame, ReturnedState};
use crate::sentry::mm::user_memory::copy_in;
use crate::sentry::result::SyscallResult;
use layout::{CONTEXT, FRAME_LEN, MASK, RECORDS, RECORDS_LEN, STACK, VECTORS_LEN, VECTORS_MAGIC};

/// Bytes below the stack pointer that functions use: none.
pub(in crate::sentry) const RED_ZONE: u64 = 0;

/// Bytes of the record of the caller (`struct frame_record`) behind the frame.
const CALLER_LEN: usize = 16;

/// The flags of the processor that a program may change: conditions, and the timing of
/// instructions (DIT).
const USER_FLAGS: u64 = 0xf100_0000;

/// The action has a restorer (`SA_RESTORER`).
const RESTORER: i32 = 0x0400_0000;

impl HandlerFrame<'_> {
    /// Pushes the frame below `top`, and has the thread continue in the handler. Returns whether
    /// there is room: memory, and an address that `fits`.
    pub(in crate::sentry) fn enter(
        &self,
        process: &mut Process,
        top: u64,
        fits: impl Fn(u64) -> bool,
    ) -> SyscallResult<bool> {
        let frame = process.frame_bytes();
        let Some(own) = vectors_offset(&frame) else { return Ok(false) };
        let caller_at = (top & !15).wrapping_sub(CALLER_LEN as u64);
        let at = caller_at.wrapping_sub(FRAME_LEN as u64);
        if !fits(at) {
            return Ok(false);
        }
        let mut bytes = frame[..RECORDS].to_vec();
        bytes[INFO..INFO + INFO_LEN].copy_from_slice(&self.info.all());
        bytes.extend(&frame[own..own + VECTORS_LEN]);
        bytes.resize(FRAME_LEN, 0);
        let caller = [Register::X29, Register::X30].map(|register| process.register(register));
        bytes.extend(caller.iter().flat_map(|word| word.to_le_bytes()));
        let mut put = |offset: usize, word: u64| {
            bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        };
        for (index, word) in self.stack.into_iter().enumerate() {
            put(STACK + 8 * index, word);
        }
        put(MASK, self.mask);
        if !process.write(at, &bytes)? {
            return Ok(false);
        }
        let has_restorer = self.action.has(RESTORER);
        for (register, value) in [
            (Register::Pc, self.action.handler),
            (Register::Sp, at),
            (Register::X0, u64::from(self.info.signal)),
            (Register::X1, at + INFO as u64),
            (Register::X2, at + CONTEXT as u64),
            (Register::X29, caller_at),
            (Register::X30, if has_restorer { self.action.restorer } else { INSIDE }),
        ] {
            process.set_register(register, value);
        }
        Ok(true)
    }
}

/// Returns the thread to the registers of the frame on its stack. Flags that a program may not
/// change stay.
pub(in crate::sentry) fn leave(process: &mut Process) -> SyscallResult<ReturnedState> {
    let at = process.register(Register::Sp);
    let bytes = copy_in(process, at, FRAME_LEN)?;
    let word =
        |offset: usize| u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("8 bytes"));
    let given = vectors_offset(&bytes).ok_or(rustix::io::Errno::FAULT)?;
    // The only record: those of other state belong to the code before the return.
    let mut records = bytes[given..given + VECTORS_LEN].to_vec();
    records.extend([0; 8]);
    process.write_frame(RECORDS, &records);
    let first = Register::X0.offset();
    process.write_frame(first, &bytes[first..first + 8 * Register::GENERAL]);
    let kept = process.register(Register::Pstate) & !USER_FLAGS;
    process.set_register(Register::Pstate, word(Register::Pstate.offset()) & USER_FLAGS | kept);
    Ok(ReturnedState { mask: word(MASK), stack: [word(STACK), word(STACK + 8), word(STACK + 16)] })
}

/// The offset of the record of the vector registers in a frame, which the guest may have written.
fn vectors_offset(frame: &[u8]) -> Option<usize> {
    let end = RECORDS + RECORDS_LEN;
    let mut at = RECORDS;
    loop {
        let head = frame.get(at..(at + 8).min(end))?.as_chunks::<4>().0;
        let [magic, len] = [*head.first()?, *head.get(1)?].map(u32::from_le_bytes);
        if magic == VECTORS_MAGIC && len as usize == VECTORS_LEN {
            return (at + VECTORS_LEN <= end).then_some(at);
        }
        if magic == 0 || !(8..=RECORDS_LEN as u32).contains(&len) {
            return None;
        }
        at += len as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_of_vectors_is_found_behind_others_and_within_its_room() {
        let mut frame = vec![0; FRAME_LEN];
        assert_eq!(vectors_offset(&frame), None);
        let record = |magic: u32, len: u32| [magic.to_le_bytes(), len.to_le_bytes()].concat();
        let vectors = record(VECTORS_MAGIC, VECTORS_LEN as u32);
        frame[RECORDS..RECORDS + 8].copy_from_slice(&vectors);
        assert_eq!(vectors_offset(&frame), Some(RECORDS));
        frame[RECORDS..RECORDS + 8].copy_from_slice(&record(0x4553_5201, 16));
        frame[RECORDS + 16..RECORDS + 24].copy_from_slice(&vectors);
        assert_eq!(vectors_offset(&frame), Some(RECORDS + 16));
        for (magic, len) in [(1, 0), (1, 4), (1, u32::MAX), (1, 4090), (VECTORS_MAGIC, 16)] {
            let mut frame = frame.clone();
            frame[RECORDS..RECORDS + 8].copy_from_slice(&record(magic, len));
            let expected = (len == 16).then_some(RECORDS + 16);
            assert_eq!(vectors_offset(&frame), expected, "{magic:#x} {len}");
        }
    }
}
