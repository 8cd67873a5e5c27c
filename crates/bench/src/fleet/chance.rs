//! Random times and snapshots.

use afresh_serve::fleet::policy::SplitMix64;

/// Microseconds in a second.
pub(super) const SECOND: u64 = 1_000_000;

/// Random times and templates.
pub(super) struct Chance(pub(super) SplitMix64);

impl Chance {
    /// Above 0, at most 1.
    fn part(&mut self) -> f64 {
        ((self.0.next_word() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Microseconds, by an exponential law.
    pub(super) fn time(&mut self, seconds: f64) -> u64 {
        (-self.part().ln() * seconds * SECOND as f64) as u64
    }

    /// A snapshot, by a law of powers: the most wanted one about a tenth of all.
    pub(super) fn snapshot(&mut self, count: usize) -> usize {
        let place = (count as f64).powf(self.part()) - 1.0;
        (place as usize).min(count - 1)
    }
}
