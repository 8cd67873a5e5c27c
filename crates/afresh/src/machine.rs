//! Micro-VMs behind the front door.

use afresh_pool::Recycled;
use afresh_vm::{Sandbox, Snapshot};

use crate::pooled::{Leased, Reset, ResetPool};
use crate::{LeaseError, Options};

/// Sandboxes that all start from one state.
pub(crate) type Machines = ResetPool<Sandbox, Snapshot>;

impl Reset for Sandbox {
    type Error = afresh_vm::CallError;

    fn reset(&mut self) -> Result<Recycled, Self::Error> {
        self.reset().map(Recycled::from)
    }

    fn kept_bytes(&self) -> usize {
        self.write_set_bytes()
    }
}

/// A pool with its first sandbox.
pub(crate) fn machines(first: Sandbox, options: &Options) -> Result<Machines, LeaseError> {
    Machines::new(first.pristine(), first, options.limits)
}

/// A sandbox in the pristine state.
pub(crate) fn lease(machines: &Machines) -> Result<Leased<'_, Sandbox>, LeaseError> {
    machines.lease(Snapshot::fork)
}
