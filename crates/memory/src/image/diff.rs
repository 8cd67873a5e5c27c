//! Differences of two images, found by the places of their pages, without reading them.

use std::sync::Arc;

use afresh_sys::PageRange;

use super::{Extent, Image};
use crate::ImageError;

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
    /// The pages in which `other` may differ from this image, in order. Pages that both images
    /// store in the same place, or that neither stores, are equal. All others are listed, even if
    /// their bytes are equal. Costs time in proportion to the number of extents, not of pages.
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

    /// The pages in which `other` differs from this image, in order. It reads only pages that are
    /// not stored in the same place.
    ///
    /// # Errors
    /// As [`Image::resolve`], for the pages that are read.
    pub fn differing_content(&self, other: &Image) -> Result<Vec<PageRange>, ImageError> {
        let mut runs = Vec::new();
        let differing = self.differing(other);
        self.resolve_all(&differing)?;
        other.resolve_all(&differing)?;
        for run in differing {
            for page in run.start..run.end() {
                let equal = match (self.page(page), other.page(page)) {
                    (None, None) => true,
                    (Some(one), Some(two)) => one == two,
                    (Some(page), None) | (None, Some(page)) => super::is_zero(page),
                };
                if !equal {
                    crate::tracker::push_run(&mut runs, PageRange::new(page, 1));
                }
            }
        }
        Ok(runs)
    }
}

#[cfg(test)]
mod tests {
    use afresh_sys::PAGE_SIZE;

    use super::*;
    use crate::ImageBuilder;

    fn image(content: &[(usize, u8)]) -> Image {
        let mut builder = ImageBuilder::new(8);
        for (page, byte) in content {
            builder.segment(page * PAGE_SIZE, &[*byte; 9]).unwrap();
        }
        builder.build().unwrap()
    }

    #[test]
    fn pages_that_are_stored_elsewhere_and_equal_do_not_differ() {
        let (before, after) = (image(&[(1, 1), (2, 2), (5, 5)]), image(&[(1, 1), (2, 3), (6, 6)]));
        let expected = [PageRange::new(2, 1), PageRange::new(5, 2)];
        assert_eq!(before.differing_content(&after).unwrap(), expected);
        assert_eq!(before.differing_content(&before.compact().unwrap()).unwrap(), []);
        assert_eq!(before.differing_content(&before).unwrap(), []);
    }
}
