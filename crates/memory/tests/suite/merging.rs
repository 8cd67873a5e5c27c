//! Merging of equal pages by the kernel (KSM) must not hide a write. Each test has its own process,
//! because all memory of that process is merged.
#![cfg(not(miri))]

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use afresh_memory::{ImageBuilder, PAGE_SIZE, Slot, SlotConfig, Strategy, TrackerKind};
use afresh_sys::planted::{Bug, must_be_caught};
use afresh_sys::run_isolated;

use super::prezeroed::{self, BLOCK, FIRST_PAGES, Gate};

const KSM: &str = "/sys/kernel/mm/ksm";
const PAGES: usize = 16;

/// The host's settings, put back at the end.
struct Settings(Vec<(&'static str, String)>);

impl Settings {
    fn change(wanted: &[(&'static str, &str)]) -> std::io::Result<Self> {
        let mut this = Self(Vec::new());
        for (name, value) in wanted {
            let before = fs::read_to_string(format!("{KSM}/{name}"))?;
            fs::write(format!("{KSM}/{name}"), value)?;
            this.0.push((name, before));
        }
        Ok(this)
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        for (name, before) in &self.0 {
            if let Err(error) = fs::write(format!("{KSM}/{name}"), before.trim()) {
                println!("{KSM}/{name} stays changed: {error}");
            }
        }
    }
}

fn counter(name: &str) -> u64 {
    fs::read_to_string(format!("{KSM}/{name}")).unwrap().trim().parse().unwrap()
}

/// Runs a test in a process whose memory the kernel merges, one test at a time: they share the
/// host's settings.
fn merged(name: &str, test: impl FnOnce()) {
    const PR_SET_MEMORY_MERGE: i32 = 67;
    run_isolated(name, || {
        let turn = fs::File::open(std::env::current_exe().unwrap()).unwrap();
        turn.lock().unwrap();
        // SAFETY: changes a setting of this process, which runs this test alone.
        if unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
            println!("SKIPPED: memory of a process cannot be merged here");
            return;
        }
        let wanted = [("run", "1"), ("sleep_millisecs", "1"), ("pages_to_scan", "20000")];
        match Settings::change(&wanted) {
            Ok(settings) => {
                test();
                drop(settings);
            }
            Err(error) => println!("SKIPPED: {KSM} cannot be set here: {error}"),
        }
    });
}

/// Waits until the kernel has merged all equal pages.
fn wait_for_merging() {
    let control = vec![0x77_u8; 64 * PAGE_SIZE];
    let (scans, started) = (counter("full_scans"), Instant::now());
    while counter("full_scans") < scans + 8 && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{} pages shared, {} sharing", counter("pages_shared"), counter("pages_sharing"));
    assert!(counter("pages_sharing") > 0, "the kernel merges nothing");
    drop(control);
}

/// Writes to every page of `pages`, resets, and compares with the image.
fn write_and_reset(slot: &mut Slot, pages: Range<usize>) {
    for page in pages {
        // SAFETY: the callers pass accessible pages of the slot.
        unsafe { slot.base().add(page * PAGE_SIZE + 9).write_volatile(0x5e) };
    }
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), [], "a write to a merged page went unnoticed");
}

#[test]
fn a_write_to_a_page_that_was_equal_to_others_is_undone() {
    merged("merging::a_write_to_a_page_that_was_equal_to_others_is_undone", || {
        let mut builder = ImageBuilder::new(PAGES);
        for page in 0..PAGES {
            builder.segment(page * PAGE_SIZE, &[0x5b; PAGE_SIZE]).unwrap();
        }
        let image = builder.build().unwrap();
        let strategy = Strategy::WriteSet(Some(TrackerKind::UffdSigbus));
        let make = || Slot::new(&image, SlotConfig { strategy, ..SlotConfig::default() });
        let Ok(mut slots) = (0..4).map(|_| make()).collect::<Result<Vec<_>, _>>() else {
            println!("SKIPPED: no userfaultfd in SIGBUS mode here");
            return;
        };
        for slot in &mut slots {
            fill_and_evict(slot, 0..PAGES);
        }
        wait_for_merging();
        for slot in &mut slots {
            write_and_reset(slot, 0..PAGES);
        }
    });
}

/// The first of `pages` that lost its write protection when the kernel merged it, or `otherwise`.
/// The page that equal ones are merged into keeps its protection, and kernels differ in which page
/// that is. A write to it would open all of a huge page.
fn unprotected(slot: &Slot, mut pages: Range<usize>, otherwise: Range<usize>) -> Range<usize> {
    const WRITE_PROTECTED: u64 = 1 << 57;
    let pagemap = fs::File::open("/proc/self/pagemap").unwrap();
    let first = slot.base() as usize / PAGE_SIZE;
    let lost = pages.find(|page| {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, (first + page) as u64 * 8).unwrap();
        u64::from_ne_bytes(entry) & WRITE_PROTECTED == 0
    });
    lost.map_or(otherwise, |page| page..page + 1)
}

/// Fills `pages` with bytes that few others share, so that all of them can be merged, and
/// checkpoints until every page is a protected private copy.
fn fill_and_evict(slot: &mut Slot, pages: Range<usize>) {
    for page in pages {
        slot.write(page * PAGE_SIZE, &[0x50 + (page % 8) as u8; PAGE_SIZE]).unwrap();
    }
    for _ in 0..100 {
        slot.checkpoint().unwrap();
        if slot.write_set_len() == 0 {
            return;
        }
    }
    panic!("{} pages were not evicted", slot.write_set_len());
}

#[test]
fn a_huge_page_taken_from_a_zero_pool_at_a_second_growth_is_not_merged() {
    merged("merging::a_huge_page_taken_from_a_zero_pool_at_a_second_growth_is_not_merged", || {
        let gate = Gate::new(2);
        let Some(mut slot) = prezeroed::slot(&gate, 2) else { return };
        let end = FIRST_PAGES + 2 * BLOCK;
        gate.open.store(false, Ordering::Relaxed);
        slot.grow(end).unwrap();
        write_and_reset(&mut slot, FIRST_PAGES..end);
        gate.open.store(true, Ordering::Relaxed);
        slot.grow(end).unwrap();
        fill_and_evict(&mut slot, FIRST_PAGES..end);
        wait_for_merging();
        let page = FIRST_PAGES + 7..FIRST_PAGES + 8;
        let page = unprotected(&slot, FIRST_PAGES..end, page);
        write_and_reset(&mut slot, page);
    });
}

#[test]
fn memory_mapped_again_after_a_sparse_growth_is_not_merged() {
    merged("merging::memory_mapped_again_after_a_sparse_growth_is_not_merged", || {
        let gate = Gate::new(2);
        let Some(mut slot) = prezeroed::slot(&gate, 2) else { return };
        let end = FIRST_PAGES + 2 * BLOCK;
        slot.grow(end).unwrap();
        write_and_reset(&mut slot, FIRST_PAGES..FIRST_PAGES + 1);
        slot.grow(end).unwrap();
        fill_and_evict(&mut slot, FIRST_PAGES..end);
        wait_for_merging();
        let pages = unprotected(&slot, FIRST_PAGES..end, FIRST_PAGES..end);
        write_and_reset(&mut slot, pages);
    });
}

#[test]
fn mappings_that_may_be_merged_are_caught() {
    if fs::OpenOptions::new().write(true).open(format!("{KSM}/run")).is_err() {
        return println!("SKIPPED: {KSM} cannot be set here");
    }
    for test in [
        "merging::a_write_to_a_page_that_was_equal_to_others_is_undone",
        "merging::a_huge_page_taken_from_a_zero_pool_at_a_second_growth_is_not_merged",
        "merging::memory_mapped_again_after_a_sparse_growth_is_not_merged",
    ] {
        must_be_caught(&[Bug::Merging], &[test]);
    }
}
