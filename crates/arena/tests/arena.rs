//! The arena's promises: zero after growth and reset, nothing accessible outside, errors for
//! limits.
#![cfg(not(miri))]

use std::io::Read;
use std::sync::Arc;

use afresh_arena::{Arena, ArenaError, ArenaOptions, CommitPolicy, Region, ZeroedAlloc};
use afresh_frames::{Order, PageKind, Pool, PoolOptions, TakeError};
use afresh_sys::planted::{Bug, must_be_caught};
use afresh_sys::{Call, PAGE_SIZE, PageRange, inject};
use proptest::prelude::*;

const CHUNK: usize = 512;
const SECRET: u8 = 0xa5;

fn pool(pages: usize) -> Arc<Pool> {
    Pool::new(PoolOptions { check_zero: true, ..PoolOptions::new(pages) }).unwrap()
}

fn write(arena: &Arena, page: usize, value: u8) {
    assert!(page < arena.pages());
    // SAFETY: the page is accessible, and no reference to it exists.
    unsafe { arena.base().add(page * PAGE_SIZE + page % PAGE_SIZE).write_volatile(value) };
}

fn read(arena: &Arena, page: usize) -> u8 {
    assert!(page < arena.pages());
    // SAFETY: as for `write`.
    unsafe { arena.base().add(page * PAGE_SIZE + page % PAGE_SIZE).read_volatile() }
}

fn poison(arena: &Arena) {
    for page in 0..arena.pages() {
        write(arena, page, SECRET);
    }
}

fn assert_zero(arena: &Arena) {
    for page in 0..arena.pages() {
        // SAFETY: the page is accessible, and is not written during the read.
        let words = unsafe {
            std::slice::from_raw_parts(arena.base().add(page * PAGE_SIZE).cast::<u64>(), 512)
        };
        assert!(words.iter().all(|word| *word == 0), "page {page} is not zero");
    }
}

fn every_option(max: usize) -> [ArenaOptions; 4] {
    let committed = ArenaOptions::committed(max);
    let on_touch = ArenaOptions::on_touch(max);
    [
        committed,
        ArenaOptions { adapt: true, ..committed },
        on_touch,
        ArenaOptions { adapt: false, window: 1, ..on_touch },
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Grow(usize),
    Shrink(usize),
    Write(usize, u8),
    Touch(usize, usize),
    Reset,
    Clear,
    Disturb(usize),
}

fn steps() -> impl proptest::strategy::Strategy<Value = Vec<Step>> {
    proptest::collection::vec(
        prop_oneof![
            3 => (0usize..1400).prop_map(Step::Grow),
            2 => (0usize..1400).prop_map(Step::Shrink),
            8 => (any::<usize>(), 1u8..).prop_map(|(page, value)| Step::Write(page, value)),
            1 => (any::<usize>(), 1usize..600).prop_map(|(page, len)| Step::Touch(page, len)),
            2 => Just(Step::Reset),
            1 => Just(Step::Clear),
            2 => (0usize..11).prop_map(Step::Disturb),
        ],
        1..40,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { fork: false, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn any_sequence_of_operations_matches_a_plain_vector(which in 0usize..4, steps in steps()) {
        const MAX: usize = 4000;
        let pool = pool(8192);
        let mut arena = Arena::new(pool.clone(), every_option(MAX)[which]).unwrap();
        let mut model: Vec<u8> = Vec::new();
        for step in steps {
            match step {
                Step::Grow(pages) => match arena.grow(pages) {
                    Ok(old) => {
                        prop_assert_eq!(old, model.len());
                        model.resize(model.len() + pages, 0);
                    }
                    Err(error) => {
                        let full = matches!(error, ArenaError::Full { .. });
                        prop_assert!(full && model.len() + pages > MAX, "{}", error);
                    }
                },
                Step::Shrink(pages) => {
                    arena.shrink(pages).unwrap();
                    model.truncate(model.len().saturating_sub(pages));
                }
                Step::Write(page, value) if !model.is_empty() => {
                    let page = page % model.len();
                    write(&arena, page, value);
                    model[page] = value;
                }
                Step::Touch(page, len) if !model.is_empty() => {
                    let page = page % model.len();
                    let range = PageRange::new(page, len.min(model.len() - page));
                    arena.touch(range).unwrap();
                }
                Step::Write(..) | Step::Touch(..) => {}
                Step::Reset => {
                    arena.reset().unwrap();
                    model.fill(0);
                }
                Step::Clear => {
                    arena.clear().unwrap();
                    model.clear();
                }
                // Another user takes the frames in between and leaves a secret in them.
                Step::Disturb(power) => {
                    if let Ok(frame) = pool.take(Order::new(power as u8)) {
                        let frame = frame.used();
                        // SAFETY: the frame is owned.
                        unsafe {
                            pool.address(&frame).write_bytes(SECRET, frame.pages() * PAGE_SIZE);
                        }
                        pool.give(frame);
                    }
                }
            }
            prop_assert_eq!(arena.pages(), model.len());
            for (page, value) in model.iter().enumerate().step_by(7) {
                prop_assert_eq!(read(&arena, page), *value, "page {}", page);
            }
        }
        for (page, value) in model.iter().enumerate() {
            prop_assert_eq!(read(&arena, page), *value, "page {}", page);
        }
        drop(arena);
        let usage = pool.usage();
        prop_assert!(usage.is_consistent() && usage.lent == 0, "{usage:?}");
    }
}

#[test]
fn a_secret_of_one_arena_is_never_read_by_another() {
    for options in every_option(3000) {
        let pool = pool(4096);
        for cycle in 0..6 {
            let mut first = Arena::new(pool.clone(), options).unwrap();
            first.grow(3000 - cycle * 100).unwrap();
            assert_zero(&first);
            poison(&first);
            if cycle % 2 == 0 {
                first.clear().unwrap();
            }
            drop(first);
            let mut second = Arena::new(pool.clone(), options).unwrap();
            second.grow(2048).unwrap();
            assert_zero(&second);
            poison(&second);
            second.reset().unwrap();
            assert_zero(&second);
        }
        assert_eq!(pool.usage().lent, 0);
    }
}

#[test]
fn growth_beyond_the_pools_limit_is_an_error_and_leaves_the_arena_as_it_was() {
    let pool = pool(1024);
    let mut arena = Arena::new(pool.clone(), ArenaOptions::committed(4096)).unwrap();
    arena.grow(600).unwrap();
    poison(&arena);
    let error = arena.grow(1000).unwrap_err();
    assert!(matches!(error, ArenaError::Memory(TakeError::Limit { .. })), "{error}");
    assert_eq!(arena.pages(), 600);
    assert!((0..600).all(|page| read(&arena, page) == SECRET));
    assert!(matches!(arena.grow(5000), Err(ArenaError::Full { wanted: 5600, max: 4096 })));
    arena.clear().unwrap();
    assert_eq!(pool.usage().lent, 0);
}

#[test]
fn touching_more_than_the_pool_has_falls_back_to_the_kernel() {
    let pool = pool(1024);
    let mut arena = Arena::new(pool.clone(), ArenaOptions::on_touch(4096)).unwrap();
    arena.grow(4096).unwrap();
    assert_zero(&arena);
    poison(&arena);
    assert!(arena.usage().kernel_huge_pages >= 6, "{:?}", arena.usage());
    arena.reset().unwrap();
    assert_zero(&arena);
}

#[test]
fn threads_that_touch_the_same_huge_pages_at_once_see_each_others_writes() {
    let pool = pool(8192);
    for _ in 0..20 {
        let mut arena =
            Arena::new(pool.clone(), ArenaOptions { window: 4, ..ArenaOptions::on_touch(4096) })
                .unwrap();
        arena.grow(4096).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let arena = &arena;
                scope.spawn(move || {
                    for page in (thread..4096).step_by(4) {
                        write(arena, page, thread as u8 + 1);
                    }
                });
            }
        });
        assert!((0..4096).all(|page| read(&arena, page) == (page % 4) as u8 + 1));
        assert!(arena.faults() <= 8 + 4, "{}", arena.faults());
    }
}

#[test]
fn a_region_that_proves_sparse_stops_getting_frames_and_one_that_fills_up_gets_them_again() {
    for options in [
        ArenaOptions::on_touch(8 * CHUNK),
        ArenaOptions { adapt: true, ..ArenaOptions::committed(8 * CHUNK) },
    ] {
        let pool = pool(8192);
        let mut arena = Arena::new(pool.clone(), options).unwrap();
        arena.grow(8 * CHUNK).unwrap();
        for _ in 0..3 {
            for page in (0..8 * CHUNK).step_by(64) {
                write(&arena, page, SECRET);
            }
            arena.reset().unwrap();
        }
        let sparse = |arena: &Arena| {
            for page in (0..8 * CHUNK).step_by(64) {
                assert_eq!(read(arena, page), 0);
                write(arena, page, SECRET);
            }
        };
        sparse(&arena);
        let holding = arena.usage();
        assert_eq!((holding.frames, holding.sparse_huge_pages), (0, 8), "{holding:?}");
        assert_eq!(pool.usage().lent, 0);
        // On a busy host a chunk may find no frame in one round; it gets one in a later.
        for round in 0..160 {
            poison(&arena);
            if round >= 40 && arena.usage().frames == 8 {
                break;
            }
            arena.reset().unwrap();
        }
        assert_eq!(arena.usage().frames, 8, "{:?}", arena.usage());
        arena.reset().unwrap();
        assert_zero(&arena);
    }
}

#[test]
fn a_repeated_workload_takes_one_fault_a_cycle() {
    let pool = pool(8192);
    let mut arena = Arena::new(pool, ArenaOptions::on_touch(4096)).unwrap();
    arena.grow(4096).unwrap();
    for _ in 0..3 {
        poison(&arena);
        arena.reset().unwrap();
    }
    let before = arena.faults();
    poison(&arena);
    assert_eq!(arena.faults() - before, 1);
}

#[test]
fn a_system_call_can_be_given_memory_that_was_touched_for_it() {
    let mut arena = Arena::new(pool(1024), ArenaOptions::on_touch(1024)).unwrap();
    arena.grow(1024).unwrap();
    arena.touch(PageRange::new(600, 2)).unwrap();
    assert!(arena.touch(PageRange::new(1000, 100)).is_err());
    // SAFETY: the pages are accessible and this is their only user.
    let buffer =
        unsafe { std::slice::from_raw_parts_mut(arena.base().add(600 * PAGE_SIZE), 2 * PAGE_SIZE) };
    let mut file = std::fs::File::open("/dev/zero").unwrap();
    assert_eq!(file.read(buffer).unwrap(), 2 * PAGE_SIZE);
}

#[test]
fn a_refusal_of_the_kernel_at_any_step_leaks_no_secret_and_loses_no_page_silently() {
    for options in every_option(1500) {
        for call in [None, Some(Call::Map), Some(Call::Protect), Some(Call::Advise)] {
            for after in 0..5 {
                let pool = pool(4096);
                let mut arena = Arena::new(pool.clone(), options).unwrap();
                arena.grow(1200).unwrap();
                poison(&arena);
                let plan = inject::Plan { call, after, times: 2, errno: 12 };
                let (failed, _) = inject::with(plan, || {
                    let reset = arena.reset().is_err();
                    let shrunk = arena.shrink(100).is_err();
                    let grown = arena.grow(200).is_err();
                    reset || shrunk || grown
                });
                if !failed {
                    assert_zero(&arena);
                }
                // Growth after a failure shows no old content, or is refused.
                if arena.grow(100).is_ok() {
                    assert_zero(&arena);
                }
                drop(arena);
                let usage = pool.usage();
                assert!(usage.is_consistent(), "{usage:?}");
                assert_eq!(usage.lent, pool.work().quarantined, "{call:?} after {after}");
                let mut other = Arena::new(pool.clone(), options).unwrap();
                other.grow(1000).unwrap();
                assert_zero(&other);
            }
        }
    }
}

/// Runs the named test again in a child, which must die of a signal; returns that signal.
fn signal_of_child(name: &str, what: &str) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    afresh_sys::test_command(name)
        .env("AFRESH_TEST_CRASH", what)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap()
        .signal()
}

#[test]
fn nothing_above_the_size_and_nothing_given_back_is_accessible() {
    const SIGSEGV: i32 = 11;
    let name = "nothing_above_the_size_and_nothing_given_back_is_accessible";
    let Some(what) = std::env::var_os("AFRESH_TEST_CRASH") else {
        for what in ["committed-above", "on-touch-above", "committed-cleared", "on-touch-cleared"] {
            assert_eq!(signal_of_child(name, what), Some(SIGSEGV), "{what}");
        }
        return;
    };
    let what = what.to_str().unwrap();
    let options = if what.starts_with("committed") {
        ArenaOptions::committed(2048)
    } else {
        ArenaOptions::on_touch(2048)
    };
    let mut arena = Arena::new(pool(2048), options).unwrap();
    arena.grow(1000).unwrap();
    poison(&arena);
    let page = if what.ends_with("above") {
        1000
    } else {
        arena.clear().unwrap();
        3
    };
    // SAFETY: this access is meant to end the process; if it does not, the test fails.
    unsafe { arena.base().add(page * PAGE_SIZE).read_volatile() };
}

#[test]
fn a_region_hands_out_aligned_zeroed_memory_and_is_zero_again_after_a_reset() {
    let mut region = Region::new(pool(1024), ArenaOptions::committed(1024)).unwrap();
    for _ in 0..3 {
        let first = region.bytes(100).unwrap();
        assert!(first.iter().all(|byte| *byte == 0));
        first.fill(SECRET);
        let layout = std::alloc::Layout::from_size_align(3, 4096).unwrap();
        let aligned = region.allocate(layout).unwrap();
        assert_eq!(aligned.as_ptr() as usize % 4096, 0);
        let large = region.bytes(2 << 20).unwrap();
        assert!(large.iter().all(|byte| *byte == 0));
        large.fill(SECRET);
        assert!(region.bytes(4 << 20).is_none());
        assert!(region.bytes(usize::MAX / 4).is_none());
        region.reset().unwrap();
        assert_eq!(region.used(), 0);
    }
    assert_eq!(region.arena().pages(), 1024);
}

#[test]
fn a_global_allocator_serves_large_blocks_from_the_pool_and_small_ones_from_the_system() {
    use std::alloc::{GlobalAlloc, Layout};
    let pool = pool(2048);
    let alloc = ZeroedAlloc::new();
    let large = Layout::from_size_align(3 << 20, 4096).unwrap();
    let small = Layout::from_size_align(4096, 8).unwrap();
    // SAFETY: layouts are not empty, and every block is freed once, with its layout.
    unsafe {
        let before = alloc.alloc_zeroed(large);
        alloc.install(pool.clone()).unwrap();
        let block = alloc.alloc_zeroed(large);
        assert_eq!(pool.usage().lent, 1024);
        assert!((0..3 << 20).all(|at| block.add(at).read() == 0));
        block.write_bytes(SECRET, 3 << 20);
        let little = alloc.alloc(small);
        let overflow = alloc.alloc_zeroed(Layout::from_size_align(8 << 20, 8).unwrap());
        assert_eq!(pool.usage().lent, 1024);
        assert!(!little.is_null() && !overflow.is_null());
        alloc.dealloc(little, small);
        alloc.dealloc(overflow, Layout::from_size_align(8 << 20, 8).unwrap());
        alloc.dealloc(before, large);
        alloc.dealloc(block, large);
        assert_eq!(pool.usage().lent, 0);
        let again = alloc.alloc_zeroed(large);
        assert!((0..3 << 20).all(|at| again.add(at).read() == 0));
        alloc.dealloc(again, large);
    }
    assert!(alloc.install(pool).is_err());
    assert_eq!(CommitPolicy::default(), CommitPolicy::Now);
}

#[test]
fn an_arena_on_reserved_huge_pages_takes_whole_huge_sizes_only() {
    let mut options = PoolOptions::inline(2048);
    options.page_kind = PageKind::Reserved;
    let pool = match Pool::new(options) {
        Ok(pool) => pool,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    match pool.prefill(2048) {
        Ok(()) => {}
        Err(error) => return println!("SKIPPED: no huge pages are reserved: {error}"),
    }
    let mut arena = Arena::new(pool.clone(), ArenaOptions::committed(2048)).unwrap();
    assert!(arena.grow(700).is_err());
    assert_eq!(arena.pages(), 0);
    for _ in 0..3 {
        arena.grow(1024).unwrap();
        assert_zero(&arena);
        poison(&arena);
        arena.reset().unwrap();
        assert_zero(&arena);
        poison(&arena);
        arena.shrink(512).unwrap();
        arena.grow(512).unwrap();
        assert!((512..1024).all(|page| read(&arena, page) == 0));
        arena.clear().unwrap();
    }
    drop(arena);
    assert!(pool.usage().is_consistent() && pool.usage().lent == 0);
}

#[test]
fn a_forked_child_drops_an_arena_and_keeps_its_own_memory() {
    afresh_sys::run_isolated("a_forked_child_drops_an_arena_and_keeps_its_own_memory", || {
        for options in every_option(4096) {
            let pool = pool(4096);
            let mut arena = Arena::new(pool.clone(), options).unwrap();
            arena.grow(2000).unwrap();
            poison(&arena);
            // SAFETY: the child uses memory, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    // Allocations of the child: free addresses of the arena and the pool would be
                    // given to them.
                    let own: Vec<_> = (0..64).map(|n| vec![n as u8; 1 << 20]).collect();
                    assert_eq!(arena.grow(1), Err(ArenaError::Forked));
                    assert_eq!(arena.reset(), Err(ArenaError::Forked));
                    assert_eq!(arena.touch(PageRange::new(0, 1)), Err(ArenaError::Forked));
                    assert!(arena.freeze().is_err());
                    drop(arena);
                    drop(pool);
                    for (n, bytes) in own.iter().enumerate() {
                        assert!(bytes.iter().all(|byte| *byte == n as u8));
                    }
                }));
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(good.is_err())) };
            }
            let mut status = 0;
            // SAFETY: waits for the child.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "{options:?}");
            assert_eq!(read(&arena, 1999), SECRET);
        }
    });
}

#[test]
fn an_arena_left_half_way_is_caught() {
    let test = "a_refusal_of_the_kernel_at_any_step_leaks_no_secret_and_loses_no_page_silently";
    must_be_caught(&[Bug::Halfway], &[test]);
}
