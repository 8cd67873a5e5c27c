//! The frame of a handler on x86-64, on the stack of the guest.

use crate::platform::{INFO, INFO_LEN, Process, Register, layout};
use crate::sentry::abi::{HandlerFrame, ReturnedState};
use crate::sentry::mm::user_memory::copy_in;
use crate::sentry::result::SyscallResult;
use layout::{CLEAR_FLAGS, FRAME_LEN, MASK, STACK, USER_SELECTORS};

/// Flags that a program may change: arithmetic, direction, single steps, resumption,
/// identification and alignment.
pub(super) const USER_FLAGS: u64 = 0x25_0dd5;

const DIRECTION_AND_TRAP: u64 = 0x500;

/// The processor state that every frame has (`FXSAVE`).
pub(super) const LEGACY: usize = 512;

/// The offset of the size of the extended state (`struct _fpx_sw_bytes`), and its magic number.
pub(super) const EXTENDED: usize = 464;

const MAGIC: u32 = 0x4650_5853;

/// The control word of the x87 unit, and that of SSE and its place, with which programs begin.
const FIRST_CONTROL: u16 = 0x37f;
const FIRST_MXCSR: u32 = 0x1f80;
pub(super) const MXCSR: usize = 24;
/// The processor state component with page rights.
const PKRU: u64 = 1 << 9;

/// Length of `struct xstate_header`.
pub(super) const HEADER_LEN: usize = 64;

/// The red zone below the stack pointer, which leaf functions use.
pub(in crate::sentry) const RED_ZONE: u64 = 128;

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
        let Some(vectors) = vectors(&frame, process.frame_address()) else { return Ok(false) };
        let vectors_at = top.wrapping_sub(vectors.len() as u64) & !63;
        // Aligned as after a call, with the return address on top of the stack.
        let at = (vectors_at.wrapping_sub((INFO + INFO_LEN) as u64) & !15).wrapping_sub(8);
        if !fits(at) {
            return Ok(false);
        }
        let mut bytes = frame[..INFO].to_vec();
        let mut put = |offset: usize, word: u64| {
            bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(0, self.action.restorer);
        for (index, word) in self.stack.into_iter().enumerate() {
            put(STACK + 8 * index, word);
        }
        put(Register::Vectors.offset(), vectors_at);
        put(MASK, self.mask);
        bytes.extend(self.info.all());
        if !process.write(at, &bytes)? || !process.write(vectors_at, vectors)? {
            return Ok(false);
        }
        if let Some(place) = vectors_offset(&frame, process.frame_address()) {
            clear_vectors(process, place, vectors);
        }
        let flags = process.register(Register::Flags) & !DIRECTION_AND_TRAP;
        for (register, value) in [
            (Register::Rip, self.action.handler),
            (Register::Rsp, at),
            (Register::Rdi, u64::from(self.info.signal)),
            (Register::Rsi, at + INFO as u64),
            (Register::Rdx, at + 8),
            (Register::Rax, 0),
            (Register::Flags, flags),
        ] {
            process.set_register(register, value);
        }
        Ok(true)
    }
}

/// Returns the thread to the registers of the frame on its stack. The segment selectors stay.
pub(in crate::sentry) fn leave(process: &mut Process) -> SyscallResult<ReturnedState> {
    let at = process.register(Register::Rsp).wrapping_sub(8);
    let bytes = copy_in(process, at, FRAME_LEN)?;
    let word =
        |offset: usize| u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("8 bytes"));
    let frame = process.frame_bytes();
    let ours = process.frame_address();
    let kept = vectors(&frame, ours).map(<[u8]>::len).unwrap_or_default();
    let place = vectors_offset(&frame, ours).unwrap_or_default();
    let given = word(Register::Vectors.offset());
    if kept > LEGACY {
        let mut state = match given {
            0 => vec![0; kept],
            given => copy_in(process, given, kept)?,
        };
        if given == 0 {
            state[..2].copy_from_slice(&FIRST_CONTROL.to_le_bytes());
            state[MXCSR..MXCSR + 4].copy_from_slice(&FIRST_MXCSR.to_le_bytes());
        }
        // The kernel's size stays; so do the words behind.
        process.write_frame(place, &state[..EXTENDED]);
        process.write_frame(place + LEGACY, &state[LEGACY..kept - 4]);
    }
    let first = Register::R8.offset();
    process.write_frame(first, &bytes[first..first + 8 * Register::GENERAL]);
    let flags = word(Register::Flags.offset()) & USER_FLAGS | CLEAR_FLAGS;
    process.set_register(Register::Flags, flags);
    process.set_register(Register::Selectors, USER_SELECTORS);
    Ok(ReturnedState { mask: word(MASK), stack: [word(STACK), word(STACK + 8), word(STACK + 16)] })
}

/// Has a handler begin with the vector registers of a new program: no exceptions of floating-point
/// numbers, and nothing in any register. `vectors` are the present ones, which are at `place` in
/// the frame.
fn clear_vectors(process: &mut Process, place: usize, vectors: &[u8]) {
    let mut state = [0; EXTENDED];
    state[..2].copy_from_slice(&FIRST_CONTROL.to_le_bytes());
    state[MXCSR..MXCSR + 4].copy_from_slice(&FIRST_MXCSR.to_le_bytes());
    process.write_frame(place, &state);
    if let Some(present) = vectors.get(LEGACY..LEGACY + 8) {
        // The processor clears parts that are not present. Rights of pages (PKRU) stay.
        let present = u64::from_le_bytes(present.try_into().expect("8 bytes")) & PKRU;
        process.write_frame(place + LEGACY, &present.to_le_bytes());
    }
}

/// The offset of the vector registers in a frame at `address`.
pub(super) fn vectors_offset(frame: &[u8], address: u64) -> Option<usize> {
    let at = Register::Vectors.offset();
    let place = u64::from_le_bytes(frame.get(at..at + 8)?.try_into().ok()?);
    let offset = usize::try_from(place.checked_sub(address)?).ok()?;
    (offset >= INFO + INFO_LEN && offset + LEGACY <= frame.len()).then_some(offset)
}

/// The state of the vector registers in a frame, with the extended state. The guest may have
/// written it.
pub(super) fn vectors(frame: &[u8], address: u64) -> Option<&[u8]> {
    let all = &frame[vectors_offset(frame, address)?..];
    let int = |at: usize| u32::from_le_bytes(all[at..at + 4].try_into().expect("4 bytes"));
    let extended = int(EXTENDED + 4) as usize;
    // A second part has a header, and a word behind it.
    match int(EXTENDED) == MAGIC && extended >= LEGACY + HEADER_LEN + 4 {
        true => all.get(..extended),
        false => all.get(..LEGACY),
    }
}
