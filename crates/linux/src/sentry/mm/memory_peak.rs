//! The peak of the memory that guests map on a thread, for the cost of calls.
//!
//! Promises: a measurement within another one leaves the outer one as it is.

use std::cell::Cell;

thread_local! {
    /// The peak since the present measurement began.
    static PEAK: Cell<u64> = const { Cell::new(0) };
}

/// A measurement of the peak of mapped memory on this thread: the bytes that the processes of a
/// program map together, as its memory limit counts them.
#[derive(Debug)]
pub struct MemoryPeak {
    /// The peak of the measurement around it.
    outer: u64,
}

impl MemoryPeak {
    /// Begins with a program that has mapped so many bytes.
    #[must_use]
    pub fn start(mapped: u64) -> Self {
        Self { outer: PEAK.replace(mapped) }
    }

    /// The peak of the measurement that has begun last on this thread, until now.
    #[must_use]
    pub fn until_now() -> u64 {
        PEAK.get()
    }

    /// The peak since the start, on the same thread.
    #[must_use]
    pub fn stop(self) -> u64 {
        let peak = PEAK.get();
        PEAK.set(peak.max(self.outer));
        peak
    }
}

/// Notes the bytes that a guest of this thread has mapped now.
pub(in crate::sentry) fn note_mapped(bytes: u64) {
    if bytes > PEAK.get() {
        PEAK.set(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_within_another_leaves_the_outer_peak() {
        let outer = MemoryPeak::start(10);
        note_mapped(50);
        let inner = MemoryPeak::start(20);
        note_mapped(30);
        assert_eq!(MemoryPeak::until_now(), 30);
        assert_eq!(inner.stop(), 30);
        assert_eq!(outer.stop(), 50);
    }
}
