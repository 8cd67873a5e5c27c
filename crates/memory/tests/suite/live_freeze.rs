//! Captures that are copied while the guest runs: the image is of the stop, whatever the guest, the
//! slot and the readers of the image do meanwhile.
#![cfg(not(miri))]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use afresh_memory::{
    Features, HostAccess, Image, ImageBuilder, PAGE_SIZE, PageRange, Slot, SlotConfig, Strategy,
    TrackerKind,
};
use afresh_sys::planted::{Bug, must_be_caught};
use afresh_sys::{Call, inject};

const PAGES: usize = 512;

fn image() -> Image {
    let mut builder = ImageBuilder::new(PAGES);
    for page in (0..PAGES).step_by(3) {
        builder.segment(page * PAGE_SIZE + 8, &[page as u8 | 1; 100]).unwrap();
    }
    builder.build().unwrap()
}

fn slot(kind: TrackerKind) -> Option<Slot> {
    let strategy = Strategy::WriteSet(Some(kind));
    if let Err(error) = strategy.choose(Features::host(), HostAccess::Threads) {
        println!("SKIPPED: {kind}: {error}");
        return None;
    }
    let config = SlotConfig { strategy, capacity: Some(2 * PAGES), ..SlotConfig::default() };
    Some(Slot::new(&image(), config).unwrap())
}

/// The trackers that have a write barrier.
const KINDS: [TrackerKind; 2] = [TrackerKind::UffdSigbus, TrackerKind::Mprotect];

fn word(base: usize, page: usize) -> *mut u64 {
    (base + page * PAGE_SIZE) as *mut u64
}

/// A guest that counts in its pages: in each step it writes the next number to the first page, then
/// to some page, and last to the last one. So at any stop between two steps the first and the last
/// page have the same number, and a page in between has the last number of its turn.
struct Counter {
    base: usize,
    steps: AtomicU64,
    paused: AtomicBool,
    rests: AtomicBool,
    over: AtomicBool,
}

/// The page that step `n` writes in addition.
fn page_of(n: u64) -> usize {
    1 + (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % (PAGES - 2)
}

impl Counter {
    fn run(&self) {
        for n in 1.. {
            while self.paused.load(Ordering::Acquire) && !self.over.load(Ordering::Acquire) {
                self.rests.store(true, Ordering::Release);
                std::thread::yield_now();
            }
            self.rests.store(false, Ordering::Release);
            if self.over.load(Ordering::Acquire) {
                return;
            }
            for page in [0, page_of(n), PAGES - 1] {
                // SAFETY: in the slot, which outlives the thread; no other thread writes there.
                unsafe { word(self.base, page).write_volatile(n) };
            }
            self.steps.store(n, Ordering::Release);
        }
    }

    /// Stops the guest for `work`, which gets the number of its last step.
    fn stopped<T>(&self, work: impl FnOnce(u64) -> T) -> T {
        self.rests.store(false, Ordering::Release);
        self.paused.store(true, Ordering::Release);
        while !self.rests.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let done = work(self.steps.load(Ordering::Acquire));
        self.paused.store(false, Ordering::Release);
        done
    }
}

/// Ends the guest, also when a check fails.
struct EndOfGuest<'a>(&'a Counter);

impl Drop for EndOfGuest<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Release);
    }
}

/// Checks that `frozen` is the memory of a guest after step `last`.
fn check(frozen: &Image, before: &Image, last: u64) {
    let number = |image: &Image, page: usize| {
        let mut bytes = [0; 8];
        image.read(page * PAGE_SIZE, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    let mut expected: Vec<u64> = (0..PAGES).map(|page| number(before, page)).collect();
    for n in 1..=last {
        for page in [0, page_of(n), PAGES - 1] {
            expected[page] = n;
        }
    }
    for (page, expected) in expected.into_iter().enumerate() {
        assert_eq!(number(frozen, page), expected, "page {page} after step {last}");
        let (mut one, mut two) = ([0; PAGE_SIZE - 8], [0; PAGE_SIZE - 8]);
        frozen.read(page * PAGE_SIZE + 8, &mut one);
        before.read(page * PAGE_SIZE + 8, &mut two);
        assert!(one == two, "page {page}");
    }
}

fn freeze_a_counting_guest(kind: TrackerKind) {
    let Some(mut slot) = slot(kind) else { return };
    let before = slot.image().clone();
    let counter = Counter {
        base: slot.base() as usize,
        steps: AtomicU64::new(0),
        paused: AtomicBool::new(false),
        rests: AtomicBool::new(false),
        over: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        scope.spawn(|| counter.run());
        let end = EndOfGuest(&counter);
        let mut captures = Vec::new();
        for round in 0..24 {
            // Rounds with a preparation that runs while the guest does, one that is dropped, and
            // none.
            if round % 3 != 0 {
                let preparation = counter.stopped(|_| slot.prepare_freeze().unwrap());
                assert!(!preparation.is_empty());
                if round % 3 == 1 {
                    scope.spawn(move || preparation.run().unwrap());
                }
                while counter.steps.load(Ordering::Acquire) < 300 * round {
                    std::thread::yield_now();
                }
            }
            let (frozen, last) = counter.stopped(|last| (slot.freeze_live().unwrap(), last));
            let (frozen, before) = (frozen, before.clone());
            let reader = scope.spawn(move || {
                if round % 2 == 0 {
                    frozen.complete().unwrap();
                } else {
                    // Single pages, in another order than they are captured.
                    for page in (0..PAGES).rev() {
                        frozen.resolve(PageRange::new(page, 1)).unwrap();
                    }
                }
                assert!(frozen.is_complete());
                check(&frozen, &before, last);
            });
            captures.push(reader);
            if round % 4 == 0 {
                captures.pop().unwrap().join().unwrap();
            }
        }
        drop(end);
        let results: Vec<_> = captures.into_iter().map(|reader| reader.join()).collect();
        results.into_iter().for_each(|result| result.unwrap());
    });
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}

#[test]
fn a_guest_that_writes_on_is_frozen_as_it_was_at_the_stop() {
    KINDS.into_iter().for_each(freeze_a_counting_guest);
}

#[test]
fn planted_bugs_of_captures_are_caught() {
    if slot(TrackerKind::UffdSigbus).is_none() {
        return;
    }
    must_be_caught(
        &[Bug::CopyLive, Bug::Prepare],
        &["live_freeze::writes_after_the_stop_do_not_reach_the_image"],
    );
}

/// Writes `value` to some pages.
fn dirty(slot: &mut Slot, value: u64) {
    for page in (5..PAGES).step_by(7) {
        slot.write(page * PAGE_SIZE, &value.to_le_bytes()).unwrap();
    }
}

#[test]
fn a_capture_is_completed_before_the_slot_changes_and_outlives_it() {
    for kind in KINDS {
        type Change = fn(&mut Slot);
        let changes: [Change; 7] = [
            |slot| _ = slot.reset().unwrap(),
            |slot| drop(slot.freeze().unwrap()),
            |slot| drop(slot.checkpoint().unwrap()),
            |slot| _ = slot.switch(&Image::zero(PAGES)).unwrap(),
            |slot| slot.set_image(&Image::zero(PAGES), &[]).unwrap(),
            |slot| slot.trim().unwrap(),
            |slot| slot.preload(&[PageRange::new(0, PAGES)]).unwrap(),
        ];
        for change in changes {
            let Some(mut slot) = slot(kind) else { continue };
            dirty(&mut slot, 3);
            let expected = slot.freeze().unwrap();
            let frozen = slot.freeze_live().unwrap();
            assert!(!frozen.is_complete());
            change(&mut slot);
            assert!(frozen.is_complete());
            dirty(&mut slot, 4);
            assert_eq!(frozen.digest(), expected.digest());
        }
        let Some(mut slot) = slot(kind) else { continue };
        dirty(&mut slot, 3);
        let expected = slot.freeze().unwrap();
        let frozen = slot.freeze_live().unwrap();
        slot.grow(PAGES + 9).unwrap();
        slot.write(PAGES * PAGE_SIZE, &[1]).unwrap();
        assert!(!frozen.is_complete());
        let preparation = slot.prepare_freeze().unwrap();
        drop(slot);
        preparation.run().unwrap();
        assert_eq!(frozen.digest(), expected.digest());
    }
}

#[test]
fn writes_after_the_stop_do_not_reach_the_image() {
    for kind in KINDS {
        for (prepared, run) in [(false, false), (true, false), (true, true)] {
            let Some(mut slot) = slot(kind) else { continue };
            dirty(&mut slot, 3);
            let expected = slot.freeze().unwrap();
            if prepared {
                let preparation = slot.prepare_freeze().unwrap();
                if run {
                    preparation.run().unwrap();
                }
                dirty(&mut slot, 4);
                dirty(&mut slot, 3);
                slot.write((PAGES - 1) * PAGE_SIZE, &[9]).unwrap();
                slot.write((PAGES - 1) * PAGE_SIZE, &[0]).unwrap();
            }
            let frozen = slot.freeze_live().unwrap();
            assert!(!frozen.is_complete());
            dirty(&mut slot, 5);
            slot.write((PAGES - 1) * PAGE_SIZE, &[5]).unwrap();
            assert_eq!(frozen.digest(), expected.digest(), "{kind}, prepared: {prepared}, {run}");
        }
    }
}

#[test]
fn an_abandoned_capture_leaves_the_slot_as_it_was() {
    for kind in KINDS {
        let Some(mut slot) = slot(kind) else { continue };
        for round in 0..5 {
            dirty(&mut slot, round + 1);
            let preparation = slot.prepare_freeze().unwrap();
            if round % 2 == 0 {
                preparation.run().unwrap();
            }
            if round > 2 {
                drop(slot.freeze_live().unwrap());
            }
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), []);
            preparation.run().unwrap();
            // The write set is open again: nothing is noticed.
            dirty(&mut slot, 9);
            assert_eq!(slot.reset().unwrap().learned, 0, "{kind}");
            assert_eq!(slot.verify().unwrap(), []);
        }
    }
}

#[test]
fn a_page_that_cannot_be_copied_fails_the_image_and_not_the_slot() {
    let Some(mut slot) = slot(TrackerKind::UffdSigbus) else { return };
    dirty(&mut slot, 3);
    let frozen = slot.freeze_live().unwrap();
    let plan = inject::Plan { call: Some(Call::UffdFill), after: 0, times: 1, errno: libc::ENOMEM };
    // The handler of this write must copy the page.
    let ((), fired) = inject::with(plan, || dirty(&mut slot, 4));
    assert_eq!(fired, 1);
    let error = frozen.complete().unwrap_err().to_string();
    assert!(error.contains("a page of a capture could not be stored"), "{error}");
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
    dirty(&mut slot, 5);
    let frozen = slot.freeze_live().unwrap();
    assert_eq!(frozen.digest(), slot.freeze().unwrap().digest());
}

#[test]
fn a_tracker_without_a_barrier_copies_at_the_stop() {
    for strategy in Strategy::FORCED {
        if let Strategy::WriteSet(Some(TrackerKind::UffdSigbus | TrackerKind::Mprotect)) = strategy
        {
            continue;
        }
        let config = SlotConfig { strategy, ..SlotConfig::default() };
        let mut slot = match Slot::new(&image(), config) {
            Ok(slot) => slot,
            Err(error) => {
                println!("SKIPPED: {strategy}: {error}");
                continue;
            }
        };
        dirty(&mut slot, 3);
        assert!(slot.prepare_freeze().unwrap().is_empty());
        let frozen = slot.freeze_live().unwrap();
        assert!(frozen.is_complete(), "{strategy}");
        assert_eq!(frozen.digest(), slot.freeze().unwrap().digest());
    }
}

#[test]
fn pages_that_a_prepared_slot_grows_into_again_are_frozen_as_they_were_at_the_stop() {
    for kind in KINDS {
        let Some(mut slot) = slot(kind) else { continue };
        let write = |slot: &mut Slot, byte| {
            (PAGES..PAGES + 8).for_each(|page| slot.write(page * PAGE_SIZE, &[byte]).unwrap());
        };
        slot.grow(PAGES + 8).unwrap();
        write(&mut slot, 1);
        slot.reset().unwrap();
        dirty(&mut slot, 3);
        slot.prepare_freeze().unwrap().run().unwrap();
        slot.grow(PAGES + 8).unwrap();
        write(&mut slot, 2);
        let frozen = slot.freeze_live().unwrap();
        assert!(!frozen.is_complete());
        write(&mut slot, 3);
        for page in PAGES..PAGES + 8 {
            let mut byte = [0];
            frozen.resolve(PageRange::new(page, 1)).unwrap();
            frozen.read(page * PAGE_SIZE, &mut byte);
            assert_eq!(byte, [2], "{kind}: page {page}");
        }
    }
}

#[test]
fn a_capture_outlives_its_slot_and_the_image_below_it() {
    for kind in KINDS {
        let Some(mut slot) = slot(kind) else { continue };
        // In sequence, so that more pages open than are written.
        for page in 0..100 {
            slot.write(page * PAGE_SIZE, &[9]).unwrap();
        }
        let frozen = slot.freeze_live().unwrap();
        let expected = slot.image().clone();
        let contents: Vec<_> = (0..PAGES).map(|page| expected.page(page).copied()).collect();
        drop(expected);
        drop(slot);
        frozen.complete().unwrap();
        for (page, content) in contents.into_iter().enumerate() {
            let mut content = content.unwrap_or([0; PAGE_SIZE]);
            if page < 100 {
                content[0] = 9;
            }
            let mut found = [0; PAGE_SIZE];
            frozen.read(page * PAGE_SIZE, &mut found);
            assert!(found == content, "{kind}: page {page}");
        }
    }
}
