//! Memory pressure: the share of time for which tasks wait for memory.
//!
//! Promises: a look reads one small file. A share is that of the time since the look before, so it falls as soon as
//! the pressure does. Where the kernel does not report it, there is no pressure.

use std::time::{Duration, Instant};

use afresh_sys::host;

/// Time between two looks.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Looks at the memory pressure.
pub(crate) struct PressureGauge {
    /// When the last one was, and how long tasks had waited until then.
    last: Option<(Instant, Duration)>,
}

impl PressureGauge {
    pub(crate) fn new() -> Self {
        Self { last: host::memory_stalls().map(|stalls| (Instant::now(), stalls)) }
    }

    /// The percentage of the time since the last look in which some task waited for memory; `None` at the first one,
    /// and where it is not known.
    pub(crate) fn percent(&mut self) -> Option<u32> {
        let now = host::memory_stalls().map(|stalls| (Instant::now(), stalls));
        let before = std::mem::replace(&mut self.last, now)?;
        let (at, stalls) = now?;
        share(at.duration_since(before.0), stalls.saturating_sub(before.1))
    }
}

fn share(time: Duration, stalled: Duration) -> Option<u32> {
    let percent = (stalled.as_micros() * 100).checked_div(time.as_micros())?;
    // The two are not read at the same moment.
    Some(u32::try_from(percent.min(100)).unwrap_or(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_that_of_the_time_between_two_looks() {
        let millis = Duration::from_millis;
        assert_eq!(share(millis(1000), millis(0)), Some(0));
        assert_eq!(share(millis(1000), millis(255)), Some(25));
        assert_eq!(share(millis(1000), millis(1001)), Some(100));
        assert_eq!(share(millis(0), millis(1)), None);
        assert_eq!(share(Duration::MAX, Duration::MAX), Some(100));
    }
}
