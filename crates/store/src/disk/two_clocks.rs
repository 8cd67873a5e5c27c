//! A time by two clocks: one stands still while the host is suspended, the other may be set.

use std::time::{Duration, Instant, SystemTime};

/// A time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoClocks(Instant, SystemTime);

impl TwoClocks {
    pub(crate) fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    /// Whether `age` has passed since by either clock, or cannot be excluded.
    pub(crate) fn is_older_than(&self, age: Duration) -> bool {
        // A clock that was set back says nothing.
        let wall = self.1.elapsed().unwrap_or(age);
        self.0.elapsed().max(wall) >= age
    }

    /// The same by the clock that stands still, and earlier by the other: as a time before the host
    /// was suspended for as long.
    #[cfg(test)]
    pub(crate) fn before_suspension(self, length: Duration) -> Self {
        Self(self.0, self.1 - length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_old_by_either_clock_and_after_a_clock_was_set_back() {
        let hour = Duration::from_secs(3600);
        let now = TwoClocks::now();
        assert!(!now.is_older_than(hour));
        assert!(now.before_suspension(hour).is_older_than(hour));
        assert!(TwoClocks(now.0, now.1 + hour).is_older_than(hour));
    }
}
