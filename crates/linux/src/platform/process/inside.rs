//! Answers to calls inside the process, and the return of a thread from the code that gives them.

use super::Process;
use crate::platform::frame::Register;
use crate::platform::inside::{
    ANSWERS_AT, ANSWERS_LEN, BUFFER, CALL, DESCRIPTOR, DESCRIPTOR_LEN, DESCRIPTORS, EFFECTS_LEN,
    NUMBER, NUMBERS_LEN, Numbers, Progress, STAT_LEN, WINDOW, progress,
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
    /// Bytes of the file in the window: all of them, or none.
    pub(crate) window: u64,
}

/// Changes that calls inside have made. A guest could have made calls with any of these effects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InsideEffects {
    /// New offsets, by the places of descriptors.
    pub(crate) offsets: [Option<u64>; DESCRIPTORS],
    /// Places of descriptors that are closed.
    pub(crate) closed: [bool; DESCRIPTORS],
}

impl DescriptorAnswers {
    fn encode(&self) -> [u8; DESCRIPTOR_LEN] {
        let mut bytes = [0; DESCRIPTOR_LEN];
        for (at, word) in [u64::from(self.number) + 1, self.offset, self.size].iter().enumerate() {
            bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[24..24 + STAT_LEN].copy_from_slice(&self.stat);
        bytes[WINDOW..WINDOW + 8].copy_from_slice(&self.window.to_le_bytes());
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

    /// Has the window show these bytes of a file.
    pub(crate) fn show_contents(&mut self, bytes: &[u8]) {
        self.control.show(bytes);
    }

    /// Removes all answers.
    pub(crate) fn forget_answers(&mut self) {
        self.control.write(ANSWERS_AT, &[0; ANSWERS_LEN]);
        self.control.show(&[]);
    }

    /// Takes what calls have changed since the last time.
    pub(crate) fn take_effects(&mut self) -> InsideEffects {
        let mut bytes = [0; EFFECTS_LEN];
        self.control.read(stub::INSIDE_WORDS, &mut bytes);
        let mut effects = InsideEffects::default();
        if bytes == [0; EFFECTS_LEN] {
            return effects;
        }
        self.control.write(stub::INSIDE_WORDS, &[0; EFFECTS_LEN]);
        let words: [u64; EFFECTS_LEN / 8] =
            std::array::from_fn(|at| u64::from_le_bytes(bytes.as_chunks().0[at]));
        for place in 0..DESCRIPTORS {
            let offset = words[place].checked_sub(1);
            effects.offsets[place] = offset.filter(|offset| *offset <= i64::MAX as u64);
            effects.closed[place] = words[DESCRIPTORS] >> place & 1 != 0;
        }
        effects
    }

    /// Moves a thread that was stopped in the code inside, or on the way there, to its call or
    /// behind it. Returns whether it was there, and makes its call now.
    pub(crate) fn leave_inside(&mut self) -> Result<bool, PlatformError> {
        let pointer = self.register(Register::Rip);
        let word = |at| self.control.read_word(stub::INSIDE_WORDS + at);
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
                let behind = word(CALL).wrapping_add(super::CALL_LEN);
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
