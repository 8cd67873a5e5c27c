//! Zero pages that the kernel adds to the file of an image, because a guest reads holes.
#![cfg(not(any(miri, afresh_portable)))]

use std::time::Duration;

use afresh_memory::{Image, ImageBuilder, PAGE_SIZE, Slot, SlotConfig};
use afresh_sys::run_isolated;

use crate::common::{lazy_image, occupied, resident_pages};

const STORED: usize = 300;
const STRIDE: usize = 1000;
/// Maximum pages of zeros for each stored page, and in addition to these.
const ZEROS: (usize, usize) = (4, 1024);

fn content() -> Vec<u8> {
    let mut content = vec![0; STORED * STRIDE * PAGE_SIZE];
    for page in (0..STORED).map(|number| number * STRIDE) {
        content[page * PAGE_SIZE] = 7;
    }
    content
}

fn frozen_image() -> Image {
    let mut builder = ImageBuilder::new(STORED * STRIDE);
    for page in (0..STORED).map(|number| number * STRIDE) {
        builder.segment(page * PAGE_SIZE, &[7]).unwrap();
    }
    builder.build().unwrap()
}

/// Reads each page of a slot of `image`. No page of the file may be added beyond the maximum.
fn read_all(image: &Image) {
    let slot = Slot::new(image, SlotConfig::default()).unwrap();
    for page in 0..image.pages() {
        // SAFETY: a page of a slot that nothing else uses.
        let byte = unsafe { slot.base().add(page * PAGE_SIZE).read_volatile() };
        assert_eq!(byte, if page % STRIDE == 0 { 7 } else { 0 }, "page {page}");
    }
    let resident = resident_pages(image);
    println!("{resident} pages in the file of {STORED} stored pages");
    assert!(resident >= STORED as u64);
    assert!(resident <= (STORED * (1 + ZEROS.0) + ZEROS.1) as u64, "{resident} pages");
}

#[test]
fn reading_between_stored_pages_adds_zeros_in_proportion_to_them() {
    const NAME: &str = "zeros::reading_between_stored_pages_adds_zeros_in_proportion_to_them";
    // No other test has an image in the same file.
    run_isolated(NAME, || read_all(&frozen_image()));
}

#[test]
fn reading_a_lazily_filled_image_adds_zeros_in_proportion_to_the_stored_pages() {
    const NAME: &str =
        "zeros::reading_a_lazily_filled_image_adds_zeros_in_proportion_to_the_stored_pages";
    run_isolated(NAME, || {
        let content = content();
        let (image, _) = lazy_image(&content, &occupied(&content), Duration::ZERO);
        read_all(&image);
    });
}
