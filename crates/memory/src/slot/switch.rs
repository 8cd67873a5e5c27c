//! Moving a slot to a related image by touching only what differs, and taking its present content as
//! its image.
//!
//! Promises: afterwards the slot equals the new image and returns to it. The pages that differ are
//! copied and stay in the write set; the mappings below still show the old image, which nothing may
//! uncover: as long as that is so the slot is `stale`, and whoever would discard private pages maps
//! the new image afresh instead.

use afresh_sys::PAGE_SIZE;
use afresh_sys::planted::{self, Bug};

use super::{Method, Slot};
use crate::{Image, ImageError, ResetError, SlotError};

impl Slot {
    /// Puts a related image into the slot: like [`Slot::set_image`] with the same regions, at the cost
    /// of the pages that differ between the images and of those that were written since the last
    /// reset. Returns how many pages were copied; where copying is not possible or not worthwhile the
    /// image is mapped anew, and the answer is 0.
    ///
    /// No guest may run until it returns.
    ///
    /// # Errors
    /// [`SlotError`]; the slot is quarantined unless the image just did not fit.
    pub fn switch(&mut self, image: &Image) -> Result<usize, SlotError> {
        self.check()?;
        let regions = self.regions.clone();
        self.checked_regions(image, &regions)?;
        let differing = self.image.differing(image);
        let pages: usize = differing.iter().map(|range| range.len).sum();
        let tracked = matches!(self.method, Method::WriteSet(_)) && !self.adapt.discarding();
        let fits = pages <= self.config.write_set_limit && pages <= image.pages() / 4 + 1024;
        if !tracked
            || !fits
            || image.pages() != self.image.pages()
            || self.end != self.initial_end()
        {
            self.set_image(image, &regions)?;
            return Ok(0);
        }
        let result = (|| {
            let inside: Vec<_> = differing
                .iter()
                .flat_map(|range| regions.iter().filter_map(|region| region.intersect(*range)))
                .collect();
            // They are copied over the mapping, which may have to show its own content first.
            inside.iter().try_for_each(|range| self.image.resolve(*range))?;
            if let Method::WriteSet(tracker) = &mut self.method {
                self.written.clear();
                tracker.drain(&mut self.written)?;
                tracker.open(&inside)?;
            }
            self.write_set.learn(&self.written);
            self.write_set.learn(planted::but_last(Bug::Switch, &inside));
            self.image = image.clone();
            self.stale = true;
            self.plan()?;
            // SAFETY: every page of the set is accessible and was opened for writing when it was
            // learned; the caller promises that no guest runs.
            unsafe { self.write_set.copy_back() };
            Ok(self.write_set.len())
        })();
        if let Err(error) = &result {
            let error: &SlotError = error;
            self.quarantine(error.to_string());
        }
        result
    }

    /// Makes the present content the image that the slot returns to, and returns it. Stores the pages
    /// that changed since the image before, which it shares the rest with; copies nothing back.
    ///
    /// # Errors
    /// As [`Slot::freeze`]; the slot keeps its image then.
    pub fn checkpoint(&mut self) -> Result<Image, ImageError> {
        let image = self.freeze()?;
        let tracked = matches!(self.method, Method::WriteSet(_)) && !self.adapt.discarding();
        if tracked && self.end == self.initial_end() {
            self.image = image.clone();
            self.stale = true;
            self.plan()?;
        } else {
            let regions = self.regions.clone();
            self.set_image(&image, &regions).map_err(|error| match error {
                SlotError::System(error) => ImageError::System(error),
                SlotError::Image(error) => error,
                other => ImageError::Read(std::io::Error::other(other.to_string())),
            })?;
        }
        Ok(image)
    }

    /// Maps the image afresh, so that discarding a private page uncovers the right content.
    pub(super) fn refresh_mappings(&mut self) -> Result<(), ResetError> {
        let (image, regions) = (self.image.clone(), self.regions.clone());
        let adapt = std::mem::take(&mut self.adapt);
        let outcome = self.set_image(&image, &regions);
        self.adapt = adapt;
        outcome.map_err(|error| match error {
            SlotError::System(error) => ResetError::System(error),
            SlotError::Track(error) => ResetError::Track(error),
            SlotError::Image(error) => ResetError::Image(error),
            other => ResetError::Quarantined { reason: other.to_string() },
        })
    }

    /// Those of `runs` whose bytes differ from the image.
    pub(super) fn changed(&self, runs: &[afresh_sys::PageRange]) -> Vec<afresh_sys::PageRange> {
        let mut changed = Vec::new();
        for page in runs.iter().flat_map(|range| range.start..range.end()) {
            // SAFETY: callers pass accessible pages while no guest runs.
            let live =
                unsafe { std::slice::from_raw_parts(self.base().add(page * PAGE_SIZE), PAGE_SIZE) };
            if !self.image.page_is(page, live) {
                crate::tracker::push_run(&mut changed, afresh_sys::PageRange::new(page, 1));
            }
        }
        planted::but_last(Bug::Freeze, &changed).to_vec()
    }
}
