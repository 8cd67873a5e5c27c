//! The rivals: the kernel's own mechanisms.

use afresh_frames::{Order, PageKind, Pool, PoolOptions};
use afresh_sys::{Advice, HUGE_SIZE, Memfd, PageRange, Protection, Reservation, SysError};
use anyhow::Result;

use super::{Case, Clock, Sample, Strategy};

/// How a fresh mapping is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FreshMapping {
    /// Anonymous memory in 4 KiB pages.
    Plain,
    /// The same, populated before the first touch.
    Populate,
    /// Transparent huge pages.
    Huge,
    /// Anonymous memory under the host's settings.
    Unadvised,
    /// A shared view of a file in memory whose 4 KiB pages are there.
    File,
}

/// Maps, touches, unmaps.
pub(super) struct Kernel {
    memory: Reservation,
    fresh: FreshMapping,
    file: Option<Memfd>,
}

impl Kernel {
    pub(super) fn new(pages: usize, fresh: FreshMapping) -> Result<Self> {
        let file = match fresh {
            FreshMapping::File => Some(resident_file(pages)?),
            _ => None,
        };
        Ok(Self { memory: Reservation::aligned(pages, HUGE_SIZE)?, fresh, file })
    }

    fn map(&self, range: PageRange) -> Result<(), SysError> {
        if let Some(file) = &self.file {
            return self.memory.map_shared(range, Protection::ReadWrite, file, 0);
        }
        self.memory.map_anonymous(range, Protection::ReadWrite)?;
        match self.fresh {
            FreshMapping::Huge => self.memory.advise(range, Advice::HugePage),
            FreshMapping::Populate => {
                self.memory.advise(range, Advice::NoHugePage)?;
                self.memory.advise(range, Advice::PopulateWrite)
            }
            FreshMapping::Unadvised => Ok(()),
            FreshMapping::Plain | FreshMapping::File => {
                self.memory.advise(range, Advice::NoHugePage)
            }
        }
    }
}

/// A file of `pages` resident 4 KiB pages.
pub(super) fn resident_file(pages: usize) -> Result<Memfd, SysError> {
    let file = Memfd::new(c"afresh-bench")?;
    file.set_len(pages * afresh_sys::PAGE_SIZE)?;
    let range = PageRange::new(0, pages);
    let view = Reservation::new(pages)?;
    view.map_shared(range, Protection::ReadWrite, &file, 0)?;
    view.advise(range, Advice::PopulateWrite)?;
    Ok(file)
}

impl Strategy for Kernel {
    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let range = PageRange::new(0, case.pages);
        let mut clock = Clock::start();
        self.map(range)?;
        let take = clock.lap();
        // SAFETY: just mapped.
        unsafe { case.touch(self.memory.base().as_ptr()) };
        let touch = clock.lap();
        self.memory.map_anonymous(range, Protection::None)?;
        Ok(Clock::sample(take, touch, clock.lap()))
    }
}

/// Memory that is there already, mapped by huge pages: the floor no strategy can go below.
pub(super) struct ResidentMemory {
    pool: std::sync::Arc<Pool>,
    base: *mut u8,
    _frame: afresh_frames::DirtyFrame,
}

// SAFETY: the pointer is to memory that this value owns through its frame.
unsafe impl Send for ResidentMemory {}

impl ResidentMemory {
    pub(super) fn new(pages: usize) -> Result<Self> {
        let options = PoolOptions { page_kind: PageKind::Folios, ..PoolOptions::inline(pages) };
        let pool = Pool::new(options)?;
        let frame = pool.take(Order::holding(pages).unwrap_or(Order::MAX))?.used();
        Ok(Self { base: pool.address(&frame), pool, _frame: frame })
    }
}

impl Strategy for ResidentMemory {
    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        debug_assert!(self.pool.limit_bytes() >= case.pages * afresh_sys::PAGE_SIZE);
        let mut clock = Clock::start();
        // SAFETY: the frame is as large as the case and owned.
        unsafe { case.touch(self.base) };
        Ok(Clock::sample(0.0, clock.lap(), 0.0))
    }
}

/// Pre-zeroed anonymous memory moved into place by `mremap`; zeroing is off the clock.
pub(super) struct MovedMemory {
    stage: Reservation,
    memory: Reservation,
    pages: usize,
}

impl MovedMemory {
    pub(super) fn new(pages: usize) -> Result<Self> {
        let stage = Reservation::aligned(pages, HUGE_SIZE)?;
        let memory = Reservation::aligned(pages, HUGE_SIZE)?;
        Ok(Self { stage, memory, pages })
    }
}

impl Strategy for MovedMemory {
    fn prepare(&mut self) -> Result<()> {
        let all = PageRange::new(0, self.pages);
        self.stage.map_anonymous(all, Protection::ReadWrite)?;
        self.stage.advise(all, Advice::HugePage)?;
        Ok(self.stage.advise(all, Advice::PopulateWrite)?)
    }

    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let all = PageRange::new(0, self.pages);
        let mut clock = Clock::start();
        self.memory.take_pages(0, &self.stage, all)?;
        let take = clock.lap();
        // SAFETY: just moved there.
        unsafe { case.touch(self.memory.base().as_ptr()) };
        let touch = clock.lap();
        self.memory.map_anonymous(all, Protection::None)?;
        Ok(Clock::sample(take, touch, clock.lap()))
    }
}
