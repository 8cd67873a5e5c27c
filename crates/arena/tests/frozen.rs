//! Arenas that are saved in a snapshot, and slots that continue from there.
#![cfg(not(miri))]

use std::sync::Arc;

use afresh_arena::{Arena, ArenaOptions, ThawError};
use afresh_frames::{Pool, PoolOptions};
use afresh_memory::{Image, PAGE_SIZE, Slot, SlotConfig};
use afresh_pager::{Options, SnapshotMemory, SnapshotOptions};
use afresh_store::{GuestBuild, Store};

const PAGES: usize = 1700;
/// Pages with content: in the first, second and last chunk.
const USED: [usize; 5] = [0, 3, 700, 701, 1699];

fn pool() -> Arc<Pool> {
    Pool::new(PoolOptions { check_zero: true, ..PoolOptions::new(16 << 10) }).unwrap()
}

fn bytes(arena: &Arena, page: usize) -> Vec<u8> {
    assert!(page < arena.pages());
    let mut bytes = vec![1; PAGE_SIZE];
    // SAFETY: the page is accessible and is not written.
    unsafe {
        let from = arena.base().add(page * PAGE_SIZE);
        from.copy_to_nonoverlapping(bytes.as_mut_ptr(), PAGE_SIZE);
    }
    bytes
}

fn content(page: usize) -> Vec<u8> {
    match USED.contains(&page) {
        true => (0..PAGE_SIZE).map(|at| (at * 7 + page) as u8 | 1).collect(),
        false => vec![0; PAGE_SIZE],
    }
}

fn filled(options: ArenaOptions) -> Arena {
    let mut arena = Arena::new(pool(), options).unwrap();
    arena.grow(PAGES).unwrap();
    for page in USED {
        // SAFETY: the page is accessible and this is its only user.
        unsafe {
            let to = arena.base().add(page * PAGE_SIZE);
            to.copy_from_nonoverlapping(content(page).as_ptr(), PAGE_SIZE);
        }
    }
    arena
}

fn build() -> GuestBuild {
    GuestBuild {
        kind: "arena".into(),
        module: "frozen-test layout 1".into(),
        engine: "test".into(),
        cpu: Vec::new(),
    }
}

#[test]
fn an_arena_out_of_a_snapshot_holds_what_was_frozen() {
    for options in [ArenaOptions::committed(2048), ArenaOptions::on_touch(2048)] {
        let image = filled(options).freeze().unwrap();
        assert_eq!((image.pages(), image.stored_pages()), (PAGES, USED.len()));
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let with = SnapshotOptions::default();
        SnapshotMemory::from(image).save(&store, "a", build(), b"mine".to_vec(), &with).unwrap();

        let snapshot = store.load("a").unwrap();
        snapshot.check_guest(&build()).unwrap();
        assert_eq!(snapshot.state(), b"mine");
        let memory = SnapshotMemory::load(snapshot, &Options::default()).unwrap();
        // The earlier content of the arena is dropped.
        let mut arena = filled(options);
        arena.grow(200).unwrap();
        // SAFETY: the page is accessible and this is its only user.
        unsafe { arena.base().add(1800 * PAGE_SIZE).write(9) };
        arena.thaw(memory.pages()).unwrap();
        assert_eq!(arena.pages(), PAGES);
        for page in 0..PAGES {
            assert!(bytes(&arena, page) == content(page), "page {page}");
        }
        assert_eq!(arena.freeze().unwrap().digest(), memory.pages().digest());
        arena.reset().unwrap();
        assert!((0..PAGES).all(|page| bytes(&arena, page) == vec![0; PAGE_SIZE]));
    }
}

#[test]
fn a_slot_starts_every_run_from_the_contents_of_an_arena() {
    let image = filled(ArenaOptions::on_touch(2048)).freeze().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    SnapshotMemory::from(image)
        .save(&store, "a", build(), Vec::new(), &SnapshotOptions::default())
        .unwrap();
    let memory = SnapshotMemory::load(store.load("a").unwrap(), &Options::default()).unwrap();
    let mut slot = Slot::new(memory.pages(), SlotConfig::default()).unwrap();
    for run in 0..3 {
        for page in [0, 1, 700, 1500, 1699] {
            let mut bytes = vec![1; PAGE_SIZE];
            slot.read(page * PAGE_SIZE, &mut bytes).unwrap();
            assert!(bytes == content(page), "page {page} in run {run}");
            slot.write(page * PAGE_SIZE + 5, b"dirt").unwrap();
        }
        slot.reset().unwrap();
    }
    assert_eq!(slot.verify().unwrap(), []);
}

#[test]
fn an_image_that_does_not_fit_is_refused_and_leaves_the_arena_empty() {
    let mut arena = filled(ArenaOptions::committed(2048));
    let error = arena.thaw(&Image::zero(4096)).unwrap_err();
    assert!(matches!(error, ThawError::Arena(_)), "{error}");
    assert!(error.to_string().contains("4096"), "{error}");
    assert_eq!(arena.pages(), 0);
    arena.thaw(&Image::zero(10)).unwrap();
    assert_eq!(bytes(&arena, 9), vec![0; PAGE_SIZE]);
}
