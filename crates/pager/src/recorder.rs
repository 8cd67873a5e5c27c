//! Working sets: which pages runs touch first, learnt over several runs.
//!
//! A restore with [`Options::recording`](crate::Options::recording) brings in exactly the pages
//! that are touched, and [`Restore::present`](crate::Restore::present) lists them. Runs of one
//! guest agree on most pages but not on their order, so the set is kept and the order is not; a
//! page belongs to it when enough of the runs touched it.

use afresh_sys::PageRange;

/// Counts, for every page, the runs that touched it.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    runs: u32,
    counts: Vec<u32>,
}

impl Recorder {
    /// Nothing recorded yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of runs recorded.
    #[must_use]
    pub fn runs(&self) -> u32 {
        self.runs
    }

    /// Adds a run that touched `pages`, which do not overlap.
    pub fn add(&mut self, pages: &[PageRange]) {
        self.runs += 1;
        for range in pages {
            if self.counts.len() < range.end() {
                self.counts.resize(range.end(), 0);
            }
            self.counts[range.start..range.end()].iter_mut().for_each(|count| *count += 1);
        }
    }

    /// The pages that at least `share` (0 to 1) of the runs touched, in address order.
    #[must_use]
    pub fn pages(&self, share: f64) -> Vec<PageRange> {
        let least = (f64::from(self.runs) * share).ceil().max(1.0);
        let mut set: Vec<PageRange> = Vec::new();
        for (page, count) in self.counts.iter().enumerate() {
            if f64::from(*count) < least {
                continue;
            }
            match set.last_mut() {
                Some(last) if last.end() == page => last.len += 1,
                _ => set.push(PageRange::new(page, 1)),
            }
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_belongs_to_the_set_when_enough_runs_touched_it() {
        let mut recorder = Recorder::new();
        assert!(recorder.pages(0.0).is_empty());
        recorder.add(&[PageRange::new(1, 3), PageRange::new(9, 1)]);
        recorder.add(&[PageRange::new(2, 3)]);
        assert_eq!(recorder.pages(0.0), [PageRange::new(1, 4), PageRange::new(9, 1)]);
        assert_eq!(recorder.pages(1.0), [PageRange::new(2, 2)]);
        assert_eq!(recorder.runs(), 2);
    }
}
