//! Answers to calls inside the process, and the return of a thread from the code that gives them.

use super::Process;
use crate::platform::frame::Register;
use crate::platform::inside::{
    ANSWERS_AT, ANSWERS_LEN, DESCRIPTOR_LEN, DESCRIPTORS, NUMBERS_LEN, Numbers, Progress, STAT_LEN,
    progress,
};
use crate::platform::trampoline::{BEFORE, NEAR_LEN, Trampoline};
use crate::platform::{PlatformError, stub};

/// Answers about an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescriptorAnswers {
    pub(crate) number: u32,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) stat: [u8; STAT_LEN],
}

impl DescriptorAnswers {
    fn encode(&self) -> [u8; DESCRIPTOR_LEN] {
        let mut bytes = [0; DESCRIPTOR_LEN];
        for (at, word) in [u64::from(self.number) + 1, self.offset, self.size].iter().enumerate() {
            bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[24..24 + STAT_LEN].copy_from_slice(&self.stat);
        bytes
    }
}

impl Process {
    /// Sets the answers of the descriptor at `place`.
    pub(crate) fn answer_descriptor(&mut self, place: usize, answers: Option<&DescriptorAnswers>) {
        let bytes = answers.map_or([0; DESCRIPTOR_LEN], DescriptorAnswers::encode);
        let at = ANSWERS_AT + NUMBERS_LEN + place * DESCRIPTOR_LEN;
        self.control.write(at, &bytes);
    }

    /// Sets the numbers. The first one shows whether calls are answered.
    pub(crate) fn answer_numbers(&mut self, numbers: &Numbers) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.control.write(ANSWERS_AT, &bytes);
    }

    /// Has every call reach the sentry.
    pub(crate) fn close_answers(&mut self) {
        self.control.write_word(ANSWERS_AT, 0);
    }

    /// Removes all answers.
    pub(crate) fn forget_answers(&mut self) {
        self.control.write(ANSWERS_AT, &[0; ANSWERS_LEN]);
    }

    /// Takes the offsets that calls have set since the last time, by the places of descriptors. A
    /// guest could have set any of them.
    pub(crate) fn take_offsets(&mut self) -> [Option<u64>; DESCRIPTORS] {
        let mut bytes = [0; 8 * DESCRIPTORS];
        self.control.read(stub::INSIDE_WORDS, &mut bytes);
        if bytes == [0; 8 * DESCRIPTORS] {
            return [None; DESCRIPTORS];
        }
        self.control.write(stub::INSIDE_WORDS, &[0; 8 * DESCRIPTORS]);
        let mut offsets = [None; DESCRIPTORS];
        for (offset, word) in offsets.iter_mut().zip(bytes.chunks_exact(8)) {
            let word = word.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
            *offset = word.checked_sub(1).filter(|offset| *offset <= i64::MAX as u64);
        }
        offsets
    }

    /// Moves a thread that was stopped in the code inside, or on the way there, to its call or
    /// behind it. Returns whether it was there, and makes its call now.
    pub(crate) fn leave_inside(&mut self) -> Result<bool, PlatformError> {
        let pointer = self.register(Register::Rip);
        let word = |at| self.control.read_word(stub::INSIDE_WORDS + 8 * (DESCRIPTORS + at));
        let (call, number) = match progress(pointer) {
            Some(Progress::Begun) => (self.register(Register::Rcx), self.register(Register::Rax)),
            Some(Progress::Kept) => (word(0), word(1)),
            Some(Progress::Answered) => {
                let behind = word(0).wrapping_add(super::CALL_LEN);
                self.set_register(Register::Rcx, behind);
                self.set_register(Register::Rip, behind);
                return Ok(false);
            }
            None => return self.leave_trampoline(pointer),
        };
        self.set_register(Register::Rax, number);
        self.set_register(Register::Rip, call);
        Ok(true)
    }

    /// As [`Process::leave_inside`], from a trampoline.
    fn leave_trampoline(&mut self, pointer: u64) -> Result<bool, PlatformError> {
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
            Trampoline::Head { start } => {
                self.set_register(Register::Rip, start);
                Ok(false)
            }
        }
    }
}
