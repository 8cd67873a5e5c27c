//! Stores, and the limits on what runs in them: one way to make them for modules and components.

use std::sync::Arc;
use std::time::Duration;

use wasmtime::{AsContextMut, Store};

use crate::engine::TICK;
use crate::guest::GuestOptions;
use crate::host::{Clock, Host, Wasi};
use crate::way::Way;
use crate::{Engine, LoadError};

/// Epochs and fuel for our own functions: as good as unlimited, and far from overflow.
const UNLIMITED: u64 = 1 << 60;

/// Makes stores with nothing of a call in them. Holding it keeps the engine, and with it the thread that
/// timeouts count on, alive.
pub(crate) struct Stores {
    engine: Engine,
    wasi: Arc<Wasi>,
    pub(crate) clock: Clock,
    memory_limit: usize,
    /// Most instances in one store, if not as many as wasmtime allows.
    instances: Option<usize>,
    /// What the engine was set up for; here because every restore asks.
    timeouts: bool,
    fuel: bool,
    /// Whether calls have a timeout.
    timed: bool,
    /// How code in them is entered.
    pub(crate) way: Way,
}

impl Stores {
    pub(crate) fn new(
        engine: &Engine,
        options: &GuestOptions,
        clock: &Clock,
        instances: Option<usize>,
    ) -> Result<Self, LoadError> {
        options.wasi.with_dirs().map_err(LoadError::Wasi)?;
        Ok(Self {
            engine: engine.clone(),
            wasi: Arc::new(options.wasi.clone()),
            clock: clock.clone(),
            memory_limit: options.memory_limit,
            instances,
            timeouts: engine.inner.config.timeouts,
            fuel: engine.inner.config.fuel,
            timed: options.timeout.is_some(),
            way: Way::of(options.asynchronous),
        })
    }

    /// The limits of one lease, where they are to be others than the guest's.
    ///
    /// # Errors
    /// As [`Engine::keep_limits`].
    pub(crate) fn keep(&self, limits: CallLimits) -> Result<(), LoadError> {
        self.engine.keep_limits(limits)
    }

    /// # Errors
    /// As [`Wasi::fits`].
    pub(crate) fn check_wasi(&self, own: &Wasi) -> Result<(), LoadError> {
        own.fits(&self.wasi)
    }

    /// # Errors
    /// As [`Engine::keep_ticking`].
    pub(crate) fn make(&self) -> Result<Store<Host>, LoadError> {
        if self.timed {
            self.engine.keep_ticking()?;
        }
        let clock = self.clock.clone();
        let host = Host::new(self.wasi.clone(), clock, self.memory_limit, self.instances);
        let mut store = Store::new(self.engine.wasmtime(), host);
        if self.memory_limit != usize::MAX || self.instances.is_some() {
            store.limiter(|host| host);
        }
        self.unlimit(&mut store);
        Ok(store)
    }

    /// Lifts time and fuel limits, for code of ours.
    #[inline]
    pub(crate) fn unlimit(&self, mut store: impl AsContextMut<Data = Host>) {
        let mut store = store.as_context_mut();
        if self.timeouts {
            store.epoch_deadline_trap();
            store.set_epoch_deadline(UNLIMITED);
        }
        if self.fuel {
            // Fails only where fuel is not configured.
            let _ = store.set_fuel(UNLIMITED);
        }
    }
}

/// Ticks until `timeout` is over for certain: the first may come at once, each other after a whole tick.
fn ticks(timeout: Duration) -> u64 {
    let whole = timeout.as_nanos().div_ceil(TICK.as_nanos());
    u64::try_from(whole).map_or(UNLIMITED, |whole| whole.saturating_add(1).min(UNLIMITED))
}

/// What one call may use; by default, as much as it wants.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallLimits {
    pub(crate) timeout: Option<Duration>,
    pub(crate) fuel: Option<u64>,
}

impl CallLimits {
    pub(crate) fn of(options: &GuestOptions) -> Self {
        Self { timeout: options.timeout, fuel: options.fuel }
    }

    /// Sets the limits for the next call.
    #[inline]
    pub(crate) fn apply(&self, mut store: impl AsContextMut<Data = Host>) {
        let mut store = store.as_context_mut();
        if let Some(timeout) = self.timeout {
            store.set_epoch_deadline(ticks(timeout));
        }
        if let Some(fuel) = self.fuel {
            // Fails only where fuel is not configured, and then making the guest did.
            let _ = store.set_fuel(fuel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_never_ends_early() {
        let at_least = |timeout| TICK * (ticks(timeout) - 1) as u32;
        for micros in [0, 1, 999, 4000, 4999, 5000, 5001, 9999, 10_000, 10_001, 1_000_000] {
            let timeout = Duration::from_micros(micros);
            assert!(
                at_least(timeout) >= timeout,
                "{timeout:?} may end after {:?}",
                at_least(timeout)
            );
        }
        assert_eq!(ticks(Duration::MAX), UNLIMITED);
    }
}
