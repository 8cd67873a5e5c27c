//! The use of one sandbox: its processor time, and samples of its memory and files.
//!
//! Processor time is that of calls and of background work, without their waits.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::lock::lock;
use crate::sandbox::records::record::milliseconds;

/// Maximum samples of a sandbox.
const MAX_SAMPLES: usize = 120;

/// The use of a sandbox, and samples of it.
#[derive(Default)]
pub(crate) struct Usage {
    /// Nanoseconds of CPU time.
    ran: AtomicU64,
    pub(crate) samples: Mutex<Samples>,
}

#[derive(Default)]
pub(crate) struct Samples {
    pub(crate) all: VecDeque<Sample>,
    /// When the last sample was taken, and the time that it had run by then.
    last: Option<(Instant, u64)>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Sample {
    /// Milliseconds since 1970.
    pub(crate) time: u64,
    pub(crate) processor: f64,
    pub(crate) memory: u64,
    pub(crate) files: u64,
}

impl Usage {
    /// It took this CPU time.
    pub(crate) fn ran(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.ran.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Takes a sample. `sizes` are bytes of memory and of files, unless the sandbox is called or
    /// saved.
    pub(crate) fn sample(&self, now: SystemTime, age: Duration, sizes: Option<(u64, u64)>) {
        let ran = self.ran.load(Ordering::Relaxed);
        let mut samples = lock(&self.samples);
        let (time, before) = match samples.last {
            Some((taken, before)) => (taken.elapsed(), before),
            None => (age, 0),
        };
        let share = ran.saturating_sub(before) as f64 / time.as_nanos().max(1) as f64;
        let last = samples.all.back().copied().unwrap_or_default();
        let (memory, files) = sizes.unwrap_or((last.memory, last.files));
        let processor = (share * 100.0).min(100.0);
        if samples.all.len() >= MAX_SAMPLES {
            samples.all.pop_front();
        }
        samples.all.push_back(Sample { time: milliseconds(now), processor, memory, files });
        samples.last = Some((Instant::now(), ran));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_bounded_and_have_the_share_of_time() {
        let usage = Usage::default();
        usage.ran(Duration::from_secs(5));
        usage.sample(SystemTime::UNIX_EPOCH, Duration::from_secs(10), Some((7, 8)));
        assert_eq!(lock(&usage.samples).all[0].processor, 50.0);
        for second in 1..200 {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
            usage.sample(time, Duration::ZERO, None);
        }
        let samples = lock(&usage.samples);
        assert_eq!(samples.all.len(), MAX_SAMPLES);
        let last = samples.all.back().unwrap();
        assert_eq!((last.time, last.processor, last.memory, last.files), (199_000, 0.0, 7, 8));
    }
}
