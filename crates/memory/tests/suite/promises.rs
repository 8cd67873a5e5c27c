//! The promises of a slot in addition to restoring bytes: guards, limits, quarantine, adaptation,
//! secrets, bounded descriptors, and errors when system calls fail.
#![cfg(not(miri))]

use std::os::unix::process::ExitStatusExt;

use afresh_memory::{
    Feature, Features, HostAccess, Image, ImageBuilder, PAGE_SIZE, PageRange, ResetError, Slot,
    SlotConfig, SlotError, Strategy, TrackerKind,
};
use afresh_sys::inject;
use afresh_sys::planted::{self, Bug};

fn image(pages: usize, byte: u8) -> Image {
    let mut builder = ImageBuilder::new(pages);
    builder.segment(0, &vec![byte; pages * PAGE_SIZE]).unwrap();
    builder.build().unwrap()
}

fn slot(strategy: Strategy, pages: usize, capacity: usize) -> Option<Slot> {
    let config = SlotConfig { strategy, capacity: Some(capacity), ..SlotConfig::default() };
    match Slot::new(&image(pages, 7), config) {
        Ok(slot) => Some(slot),
        Err(SlotError::Unavailable { reason, .. }) => {
            println!("SKIPPED: {strategy}: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn each(pages: usize, capacity: usize, mut check: impl FnMut(Slot)) {
    for strategy in Strategy::FORCED.into_iter().chain([Strategy::Auto]) {
        if let Some(slot) = slot(strategy, pages, capacity) {
            check(slot);
        }
    }
}

#[test]
fn a_secret_is_nowhere_in_the_slot_after_a_reset() {
    const SECRET: &[u8] = b"canary-5f3759df-secret";
    each(64, 128, |mut slot| {
        slot.grow(96).unwrap();
        for page in (0..96).step_by(5) {
            slot.write(page * PAGE_SIZE + 100, SECRET).unwrap();
        }
        slot.reset().unwrap();
        // A later run grows into the same pages and must find zeros, not the secret.
        slot.grow(128).unwrap();
        let mut bytes = vec![0; 128 * PAGE_SIZE];
        slot.read(0, &mut bytes).unwrap();
        assert!(!bytes.windows(SECRET.len()).any(|w| w == SECRET), "{slot:?}");
        assert!(bytes[64 * PAGE_SIZE..].iter().all(|b| *b == 0), "{slot:?}");
    });
}

#[test]
fn reads_and_writes_outside_the_accessible_part_are_refused() {
    each(4, 8, |mut slot| {
        assert!(matches!(
            slot.write(4 * PAGE_SIZE - 1, &[1, 2]),
            Err(SlotError::OutOfBounds { .. })
        ));
        assert!(slot.read(usize::MAX, &mut [0]).is_err());
        assert!(matches!(slot.grow(9), Err(SlotError::TooLarge { .. })));
        assert!(slot.quarantined().is_none());
    });
}

/// Runs this test again in a child that touches `page`, and returns the signal that ended it.
fn signal_of_touching(test: &str, strategy: Strategy, page: isize) -> Option<i32> {
    if let Ok(request) = std::env::var("AFRESH_TEST_TOUCH") {
        let (strategy, page) = request.split_once(' ').unwrap();
        let mut slot = slot(strategy.parse().unwrap(), 4, 8).unwrap();
        slot.grow(6).unwrap();
        slot.write(5 * PAGE_SIZE, &[1]).unwrap();
        slot.reset().unwrap();
        let page: isize = page.parse().unwrap();
        // SAFETY: not safe at all: the address is inside the slot's reservation, where a write must
        // end this child process.
        unsafe { slot.base().offset(page * PAGE_SIZE as isize).write_volatile(1) };
        std::process::exit(0);
    }
    afresh_sys::test_command(test)
        .arg("--test-threads=1")
        .env("AFRESH_TEST_TOUCH", format!("{strategy} {page}"))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap()
        .signal()
}

#[test]
fn guards_and_pages_hidden_by_a_reset_can_not_be_touched() {
    for strategy in Strategy::FORCED {
        if slot(strategy, 4, 8).is_none() {
            continue;
        }
        for page in [-1, 4, 5, 8] {
            let test = "promises::guards_and_pages_hidden_by_a_reset_can_not_be_touched";
            let signal = signal_of_touching(test, strategy, page);
            assert_eq!(signal, Some(libc::SIGSEGV), "{strategy}, page {page}");
        }
    }
}

#[test]
fn a_failed_reset_quarantines_the_slot_for_good() {
    each(8, 16, |mut slot| {
        slot.grow(12).unwrap();
        slot.write(0, &[1]).unwrap();
        let plan = inject::Plan { call: None, after: 0, times: 1, errno: libc::ENOMEM };
        let (result, fired) = inject::with(plan, || slot.reset());
        assert_eq!(fired, 1, "{slot:?}");
        assert!(result.is_err());
        assert!(slot.quarantined().is_some());
        assert!(matches!(slot.reset(), Err(ResetError::Quarantined { .. })));
        assert!(matches!(slot.write(0, &[1]), Err(SlotError::Quarantined { .. })));
        assert!(slot.freeze().is_err());
    });
}

#[test]
fn a_slot_is_correct_or_refused_after_any_failed_system_call() {
    for strategy in Strategy::FORCED.into_iter().chain([Strategy::Auto]) {
        if slot(strategy, 8, 16).is_none() {
            continue;
        }
        for after in 0.. {
            let plan = inject::Plan { call: None, after, times: 1, errno: libc::ENOMEM };
            let (slot, fired) = inject::with(plan, || {
                let mut slot = slot_or_error(strategy).ok()?;
                let _ = slot.grow(12);
                let _ = slot.write(3 * PAGE_SIZE, &[9; 5000]);
                let _ = slot.freeze();
                let _ = slot.preload(&[PageRange::new(1, 2)]);
                let _ = slot.reset();
                let _ = slot.write(PAGE_SIZE, &[9; 5000]);
                let _ = slot.reset();
                let _ = slot.trim();
                Some(slot)
            });
            if let Some(mut slot) = slot.filter(|s| s.quarantined().is_none()) {
                slot.reset().unwrap();
                assert_eq!(slot.verify().unwrap(), [], "{strategy}, call {after} failed: {slot:?}");
            }
            if fired == 0 {
                assert!(after > 3, "{strategy} made too few system calls for a test");
                break;
            }
        }
    }
}

fn slot_or_error(strategy: Strategy) -> Result<Slot, Box<dyn std::error::Error>> {
    let mut builder = ImageBuilder::new(8);
    builder.segment(0, &[7; 3 * PAGE_SIZE])?;
    let config = SlotConfig { strategy, capacity: Some(16), ..SlotConfig::default() };
    Ok(Slot::new(&builder.build()?, config)?)
}

#[test]
fn a_verification_that_finds_a_difference_quarantines_the_slot() {
    let config = SlotConfig {
        strategy: Strategy::WriteSet(None),
        verify_every: Some(1),
        ..SlotConfig::default()
    };
    // A tracker that notices nothing stands for a broken one.
    struct BlindTracker;
    // SAFETY: it breaks the contract, which is the test; unreported writes stay in the slot, and
    // nowhere else.
    unsafe impl afresh_memory::Tracker for BlindTracker {
        fn kind(&self) -> TrackerKind {
            TrackerKind::Other("blind")
        }
        fn watch(&mut self, _: PageRange) -> Result<(), afresh_memory::TrackError> {
            Ok(())
        }
        fn drain(&mut self, _: &mut Vec<PageRange>) -> Result<(), afresh_memory::TrackError> {
            Ok(())
        }
        fn arm(&mut self, _: &[PageRange]) -> Result<(), afresh_memory::TrackError> {
            Ok(())
        }
        fn open(&mut self, _: &[PageRange]) -> Result<(), afresh_memory::TrackError> {
            Ok(())
        }
    }
    let mut slot =
        Slot::with_tracker(&image(4, 7), config, |_, _| Ok(Box::new(BlindTracker))).unwrap();
    slot.reset().unwrap();
    slot.write(2 * PAGE_SIZE, &[1]).unwrap();
    assert!(matches!(slot.reset(), Err(ResetError::Mismatch { page: 2 })));
    assert!(slot.quarantined().is_some());
}

#[test]
fn a_steady_workload_learns_its_pages_once_and_idle_pages_are_evicted() {
    for kind in [TrackerKind::UffdSigbus, TrackerKind::Mprotect, TrackerKind::UffdScan] {
        let Some(mut slot) = slot(Strategy::WriteSet(Some(kind)), 256, 256) else { continue };
        let mut run = |pages: &[usize]| {
            for page in pages {
                slot.write(page * PAGE_SIZE, &[9]).unwrap();
            }
            slot.reset().unwrap().learned
        };
        assert_eq!(run(&[3, 50, 200]), 3);
        for _ in 0..500 {
            assert_eq!(run(&[3, 50]), 0);
        }
        assert_eq!(slot.write_set(), [PageRange::new(3, 1), PageRange::new(50, 1)], "{kind}");
        assert_eq!(slot.stats().evicted, 1);
    }
}

#[test]
fn after_heavy_work_light_calls_are_light_again_within_a_hundred_and_memory_falls() {
    const HEAVY: usize = 6000;
    for kind in [TrackerKind::UffdSigbus, TrackerKind::Mprotect, TrackerKind::UffdScan] {
        let config =
            SlotConfig { strategy: Strategy::WriteSet(Some(kind)), ..SlotConfig::default() };
        // Zeros: its resident pages belong to the slot.
        let Ok(mut slot) = Slot::new(&Image::zero(8192), config) else {
            println!("SKIPPED: no tracker {kind} on this host");
            continue;
        };
        // Heavy and light phases in turn: lessons of one must not spoil the next.
        for phase in 0..3 {
            for run in 0..40 {
                for page in 0..HEAVY {
                    slot.write((page + 7) * PAGE_SIZE, &[run as u8 + 1]).unwrap();
                }
                slot.reset().unwrap();
            }
            assert!(slot.write_set_len() >= HEAVY, "{kind}, phase {phase}: {slot:?}");
            for _ in 0..100 {
                slot.write(3 * PAGE_SIZE, &[9]).unwrap();
                slot.reset().unwrap();
            }
            assert!(slot.write_set_len() <= 2, "{kind}, phase {phase}: {slot:?}");
            let resident = slot.resident_pages();
            assert!(resident <= HEAVY / 10, "{kind}, phase {phase}: {resident} pages");
        }
        assert_eq!(slot.verify().unwrap(), []);
    }
}

#[test]
fn memory_that_one_run_grew_into_is_given_back_and_can_be_grown_into_again() {
    for strategy in Strategy::FORCED.into_iter().chain([Strategy::Auto]) {
        let Some(mut slot) = slot(strategy, 16, 4096) else { continue };
        for again in 0..3 {
            slot.grow(4096).unwrap();
            for page in 16..4096 {
                slot.write(page * PAGE_SIZE, &[7]).unwrap();
            }
            for _ in 0..1500 {
                slot.reset().unwrap();
                slot.write(3 * PAGE_SIZE, &[9]).unwrap();
            }
            slot.reset().unwrap();
            let grown = slot.base() as usize + 16 * PAGE_SIZE;
            let resident = resident_in(grown, 4080);
            assert_eq!(resident, 0, "{strategy}, growth {again}");
            assert_eq!(slot.verify().unwrap(), [], "{strategy}");
        }
        slot.grow(4096).unwrap();
        let mut bytes = [1; 8];
        slot.read(4000 * PAGE_SIZE, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 8], "{strategy}: growth is zero");
    }
}

/// The number of pages in memory, among `pages` pages from `start` on, accessible or not.
fn resident_in(start: usize, pages: usize) -> usize {
    let mut map = vec![0u8; pages];
    // SAFETY: queries a range that the slot keeps reserved; `map` has a byte for each page.
    let outcome = unsafe { libc::mincore(start as *mut _, pages * PAGE_SIZE, map.as_mut_ptr()) };
    assert_eq!(outcome, 0);
    map.iter().filter(|byte| **byte & 1 != 0).count()
}

#[test]
fn a_workload_that_never_repeats_falls_back_to_discarding_and_returns() {
    let Some(mut slot) = slot(Strategy::Auto, 8192, 8192) else { return };
    if slot.choice().strategy == Strategy::Discard {
        println!("SKIPPED: no tracker on this host");
        return;
    }
    for run in 0..200 {
        for i in 0..64 {
            slot.write((run * 41 + i * 127) % 8192 * PAGE_SIZE, &[9]).unwrap();
        }
        slot.reset().unwrap();
    }
    assert!(slot.stats().fallbacks > 0, "{slot:?}");
    assert_eq!(slot.verify().unwrap(), []);
    for _ in 0..20_000 {
        slot.write(5 * PAGE_SIZE, &[9]).unwrap();
        slot.reset().unwrap();
    }
    assert_eq!(slot.write_set(), [PageRange::new(5, 1)], "{slot:?}");
}

#[test]
fn a_slot_without_a_feature_takes_the_next_strategy_and_works() {
    let mut features = Features::host().clone();
    for masked in [Feature::UffdSigbus, Feature::Mprotect, Feature::UffdAsync] {
        features = features.without(masked);
        let config = SlotConfig { features: Some(features.clone()), ..SlotConfig::default() };
        let mut slot = Slot::new(&image(16, 7), config).unwrap();
        for run in 0..10 {
            slot.write(run * PAGE_SIZE, &[1; 100]).unwrap();
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), [], "{:?}", slot.choice());
        }
    }
}

#[test]
fn a_system_call_may_write_slot_memory_when_the_caller_says_so() {
    use std::io::{Read, Write};
    if let Err(error) = Strategy::Reprotect.choose(Features::host(), HostAccess::Syscalls) {
        println!("SKIPPED: {error}");
        return;
    }
    let config = SlotConfig { host_access: HostAccess::Syscalls, ..SlotConfig::default() };
    let mut slot = Slot::new(&image(8, 7), config).unwrap();
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    for _ in 0..5 {
        writer.write_all(b"from the kernel").unwrap();
        // SAFETY: 15 bytes of page 2, accessible; no other reference to them exists at this time.
        let target = unsafe { std::slice::from_raw_parts_mut(slot.base().add(2 * PAGE_SIZE), 15) };
        reader.read_exact(target).unwrap();
        assert_eq!(slot.reset().unwrap().restored, 1);
        assert_eq!(slot.verify().unwrap(), []);
    }
}

#[test]
fn an_opened_range_takes_a_system_call_under_every_tracker() {
    use std::io::{Read, Write};
    each(8, 8, |mut slot| {
        slot.open_range(PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&[1; 5000]).unwrap();
        // SAFETY: accessible; no other reference to these bytes exists at this time.
        let target = unsafe { std::slice::from_raw_parts_mut(slot.base().add(PAGE_SIZE), 5000) };
        reader.read_exact(target).unwrap();
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    });
}

#[test]
fn ten_thousand_images_do_not_exhaust_descriptors() {
    // Other tests of this process would count as well.
    afresh_sys::run_isolated("promises::ten_thousand_images_do_not_exhaust_descriptors", || {
        let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = count();
        let images: Vec<Image> = (0..10_000).map(|n| image(1, (n % 250) as u8 + 1)).collect();
        assert!(count() - before < 200, "{} descriptors", count() - before);
        for (n, image) in images.iter().enumerate().step_by(997) {
            let mut slot = Slot::new(image, SlotConfig::default()).unwrap();
            let mut byte = [0];
            slot.read(9, &mut byte).unwrap();
            assert_eq!(byte[0], (n % 250) as u8 + 1);
            slot.write(9, &[0]).unwrap();
            slot.reset().unwrap();
            assert_eq!(slot.verify().unwrap(), []);
        }
    });
}

#[test]
fn equal_content_has_equal_digests_however_it_is_stored() {
    let a = image(16, 3);
    let mut slot = Slot::new(&a, SlotConfig::default()).unwrap();
    slot.write(5 * PAGE_SIZE, &[0; PAGE_SIZE]).unwrap();
    slot.write(7 * PAGE_SIZE, &[9]).unwrap();
    let derived = slot.freeze().unwrap();
    assert_eq!(derived.stored_pages(), 15);
    assert_eq!(derived.digest(), derived.compact().unwrap().digest());
    let apart = slot.freeze_apart().unwrap();
    assert_eq!((apart.digest(), apart.stored_pages()), (derived.digest(), 15));
    assert_ne!(derived.digest(), a.digest());
    slot.set_image(&derived, &[]).unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}

#[test]
fn an_image_that_stores_a_page_in_a_gap_is_refused() {
    let regions = vec![PageRange::new(0, 2), PageRange::new(4, 4)];
    let config = SlotConfig { regions, ..SlotConfig::default() };
    let error = Slot::new(&image(8, 1), config).unwrap_err();
    assert!(matches!(error, SlotError::ImageOutsideRegions { page: 2 }), "{error}");
}

/// Runs one test of this file again, in a child with the given changes.
fn again(test: &str, change: impl FnOnce(&mut std::process::Command)) -> std::io::Result<String> {
    let mut child = afresh_sys::test_command(test);
    child.arg("--test-threads=1");
    change(&mut child);
    let output = child.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
    Ok(text)
}

const SECRET_TEST: &str = "promises::a_secret_is_nowhere_in_the_slot_after_a_reset";

#[test]
fn every_fallback_keeps_the_promise_on_a_host_that_lacks_features() {
    let all = "uffd,pagemap-scan,mprotect,populate";
    for without in ["uffd-sigbus", "uffd", "mprotect", "pagemap-scan", all] {
        let text = again(SECRET_TEST, |child| {
            child.env("AFRESH_WITHOUT", without);
        })
        .unwrap();
        // The child must have skipped the removed feature, or the switch does nothing.
        let expected = without != "populate";
        assert_eq!(text.contains("SKIPPED"), expected, "{without}: {text}");
    }
}

#[test]
fn it_works_without_root() {
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65_534;
    for test in [
        SECRET_TEST,
        "promises::a_steady_workload_learns_its_pages_once_and_idle_pages_are_evicted",
    ] {
        let result = again(test, |child| {
            child.uid(NOBODY).gid(NOBODY);
        });
        match result {
            Ok(text) if text.contains("SKIPPED") => println!("as another user, {text}"),
            Ok(_) => {}
            Err(error) => println!("SKIPPED: cannot run the test as another user: {error}"),
        }
    }
}

#[test]
fn a_forked_child_is_refused_rather_than_given_a_slot_that_notices_nothing() {
    each(8, 8, |mut slot| {
        slot.write(0, &[1]).unwrap();
        slot.reset().unwrap();
        // SAFETY: the child touches only memory that exists before the fork, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // Written past the parent's protection; the reset must not call this page restored.
            // SAFETY: an accessible page of the slot, which the child has to itself.
            unsafe { slot.base().add(5 * PAGE_SIZE).write_volatile(9) };
            let byte = |slot: &Slot| {
                let mut byte = [0];
                slot.read(5 * PAGE_SIZE, &mut byte).map(|()| byte[0])
            };
            let safe = match slot.reset() {
                Err(_) => byte(&slot).is_err(),
                Ok(_) => matches!(byte(&slot), Ok(7)),
            };
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(i32::from(!safe)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "{slot:?}");
        slot.write(0, &[2]).unwrap();
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    });
}

#[test]
fn growth_that_is_written_forward_takes_no_fault_a_page() {
    let strategy = Strategy::WriteSet(Some(TrackerKind::UffdSigbus));
    let config = SlotConfig { strategy, capacity: Some(200), ..SlotConfig::default() };
    let mut slot = match Slot::new(&image(16, 7), config) {
        Ok(slot) => slot,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let before = slot.resident_pages();
    slot.grow(100).unwrap();
    // Windows of 1, 2 and 4 pages.
    (20..24).for_each(|page| slot.write(page * PAGE_SIZE, &[1]).unwrap());
    match slot.resident_pages() - before {
        // Linux before 5.14 cannot.
        4 => println!("SKIPPED: pages are not made resident ahead here"),
        resident => assert_eq!(resident, 7),
    }
    let learned = slot.reset().unwrap().learned;
    assert_eq!((learned, slot.verify().unwrap()), (7, Vec::new()));
}

#[test]
fn planted_bugs_of_the_safeguards_are_caught() {
    planted::must_be_caught(
        &[Bug::Verify],
        &["promises::a_verification_that_finds_a_difference_quarantines_the_slot"],
    );
    planted::must_be_caught(
        &[Bug::Quarantine],
        &["promises::a_failed_reset_quarantines_the_slot_for_good"],
    );
}

#[test]
fn hundreds_of_scattered_writers_stay_within_the_mappings_of_a_process() {
    // Other tests of this process would count as well.
    afresh_sys::run_isolated(
        "promises::hundreds_of_scattered_writers_stay_within_the_mappings_of_a_process",
        || {
            const SLOTS: usize = 300;
            const PAGES: usize = 512;
            let strategy = Strategy::WriteSet(Some(TrackerKind::Mprotect));
            let image = image(PAGES, 7);
            let config = SlotConfig { strategy, ..SlotConfig::default() };
            let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
            let most = afresh_sys::host::max_mappings();
            let mut slots: Vec<Slot> =
                (0..SLOTS).map(|_| Slot::new(&image, config.clone()).unwrap()).collect();
            for round in 0..2 {
                for slot in &mut slots {
                    for page in (round..PAGES).step_by(2) {
                        slot.write(page * PAGE_SIZE, &[1]).unwrap();
                    }
                }
                let now = mappings();
                assert!(now < most * 3 / 4, "{now} mappings of {most}");
                for slot in &mut slots {
                    slot.reset().unwrap();
                    assert_eq!(slot.verify().unwrap(), []);
                }
            }
            // The next slot has room.
            assert!(mappings() < most * 3 / 4);
        },
    );
}
