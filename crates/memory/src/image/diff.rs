//! Differences of two images, found by the places of their pages, without reading them.

use std::sync::Arc;

use afresh_sys::PageRange;

use super::{Extent, Image};

/// Where a page's content is: a place in a backing, or nowhere (zero).
type Source = Option<(*const u8, usize)>;

/// Walks an image's extents in step with another's.
struct Walk<'a> {
    extents: &'a [Extent],
    index: usize,
}

impl Walk<'_> {
    /// The source of page `page`, and the first page whose source does not follow from it.
    fn at(&mut self, page: usize) -> (Source, usize) {
        while self.extents.get(self.index).is_some_and(|e| e.range.end() <= page) {
            self.index += 1;
        }
        match self.extents.get(self.index) {
            None => (None, usize::MAX),
            Some(next) if next.range.start > page => (None, next.range.start),
            Some(extent) => {
                let backing = Arc::as_ptr(&extent.backing).cast();
                (Some((backing, extent.at + page - extent.range.start)), extent.range.end())
            }
        }
    }
}

impl Image {
    /// The pages in which `other` may differ from this image, in order. Pages that both store in the
    /// same place, or that neither stores, are equal; all others are listed, even where their bytes
    /// happen to be equal. Costs time in proportion to the number of extents, not of pages.
    #[must_use]
    pub fn differing(&self, other: &Image) -> Vec<PageRange> {
        let end = self.pages().max(other.pages());
        let mut one = Walk { extents: &self.inner.extents, index: 0 };
        let mut two = Walk { extents: &other.inner.extents, index: 0 };
        let mut runs = Vec::new();
        let mut page = 0;
        while page < end {
            let (first, until_first) = one.at(page);
            let (second, until_second) = two.at(page);
            let until = until_first.min(until_second).min(end);
            if first != second {
                crate::tracker::push_run(&mut runs, PageRange::new(page, until - page));
            }
            page = until;
        }
        runs
    }
}
