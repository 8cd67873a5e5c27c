//! A warm program: frozen at its first wait for input, and the start of every instance.

use std::collections::BTreeMap;

use afresh_memory::{Image, Strategy};

use crate::frozen_state::{FrozenState, IdleWait};
use crate::instance::Instance;
use crate::limits::Limits;
use crate::sentry::InputSource;

/// A frozen program that waits for input. Cheap to clone; usable from any thread.
///
/// A call sends its input to descriptor 0, and its answer is the output on descriptor 1 until the
/// program waits for more input. A program that listens on a port instead of reading input is
/// called through the port: see [`Instance::call`].
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

    /// An instance in this state, to which its resets return. Its first call makes its process.
    #[must_use]
    pub fn instance(&self) -> Instance {
        Instance::new(self.standing.clone(), self.limits.clone())
    }

    /// Whether calls go to the port on which it listens, instead of its standard input.
    #[must_use]
    pub fn listens(&self) -> bool {
        matches!(
            self.standing.rest.wait,
            IdleWait::Parked(InputSource::Port) | IdleWait::Resting(InputSource::Port)
        )
    }

    /// Whether it has `/dev/afresh/generation` open or mapped, which shows it that it runs in
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
