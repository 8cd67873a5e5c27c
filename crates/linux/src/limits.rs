//! Limits of calls, and the handle that stops them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_egress::EgressPolicy;
use afresh_memory::Strategy;

/// Default interval of polls of a caller that receives output.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Limits of each call, and the strategy of resets.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) output: usize,
    pub(crate) time: Duration,
    /// Maximum CPU time of a call.
    pub(crate) cpu_time: Option<Duration>,
    /// Time for which a streamed call continues after its answer.
    pub(crate) slice: Option<Duration>,
    /// Interval of polls of a caller that receives output.
    pub(crate) poll: Duration,
    pub(crate) strategy: Strategy,
    /// Where it may connect to.
    pub(crate) egress: EgressPolicy,
    /// Pages of a write set beyond which it is not copied but learned anew.
    pub(crate) write_set: usize,
    /// Whether every reset ends the process.
    pub(crate) replaced: bool,
    /// Whether calls are answered inside the process where that is possible.
    pub(crate) answers_inside: bool,
    /// Stops the calls of the present lease.
    pub(crate) stop: Option<StopHandle>,
}

/// Stops the calls of an instance, from any thread, until it is reset: the running call and further
/// ones. A running call notices it at the next [interval](crate::Program::poll_interval).
#[derive(Clone, Debug, Default)]
pub struct StopHandle(Arc<AtomicBool>);

impl StopHandle {
    /// Stops the calls.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the calls are stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            output: 64 << 20,
            time: Duration::from_secs(10),
            cpu_time: None,
            slice: None,
            poll: POLL_INTERVAL,
            strategy: Strategy::Auto,
            egress: EgressPolicy::default(),
            write_set: 8192,
            replaced: false,
            answers_inside: false,
            stop: None,
        }
    }
}
