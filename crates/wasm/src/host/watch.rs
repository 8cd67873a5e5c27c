//! A watch over calls: a function of the embedder that decides, while a call runs, whether it may
//! continue.
//!
//! Promises: it is called at every tick of the epoch, 5 ms unless the embedder sets another
//! interval, on the thread that runs the guest, and a refused call ends before the guest's next
//! loop or function. May break it: a long host function, during which it is not called.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_sys::host::thread_cpu_time;
use wasmtime::{StoreContextMut, Trap, UpdateDeadline};

use crate::host::Host;

type ContinueCallback = dyn Fn(&mut Host) -> bool + Send + Sync;

/// A callback that decides, while a call or a module's warm-up runs, whether it may continue. The
/// default has no callback.
///
/// Needs [`crate::EngineConfig::timeouts`]. A call that is ended fails with
/// [`crate::CallError::Stopped`].
#[derive(Clone, Default)]
pub struct Watch {
    ask: Option<Arc<ContinueCallback>>,
    stoppable: bool,
}

impl Watch {
    /// A watch that ends a call by returning `false`, or by a panic, which becomes an error of the
    /// call. It has access to the host state of the call ([`Host::data`], [`Host::state`]), and
    /// runs on the thread of the guest.
    pub fn new(ask: impl Fn(&mut Host) -> bool + Send + Sync + 'static) -> Self {
        Self { ask: Some(Arc::new(ask)), stoppable: false }
    }

    /// Lets a [`StopHandle`] end calls while they run, with or without a callback.
    #[must_use]
    pub fn stoppable(mut self) -> Self {
        self.stoppable = true;
        self
    }

    /// Whether calls are watched, by a callback or for stops.
    #[must_use]
    pub fn is_some(&self) -> bool {
        self.ask.is_some() || self.stoppable
    }

    /// Ends the call that `host` belongs to, unless the watch allows it to run on.
    pub(crate) fn check(&self, host: &mut Host) -> wasmtime::Result<()> {
        if host.is_stopped() {
            return Err(StoppedCall.into());
        }
        let Some(ask) = &self.ask else { return Ok(()) };
        // A panic that unwinds through wasmtime would take the callback with it, and later calls
        // would run unwatched.
        match catch_unwind(AssertUnwindSafe(|| ask(host))) {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoppedCall.into()),
            Err(_) => Err(wasmtime::Error::msg("the embedder's watch panicked")),
        }
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch")
            .field("ask", &self.ask.is_some())
            .field("stoppable", &self.stoppable)
            .finish()
    }
}

/// Stops the calls of one lease, from any thread: the running call and further ones fail with
/// [`crate::CallError::Stopped`]. A running call notices a stop only if its guest has a [`Watch`].
#[derive(Clone, Debug, Default)]
pub struct StopHandle(pub(crate) Arc<AtomicBool>);

impl StopHandle {
    /// Stops the calls of the lease.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How a call ends that the watch ended.
#[derive(Debug, thiserror::Error)]
#[error("the embedder's watch ended the call")]
pub(crate) struct StoppedCall;

/// The CPU time of its thread at which a call ends; never by default.
#[derive(Debug, Default)]
pub(crate) struct CpuDeadline(Option<Duration>);

impl CpuDeadline {
    /// For a call that begins now on this thread.
    pub(crate) fn after(limit: Option<Duration>) -> Self {
        Self(limit.map(|limit| thread_cpu_time().saturating_add(limit)))
    }

    /// Whether it is over. Costs one system call where there is a limit.
    fn is_over(&self) -> bool {
        self.0.is_some_and(|end| thread_cpu_time() >= end)
    }
}

/// How a call ends that has used its CPU time.
#[derive(Debug, thiserror::Error)]
#[error("the call has used its CPU time limit")]
pub(crate) struct CpuTimeUsed;

/// Handles a tick of a call that is watched, or that gives way.
pub(crate) fn look(mut store: StoreContextMut<'_, Host>) -> wasmtime::Result<UpdateDeadline> {
    let host = store.data_mut();
    host.check_memory()?;
    let left = host.take_turn();
    let over = match left {
        Some(left) => left == 0,
        None => host.deadline().is_some_and(|deadline| Instant::now() >= deadline),
    };
    if over {
        return Err(Trap::Interrupt.into());
    }
    if host.cpu_deadline.is_over() {
        return Err(CpuTimeUsed.into());
    }
    host.watch().check(host)?;
    Ok(if left.is_some() { UpdateDeadline::Yield(1) } else { UpdateDeadline::Continue(1) })
}
