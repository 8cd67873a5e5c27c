//! Joining images and cutting them apart, without copying content.

use afresh_sys::PageRange;

use super::{Extent, Image};

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
            extents.extend(part.inner.extents.iter().map(|extent| Extent {
                range: PageRange::new(pages + extent.range.start, extent.range.len),
                ..extent.clone()
            }));
            pages += part.pages();
        }
        Image::from_extents(pages, extents)
    }

    /// The pages `range` as an image of their own, which shares this one's content. Pages past the end
    /// are zero.
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
