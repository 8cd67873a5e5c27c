//! The return of a thread from the code that answers calls inside the process.

use crate::platform::arch::CALL_LEN;
use crate::platform::arch::inside::{Progress, progress};
use crate::platform::frame::Register;
use crate::platform::inside::{BUFFER, CALL, DESCRIPTOR, NUMBER};
use crate::platform::process::Process;
use crate::platform::trampoline::{BEFORE, HEAD_LEN, NEAR_LEN, READ_LEN, parse, relative};
use crate::platform::{PlatformError, stub};

/// The flag of a result that is 0.
const ZERO_FLAG: u64 = 0x40;
/// Bytes of the comparison that precedes the trampoline of a `read` of glibc.
const COMPARISON_LEN: u64 = 7;

/// Where the thread is that was stopped in a trampoline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trampoline {
    /// It is about to make this call.
    Call { call: u64, number: u32 },
    /// It has done nothing of the site that starts there, but may have compared the byte at
    /// `single` with 0.
    Head { start: u64, single: u64 },
}

impl Process {
    /// Moves a thread that was stopped in the code inside, or on the way there, to its call or
    /// behind it. Returns whether it was there, and makes its call now. A thread that executes
    /// single steps makes progress.
    pub(crate) fn leave_inside(&mut self, steps: bool) -> Result<bool, PlatformError> {
        let pointer = self.register(Register::Rip);
        let word = |at| self.inside_word(at);
        let (call, number) = match progress(pointer) {
            Some(Progress::Begun) => (self.register(Register::Rcx), self.register(Register::Rax)),
            Some(Progress::Kept) => (word(CALL), word(NUMBER)),
            Some(Progress::Copies) => {
                let (call, number) = (word(CALL), word(NUMBER));
                let (descriptor, buffer) = (word(DESCRIPTOR), word(BUFFER));
                self.set_register(Register::Rdi, descriptor);
                self.set_register(Register::Rsi, buffer);
                (call, number)
            }
            Some(Progress::Answered) => {
                let behind = word(CALL).wrapping_add(CALL_LEN);
                self.set_register(Register::Rcx, behind);
                self.set_register(Register::Rip, behind);
                return Ok(false);
            }
            None => return self.leave_trampoline(pointer, steps),
        };
        self.set_register(Register::Rax, number);
        self.set_register(Register::Rip, call);
        Ok(true)
    }

    /// As [`Process::leave_inside`], from a trampoline.
    fn leave_trampoline(&mut self, pointer: u64, steps: bool) -> Result<bool, PlatformError> {
        let mut bytes = [0; NEAR_LEN];
        let start = pointer.wrapping_sub(BEFORE as u64);
        if !self.read(start, &mut bytes)? {
            return Ok(false);
        }
        let Some((found, cell)) = Trampoline::around(&bytes, pointer) else { return Ok(false) };
        let mut target = [0; 8];
        if !self.read(cell, &mut target)? || u64::from_le_bytes(target) != stub::INSIDE {
            return Ok(false);
        }
        match found {
            Trampoline::Call { call, number } => {
                self.set_register(Register::Rax, number.into());
                self.set_register(Register::Rip, call);
                Ok(true)
            }
            Trampoline::Head { start, single } => {
                let mut byte = [0];
                if steps && self.read(single, &mut byte)? {
                    // The comparison is the step. The text has the jump behind it.
                    let flags = self.register(Register::Flags) & !ZERO_FLAG;
                    let flags = if byte == [0] { flags | ZERO_FLAG } else { flags };
                    self.set_register(Register::Flags, flags);
                    self.set_register(Register::Rip, start.wrapping_add(COMPARISON_LEN));
                } else {
                    self.set_register(Register::Rip, start);
                }
                Ok(false)
            }
        }
    }
}

impl Trampoline {
    /// The trampoline with an instruction at `pointer`, and where the address of the code inside
    /// must be. `near` are [`NEAR_LEN`] bytes, and [`BEFORE`] of them come first.
    pub(crate) fn around(near: &[u8], pointer: u64) -> Option<(Self, u64)> {
        let from = |start: usize| {
            let address = pointer.wrapping_add(start as u64).wrapping_sub(BEFORE as u64);
            near.get(start..).map(|bytes| (bytes, address))
        };
        for done in [0, 5, 12] {
            let (bytes, address) = from(BEFORE - done)?;
            if let Some((call, number, cell)) = parse(bytes, address) {
                return Some((Self::Call { call, number }, cell));
            }
        }
        for done in [0, COMPARISON_LEN as usize] {
            let (bytes, address) = from(BEFORE - done)?;
            if let [0x80, 0x3d, _, _, _, _, 0, 0x0f, 0x84, ..] = *bytes
                && let Some(rest) = bytes.get(HEAD_LEN as usize..)
                && let Some((call, _, cell)) = parse(rest, address.wrapping_add(HEAD_LEN))
            {
                let single = relative(bytes, 2, address)?.wrapping_add(1);
                return Some((Self::Head { start: call.wrapping_sub(READ_LEN), single }, cell));
            }
        }
        None
    }
}
