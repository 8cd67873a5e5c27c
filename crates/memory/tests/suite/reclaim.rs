//! Memory of pages that no state refers to any more is given back, and that of no other page.
#![cfg(not(miri))]

use std::os::fd::AsRawFd;

use afresh_memory::{Image, ImageBuilder, PAGE_SIZE, PageRange, Slot, SlotConfig};
use afresh_sys::planted::{self, Bug};
use afresh_sys::run_isolated;
use proptest::prelude::*;

use crate::common::resident_pages;

/// Pages that every turn writes: enough that each state has a file for itself.
const REWRITTEN: usize = 300;
const TURNS: usize = 20;

fn fill(slot: &mut Slot, page: usize, byte: u8) {
    slot.write(page * PAGE_SIZE, &[byte; PAGE_SIZE]).unwrap();
}

/// A session that rewrites a large object each turn, and adds one page that stays.
fn turns() -> (Slot, Vec<Image>) {
    let mut slot = Slot::new(&Image::zero(REWRITTEN + TURNS), SlotConfig::default()).unwrap();
    let mut states = Vec::new();
    for turn in 0..TURNS {
        (0..REWRITTEN).for_each(|page| fill(&mut slot, page, turn as u8 + 1));
        fill(&mut slot, REWRITTEN + turn, turn as u8 + 1);
        states.push(slot.checkpoint().unwrap());
    }
    (slot, states)
}

/// Files of derived states and packs are not sealed.
#[test]
fn files_of_images_are_handed_out_for_reading_only() {
    let (slot, states) = turns();
    let mut small = ImageBuilder::new(1);
    small.segment(0, &[7; PAGE_SIZE]).unwrap();
    let small = small.build().unwrap();
    for image in [slot.image(), states.last().unwrap(), &small] {
        for file in image.files().unwrap() {
            let file = file.file().unwrap();
            // SAFETY: plain calls on an open descriptor; the byte lives through the second.
            let (flags, written) = unsafe {
                let byte = [0u8];
                let fd = file.as_raw_fd();
                (libc::fcntl(fd, libc::F_GETFL), libc::pwrite(fd, byte.as_ptr().cast(), 1, 0))
            };
            assert_eq!((flags & libc::O_ACCMODE, written), (libc::O_RDONLY, -1));
        }
    }
}

#[test]
fn dropped_checkpoints_give_back_the_pages_that_no_later_state_shares() {
    let (slot, mut states) = turns();
    let last = states.pop().unwrap();
    let before = resident_pages(&last);
    assert!(before >= (TURNS * REWRITTEN) as u64, "{before} pages with all states");
    drop(states);
    let after = resident_pages(&last);
    println!("{before} pages with {TURNS} states, {after} with the last");
    assert!(after <= (REWRITTEN + 2 * TURNS) as u64, "{after} pages with the last state alone");
    for turn in 0..TURNS {
        assert_eq!(last.page(REWRITTEN + turn).unwrap()[9], turn as u8 + 1);
    }
    assert_eq!(last.page(0).unwrap()[0], TURNS as u8);
    drop(slot);
}

#[test]
fn a_file_for_another_process_keeps_its_pages() {
    let (slot, states) = turns();
    let mut first = states[0].files().unwrap();
    first.retain(|file| file.pages().contains(0));
    let part = first[0].within(PageRange::new(1, 2)).unwrap();
    drop((slot, states, first));
    let mut bytes = [0_u8; PAGE_SIZE];
    // SAFETY: the file is only read, into a buffer of that size.
    let read = unsafe {
        let at = (part.first() * PAGE_SIZE) as libc::off_t;
        libc::pread(part.file().unwrap().as_raw_fd(), bytes.as_mut_ptr().cast(), PAGE_SIZE, at)
    };
    assert_eq!(read, PAGE_SIZE as isize);
    assert!(bytes == [1; PAGE_SIZE], "the page has {}", bytes[0]);
}

/// A child made by `fork` shares the files of its parent's states, and must find them whole after
/// the parent drops some of them. States that are made later give their pages back.
#[test]
fn pages_that_a_child_may_read_stay() {
    run_isolated("reclaim::pages_that_a_child_may_read_stay", || {
        let (slot, mut states) = turns();
        let mut dropped = [0; 2];
        // SAFETY: fills two descriptors.
        assert_eq!(unsafe { libc::pipe(dropped.as_mut_ptr()) }, 0);
        // SAFETY: the child uses the allocator, which `fork` keeps whole, and no lock of another
        // thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut byte = 0_u8;
            // SAFETY: reads a byte into a variable; ends a child that hangs.
            unsafe {
                libc::alarm(60);
                libc::close(dropped[1]);
                libc::read(dropped[0], (&raw mut byte).cast(), 1);
            }
            let first = states.swap_remove(0);
            drop(states);
            let good = (0..REWRITTEN).all(|page| *first.page(page).unwrap() == [1; PAGE_SIZE]);
            // SAFETY: ends the child without the parent's destructors.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let last = states.pop().unwrap();
        drop((slot, states));
        // SAFETY: writes a byte; waits for the child.
        let status = unsafe {
            assert_eq!(libc::write(dropped[1], [1_u8].as_ptr().cast(), 1), 1);
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert_eq!(status, 0, "the child found other content");
        assert!(resident_pages(&last) >= (TURNS * REWRITTEN) as u64);
        drop(last);
        let (_slot, mut states) = turns();
        let last = states.pop().unwrap();
        drop(states);
        assert!(resident_pages(&last) <= (REWRITTEN + 2 * TURNS) as u64);
    });
}

#[derive(Clone, Debug)]
enum Step {
    /// Writes `len` pages, some of them with zeros.
    Write {
        page: usize,
        len: usize,
        byte: u8,
    },
    Checkpoint,
    Freeze,
    Reset,
    /// Moves the slot to a state, by touching what differs or by mapping it anew.
    Move {
        state: usize,
        anew: bool,
    },
    /// Makes a state of parts of two others.
    Cut {
        one: usize,
        two: usize,
        page: usize,
        len: usize,
    },
    Compact {
        state: usize,
    },
    Drop {
        state: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let state = || 0..64usize;
    prop_oneof![
        6 => (0..PAGES, 1..40usize, 0..5u8).prop_map(|(page, len, byte)| Step::Write { page, len, byte }),
        6 => Just(Step::Checkpoint),
        1 => Just(Step::Freeze),
        2 => Just(Step::Reset),
        2 => (state(), any::<bool>()).prop_map(|(state, anew)| Step::Move { state, anew }),
        1 => (state(), state(), 0..PAGES, 1..60usize)
            .prop_map(|(one, two, page, len)| Step::Cut { one, two, page, len }),
        1 => state().prop_map(|state| Step::Compact { state }),
        6 => state().prop_map(|state| Step::Drop { state }),
    ]
}

const PAGES: usize = 420;

/// One byte stands for each page: every byte of the page has this value.
type Content = Vec<u8>;

fn check(image: &Image, content: &Content) {
    for (page, byte) in content.iter().enumerate() {
        let found = image.page(page).map_or([0; PAGE_SIZE], |page| *page);
        assert!(found == [*byte; PAGE_SIZE], "page {page} has {}, not {byte}", found[0]);
    }
}

fn check_slot(slot: &Slot, content: &Content) {
    let mut found = [0; PAGE_SIZE];
    for (page, byte) in content.iter().enumerate() {
        slot.read(page * PAGE_SIZE, &mut found).unwrap();
        assert!(found == [*byte; PAGE_SIZE], "page {page} of the slot has {}", found[0]);
    }
}

fn run(steps: &[Step]) {
    let mut builder = ImageBuilder::new(PAGES);
    let first: Content = (0..PAGES).map(|page| (page % 3) as u8).collect();
    for (page, byte) in first.iter().enumerate() {
        builder.segment(page * PAGE_SIZE, &[*byte; PAGE_SIZE]).unwrap();
    }
    let root = builder.build().unwrap();
    let mut slot = Slot::new(&root, SlotConfig::default()).unwrap();
    let (mut live, mut base) = (first.clone(), first.clone());
    let mut states = vec![(root, first)];
    for step in steps {
        let count = states.len();
        match *step {
            Step::Write { page, len, byte } => {
                let pages = page..(page + len).min(PAGES);
                pages.clone().for_each(|page| fill(&mut slot, page, byte));
                live[pages].fill(byte);
            }
            Step::Checkpoint => {
                states.push((slot.checkpoint().unwrap(), live.clone()));
                base = live.clone();
            }
            Step::Freeze => states.push((slot.freeze().unwrap(), live.clone())),
            Step::Reset => {
                slot.reset().unwrap();
                live = base.clone();
            }
            Step::Move { .. } | Step::Cut { .. } | Step::Compact { .. } | Step::Drop { .. }
                if count == 0 => {}
            Step::Move { state, anew } => {
                let (image, content) = &states[state % count];
                if anew {
                    slot.set_image(image, &[]).unwrap();
                } else {
                    slot.switch(image).unwrap();
                }
                (live, base) = (content.clone(), content.clone());
            }
            Step::Cut { one, two, page, len } => {
                let (one, two) = (&states[one % count], &states[two % count]);
                let range = PageRange::new(page, len.min(PAGES - page));
                let image = one.0.with_parts(PAGES, &[(page, two.0.slice(range))]).unwrap();
                let mut content = one.1.clone();
                content[page..range.end()].copy_from_slice(&two.1[page..range.end()]);
                states.push((image, content));
            }
            Step::Compact { state } => {
                let (image, content) = &states[state % count];
                states.push((image.compact().unwrap(), content.clone()));
            }
            Step::Drop { state } => {
                states.swap_remove(state % count);
                states.iter().for_each(|(image, content)| check(image, content));
            }
        }
        check_slot(&slot, &live);
    }
    slot.reset().unwrap();
    check_slot(&slot, &base);
    while let Some((image, content)) = states.pop() {
        check(&image, &content);
    }
    check_slot(&slot, &base);
    assert_eq!(slot.verify().unwrap(), []);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn states_that_are_dropped_in_any_order_change_no_other(steps in prop::collection::vec(step(), 1..60)) {
        run(&steps);
    }
}

/// Two states share pages of one file, and the older is dropped.
#[test]
fn a_dropped_state_gives_back_no_page_that_the_next_one_shares() {
    let write = |page, len, byte| Step::Write { page, len, byte };
    run(&[
        write(0, 300, 3),
        Step::Checkpoint,
        write(0, 1, 4),
        Step::Checkpoint,
        Step::Drop { state: 1 },
        Step::Move { state: 1, anew: true },
    ]);
}

#[test]
fn planted_bugs_of_reclaiming_are_caught() {
    planted::must_be_caught(
        &[Bug::Reclaim],
        &["reclaim::a_dropped_state_gives_back_no_page_that_the_next_one_shares"],
    );
}
