//! Bringing a sandbox back to its image.
//!
//! Promises: operations of the last call are over before memory is reset; if that is not certain,
//! the vCPU is replaced, with its machine; a reset that failed leaves a sandbox that refuses
//! everything.

use afresh_memory::ResetReport;

use crate::error::CallError;
use crate::generation::next_generation;
use crate::sandbox::{Sandbox, State};
use crate::strategy::{ResetMethod, Tracking};

/// Full rings after which a sandbox gives its ring up.
const OVERFLOWS: u32 = 2;

impl Sandbox {
    /// Brings memory and registers back to the image.
    ///
    /// # Errors
    /// KVM's or the kernel's; the sandbox is then quarantined.
    pub fn reset(&mut self) -> Result<ResetReport, CallError> {
        self.check_process()?;
        if self.state == State::Quarantined {
            return Err(CallError::Quarantined);
        }
        self.watch.permit_calls();
        let outcome = self.reset_inner();
        self.state = match outcome {
            Ok(_) => State::Ready,
            Err(_) => State::Quarantined,
        };
        self.untouched = outcome.is_ok();
        self.generation = next_generation();
        outcome
    }

    fn reset_inner(&mut self) -> Result<ResetReport, CallError> {
        let method = self.config.reset;
        if method == ResetMethod::default() && self.ring_overflows >= OVERFLOWS {
            // A write set larger than the ring would be protected and noticed anew in every run.
            return self.replace_machine(ResetMethod { tracking: Tracking::Log, ..method });
        }
        // Before memory is reset: unfinished operations of the last call may still write there.
        if self.state == State::NeedsReset && !self.machine.revive()? {
            return self.replace_machine(method);
        }
        Ok(self.memory.slot.reset()?)
    }

    /// Moves to a new machine in the state that this one returns to.
    #[cold]
    fn replace_machine(&mut self, method: ResetMethod) -> Result<ResetReport, CallError> {
        let snapshot = self.pristine().with_reset(method);
        let mut other = snapshot.fork().map_err(|error| CallError::Replace(Box::new(error)))?;
        std::mem::swap(self, &mut other);
        // Stop handles that were given out keep working.
        self.watch.swap(&other.watch);
        std::mem::swap(&mut self.watch, &mut other.watch);
        Ok(ResetReport::default())
    }
}
