//! Micro-VMs behind the front door: a pool of sandboxes in one state.

use afresh_pool::{Lease, Pool, PoolError, PoolStats, Recycle};
use afresh_vm::{BuildError, Sandbox, Snapshot};

use crate::{Cause, LeaseError, Options};

/// Sandboxes that all start from one state.
pub(crate) struct Machines {
    pub(crate) pristine: Snapshot,
    pool: Pool<Machine>,
}

/// One of them.
pub(crate) struct Machine(pub(crate) Sandbox);

impl Recycle for Machine {
    type Error = afresh_vm::CallError;

    fn key(&self) -> usize {
        0
    }

    fn recycle(&mut self) -> Result<(), Self::Error> {
        self.0.reset().map(drop)
    }

    fn resident_bytes(&self) -> usize {
        self.0.write_set_bytes()
    }

    fn trim(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

impl Machines {
    /// A pool with its first sandbox.
    pub(crate) fn new(first: Sandbox, options: &Options) -> Result<Self, LeaseError> {
        let this = Self { pristine: first.pristine(), pool: Pool::new(options.limits) };
        drop(this.get(|| Ok(first))?);
        Ok(this)
    }

    /// A sandbox in the pristine state.
    pub(crate) fn lease(&self) -> Result<Lease<'_, Machine>, LeaseError> {
        self.get(|| self.pristine.spawn())
    }

    fn get(
        &self,
        make: impl FnOnce() -> Result<Sandbox, BuildError>,
    ) -> Result<Lease<'_, Machine>, LeaseError> {
        self.pool.get(0, |_| make().map(Machine)).map_err(|error| {
            LeaseError::Instance(match error {
                PoolError::Create(error) => error.into(),
                other => Cause::from(other.to_string()),
            })
        })
    }

    /// What the pool has done so far.
    pub(crate) fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
}
