//! The frame in which a signal keeps the guest's registers, on the stub's stack.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::arch::frame::check_bases;
pub(crate) use super::arch::frame::*;
use super::stub;

/// The registers that a frame does not hold: the bases of FS and GS on x86-64, `TPIDR_EL0` and 0 on
/// arm64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ThreadBases {
    /// Where the thread-local storage is.
    pub(crate) tls: u64,
    pub(crate) second: u64,
}

impl ThreadBases {
    /// As the stub takes and reports them.
    pub(super) fn words(self) -> [u64; 2] {
        [self.tls, self.second]
    }

    /// The first error of bases from a snapshot, if any.
    fn check(&self) -> Result<(), &'static str> {
        check_bases(self.words())
    }
}

/// All registers of a guest that waits in the stub: its signal stack, and the bases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Registers {
    pub(super) stack: Vec<u8>,
    /// Offset of the frame in the control area.
    pub(super) frame: usize,
    pub(super) bases: ThreadBases,
}

impl Registers {
    /// The first error of registers from a snapshot, if any. Their values do not matter.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let inside = (stub::ORDERS_LEN..=LAST_FRAME).contains(&self.frame);
        let whole = self.stack.len() == stub::SIGNAL_STACK_LEN;
        if whole && inside && self.frame.is_multiple_of(FRAME_ALIGN) {
            self.bases.check()
        } else {
            Err("its registers are not where they must be")
        }
    }
}

/// The registers of a thread that does not run: its frame, and the bases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Context {
    /// From the frame to the end of the signal stack.
    #[serde(with = "crate::packed_bytes")]
    pub(super) bytes: Arc<[u8]>,
    pub(super) bases: ThreadBases,
}

impl Context {
    /// The first error of a context from a snapshot with `registers`, if any.
    pub(crate) fn check(&self, registers: &Registers) -> Result<(), &'static str> {
        if self.bytes.len() == stub::CONTROL_LEN - registers.frame {
            self.bases.check()
        } else {
            Err("a thread's registers are not where they must be")
        }
    }

    /// The number and the arguments of the call that the thread waits in.
    pub(crate) fn call(&self) -> Option<(i64, [u64; 6])> {
        let word = |register: Register| {
            let bytes = self.bytes.get(register.offset()..register.offset() + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let mut args = [0; 6];
        for (arg, register) in args.iter_mut().zip(Register::ARGUMENTS) {
            *arg = word(register)?;
        }
        Some((i64::from(word(Register::NUMBER)? as u32), args))
    }

    /// The same for a new thread: with its stack and base, and a call that returns 0.
    pub(crate) fn child(&self, stack: Option<u64>, base: Option<u64>) -> Self {
        let mut bytes = self.bytes.to_vec();
        let mut put = |register: Register, word: u64| {
            bytes[register.offset()..register.offset() + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(Register::RESULT, 0);
        if let Some(stack) = stack {
            put(Register::STACK, stack);
        }
        let tls = base.unwrap_or(self.bases.tls);
        Self { bytes: bytes.into(), bases: ThreadBases { tls, ..self.bases } }
    }
}
