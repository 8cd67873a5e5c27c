//! The touched pages, and their order.

use afresh_sys::PAGE_SIZE;

/// A size and an order of touches.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// As in the report, such as `16MiB/seq`.
    pub(super) name: &'static str,
    /// Pages of the memory taken.
    pub(super) pages: usize,
    /// Pages touched, in order.
    touches: Vec<u32>,
    write: bool,
}

/// Pages in 16 MiB.
const SMALL_PAGES: usize = 4096;
/// Pages in 256 MiB.
const LARGE_PAGES: usize = 65536;

impl Case {
    /// Every case.
    pub(super) fn all() -> Vec<Case> {
        let all = |pages: usize| (0..pages as u32).collect::<Vec<_>>();
        let case = |name, pages, touches, write| Case { name, pages, touches, write };
        vec![
            case("16MiB/seq", SMALL_PAGES, all(SMALL_PAGES), true),
            case("16MiB/random", SMALL_PAGES, shuffled(all(SMALL_PAGES)), true),
            case("16MiB/read", SMALL_PAGES, all(SMALL_PAGES), false),
            case("16MiB/sparse64", SMALL_PAGES, sparse(SMALL_PAGES, 64), true),
            case("256MiB/seq", LARGE_PAGES, all(LARGE_PAGES), true),
            case("256MiB/first1000", LARGE_PAGES, all(1000), true),
        ]
    }

    /// Pages touched, which the figures are divided by.
    pub(super) fn touched(&self) -> usize {
        self.touches.len()
    }

    /// Touches memory at `base`: one byte written, or read, a page.
    ///
    /// # Safety
    /// The case's pages must be mapped at `base`, or be mapped by the faults the touches raise.
    pub(super) unsafe fn touch(&self, base: *mut u8) {
        for page in &self.touches {
            // SAFETY: the caller promises the memory; every page is below the case's number.
            unsafe {
                let byte = base.add(*page as usize * PAGE_SIZE);
                if self.write {
                    byte.write_volatile(1);
                } else {
                    byte.read_volatile();
                }
            }
        }
    }
}

/// A fixed pseudo-random sequence (a linear congruential generator, Knuth's constants): every run
/// touches the same pages in the same order.
fn sequence() -> impl Iterator<Item = usize> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    std::iter::from_fn(move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((state >> 33) as usize)
    })
}

fn shuffled(mut pages: Vec<u32>) -> Vec<u32> {
    for (at, random) in (1..pages.len()).rev().zip(sequence()) {
        pages.swap(at, random % (at + 1));
    }
    pages
}

/// One page of each group of `group`, in random order.
fn sparse(pages: usize, group: usize) -> Vec<u32> {
    let of_group = (0..pages).step_by(group).zip(sequence()).map(|(at, r)| (at + r % group) as u32);
    shuffled(of_group.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_touches_pages_it_has_and_none_twice() {
        for case in Case::all() {
            let mut pages = case.touches.clone();
            pages.sort_unstable();
            pages.dedup();
            assert_eq!(pages.len(), case.touched(), "{}", case.name);
            assert!(pages.iter().all(|page| (*page as usize) < case.pages), "{}", case.name);
        }
    }
}
