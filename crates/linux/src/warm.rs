//! A warm program: frozen where it first waited for input, and what every instance of it starts from.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use afresh_memory::{Image, Strategy};

use crate::instance::Instance;
use crate::personality::Ear;
use crate::reach::Destination;
use crate::standing::{Standing, Wait};

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

/// What each call may take, and how memory is reset.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) output: usize,
    pub(crate) time: Duration,
    /// How long a heard call goes on once it is answered.
    pub(crate) slice: Option<Duration>,
    pub(crate) strategy: Strategy,
    /// Where it may connect to.
    pub(crate) granted: Arc<[Destination]>,
    /// Pages of a write set beyond which it is not copied but learned anew.
    pub(crate) write_set: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            output: 64 << 20,
            time: Duration::from_secs(10),
            slice: None,
            strategy: Strategy::Auto,
            granted: [].into(),
            write_set: 8192,
        }
    }
}

/// A program that waits for input, frozen. Cheap to clone; usable from any thread.
///
/// A call goes in on descriptor 0 and out on descriptor 1, and lasts until the program waits for more input than there is. A program that
/// reads no input but listens on a port is called through that: see [`Instance::call`].
#[derive(Clone, Debug)]
pub struct Warm {
    pub(crate) standing: Standing,
    pub(crate) limits: Limits,
    unserved: BTreeMap<i64, u64>,
}

impl Warm {
    pub(crate) fn new(standing: Standing, limits: Limits, unserved: BTreeMap<i64, u64>) -> Self {
        Self { standing, limits, unserved }
    }

    /// An instance in this state, which its resets return to. Its process is made by its first call.
    #[must_use]
    pub fn instance(&self) -> Instance {
        Instance::new(self.standing.clone(), self.limits.clone())
    }

    /// Whether calls go to the port that it listens on, and not to its standard input.
    #[must_use]
    pub fn listens(&self) -> bool {
        matches!(self.standing.rest.wait, Wait::Parked(Ear::Port) | Wait::Resting(Ear::Port))
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
