//! The zeroing thread: turns dirty blocks into clean ones when it has no other work.
//!
//! It holds no lock, ever (see [`crate::handoff`]). It runs at idle priority, keeps to a share of
//! one processor, writes past the caches, and under memory pressure gives whole frames back to the
//! kernel instead of zeroing them.
//!
//! Waking a sleeping processor costs the waking thread microseconds. So after work the thread naps
//! and looks for more by itself, and only when none comes for a while does it sleep until woken.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use afresh_sys::{Worker, host};

use crate::Background;
use crate::frame::Order;
use crate::handoff::Outcome;
use crate::pool::PoolState;

/// Time between two looks for work while some is expected, a few microseconds each.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Looks without work before the thread sleeps until woken.
const IDLE_POLLS: u32 = 8;

/// State shared with the thread.
#[derive(Debug, Default)]
pub(crate) struct ZeroerShared {
    stop: AtomicBool,
    asleep: AtomicBool,
    pub(crate) zeroed: AtomicU64,
    pub(crate) punched: AtomicU64,
    pub(crate) cpu_ns: AtomicU64,
}

/// Owner's end of the thread; dropping it stops the thread and waits for it.
#[derive(Debug)]
pub(crate) struct Zeroer {
    shared: Arc<ZeroerShared>,
    thread: Option<Worker>,
}

impl Zeroer {
    pub(crate) fn start(pool: Arc<PoolState>, options: Background) -> std::io::Result<Self> {
        let shared = Arc::new(ZeroerShared::default());
        let state = shared.clone();
        let thread = Worker::start("afresh-zeroer", move || run(&pool, &options, &state))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn shared(&self) -> &ZeroerShared {
        &self.shared
    }

    /// Wakes the thread if it sleeps; costs a system call only then.
    pub(crate) fn wake(&self) {
        // Pairs with the store in `wait`: either the thread sees the offer, or we
        // see it asleep.
        if self.shared.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.unpark();
        }
    }
}

impl Drop for Zeroer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.unpark();
            // A panic of the thread would be a bug, and has no receiver here.
            thread.join();
        }
    }
}

fn run(pool: &PoolState, options: &Background, state: &ZeroerShared) {
    if options.idle_priority {
        // Where a sandbox forbids it, the thread runs at normal priority within its budget.
        let _ = host::run_when_idle();
    }
    let mut pressure = Pressure { limit: options.pressure, every: options.look, last: None };
    while !state.stop.load(Ordering::SeqCst) {
        let Some(claim) = pool.handoff.claim() else {
            wait(pool, state);
            continue;
        };
        let began = Instant::now();
        let outcome = if claim.block.order >= Order::HUGE && pressure.is_high() {
            if pool.store.punch(claim.block).is_ok() { Outcome::Absent } else { Outcome::Dirty }
        } else if pool.store.zero_cold(claim.block, || !state.stop.load(Ordering::Relaxed)) {
            Outcome::Clean
        } else {
            Outcome::Dirty
        };
        let pages = claim.block.pages() as u64;
        pool.handoff.finish(claim, outcome);
        match outcome {
            Outcome::Clean => state.zeroed.fetch_add(pages, Ordering::Relaxed),
            Outcome::Absent => state.punched.fetch_add(pages, Ordering::Relaxed),
            Outcome::Dirty => 0,
        };
        state.cpu_ns.store(host::thread_cpu_time().as_nanos() as u64, Ordering::Relaxed);
        sleep_in_proportion(began.elapsed(), options.budget);
    }
}

/// Waits for work: in naps at first, then until woken.
fn wait(pool: &PoolState, state: &ZeroerShared) {
    for _ in 0..IDLE_POLLS {
        if pool.handoff.has_offers() || state.stop.load(Ordering::SeqCst) {
            return;
        }
        thread::park_timeout(POLL_INTERVAL);
    }
    state.asleep.store(true, Ordering::SeqCst);
    if !pool.handoff.has_offers() && !state.stop.load(Ordering::SeqCst) {
        thread::park();
    }
    state.asleep.store(false, Ordering::SeqCst);
}

/// Rests long enough that `worked` was `budget` of the whole.
fn sleep_in_proportion(worked: Duration, budget: f32) {
    if budget < 1.0 {
        thread::sleep(worked.mul_f32(1.0 / budget.clamp(0.001, 1.0) - 1.0));
    }
}

/// A look at the host's memory pressure, at most every so often.
struct Pressure {
    limit: f32,
    every: Duration,
    last: Option<(Instant, bool)>,
}

impl Pressure {
    fn is_high(&mut self) -> bool {
        match self.last {
            Some((when, high)) if when.elapsed() < self.every => high,
            _ => {
                let high = host::memory_pressure().is_some_and(|percent| percent > self.limit);
                self.last = Some((Instant::now(), high));
                high
            }
        }
    }
}
