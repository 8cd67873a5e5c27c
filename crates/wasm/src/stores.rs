//! Stores, and the limits on what runs in them: one way to make them for modules and components.

use std::sync::Arc;
use std::time::Duration;

use wasmtime::Store;

use crate::Engine;
use crate::engine::TICK;
use crate::guest::GuestOptions;
use crate::host::{Host, Wasi};

/// Epochs and fuel for our own functions: as good as unlimited, and far from overflow.
const UNLIMITED: u64 = 1 << 60;

/// Makes stores with nothing of a call in them. Holding it keeps the engine, and with it the thread that
/// timeouts count on, alive.
pub(crate) struct Stores {
    engine: Engine,
    wasi: Arc<Wasi>,
    memory_limit: usize,
    /// What the engine was set up for; here because every restore asks.
    timeouts: bool,
    fuel: bool,
}

impl Stores {
    pub(crate) fn new(engine: &Engine, options: &GuestOptions) -> Self {
        Self {
            engine: engine.clone(),
            wasi: Arc::new(options.wasi.clone()),
            memory_limit: options.memory_limit,
            timeouts: engine.inner.config.timeouts,
            fuel: engine.inner.config.fuel,
        }
    }

    pub(crate) fn make(&self) -> Store<Host> {
        let host = Host::new(self.wasi.clone(), self.memory_limit);
        let mut store = Store::new(self.engine.wasmtime(), host);
        if self.memory_limit != usize::MAX {
            store.limiter(|host| host);
        }
        self.unlimit(&mut store);
        store
    }

    /// Lifts time and fuel limits, for code of ours.
    #[inline]
    pub(crate) fn unlimit(&self, store: &mut Store<Host>) {
        if self.timeouts {
            store.set_epoch_deadline(UNLIMITED);
        }
        if self.fuel {
            // Fails only where fuel is not configured.
            let _ = store.set_fuel(UNLIMITED);
        }
    }
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
    pub(crate) fn apply(&self, store: &mut Store<Host>) {
        if let Some(timeout) = self.timeout {
            // One tick more, because the present one is already under way.
            let ticks = (timeout.as_nanos() / TICK.as_nanos()) as u64 + 1;
            store.set_epoch_deadline(ticks.min(UNLIMITED));
        }
        if let Some(fuel) = self.fuel {
            // Fails only where fuel is not configured; then nothing counts it.
            let _ = store.set_fuel(fuel);
        }
    }
}
