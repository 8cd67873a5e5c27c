//! Origins of pages relative to an earlier image: taken over, perhaps from another position, zero,
//! or stored anew.
//!
//! The comparison uses the places where pages are stored, so no page is read, and a part of an
//! image that has moved (the part behind a memory that grew) is found at its old position.

use std::collections::HashMap;
use std::sync::Arc;

use afresh_sys::PageRange;
use afresh_sys::planted::{Bug, is};

use super::{Backing, Extent, Image};

/// A run of pages in an image, as [`Image::page_origins`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOrigin {
    /// They are those of the earlier image from page `from` on.
    Same {
        /// The first there.
        from: usize,
        /// How many.
        len: usize,
    },
    /// They are zero.
    Zero {
        /// How many.
        len: usize,
    },
    /// They are stored anew.
    New {
        /// The pages of this image.
        pages: PageRange,
        /// The page of the earlier image at the position of the first one, if it exists: most
        /// likely its predecessor.
        predecessor: Option<usize>,
    },
}

/// Extents of one image by their backing.
struct ExtentsByBacking<'a>(HashMap<*const Backing, Vec<&'a Extent>>);

impl<'a> ExtentsByBacking<'a> {
    fn of(image: &'a Image) -> Self {
        let mut places: HashMap<_, Vec<&Extent>> = HashMap::new();
        for extent in &image.inner.extents {
            places.entry(Arc::as_ptr(&extent.backing)).or_default().push(extent);
        }
        places.values_mut().for_each(|extents| extents.sort_by_key(|extent| extent.at));
        Self(places)
    }

    /// The position of page `at` of a backing in the image, and the number of pages that follow it
    /// there; or `None`, and the number of pages of the backing that are not in the image either.
    fn find(&self, backing: &Arc<Backing>, at: usize) -> (Option<usize>, usize) {
        let Some(extents) = self.0.get(&Arc::as_ptr(backing)) else { return (None, usize::MAX) };
        let index = extents.partition_point(|extent| extent.at + extent.range.len <= at);
        match extents.get(index) {
            None => (None, usize::MAX),
            Some(extent) if extent.at > at => (None, extent.at - at),
            Some(extent) => {
                let skip = at - extent.at;
                (Some(extent.range.start + skip), extent.range.len - skip)
            }
        }
    }
}

impl Image {
    /// The origin of each page with regard to an `earlier` image, in order. Costs time in
    /// proportion to the number of extents, not of pages.
    #[must_use]
    pub fn page_origins(&self, earlier: &Image) -> Vec<PageOrigin> {
        let places = ExtentsByBacking::of(earlier);
        let mut runs = Vec::new();
        let mut page = 0;
        // The position of the last page that was taken over, there and here.
        let mut shift = (0, 0);
        let predecessor = |shift: (usize, usize), page: usize| {
            (page + shift.0).checked_sub(shift.1).filter(|page| *page < earlier.pages())
        };
        let zeros = |runs: &mut Vec<PageOrigin>, from: usize, len: usize, shift| {
            // Taking zeros over joins the runs on both sides.
            let there = predecessor(shift, from).unwrap_or(earlier.pages());
            let room = PageRange::new(there, len.min(earlier.pages() - there));
            let next =
                earlier.extents_in(room).next().map_or(room.end(), |extent| extent.range.start);
            let same = next - there;
            if same > 0 {
                push(runs, PageOrigin::Same { from: there, len: same });
            }
            if len > same {
                push(runs, PageOrigin::Zero { len: len - same });
            }
        };
        for extent in &self.inner.extents {
            zeros(&mut runs, page, extent.range.start - page, shift);
            page = extent.range.start;
            while page < extent.range.end() {
                let left = extent.range.end() - page;
                let (found, len) =
                    places.find(&extent.backing, extent.at + page - extent.range.start);
                let len = len.min(left);
                match found {
                    Some(from) => {
                        push(&mut runs, PageOrigin::Same { from, len });
                        shift = (from, page);
                    }
                    // Its own position, as if it were unchanged.
                    None if is(Bug::PageOrigins) && page < earlier.pages() => {
                        push(&mut runs, PageOrigin::Same { from: page, len: 1.min(len) });
                        page += 1;
                        continue;
                    }
                    None => push(
                        &mut runs,
                        PageOrigin::New {
                            pages: PageRange::new(page, len),
                            predecessor: predecessor(shift, page),
                        },
                    ),
                }
                page += len;
            }
        }
        zeros(&mut runs, page, self.pages() - page, shift);
        runs
    }
}

/// Adds a run, joined with the last one if it continues it.
fn push(runs: &mut Vec<PageOrigin>, run: PageOrigin) {
    match (runs.last_mut(), run) {
        (Some(PageOrigin::Same { from, len }), PageOrigin::Same { from: next, len: more })
            if *from + *len == next =>
        {
            *len += more;
        }
        (Some(PageOrigin::Zero { len }), PageOrigin::Zero { len: more }) => *len += more,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ImageBuilder;

    fn image(pages: usize, content: &[(usize, u8)]) -> Image {
        let mut builder = ImageBuilder::new(pages);
        for (page, byte) in content {
            builder.segment(page * afresh_sys::PAGE_SIZE, &[*byte; 9]).unwrap();
        }
        builder.build().unwrap()
    }

    #[test]
    fn moved_pages_are_found_and_new_ones_get_a_likely_origin() {
        let memory = image(40, &[(1, 1), (2, 2), (30, 3)]);
        let files = image(3, &[(0, 7), (2, 8)]);
        let before = Image::join(&[memory.clone(), files.clone()]);
        assert_eq!(before.page_origins(&before), [PageOrigin::Same { from: 0, len: 43 }]);

        // The memory grows by 5 pages, and one of them is written; so is page 2.
        let mut builder = ImageBuilder::new(45);
        builder.segment(2 * afresh_sys::PAGE_SIZE, b"new").unwrap();
        builder.segment(44 * afresh_sys::PAGE_SIZE, b"grown").unwrap();
        let built = builder.build().unwrap();
        let changed = [2, 44].map(|page| (page, built.slice(PageRange::new(page, 1))));
        let grown = memory.with_parts(45, &changed).unwrap();
        let after = Image::join(&[grown, files]);
        let runs = after.page_origins(&before);
        assert_eq!(runs[0], PageOrigin::Same { from: 0, len: 2 });
        assert_eq!(runs[1], PageOrigin::New { pages: PageRange::new(2, 1), predecessor: Some(2) });
        assert_eq!(runs[2], PageOrigin::Same { from: 3, len: 37 });
        assert_eq!(runs[3], PageOrigin::Zero { len: 4 });
        assert!(matches!(runs[4], PageOrigin::New { pages, .. } if pages == PageRange::new(44, 1)));
        assert_eq!(runs[5], PageOrigin::Same { from: 40, len: 3 });
        assert_eq!(runs.len(), 6);
    }
}
