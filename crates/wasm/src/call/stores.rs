//! Stores, and the limits of code in them: one way to make them for modules and components.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use afresh_files::Tree;
use afresh_sys::PORTABLE;
use wasmtime::{AsContextMut, Store};

use crate::call::lease_options::CallOptions;
use crate::engine::call_path::CallPath;
use crate::guest::GuestOptions;
use crate::host::clock::Clock;
use crate::host::files::{Files, SavedFiles};
#[cfg(feature = "call-hook")]
use crate::host::hook::Hook;
use crate::host::watch::{CpuDeadline, Watch, look};
use crate::host::{Host, HostParts, Limiter, State, Wasi};
use crate::{Engine, LoadError, ThawError};

/// Epochs and fuel for our own functions: as good as unlimited, and far from overflow.
const UNLIMITED: u64 = 1 << 60;

/// Makes stores without state of any call. Holding it keeps the engine, and with it the thread that
/// timeouts count on, alive.
pub(crate) struct Stores {
    engine: Engine,
    wasi: Arc<Wasi>,
    /// The tree below the files of a frozen guest.
    below: Option<Tree>,
    /// An interface of WASI 0.3 for files that the guest imports.
    imports_p3_files: Option<String>,
    /// The initial file tree of calls, once the guest is warm.
    pub(crate) files: Arc<OnceLock<Files>>,
    pub(crate) clock: Clock,
    pub(crate) memory_limit: usize,
    /// Maximum instances in one store; `None` for wasmtime's limit.
    instances: Option<usize>,
    /// The engine's configuration, copied because every restore reads it.
    timeouts: bool,
    fuel: bool,
    /// The embedder's own state, limiter and hook.
    state: State,
    limiter: Limiter,
    #[cfg(feature = "call-hook")]
    hook: Hook,
    watch: Watch,
    /// The limits of guest calls.
    pub(crate) limits: CallLimits,
    /// How code in them is entered.
    pub(crate) way: CallPath,
    /// Whether the memory of idle instances is limited.
    pub(crate) limited: bool,
}

impl Stores {
    pub(crate) fn new(
        engine: &Engine,
        options: &GuestOptions,
        clock: &Clock,
        instances: Option<usize>,
    ) -> Result<Self, LoadError> {
        options.wasi.open_directories().map_err(LoadError::Wasi)?;
        Ok(Self {
            engine: engine.clone(),
            wasi: Arc::new(options.wasi.clone()),
            below: options.files_below.clone(),
            imports_p3_files: None,
            files: Arc::default(),
            clock: clock.clone(),
            memory_limit: options.memory_limit,
            instances,
            timeouts: engine.inner.config.timeouts,
            fuel: engine.inner.config.fuel,
            state: options.state.clone(),
            limiter: options.limiter.clone(),
            #[cfg(feature = "call-hook")]
            hook: options.hook.clone(),
            watch: options.watch.clone(),
            limits: CallLimits::new(options.timeout, options.fuel, engine.tick())
                .limit_memory(options.memory_limit)
                .watch(options.watch.is_some())
                .give_way(options.gives_way && options.asynchronous),
            way: CallPath::of(options.asynchronous, engine.deep()),
            limited: options.limits.resident_bytes != usize::MAX,
        })
    }

    /// The limits of one lease, where they differ from the guest's.
    ///
    /// # Errors
    /// As [`Engine::keep_limits`].
    pub(crate) fn limits(&self, options: &CallOptions) -> Result<CallLimits, LoadError> {
        self.limits_over(options, self.limits)
    }

    /// The limits of one call, where they differ from those of its lease.
    ///
    /// # Errors
    /// As [`Engine::keep_limits`], and for a memory limit where the guest has none.
    pub(crate) fn limits_over(
        &self,
        options: &CallOptions,
        lease: CallLimits,
    ) -> Result<CallLimits, LoadError> {
        let timeout = options.timeout.or(lease.timeout);
        let fuel = options.fuel.or(lease.fuel);
        self.engine.keep_limits(timeout, fuel, self.watch.is_some())?;
        if options.memory.is_some() && self.memory_limit == usize::MAX {
            let (limit, setting) = ("memory limit", "GuestOptions::memory_limit");
            return Err(LoadError::Limit { limit, setting });
        }
        let cpu_time = options.cpu_time.or(lease.cpu_time);
        if cpu_time.is_some() {
            self.check_cpu_limit()?;
        }
        let limits = CallLimits::new(timeout, fuel, self.engine.tick());
        let memory = options.memory.or(lease.memory);
        let limits = CallLimits { memory, cpu_time, ..limits };
        Ok(limits.watch(self.watch.is_some()).give_way(self.limits.gives_way))
    }

    /// # Errors
    /// [`LoadError::Limit`] where nothing checks the CPU time of a call, or the thread of a call
    /// runs other tasks as well.
    fn check_cpu_limit(&self) -> Result<(), LoadError> {
        let setting = match (self.way.waits(), self.watch.is_some()) {
            _ if PORTABLE => "a timeout, as only Linux counts CPU time,",
            (true, _) => "GuestOptions::asynchronous = false",
            (false, false) => "Watch::stoppable() in GuestOptions::watch",
            (false, true) => return Ok(()),
        };
        Err(LoadError::Limit { limit: "CPU time limit", setting })
    }

    /// # Errors
    /// As [`Wasi::fits`], and as [`Stores::has_no_files_for`].
    pub(crate) fn check_wasi(&self, own: &Wasi) -> Result<(), LoadError> {
        own.fits(&self.wasi)?;
        self.has_no_p3_files(own)
    }

    /// Our own functions of files serve preview 1 and WASI 0.2. Files of WASI 0.3 are
    /// wasmtime-wasi's, which have other rules for paths, so a component that imports them gets
    /// none.
    ///
    /// # Errors
    /// [`LoadError::Wasi`] if `component` imports files of WASI 0.3, and the guest is to have a
    /// directory or a tree.
    pub(crate) fn has_no_files_for(
        &mut self,
        component: &wasmtime::component::Component,
    ) -> Result<(), LoadError> {
        let ty = component.component_type();
        let mut names = ty.imports(component.engine()).map(|(name, _)| name);
        let of_files = |name: &&str| name.starts_with("wasi:filesystem/") && name.contains("@0.3.");
        self.imports_p3_files = names.find(of_files).map(str::to_owned);
        self.has_no_p3_files(&self.wasi)
    }

    fn has_no_p3_files(&self, wasi: &Wasi) -> Result<(), LoadError> {
        match &self.imports_p3_files {
            Some(import) if wasi.files.is_some() || !wasi.dirs.is_empty() => {
                Err(LoadError::Wasi(format!(
                    "the component imports {import}, and directories and file trees are not served to WASI 0.3: build \
                     it for WASI 0.2, or give it no files"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Whether something is done at each tick of a call.
    fn asks(&self) -> bool {
        self.watch.is_some() || self.limits.gives_way
    }

    /// A store, initially for our own code.
    ///
    /// # Errors
    /// As [`Engine::keep_ticking`].
    pub(crate) fn make(&self) -> Result<Store<Host>, LoadError> {
        if self.limits.timeout.is_some() || self.asks() {
            self.engine.keep_ticking()?;
        }
        let clock = self.clock.clone();
        let host = Host::new(HostParts {
            wasi: self.wasi.clone(),
            files: self.files.clone(),
            clock,
            state: self.state.clone(),
            limiter: self.limiter.clone(),
            watch: self.watch.clone(),
            ticks: self.engine.ticks(),
            memory_limit: self.memory_limit,
            instances: self.instances,
            way: self.way,
        });
        let mut store = Store::new(self.engine.wasmtime(), host);
        if self.memory_limit != usize::MAX || self.instances.is_some() || self.limiter.is_some() {
            store.limiter(|host| host);
        }
        #[cfg(feature = "call-hook")]
        self.hook.set(&mut store);
        if self.asks() {
            let held = Arc::new(());
            store.data_mut().set_callback(Arc::downgrade(&held));
            store.epoch_deadline_callback(move |store| {
                let _held = &held;
                look(store)
            });
        }
        self.unlimit(&mut store);
        Ok(store)
    }

    /// The files that every call starts from, where they are known.
    pub(crate) fn kept_files(&self) -> Option<Files> {
        let given = || self.wasi.files.clone().map(Files::new);
        self.files.get().cloned().or_else(given)
    }

    /// Makes the files of a frozen guest those that every call starts from. Of the files in the
    /// options only the budget is used.
    pub(crate) fn thaw_files(&self, files: Option<&SavedFiles>) -> Result<(), ThawError> {
        if let Some(files) = files {
            let allowed = self.wasi.files.as_ref().map(Tree::budget).unwrap_or_default();
            let below = self.below.as_ref().or(self.wasi.files.as_ref());
            let files = files.restore(allowed, below).map_err(ThawError::State)?;
            let _ = self.files.set(files);
        }
        Ok(())
    }

    /// Makes the files that `host` has those that every call starts from.
    pub(crate) fn keep_files(&self, host: &Host) {
        if let Some(files) = host.files() {
            // Only this code warms this guest, so the cell is empty.
            let _ = self.files.set(files);
        }
    }

    /// Lifts time and fuel limits, for our own code, which no hook observes, and brings the guest's
    /// memory limit back.
    #[inline]
    pub(crate) fn unlimit(&self, mut store: impl AsContextMut<Data = Host>) {
        let mut store = store.as_context_mut();
        store.data_mut().set_guests(false);
        store.data_mut().set_memory_limit(self.memory_limit);
        if self.timeouts {
            // A callback stays. [`Host::lost_callback`] reports one that a host function replaced.
            if !self.asks() {
                store.epoch_deadline_trap();
            }
            store.set_epoch_deadline(UNLIMITED);
        }
        if self.fuel {
            // Fails only where fuel is not configured.
            let _ = store.set_fuel(UNLIMITED);
        }
    }
}

/// Ticks until `timeout` is over for certain: the first may come at once, each other after a whole
/// tick.
fn ticks(timeout: Duration, tick: Duration) -> u64 {
    let whole = timeout.as_nanos().div_ceil(tick.as_nanos());
    u64::try_from(whole).map_or(UNLIMITED, |whole| whole.saturating_add(1).min(UNLIMITED))
}

/// The limits of one call; unlimited by default.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallLimits {
    pub(crate) timeout: Option<Duration>,
    /// The timeout in ticks of the epoch.
    ticks: u64,
    pub(crate) fuel: Option<u64>,
    /// Maximum bytes of memories and tables; `None` leaves the limit as it is.
    memory: Option<usize>,
    /// Maximum CPU time of a call that is watched.
    pub(crate) cpu_time: Option<Duration>,
    /// Whether each tick calls the embedder.
    watched: bool,
    /// Whether the call lets other tasks run after each tick, on a fiber.
    gives_way: bool,
}

impl CallLimits {
    fn new(timeout: Option<Duration>, fuel: Option<u64>, tick: Duration) -> Self {
        let ticks = timeout.map_or(UNLIMITED, |timeout| ticks(timeout, tick));
        Self { timeout, ticks, fuel, ..Self::default() }
    }

    fn limit_memory(self, bytes: usize) -> Self {
        Self { memory: Some(bytes), ..self }
    }

    fn watch(self, watched: bool) -> Self {
        Self { watched, ..self }
    }

    fn give_way(self, gives_way: bool) -> Self {
        Self { gives_way, ..self }
    }

    /// Those of a warm-up, which has no limits but the watch and the memory.
    pub(crate) fn of_warm_up(self) -> Self {
        let Self { watched, memory, .. } = self;
        Self { watched, memory, ticks: UNLIMITED, ..Self::default() }
    }

    /// Those of a start function, which may not yield: a plain lease polls it once.
    pub(crate) fn of_start(self) -> Self {
        Self { gives_way: false, watched: self.watched || self.gives_way, ..self }
    }

    /// Sets the limits for the next call, which is the guest's.
    #[inline]
    pub(crate) fn apply(&self, mut store: impl AsContextMut<Data = Host>) {
        let mut store = store.as_context_mut();
        store.data_mut().set_guests(true);
        if let Some(bytes) = self.memory {
            store.data_mut().set_memory_limit(bytes);
        }
        // A call that gives way does not count the time of a wait.
        let timeout = self.timeout.filter(|_| !self.gives_way);
        store.data_mut().set_time_limit(timeout.map(|timeout| (timeout, self.ticks)));
        if self.gives_way {
            // The time of other tasks does not count.
            store.data_mut().set_turns(Some(self.ticks));
            store.set_epoch_deadline(1);
        } else if self.watched {
            store.data_mut().set_turns(None);
            // A limit beyond the clock's range never expires.
            let until = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
            store.data_mut().set_until(until);
            store.data_mut().cpu_deadline = CpuDeadline::after(self.cpu_time);
            store.set_epoch_deadline(1);
        } else if self.timeout.is_some() {
            store.set_epoch_deadline(self.ticks);
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
        const TICK: Duration = Duration::from_millis(5);
        let at_least = |timeout| TICK * (ticks(timeout, TICK) - 1) as u32;
        for micros in [0, 1, 999, 4000, 4999, 5000, 5001, 9999, 10_000, 10_001, 1_000_000] {
            let timeout = Duration::from_micros(micros);
            assert!(
                at_least(timeout) >= timeout,
                "{timeout:?} may end after {:?}",
                at_least(timeout)
            );
        }
        assert_eq!(ticks(Duration::MAX, TICK), UNLIMITED);
    }
}
