//! Options of a pool.

use std::time::Duration;

use crate::PageKind;

/// Options of a pool; [`PoolOptions::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Maximum pages that may be lent at a time; rounded up to whole 2 MiB.
    pub limit: usize,
    /// The kind of pages.
    pub page_kind: PageKind,
    /// Background zeroing, or `None` for zeroing inline only.
    pub background: Option<Background>,
    /// Checks every byte of a clean frame at hand-out and panics on one that is not zero. On by
    /// default in debug builds; costs a read of the memory.
    pub check_zero: bool,
}

/// Options of the zeroing thread.
#[derive(Clone, Debug)]
pub struct Background {
    /// The thread is woken when fewer clean pages than this are free.
    pub low: usize,
    /// It runs until this many clean pages are free.
    pub high: usize,
    /// Share of one processor it may use, over 0 and up to 1.
    pub budget: f32,
    /// Runs the thread only when nothing else wants the processor (`SCHED_IDLE`).
    pub idle_priority: bool,
    /// Above this memory pressure (PSI `some avg10`, percent) the thread stops zeroing and gives
    /// free memory back to the kernel instead.
    pub pressure: f32,
    /// Time between two looks at the memory pressure.
    pub look: Duration,
}

impl PoolOptions {
    /// A pool of at most `limit` pages that zeroes in the background, all it can, at idle priority.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            page_kind: PageKind::default(),
            background: Some(Background::new(limit)),
            check_zero: cfg!(debug_assertions),
        }
    }

    /// The same without a background thread.
    #[must_use]
    pub fn inline(limit: usize) -> Self {
        Self { background: None, ..Self::new(limit) }
    }
}

impl Background {
    /// Keeps up to `pages` pages clean, with one whole processor if it is idle.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self {
            low: pages,
            high: pages,
            budget: 1.0,
            idle_priority: true,
            pressure: 20.0,
            look: Duration::from_secs(1),
        }
    }
}
