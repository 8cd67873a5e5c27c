//! Costs of operations on this host, measured once.
//!
//! The prices differ by an order of magnitude between bare metal and a nested virtual machine, so
//! the choice between learning and discarding is made with measured ones. `afresh doctor` prints
//! them.

use std::time::Instant;

use afresh_sys::{
    Advice, Feature, Features, InheritedCell, PAGE_SIZE, PageRange, Protection, Reservation,
};

use crate::tracker;
use crate::{Tracker, TrackerKind};

/// Prices in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CostModel {
    /// Copying a page whose source and target are in the cache.
    pub copy_page: f64,
    /// The first write to a fresh page: fault and zeroing or copy.
    pub fault: f64,
    /// Tracking the first write to a protected page, in addition to the fault.
    pub notice: f64,
    /// An `madvise` with nothing to discard.
    pub discard_call: f64,
    /// Discarding one resident page.
    pub discard_page: f64,
}

/// Pages to measure on: large enough for a mean, small enough to stay in the second-level cache.
const SAMPLE: usize = 64;
const ROUNDS: usize = 5;

impl CostModel {
    /// Prices of a typical host, used where measuring fails.
    const TYPICAL: Self = Self {
        copy_page: 60.0,
        fault: 700.0,
        notice: 2500.0,
        discard_call: 400.0,
        discard_page: 100.0,
    };

    /// The prices of this host, measured at first use in about a millisecond.
    pub fn host() -> &'static CostModel {
        static HOST: InheritedCell<CostModel> = InheritedCell::new();
        HOST.get_or_make(|| Self::measure().unwrap_or(Self::TYPICAL))
    }

    /// Cost of resetting a write set of `set` pages, after this run added `learned` of them.
    #[must_use]
    pub fn write_set(&self, set: usize, learned: usize) -> f64 {
        set as f64 * self.copy_page + learned as f64 * (self.notice + self.fault)
    }

    /// Cost of discarding `written` pages and faulting as many in the next run.
    #[must_use]
    pub fn discard(&self, written: usize) -> f64 {
        self.discard_call + written as f64 * (self.discard_page + self.fault)
    }

    fn measure() -> Option<Self> {
        let memory = std::sync::Arc::new(Reservation::new(2 * SAMPLE).ok()?);
        let target = PageRange::new(0, SAMPLE);
        let source = PageRange::new(SAMPLE, SAMPLE);
        memory.map_anonymous(PageRange::new(0, 2 * SAMPLE), Protection::ReadWrite).ok()?;
        memory.advise(PageRange::new(0, 2 * SAMPLE), Advice::NoHugePage).ok();
        let touch = |range: PageRange| {
            for page in range.start..range.end() {
                // SAFETY: the page was just mapped readable and writable and is used here only.
                unsafe { memory.page_ptr(page).write_volatile(1) };
            }
        };
        touch(source);
        let mut best = [f64::INFINITY; 4];
        let mut note = |slot: usize, started: Instant, n: usize| {
            let ns = started.elapsed().as_nanos() as f64 / n as f64;
            best[slot] = best[slot].min(ns);
        };
        for _ in 0..ROUNDS {
            let t = Instant::now();
            touch(target);
            note(0, t, SAMPLE);
            for _ in 0..2 {
                let t = Instant::now();
                for page in 0..SAMPLE {
                    // SAFETY: both pages were mapped above and do not overlap.
                    unsafe {
                        memory
                            .page_ptr(page)
                            .copy_from_nonoverlapping(memory.page_ptr(SAMPLE + page), PAGE_SIZE);
                    }
                }
                note(1, t, SAMPLE);
            }
            let t = Instant::now();
            memory.advise(target, Advice::Discard).ok()?;
            note(2, t, SAMPLE);
            let t = Instant::now();
            memory.advise(target, Advice::Discard).ok()?;
            note(3, t, 1);
        }
        let [fault, copy_page, discard, discard_call] = best;
        let discard_page = (discard - discard_call / SAMPLE as f64).max(0.0);
        let notice = Self::measure_notice(&memory, target, fault).unwrap_or(Self::TYPICAL.notice);
        Some(Self { copy_page, fault, notice, discard_call, discard_page })
    }

    fn measure_notice(
        memory: &std::sync::Arc<Reservation>,
        target: PageRange,
        fault: f64,
    ) -> Option<f64> {
        let features = Features::host();
        let kind = [
            (Feature::UffdSigbus, TrackerKind::UffdSigbus),
            (Feature::Mprotect, TrackerKind::Mprotect),
        ]
        .into_iter()
        .find(|(feature, _)| features.has(*feature))?
        .1;
        let mut tracker: Box<dyn Tracker> =
            tracker::build(kind, memory, 0, target.len, None).ok()?;
        tracker.watch(target).ok()?;
        let t = Instant::now();
        // Backwards, so that no window opens more than one page.
        for page in (0..target.len).rev() {
            // SAFETY: mapped by the caller; the tracker lifts the protection.
            unsafe { memory.page_ptr(page).write_volatile(2) };
        }
        let ns = t.elapsed().as_nanos() as f64 / target.len as f64;
        let mut written = Vec::new();
        tracker.drain(&mut written).ok()?;
        Some((ns - fault).max(0.0))
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn measured_prices_are_positive_and_faults_cost_more_than_copies() {
        let cost = CostModel::host();
        assert!(cost.copy_page > 0.0 && cost.discard_call > 0.0, "{cost:?}");
        assert!(cost.fault > cost.copy_page, "{cost:?}");
    }
}
