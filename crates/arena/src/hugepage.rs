//! A huge page: 2 MiB of an arena, its backing and its mappings.

use afresh_frames::{DirtyFrame, Order};
use afresh_sys::HUGE_PAGES;

/// The memory behind a huge page.
#[derive(Debug, Default)]
pub(crate) enum Backing {
    /// Nothing: an access faults.
    #[default]
    Nothing,
    /// A frame of the pool.
    Frame(DirtyFrame),
    /// The kernel's anonymous memory, page by page at first touch.
    Kernel,
}

/// A mapping of the pool file over a huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First page in the file.
    pub(crate) file_page: usize,
    /// Pages mapped, from the start of the huge page.
    pub(crate) len: usize,
}

/// A huge page of an arena.
#[derive(Debug, Default)]
pub(crate) struct HugePage {
    /// What backs it.
    pub(crate) backing: Backing,
    /// The present mapping of the pool file: accessible while a frame backs the huge page, and
    /// inaccessible after the frame was returned. To get the same frame again and make the mapping
    /// accessible costs far less than mapping anew: the page tables are there still.
    pub(crate) mapping: Option<Mapping>,
    /// The huge page has proved sparse: a 2 MiB frame would be wasted on it.
    pub(crate) sparse: bool,
    /// A frame backed it in the last cycle.
    pub(crate) expected: bool,
}

impl HugePage {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self.backing, Backing::Nothing)
    }
}

/// The longest run of huge pages at the start of `hugepages` whose left-over mappings follow one
/// another in the file and can be requested as one block, when the run's visible part has `visible`
/// pages. Returns the first page in the file and the order.
pub(crate) fn left_over(hugepages: &[HugePage], visible: usize) -> Option<(usize, Order)> {
    let first = hugepages.first()?.mapping?.file_page;
    let run = hugepages
        .iter()
        .enumerate()
        .take_while(|(at, hugepage)| {
            let needed = visible.saturating_sub(at * HUGE_PAGES).min(HUGE_PAGES);
            hugepage
                .mapping
                .is_some_and(|m| m.file_page == first + at * HUGE_PAGES && m.len >= needed)
        })
        .count();
    let order = Order::fitting(run * HUGE_PAGES);
    (run > 0 && first.is_multiple_of(order.pages())).then_some((first, order))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hugepage(file_page: usize, len: usize) -> HugePage {
        HugePage { mapping: Some(Mapping { file_page, len }), ..HugePage::default() }
    }

    #[test]
    fn left_over_mappings_are_joined_while_they_follow_one_another() {
        let hugepages =
            [hugepage(1024, 512), hugepage(1536, 512), hugepage(0, 512), HugePage::default()];
        assert_eq!(left_over(&hugepages, 4 * HUGE_PAGES), Some((1024, Order::new(10))));
        assert_eq!(left_over(&hugepages[1..], HUGE_PAGES), Some((1536, Order::HUGE)));
        assert_eq!(left_over(&hugepages[3..], HUGE_PAGES), None);
    }

    #[test]
    fn a_mapping_shorter_than_the_visible_part_is_not_used() {
        assert_eq!(left_over(&[hugepage(512, 100)], 200), None);
        assert_eq!(left_over(&[hugepage(512, 100)], 100), Some((512, Order::HUGE)));
    }

    #[test]
    fn a_run_that_is_not_aligned_to_its_length_is_not_one_block() {
        assert_eq!(left_over(&[hugepage(512, 512), hugepage(1024, 512)], 2 * HUGE_PAGES), None);
    }
}
