//! Answers the faults of a VMM's guest.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use afresh_sys::{PAGE_SIZE, PageRange, SysError, Uffd, UffdEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::handshake::{Mapping, receive};
use super::{VmmError, VmmOptions};
use crate::PageSource;

/// Pages streamed at a time: small enough that a fault waits little.
const STREAM: usize = 64;

/// How long a fill may be put off.
const MAX_POSTPONED: Duration = Duration::from_secs(2);

const EEXIST: i32 = 17;
const EAGAIN: i32 = 11;
const ENOENT: i32 = 2;
const ESRCH: i32 = 3;

/// What was done for a VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Faults answered.
    pub faults: usize,
    /// Pages filled from the source.
    pub pages: usize,
    /// Pages filled with zeros because the VMM had discarded them.
    pub zeroed: usize,
    /// Discards seen.
    pub removals: usize,
}

/// What is known of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Page {
    Missing,
    Present,
    Removed,
}

/// How a fill went.
enum Fill {
    Done,
    /// Events must be read first.
    Later,
    /// The VMM has exited.
    Gone,
}

struct Service<'a> {
    uffd: Uffd,
    mappings: Vec<Mapping>,
    pages: Vec<Vec<Page>>,
    source: &'a dyn PageSource,
    buffer: Vec<u8>,
    window: usize,
    /// Where streaming goes on: a mapping and a page of it.
    next: (usize, usize),
    served: Served,
}

/// Takes the handshake from `stream` and serves the VMM until it exits or `options.stop` is set.
///
/// # Errors
/// [`VmmError`] by cause. Except for a refused handshake, pages that are missing are closed.
pub fn serve(
    stream: &UnixStream,
    source: &dyn PageSource,
    options: &VmmOptions<'_>,
) -> Result<Served, VmmError> {
    let (mappings, uffd) = receive(stream, source.pages(), options)?;
    let peer = socket_peercred(stream).map_err(io::Error::from)?.pid;
    let mut service = Service {
        pages: mappings.iter().map(|mapping| vec![Page::Missing; mapping.pages]).collect(),
        mappings,
        uffd,
        source,
        buffer: Vec::new(),
        window: options.window.clamp(1, 512),
        next: (0, 0),
        served: Served::default(),
    };
    let result = service.run(peer, options);
    if result.is_err() {
        service.fail_closed(peer, options.end_on_failure);
    }
    result.map(|()| service.served)
}

impl Service<'_> {
    fn run(&mut self, peer: Pid, options: &VmmOptions<'_>) -> Result<(), VmmError> {
        let process = pidfd_open(peer, PidfdFlags::empty()).map_err(io::Error::from)?;
        let mut waiting: VecDeque<usize> = VecDeque::new();
        let mut postponed: Option<Instant> = None;
        loop {
            if options.stop.load(Ordering::Acquire) {
                let missing = self.pages.iter().flatten().filter(|p| **p != Page::Present).count();
                return if missing > 0 { Err(VmmError::Stopped(missing)) } else { Ok(()) };
            }
            let streaming = options.stream && self.next.0 < self.mappings.len();
            let busy = streaming || !waiting.is_empty();
            let tick = Timespec { tv_sec: 0, tv_nsec: if busy { 0 } else { 20_000_000 } };
            let mut fds =
                [PollFd::new(&self.uffd, PollFlags::IN), PollFd::new(&process, PollFlags::IN)];
            match poll(&mut fds, Some(&tick)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            if fds[1].revents().contains(PollFlags::IN) {
                return Ok(());
            }
            // All events before any fill: a fill fails while the VMM waits in a discard.
            while let Some(event) = self.uffd.next_event()? {
                match event {
                    UffdEvent::Fault { address, .. } => waiting.push_back(address),
                    UffdEvent::Remove { start, end } => self.remove(start, end),
                    _ => {}
                }
            }
            let outcome = match waiting.front().copied() {
                Some(address) => {
                    let outcome = self.answer(address)?;
                    if matches!(outcome, Fill::Done) {
                        waiting.pop_front();
                    }
                    outcome
                }
                None if streaming => self.stream()?,
                None => Fill::Done,
            };
            match outcome {
                Fill::Gone => return Ok(()),
                // A discard takes a moment; a range that was never registered takes for ever.
                Fill::Later => {
                    if postponed.get_or_insert_with(Instant::now).elapsed() > MAX_POSTPONED {
                        return Err(VmmError::Handshake("a mapping is not registered".to_owned()));
                    }
                    std::thread::sleep(Duration::from_micros(50));
                }
                Fill::Done => postponed = None,
            }
        }
    }

    fn remove(&mut self, start: usize, end: usize) {
        self.served.removals += 1;
        for (mapping, pages) in self.mappings.iter().zip(&mut self.pages) {
            let from = start.max(mapping.base);
            let to = end.min(mapping.end());
            if from < to {
                let range = (from - mapping.base) / PAGE_SIZE..(to - mapping.base) / PAGE_SIZE;
                pages[range].fill(Page::Removed);
            }
        }
    }

    /// Fills the window around a fault.
    fn answer(&mut self, address: usize) -> Result<Fill, VmmError> {
        let number = self.mappings.iter().position(|m| m.base <= address && address < m.end());
        let Some(number) = number else {
            return Err(VmmError::Handshake(format!("a fault at {address:#x}, in no mapping")));
        };
        let mapping = self.mappings[number];
        let page = (address - mapping.base) / PAGE_SIZE;
        let unit = page / mapping.unit * mapping.unit;
        let outcome = if self.pages[number][page] == Page::Removed {
            self.zero(number, PageRange::new(unit, mapping.unit))?
        } else {
            let window = self.window.max(mapping.unit);
            let start = page / window * window;
            let pages = PageRange::new(start, window.min(mapping.pages - start));
            let outcome = self.fill(number, pages)?;
            if matches!(outcome, Fill::Done) && self.pages[number][page] == Page::Present {
                // Somebody else filled it, or it was there before the fault was read.
                let at = (mapping.base + unit * PAGE_SIZE) as *const u8;
                self.uffd.wake(at, mapping.unit * PAGE_SIZE)?;
            }
            outcome
        };
        self.served.faults += usize::from(matches!(outcome, Fill::Done));
        Ok(outcome)
    }

    /// Streams the next piece.
    fn stream(&mut self) -> Result<Fill, VmmError> {
        let (number, start) = self.next;
        let mapping = self.mappings[number];
        let len = STREAM.max(mapping.unit).min(mapping.pages - start);
        let outcome = self.fill(number, PageRange::new(start, len))?;
        if matches!(outcome, Fill::Done) {
            self.next =
                if start + len < mapping.pages { (number, start + len) } else { (number + 1, 0) };
        }
        Ok(outcome)
    }

    /// Fills the missing pages among `pages` of mapping `number`.
    fn fill(&mut self, number: usize, pages: PageRange) -> Result<Fill, VmmError> {
        let mapping = self.mappings[number];
        let mut at = pages.start;
        while at < pages.end() {
            if self.pages[number][at] != Page::Missing {
                at += 1;
                continue;
            }
            let run = self.pages[number][at..pages.end()]
                .iter()
                .take_while(|page| **page == Page::Missing)
                .count();
            self.buffer.resize(run * PAGE_SIZE, 0);
            // SAFETY: the buffer has room for `run` pages and is ours alone.
            unsafe { self.source.read(mapping.offset + at, self.buffer.as_mut_ptr(), run) }?;
            let mut done = 0;
            while done < run {
                let to = (mapping.base + (at + done) * PAGE_SIZE) as *mut u8;
                let len = (run - done) * PAGE_SIZE;
                // SAFETY: the buffer holds `run` pages. `to` is an address in the VMM, which registered
                // it with this descriptor for us to fill; the kernel refuses any other.
                let result =
                    unsafe { self.uffd.copy(to, self.buffer.as_ptr().add(done * PAGE_SIZE), len) };
                let (placed, outcome) = self.judge(result, mapping.unit)?;
                self.pages[number][at + done..at + done + placed].fill(Page::Present);
                self.served.pages += placed;
                done += placed;
                match outcome {
                    Fill::Done => {}
                    other => return Ok(other),
                }
            }
            at += run;
        }
        Ok(Fill::Done)
    }

    /// Fills discarded pages with zeros.
    fn zero(&mut self, number: usize, pages: PageRange) -> Result<Fill, VmmError> {
        let to = (self.mappings[number].base + pages.byte_start()) as *mut u8;
        let result = if pages.len == 1 {
            self.uffd.zero(to, PAGE_SIZE)
        } else {
            // Huge pages can not be zeroed by the kernel's call.
            self.buffer.clear();
            self.buffer.resize(pages.byte_len(), 0);
            // SAFETY: as in `fill`.
            unsafe { self.uffd.copy(to, self.buffer.as_ptr(), pages.byte_len()) }
        };
        let (placed, outcome) = self.judge(result, pages.len)?;
        self.pages[number][pages.start..pages.start + placed].fill(Page::Present);
        self.served.zeroed += placed;
        Ok(outcome)
    }

    /// Pages placed, and how to go on.
    fn judge(
        &self,
        result: Result<usize, SysError>,
        unit: usize,
    ) -> Result<(usize, Fill), VmmError> {
        match result {
            Ok(bytes) => Ok((bytes / PAGE_SIZE, Fill::Done)),
            // There already: counts as placed, so that the walk goes on behind it.
            Err(error) if error.errno == EEXIST => Ok((unit, Fill::Done)),
            Err(error) if error.errno == EAGAIN => Ok((0, Fill::Later)),
            // The range is being unmapped; its events follow.
            Err(error) if error.errno == ENOENT => Ok((0, Fill::Later)),
            Err(error) if error.errno == ESRCH => Ok((0, Fill::Gone)),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes sure that no page that is missing now is ever seen.
    fn fail_closed(&self, peer: Pid, end: bool) {
        let mut closed = true;
        for (mapping, pages) in self.mappings.iter().zip(&self.pages) {
            for (page, state) in pages.iter().enumerate().step_by(mapping.unit) {
                // A discarded page has no filler any more either.
                if *state != Page::Present {
                    let at = (mapping.base + page * PAGE_SIZE) as *const u8;
                    let poisoned = self.uffd.poison(at, mapping.unit * PAGE_SIZE);
                    closed &= poisoned.is_ok_and(|n| n > 0)
                        || matches!(poisoned, Err(e) if e.errno == EEXIST);
                }
            }
        }
        if !closed && end {
            // Gone already if this fails, which is as good.
            let _ = kill_process(peer, Signal::BUS);
        }
    }
}
