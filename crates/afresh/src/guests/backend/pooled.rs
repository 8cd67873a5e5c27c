//! Guests that are made one by one and reset when they come back: the common part of micro-VMs and
//! Linux programs behind the front door.

use std::ops::{Deref, DerefMut};

use afresh_pool::{Lease, LimitPolicy, OwnedLease, Pool, PoolError, PoolStats, Recycle, ResetCost};

use super::{LeaseControl, StopCall};
use crate::{CallOptions, Cause, LeaseError, LeaseOptions};

/// A guest that goes back to the state it was made in.
pub(crate) trait Reset: Send + 'static {
    type Error: std::fmt::Display;

    /// Resets the guest, and reports the work.
    fn reset(&mut self) -> Result<ResetCost, Self::Error>;

    /// Bytes of private memory that it keeps.
    fn kept_bytes(&self) -> usize;

    /// The limits of calls.
    type Limits: Copy + Send + Sync;

    /// Sets the limits of the following calls where options are given, and returns those before.
    fn limit(&mut self, options: &CallOptions) -> Result<Self::Limits, Cause>;

    /// Sets limits that it had before.
    fn restore_limits(&mut self, limits: Self::Limits);

    /// Whether a call was cut short, so that the state is unknown until a reset.
    fn is_spoiled(&self) -> bool;

    /// Stops calls until a reset.
    fn stopper(&mut self) -> StopCall;
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
    /// As well, with its pool.
    Owned(OwnedLease<Idle<T>>),
    /// A session's own, which stays as the lease leaves it.
    Own(&'a mut T),
}

impl<T: Reset> LeaseControl for Leased<'_, T> {
    type Limits = T::Limits;

    fn set_options(&mut self, options: &CallOptions) -> Result<T::Limits, Cause> {
        self.limit(options)
    }

    fn restore_options(&mut self, limits: T::Limits) {
        self.restore_limits(limits);
    }

    fn is_spoiled(&self) -> bool {
        T::is_spoiled(self)
    }

    fn call_stopper(&mut self) -> StopCall {
        self.stopper()
    }

    /// A session's own guest stays: the session drops it.
    fn discard_instance(self) {
        match self {
            Self::Pooled(lease) => lease.discard(),
            Self::Owned(lease) => lease.discard(),
            Self::Own(_) => {}
        }
    }
}

impl<T: Reset> Deref for Leased<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Pooled(lease) => &lease.0,
            Self::Owned(lease) => &lease.0,
            Self::Own(guest) => guest,
        }
    }
}

impl<T: Reset> DerefMut for Leased<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Pooled(lease) => &mut lease.0,
            Self::Owned(lease) => &mut lease.0,
            Self::Own(guest) => guest,
        }
    }
}

/// Guests that all start from one state, and that state.
pub(crate) struct ResetPool<T: Reset, P> {
    pub(crate) pristine: P,
    pool: Pool<Idle<T>>,
    /// The limits of calls, unless a lease has others.
    limits: T::Limits,
}

/// The error of a lease.
fn unavailable<E: Into<Cause>>(error: PoolError<E>) -> LeaseError {
    match error {
        PoolError::Create(error) => LeaseError::Create(error.into()),
        PoolError::Exhausted { limit } => LeaseError::Exhausted { limit },
        PoolError::TimedOut(waited) => LeaseError::Timeout { waited },
        _ => LeaseError::Create("the pool has no instance to give".into()),
    }
}

impl<T: Reset, P> ResetPool<T, P> {
    /// A supply with its first guest.
    pub(crate) fn new(
        pristine: P,
        mut first: T,
        limits: afresh_pool::Limits,
    ) -> Result<Self, LeaseError> {
        let of_calls = first.limit(&CallOptions::new()).map_err(LeaseError::Option)?;
        let this = Self { pristine, pool: Pool::new(limits), limits: of_calls };
        drop(this.lease(|_| Ok::<_, Cause>(first))?);
        Ok(this)
    }

    /// The response where all guests are in use.
    fn policy(&self, options: &LeaseOptions) -> LimitPolicy {
        options.policy(self.pool.limits().exhausted)
    }

    /// Gives a guest the limits of its lease.
    fn begin<'a>(
        &self,
        mut lease: Leased<'a, T>,
        options: &LeaseOptions,
    ) -> Result<Leased<'a, T>, LeaseError> {
        lease.restore_limits(self.limits);
        lease.limit(&options.calls).map_err(LeaseError::Option)?;
        Ok(lease)
    }

    /// A guest in the pristine state, made by `make` if none is idle.
    pub(crate) fn lease<E: Into<Cause>>(
        &self,
        make: impl FnOnce(&P) -> Result<T, E>,
    ) -> Result<Leased<'_, T>, LeaseError> {
        let made = self.pool.get(0, |_| make(&self.pristine).map(Idle));
        let mut lease = Leased::Pooled(made.map_err(unavailable)?);
        lease.restore_limits(self.limits);
        Ok(lease)
    }

    /// As [`ResetPool::lease`], with options.
    pub(crate) fn lease_with<E: Into<Cause>>(
        &self,
        options: &LeaseOptions,
        make: impl FnOnce(&P) -> Result<T, E>,
    ) -> Result<Leased<'_, T>, LeaseError> {
        let make = |_| make(&self.pristine).map(Idle);
        let made = self.pool.get_with(0, self.policy(options), make);
        self.begin(Leased::Pooled(made.map_err(unavailable)?), options)
    }

    /// As [`ResetPool::lease_with`], borrowing nothing.
    pub(crate) fn lease_owned<E: Into<Cause>>(
        &self,
        options: &LeaseOptions,
        make: impl FnOnce(&P) -> Result<T, E>,
    ) -> Result<Leased<'static, T>, LeaseError> {
        let make = |_| make(&self.pristine).map(Idle);
        let made = self.pool.get_owned(0, self.policy(options), make);
        self.begin(Leased::Owned(made.map_err(unavailable)?), options)
    }

    /// As [`ResetPool::lease_owned`], waiting as a task does.
    pub(crate) async fn lease_async<E: Into<Cause>>(
        &self,
        options: LeaseOptions,
        make: impl Fn(&P) -> Result<T, E>,
    ) -> Result<Leased<'static, T>, LeaseError> {
        let attempt = options.without_blocking(self.pool.limits().exhausted);
        let mut next = None;
        loop {
            match self.lease_owned(&attempt, &make) {
                Err(LeaseError::Exhausted { .. }) => {}
                taken => return taken,
            }
            next.get_or_insert_with(|| self.pool.room()).wait().await;
        }
    }

    /// Counters of the pool.
    pub(crate) fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
}

impl LeaseOptions {
    /// The response where all instances are in use, of a guest with `limits`.
    fn policy(&self, limits: LimitPolicy) -> LimitPolicy {
        self.exhausted.unwrap_or(limits)
    }

    /// The response of one attempt of a lease that waits as a task.
    fn without_blocking(self, limits: LimitPolicy) -> Self {
        match self.policy(limits) {
            LimitPolicy::OnDemand => self.exhausted(LimitPolicy::OnDemand),
            _ => self.exhausted(LimitPolicy::Error),
        }
    }
}
