//! Limits of a process that are reached, and sources that die: an error that leaves everything as
//! it was, or a slot that refuses.
#![cfg(not(miri))]

use std::sync::atomic::Ordering;
use std::time::Duration;

use afresh_memory::{
    Feature, Features, Image, ImageBuilder, PAGE_SIZE, PageRange, Reservation, Slot, SlotConfig,
    SlotError, Strategy, TrackerKind,
};
use afresh_sys::planted::{Bug, must_be_caught};
use afresh_sys::{Call, Protection, inject, run_isolated};

use crate::common::{lazy_image, occupied};

fn image(pages: usize, byte: u8) -> Image {
    let mut builder = ImageBuilder::new(pages);
    builder.segment(0, &vec![byte; pages * PAGE_SIZE]).unwrap();
    builder.build().unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn images_that_are_kept_here_and_there_take_few_descriptors() {
    const NAME: &str = "shortages::images_that_are_kept_here_and_there_take_few_descriptors";
    run_isolated(NAME, || {
        let before = descriptors();
        let mut kept = Vec::new();
        let mut recent = Vec::new();
        for n in 0..40 * 256 {
            let image = image(1, (n % 250) as u8 + 1);
            if n % 256 == 0 {
                kept.push((n, image));
            } else {
                recent.push(image);
            }
            if recent.len() == 600 {
                recent.clear();
            }
        }
        assert!(descriptors() - before < 10, "{} descriptors", descriptors() - before);
        for (n, image) in kept {
            assert_eq!(image.page(0).unwrap()[7], (n % 250) as u8 + 1);
        }
    });
}

/// Sets a limit of this process, and returns the one before.
fn limit(resource: libc::__rlimit_resource_t, soft: Option<u64>) -> u64 {
    // SAFETY: reads and sets a limit by an initialised structure.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(resource, &mut limit), 0);
        let before = limit.rlim_cur;
        if let Some(soft) = soft {
            limit.rlim_cur = soft;
            assert_eq!(libc::setrlimit(resource, &limit), 0);
        }
        before
    }
}

#[test]
fn userfaultfd_serves_again_after_descriptors_ran_out() {
    run_isolated("shortages::userfaultfd_serves_again_after_descriptors_ran_out", || {
        let image = image(4, 1);
        let strategy = Strategy::WriteSet(Some(TrackerKind::UffdSigbus));
        let make = || Slot::new(&image, SlotConfig { strategy, ..SlotConfig::default() });
        limit(libc::RLIMIT_NOFILE, Some(100));
        let take_all = || -> Vec<_> {
            (0..100).map_while(|_| std::fs::File::open("/dev/null").ok()).collect()
        };
        let taken = take_all();
        assert!(make().is_err());
        assert!(!Features::host().has(Feature::UffdSigbus));
        drop(taken);
        if !Features::host().has(Feature::UffdSigbus) {
            let why = Features::host().why_missing(Feature::UffdSigbus).unwrap();
            assert!(!why.contains("open files"), "{why}");
            return println!("SKIPPED: {why}");
        }
        // Features are known now, and the tracker's descriptor is still to be opened.
        let taken = take_all();
        assert!(make().is_err());
        drop(taken);
        let mut slot = make().unwrap();
        slot.write(5, b"dirt").unwrap();
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    });
}

#[test]
fn memory_that_is_locked_is_reset_too() {
    run_isolated("shortages::memory_that_is_locked_is_reset_too", || {
        // SAFETY: concerns this process alone, which ends with the test.
        if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
            return println!("SKIPPED: mlockall: {}", std::io::Error::last_os_error());
        }
        for strategy in Strategy::FORCED {
            let config = SlotConfig { strategy, capacity: Some(40), ..SlotConfig::default() };
            let mut slot = match Slot::new(&image(20, 7), config) {
                Ok(slot) => slot,
                Err(error @ (SlotError::Unavailable { .. } | SlotError::Track(_))) => {
                    println!("SKIPPED: {strategy}: {error}");
                    continue;
                }
                Err(error) => panic!("{strategy}: {error}"),
            };
            for run in 0..3 {
                slot.grow(30).unwrap();
                slot.write(3 * PAGE_SIZE, &[run; 100]).unwrap();
                slot.write(25 * PAGE_SIZE, &[run; 100]).unwrap();
                slot.reset().unwrap_or_else(|error| panic!("{strategy}: {error}"));
                assert_eq!(slot.verify().unwrap(), [], "{strategy}");
            }
            slot.trim().unwrap();
        }
    });
}

fn uffd_missing() -> bool {
    let missing = !Features::host().has(Feature::UffdSigbus);
    if missing {
        println!("SKIPPED: no userfaultfd in SIGBUS mode here");
    }
    missing
}

#[test]
fn a_read_of_a_slot_whose_source_is_dead_is_an_error() {
    if uffd_missing() {
        return;
    }
    run_isolated("shortages::a_read_of_a_slot_whose_source_is_dead_is_an_error", || {
        let content = vec![3; 20 * PAGE_SIZE];
        let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
        let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
        let mut bytes = [0; 2 * PAGE_SIZE];
        slot.read(PAGE_SIZE, &mut bytes[..5]).unwrap();
        // It still reports success.
        filler.unwrap().dead.store(true, Ordering::Release);
        for at in [0, 1] {
            let error = slot.read(at * PAGE_SIZE, &mut bytes).unwrap_err();
            assert!(matches!(error, SlotError::Image(_)), "{error}");
        }
        assert!(matches!(slot.write(7 * PAGE_SIZE, b"x").unwrap_err(), SlotError::Image(_)));
    });
}

#[test]
fn a_preload_that_fails_leaves_a_slot_that_refuses() {
    if uffd_missing() {
        return;
    }
    let content = vec![3; 20 * PAGE_SIZE];
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let filler = filler.unwrap();
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    // The filler fails once, and is well again.
    filler.fails.store(true, Ordering::Release);
    slot.preload(&[PageRange::new(2, 3)]).unwrap_err();
    filler.fails.store(false, Ordering::Release);
    assert!(slot.quarantined().is_some());
    slot.write(2 * PAGE_SIZE, b"secret").unwrap_err();
    slot.reset().unwrap_err();
}

#[test]
fn an_image_whose_view_cannot_be_registered_is_filled_all_the_same() {
    run_isolated(
        "shortages::an_image_whose_view_cannot_be_registered_is_filled_all_the_same",
        || {
            let content = vec![3; 20 * PAGE_SIZE];
            let plan = inject::Plan {
                call: Some(Call::UffdRegister),
                after: 1,
                times: 1,
                errno: libc::ENOMEM,
            };
            let ((image, filler), fired) =
                inject::with(plan, || lazy_image(&content, &occupied(&content), Duration::ZERO));
            if fired == 0 {
                return println!("SKIPPED: nothing is registered here");
            }
            assert!(!filler.unwrap().inserter().is_live());
            let slot = Slot::new(&image, SlotConfig::default()).unwrap();
            let mut bytes = vec![0; 20 * PAGE_SIZE];
            slot.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, content);
        },
    );
}

/// Whether all of `pages` is mapped, by anything.
fn is_mapped(memory: &Reservation, pages: PageRange) -> bool {
    let mut at = memory.page_ptr(pages.start) as usize;
    let end = memory.page_ptr(pages.end()) as usize;
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        if number(from) <= at && at < number(to) {
            at = number(to);
        }
    }
    at >= end
}

#[test]
fn a_mapping_that_cannot_be_moved_leaves_no_hole() {
    const PAGES: PageRange = PageRange::new(0, 512);
    run_isolated("shortages::a_mapping_that_cannot_be_moved_leaves_no_hole", || {
        let file = afresh_sys::Memfd::new(c"content").unwrap();
        file.write_at(&vec![9; PAGES.byte_len()], 0).unwrap();
        for resource in [libc::RLIMIT_DATA, libc::RLIMIT_AS] {
            let [target, staging] = [(); 2].map(|()| Reservation::new(PAGES.len).unwrap());
            target.map_private(PAGES, Protection::Read, &file, 0).unwrap();
            staging.map_anonymous(PAGES, Protection::ReadWrite).unwrap();
            let before = limit(resource, Some(1 << 20));
            let moved = target.take_mapping(PAGES, &staging, PAGES);
            limit(resource, Some(before));
            let Err(failed) = moved else {
                println!("SKIPPED: limit {resource} does not keep mappings from being moved");
                continue;
            };
            println!("limit {resource}: {failed}, lost: {}", failed.lost);
            // Above its limit the process cannot even reserve the addresses again.
            let refuses = target.protect(PAGES, Protection::None).is_err();
            assert!(is_mapped(&target, PAGES) || refuses, "other mappings could come there");
            if !failed.lost {
                // SAFETY: mapped as it was.
                assert_eq!(unsafe { target.page_ptr(511).read_volatile() }, 9);
            }
        }
    });
}

#[test]
fn a_slot_left_half_way_is_caught() {
    if !uffd_missing() {
        let test = "shortages::a_preload_that_fails_leaves_a_slot_that_refuses";
        must_be_caught(&[Bug::Halfway], &[test]);
    }
}

/// Whether a page of a slot can be read, by the kernel's list of mappings.
fn is_readable(slot: &Slot, page: usize) -> bool {
    let at = slot.base() as usize + page * PAGE_SIZE;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (range, rights) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let address = |text| usize::from_str_radix(text, 16).unwrap();
        (address(start)..address(end)).contains(&at) && rights.starts_with('r')
    })
}

#[test]
fn a_verification_that_fails_quarantines_the_slot_and_shows_nothing_beyond_its_end() {
    for strategy in Strategy::FORCED {
        for after in 0.. {
            let verify_every = Some(1);
            let config =
                SlotConfig { strategy, capacity: Some(16), verify_every, ..SlotConfig::default() };
            let Ok(mut slot) = Slot::new(&image(8, 1), config) else { break };
            slot.grow(12).unwrap();
            slot.reset().unwrap();
            slot.write(0, b"x").unwrap();
            let call = Some(Call::Protect);
            let plan = inject::Plan { call, after, times: 1, errno: libc::ENOMEM };
            let (reset, fired) = inject::with(plan, || slot.reset());
            if fired == 0 {
                assert!(after > 0, "{strategy}: no call can fail");
                break;
            }
            // A tracker can do without some calls.
            assert_eq!(slot.quarantined().is_some(), reset.is_err(), "{strategy}, call {after}");
            assert!(!is_readable(&slot, 9), "{strategy}, call {after}");
        }
    }
}

#[test]
fn slots_of_an_image_with_many_mappings_share_one_copy_and_its_number() {
    const PAGES: usize = 4096;
    let base = image(PAGES, 7);
    let mut slot = Slot::new(&base, SlotConfig::default()).unwrap();
    for page in (0..PAGES).step_by(2) {
        slot.write(page * PAGE_SIZE, &[9]).unwrap();
    }
    let image = slot.freeze().unwrap();
    assert!(image.mapping_count() > 1024);
    let made = || Slot::new(&image, SlotConfig::default()).unwrap();
    let (mut one, two) = (made(), made());
    assert_eq!([one.image().id(), two.image().id()], [image.id(); 2]);
    assert!(one.image().same(two.image()), "each has a copy of its own");
    assert_eq!(one.switch(&image).unwrap(), 0);
    one.write(5 * PAGE_SIZE, &[1]).unwrap();
    one.write(6 * PAGE_SIZE, &[1]).unwrap();
    // The image would be mapped anew, and the answer 0, if the copy counted as another one.
    let looked_at = one.switch(&image).unwrap();
    assert!((2..20).contains(&looked_at), "{looked_at} pages");
    assert_eq!(one.verify().unwrap(), []);
    // No other image gets its number while a slot has it.
    let number = image.id();
    drop(image);
    assert!((0..100).all(|pages| Image::zero(pages).id() != number));
    assert_eq!((one.image().id(), two.image().id()), (number, number));
    drop((one, two));
}
