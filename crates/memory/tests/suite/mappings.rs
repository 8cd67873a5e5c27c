//! A process at its limit of mappings: the mprotect tracker splits mappings, and a slot that cannot
//! split one more stays in use, at the price of more pages to copy.
#![cfg(all(not(miri), target_os = "linux"))]

use afresh_memory::{
    Image, ImageBuilder, PAGE_SIZE, PageRange, Reservation, Slot, SlotConfig, SlotError, Strategy,
    TrackerKind,
};
use afresh_sys::{Call, Protection, host, inject, run_isolated};

const PAGES: usize = 512;
/// More mappings than a test should need to try for.
const MAX_LIMIT: usize = 1 << 20;

fn slot() -> Slot {
    let mut builder = ImageBuilder::new(PAGES);
    for page in (0..PAGES).step_by(3) {
        builder.segment(page * PAGE_SIZE + 8, &[page as u8 | 1; 100]).unwrap();
    }
    let strategy = Strategy::WriteSet(Some(TrackerKind::Mprotect));
    let config = SlotConfig { strategy, capacity: Some(2 * PAGES), ..SlotConfig::default() };
    Slot::new(&builder.build().unwrap(), config).unwrap()
}

/// Takes every mapping that the process may still have. Those that `spared` has taken are free
/// again afterwards.
fn take_all_mappings(spared: Reservation) -> Reservation {
    let taken = Reservation::new(2 * host::max_mappings()).unwrap();
    let split = |page| taken.protect(PageRange::new(page, 1), Protection::Read);
    let full = (1..taken.pages()).step_by(2).any(|page| split(page).is_err());
    assert!(full, "the limit of mappings is not reached");
    drop(spared);
    taken
}

/// Does `change` in a process that can have no more mappings, with a slot that `before` prepares.
fn at_the_limit<T>(
    name: &str,
    before: impl FnOnce(&mut Slot) -> T,
    change: impl FnOnce(&mut Slot, T),
) {
    run_isolated(name, || {
        if host::max_mappings() > MAX_LIMIT {
            return println!("SKIPPED: vm.max_map_count is {}", host::max_mappings());
        }
        let mut slot = slot();
        let state = before(&mut slot);
        // Room for a few mappings of the allocator and of new files.
        let spared = Reservation::new(40).unwrap();
        (1..40).step_by(4).for_each(|page| {
            spared.protect(PageRange::new(page, 1), Protection::Read).unwrap();
        });
        let taken = take_all_mappings(spared);
        change(&mut slot, state);
        assert_eq!(slot.quarantined(), None);
        drop(taken);
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
        dirty(&mut slot, 77);
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    });
}

/// Writes `value` to some pages, none next to another.
fn dirty(slot: &mut Slot, value: u64) {
    for page in (5..PAGES).step_by(7) {
        slot.write(page * PAGE_SIZE, &value.to_le_bytes()).unwrap();
    }
}

#[test]
fn a_captured_slot_is_reset_without_another_mapping() {
    let capture = |slot: &mut Slot| {
        dirty(slot, 3);
        let expected = slot.freeze().unwrap();
        (expected, slot.freeze_live().unwrap())
    };
    at_the_limit(
        "mappings::a_captured_slot_is_reset_without_another_mapping",
        capture,
        |slot, (expected, frozen): (Image, Image)| {
            assert!(!frozen.is_complete());
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), []);
            dirty(slot, 5);
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), []);
            frozen.complete().unwrap();
            assert_eq!(frozen.digest(), expected.digest());
        },
    );
}

#[test]
fn pages_are_opened_in_advance_without_another_mapping() {
    at_the_limit(
        "mappings::pages_are_opened_in_advance_without_another_mapping",
        |_| (),
        |slot, ()| {
            let pages: Vec<_> = (5..PAGES).step_by(7).map(|page| PageRange::new(page, 1)).collect();
            slot.preload(&pages).unwrap();
            dirty(slot, 5);
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), []);
        },
    );
}

#[test]
fn idle_pages_leave_the_write_set_without_another_mapping() {
    at_the_limit(
        "mappings::idle_pages_leave_the_write_set_without_another_mapping",
        |slot| {
            // One run, in which every other page is idle afterwards.
            (100..200).for_each(|page| slot.write(page * PAGE_SIZE, &[9]).unwrap());
            slot.reset().unwrap();
        },
        |slot, ()| {
            for round in 0..150 {
                for page in (100..200).step_by(2) {
                    slot.write(page * PAGE_SIZE, &[round]).unwrap();
                }
                slot.reset().unwrap();
            }
            (100..200).for_each(|page| slot.write(page * PAGE_SIZE, &[9]).unwrap());
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), []);
        },
    );
}

#[test]
fn a_checkpoint_is_taken_without_another_mapping() {
    at_the_limit(
        "mappings::a_checkpoint_is_taken_without_another_mapping",
        |slot| {
            (100..200).for_each(|page| slot.write(page * PAGE_SIZE, &[9]).unwrap());
            slot.reset().unwrap();
        },
        |slot, ()| {
            let first = slot.image().clone();
            for round in 1..20 {
                for page in (100..200).step_by(2) {
                    slot.write(page * PAGE_SIZE, &[round]).unwrap();
                }
                // The file of another image takes a mapping, too.
                if let Err(error) = slot.checkpoint() {
                    assert!(error.to_string().contains("mmap"), "{error}");
                }
            }
            slot.switch(&first).unwrap();
        },
    );
}

#[test]
fn growth_that_the_kernel_refuses_changes_nothing() {
    let mut slot = slot();
    let plan =
        |times| inject::Plan { call: Some(Call::Protect), after: 0, times, errno: libc::ENOMEM };
    let (refused, fired) = inject::with(plan(1), || slot.grow(PAGES + 9));
    assert_eq!(fired, 1);
    assert!(matches!(refused, Err(SlotError::System(_))), "{refused:?}");
    assert_eq!((slot.end(), slot.quarantined()), (PAGES, None));
    slot.grow(PAGES + 9).unwrap();
    slot.write((PAGES + 8) * PAGE_SIZE, &[1]).unwrap();
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
    // Neither opened nor closed for certain.
    let (refused, fired) = inject::with(plan(2), || slot.grow(PAGES + 9));
    assert!(refused.is_err() && fired == 2);
    assert!(slot.quarantined().is_some());
}
