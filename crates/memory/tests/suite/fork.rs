//! The guarantees for a forked child: its own objects work, its parent's are refused where they
//! could not be right, and the child's actions never reach the parent.
#![cfg(not(miri))]

use std::io::{Read, Write};

use afresh_memory::{
    HostAccess, Image, ImageBuilder, PAGE_SIZE, Slot, SlotConfig, SlotError, Strategy, TrackerKind,
};
use afresh_sys::run_isolated;

/// Forks a child that runs `check`, and exits with its result.
fn forked(check: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child uses the allocator, which the C library's fork keeps consistent, and locks
    // of this crate, which no other thread of this process takes: each test here is a separate
    // process.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(60) };
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).unwrap_or(false);
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    child
}

/// Whether `check` returned true within a minute in that child.
fn was_good(child: libc::pid_t) -> bool {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status == 0
}

/// Runs `check` in a forked child; whether it returned true there within a minute.
fn in_child(check: impl FnOnce() -> bool) -> bool {
    was_good(forked(check))
}

fn image(byte: u8) -> Image {
    let mut builder = ImageBuilder::new(16);
    builder.segment(0, &vec![byte; 16 * PAGE_SIZE]).unwrap();
    builder.build().unwrap()
}

fn slot(image: &Image, strategy: Strategy, host_access: HostAccess) -> Option<Slot> {
    let config = SlotConfig { strategy, host_access, ..SlotConfig::default() };
    match Slot::new(image, config) {
        Ok(slot) => Some(slot),
        Err(SlotError::Unavailable { reason, .. }) => {
            println!("SKIPPED: {strategy}: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn all_is(slot: &Slot, byte: u8) -> bool {
    let mut bytes = vec![0; 16 * PAGE_SIZE];
    slot.read(0, &mut bytes).unwrap();
    bytes.iter().all(|b| *b == byte)
}

/// Some resets of a slot with writes before each.
fn works(slot: &mut Slot, byte: u8) -> bool {
    (0..4).all(|round| {
        for page in [1, 5 + round, 15] {
            slot.write(page * PAGE_SIZE + 9, &[byte + 1]).unwrap();
        }
        slot.reset().is_ok()
            && all_is(slot, byte)
            && slot.verify().is_ok_and(|found| found.is_empty())
    })
}

/// Asks something of a slot; whether it answered.
type Question = fn(&mut Slot, &Image) -> bool;

#[test]
fn a_slot_made_in_a_child_notices_the_childs_writes_under_every_tracker() {
    run_isolated(
        "fork::a_slot_made_in_a_child_notices_the_childs_writes_under_every_tracker",
        || {
            let image = image(7);
            let ways = Strategy::FORCED
                .into_iter()
                .chain([Strategy::Auto])
                .map(|strategy| (strategy, HostAccess::Threads))
                .chain(
                    [Strategy::Auto, Strategy::Reprotect]
                        .map(|strategy| (strategy, HostAccess::Syscalls)),
                );
            for (strategy, access) in ways {
                // The parent has used the mechanism, so that a child finds the parent's remains of
                // it.
                let Some(mut parents) = slot(&image, strategy, access) else { continue };
                assert!(works(&mut parents, 7));
                // The same addresses, so that a stale reference to the parent's pages would reach
                // these.
                assert!(
                    in_child(|| {
                        drop(parents);
                        let mut mine = slot(&image, strategy, access).unwrap();
                        works(&mut mine, 7)
                    }),
                    "{strategy}, {access:?}"
                );
            }
        },
    );
}

#[test]
fn every_operation_on_a_slot_of_the_parent_is_refused_in_a_child() {
    run_isolated("fork::every_operation_on_a_slot_of_the_parent_is_refused_in_a_child", || {
        let (first, other) = (image(7), image(8));
        for kind in [TrackerKind::UffdSigbus, TrackerKind::UffdScan, TrackerKind::Mprotect] {
            let strategy = Strategy::WriteSet(Some(kind));
            let asked: [(&str, Question); 9] = [
                ("read", |slot, _| slot.read(0, &mut [0]).is_err()),
                ("write", |slot, _| slot.write(0, &[1]).is_err()),
                ("grow", |slot, _| slot.grow(17).is_err()),
                ("freeze", |slot, _| slot.freeze().is_err()),
                ("checkpoint", |slot, _| slot.checkpoint().is_err()),
                ("switch", |slot, other| slot.switch(other).is_err()),
                ("set_image", |slot, other| slot.set_image(other, &[]).is_err()),
                ("trim", |slot, _| slot.trim().is_err()),
                ("reset", |slot, _| slot.reset().is_err() && slot.quarantined().is_some()),
            ];
            for (name, ask) in asked {
                let config = SlotConfig { strategy, capacity: Some(32), ..SlotConfig::default() };
                let mut slot = match Slot::new(&first, config) {
                    Ok(slot) => slot,
                    Err(error) => {
                        println!("SKIPPED: {strategy}: {error}");
                        break;
                    }
                };
                slot.write(3 * PAGE_SIZE, &[1]).unwrap();
                assert!(in_child(|| ask(&mut slot, &other)), "{kind}: {name}");
                assert!(slot.reset().is_ok() && all_is(&slot, 7), "the parent goes on");
            }
        }
    });
}

#[test]
fn images_that_a_child_makes_and_drops_change_none_of_its_parents() {
    run_isolated("fork::images_that_a_child_makes_and_drops_change_none_of_its_parents", || {
        // More images than get their own files, so that the last ones share one.
        let mut images: Vec<Image> = (0..110).map(|at| image(at as u8)).collect();
        let child_first = in_child(|| {
            let mine: Vec<Image> = (0..20).map(|_| image(200)).collect();
            let last = images.split_off(105);
            drop(last);
            mine.iter().all(|image| {
                slot(image, Strategy::FullCopy, HostAccess::Threads)
                    .is_some_and(|s| all_is(&s, 200))
            })
        });
        assert!(child_first);
        // The child must not have written to the parent's new images, nor to the earlier ones.
        images.extend((110..130).map(image));
        for (at, image) in images.iter().enumerate() {
            let slot = slot(image, Strategy::FullCopy, HostAccess::Threads).unwrap();
            assert!(all_is(&slot, at as u8), "image {at}");
        }
    });
}

#[test]
fn images_that_a_parent_drops_stay_its_childs() {
    run_isolated("fork::images_that_a_parent_drops_stay_its_childs", || {
        let images: Vec<Image> = (0..110).map(|at| image(at as u8)).collect();
        let (mut told, mut tells) = std::io::pipe().unwrap();
        let child = forked(|| {
            let gone = told.read(&mut [0]).is_ok_and(|read| read == 1);
            let kept = |(at, image): (usize, &Image)| {
                image.page(3).is_some_and(|page| page.iter().all(|byte| *byte == at as u8))
            };
            gone && images.iter().enumerate().skip(1).all(kept)
        });
        drop(images);
        tells.write_all(&[1]).unwrap();
        assert!(was_good(child), "an image of the child has lost its content");
    });
}

#[test]
fn a_child_that_drops_a_slot_during_a_capture_waits_for_no_lock_of_its_parent() {
    run_isolated(
        "fork::a_child_that_drops_a_slot_during_a_capture_waits_for_no_lock_of_its_parent",
        || {
            for kind in [TrackerKind::UffdSigbus, TrackerKind::Mprotect] {
                let strategy = Strategy::WriteSet(Some(kind));
                let large = Image::zero(128);
                let Some(mut slot) = slot(&large, strategy, HostAccess::Threads) else { continue };
                for page in (0..128).step_by(2) {
                    slot.write(page * PAGE_SIZE, &[5]).unwrap();
                }
                let frozen = slot.freeze_live().unwrap();
                assert!(!frozen.is_complete());
                let mut slot = Some(slot);
                assert!(in_child(|| {
                    drop(slot.take());
                    frozen.complete().is_err()
                }));
                drop(slot);
                frozen.complete().unwrap();
                assert_eq!(frozen.page(2).unwrap()[0], 5);
            }
        },
    );
}
