//! Map first, detach later: the guest runs on a private mapping of the file at once, and a thread
//! replaces the mapping by owned memory, a huge page at a time, while it runs.
//!
//! A piece is detached so: its pages are made read-only; their present content, the guest's own
//! writes included, is copied to staged memory; the staged memory takes the mapping's place in one
//! system call. A write during the copy raises SIGSEGV, and the handler waits for the piece, which
//! takes a fraction of a millisecond; reads never wait. userfaultfd's write protection cannot serve
//! here, since the kernel offers it for anonymous and shared memory only.
//!
//! When the file is truncated or changed during the copy, the memory is closed. The kernel then
//! meets a missing page, never one of our copies. Copied pages count only if the file is unchanged.
//!
//! May break it: a system call that writes to the piece being detached gets `EFAULT`; see
//! `Restore::resolve`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use afresh_sys::errno::{EFAULT, ENOSYS, EPERM};
use afresh_sys::fault::{Fault, FaultHandler, FaultSignal};
use afresh_sys::{
    Advice, HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, PageRange, Protection, Reservation, SysError, file,
    fork, futex, usage,
};

use crate::control::Control;
use crate::wait_budget::WaitBudget;
use crate::{PageSource, SourceError};

const MAPPED: u32 = 0;
const MOVING: u32 = 1;
const OWNED: u32 = 2;

/// Faults of other threads, during a piece or a pause, from which on they count as busy.
const BUSY: u64 = 32;
/// How long to give way at a time.
const PAUSE: Duration = Duration::from_millis(1);
/// How long to give way in all, for each piece there is.
const PAUSE_PER_PIECE: Duration = Duration::from_millis(2);

/// How often a writer looks whether the piece that it waits for has changed hands.
const AWAITING: Duration = Duration::from_millis(50);

/// Pages faulted in by one call.
const POPULATE: usize = 2048;

/// A mapping on its way to owned memory.
pub(crate) struct Detach {
    pub(crate) control: Arc<Control>,
    /// Asked whether it is still what was mapped.
    source: Arc<dyn PageSource>,
    target: Arc<Reservation>,
    range: PageRange,
    /// As large as the target and laid out alike, so that the kernel can merge the pieces again.
    staging: Reservation,
    /// A futex word a piece.
    states: Box<[AtomicU32]>,
    /// Held while a piece changes hands, so that nothing is remapped after the owner has continued.
    turn: Mutex<()>,
    /// Of the process whose thread moves the pieces.
    generation: u32,
    /// Differs from that of any other restore in this process, which may use the same addresses
    /// later.
    number: u64,
}

/// The numbers given out so far.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

impl Detach {
    /// Prepares to detach `range`, whose pages `zero` are anonymous already.
    pub(crate) fn new(
        control: Arc<Control>,
        source: Arc<dyn PageSource>,
        target: Arc<Reservation>,
        range: PageRange,
        zero: &[PageRange],
    ) -> Result<Self, SysError> {
        let staging = Reservation::aligned(range.len, HUGE_SIZE)?;
        let all = PageRange::new(0, range.len);
        staging.map_anonymous(all, Protection::ReadWrite)?;
        staging.advise(all, Advice::HugePage)?;
        let states: Box<[AtomicU32]> =
            (0..range.len.div_ceil(HUGE_PAGES)).map(|_| AtomicU32::new(MAPPED)).collect();
        let (turn, generation) = (Mutex::new(()), fork::generation());
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
        let this =
            Self { control, source, target, range, staging, states, turn, generation, number };
        for (piece, state) in this.states.iter().enumerate() {
            let pages = this.pages_of(piece);
            if zero.iter().any(|z| z.start <= pages.start && pages.end() <= z.end()) {
                state.store(OWNED, Ordering::Relaxed);
            }
        }
        Ok(this)
    }

    fn pages_of(&self, piece: usize) -> PageRange {
        let start = piece * HUGE_PAGES;
        PageRange::new(start, HUGE_PAGES.min(self.range.len - start))
    }

    fn in_target(&self, pages: PageRange) -> PageRange {
        PageRange::new(self.range.start + pages.start, pages.len)
    }

    /// Faults pages in ahead of the guest, then detaches every piece. Returns early after a request
    /// to stop.
    pub(crate) fn run(&self) -> Result<(), SourceError> {
        for start in (0..self.range.len).step_by(POPULATE) {
            if self.control.stop.load(Ordering::Acquire) {
                return Ok(());
            }
            let pages = PageRange::new(start, POPULATE.min(self.range.len - start));
            if let Err(error) = self.target.advise(self.in_target(pages), Advice::PopulateRead) {
                if error.errno == EFAULT {
                    self.control.fail_cut();
                }
                return Err(error.into());
            }
        }
        let mut budget = PAUSE_PER_PIECE * self.states.len() as u32;
        for piece in 0..self.states.len() {
            let before = usage::faults();
            self.detach(piece)?;
            self.give_way(before, &mut budget);
        }
        Ok(())
    }

    /// Pauses while other threads take faults: a change of mappings stops them all for a moment,
    /// and costs more than it gains while they are busy. Ends when they are done or `budget` is
    /// used up.
    fn give_way(&self, mut before: usage::Faults, budget: &mut Duration) {
        while !budget.is_zero() && !self.control.stop.load(Ordering::Acquire) {
            let now = usage::faults();
            let own = now.thread - before.thread;
            if (now.process - before.process).saturating_sub(own) < BUSY {
                return;
            }
            before = now;
            let pause = PAUSE.min(*budget);
            std::thread::sleep(pause);
            *budget -= pause;
        }
    }

    /// Copies pages of the target to the staged memory. The target is not written during the copy.
    fn copy(&self, at: PageRange, pages: PageRange) -> Result<(), SourceError> {
        let from = self.target.page_ptr(at.start).cast_const();
        let to = self.staging.page_ptr(pages.start);
        // SAFETY: both ranges are mapped readable and have the length of `pages`; they are distinct
        // reservations. No thread can write the source: the protection is in force in every thread
        // when the call that set it returns.
        match unsafe { file::copy_mapped(from, to, pages.byte_len()) } {
            Err(error) if error.errno == EFAULT => {
                self.control.fail_cut();
                return Err(error.into());
            }
            // A sandbox that filters the call.
            Err(error) if error.errno == ENOSYS || error.errno == EPERM => {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(from, to, pages.byte_len()) };
            }
            other => other?,
        }
        self.source.check_unchanged()
    }

    /// Detaches a piece unless it is owned already.
    pub(crate) fn detach(&self, piece: usize) -> Result<(), SourceError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &self.states[piece];
        if state.load(Ordering::Acquire) == OWNED || self.control.stop.load(Ordering::Acquire) {
            return Ok(());
        }
        let pages = self.pages_of(piece);
        let at = self.in_target(pages);
        // The staged pages come first, so that writers wait for the copy alone.
        self.staging.advise(pages, Advice::PopulateWrite)?;
        state.store(MOVING, Ordering::SeqCst);
        let protected = self.target.protect(at, Protection::Read).map_err(SourceError::from);
        let copied = protected.and_then(|()| self.copy(at, pages)).map_err(|error| (error, false));
        let moved = copied.and_then(|()| {
            let taken = self.target.take_mapping(at, &self.staging, pages);
            taken.map_err(|failed| (SourceError::from(failed.error), failed.lost))
        });
        match &moved {
            Ok(()) => {}
            // Still a correct private mapping; give writers their access back.
            Err((SourceError::Sys(error), false)) if error.errno != EFAULT => {
                self.target.protect(at, Protection::ReadWrite)?;
            }
            Err((error, _)) => self.control.fail(error),
        }
        if self.control.has_failed() {
            // Closed during the copy, perhaps before the piece was opened again.
            self.target.protect(at, Protection::None)?;
        }
        state.store(if moved.is_ok() { OWNED } else { MAPPED }, Ordering::SeqCst);
        futex::wake_all(state);
        moved.map_err(|(error, _)| error)
    }

    /// Detaches every piece that `pages` touches.
    pub(crate) fn resolve(&self, pages: PageRange) -> Result<(), SourceError> {
        (pages.start / HUGE_PAGES..pages.end().div_ceil(HUGE_PAGES))
            .try_for_each(|piece| self.detach(piece))
    }

    /// Stops, and waits until no piece is changing hands.
    pub(crate) fn stop(&self) {
        self.control.stop.store(true, Ordering::Release);
        drop(self.turn.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

thread_local! {
    /// This thread's last fault in a piece that was not moving: the restore and the address.
    /// Const-initialised without a destructor, so that reading it in a handler allocates nothing.
    static LAST: std::cell::Cell<(u64, usize)> = const { std::cell::Cell::new((0, 0)) };
}

impl FaultHandler for Detach {
    fn on_fault(&self, fault: &Fault) -> bool {
        let address = fault.address;
        if fault.signal == FaultSignal::Bus {
            // The mapped page is no longer in the file. Once the memory is closed the retry raises
            // SIGSEGV.
            self.control.fail_cut();
            return self.control.is_closed();
        }
        if self.control.has_failed() {
            return false;
        }
        let base = self.target.page_ptr(self.range.start) as usize;
        let state = &self.states[(address - base) / PAGE_SIZE / HUGE_PAGES];
        if state.load(Ordering::SeqCst) != MOVING {
            // It was read-only when the write faulted and is not any more, so the retry succeeds. A
            // fault for another reason comes back with the same address, and is not ours.
            let this = (self.number, address);
            return LAST.replace(this) != this;
        }
        if self.generation != fork::generation() {
            // The thread that moves the piece is in the parent. The child keeps the mapping, which
            // shows the same.
            let piece = self.pages_of((address - base) / PAGE_SIZE / HUGE_PAGES);
            state.store(MAPPED, Ordering::SeqCst);
            return self.target.protect(self.in_target(piece), Protection::ReadWrite).is_ok();
        }
        let mut budget = WaitBudget::new(self.control.timeout);
        while state.load(Ordering::SeqCst) == MOVING && !self.control.has_failed() {
            let waited = budget.step(AWAITING, |step| futex::wait(state, MOVING, step));
            if waited.is_none() {
                self.control.fail_stuck();
            }
        }
        true
    }
}
