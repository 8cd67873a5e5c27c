//! Reset: bringing a slot back to its image, by each strategy, and the comparison that proves it.

use afresh_sys::planted::{self, Bug};
use afresh_sys::{Advice, PAGE_SIZE, PageRange, Protection};

use super::adapt::NextAction;
use super::{FORKED, Method, Slot, State};
use crate::write_set::restore_if_changed;
use crate::{ResetError, SlotError};

/// The result of a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResetReport {
    /// Pages copied or cleared, or discarded blindly (then all accessible ones).
    pub restored: usize,
    /// Pages that were written for the first time.
    pub learned: usize,
    /// Pages removed because the run had grown the slot.
    pub shrunk: usize,
    /// Whether pages were discarded instead of copied back.
    pub discarded: bool,
}

/// A page that differs from the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Index of the page.
    pub page: usize,
    /// The number of bytes that differ.
    pub bytes: usize,
}

/// The error of a reset whose step failed so.
pub(super) fn reset_error(error: SlotError) -> ResetError {
    match error {
        SlotError::System(error) => ResetError::System(error),
        SlotError::Track(error) => ResetError::Track(error),
        SlotError::Image(error) => ResetError::Image(error),
        other => ResetError::Quarantined { reason: other.to_string() },
    }
}

impl Slot {
    /// Restores every byte from the image, and the initial size.
    ///
    /// No guest may run, and no other thread may use the memory, until it returns.
    ///
    /// # Errors
    /// [`ResetError`]: the slot is quarantined, because its content is unknown.
    #[inline]
    pub fn reset(&mut self) -> Result<ResetReport, ResetError> {
        if self.is_of_parent() {
            self.quarantine(FORKED);
        }
        if !matches!(self.state, State::Ready) {
            self.look_at_state()?;
        }
        if self.capture.is_some() {
            self.settle_for_reset()?;
        }
        match self.try_reset() {
            Ok(report) => {
                self.stats.resets += 1;
                if let Some(every) = self.config.verify_every
                    && let Err(error) = self.verify_sampled(every)
                {
                    self.quarantine(error.to_string());
                    return Err(error);
                }
                Ok(report)
            }
            Err(error) => {
                if !planted::is(Bug::Quarantine) {
                    self.quarantine(error.to_string());
                }
                Err(error)
            }
        }
    }

    /// Closed memory cannot be restored; and once the image is complete nothing more can fail.
    #[cold]
    fn look_at_state(&mut self) -> Result<(), ResetError> {
        if let State::Filling(_) = self.state {
            match self.failure() {
                Some(cause) => self.quarantine(crate::ImageError::Filler(cause).to_string()),
                None if self.image.is_complete() => self.state = State::Ready,
                None => {}
            }
        }
        self.refuse_quarantined()
    }

    /// Has the rest of a capture copied, before the pages change.
    #[cold]
    fn settle_for_reset(&mut self) -> Result<(), ResetError> {
        self.settle_capture().map_err(reset_error)
    }

    fn refuse_quarantined(&self) -> Result<(), ResetError> {
        match self.state.reason() {
            None => Ok(()),
            Some(reason) => Err(ResetError::Quarantined { reason: reason.to_owned() }),
        }
    }

    #[inline]
    fn try_reset(&mut self) -> Result<ResetReport, ResetError> {
        match &mut self.method {
            Method::WriteSet(tracker) => {
                if self.adapt.discarding() {
                    return self.reset_paused();
                }
                self.written.clear();
                tracker.drain(&mut self.written)?;
                let learned = if self.written.is_empty() { 0 } else { self.learn()? };
                // Pages that were noticed one by one, at the price of a fault each.
                let singly = if self.prezeroed.is_empty() {
                    learned
                } else {
                    learned.saturating_sub(self.settle_prezeroed()?)
                };
                let next = self.adapt.next(self.write_set.len());
                if let NextAction::Sample = next {
                    self.sample()?;
                } else {
                    if let NextAction::Look(pages) = next {
                        self.look(pages)?;
                    }
                    // SAFETY: the set holds accessible pages of this slot, opened for writing when
                    // they were learned; `&mut self` and the caller's promise exclude other users.
                    unsafe { self.write_set.copy_back() };
                }
                let restored = self.write_set.len();
                let shrunk =
                    if self.space.end == self.space.initial_end() { 0 } else { self.shrink()? };
                if self.choice.adaptive && self.adapt.record_learned(restored, singly)
                    || restored > self.config.write_set_limit
                {
                    self.pause(restored)?;
                }
                Ok(ResetReport { restored, learned, shrunk, discarded: false })
            }
            Method::Reprotect(_) => self.reset_scan(),
            Method::Discard => self.reset_discard(),
            Method::FullCopy => self.reset_full_copy(),
        }
    }

    /// Takes newly written pages into the write set.
    #[cold]
    fn learn(&mut self) -> Result<usize, ResetError> {
        let learned = self.write_set.learn(planted::but_last(Bug::Learn, &self.written));
        if learned > 0 {
            self.plan()?;
            self.stats.learned += learned as u64;
        }
        Ok(learned)
    }

    /// Compares a few pages of the set with the image, and releases memory that no run has grown
    /// into for long.
    #[cold]
    fn look(&mut self, pages: usize) -> Result<(), ResetError> {
        let (base, initial_end) = (self.base(), self.space.initial_end());
        // SAFETY: as for `copy_back`.
        let (looked, written) =
            unsafe { self.write_set.look(&self.image, base, initial_end, pages) };
        self.adapt.record_comparison(looked, written);
        self.release_growth()
    }

    /// Compares the whole set with the image, restores the differences, and evicts idle pages.
    /// Their private copies are released.
    #[cold]
    fn sample(&mut self) -> Result<(), ResetError> {
        let set = self.write_set.len();
        let (base, initial_end) = (self.base(), self.space.initial_end());
        // SAFETY: as for `copy_back`; pages below the present end are accessible.
        let found =
            unsafe { self.write_set.sample(&self.image, base, initial_end, self.space.end) };
        let evicted: usize = found.evicted.iter().map(|range| range.len).sum();
        let watched_again = planted::but_last(Bug::Rearm, &found.evicted);
        // While the mappings show another image than the slot's, a page must not be thrown away.
        if self.stale() {
            if let Method::WriteSet(tracker) = &mut self.method {
                tracker.arm(watched_again)?;
            }
        } else {
            watched_again.iter().try_for_each(|range| self.throw_away(*range))?;
        }
        self.stats.evicted += evicted as u64;
        self.adapt.sampled(set, found.changed, evicted, found.idle, found.used);
        Ok(())
    }

    /// Throws the private copies of watched pages away, and protects them again.
    fn throw_away(&mut self, range: PageRange) -> Result<(), ResetError> {
        self.space.advise(range, Advice::Discard)?;
        if let Method::WriteSet(tracker) = &mut self.method {
            tracker.rearm(range)?;
        }
        Ok(())
    }

    /// Gives back the memory beyond the initial end, which is hidden, once no run has grown into it
    /// for long. The next growth finds the slot as if it had never grown.
    fn release_growth(&mut self) -> Result<(), ResetError> {
        let from = self.space.initial_end();
        let unused = self.space.high_water > from && self.space.end == from;
        // Under a slot that moved between images there may be one that reached further.
        if !unused || self.stale() || !self.adapt.growth_idle(self.stats.resets) {
            return Ok(());
        }
        let grown = PageRange::new(from, self.space.high_water - from);
        self.space.advise(grown, Advice::Discard)?;
        if let Method::Reprotect(tracker) | Method::WriteSet(tracker) = &mut self.method {
            tracker.hide(grown);
        }
        self.write_set.forget(grown);
        self.settled.retain(|start| !grown.contains(*start));
        self.space.high_water = from;
        self.plan()?;
        Ok(())
    }

    /// Gives up learning for a while: everything is thrown away and left unprotected.
    #[cold]
    fn pause(&mut self, set: usize) -> Result<(), ResetError> {
        if !self.adapt.discarding() {
            // Over the limit, not over the price: start again with an empty set.
            debug_assert!(set > self.config.write_set_limit);
            return self.discard_all();
        }
        self.stats.fallbacks += 1;
        if self.stale() {
            self.refresh_mappings()?;
        } else {
            self.forget_prezeroed();
            self.write_set.clear();
            for range in self.space.ever_accessible() {
                self.space.advise(range, Advice::Discard)?;
            }
        }
        let tracked = self.tracked();
        if let Method::WriteSet(tracker) = &mut self.method {
            tracker.open(&tracked)?;
        }
        Ok(())
    }

    /// The pages whose protection the tracker holds: hidden ones too, where it survives hiding.
    fn tracked(&self) -> Vec<PageRange> {
        match &self.method {
            Method::WriteSet(t) | Method::Reprotect(t) if t.survives_hiding() => {
                self.space.ever_accessible().collect()
            }
            Method::WriteSet(_) | Method::Reprotect(_) => self.space.accessible().collect(),
            Method::Discard | Method::FullCopy => Vec::new(),
        }
    }

    /// A reset while learning is paused.
    fn reset_paused(&mut self) -> Result<ResetReport, ResetError> {
        let report = self.reset_discard()?;
        if self.adapt.discarded() {
            self.discard_all()?;
        }
        Ok(report)
    }

    /// Throws every private page away, forgets the write set and protects everything again.
    pub(super) fn discard_all(&mut self) -> Result<(), ResetError> {
        if self.capture.is_some() {
            self.settle_for_reset()?;
        }
        if self.stale() {
            return self.refresh_mappings();
        }
        self.forget_prezeroed();
        let result = (|| {
            for range in self.space.ever_accessible() {
                self.space.advise(range, Advice::Discard)?;
            }
            self.write_set.clear();
            let tracked = self.tracked();
            if let Method::WriteSet(tracker) | Method::Reprotect(tracker) = &mut self.method {
                for range in tracked.into_iter().filter(|r| !r.is_empty()) {
                    tracker.rearm(range)?;
                }
            }
            Ok(())
        })();
        if let Err(error) = &result {
            let error: &ResetError = error;
            self.quarantine(error.to_string());
        }
        result
    }

    /// Hides the pages that the run grew into. With a tracker they are clean again already.
    #[cold]
    fn shrink(&mut self) -> Result<usize, ResetError> {
        let grown = self.space.grown();
        match &mut self.method {
            Method::WriteSet(tracker) if tracker.survives_hiding() => {
                let end = self.space.memory.page_ptr(self.space.first + self.space.end);
                // SAFETY: the grown pages are accessible until they are hidden below; no guest
                // runs.
                unsafe { self.write_set.copy_back_grown(end) };
            }
            Method::Reprotect(_) => {}
            Method::WriteSet(tracker) => {
                tracker.hide(grown);
                self.write_set.forget(grown);
                self.plan()?;
                self.space.advise(grown, Advice::Discard)?;
            }
            Method::Discard => self.space.advise(grown, Advice::Discard)?,
            // SAFETY: the grown pages are accessible until the next line, and no guest runs.
            Method::FullCopy => unsafe { self.overwrite(grown) },
        }
        if planted::is(Bug::GrownSize) {
            return Ok(0);
        }
        self.space.protect(grown, Protection::None)?;
        self.space.end = grown.start;
        self.adapt.grew(self.stats.resets);
        Ok(grown.len)
    }

    fn reset_scan(&mut self) -> Result<ResetReport, ResetError> {
        let base = self.base();
        let Method::Reprotect(tracker) = &mut self.method else {
            return Ok(ResetReport::default());
        };
        self.written.clear();
        tracker.drain(&mut self.written)?;
        let mut restored = 0;
        let written = planted::but_last(Bug::Scan, &self.written);
        for page in written.iter().flat_map(|r| r.start..r.end()) {
            // SAFETY: the tracker reports pages of this slot that were written, so they are
            // accessible unless they were hidden since, which happens only after they were restored
            // and armed.
            unsafe { restore_if_changed(&self.image, page, base.add(page * PAGE_SIZE)) };
            restored += 1;
        }
        tracker.arm(&self.written)?;
        self.release_growth()?;
        let shrunk = if self.space.end == self.space.initial_end() { 0 } else { self.shrink()? };
        Ok(ResetReport { restored, learned: restored, shrunk, discarded: false })
    }

    fn reset_discard(&mut self) -> Result<ResetReport, ResetError> {
        let shrunk = if self.space.end == self.space.initial_end() {
            0
        } else {
            if matches!(self.method, Method::WriteSet(_)) {
                // While learning is paused the grown pages are in no write set.
                self.space.advise(self.space.grown(), Advice::Discard)?;
            }
            self.shrink()?
        };
        let mut restored = 0;
        for region in &self.space.regions {
            let left = usize::from(planted::is(Bug::Discard) && region.len > 1);
            let thrown = PageRange::new(region.start, region.len - left);
            self.space.advise(thrown, Advice::Discard)?;
            restored += region.len;
        }
        Ok(ResetReport { restored, learned: 0, shrunk, discarded: true })
    }

    fn reset_full_copy(&mut self) -> Result<ResetReport, ResetError> {
        self.release_growth()?;
        let shrunk = if self.space.end == self.space.initial_end() { 0 } else { self.shrink()? };
        let mut restored = 0;
        for region in &self.space.regions {
            // SAFETY: a region is accessible, and no guest runs.
            unsafe { self.overwrite(*region) };
            restored += region.len;
        }
        Ok(ResetReport { restored, learned: 0, shrunk, discarded: false })
    }

    #[cold]
    fn verify_sampled(&mut self, every: u32) -> Result<(), ResetError> {
        if every == 0 || !self.stats.resets.is_multiple_of(u64::from(every)) {
            return Ok(());
        }
        match self.verify()?.first() {
            None => Ok(()),
            Some(first) => Err(ResetError::Mismatch { page: first.page }),
        }
    }

    /// Compares every byte of the slot with its image, hidden pages included, and returns the pages
    /// that differ. It must follow a reset. Reading faults pages in, so it is not for the hot path.
    ///
    /// # Errors
    /// [`ResetError`] when the slot is quarantined or its hidden pages cannot be read. A slot whose
    /// hidden pages cannot be hidden again is quarantined.
    pub fn verify(&mut self) -> Result<Vec<Mismatch>, ResetError> {
        self.refuse_quarantined()?;
        self.image.complete()?;
        if planted::is(Bug::Verify) {
            return Ok(Vec::new());
        }
        let hidden = self.space.hidden();
        if hidden.is_empty() {
            return Ok(self.compare());
        }
        // The kernel may have opened some of them before it failed.
        let opened = self.space.protect(hidden, Protection::Read);
        let mismatches = opened.map(|()| self.compare());
        if let Err(error) = self.space.protect(hidden, Protection::None) {
            self.quarantine(format!("pages beyond its end were accessible: {error}"));
            // Their content is not needed any more.
            let _ = self.space.clear(hidden, Protection::None);
            return Err(error.into());
        }
        Ok(mismatches?)
    }

    /// The pages that differ from the image. All of them must be readable.
    fn compare(&mut self) -> Vec<Mismatch> {
        let base = self.base();
        let mut mismatches = Vec::new();
        for page in self.space.ever_accessible().flat_map(|r| r.start..r.end()) {
            // SAFETY: the page is readable, and the caller promises that no guest runs.
            let live = unsafe { std::slice::from_raw_parts(base.add(page * PAGE_SIZE), PAGE_SIZE) };
            if !self.image.page_is(page, live) {
                let bytes = match self.image.page(page) {
                    Some(content) => live.iter().zip(content).filter(|(a, b)| a != b).count(),
                    None => live.iter().filter(|b| **b != 0).count(),
                };
                mismatches.push(Mismatch { page, bytes });
            }
        }
        self.stats.verified += u64::from(mismatches.is_empty());
        mismatches
    }
}
