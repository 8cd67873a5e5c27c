//! Guests that are made one by one and reset when they come back: the common part of micro-VMs and
//! Linux programs behind the front door.

use std::ops::{Deref, DerefMut};

use afresh_pool::{Lease, Pool, PoolError, PoolStats, Recycle, ResetCost};

use crate::{Cause, LeaseError};

/// A guest that goes back to the state it was made in.
pub(crate) trait Reset: Send + 'static {
    type Error: std::fmt::Display;

    /// Resets the guest, and reports the work.
    fn reset(&mut self) -> Result<ResetCost, Self::Error>;

    /// Bytes of private memory that it keeps.
    fn kept_bytes(&self) -> usize;
}

/// A guest in a pool.
pub(crate) struct Idle<T>(T);

impl<T: Reset> Recycle for Idle<T> {
    type Error = T::Error;

    fn key(&self) -> usize {
        0
    }

    fn recycle(&mut self) -> Result<ResetCost, T::Error> {
        self.0.reset()
    }

    fn resident_bytes(&self) -> usize {
        self.0.kept_bytes()
    }

    fn trim(&mut self) -> Result<(), T::Error> {
        Ok(())
    }
}

/// A guest on lease.
pub(crate) enum Leased<'a, T: Reset> {
    /// Reset when the lease ends.
    Pooled(Lease<'a, Idle<T>>),
    /// A session's own, which stays as the lease leaves it.
    Own(&'a mut T),
}

impl<T: Reset> Leased<'_, T> {
    /// Drops a pool's guest instead of resetting it.
    pub(crate) fn discard(self) {
        if let Self::Pooled(lease) = self {
            lease.discard();
        }
    }
}

impl<T: Reset> Deref for Leased<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Pooled(lease) => &lease.0,
            Self::Own(guest) => guest,
        }
    }
}

impl<T: Reset> DerefMut for Leased<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Pooled(lease) => &mut lease.0,
            Self::Own(guest) => guest,
        }
    }
}

/// Guests that all start from one state, and that state.
pub(crate) struct ResetPool<T: Reset, P> {
    pub(crate) pristine: P,
    pool: Pool<Idle<T>>,
}

impl<T: Reset, P> ResetPool<T, P> {
    /// A supply with its first guest.
    pub(crate) fn new(
        pristine: P,
        first: T,
        limits: afresh_pool::Limits,
    ) -> Result<Self, LeaseError> {
        let this = Self { pristine, pool: Pool::new(limits) };
        drop(this.lease(|_| Ok::<_, Cause>(first))?);
        Ok(this)
    }

    /// A guest in the pristine state, made by `make` if none is idle.
    pub(crate) fn lease<E: std::fmt::Display + Into<Cause>>(
        &self,
        make: impl FnOnce(&P) -> Result<T, E>,
    ) -> Result<Leased<'_, T>, LeaseError> {
        let made = self.pool.get(0, |_| make(&self.pristine).map(Idle));
        made.map(Leased::Pooled).map_err(|error| {
            LeaseError::Instance(match error {
                PoolError::Create(error) => error.into(),
                other => Cause::from(other.to_string()),
            })
        })
    }

    /// Counters of the pool.
    pub(crate) fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
}
