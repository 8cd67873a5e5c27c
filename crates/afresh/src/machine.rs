//! Micro-VMs behind the front door: a pool of sandboxes in one state.

use std::ops::{Deref, DerefMut};

use afresh_pool::{Lease, Pool, PoolError, PoolStats, Recycle};
use afresh_vm::{BuildError, Sandbox, Snapshot};

use crate::{Cause, LeaseError, Options};

/// Sandboxes that all start from one state.
pub(crate) struct Machines {
    pub(crate) pristine: Snapshot,
    pool: Pool<Machine>,
}

/// One of them.
pub(crate) struct Machine(Sandbox);

/// A sandbox on lease.
pub(crate) enum Loan<'a> {
    /// Reset when the lease ends.
    Pooled(Lease<'a, Machine>),
    /// A session's own, which stays as the lease leaves it.
    Own(&'a mut Sandbox),
}

impl Loan<'_> {
    /// Drops a pool's sandbox instead of resetting it.
    pub(crate) fn discard(self) {
        if let Self::Pooled(lease) = self {
            lease.discard();
        }
    }
}

impl Deref for Loan<'_> {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        match self {
            Self::Pooled(lease) => &lease.0,
            Self::Own(sandbox) => sandbox,
        }
    }
}

impl DerefMut for Loan<'_> {
    fn deref_mut(&mut self) -> &mut Sandbox {
        match self {
            Self::Pooled(lease) => &mut lease.0,
            Self::Own(sandbox) => sandbox,
        }
    }
}

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
    pub(crate) fn lease(&self) -> Result<Loan<'_>, LeaseError> {
        self.get(|| self.pristine.spawn()).map(Loan::Pooled)
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
