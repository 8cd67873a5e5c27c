//! The pager's rivals: the kernel's own ways, and userfaultfd as in textbooks.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use afresh_pager::{FillStrategy, PageSource, Restore};
use afresh_sys::errno::{EAGAIN, EEXIST};
use afresh_sys::fault::{self, Fault, FaultHandler, FaultSignal, Registration};
use afresh_sys::{
    Advice, Interest, PAGE_SIZE, PageRange, Protection, Reservation, SysError, Uffd, UffdMode,
};
use anyhow::{Context, Result};

/// Pages filled on a fault.
const WINDOW: usize = 64;

/// A way to restore that takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rival {
    /// A private mapping that stays. The baseline of all others.
    Mmap,
    /// The same, with every page faulted in first.
    MmapPopulate,
    /// Reading everything into 4 KiB pages first.
    ReadSmall,
    /// Copying on demand by UFFDIO_COPY, from a mapping of the file.
    UffdCopy,
    /// Mapping on demand by UFFDIO_CONTINUE, out of memory that the host holds.
    UffdContinue,
    /// The pager.
    Pager(FillStrategy),
}

impl Rival {
    /// All of them, the first for comparison.
    pub fn all() -> Vec<Self> {
        let rivals =
            [Self::Mmap, Self::MmapPopulate, Self::ReadSmall, Self::UffdCopy, Self::UffdContinue];
        rivals.into_iter().chain(FillStrategy::ALL.map(Self::Pager)).collect()
    }

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mmap => "mmap",
            Self::MmapPopulate => "mmap-populate",
            Self::ReadSmall => "read-4k",
            Self::UffdCopy => "uffd-copy",
            Self::UffdContinue => "uffd-continue",
            Self::Pager(strategy) => strategy.name(),
        }
    }

    /// Whether it takes content that the host holds in memory, and not a file.
    pub fn holds(self) -> bool {
        matches!(self, Self::UffdContinue | Self::Pager(FillStrategy::Held))
    }

    /// Begins to restore all of `target`.
    pub(super) fn start(
        self,
        target: &Arc<Reservation>,
        source: Arc<dyn PageSource>,
    ) -> Result<RunningRestore> {
        let all = PageRange::new(0, target.pages());
        match self {
            Self::Pager(strategy) => {
                let options = afresh_pager::Options::with(strategy);
                let restore = Restore::start(target.clone(), all, source, &options)?;
                return Ok(RunningRestore::Pager(restore));
            }
            Self::Mmap | Self::MmapPopulate => {
                map(target, &*source)?;
                if self == Self::MmapPopulate {
                    target.advise(all, Advice::PopulateRead)?;
                }
            }
            Self::ReadSmall => {
                target.map_anonymous(all, Protection::ReadWrite)?;
                target.advise(all, Advice::NoHugePage)?;
                // SAFETY: just mapped, and not shared yet.
                unsafe { source.read(0, target.page_ptr(0), all.len) }?;
            }
            Self::UffdCopy | Self::UffdContinue => {
                return Ok(RunningRestore::OnDemand(OnDemand::start(target, &*source, self)?));
            }
        }
        Ok(RunningRestore::Done)
    }
}

/// Maps the one file that the benchmark's sources have over all of `target`.
fn map(target: &Reservation, source: &dyn PageSource) -> Result<()> {
    let pieces = source.pieces().context("the source cannot be mapped")?;
    for piece in pieces {
        let (file, page) = piece.file.context("the file has holes")?;
        target.map_file(piece.pages, Protection::ReadWrite, file, page)?;
    }
    Ok(())
}

/// A restore under way.
pub(super) enum RunningRestore {
    Pager(Restore),
    OnDemand(OnDemand),
    Done,
}

impl RunningRestore {
    /// Faults answered in user space so far.
    pub(super) fn faults(&self) -> usize {
        match self {
            Self::Pager(restore) => restore.status().faults,
            Self::OnDemand(demand) => demand.filler.faults.load(Ordering::Relaxed),
            Self::Done => 0,
        }
    }

    /// Waits until the source is no longer needed, for strategies that reach that point.
    pub(super) fn wait(self) -> Result<()> {
        match self {
            Self::Pager(restore) => Ok(restore.wait(Duration::from_secs(60))?),
            Self::OnDemand(demand) => demand.finish(),
            Self::Done => Ok(()),
        }
    }
}

/// Memory whose pages come when they are touched.
pub(super) struct OnDemand {
    /// Dropped first: no handler runs afterwards.
    _registration: Registration,
    filler: Arc<Filler>,
}

struct Filler {
    uffd: Uffd,
    target: Arc<Reservation>,
    /// A mapping of the file to copy from; none where the target's own file has the pages.
    view: Option<Reservation>,
    faults: AtomicUsize,
}

impl OnDemand {
    fn start(target: &Arc<Reservation>, source: &dyn PageSource, way: Rival) -> Result<Self> {
        let all = PageRange::new(0, target.pages());
        let (view, interest) = if way == Rival::UffdContinue {
            let file = source.held_memfd().context("the source is not in memory")?;
            target.map_file(all, Protection::ReadWrite, file.as_fd(), 0)?;
            (None, Interest::MINOR)
        } else {
            let view = Reservation::new(all.len)?;
            map(&view, source)?;
            target.map_anonymous(all, Protection::ReadWrite)?;
            (Some(view), Interest::MISSING)
        };
        let uffd = Uffd::open(UffdMode::Sigbus)?;
        uffd.register(target.page_ptr(0), all.byte_len(), interest)?;
        let filler = Filler { uffd, target: target.clone(), view, faults: AtomicUsize::new(0) };
        let filler = Arc::new(filler);
        let registration = fault::register(target.page_ptr(0), all.byte_len(), filler.clone())?;
        Ok(Self { _registration: registration, filler })
    }

    fn finish(self) -> Result<()> {
        for first in (0..self.filler.target.pages()).step_by(WINDOW) {
            self.filler.fill(first)?;
        }
        Ok(())
    }
}

impl Filler {
    /// Fills the part of the window at page `first` that is still missing.
    fn fill(&self, first: usize) -> Result<(), SysError> {
        let end = (first + WINDOW).min(self.target.pages());
        let mut page = first;
        while page < end {
            let (to, len) = (self.target.page_ptr(page), (end - page) * PAGE_SIZE);
            let placed = match &self.view {
                // SAFETY: the view holds as many pages as the target, which is registered with this
                // descriptor and this benchmark's alone.
                Some(view) => unsafe { self.uffd.copy(to, view.page_ptr(page), len) },
                None => self.uffd.resume(to, len),
            };
            match placed {
                Ok(bytes) => page += bytes / PAGE_SIZE,
                Err(error) if error.errno == EEXIST => page += 1,
                Err(error) if error.errno == EAGAIN => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl FaultHandler for Filler {
    fn on_fault(&self, fault: &Fault) -> bool {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let page = (fault.address - self.target.base().as_ptr() as usize) / PAGE_SIZE;
        fault.signal == FaultSignal::Bus && self.fill(page / WINDOW * WINDOW).is_ok()
    }
}
