//! The address space of a slot: the addresses of its pages, and the accessible ones.

use std::sync::Arc;

use afresh_sys::{Advice, PageRange, Protection, Reservation, SysError};

/// Pages are counted from the slot's page 0.
pub(super) struct Space {
    pub(super) memory: Arc<Reservation>,
    /// Pages of `memory` before page 0.
    pub(super) first: usize,
    /// Pages from page 0 on that can ever be accessible; guards follow.
    pub(super) capacity: usize,
    /// The accessible pages when the slot has not grown: sorted, disjoint, within the capacity.
    pub(super) regions: Vec<PageRange>,
    /// End of the last region now.
    pub(super) end: usize,
    /// The furthest that `end` ever was since the image was placed. The pages in between are
    /// hidden: inaccessible, and as the last reset left them.
    pub(super) high_water: usize,
}

impl Space {
    /// Inaccessible space of `capacity` pages behind `first` of the reservation.
    pub(super) fn new(memory: Reservation, first: usize, capacity: usize) -> Self {
        let memory = Arc::new(memory);
        Self { memory, first, capacity, regions: Vec::new(), end: 0, high_water: 0 }
    }

    /// Address of page 0.
    pub(super) fn base(&self) -> *mut u8 {
        self.memory.page_ptr(self.first)
    }

    /// `range` as pages of the reservation.
    pub(super) fn absolute(&self, range: PageRange) -> PageRange {
        PageRange::new(self.first + range.start, range.len)
    }

    /// Everything up to the capacity.
    pub(super) fn all(&self) -> PageRange {
        PageRange::new(0, self.capacity)
    }

    /// End of the last region when the slot has not grown.
    #[inline]
    pub(super) fn initial_end(&self) -> usize {
        self.regions.last().map_or(0, |region| region.end())
    }

    /// The pages that the slot has grown by.
    pub(super) fn grown(&self) -> PageRange {
        let from = self.initial_end();
        PageRange::new(from, self.end - from)
    }

    /// The pages that it once grew by, and that no access reaches now.
    pub(super) fn hidden(&self) -> PageRange {
        PageRange::new(self.end, self.high_water - self.end)
    }

    /// Notes that the last region reaches to `end`.
    pub(super) fn reach(&mut self, end: usize) {
        self.end = end;
        self.high_water = self.high_water.max(end);
    }

    /// The pages that are accessible now, region by region.
    pub(super) fn accessible(&self) -> impl Iterator<Item = PageRange> + '_ {
        self.regions_to(self.end)
    }

    /// Everything that has been accessible since the image was placed.
    pub(super) fn ever_accessible(&self) -> impl Iterator<Item = PageRange> + '_ {
        self.regions_to(self.high_water)
    }

    fn regions_to(&self, end: usize) -> impl Iterator<Item = PageRange> + '_ {
        let last = self.regions.len().saturating_sub(1);
        self.regions.iter().enumerate().map(move |(number, region)| {
            let end = if number == last { end } else { region.end() };
            PageRange::new(region.start, end - region.start)
        })
    }

    pub(super) fn protect(&self, range: PageRange, protection: Protection) -> Result<(), SysError> {
        self.memory.protect(self.absolute(range), protection)
    }

    pub(super) fn advise(&self, range: PageRange, advice: Advice) -> Result<(), SysError> {
        self.memory.advise(self.absolute(range), advice)
    }

    /// Replaces the mapping there by zeros.
    pub(super) fn clear(&self, range: PageRange, protection: Protection) -> Result<(), SysError> {
        self.memory.map_anonymous(self.absolute(range), protection)
    }
}
