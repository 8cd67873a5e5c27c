//! Joining images and cutting them apart, without copying content.

use afresh_sys::PageRange;

use super::{Extent, Image, build};
use crate::ImageError;

impl Image {
    /// One image after the other; shares their content.
    ///
    /// ```
    /// use afresh_memory::{Image, ImageBuilder};
    ///
    /// let mut builder = ImageBuilder::new(2);
    /// builder.segment(0, b"one")?;
    /// let one = builder.build()?;
    /// let joined = Image::join(&[Image::zero(3), one]);
    /// assert_eq!((joined.pages(), joined.stored_pages()), (5, 1));
    /// assert_eq!(joined.slice(afresh_memory::PageRange::new(3, 2)).page(0).unwrap()[..3], *b"one");
    /// # Ok::<(), afresh_memory::ImageError>(())
    /// ```
    #[must_use]
    pub fn join(parts: &[Image]) -> Image {
        let mut extents = Vec::new();
        let mut pages = 0;
        for part in parts {
            extents.extend(part.extents_from(pages));
            pages += part.pages();
        }
        Image::from_extents(pages, extents)
    }

    /// This image, with `pages` pages, where `parts` replace some of its content: each from a page
    /// on, in order and disjoint. Shares the content of all.
    ///
    /// # Errors
    /// [`ImageError::OutOfBounds`] when a part is not inside, or out of order.
    pub fn with_parts(&self, pages: usize, parts: &[(usize, Image)]) -> Result<Image, ImageError> {
        let ranges: Vec<_> =
            parts.iter().map(|(at, part)| PageRange::new(*at, part.pages())).collect();
        build::check_sorted(&ranges, pages)?;
        let mut extents = self.kept_extents(pages, &ranges);
        extents.extend(parts.iter().flat_map(|(at, part)| part.extents_from(*at)));
        extents.sort_by_key(|extent| extent.range.start);
        Ok(Image::from_extents(pages, extents))
    }

    /// The extents of this image as another has them from page `first` on.
    fn extents_from(&self, first: usize) -> impl Iterator<Item = Extent> + '_ {
        self.inner.extents.iter().map(move |extent| Extent {
            range: PageRange::new(first + extent.range.start, extent.range.len),
            ..extent.clone()
        })
    }

    /// An image with the pages `ranges` of this one at the same positions. All other pages are
    /// zero. The ranges may be in any order.
    #[must_use]
    pub fn restricted_to(&self, ranges: &[PageRange]) -> Image {
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable_by_key(|range| range.start);
        let (mut extents, mut from) = (Vec::new(), 0);
        for range in ranges {
            let start = range.start.max(from);
            if start < range.end() {
                from = range.end();
                extents.extend(self.extents_in(PageRange::new(start, from - start)));
            }
        }
        Image::from_extents(self.pages(), extents)
    }

    /// The pages `range` as a separate image, which shares the content. Pages past the end are
    /// zero.
    #[must_use]
    pub fn slice(&self, range: PageRange) -> Image {
        let extents = self
            .extents_in(range)
            .map(|extent| Extent {
                range: PageRange::new(extent.range.start - range.start, extent.range.len),
                ..extent
            })
            .collect();
        Image::from_extents(range.len, extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ImageBuilder, PAGE_SIZE};

    #[test]
    fn chosen_pages_stay_in_place_whatever_their_order() {
        let mut builder = ImageBuilder::new(20);
        builder.segment(0, &[7; 20 * PAGE_SIZE]).unwrap();
        let ranges = [(12, 4), (3, 2), (13, 6), (4, 1), (14, 0)];
        let ranges = ranges.map(|(start, len)| PageRange::new(start, len));
        let kept = builder.build().unwrap().restricted_to(&ranges);
        let stored: Vec<usize> = (0..20).filter(|page| kept.page(*page).is_some()).collect();
        assert_eq!((kept.pages(), stored), (20, vec![3, 4, 12, 13, 14, 15, 16, 17, 18]));
    }
}
