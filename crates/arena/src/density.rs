//! Whether a huge page deserves a 2 MiB frame: how many of its pages a cycle wrote.
//!
//! A frame mapped by one huge entry does not show which of its pages were touched; its content
//! does, because it began as zero. A sample of the pages is read now and then, after the view is
//! dropped and before the frame is returned. A huge page with fewer than one page in eight written
//! is *sparse*: from then on it gets the kernel's 4 KiB pages, so that it holds no more than it
//! touches. A sparse huge page is looked at in the same rhythm, and gets frames again once a
//! quarter of it is resident.
//!
//! So an arena holds at most 2 MiB for each 2 MiB touched until the second look (two cycles), and
//! afterwards at most eight times what it writes. Pages only read, or written with zeros, count as
//! untouched.

use afresh_frames::{DirtyFrame, Pool};
use afresh_sys::HUGE_PAGES;

/// One page of this many is sampled.
const STRIDE: usize = 16;
/// Looks that are made one after the other at first.
const EAGER_LOOKS: usize = 2;
/// After those, one cycle of this many is sampled.
const RHYTHM: usize = 16;

/// Whether the `cycle`th cycle of an arena is one to look at.
pub(crate) fn is_time(cycle: usize) -> bool {
    cycle < EAGER_LOOKS || cycle.is_multiple_of(RHYTHM)
}

/// Whether a frame that is not mapped any more was written sparsely. `cycle` varies the sample.
pub(crate) fn frame_is_sparse(pool: &Pool, frame: &DirtyFrame, cycle: usize) -> bool {
    let first = cycle * 7 % STRIDE;
    let sampled = (first..HUGE_PAGES).step_by(STRIDE);
    let written = sampled.filter(|page| !pool.page_is_zero(frame, *page)).count();
    written * 8 < HUGE_PAGES / STRIDE
}

/// Whether `resident` pages make a sparse huge page dense again.
pub(crate) fn is_dense(resident: usize) -> bool {
    resident * 4 >= HUGE_PAGES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cycles_are_looked_at_and_then_few() {
        let looks = (0..160).filter(|cycle| is_time(*cycle)).count();
        assert!(is_time(0) && is_time(1) && !is_time(2));
        assert_eq!(looks, 11);
    }
}
