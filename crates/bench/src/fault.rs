//! The cost of a fresh page: the kernel's ways, each idea alone, and the pool, in one run.
//!
//! A *cycle* takes memory, touches it and gives it back; the clock is read between the three. The
//! strategies run interleaved, one cycle each a round, so a disturbance meets all of them, and the
//! same think time separates any two cycles. Figures are per page touched.
//!
//! [`fault`] runs everything and reports a [`Row`](crate::Row) for each case, strategy and number
//! of threads.

mod around;
mod case;
mod folios;
mod kernel;
mod pooled;
mod runner;
mod strategies;

use case::Case;
pub use runner::{Options, fault};

use std::time::Instant;

use anyhow::Result;

/// One cycle: its three parts, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    take: f64,
    touch: f64,
    give: f64,
    /// Instructions of the thread, in user mode and in the kernel; zero where they cannot be
    /// counted.
    instructions: f64,
}

impl Sample {
    fn whole(self) -> f64 {
        self.take + self.touch + self.give
    }
}

/// One way to obtain memory. An instance belongs to one thread.
trait Strategy: Send {
    /// Runs a cycle.
    fn cycle(&mut self, case: &Case) -> Result<Sample>;

    /// Prepares the next cycle, off the clock.
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }

    /// Nanoseconds a background thread has worked for this strategy so far.
    fn background(&self) -> f64 {
        0.0
    }
}

/// Times the three parts of a cycle.
struct Clock {
    last: Instant,
}

impl Clock {
    fn start() -> Self {
        Self { last: Instant::now() }
    }

    /// The cycle whose three parts have been timed.
    fn sample(take: f64, touch: f64, give: f64) -> Sample {
        Sample { take, touch, give, instructions: 0.0 }
    }

    /// Nanoseconds since the last call.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let lap = now.duration_since(self.last).as_nanos() as f64;
        self.last = now;
        lap
    }
}
