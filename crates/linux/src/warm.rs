//! A warm program: frozen at its first wait for input, and the start of every instance.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh_egress::EgressPolicy;
use afresh_memory::{Image, Strategy};

use crate::frozen_state::{FrozenState, IdleWait};
use crate::instance::Instance;
use crate::sentry::InputSource;

/// Counts of an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Calls made.
    pub calls: u64,
    /// Processes made: one, and one more for each that was killed.
    pub processes: u64,
    /// Bytes that the last reset copied back.
    pub copied: u64,
    /// Bytes of the image, as mapped.
    pub image: u64,
    /// Bytes of the image that take memory; all processes share them.
    pub resident: u64,
    /// System calls that were answered with `ENOSYS`: how often, by number.
    pub unserved: BTreeMap<i64, u64>,
}

/// Default interval of polls of a caller that receives output.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Limits of each call, and the strategy of resets.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) output: usize,
    pub(crate) time: Duration,
    /// How long a heard call continues after it is answered.
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
    /// Stops the calls of the present lease.
    pub(crate) stop: Option<StopHandle>,
}

/// Stops the calls of an instance, from any thread, until it is reset: the one that runs and those
/// that follow. A running call notices it at the next [interval](crate::Program::poll_interval).
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
            slice: None,
            poll: POLL_INTERVAL,
            strategy: Strategy::Auto,
            egress: EgressPolicy::default(),
            write_set: 8192,
            replaced: false,
            stop: None,
        }
    }
}

/// A program that waits for input, frozen. Cheap to clone; usable from any thread.
///
/// A call goes in on descriptor 0 and out on descriptor 1, and lasts until the program waits for
/// more input than there is. A program that reads no input but listens on a port is called through
/// that: see [`Instance::call`].
#[derive(Clone, Debug)]
pub struct Warm {
    pub(crate) standing: FrozenState,
    pub(crate) limits: Limits,
    unserved: BTreeMap<i64, u64>,
}

impl Warm {
    pub(crate) fn new(standing: FrozenState, limits: Limits, unserved: BTreeMap<i64, u64>) -> Self {
        Self { standing, limits, unserved }
    }

    /// An instance in this state, which its resets return to. Its process is made by its first
    /// call.
    #[must_use]
    pub fn instance(&self) -> Instance {
        Instance::new(self.standing.clone(), self.limits.clone())
    }

    /// Whether calls go to the port that it listens on, and not to its standard input.
    #[must_use]
    pub fn listens(&self) -> bool {
        matches!(
            self.standing.rest.wait,
            IdleWait::Parked(InputSource::Port) | IdleWait::Resting(InputSource::Port)
        )
    }

    /// Whether it has `/dev/afresh/generation` open or mapped, from which it learns that it runs in
    /// another clone.
    #[must_use]
    pub fn watches_generation(&self) -> bool {
        self.standing.rest.watches_generation
    }

    /// The content of its memory: that of its first process, then that of others.
    #[must_use]
    pub fn image(&self) -> Image {
        Image::join(&self.standing.images)
    }

    /// System calls that were answered with `ENOSYS` while it became warm: how often, by number.
    #[must_use]
    pub fn unserved(&self) -> &BTreeMap<i64, u64> {
        &self.unserved
    }

    /// How memory is reset.
    #[must_use]
    pub fn resets_by(&self) -> Strategy {
        match self.limits.strategy {
            Strategy::Discard => Strategy::Discard,
            _ => Strategy::WriteSet(None),
        }
    }

    /// Sets how memory is reset: by a write set, or, for comparisons, by discarding.
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.limits.strategy = strategy;
        self
    }
}
