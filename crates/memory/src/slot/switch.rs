//! Moving a slot to a related image by touching only the differing pages, and taking its present
//! content as its image.
//!
//! Promises: afterwards the slot equals the new image and returns to it. The pages that differ are
//! copied and stay in the write set. The mappings below still show the old image, and must stay
//! covered: until that changes the slot is `stale`, and code that would discard private pages maps
//! the new image instead. A page whose bytes are the same in both may still be the old image's, so
//! the slot holds that image until its mappings show another.

use afresh_sys::planted::{self, Bug};
use afresh_sys::{PAGE_SIZE, PageRange, Protection};

use super::reset::reset_error;
use super::{Method, Slot};
use crate::{Image, ImageError, ResetError, SlotError, TrackError};

impl Slot {
    /// Puts a related image into the slot, like [`Slot::set_image`], at the cost of the pages in
    /// which the images differ and of those that were written since the last reset. A slot of one
    /// region gets the length of the image. Several regions do not change. Returns the number of
    /// examined pages, or 0 if the image was mapped again because copying was impossible or more
    /// expensive.
    ///
    /// No guest may run until it returns.
    ///
    /// # Errors
    /// [`SlotError`]; the slot is quarantined unless the image just did not fit.
    pub fn switch(&mut self, image: &Image) -> Result<usize, SlotError> {
        self.check()?;
        self.settle_capture()?;
        // The copy may be in the mappings already.
        let image = &image.mapped();
        let regions = self.regions_for(image);
        self.checked_regions(image, &regions)?;
        let differing = self.image.differing(image);
        let pages: usize = differing.iter().map(|range| range.len).sum();
        let fits = pages <= self.config.write_set_limit && pages <= image.pages() / 4 + 1024;
        if !self.learns() || !fits {
            self.set_image(image, &regions)?;
            return Ok(0);
        }
        let result = self.copy_over(image, regions, &differing);
        if let Err(error) = &result {
            self.quarantine(error.to_string());
        }
        result
    }

    /// Whether writes are noticed page by page, now.
    pub(super) fn learns(&self) -> bool {
        matches!(self.method, Method::WriteSet(_)) && !self.adapt.discarding()
    }

    /// Whether the mappings show another image than the slot's.
    pub(super) fn stale(&self) -> bool {
        self.shown.is_some()
    }

    /// Returns to `image` from now on, although the mappings do not show it.
    fn stand_on(&mut self, image: &Image) {
        let before = std::mem::replace(&mut self.image, image.clone());
        self.shown.get_or_insert(if planted::is(Bug::Shown) { Image::zero(0) } else { before });
    }

    /// The regions when the slot holds `image`.
    fn regions_for(&self, image: &Image) -> Vec<PageRange> {
        let mut regions = self.space.regions.clone();
        if let [only] = &mut regions[..]
            && only.start == 0
            && image.pages() != self.image.pages()
        {
            only.len = image.pages();
        }
        regions
    }

    /// Makes the slot equal to `image`, which differs from its own in `differing`.
    fn copy_over(
        &mut self,
        image: &Image,
        regions: Vec<PageRange>,
        differing: &[PageRange],
    ) -> Result<usize, SlotError> {
        let target = regions.last().map_or(0, |region| region.end());
        if target > self.space.end {
            self.expose(PageRange::new(self.space.end, target - self.space.end))?;
            self.space.reach(target);
        }
        let inside: Vec<_> = differing
            .iter()
            .flat_map(|range| self.space.accessible().filter_map(|region| region.intersect(*range)))
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
        self.space.regions = regions;
        self.stand_on(image);
        let looked_at = self.write_set.len();
        if !self.image.is_complete() {
            self.write_set.runs().into_iter().try_for_each(|run| self.image.resolve(run))?;
        }
        let (base, end) = (self.base(), self.space.end);
        // SAFETY: every page of the set below `end` is accessible and was opened for writing when
        // it was learned; the caller promises that no guest runs.
        let found = unsafe { self.write_set.sample(&self.image, base, target, end) };
        let crowd = self.write_set.disperse();
        for evicted in [&found.evicted, &crowd] {
            self.watch_again(evicted)?;
        }
        self.plan()?;
        if self.space.end > target {
            self.hide_from(target)?;
        }
        Ok(looked_at)
    }

    /// Protects pages that left the write set; they equal the image. While the mappings show
    /// another image than the slot's, they must not be thrown away.
    fn watch_again(&mut self, evicted: &[PageRange]) -> Result<(), TrackError> {
        self.stats.evicted += evicted.iter().map(|range| range.len as u64).sum::<u64>();
        match &mut self.method {
            Method::WriteSet(tracker) => tracker.arm(planted::but_last(Bug::Rearm, evicted)),
            _ => Ok(()),
        }
    }

    /// Takes the pages from `target` on away. They are zero already, in so far as they stay.
    fn hide_from(&mut self, target: usize) -> Result<(), SlotError> {
        let gone = PageRange::new(target, self.space.end - target);
        match &mut self.method {
            Method::WriteSet(tracker) if !tracker.survives_hiding() => {
                tracker.hide(gone);
                self.write_set.forget(gone);
                self.plan()?;
                // Not discarded, which could uncover an image that was placed here.
                self.space.clear(gone, Protection::None)?;
            }
            _ => self.space.protect(gone, Protection::None)?,
        }
        self.space.end = target;
        Ok(())
    }

    /// Makes an image of the present content and size, to which the slot is reset from then on, and
    /// returns it. It stores the pages that changed, shares the rest with the previous image, and
    /// copies nothing back. Pages that were not written for some checkpoints are watched again, so
    /// that the next checkpoint costs only its changes.
    ///
    /// # Errors
    /// As [`Slot::freeze`]; the slot keeps its image then.
    pub fn checkpoint(&mut self) -> Result<Image, ImageError> {
        let (image, changed) = self.capture()?;
        let learns = self.learns();
        let mut regions = self.space.regions.clone();
        if let Some(last) = regions.last_mut() {
            last.len = self.space.end - last.start;
        }
        let moved = if learns {
            self.space.regions = regions;
            self.stand_on(&image);
            let evicted = self.write_set.settle(&changed);
            let watched = self.watch_again(&evicted).map_err(SlotError::from);
            watched.and_then(|()| Ok(self.plan()?))
        } else {
            self.set_image(&image, &regions)
        };
        moved.map_err(|error| {
            self.quarantine(error.to_string());
            match error {
                SlotError::System(error) => ImageError::System(error),
                SlotError::Image(error) => error,
                other => ImageError::Read(std::io::Error::other(other.to_string())),
            }
        })?;
        Ok(image)
    }

    /// Maps the image afresh, so that discarding a private page uncovers the right content.
    pub(super) fn refresh_mappings(&mut self) -> Result<(), ResetError> {
        let (image, regions) = (self.image.clone(), self.space.regions.clone());
        let adapt = std::mem::take(&mut self.adapt);
        let outcome = self.set_image(&image, &regions);
        self.adapt = adapt;
        outcome.map_err(reset_error)
    }

    /// Those of `runs` whose bytes differ from the image.
    pub(super) fn changed(&self, runs: &[PageRange]) -> Vec<PageRange> {
        let mut changed = Vec::new();
        for page in runs.iter().flat_map(|range| range.start..range.end()) {
            // SAFETY: callers pass accessible pages while no guest runs.
            let live =
                unsafe { std::slice::from_raw_parts(self.base().add(page * PAGE_SIZE), PAGE_SIZE) };
            if !self.image.page_is(page, live) {
                crate::tracker::push_run(&mut changed, PageRange::new(page, 1));
            }
        }
        planted::but_last(Bug::Freeze, &changed).to_vec()
    }
}
