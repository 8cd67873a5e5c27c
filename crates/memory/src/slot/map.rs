//! Placing an image into a slot: which pages are mapped from where.

use afresh_sys::planted::{self, Bug};
use afresh_sys::{Feature, Features, PAGE_SIZE, PageRange, Protection, withhold};

use super::serve::ServedSlot;
use super::state::{Filling, State};
use super::{Adaptation, Method, Slot, Space};
use crate::image::Missing;
use crate::{Image, ImageError, SlotError};

/// Mappings above which an image is compacted before it is placed; the kernel allows a process
/// 65,530 by default.
const MAX_MAPPINGS: usize = 1024;

impl Slot {
    /// Makes the thread handle missing pages of the image just placed, or, if there is no such
    /// thread, waits for all of them.
    pub(super) fn serve(&mut self) -> Result<(), SlotError> {
        let features = self.config.features.as_ref().unwrap_or_else(|| Features::host());
        let Space { memory, first, capacity, .. } = &self.space;
        let missing = Missing::of(&self.image, memory, *first, *capacity, &self.loss);
        let (Some(missing), State::Filling(filling)) = (missing, &mut self.state) else {
            return Ok(());
        };
        if features.has(Feature::UffdKernel)
            && let Ok(served) = ServedSlot::start(missing, &self.space.regions)
        {
            filling.served = Some(served);
            return Ok(());
        }
        let image = self.image.clone();
        self.read_first(&image, "the kernel's faults cannot be answered here")?;
        self.state = State::Ready;
        Ok(())
    }

    /// The regions to use for `image`, checked.
    pub(super) fn checked_regions(
        &self,
        image: &Image,
        regions: &[PageRange],
    ) -> Result<Vec<PageRange>, SlotError> {
        let whole = [PageRange::new(0, image.pages())];
        let regions = if regions.is_empty() { &whole } else { regions };
        let mut from = 0;
        for region in regions {
            if region.start < from || (region.is_empty() && regions.len() > 1) {
                return Err(SlotError::Regions);
            }
            from = region
                .start
                .checked_add(region.len)
                .filter(|end| *end <= self.space.capacity)
                .ok_or(SlotError::TooLarge {
                pages: region.len,
                capacity: self.space.capacity,
            })?;
        }
        for run in image.stored() {
            let mut page = run.start;
            for region in regions {
                if region.contains(page) {
                    page = region.end().min(run.end());
                }
            }
            if page < run.end() {
                return Err(SlotError::ImageOutsideRegions { page });
            }
        }
        Ok(regions.to_vec())
    }

    /// Maps `image` into the empty (inaccessible) capacity.
    pub(super) fn place(&mut self, image: &Image, regions: &[PageRange]) -> Result<(), SlotError> {
        let regions = self.checked_regions(image, regions)?;
        if let Some(cause) = image.failure() {
            return Err(ImageError::Filler(cause).into());
        }
        if image.fills_first() {
            self.read_first(image, "userfaultfd is unavailable")?;
        }
        self.image = image.mappable(MAX_MAPPINGS)?;
        let runs = self.image.runs();
        if !self.image.is_complete() {
            self.state = State::Filling(Filling::default());
        }
        for region in &regions {
            self.space.protect(*region, Protection::ReadWrite)?;
        }
        for run in &runs {
            let (file, start) = run.backing.file();
            // A run may span a gap between regions over holes of the backing: map only the
            // accessible part.
            for part in regions.iter().filter_map(|r| r.intersect(run.range)) {
                self.space.memory.map_private(
                    self.space.absolute(part),
                    Protection::ReadWrite,
                    file,
                    start + run.at + part.start - run.range.start,
                )?;
                if !run.backing.is_complete() {
                    // Faults of a child on missing pages would not be handled, and it would get
                    // zeros.
                    let withheld = withhold(&self.space.memory, self.space.absolute(part))?;
                    if let State::Filling(filling) = &mut self.state {
                        filling.withheld.push(withheld);
                    }
                }
            }
        }
        self.space.end = regions.last().map_or(0, |r| r.end());
        self.space.high_water = self.space.end;
        self.space.regions = regions;
        self.shown = None;
        if self.image.is_complete() {
            // The last page may have come just now.
            self.state = State::Ready;
        }
        self.write_set.clear();
        self.adapt = Adaptation::default();
        Ok(())
    }

    /// Waits for all of an image, and adds the reason to the explanation of the strategy.
    pub(super) fn read_first(&mut self, image: &Image, why: &str) -> Result<(), ImageError> {
        if !image.is_complete() {
            image.complete()?;
            let said = format!("; the image was read whole first, because {why}");
            if !self.choice.reason.ends_with(&said) {
                self.choice.reason += &said;
            }
        }
        Ok(())
    }

    /// Registers every region with the tracker.
    pub(super) fn watch_regions(&mut self) -> Result<(), SlotError> {
        if let Method::Reprotect(tracker) | Method::WriteSet(tracker) = &mut self.method {
            for region in self.space.regions.iter().filter(|r| !r.is_empty()) {
                tracker.watch(*region)?;
            }
        }
        Ok(())
    }

    /// Writes the image's content over `range`, page by page where it is stored and zeros
    /// elsewhere.
    ///
    /// # Safety
    /// The pages must be accessible and writable, and no guest may run.
    pub(super) unsafe fn overwrite(&self, range: PageRange) {
        let left = usize::from(planted::is(Bug::FullCopy) && range.len > 1);
        let range = PageRange::new(range.start, range.len - left);
        let base = self.base();
        let zero = |from: usize, to: usize| {
            // SAFETY: inside `range`, by the caller's promise writable.
            unsafe { base.add(from * PAGE_SIZE).write_bytes(0, (to - from) * PAGE_SIZE) };
        };
        let mut page = range.start;
        for extent in self.image.extents_in(range) {
            zero(page, extent.range.start);
            // SAFETY: as above; the source is a view of the image, which never overlaps a slot.
            unsafe {
                base.add(extent.range.byte_start()).copy_from_nonoverlapping(
                    extent.page_ptr(extent.range.start),
                    extent.range.byte_len(),
                );
            }
            page = extent.range.end();
        }
        zero(page, range.end());
    }
}
