//! Making memory zero, and finding out whether it is.
//!
//! Two ways. [`hot`] goes through the caches (`rep stosb`), [`cold`] past them (non-temporal
//! stores); on processors other than x86-64 both are the C library's `memset`, which on arm64
//! zeroes whole cache lines (`dc zva`). A background thread takes the cold way: it must not push
//! the working set of the program out of the caches it shares. A taker that zeroes a large block
//! for itself wants the faster one, and that depends on whether the block is still in the caches,
//! which is unknown: so [`ZeroMethodSelector`] measures. `rep stosb` needs long runs: a page at a
//! time it is several times slower than 64 KiB at a time, so single pages go the cold way.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

#[cfg(any(not(target_arch = "x86_64"), miri))]
mod portable;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;

#[cfg(any(not(target_arch = "x86_64"), miri))]
pub(crate) use portable::{cold, hot};
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) use x86_64::{cold, hot};

/// Picks the faster way for large blocks by keeping an average of their costs.
///
/// Memory zeroed again within moments is likely still in the caches, other memory is not: each of
/// the two situations has separate averages.
#[derive(Debug)]
pub(crate) struct ZeroMethodSelector {
    born: Instant,
    /// When a large block was zeroed last, in nanoseconds since birth.
    last: AtomicU64,
    moments_ago: MethodAverages,
    long_ago: MethodAverages,
}

/// The costs of the two ways in one situation.
#[derive(Debug)]
struct MethodAverages {
    /// Turns of a trial; only the second half counts: where memory is zeroed again and again, the
    /// first turns after a change find the caches as the other way left them.
    trial: u32,
    /// Picoseconds a cache line, averaged; zero until measured.
    hot: AtomicU32,
    cold: AtomicU32,
    turns: AtomicU32,
}

/// Memory zeroed past the caches costs its user a miss a page; added to the cost of the cold way.
const MISS: u32 = 100;
/// Turns in a period; each period tries the way that looks slower.
const PERIOD: u32 = 128;
/// Smaller blocks are neither measured nor chosen for.
const MIN_MEASURED_BYTES: usize = 256 << 10;
/// Shorter gaps count as moments, in nanoseconds.
const MOMENTS: u64 = 1_000_000;

impl Default for ZeroMethodSelector {
    fn default() -> Self {
        Self {
            born: Instant::now(),
            last: 0.into(),
            moments_ago: MethodAverages::new(8),
            long_ago: MethodAverages::new(1),
        }
    }
}

impl ZeroMethodSelector {
    /// Zeroes memory that will be used soon.
    ///
    /// # Safety
    /// As for [`cold`].
    pub(crate) unsafe fn zero(&self, start: *mut u8, len: usize) {
        if len < MIN_MEASURED_BYTES {
            // SAFETY: the caller's promise.
            return unsafe { cold(start, len) };
        }
        let began = self.born.elapsed().as_nanos() as u64;
        let gap = began.saturating_sub(self.last.load(Ordering::Relaxed));
        let averages = if gap < MOMENTS { &self.moments_ago } else { &self.long_ago };
        let (turn, take_hot) = averages.choose();
        // SAFETY: the caller's promise.
        unsafe {
            if take_hot {
                hot(start, len);
            } else {
                cold(start, len);
            }
        }
        let ended = self.born.elapsed().as_nanos() as u64;
        self.last.store(ended, Ordering::Relaxed);
        averages.learn(turn, take_hot, (ended - began) * 1000 / (len as u64 / 64));
    }
}

impl MethodAverages {
    fn new(trial: u32) -> Self {
        Self { trial, hot: 0.into(), cold: 0.into(), turns: 0.into() }
    }

    /// Counts a turn, and returns whether to take the hot way in it.
    fn choose(&self) -> (u32, bool) {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        let (hot, cold) = (self.hot.load(Ordering::Relaxed), self.cold.load(Ordering::Relaxed));
        // Each is tried before they compare.
        let way = if turn < 2 * self.trial {
            turn < self.trial
        } else {
            (hot <= cold) != (turn % PERIOD < self.trial)
        };
        (turn, way)
    }

    /// Records the cost of a way, in picoseconds a cache line.
    fn learn(&self, turn: u32, hot: bool, picoseconds: u64) {
        let turn = turn % PERIOD;
        if turn < 2 * self.trial && turn % self.trial < self.trial / 2 {
            return;
        }
        let cost = u32::try_from(picoseconds).unwrap_or(u32::MAX / 2).max(1);
        let (average, cost) =
            if hot { (&self.hot, cost) } else { (&self.cold, cost.saturating_add(MISS)) };
        let old = average.load(Ordering::Relaxed);
        // Down fast, up slowly: spikes depend more on the neighbours than on the way.
        let new = match old {
            0 => cost,
            old if cost < old => old - (old - cost) / 2,
            old => old + (cost - old) / 16,
        };
        average.store(new, Ordering::Relaxed);
    }
}

/// Whether every byte is zero; stops at the first that is not.
///
/// # Safety
/// `start .. start + len` must be mapped and readable, both ends multiples of 64, and not be
/// written during the call.
pub(crate) unsafe fn is_zero(start: *const u8, len: usize) -> bool {
    debug_assert!((start as usize).is_multiple_of(64) && len.is_multiple_of(64));
    // SAFETY: the caller promises the range; `u64` is aligned because the start is.
    (0..len / 64).all(|line| unsafe {
        let words = start.add(line * 64).cast::<[u64; 8]>().read();
        words.iter().fold(0, |all, word| all | word) == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Lines([u8; 512]);

    #[test]
    fn every_way_zeroes_the_whole_range_and_nothing_beside_it() {
        let ways: [fn(*mut u8, usize); 3] = [
            // SAFETY: the test passes ranges inside its own buffer.
            |p, n| unsafe { ZeroMethodSelector::default().zero(p, n) },
            // SAFETY: the test passes ranges inside its own buffer.
            |p, n| unsafe { hot(p, n) },
            // SAFETY: as above.
            |p, n| unsafe { cold(p, n) },
        ];
        for zero in ways {
            let mut lines = Lines([0xa5; 512]);
            // SAFETY: 64 .. 448 is inside the buffer.
            let inner = unsafe { lines.0.as_mut_ptr().add(64) };
            zero(inner, 384);
            assert!(lines.0[..64].iter().chain(&lines.0[448..]).all(|b| *b == 0xa5));
            assert!(lines.0[64..448].iter().all(|b| *b == 0));
        }
    }

    #[test]
    fn the_cheaper_way_is_chosen_and_the_other_is_tried_now_and_then() {
        let averages = MethodAverages::new(8);
        let run = |turns: u32, hot_cost: u64| {
            let mut hot_turns = 0;
            for _ in 0..turns {
                let (turn, hot) = averages.choose();
                hot_turns += u32::from(hot);
                averages.learn(turn, hot, if hot { hot_cost } else { 1000 });
            }
            hot_turns
        };
        assert_eq!(run(2 * PERIOD, 2000), 16);
        // The situation changes: the trials find out.
        run(4 * PERIOD, 500);
        assert_eq!(run(PERIOD, 500), PERIOD - 8);
    }

    #[test]
    fn one_set_bit_anywhere_is_not_zero() {
        let mut lines = Lines([0; 512]);
        // SAFETY: the whole buffer.
        assert!(unsafe { is_zero(lines.0.as_ptr(), 512) });
        for at in [0, 63, 64, 300, 511] {
            lines.0[at] = 1;
            // SAFETY: the whole buffer.
            assert!(!unsafe { is_zero(lines.0.as_ptr(), 512) });
            lines.0[at] = 0;
        }
    }
}
