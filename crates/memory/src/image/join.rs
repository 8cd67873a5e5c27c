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

    /// The pages `range` as a separate image, which shares the content. Pages past the end are zero.
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
