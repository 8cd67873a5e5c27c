//! Where each page of a snapshot is: a stack of layers made flat.

use afresh_sys::PageRange;

use crate::format::index::Index;

/// The location of a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere: the pages are zero.
    Zero,
    /// In a layer, from stored page `stored` on.
    Layer {
        /// Number of the layer, from the bottom.
        layer: usize,
        /// First stored page.
        stored: u64,
    },
    /// In the turns of a session: pages that they changed, by number.
    Turn {
        /// The first.
        page: usize,
    },
}

/// A run of pages with one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRun {
    /// The pages.
    pub pages: PageRange,
    /// Their location.
    pub origin: Origin,
}

impl MapRun {
    /// The part of the run in `within`, which it must overlap.
    fn clip(self, within: PageRange) -> Option<Self> {
        let pages = self.pages.intersect(within)?;
        let origin = match self.origin {
            Origin::Zero => Origin::Zero,
            Origin::Layer { layer, stored } => {
                Origin::Layer { layer, stored: stored + (pages.start - self.pages.start) as u64 }
            }
            Origin::Turn { page } => Origin::Turn { page: page + pages.start - self.pages.start },
        };
        Some(Self { pages, origin })
    }
}

/// Every page of a snapshot, in order: the runs cover the index space without gap or overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMap {
    pages: usize,
    runs: Vec<MapRun>,
}

impl PageMap {
    /// Flattens `layers`, bottom first, over an index space of `pages` pages.
    pub(crate) fn new<'a>(pages: usize, layers: impl Iterator<Item = &'a Index>) -> Self {
        let mut runs = Vec::new();
        if pages > 0 {
            runs.push(MapRun { pages: PageRange::new(0, pages), origin: Origin::Zero });
        }
        let mut map = Self { pages, runs };
        for (number, index) in layers.enumerate() {
            map.overlay(number, index);
        }
        map
    }

    /// A map of runs that cover `pages` pages.
    pub(crate) fn from_runs(pages: usize, runs: Vec<MapRun>) -> Self {
        debug_assert_eq!(runs.iter().map(|run| run.pages.len).sum::<usize>(), pages);
        Self { pages, runs }
    }

    /// Lays the extents of `index` over the runs.
    fn overlay(&mut self, layer: usize, index: &Index) {
        let mut out = Vec::with_capacity(self.runs.len() + 2 * index.extents.len());
        let mut from = 0;
        for extent in &index.extents {
            let pages = PageRange::new(extent.first as usize, extent.len as usize);
            out.extend(self.within(PageRange::new(from, pages.start - from)));
            let origin = match extent.stored {
                None => Origin::Zero,
                Some(stored) => Origin::Layer { layer, stored },
            };
            out.push(MapRun { pages, origin });
            from = pages.end();
        }
        out.extend(self.within(PageRange::new(from, self.pages - from)));
        self.runs = out;
    }

    /// Number of pages in the index space.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// All runs, in order.
    #[must_use]
    pub fn runs(&self) -> &[MapRun] {
        &self.runs
    }

    /// The runs in `range`, the first and last cut to it.
    pub fn within(&self, range: PageRange) -> impl Iterator<Item = MapRun> + '_ {
        let at = self.runs.partition_point(|run| run.pages.end() <= range.start);
        self.runs[at..]
            .iter()
            .take_while(move |run| run.pages.start < range.end())
            .filter_map(move |run| run.clip(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::index::{Encoding, Extent, Role};

    fn layer(extents: &[(u64, u64, Option<u64>)]) -> Index {
        Index {
            role: Role::Base,
            group_pages: 16,
            pages: 10,
            stored: 10,
            extents: extents
                .iter()
                .map(|&(first, len, stored)| Extent { first, len, stored })
                .collect(),
            groups: Vec::new(),
            parent: [0; 32],
            root: [0; 32],
            encoding: Encoding::Raw,
            chunks: Vec::new(),
        }
    }

    #[test]
    fn an_upper_layer_hides_exactly_its_own_pages() {
        let layers = [layer(&[(1, 8, Some(0))]), layer(&[(3, 1, None), (5, 2, Some(7))])];
        let map = PageMap::new(10, layers.iter());
        let at = |page| map.within(PageRange::new(page, 1)).next().unwrap().origin;
        assert_eq!(at(0), Origin::Zero);
        assert_eq!(at(2), Origin::Layer { layer: 0, stored: 1 });
        assert_eq!(at(3), Origin::Zero);
        assert_eq!(at(4), Origin::Layer { layer: 0, stored: 3 });
        assert_eq!(at(6), Origin::Layer { layer: 1, stored: 8 });
        assert_eq!(at(7), Origin::Layer { layer: 0, stored: 6 });
        assert_eq!(map.runs().iter().map(|r| r.pages.len).sum::<usize>(), 10);
    }
}
