//! Comparing a sandbox with its image.
//!
//! Promises: every difference is found, memory or register; a sandbox that did not pass cannot be
//! called. May break it: differences that only a guest's own instructions show, such as caches.

use crate::PAGE;
use crate::call::Phase;
use crate::error::CallError;
use crate::sandbox::{Sandbox, State};

/// The first thing that differs from the image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Difference {
    /// A page of memory.
    #[error("page {page} (guest address {:#x}) differs from the image", *page as u64 * PAGE)]
    Memory {
        /// Its index.
        page: usize,
    },
    /// General, special or extended registers.
    #[error("the {0} registers differ from the initial state")]
    Registers(&'static str),
}

/// Why [`Sandbox::verify`] did not confirm that the sandbox is pristine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// It is not.
    #[error(transparent)]
    Differs(#[from] Difference),
    /// The comparison failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl Sandbox {
    /// Compares all memory and all registers with the image. The registers are those at the start
    /// of a call, after the entry code cleared the extended state.
    ///
    /// # Errors
    /// The first difference, or why the comparison failed. The sandbox must then be reset; if no
    /// call or write can be the cause, it is quarantined instead.
    pub fn verify(&mut self) -> Result<(), VerifyError> {
        self.check()?;
        // If this is interrupted, by a panic for example, the sandbox must not look ready.
        self.state = State::NeedsReset;
        let outcome = self.compare();
        self.state = match &outcome {
            Ok(()) => State::Ready,
            Err(VerifyError::Differs(Difference::Memory { .. })) if !self.untouched => {
                State::NeedsReset
            }
            Err(VerifyError::Differs(_)) => State::Quarantined,
            Err(VerifyError::Call(_)) => State::NeedsReset,
        };
        outcome
    }

    fn compare(&mut self) -> Result<(), VerifyError> {
        if let Some(first) = self.memory.slot.verify().map_err(CallError::from)?.first() {
            return Err(Difference::Memory { page: first.page }.into());
        }
        let probe = self.template.system.probe();
        self.enter(probe, [0; 3])?;
        self.drive(Phase::Probe)?;
        let mut regs = self.machine.regs();
        let mut expected = self.entry_regs(probe, [0; 3]);
        // The entry code used these and stands at, or just after, its `out`.
        (expected.rax, expected.rdx, expected.r9) = (0, 0, 0);
        if regs.rip == probe + 2 {
            regs.rip = probe;
        }
        (expected.rip, expected.rflags, regs.rflags) = (probe, 0, 0);
        if regs != expected {
            return Err(Difference::Registers("general").into());
        }
        if self.machine.get_sregs().map_err(CallError::from)? != self.sregs {
            return Err(Difference::Registers("special").into());
        }
        let state = self.machine.get_xsave().map_err(CallError::from)?;
        let fresh = self.machine.fresh_xsave();
        // Everything except the header, which describes the storage of the state.
        let differs =
            |(index, (a, b)): (usize, (&u32, &u32))| !(128..144).contains(&index) && a != b;
        if state.iter().zip(fresh).enumerate().any(differs) {
            return Err(Difference::Registers("extended").into());
        }
        if let Some(which) =
            self.machine.compare_rest(&self.template.processor).map_err(CallError::from)?
        {
            return Err(Difference::Registers(which).into());
        }
        Ok(())
    }
}
