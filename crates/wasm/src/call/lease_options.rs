//! The options of one call and of one lease.

use std::sync::Arc;
use std::time::Duration;

use afresh_pool::LimitPolicy;

use crate::LoadError;
use crate::call::stores::{CallLimits, Stores};
use crate::host::watch::StopHandle;
use crate::host::{Host, Output, Wasi};

/// Limits of calls that replace those of the lease or the guest. The default replaces none.
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct CallOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) fuel: Option<u64>,
    pub(crate) memory: Option<usize>,
    pub(crate) cpu_time: Option<Duration>,
}

impl CallOptions {
    /// The limits of the lease.
    pub fn new() -> Self {
        Self::default()
    }

    /// Time limit of the call; as [`crate::GuestOptions::timeout`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Maximum fuel of the call; needs [`crate::EngineConfig::fuel`].
    pub fn fuel(mut self, fuel: u64) -> Self {
        self.fuel = Some(fuel);
        self
    }

    /// Maximum bytes of memories and tables together in the call, in place of
    /// [`crate::GuestOptions::memory_limit`], which the guest must have. Memory that is already
    /// larger stays.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Maximum CPU time of each function that the call enters, including host functions. It is
    /// checked at each tick of the epoch, so a call ends within a tick after its limit, and never
    /// before. The guest needs a [`crate::Watch`], which may be only
    /// [stoppable](crate::Watch::stoppable). A guest with [`crate::GuestOptions::asynchronous`]
    /// refuses it, because its thread runs other tasks as well.
    pub fn cpu_time(mut self, limit: Duration) -> Self {
        self.cpu_time = Some(limit);
        self
    }

    fn is_empty(&self) -> bool {
        self.timeout.is_none()
            && self.fuel.is_none()
            && self.memory.is_none()
            && self.cpu_time.is_none()
    }
}

/// Options of one lease that replace those of its guest. The default replaces none.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LeaseOptions {
    calls: CallOptions,
    wasi: Option<Arc<Wasi>>,
    output: Option<Output>,
    exhausted: Option<LimitPolicy>,
    /// Stops code that prepares the instance.
    stop: Option<StopHandle>,
}

/// The limits of the calls of a lease; see [`crate::Lease::set_limits`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LeaseLimits(pub(crate) CallLimits);

impl LeaseOptions {
    /// The guest's options.
    pub fn new() -> Self {
        Self::default()
    }

    /// The limits of each of its calls, in place of those set before.
    pub fn calls(mut self, calls: CallOptions) -> Self {
        self.calls = calls;
        self
    }

    /// Time limit of each of its calls; as [`crate::GuestOptions::timeout`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.calls = self.calls.timeout(timeout);
        self
    }

    /// Maximum fuel of each of its calls; needs [`crate::EngineConfig::fuel`].
    pub fn fuel(mut self, fuel: u64) -> Self {
        self.calls = self.calls.fuel(fuel);
        self
    }

    /// Maximum bytes of memories and tables together in each of its calls; as
    /// [`CallOptions::memory`].
    pub fn memory(mut self, bytes: usize) -> Self {
        self.calls = self.calls.memory(bytes);
        self
    }

    /// The WASI configuration of its calls, instead of [`crate::GuestOptions::wasi`]. Values that
    /// the warm-up has read do not change: many C libraries copy arguments and environment when
    /// they start. Directories of the guest's options must be repeated in the same order under the
    /// same names, but can be other host directories. Further directories follow them. A file tree
    /// given here replaces the warm one, without open files. Without a tree here the warm one
    /// stays.
    pub fn wasi(mut self, wasi: impl Into<Arc<Wasi>>) -> Self {
        self.wasi = Some(wasi.into());
        self
    }

    /// The destination of its standard output and error, instead of [`Wasi::output`].
    pub fn output(mut self, output: Output) -> Self {
        self.output = Some(output);
        self
    }

    /// The response if all instances are in use, in place of that of
    /// [`crate::GuestOptions::limits`]. An asynchronous lease ([`crate::Warm::lease_async`]) waits
    /// until it is dropped, unless instances are made on demand.
    pub fn exhausted(mut self, exhausted: LimitPolicy) -> Self {
        self.exhausted = Some(exhausted);
        self
    }

    /// The response where all instances are in use, of a guest with `limits`.
    #[inline]
    pub(crate) fn policy(&self, limits: LimitPolicy) -> LimitPolicy {
        self.exhausted.unwrap_or(limits)
    }

    /// These options for one attempt of a lease that waits as a task.
    pub(crate) fn without_blocking(&self, limits: LimitPolicy) -> Self {
        let attempt = match self.policy(limits) {
            LimitPolicy::OnDemand => LimitPolicy::OnDemand,
            _ => LimitPolicy::Error,
        };
        self.clone().exhausted(attempt)
    }

    /// The same, with a handle that stops the lease from its first code on.
    pub(crate) fn stopped_by(self, stop: StopHandle) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// The limits of its calls, which the engine is known to keep.
    ///
    /// # Errors
    /// [`LoadError`] for a limit that it does not keep, and for directories that do not fit.
    #[inline]
    pub(crate) fn limits(&self, stores: &Stores) -> Result<CallLimits, LoadError> {
        if let Some(wasi) = &self.wasi {
            stores.check_wasi(wasi)?;
        }
        match self.calls.is_empty() {
            true => Ok(stores.limits),
            false => stores.limits(&self.calls),
        }
    }

    /// Gives the lease's host state its own WASI context and output.
    pub(crate) fn apply(&self, host: &mut Host) {
        if let Some(wasi) = &self.wasi {
            host.set_wasi(wasi.clone());
        }
        if let Some(output) = &self.output {
            host.set_output(output.clone());
        }
        if let Some(stop) = &self.stop {
            host.set_stop(stop.clone());
        }
    }
}
