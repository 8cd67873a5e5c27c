//! The physical memory behind frames: a file in memory, and the pool's own view of all of it.
//!
//! The *window* maps the whole file once, so that zeroing needs no other mapping. Pages of the file
//! without memory (absent frames) are never touched through it: they are allocated only by
//! [`Store::populate`], which fails with an error where a touch would fail with a signal.
//!
//! Memory is requested in 2 MiB folios: by `MADV_COLLAPSE`, which works without privilege and for
//! any shmem setting (except `deny`), else in 4 KiB pages; or, on request, from the pages that the
//! administrator has reserved (hugetlb).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_sys::errno::ESRCH;
use afresh_sys::{
    Advice, Call, HUGE_SIZE, Memfd, PAGE_SIZE, PageRange, Protection, Reservation, SysError,
    WithholdGuard, fork, host, withhold,
};

use crate::TakeError;
use crate::frame::{Block, Order};
use crate::zero;

/// Which pages the memory of a pool is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageKind {
    /// Folios of 2 MiB collapsed from small pages; 4 KiB where that fails.
    #[default]
    Folios,
    /// Huge pages that the administrator has reserved (`vm.nr_hugepages`), and no others. They are
    /// mapped by whole 2 MiB only, so leases and arenas must have sizes of whole 2 MiB.
    Reserved,
    /// 4 KiB pages only.
    Small,
}

/// Memory that growth always leaves free, so that the refusal comes before the kill.
const HEADROOM: u64 = 16 << 20;

/// Work between two looks at the stop flag while zeroing in the background.
pub(crate) const STEP: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Store {
    file: Memfd,
    window: Arc<Reservation>,
    /// Keeps the window from children.
    _withheld: WithholdGuard,
    kind: PageKind,
    huge: AtomicUsize,
    small: AtomicUsize,
    zero: zero::ZeroMethodSelector,
    /// The process that made it. A child has no window and must not change the file, which its
    /// parent still uses.
    generation: u32,
}

impl Store {
    pub(crate) fn new(pages: usize, kind: PageKind) -> Result<Self, SysError> {
        let bytes = pages * PAGE_SIZE;
        let file = match kind {
            PageKind::Reserved => Memfd::hugetlb(c"afresh-frames")?,
            PageKind::Folios | PageKind::Small => Memfd::new(c"afresh-frames")?,
        };
        file.set_len(bytes)?;
        let window = Arc::new(Reservation::aligned(pages, HUGE_SIZE)?);
        let all = PageRange::new(0, pages);
        window.map_shared(all, Protection::ReadWrite, &file, 0)?;
        // A child that inherited the window could read every guest.
        let withheld = withhold(&window, all)?;
        Ok(Self {
            file,
            window,
            _withheld: withheld,
            kind,
            huge: 0.into(),
            small: 0.into(),
            zero: zero::ZeroMethodSelector::default(),
            generation: fork::generation(),
        })
    }

    /// Fails in a child of the process that made the store.
    pub(crate) fn check(&self) -> Result<(), SysError> {
        if self.generation == fork::generation() {
            return Ok(());
        }
        Err(SysError::new(Call::Map, ESRCH))
    }

    pub(crate) fn file(&self) -> &Memfd {
        &self.file
    }

    /// The smallest block that can be mapped elsewhere on its own.
    pub(crate) fn min_mappable_order(&self) -> Order {
        if self.kind == PageKind::Reserved { Order::HUGE } else { Order::PAGE }
    }

    /// 2 MiB frames held as (huge pages, 4 KiB pages) since the start; punched ones still count.
    pub(crate) fn populated_as(&self) -> (usize, usize) {
        (self.huge.load(Ordering::Relaxed), self.small.load(Ordering::Relaxed))
    }

    /// Address of a block in the window.
    pub(crate) fn address(&self, block: Block) -> *mut u8 {
        self.window.page_ptr(block.start as usize)
    }

    /// The page of the file that an address in the window belongs to.
    pub(crate) fn page_of(&self, address: *const u8) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.window.base().as_ptr() as usize)?;
        let page = offset / PAGE_SIZE;
        (page < self.window.pages()).then_some(page)
    }

    /// Maps pages of the file over `range` of `memory`, which a forked child does not inherit. On
    /// an error none of them is accessible there: access is granted last.
    pub(crate) fn map(
        &self,
        memory: &Reservation,
        range: PageRange,
        file_page: usize,
    ) -> Result<(), SysError> {
        self.check()?;
        memory.map_shared(range, Protection::None, &self.file, file_page)?;
        memory.advise(range, Advice::DontFork)?;
        memory.protect(range, Protection::ReadWrite)
    }

    /// Gives memory to an absent block of whole 2 MiB frames; it is zero then. On failure the block
    /// is absent still.
    pub(crate) fn populate(&self, block: Block) -> Result<(), TakeError> {
        self.check()?;
        let range = block.range();
        let wanted = range.byte_len() as u64;
        if let Some(headroom) = host::memory_headroom()
            && headroom < wanted + HEADROOM
        {
            return Err(TakeError::Headroom { headroom, wanted });
        }
        self.allocate(block).inspect_err(|_| {
            // Part of it may have been allocated; the error that counts is the first.
            let _ = self.file.punch_hole(range);
        })?;
        Ok(())
    }

    fn allocate(&self, block: Block) -> Result<(), SysError> {
        let range = block.range();
        let frames = range.len / Order::HUGE.pages();
        let huge = match self.kind {
            PageKind::Reserved => true,
            PageKind::Folios => self.collapse(block).is_ok(),
            PageKind::Small => false,
        };
        // Also maps the folios in the window, and allocates them where collapsing failed.
        self.window.advise(range, Advice::PopulateWrite)?;
        if huge { &self.huge } else { &self.small }.fetch_add(frames, Ordering::Relaxed);
        Ok(())
    }

    /// Makes 2 MiB folios of an absent block. The kernel wants one page of each to be there first.
    fn collapse(&self, block: Block) -> Result<(), SysError> {
        for frame in block.pieces(Order::HUGE) {
            let first = PageRange::new(frame.start as usize, 1);
            self.window.advise(first, Advice::PopulateWrite)?;
        }
        self.window.advise(block.range(), Advice::Collapse)
    }

    /// Gives the memory of a block back to the kernel.
    pub(crate) fn punch(&self, block: Block) -> Result<(), SysError> {
        self.check()?;
        self.file.punch_hole(block.range())
    }

    /// Zeroes a block that is about to be used. The caller owns it.
    pub(crate) fn zero_hot(&self, block: Block) {
        self.zero_pages(block.start as usize, block.pages());
    }

    /// Zeroes pages of a block that the caller owns.
    pub(crate) fn zero_pages(&self, start: usize, len: usize) {
        // SAFETY: the window maps the whole file, blocks with memory never fault for want of it,
        // and the caller owns these pages: they have no other reader or writer.
        unsafe { self.zero.zero(self.window.page_ptr(start), len * PAGE_SIZE) };
    }

    /// Zeroes a block past the caches, calling `go_on` every [`STEP`] bytes. Returns whether it
    /// finished. The caller owns the block.
    pub(crate) fn zero_cold(&self, block: Block, mut go_on: impl FnMut() -> bool) -> bool {
        let (start, len) = (self.address(block), block.range().byte_len());
        for offset in (0..len).step_by(STEP) {
            if !go_on() {
                return false;
            }
            // SAFETY: as for `zero_pages`; the piece is inside the block, and both its ends are
            // page boundaries.
            unsafe { zero::cold(start.add(offset), STEP.min(len - offset)) };
        }
        true
    }

    /// Whether a block is zero. The caller owns it.
    pub(crate) fn is_zero(&self, block: Block) -> bool {
        // SAFETY: as for `zero_pages`.
        unsafe { zero::is_zero(self.address(block), block.range().byte_len()) }
    }
}
