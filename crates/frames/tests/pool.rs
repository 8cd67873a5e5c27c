//! The pool's promises: zero at hand-out on every path, one place for every page, errors for
//! limits.
#![cfg(not(miri))]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use afresh_frames::{
    Background, CleanFrame, DirtyFrame, FrameCache, KernelZero, Order, PageKind, Pool, PoolOptions,
    TakeError, ZeroSource,
};
use afresh_sys::{Call, PAGE_SIZE, PageRange, Reservation, inject};

const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

fn words(pool: &Pool, frame: &DirtyFrame) -> (*mut u64, usize) {
    (pool.address(frame).cast(), frame.pages() * PAGE_SIZE / 8)
}

/// Fails if any word of a frame that was just taken is not zero; then writes the secret.
fn spy(pool: &Pool, frame: CleanFrame) -> DirtyFrame {
    let frame = frame.used();
    let (start, len) = words(pool, &frame);
    for at in 0..len {
        // SAFETY: the frame is owned and `len` words long.
        unsafe {
            assert_eq!(start.add(at).read(), 0, "a secret leaked at word {at} of {frame:?}");
            start.add(at).write(SECRET);
        }
    }
    frame
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stops threads when it is dropped, even if a test fails while they run.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A small deterministic generator, so that every run does the same.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % n
    }
}

/// Takes and gives frames of all sizes, by every way in and out, checking and poisoning each.
fn churn(pool: &Arc<Pool>, seed: u64, rounds: usize) {
    let mut random = Random(seed);
    let mut cache = FrameCache::new(pool.clone(), Order::PAGE, 16);
    let mut held: Vec<DirtyFrame> = Vec::new();
    let memory = Reservation::aligned(1024, 2 << 20).unwrap();
    for _ in 0..rounds {
        match random.below(8) {
            0 | 1 => {
                if let Ok(frame) = pool.take(Order::new(random.below(10) as u8)) {
                    held.push(spy(pool, frame));
                }
            }
            2 => {
                if let Ok(frame) = pool.take_between(Order::PAGE, Order::new(10)) {
                    held.push(spy(pool, frame));
                }
            }
            3 => {
                if let Ok(frame) = cache.take() {
                    let frame = spy(pool, frame);
                    cache.give(frame);
                }
            }
            4 => {
                let range = PageRange::new(random.below(64), 1 + random.below(900));
                if let Ok(lease) = pool.fill(&memory, range) {
                    for page in range.start..range.end() {
                        let word = memory.page_ptr(page).cast::<u64>();
                        // SAFETY: the lease has just mapped the page.
                        unsafe {
                            assert_eq!(word.read(), 0, "a secret leaked into a lease");
                            word.write(SECRET);
                        }
                    }
                    lease.release(&memory).unwrap();
                }
            }
            5 => {
                // The very frame that was returned last, as the holder of a mapping requests it.
                if let Some(frame) = held.pop() {
                    let (at, order) = (frame.file_range().start, frame.order());
                    pool.give(frame);
                    if let Some(frame) = pool.take_at(at, order) {
                        held.push(spy(pool, frame));
                    }
                }
            }
            6 => {
                if let Ok(frame) = pool.take_resident(Order::PAGE, Order::HUGE) {
                    pool.give_unused([frame]);
                }
            }
            _ => {
                let keep = random.below(held.len() + 1);
                pool.give_all(held.drain(keep..));
            }
        }
    }
    pool.give_all(held);
}

fn options(limit: usize) -> PoolOptions {
    PoolOptions { check_zero: true, ..PoolOptions::new(limit) }
}

fn assert_at_rest(pool: &Pool) {
    let usage = pool.usage();
    assert!(usage.is_consistent(), "{usage:?}");
    assert_eq!((usage.lent, usage.moving), (0, 0), "{usage:?}");
}

#[test]
fn a_secret_is_never_handed_out_when_zeroing_is_inline() {
    let pool = Pool::new(PoolOptions { background: None, ..options(2048) }).unwrap();
    churn(&pool, 1, 2000);
    assert!(pool.work().zeroed_inline > 0);
    assert_at_rest(&pool);
}

#[test]
fn a_secret_is_never_handed_out_while_the_background_thread_works_and_two_threads_churn() {
    let pool = Pool::new(options(4096)).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let pool = &pool;
            scope.spawn(move || churn(pool, seed, 1000));
        }
    });
    assert_at_rest(&pool);
}

#[test]
fn a_secret_is_never_handed_out_when_the_zeroing_thread_is_starved() {
    let pool = Pool::new(options(2048)).unwrap();
    let stop = AtomicBool::new(false);
    let processors = std::thread::available_parallelism().unwrap().get();
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let _stop = Stop(&stop);
        churn(&pool, 7, 600);
    });
    assert_at_rest(&pool);
}

#[test]
fn a_secret_is_never_handed_out_when_background_zeroing_stops_and_starts_and_memory_is_trimmed() {
    let pool = Pool::new(options(4096)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(3);
            while !stop.load(Ordering::Relaxed) {
                pool.pause(random.below(2) == 0);
                pool.trim(random.below(2048));
                assert!(pool.usage().is_consistent());
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        let _stop = Stop(&stop);
        let users = [0, 1].map(|seed| {
            let pool = &pool;
            scope.spawn(move || churn(pool, seed, 800))
        });
        for user in users {
            user.join().unwrap();
        }
    });
    assert!(pool.work().trimmed > 0);
    assert_at_rest(&pool);
}

#[test]
fn a_secret_is_never_handed_out_from_small_pages_or_with_a_budget() {
    let mut options = options(1024);
    options.page_kind = PageKind::Small;
    options.background = Some(Background { budget: 0.05, ..Background::new(512) });
    let pool = Pool::new(options).unwrap();
    churn(&pool, 11, 800);
    let work = pool.work();
    assert_eq!(work.huge_frames, 0);
    assert!(work.small_frames > 0);
    assert_at_rest(&pool);
}

#[test]
fn under_memory_pressure_the_thread_gives_frames_back_instead_of_zeroing_them() {
    let mut options = options(2048);
    // Any pressure is above a limit below zero.
    options.background = Some(Background { pressure: -1.0, ..Background::new(2048) });
    let pool = Pool::new(options).unwrap();
    if afresh_sys::host::memory_pressure().is_none() {
        println!("SKIPPED: this kernel does not report memory pressure");
        return;
    }
    let frame = spy(&pool, pool.take(Order::new(11)).unwrap());
    let resident = pool.resident_bytes();
    pool.give(frame);
    eventually("giving back", || pool.usage().absent == pool.usage().total);
    assert!(pool.resident_bytes() < resident);
    let work = pool.work();
    assert_eq!((work.trimmed, work.zeroed_background), (2048, 0));
    drop(spy(&pool, pool.take(Order::new(11)).unwrap()));
}

#[test]
fn the_background_thread_cleans_everything_up_to_the_high_watermark_and_no_more() {
    let mut options = options(4096);
    options.background = Some(Background { low: 512, high: 1024, ..Background::new(4096) });
    let pool = Pool::new(options).unwrap();
    pool.give(spy(&pool, pool.take(Order::new(12)).unwrap()));
    eventually("zeroing", || pool.usage().clean == 1024);
    std::thread::sleep(Duration::from_millis(50));
    let usage = pool.usage();
    assert_eq!((usage.clean, usage.dirty, usage.zeroing), (1024, 3072, 0));
    assert_eq!(pool.work().zeroed_background, 1024);
}

#[test]
fn frames_given_back_unused_are_clean_still_and_cost_no_zeroing() {
    let pool = Pool::new(PoolOptions { background: None, ..options(512) }).unwrap();
    let frame = pool.take(Order::HUGE).unwrap();
    pool.give_unused(frame.split(Order::new(3)));
    drop(spy(&pool, pool.take(Order::HUGE).unwrap()));
    assert_eq!(pool.work().zeroed_inline, 0);
}

#[test]
fn the_limit_is_an_error_and_what_is_given_back_can_be_taken_again() {
    let pool = Pool::new(options(1024)).unwrap();
    let all = pool.take(Order::new(10)).unwrap();
    let error = pool.take(Order::PAGE).unwrap_err();
    assert_eq!(error, TakeError::Limit { lent: 1024, limit: 1024, wanted: 1 });
    assert!(error.to_string().contains("raise the limit"));
    pool.give(all.used());
    pool.give(pool.take(Order::PAGE).unwrap().used());
}

#[test]
fn clean_and_dirty_halves_still_make_a_whole_when_a_whole_is_asked_for() {
    let pool = Pool::new(PoolOptions { background: None, ..options(512) }).unwrap();
    let mut halves = pool.take(Order::HUGE).unwrap().split(Order::new(8));
    let (first, second) = (halves.next().unwrap(), halves.next().unwrap());
    pool.give(spy(&pool, first));
    pool.give_unused([second]);
    drop(spy(&pool, pool.take(Order::HUGE).unwrap()));
}

#[test]
fn a_refusal_of_the_kernel_is_an_error_and_leaves_the_books_balanced() {
    for call in [Call::Advise, Call::Map] {
        for after in 0..6 {
            let pool = Pool::new(PoolOptions { background: None, ..options(1024) }).unwrap();
            let memory = Reservation::aligned(1024, 2 << 20).unwrap();
            let plan = inject::Plan { call: Some(call), after, times: 9, errno: libc_enomem() };
            let (result, fired) = inject::with(plan, || pool.fill(&memory, PageRange::new(0, 700)));
            match result {
                Ok(lease) => lease.release(&memory).unwrap(),
                Err(error) => assert!(matches!(error, TakeError::System(_)), "{error}"),
            }
            let usage = pool.usage();
            assert!(usage.is_consistent(), "{call:?} after {after}: {usage:?}");
            assert!(usage.lent == 0 || fired > 1, "{call:?} after {after}: {usage:?}");
            churn(&pool, 5, 50);
        }
    }
}

fn libc_enomem() -> i32 {
    12
}

#[test]
fn a_lease_that_cannot_be_unmapped_takes_its_memory_out_of_circulation() {
    let pool = Pool::new(options(1024)).unwrap();
    let memory = Reservation::aligned(512, 2 << 20).unwrap();
    let lease = pool.fill(&memory, PageRange::new(0, 512)).unwrap();
    let plan = inject::Plan { call: Some(Call::Map), after: 0, times: 1, errno: libc_enomem() };
    let (result, _) = inject::with(plan, || lease.release(&memory));
    assert!(result.is_err());
    assert_eq!(pool.work().quarantined, 512);
    let forgotten = pool.fill(&memory, PageRange::new(0, 512)).unwrap();
    drop(forgotten);
    assert_eq!(pool.work().quarantined, 1024);
    assert!(matches!(pool.take(Order::PAGE), Err(TakeError::Limit { .. })));
}

#[test]
fn trimming_returns_memory_to_the_kernel_and_keeps_the_requested_pages() {
    let pool = Pool::new(PoolOptions { background: None, ..options(4096) }).unwrap();
    pool.prefill(4096).unwrap();
    assert_eq!(pool.resident_bytes(), 16 << 20);
    assert_eq!(pool.trim(1024), 3072);
    assert_eq!(pool.resident_bytes(), 4 << 20);
    assert_eq!(pool.trim(1024), 0);
    assert_at_rest(&pool);
}

#[test]
fn memory_is_held_in_huge_folios_where_the_kernel_can() {
    let pool = Pool::new(PoolOptions::inline(2048)).unwrap();
    pool.prefill(2048).unwrap();
    let work = pool.work();
    assert_eq!(work.huge_frames + work.small_frames, 4);
    if work.huge_frames == 0 {
        println!("SKIPPED: this kernel collapses no memory files");
    }
}

#[test]
fn the_kernel_is_a_source_of_zero_memory_too() {
    let memory = Reservation::new(4).unwrap();
    let lease = KernelZero.fill(&memory, PageRange::new(1, 2)).unwrap();
    // SAFETY: just mapped.
    unsafe {
        assert_eq!(memory.page_ptr(2).read(), 0);
        memory.page_ptr(2).write(1);
    }
    assert_eq!(lease.range(), PageRange::new(1, 2));
    lease.release(&memory).unwrap();
}

#[test]
fn after_a_soak_under_pressure_the_books_balance_and_nothing_is_lost() {
    let mut options = options(4096);
    options.background =
        Some(Background { pressure: 0.5, look: Duration::from_millis(5), ..Background::new(2048) });
    let pool = Pool::new(options).unwrap();
    let end = Instant::now() + Duration::from_secs(2);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let pool = &pool;
            scope.spawn(move || {
                let mut seed = seed;
                while Instant::now() < end {
                    churn(pool, seed, 100);
                    seed += 4;
                }
            });
        }
        while Instant::now() < end {
            pool.trim(1024);
            assert!(pool.usage().is_consistent());
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert_at_rest(&pool);
    assert_eq!(pool.work().quarantined, 0);
    eventually("the last block", || pool.usage().zeroing == 0);
    let whole: Vec<_> = (0..8).map(|_| spy(&pool, pool.take(Order::HUGE).unwrap())).collect();
    assert_eq!(whole.len(), 8);
    pool.give_all(whole);
}

#[test]
fn a_stage_supplies_private_zero_memory_without_waiting() {
    let zero_pool = afresh_frames::ZeroPool::new(2048).unwrap();
    eventually("populating", || zero_pool.ready() == 2048);
    let memory = Reservation::aligned(8192, 2 << 20).unwrap();
    let mut moved = Vec::new();
    for (start, len) in [(0, 1024), (1500, 700), (4096, 4096)] {
        let range = PageRange::new(start, len);
        moved.push(zero_pool.extend(&memory, range).unwrap());
        for page in range.start..range.end() {
            let word = memory.page_ptr(page).cast::<u64>();
            // SAFETY: the page became accessible in the line before.
            unsafe {
                assert_eq!(word.read(), 0, "page {page}");
                word.write(SECRET);
            }
        }
        // Private: discarding gives zeros, unlike shared memory.
        memory.advise(range, afresh_sys::Advice::Discard).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { memory.page_ptr(start).read() }, 0);
    }
    assert_eq!(moved[0], 1024);
    // 1500..2200 holds one whole 2 MiB of address space.
    assert!(moved[1] <= 512 && moved[2] <= 2048, "{moved:?}");
    eventually("populating again", || zero_pool.ready() == 2048);
}

#[test]
fn a_stage_that_cannot_move_falls_back_to_the_kernel() {
    let zero_pool = afresh_frames::ZeroPool::new(512).unwrap();
    eventually("populating", || zero_pool.ready() == 512);
    let memory = Reservation::aligned(1024, 2 << 20).unwrap();
    let plan = inject::Plan { call: Some(Call::Remap), after: 0, times: 1, errno: libc_enomem() };
    let (lease, fired) = inject::with(plan, || zero_pool.fill(&memory, PageRange::new(0, 1024)));
    assert_eq!(fired, 1);
    // SAFETY: the whole range is accessible.
    unsafe {
        assert_eq!(memory.page_ptr(1023).read(), 0);
        memory.page_ptr(3).write(1);
    }
    lease.unwrap().release(&memory).unwrap();
    eventually("populating again", || zero_pool.ready() == 512);
}

#[test]
fn a_forked_child_inherits_neither_the_pool_nor_a_lease() {
    let pool = Pool::new(options(1024)).unwrap();
    let memory = Reservation::aligned(1024, 2 << 20).unwrap();
    let lease = pool.fill(&memory, PageRange::new(0, 700)).unwrap();
    let frame = pool.take(Order::PAGE).unwrap().used();
    for address in [memory.page_ptr(0), memory.page_ptr(699), pool.address(&frame)] {
        assert!(flags_of(address as usize).contains("dc"), "fork copies the mapping");
    }
    pool.give(frame);
    lease.release(&memory).unwrap();
}

/// The `VmFlags` of the mapping that holds an address.
fn flags_of(address: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in maps.lines() {
        let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
        let bounds = range.and_then(|(from, to)| {
            Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
        });
        if let Some((from, to)) = bounds {
            inside = (from..to).contains(&address);
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
            return flags.to_owned();
        }
    }
    panic!("nothing is mapped at {address:#x}");
}

#[test]
fn reserved_huge_pages_serve_whole_huge_frames_and_refuse_parts_of_one() {
    let mut options = options(1024);
    options.page_kind = PageKind::Reserved;
    options.background = None;
    let pool = match Pool::new(options) {
        Ok(pool) => pool,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let frame = match pool.take(Order::HUGE) {
        Ok(frame) => spy(&pool, frame),
        Err(error) => return println!("SKIPPED: no huge pages are reserved: {error}"),
    };
    pool.give(frame);
    let memory = Reservation::aligned(1024, 2 << 20).unwrap();
    let lease = pool.fill(&memory, PageRange::new(512, 512)).unwrap();
    // SAFETY: the lease has just mapped it.
    assert_eq!(unsafe { memory.page_ptr(700).read() }, 0);
    lease.release(&memory).unwrap();
    assert!(matches!(pool.fill(&memory, PageRange::new(0, 100)), Err(TakeError::System(_))));
    pool.give(spy(&pool, pool.take(Order::PAGE).unwrap()));
    assert_at_rest(&pool);
}

/// Fault handlers take resident memory.
#[test]
fn a_taker_gets_the_memory_that_it_had_populated_while_others_take_resident_memory() {
    let mut options = PoolOptions::inline(256 * Order::HUGE.pages());
    (options.page_kind, options.check_zero) = (PageKind::Small, false);
    let pool = Pool::new(options).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for _ in 0..3 {
            scope.spawn(|| {
                let mut held = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    held.extend(pool.take_resident(Order::HUGE, Order::HUGE));
                    if held.len() > 20 {
                        pool.give_unused(held.drain(..));
                    }
                }
                pool.give_unused(held);
            });
        }
        let taken: Vec<CleanFrame> =
            (0..120).map(|_| pool.take(Order::HUGE).expect("most memory is absent")).collect();
        pool.give_unused(taken);
    });
}
