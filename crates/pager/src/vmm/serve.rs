//! Serves a VMM: takes its handshake, reads its events, and closes what is missing when something fails.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use afresh_sys::errno::{EAGAIN, EEXIST};
use afresh_sys::socket::Peer;
use afresh_sys::{PAGE_SIZE, PageRange, UffdEvent, poll};

use super::fill::{Service, Sizes};
use super::handshake::{Refusal, receive};
use super::pages::{Page, Pages};
use super::{VmmError, VmmOptions};
use crate::PageSource;

/// Pages streamed at a time from a source that is near: small enough that a fault waits little.
const NEAR: usize = 64;
/// From one where every request costs a round trip.
const DISTANT: usize = 2048;
/// Pages filled on a fault there at least.
const DISTANT_WINDOW: usize = 64;
/// Threads that wait for such a source at the same time.
const DISTANT_THREADS: usize = 6;
/// How long a stop may go unnoticed.
const TICK: Duration = Duration::from_millis(20);
/// How often a service that ends looks for discards that wait for it.
const RELEASE_ATTEMPTS: usize = 1000;
/// Events read before the service looks around again.
const EVENTS: usize = 1024;

/// Counts of the work for a VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Served {
    /// Faults answered.
    pub faults: usize,
    /// Pages filled from the source.
    pub pages: usize,
    /// Those of them that are zero there, and take no memory.
    pub empty: usize,
    /// Pages filled with zeros because the VMM had discarded them.
    pub zeroed: usize,
    /// Discards seen.
    pub removals: usize,
}

/// Takes the handshake from `stream` and serves the VMM until it exits or `options.stop` is set.
///
/// # Errors
/// [`VmmError`] by cause. Pages that are missing are closed; a VMM whose handshake is refused, though it
/// brought a userfaultfd and so waits for its pages, is ended by SIGBUS unless `options` say otherwise.
pub fn serve(
    stream: &UnixStream,
    source: &dyn PageSource,
    options: &VmmOptions<'_>,
) -> Result<Served, VmmError> {
    // Held from the beginning, so that no other descriptor gets the number.
    let process = Peer::of(stream)?;
    let (mappings, uffd) = match receive(stream, source.pages(), options) {
        Ok(accepted) => accepted,
        Err(Refusal { error, waits }) => {
            if waits && options.end_on_failure {
                process.end();
            }
            return Err(error);
        }
    };
    let distant = source.is_distant();
    let window = options.window.clamp(1, 512);
    let service = Service {
        pages: Mutex::new(Pages::new(&mappings, !source.working_set().is_empty())),
        occupied: source.occupied(),
        mappings,
        uffd,
        source,
        sizes: Sizes {
            window: if distant { window.max(DISTANT_WINDOW) } else { window },
            batch: if distant { DISTANT } else { NEAR },
        },
        bell: Condvar::new(),
        over: AtomicBool::new(false),
        gone: AtomicBool::new(false),
        failure: Mutex::new(None),
    };
    // One thread at least has nothing to do but answer faults.
    let threads = if distant { DISTANT_THREADS } else { 1 };
    let result = std::thread::scope(|scope| {
        let mut started = Ok(());
        for number in 0..=threads {
            let streams = number > 0 && options.stream;
            let thread = std::thread::Builder::new().name("afresh-vmm".to_owned());
            let service = &service;
            let spawned = thread.spawn_scoped(scope, move || service.work(streams));
            // The existing threads do the work, if one streams.
            if let (Err(error), true) = (spawned, number <= 1) {
                started = Err(VmmError::Socket(error));
            }
        }
        let result = started.and_then(|()| service.run(&process, options));
        service.end();
        result
    });
    let failure = service.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
    let served = service.lock().served;
    let result = match failure {
        _ if service.gone.load(Ordering::Acquire) => Ok(()),
        Some(error) => Err(error),
        None => result,
    };
    // Missing pages are closed before anything else, so none of them can read as zero.
    if result.is_ok() || service.close() {
        service.release();
    } else if options.end_on_failure {
        process.end();
    }
    result.map(|()| served)
}

impl Service<'_> {
    /// Reads events until the VMM exits or the service is ended.
    fn run(&self, process: &Peer, options: &VmmOptions<'_>) -> Result<(), VmmError> {
        loop {
            if options.stop.load(Ordering::Acquire) {
                let missing = self.lock().not_present();
                return if missing > 0 { Err(VmmError::Stopped(missing)) } else { Ok(()) };
            }
            if self.over.load(Ordering::Acquire) {
                return Ok(());
            }
            let [_, ended] = poll::readable([self.uffd.as_fd(), process.as_fd()], TICK)?;
            if ended {
                return Ok(());
            }
            self.read_events()?;
        }
    }

    /// Reads what events there are, as far as a VMM can send them without end.
    fn read_events(&self) -> Result<(), VmmError> {
        let mut asked = false;
        for _ in 0..EVENTS {
            // Nothing is put in place between reading of a discard and noting it.
            let mut pages = self.lock();
            match self.uffd.next_event()? {
                None => break,
                Some(UffdEvent::Fault { address, .. }) => {
                    let mapping =
                        self.mappings.iter().position(|m| m.base <= address && address < m.end());
                    let Some(mapping) = mapping else {
                        let why = format!("a fault at {address:#x}, in no mapping");
                        return Err(VmmError::Handshake(why));
                    };
                    let page = (address - self.mappings[mapping].base) / PAGE_SIZE;
                    pages.ask(mapping, page);
                    asked = true;
                }
                Some(UffdEvent::Remove { start, end }) => {
                    pages.lose(&self.mappings, start, end, Page::Removed);
                }
                // Nothing is to be done there any more.
                Some(UffdEvent::Unmap { start, end }) => {
                    pages.lose(&self.mappings, start, end, Page::Present);
                }
                Some(_) => {}
            }
        }
        if asked {
            self.bell.notify_all();
        }
        Ok(())
    }

    /// Gives the VMM's memory back to the kernel. The VMM keeps the userfaultfd, so its discards would wait for
    /// a reader and its faults for an answer.
    fn release(&self) {
        for mapping in &self.mappings {
            // Fails where the VMM has ended or unmapped it, which is as good.
            let _ = self.uffd.unregister(mapping.base as *const u8, mapping.pages * PAGE_SIZE);
        }
        // A discard that began earlier still waits for a reader; until then the kernel refuses to fill.
        for _ in 0..RELEASE_ATTEMPTS {
            for _ in 0..EVENTS {
                if !matches!(self.uffd.next_event(), Ok(Some(_))) {
                    break;
                }
            }
            let probe = self.mappings.first().map(|mapping| mapping.base as *mut u8);
            match probe.map(|at| self.uffd.zero(at, PAGE_SIZE)) {
                Some(Err(error)) if error.errno == EAGAIN => std::thread::sleep(TICK / 20),
                _ => break,
            }
        }
    }

    /// Makes sure that no page that is missing now is ever seen; `false` where the VMM does not allow that.
    fn close(&self) -> bool {
        let known = self.lock();
        let mut closed = true;
        for (number, mapping) in self.mappings.iter().enumerate() {
            let mut at = 0;
            while at < mapping.pages {
                let run = known.run(number, at, mapping.pages);
                at = run.end();
                // A discarded page has no filler any more either.
                if known.state(number, run.start) != Page::Present {
                    closed &= self.poison(mapping.base, run, mapping.unit);
                }
            }
        }
        closed
    }

    /// Poisons those of `pages` that are not there.
    fn poison(&self, base: usize, pages: PageRange, unit: usize) -> bool {
        let mut at = pages.start;
        while at < pages.end() {
            let from = (base + at * PAGE_SIZE) as *const u8;
            match self.uffd.poison(from, (pages.end() - at) * PAGE_SIZE) {
                Ok(bytes) if bytes > 0 => at += bytes / PAGE_SIZE,
                Err(error) if error.errno == EEXIST => at += unit,
                _ => return false,
            }
        }
        true
    }
}
