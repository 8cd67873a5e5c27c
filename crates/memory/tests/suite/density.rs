//! Mappings and descriptors of many slots. The kernel allows a process 65,530 mappings by default,
//! and 10,000 small guests must fit.
#![cfg(not(miri))]

use std::ops::Range;

use afresh_memory::{
    Image, ImageBuilder, PAGE_SIZE, PageRange, Reservation, Slot, SlotConfig, SlotError, Strategy,
};
use afresh_sys::Protection;

/// Slots of each strategy.
const SLOTS: usize = 200;
/// Pages of the image. Few of them are stored, in several runs.
const PAGES: usize = 64;
/// Maximum mappings of a slot: the guards and hidden pages on both sides, the image, and room for
/// one split. A kernel that merges less, such as 6.12, has one more for the hidden pages.
const MAX_MAPPINGS: usize = 5;

fn image() -> Image {
    let mut builder = ImageBuilder::new(PAGES);
    for page in (0..PAGES).step_by(7) {
        builder.segment(page * PAGE_SIZE + 8, b"warm").unwrap();
    }
    builder.build().unwrap()
}

/// The mappings of this process, in order.
fn mappings() -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |digits| usize::from_str_radix(digits, 16).unwrap();
    let lines = maps.lines().map(|line| line.split(' ').next().unwrap().split_once('-').unwrap());
    lines.map(|(start, end)| number(start)..number(end)).collect()
}

/// The mappings of this process in `own`.
fn mappings_in(mappings: &[Range<usize>], own: &Range<usize>) -> usize {
    let first = mappings.partition_point(|mapping| mapping.end <= own.start);
    mappings[first..].iter().take_while(|it| it.start < own.end).count()
}

/// Whether the kernel merges pages that were written and hidden with hidden ones behind them that
/// were not.
fn merges_hidden_pages() -> bool {
    let memory = Reservation::new(16).unwrap();
    let written = PageRange::new(0, 8);
    memory.protect(written, Protection::ReadWrite).unwrap();
    // SAFETY: the page is accessible, and this function owns it.
    unsafe { memory.page_ptr(0).write_volatile(1) };
    memory.protect(written, Protection::None).unwrap();
    let base = memory.page_ptr(0) as usize;
    mappings_in(&mappings(), &(base..base + 16 * PAGE_SIZE)) == 1
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn make(image: &Image, strategy: Strategy) -> Result<Vec<Slot>, SlotError> {
    let config = SlotConfig {
        strategy,
        capacity: Some(2 * PAGES),
        guard_before: PAGE_SIZE,
        guard_after: PAGE_SIZE,
        ..SlotConfig::default()
    };
    let mut slots = Vec::new();
    for number in 0..SLOTS {
        let mut slot = Slot::new(image, config.clone())?;
        for _ in 0..3 {
            slot.grow(PAGES + 8).unwrap();
            slot.write((number % PAGES) * PAGE_SIZE, b"written").unwrap();
            slot.write((PAGES + 3) * PAGE_SIZE, b"grown").unwrap();
            slot.reset().unwrap();
        }
        slots.push(slot);
    }
    Ok(slots)
}

#[test]
fn a_warm_slot_has_few_mappings_and_no_descriptor() {
    let image = image();
    let limit = if merges_hidden_pages() { MAX_MAPPINGS } else { MAX_MAPPINGS + 1 };
    for strategy in Strategy::FORCED.into_iter().chain([Strategy::Auto]) {
        let before = descriptors();
        let slots = match make(&image, strategy) {
            Ok(slots) => slots,
            Err(SlotError::Unavailable { reason, .. }) => {
                println!("SKIPPED: {strategy}: {reason}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let opened = descriptors().saturating_sub(before);
        let mappings = mappings();
        let mut most = 0;
        for slot in &slots {
            let base = slot.base() as usize;
            let own = base - PAGE_SIZE..base + (2 * PAGES + 1) * PAGE_SIZE;
            most = most.max(mappings_in(&mappings, &own));
        }
        println!("{strategy}: at most {most} mappings of a slot, {opened} descriptors of {SLOTS}");
        assert!(most <= limit, "{strategy}: {most} mappings of a slot");
        // Other tests open descriptors at the same time.
        assert!(opened <= 100, "{strategy}: {opened} descriptors of {SLOTS} slots");
        for slot in &slots {
            let mut bytes = [1; 8 * PAGE_SIZE];
            slot.read(0, &mut bytes).unwrap();
            assert_eq!(&bytes[8..12], b"warm");
            assert_eq!(slot.regions(), [PageRange::new(0, PAGES)]);
        }
    }
}
