//! Lost pages of a slot: those that were touched and will never be in place.
//!
//! Promises: from the first such access on the memory is closed, and [`PageLoss::is_known`] says
//! so. A guest traps at its next access. Code of the host cannot be ended there, nor can
//! instructions of a guest for which its runtime has no trap. In a slot whose user checks the loss
//! ([`crate::SlotConfig::checks_loss`]) they get zeros in place of the pages that they touch. That
//! user refuses every result from then on, so that nothing derived from these zeros leaves the
//! guest.

use std::sync::atomic::{AtomicUsize, Ordering};

/// No page was lost.
const NONE: usize = usize::MAX;
/// A page was lost, and it is not known which.
const UNKNOWN: usize = usize::MAX - 1;

/// Whether a slot has lost a page. That is permanent for the slot.
#[derive(Debug)]
pub struct PageLoss {
    /// The first lost page, or one of the constants above.
    page: AtomicUsize,
    /// Accesses to closed memory that got zeros.
    stand_ins: AtomicUsize,
}

impl Default for PageLoss {
    fn default() -> Self {
        Self { page: AtomicUsize::new(NONE), stand_ins: AtomicUsize::new(0) }
    }
}

impl PageLoss {
    /// Whether a page was lost, and zeros may have been read in its place.
    #[must_use]
    #[inline]
    pub fn is_known(&self) -> bool {
        self.page.load(Ordering::Acquire) != NONE
    }

    /// The first lost page of the slot, where it is known.
    #[must_use]
    pub fn page(&self) -> Option<usize> {
        Some(self.page.load(Ordering::Acquire)).filter(|page| *page < UNKNOWN)
    }

    /// Notes the loss; `true` for the first one.
    pub(super) fn note(&self, page: Option<usize>) -> bool {
        let page = page.unwrap_or(UNKNOWN);
        self.page.compare_exchange(NONE, page, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Pages to each side that the next such access opens. It doubles, so
    /// that code which touches all of the memory faults some twenty times.
    pub(super) fn widen(&self) -> usize {
        let taken = self.stand_ins.fetch_add(1, Ordering::Relaxed).min(usize::BITS as usize - 2);
        (1 << taken) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_lost_page_is_the_one_that_is_named() {
        let loss = PageLoss::default();
        assert!(!loss.is_known());
        assert!(loss.note(Some(7)) && !loss.note(Some(8)) && !loss.note(None));
        assert_eq!((loss.is_known(), loss.page()), (true, Some(7)));
        let unknown = PageLoss::default();
        assert!(unknown.note(None));
        assert_eq!((unknown.is_known(), unknown.page()), (true, None));
    }

    #[test]
    fn every_access_to_closed_memory_opens_more_than_the_last() {
        let loss = PageLoss::default();
        let widths: Vec<usize> = (0..4).map(|_| loss.widen()).collect();
        assert_eq!(widths, [0, 1, 3, 7]);
        (0..100).for_each(|_| _ = loss.widen());
        assert!(loss.widen() >= 1 << 60);
    }
}
