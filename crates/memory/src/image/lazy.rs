//! Images whose content arrives while slots use them already.
//!
//! The file behind such an image starts empty, and a [`Filler`] puts pages in place: when a guest
//! touches one that is missing, when the engine is about to read one, and ahead of both. Every slot
//! of the image shares the arrived pages, and once all have arrived, the image is like any other.
//!
//! Promises: no page is read before its whole content is in place (see [`Inserter`]). When the
//! filler fails, the image has failed permanently: slots close their memory and refuse use, and
//! every error names the cause. Where the host has no way to put pages in place under running
//! guests, slots wait for all of them ([`Image::fills_first`]).

use std::sync::Arc;

use afresh_sys::{PageRange, Protection, Reservation};

use super::backing::FillState;
use super::filler::{FaultOutcome, Filler};
use super::layout::bridged_gaps;
use super::{Extent, Image, Inserter, PageLoss, build};
use crate::ImageError;

impl Image {
    /// An image of `pages` pages. Those in `stored` (in order, disjoint) will be filled in by the
    /// filler that `make` returns. All others are zero.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out, and any error of `make`.
    pub fn lazy<E: From<ImageError>>(
        pages: usize,
        stored: &[PageRange],
        make: impl FnOnce(Inserter) -> Result<Arc<dyn Filler>, E>,
    ) -> Result<Image, E> {
        build::check_sorted(stored, pages)?;
        let stored: Vec<PageRange> = stored.iter().copied().filter(|run| !run.is_empty()).collect();
        // Ranges that slots map as one: bridged gaps are filled with zeros rather than split a
        // mapping. A snapshot of a stranger can have any gaps, so no number of mappings makes these
        // zeros take more memory.
        let bridged = bridged_gaps(&stored, |_| true, usize::MAX);
        let mut joined: Vec<PageRange> = Vec::new();
        for (number, run) in stored.iter().enumerate() {
            match joined.last_mut() {
                Some(last) if bridged[number - 1] => last.len = run.end() - last.start,
                _ => joined.push(*run),
            }
        }
        let Some(end) = joined.last().map(|run| run.end()) else {
            return Ok(Image::zero(pages));
        };
        let (backing, inserter, arrived) = Inserter::open(end, joined)?;
        let live = inserter.is_live();
        let backing = Arc::new(
            backing.filled_by(stored.clone(), FillState { filler: make(inserter)?, arrived, live }),
        );
        let extents = stored
            .into_iter()
            .map(|range| Extent { range, backing: backing.clone(), at: range.start })
            .collect();
        Ok(Image::from_extents(pages, extents))
    }

    /// Whether all content is in place. Only a lazily filled image may be incomplete.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.inner.extents.iter().all(|extent| extent.backing.is_complete())
    }

    /// Whether slots wait until all content is in place, because this host cannot put pages in
    /// place under running guests.
    #[must_use]
    pub fn fills_first(&self) -> bool {
        self.inner.extents.iter().any(|extent| extent.backing.fills_first())
    }

    /// The reason if a part of the content is lost.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.inner.extents.iter().find_map(|extent| extent.backing.failure())
    }

    /// Waits until `pages` are in place.
    ///
    /// # Errors
    /// [`ImageError::Filler`] with the cause when a page is lost.
    pub fn resolve(&self, pages: PageRange) -> Result<(), ImageError> {
        self.resolve_all(&[pages])
    }

    /// As [`Image::resolve`], for several runs of pages in order. Those that follow one another in
    /// their backing are requested together.
    pub(crate) fn resolve_all(&self, runs: &[PageRange]) -> Result<(), ImageError> {
        let mut request: Option<Extent> = None;
        for extent in runs.iter().flat_map(|run| self.extents_in(*run)) {
            match &mut request {
                Some(last)
                    if last.at + last.range.len == extent.at
                        && Arc::ptr_eq(&last.backing, &extent.backing) =>
                {
                    last.range.len += extent.range.len;
                }
                _ => {
                    if let Some(last) = request.replace(extent) {
                        last.backing.resolve(PageRange::new(last.at, last.range.len))?;
                    }
                }
            }
        }
        request.map_or(Ok(()), |last| last.backing.resolve(PageRange::new(last.at, last.range.len)))
    }

    /// Waits until everything is in place.
    ///
    /// # Errors
    /// As [`Image::resolve`].
    pub fn complete(&self) -> Result<(), ImageError> {
        self.inner.extents.iter().try_for_each(|extent| extent.backing.finish())
    }
}

/// The lazily filled parts of the mappings, for the handler of faults on missing pages.
#[derive(Debug)]
pub(crate) struct Missing {
    runs: Vec<Extent>,
    memory: Arc<Reservation>,
    /// Pages of `memory` before the slot's page 0.
    first: usize,
    capacity: usize,
    /// The slot's.
    loss: Arc<PageLoss>,
    /// Whether accesses that cannot become traps get zeros in place of lost pages.
    stands_in: bool,
}

impl Missing {
    /// The incomplete parts of `image` in a slot, if there are any.
    pub(crate) fn of(
        image: &Image,
        memory: &Arc<Reservation>,
        first: usize,
        capacity: usize,
        loss: &Arc<PageLoss>,
    ) -> Option<Self> {
        let mut runs = image.runs();
        runs.retain(|run| !run.backing.is_complete());
        let (memory, loss) = (memory.clone(), loss.clone());
        (!runs.is_empty()).then_some(Self { runs, memory, first, capacity, loss, stands_in: false })
    }

    /// Gives accesses that cannot become traps zeros in place of lost pages, if `on`.
    pub(crate) fn with_stand_ins(self, on: bool) -> Self {
        Self { stands_in: on, ..self }
    }

    /// Whether accesses that cannot become traps get zeros in place of lost pages.
    pub(crate) fn gives_stand_ins(&self) -> bool {
        self.stands_in
    }

    /// Whether such an access may get zeros now.
    pub(crate) fn may_stand_in(&self) -> bool {
        self.stands_in && self.loss.is_known()
    }

    /// The parts of `range` whose pages may be missing.
    pub(crate) fn within(&self, range: PageRange) -> impl Iterator<Item = PageRange> + '_ {
        self.runs.iter().filter_map(move |run| run.range.intersect(range))
    }

    /// Whether `page` belongs to a part whose pages may be missing.
    pub(crate) fn contains(&self, page: usize) -> bool {
        self.run_of(page).is_some()
    }

    /// Answers a fault on `page` of the slot, and closes the slot's memory if the page will never
    /// be in place. Safe in a signal handler.
    pub(crate) fn answer(&self, page: usize) -> FaultOutcome {
        let met = self.handle_fault(page);
        if met == FaultOutcome::Closed {
            self.close(Some(page));
        }
        met
    }

    /// The part of the image that `page` of the slot belongs to, if it may be missing.
    fn run_of(&self, page: usize) -> Option<&Extent> {
        let at = self.runs.partition_point(|run| run.range.end() <= page);
        self.runs.get(at).filter(|run| run.range.contains(page))
    }

    /// A number for the source of `page`, unique to its image.
    pub(crate) fn source_of(&self, page: usize) -> usize {
        self.run_of(page).map_or(0, |run| Arc::as_ptr(&run.backing).cast::<u8>() as usize)
    }

    /// Waits for `page` of the slot.
    pub(crate) fn handle_fault(&self, page: usize) -> FaultOutcome {
        let Some(run) = self.run_of(page) else {
            return FaultOutcome::Present;
        };
        run.backing.answer(run.at + page - run.range.start)
    }

    /// Ends access, for the loss of `page`: nothing may be read as if it were content. The retry
    /// raises SIGSEGV, or `EFAULT`.
    pub(crate) fn close(&self, page: Option<usize>) {
        // Later losses are of memory that stands in for the content.
        if self.loss.note(page) {
            // If even that is refused, the missing pages still raise faults.
            let _ = self.memory.protect(self.all(), Protection::None);
        }
    }

    /// Puts zeros in place of closed pages, for code that cannot be ended there.
    /// `around` gives the accessible pages around the touched one, up to a distance. Safe in a
    /// signal handler.
    pub(crate) fn stand_in(&self, around: impl Fn(usize) -> PageRange) -> bool {
        let open = |range: PageRange| {
            let range = PageRange::new(self.first + range.start, range.len);
            self.memory.map_anonymous(range, Protection::ReadWrite).is_ok()
        };
        // Where the kernel has no mapping left to split off, the whole region splits none.
        open(around(self.loss.widen())) || open(around(usize::MAX))
    }

    fn all(&self) -> PageRange {
        PageRange::new(self.first, self.capacity)
    }

    /// Address of `page` of the slot.
    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        self.memory.page_ptr(self.first + page)
    }

    /// Pages of the slot, accessible or not.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Why pages will never come, once that is certain.
    pub(crate) fn failure(&self) -> Option<String> {
        self.runs.iter().find_map(|run| run.backing.failure())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Delivers nothing.
    struct NoFiller;

    impl Filler for NoFiller {
        fn fill_in_handler(&self, _: usize) -> bool {
            false
        }

        fn fill(&self, _: PageRange) -> bool {
            false
        }

        fn failure(&self) -> Option<String> {
            None
        }
    }

    /// A lazily filled image of `count` stored pages, one in `stride` pages, and the pages that its
    /// filler answers for.
    fn scattered(count: usize, stride: usize) -> (Image, usize) {
        let stored: Vec<_> = (0..count).map(|n| PageRange::new(n * stride, 1)).collect();
        let mut filled = 0;
        let image = Image::lazy(count * stride, &stored, |inserter| {
            filled = inserter.filled().iter().map(|run| run.len).sum();
            Ok::<Arc<dyn Filler>, ImageError>(Arc::new(NoFiller))
        });
        (image.unwrap(), filled)
    }

    #[test]
    #[cfg_attr(miri, ignore = "nothing can be filled there")]
    fn scattered_pages_are_filled_with_few_pages_of_zeros_between_them() {
        let (image, filled) = scattered(300, 50);
        // As many gaps as more than 256 mappings have between them.
        assert_eq!(filled, 300 + 44 * 49);
        assert_eq!(image.mapping_count(), 256);
    }

    #[test]
    #[cfg_attr(miri, ignore = "nothing can be filled there")]
    fn zeros_take_memory_in_proportion_to_the_stored_pages() {
        for (count, stride) in [(600, 1000), (600, 8000), (600, 25_000), (5000, 1000)] {
            let (image, filled) = scattered(count, stride);
            assert!(
                filled <= 5 * count + 1024,
                "{filled} pages for {count}, one in {stride} of them stored"
            );
            assert!(image.mapping_count() <= count);
        }
        // Small gaps are filled in any case.
        assert_eq!(scattered(600, 10).1, 599 * 10 + 1);
    }
}
