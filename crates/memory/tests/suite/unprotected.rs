//! Parts of slots of lazy images that are not protected before the first write is noticed.
#![cfg(not(miri))]

use std::time::Duration;

use afresh_memory::{Filler, Image, PAGE_SIZE, PageRange, Slot, SlotConfig};

use crate::common::{lazy_image, occupied};
use crate::lazy::{PAGES, content, uffd_missing};

/// The window of a fault before such pages ends at them.
#[test]
fn writes_that_run_forward_into_pages_without_protection_are_noticed() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, _filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    for page in 180..220 {
        // SAFETY: a page of the slot, which nothing else uses.
        unsafe { slot.base().add(page * PAGE_SIZE + 8).write_volatile(77) };
    }
    assert_eq!(slot.differing().unwrap(), [PageRange::new(180, 40)]);
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}

/// Resets come before the first run of a thawed guest, and protect nothing.
#[test]
fn writes_after_resets_that_found_none_are_restored() {
    if uffd_missing() {
        return;
    }
    let content = content();
    for resets in 0..4 {
        let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
        assert!(filler.unwrap().fill(PageRange::new(200, 30)));
        let config = SlotConfig { capacity: Some(PAGES + 8), ..SlotConfig::default() };
        let mut slot = Slot::new(&image, config).unwrap();
        let mut byte = [0];
        for _ in 0..resets {
            slot.read(201 * PAGE_SIZE, &mut byte).unwrap();
            assert_eq!(slot.reset().unwrap().learned, 0);
        }
        slot.write(250 * PAGE_SIZE, b"dirt").unwrap();
        assert_eq!(slot.reset().unwrap().learned, 1, "after {resets} resets");
        slot.read(250 * PAGE_SIZE, &mut byte).unwrap();
        assert_eq!(byte[0], content[250 * PAGE_SIZE]);
        // Memory that a run has grown is protected in any case.
        slot.grow(PAGES + 4).unwrap();
        slot.write((PAGES + 1) * PAGE_SIZE, b"dirt").unwrap();
        slot.write(201 * PAGE_SIZE, b"dirt").unwrap();
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        slot.grow(PAGES + 4).unwrap();
        slot.read((PAGES + 1) * PAGE_SIZE, &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }
}

/// Every method that relies on protection gets it, also where the pages arrive during the first run
/// and the image is complete before the first write is noticed.
#[test]
fn pages_that_resets_left_unprotected_are_captured_switched_and_trimmed() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let pages = |slot: &Slot, bytes: &[(usize, u8)]| {
        // SAFETY: pages of a slot that nothing else uses.
        bytes.iter().for_each(|(page, byte)| unsafe {
            slot.base().add(page * PAGE_SIZE).write_volatile(*byte);
        });
    };
    let byte_of = |image: &Image, page: usize| {
        let mut byte = [0];
        image.read(page * PAGE_SIZE, &mut byte);
        byte[0]
    };
    for complete in [false, true] {
        let new_slot = || {
            let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
            let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
            slot.reset().unwrap();
            if complete {
                filler.unwrap().stream();
            }
            assert_eq!(slot.reset().unwrap().learned, 0);
            slot
        };
        let written = [(5, 1), (72, 2), (150, 3), (250, 4)];

        // A capture of a running guest: pages before its preparation, after it, and after the stop.
        let mut slot = new_slot();
        pages(&slot, &written[..2]);
        slot.prepare_freeze().unwrap().run().unwrap();
        pages(&slot, &written[2..]);
        pages(&slot, &[(5, 9)]);
        let frozen = slot.freeze_live().unwrap();
        pages(&slot, &[(5, 10), (72, 10), (210, 10)]);
        frozen.complete().unwrap();
        for (page, byte) in [(5, 9), (72, 2), (150, 3), (250, 4), (210, content[210 * PAGE_SIZE])] {
            assert_eq!(byte_of(&frozen, page), byte, "page {page}, complete: {complete}");
        }
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);

        // A prepared capture without a write before the stop.
        let mut slot = new_slot();
        slot.prepare_freeze().unwrap().run().unwrap();
        let frozen = slot.freeze_live().unwrap();
        pages(&slot, &written);
        frozen.complete().unwrap();
        for (page, _) in written {
            assert_eq!(byte_of(&frozen, page), content[page * PAGE_SIZE], "page {page}");
        }
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);

        // A checkpoint, a switch back, and a trim.
        let mut slot = new_slot();
        let first = slot.image().clone();
        pages(&slot, &written[..1]);
        let second = slot.checkpoint().unwrap();
        pages(&slot, &written);
        slot.switch(&first).unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        pages(&slot, &written);
        slot.switch(&second).unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        let mut slot = new_slot();
        pages(&slot, &written);
        slot.trim().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        pages(&slot, &written);
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        let mut slot = new_slot();
        slot.preload(&[PageRange::new(240, 20)]).unwrap();
        pages(&slot, &written);
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    }
}

/// The first run in several threads, while a stream fills the image.
#[test]
fn writes_of_threads_to_unprotected_pages_are_restored_while_pages_arrive() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::from_micros(20));
    let filler = filler.unwrap();
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    slot.reset().unwrap();
    let base = slot.base() as usize;
    std::thread::scope(|scope| {
        scope.spawn(|| filler.stream());
        for seed in 1..4_usize {
            let content = &content;
            scope.spawn(move || {
                for page in (seed..PAGES).step_by(3).map(|page| page * 37 % PAGES) {
                    let at = page * PAGE_SIZE + 8 * seed;
                    // SAFETY: bytes of the slot, which outlives the scope; each page has one
                    // thread.
                    unsafe {
                        let byte = (base + at) as *mut u8;
                        assert_eq!(byte.read_volatile(), content[at], "page {page}");
                        byte.write_volatile(!content[at]);
                    }
                }
            });
        }
    });
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}
