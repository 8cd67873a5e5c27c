//! The pool's ideas, alone and together.

use std::sync::Arc;

use afresh_arena::{Arena, ArenaOptions};
use afresh_frames::{DirtyFrame, FrameCache, Order, Pool, ZeroPool, ZeroSource};
use afresh_sys::{HUGE_SIZE, PageRange, Reservation};
use anyhow::Result;

use super::{Case, Clock, Sample, Strategy};

fn background(pool: &Pool) -> f64 {
    pool.work().background_cpu.as_nanos() as f64
}

/// Takes an arena's worth of frames, maps them, gives them back.
pub(super) struct MappedFrames {
    arena: Arena,
    pool: Arc<Pool>,
    /// Zeroes everything free off the clock, as the background would.
    prezero: bool,
}

impl MappedFrames {
    pub(super) fn new(pool: Arc<Pool>, options: ArenaOptions, prezero: bool) -> Result<Self> {
        Ok(Self { arena: Arena::new(pool.clone(), options)?, pool, prezero })
    }
}

/// Zeroes everything free, as the background thread would with time enough.
fn zero_all(pool: &Pool) -> Result<()> {
    let mut clean = Vec::new();
    while pool.usage().dirty > 0 {
        clean.push(pool.take_between(Order::PAGE, Order::MAX)?);
    }
    pool.give_unused(clean);
    Ok(())
}

impl Strategy for MappedFrames {
    fn prepare(&mut self) -> Result<()> {
        if self.prezero { zero_all(&self.pool) } else { Ok(()) }
    }

    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let mut clock = Clock::start();
        self.arena.grow(case.pages)?;
        let take = clock.lap();
        // SAFETY: the arena has just grown to the case's pages.
        unsafe { case.touch(self.arena.base()) };
        let touch = clock.lap();
        self.arena.clear()?;
        Ok(Clock::sample(take, touch, clock.lap()))
    }

    fn background(&self) -> f64 {
        background(&self.pool)
    }
}

/// A range of a reservation filled by a source of zero memory, as slots and guests do it.
pub(super) struct Source {
    source: Arc<dyn ZeroSource>,
    memory: Reservation,
    /// Nanoseconds the source's thread has worked.
    worked: Box<dyn Fn() -> f64 + Send>,
}

impl Source {
    /// Frames of a pool.
    pub(super) fn pool(pages: usize, pool: Arc<Pool>) -> Result<Self> {
        let memory = Reservation::aligned(pages, HUGE_SIZE)?;
        let source = Arc::new(pool.clone());
        Ok(Self { source, memory, worked: Box::new(move || background(&pool)) })
    }

    /// Private memory prepared by a zero pool.
    pub(super) fn zero_pool(pages: usize, zero_pool: Arc<ZeroPool>) -> Result<Self> {
        let memory = Reservation::aligned(pages, HUGE_SIZE)?;
        let source = zero_pool.clone();
        let worked = Box::new(move || zero_pool.cpu_time().as_nanos() as f64);
        Ok(Self { source, memory, worked })
    }
}

impl Strategy for Source {
    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let mut clock = Clock::start();
        let lease = self.source.fill(&self.memory, PageRange::new(0, case.pages))?;
        let take = clock.lap();
        // SAFETY: the source has just mapped the range.
        unsafe { case.touch(self.memory.base().as_ptr()) };
        let touch = clock.lap();
        lease.release(&self.memory)?;
        Ok(Clock::sample(take, touch, clock.lap()))
    }

    fn background(&self) -> f64 {
        (self.worked)()
    }
}

/// One large frame, used at its address in the pool: nothing is mapped or unmapped.
pub(super) struct DirectFrame {
    pub(super) pool: Arc<Pool>,
}

impl Strategy for DirectFrame {
    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let order = Order::holding(case.pages).unwrap_or(Order::MAX);
        let mut clock = Clock::start();
        let frame = self.pool.take(order)?.used();
        let base = self.pool.address(&frame);
        let take = clock.lap();
        // SAFETY: the frame holds at least the case's pages.
        unsafe { case.touch(base) };
        let touch = clock.lap();
        self.pool.give(frame);
        Ok(Clock::sample(take, touch, clock.lap()))
    }

    fn background(&self) -> f64 {
        background(&self.pool)
    }
}

/// Pages taken one by one, or in windows, and touched at their addresses in the pool, as a kernel
/// would that had this allocator beneath its fault handler. The order of the case does not apply:
/// pages come in the order the allocator gives them.
pub(super) struct ByPage {
    cache: FrameCache,
    pool: Arc<Pool>,
    /// Pages taken (and zeroed, if dirty) before the first of them is touched.
    window: usize,
    /// Through the thread's cache, or straight from the buddy allocator.
    cached: bool,
    prezero: bool,
    held: Vec<DirtyFrame>,
}

impl ByPage {
    pub(super) fn new(pool: Arc<Pool>, window: usize, cached: bool, prezero: bool) -> Self {
        let cache = FrameCache::new(pool.clone(), Order::PAGE, 64);
        Self { cache, pool, window, cached, prezero, held: Vec::new() }
    }
}

impl Strategy for ByPage {
    fn prepare(&mut self) -> Result<()> {
        self.cache.flush();
        if self.prezero { zero_all(&self.pool) } else { Ok(()) }
    }

    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let pages = case.touched();
        self.held.reserve(pages);
        let mut clock = Clock::start();
        while self.held.len() < pages {
            let first = self.held.len();
            for _ in 0..self.window.min(pages - first) {
                let frame =
                    if self.cached { self.cache.take() } else { self.pool.take(Order::PAGE) };
                self.held.push(frame?.used());
            }
            for frame in &self.held[first..] {
                let byte = self.pool.address(frame);
                // SAFETY: the frame is owned and a page long.
                unsafe { byte.write_volatile(1) };
            }
        }
        let touch = clock.lap();
        for frame in self.held.drain(..) {
            if self.cached {
                self.cache.give(frame);
            } else {
                self.pool.give(frame);
            }
        }
        Ok(Clock::sample(0.0, touch, clock.lap()))
    }

    fn background(&self) -> f64 {
        background(&self.pool)
    }
}
