//! The moment after a wait of any length: configured times have no upper limit.

use std::time::{Duration, Instant};

/// A wait that no server outlives.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The moment `wait` after `from`, or one in the far future where the clock has none.
pub(crate) fn deadline_after(from: Instant, wait: Duration) -> Instant {
    from.checked_add(wait).or_else(|| from.checked_add(FAR)).unwrap_or(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_exceeds_the_clock_ends_in_the_far_future() {
        let now = Instant::now();
        let wait = Duration::from_secs(2);
        assert_eq!(deadline_after(now, wait), now + wait);
        for wait in [Duration::MAX, Duration::from_secs(u64::MAX)] {
            assert_eq!(deadline_after(now, wait), now + FAR);
            // A deadline may be moved.
            assert_eq!(deadline_after(deadline_after(now, wait), wait), now + FAR + FAR);
        }
    }
}
