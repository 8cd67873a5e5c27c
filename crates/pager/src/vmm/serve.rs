//! Serves a VMM: takes its handshake, reads its events, and closes what is missing when something
//! fails.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use afresh_budget::{Budget, Charge};
use afresh_sys::socket::Peer;
use afresh_sys::{UffdEvent, poll, socket};

use super::connection::WaitingVmm;
use super::handshake::{Mapping, Refusal, receive};
use super::page::Page;
use super::pages;
use super::registration::{MAX_EVENTS, poison, unregister};
use super::service::{Phase, Service, Sizes, VmSource};
use super::watchdog::WatchdogEntry;
use super::{VmmError, VmmOptions};
use crate::PageSource;

/// Pages streamed at a time from a source that is near: small enough that a fault waits little.
const NEAR_BATCH: usize = 64;
/// From one where every request costs a round trip.
const DISTANT_BATCH: usize = 2048;
/// Pages filled on a fault there at least.
const DISTANT_WINDOW: usize = 64;
/// Threads that wait for such a source at the same time.
const DISTANT_THREADS: usize = 6;
/// Maximum time before a stop is noticed.
const TICK: Duration = Duration::from_millis(20);

/// Counts of the work for a VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServeCounts {
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

impl ServeCounts {
    /// Adds the work for another VMM.
    pub(super) fn add(&mut self, other: &Self) {
        self.faults += other.faults;
        self.pages += other.pages;
        self.empty += other.empty;
        self.zeroed += other.zeroed;
        self.removals += other.removals;
    }
}

/// Takes the handshake from `stream` and serves the VMM until it exits or `options.stop` is set.
///
/// # Errors
/// [`VmmError`] by cause. Pages that are missing are closed; a VMM whose handshake is refused,
/// though it brought a userfaultfd and so waits for its pages, is ended by SIGBUS unless `options`
/// say otherwise.
pub fn serve(
    stream: &UnixStream,
    source: &dyn PageSource,
    options: &VmmOptions<'_>,
) -> Result<ServeCounts, VmmError> {
    accept(stream, VmSource::Borrowed(source), options)?.serve(options)
}

/// Takes the handshake from `stream`.
pub(super) fn accept<'a>(
    stream: &UnixStream,
    source: VmSource<'a>,
    options: &VmmOptions<'_>,
) -> Result<Service<'a>, VmmError> {
    // Held from the beginning, so that no other descriptor gets the number.
    let process = Peer::of(stream)?;
    let kept = options.watchdog.as_ref().map(|watchdog| watchdog.greet(stream, &process));
    accept_from(stream, (process, kept), source, options)
}

/// Takes the handshake of a process from `stream`. On failure the process is ended, unless it waits
/// for nothing.
pub(super) fn accept_from<'a>(
    stream: &UnixStream,
    (process, mut kept): (Peer, Option<WatchdogEntry>),
    source: VmSource<'a>,
    options: &VmmOptions<'_>,
) -> Result<Service<'a>, VmmError> {
    let waiting = WaitingVmm::new(process, options);
    let begin_parts = || kept.iter().for_each(WatchdogEntry::begin_parts);
    let mut accepted = match receive(stream, source.pages(), options, begin_parts) {
        Ok(accepted) => accepted,
        Err(Refusal { error, waits }) => {
            if !waits {
                waiting.release();
            }
            return Err(error);
        }
    };
    let charge = charge(&accepted.mappings, options)?;
    let distant = source.is_distant();
    let window = options.window.clamp(1, 512);
    let sizes = Sizes {
        window: match (options.record, distant) {
            (true, _) => 1,
            (false, true) => window.max(DISTANT_WINDOW),
            (false, false) => window,
        },
        batch: if distant { DISTANT_BATCH } else { NEAR_BATCH },
    };
    if let (Some(kept), Some(process)) = (&mut kept, waiting.process()) {
        kept.hold(process, &accepted.uffd, &accepted.mappings).map_err(VmmError::Watchdog)?;
    }
    accepted.take(stream)?;
    let process = waiting.release().ok_or(io::Error::from(io::ErrorKind::NotConnected))?;
    let service = Service::new(
        process,
        (accepted.mappings, accepted.uffd),
        source,
        (sizes, options.stream_budget.clone()),
        options.stream,
        (options.budget.clone(), charge),
    );
    *service.kept.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    if options.record {
        service.lock().record();
    }
    Ok(service)
}

/// Charges the budget of a VMM for the states of its pages.
fn charge(mappings: &[Mapping], options: &VmmOptions<'_>) -> Result<Option<Charge>, VmmError> {
    let bytes = mappings.iter().map(pages::cost).fold(0, usize::saturating_add);
    let charge = |budget: &Budget| budget.charge(bytes);
    Ok(options.budget.as_ref().map(charge).transpose()?)
}

/// Why a service ends without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The VMM has exited, or the service was stopped, or a thread has failed.
    Over,
    /// Its memory is whole, and it is to be released.
    Detach,
}

impl Service<'_> {
    /// Serves the VMM until it exits or `options.stop` is set. Once it is detached, only its exit
    /// is awaited.
    pub(super) fn serve(&self, options: &VmmOptions<'_>) -> Result<ServeCounts, VmmError> {
        let result = self.serve_pages(options);
        match &result {
            Ok(End::Detach) => self.enter(Phase::Detached),
            Ok(End::Over) => self.enter(Phase::Ended(None)),
            Err(error) => self.enter(Phase::Ended(Some(error.to_string()))),
        }
        if result? == End::Detach {
            self.await_exit(options)?;
            self.enter(Phase::Ended(None));
        }
        Ok(self.lock().served)
    }

    fn serve_pages(&self, options: &VmmOptions<'_>) -> Result<End, VmmError> {
        // One thread at least has nothing to do but answer faults.
        let threads = if self.source.is_distant() { DISTANT_THREADS } else { 1 };
        let result = std::thread::scope(|scope| {
            let mut started = Ok(());
            for number in 0..=threads {
                let thread = std::thread::Builder::new().name("afresh-vmm".to_owned());
                let spawned = thread.spawn_scoped(scope, move || self.work(number > 0));
                // The existing threads do the work, if one streams.
                if let (Err(error), true) = (spawned, number <= 1) {
                    started = Err(VmmError::Socket(error));
                }
            }
            let result = started.and_then(|()| self.run(options));
            self.end();
            result
        });
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = match failure {
            _ if self.gone.load(Ordering::Acquire) => Ok(End::Over),
            Some(error) => Err(error),
            None => result,
        };
        // Missing pages are closed before anything else, so none of them can read as zero.
        if result.is_ok() || self.close() {
            self.release();
        } else if options.end_on_failure {
            self.process.end();
        }
        drop(self.kept.lock().unwrap_or_else(PoisonError::into_inner).take());
        result
    }

    /// Reads events until the VMM exits, or the service is ended or has nothing to do any more.
    fn run(&self, options: &VmmOptions<'_>) -> Result<End, VmmError> {
        loop {
            if options.stop.load(Ordering::Acquire) {
                let missing = self.lock().counts().without_content();
                return if missing > 0 { Err(VmmError::Stopped(missing)) } else { Ok(End::Over) };
            }
            if self.is_over() {
                return Ok(End::Over);
            }
            if self.detaching.load(Ordering::Acquire) && self.lock().counts().awaited() == 0 {
                return Ok(End::Detach);
            }
            let fds = [self.uffd.as_fd(), self.process.as_fd()];
            let [ready, ended] = poll::readable(fds, TICK)?;
            if ended {
                return Ok(End::Over);
            }
            if !self.read_events()? && ready {
                // Or the VMM, which shares the flag, has cleared it: the kernel then reports an
                // error at once each time, and this thread would never pause.
                socket::set_nonblocking(self.uffd.as_fd())?;
            }
        }
    }

    /// Waits until a VMM that needs nothing any more has exited, or the service is ended.
    fn await_exit(&self, options: &VmmOptions<'_>) -> Result<(), VmmError> {
        while !options.stop.load(Ordering::Acquire) {
            if poll::readable([self.process.as_fd()], TICK)? == [true] {
                break;
            }
        }
        Ok(())
    }

    /// Reads what events there are, as far as a VMM can send them without end. Returns whether
    /// there were any.
    fn read_events(&self) -> Result<bool, VmmError> {
        let (mut asked, mut any) = (false, false);
        for _ in 0..MAX_EVENTS {
            // Nothing is put in place between reading of a discard and noting it.
            let mut pages = self.lock();
            let event = self.uffd.next_event()?;
            any |= event.is_some();
            match event {
                None => break,
                Some(UffdEvent::Fault { address, .. }) => {
                    let Some((mapping, page)) = pages.page_at(address) else {
                        let why = format!("a fault at {address:#x}, in no mapping");
                        return Err(VmmError::Handshake(why));
                    };
                    pages.note_fault(mapping, page);
                    asked = true;
                }
                Some(UffdEvent::Remove { start, end }) => {
                    pages.lose(start, end, Page::Removed);
                }
                Some(UffdEvent::Unmap { start, end }) => {
                    pages.lose(start, end, Page::Unmapped);
                }
                Some(UffdEvent::Remap { from, to, len }) => {
                    if !pages.relocate(from, to, len) {
                        let why = format!("a part of a mapping was moved from {from:#x}");
                        return Err(VmmError::Handshake(why));
                    }
                }
                Some(_) => {}
            }
        }
        if asked {
            self.bell.notify_all();
        }
        Ok(any)
    }

    /// Gives the VMM's memory back to the kernel. The VMM keeps the userfaultfd, so its discards
    /// would wait for a reader and its faults for an answer.
    fn release(&self) {
        let places: Vec<(usize, usize)> = {
            let pages = self.lock();
            let place = |(number, of): (usize, &Mapping)| (pages.address(number, 0), of.pages);
            self.mappings.iter().enumerate().map(place).collect()
        };
        unregister(&self.uffd, places.into_iter());
    }

    /// Makes sure that no page that is missing now is ever seen; `false` where the VMM does not
    /// allow that.
    fn close(&self) -> bool {
        let known = self.lock();
        let mut closed = true;
        for (number, mapping) in self.mappings.iter().enumerate() {
            let mut at = 0;
            while at < mapping.pages {
                let run = known.run(number, at, mapping.pages);
                at = run.end();
                // A discarded page has no filler any more either.
                if !matches!(known.state(number, run.start), Page::Present | Page::Unmapped) {
                    let base = known.address(number, 0);
                    closed &= poison(&self.uffd, base, (run.start, run.len), mapping.unit);
                }
            }
        }
        closed
    }
}
