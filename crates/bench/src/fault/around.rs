//! Fault-around by userfaultfd: the way to fill, the amount, and the handler.
//!
//! Only the mechanism is measured: pages to continue are resident, pages to move are staged off the
//! clock, pages to copy come from one zero buffer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use afresh_sys::{
    Advice, Interest, Memfd, PAGE_SIZE, PageRange, Protection, Reservation, SysError, Uffd,
    UffdEvent, UffdMode, fault,
};
use anyhow::{Result, anyhow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::kernel::resident_file;
use super::{Case, Clock, Sample, Strategy};

/// How missing pages are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fill {
    /// Map pages that a shared file has.
    Continue,
    /// Copy zeros.
    Copy,
    /// Map the shared zero page, which the first write faults away from.
    Zeropage,
    /// Move pages staged elsewhere.
    Move,
}

/// The handler of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The faulting thread, in a signal handler.
    Signal,
    /// A thread that reads the descriptor.
    Thread,
}

/// The resources of the handler.
struct Filler {
    uffd: Uffd,
    fill: Fill,
    window: usize,
    base: usize,
    pages: usize,
    source: Reservation,
    failures: AtomicUsize,
}

impl Filler {
    /// Fills the aligned window around an address.
    fn fill(&self, address: usize) -> bool {
        let page = address.wrapping_sub(self.base) / PAGE_SIZE;
        if page >= self.pages {
            return false;
        }
        let first = page / self.window * self.window;
        let len = self.window.min(self.pages - first) * PAGE_SIZE;
        let to = (self.base + first * PAGE_SIZE) as *mut u8;
        let result = match self.fill {
            Fill::Continue => self.uffd.resume(to, len),
            Fill::Zeropage => self.uffd.zero(to, len),
            // SAFETY: the source is a window of readable zeros; the destination is registered
            // memory of this benchmark.
            Fill::Copy => unsafe { self.uffd.copy(to, self.source.page_ptr(0), len) },
            // SAFETY: the source page is staged anonymous memory that nothing else uses.
            Fill::Move => unsafe { self.uffd.take(to, self.source.page_ptr(first), len) },
        };
        if result.is_err() {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
        result.is_ok()
    }
}

impl fault::FaultHandler for Filler {
    fn on_fault(&self, fault: &fault::Fault) -> bool {
        fault.signal == fault::FaultSignal::Bus && self.fill(fault.address)
    }
}

/// The handler thread, stopped when dropped.
struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(filler: Arc<Filler>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::spawn(move || {
            let patience = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            while !told.load(Ordering::Relaxed) {
                let mut fds = [PollFd::new(&filler.uffd, PollFlags::IN)];
                if poll(&mut fds, Some(&patience)).is_err() {
                    continue;
                }
                while let Ok(Some(event)) = filler.uffd.next_event() {
                    if let UffdEvent::Fault { address, .. } = event {
                        filler.fill(address);
                    }
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A mapping filled by fault-around.
pub(super) struct FaultAround {
    // The order matters: the handler is dropped before the memory that it serves.
    _registration: Option<fault::Registration>,
    _server: Option<Server>,
    filler: Arc<Filler>,
    memory: Reservation,
    file: Option<Memfd>,
}

impl FaultAround {
    pub(super) fn new(pages: usize, fill: Fill, window: usize, answer: Answer) -> Result<Self> {
        let memory = Reservation::new(pages)?;
        let mode = match answer {
            Answer::Signal => UffdMode::Sigbus,
            Answer::Thread => UffdMode::Events,
        };
        let source_pages = match fill {
            Fill::Copy => window,
            Fill::Move => pages,
            Fill::Continue | Fill::Zeropage => 1,
        };
        let source = Reservation::new(source_pages)?;
        source.map_anonymous(PageRange::new(0, source_pages), Protection::ReadWrite)?;
        source.advise(PageRange::new(0, source_pages), Advice::NoHugePage)?;
        source.advise(PageRange::new(0, source_pages), Advice::PopulateWrite)?;
        let filler = Arc::new(Filler {
            uffd: Uffd::open(mode)?,
            fill,
            window,
            base: memory.base().as_ptr() as usize,
            pages,
            source,
            failures: 0.into(),
        });
        let (registration, server) = match answer {
            Answer::Signal => {
                let base = memory.base().as_ptr();
                (Some(fault::register(base, pages * PAGE_SIZE, filler.clone())?), None)
            }
            Answer::Thread => (None, Some(Server::start(filler.clone()))),
        };
        let file = match fill {
            Fill::Continue => Some(resident_file(pages)?),
            Fill::Copy | Fill::Zeropage | Fill::Move => None,
        };
        Ok(Self { _registration: registration, _server: server, filler, memory, file })
    }

    fn map(&self) -> Result<(), SysError> {
        let all = PageRange::new(0, self.filler.pages);
        let interest = match &self.file {
            Some(file) => {
                self.memory.map_shared(all, Protection::ReadWrite, file, 0)?;
                Interest::MINOR
            }
            None => {
                self.memory.map_anonymous(all, Protection::ReadWrite)?;
                self.memory.advise(all, Advice::NoHugePage)?;
                Interest::MISSING
            }
        };
        self.filler.uffd.register(self.memory.base().as_ptr(), all.byte_len(), interest)
    }
}

impl Strategy for FaultAround {
    fn prepare(&mut self) -> Result<()> {
        if self.filler.fill == Fill::Move {
            let source = &self.filler.source;
            source.advise(PageRange::new(0, source.pages()), Advice::PopulateWrite)?;
        }
        Ok(())
    }

    fn cycle(&mut self, case: &Case) -> Result<Sample> {
        let mut clock = Clock::start();
        self.map()?;
        let take = clock.lap();
        // SAFETY: the memory is mapped, and its missing pages are filled by the handler.
        unsafe { case.touch(self.memory.base().as_ptr()) };
        let touch = clock.lap();
        self.memory.map_anonymous(PageRange::new(0, case.pages), Protection::None)?;
        let give = clock.lap();
        if self.filler.failures.load(Ordering::Relaxed) > 0 {
            return Err(anyhow!("a measuring thread failed"));
        }
        Ok(Clock::sample(take, touch, give))
    }
}
