//! The state of a VMM that is served, which its threads and its requests share.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use afresh_budget::{Budget, Charge};
use afresh_sys::socket::Peer;
use afresh_sys::{PageRange, ProcessMemory, Uffd};

use super::VmmError;
use super::handshake::Mapping;
use super::pages::Pages;
use super::request_error::RequestError;
use super::stream_budget::StreamBudget;
use super::watchdog::WatchdogEntry;
use crate::PageSource;

/// Sizes in pages, by how far away the source is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Filled on a fault.
    pub(super) window: usize,
    /// Streamed at a time.
    pub(super) batch: usize,
}

/// The source of a VMM: the caller's for the time of a call, or shared.
pub(super) enum VmSource<'a> {
    Borrowed(&'a dyn PageSource),
    Shared(Arc<dyn PageSource>),
}

impl<'a> Deref for VmSource<'a> {
    type Target = dyn PageSource + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Borrowed(source) => *source,
            Self::Shared(source) => &**source,
        }
    }
}

/// The progress of the service of a VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Serving,
    /// Its memory is whole, and needs the pager no more.
    Detached,
    /// It has exited, or the service has ended or failed, with this error.
    Ended(Option<String>),
}

/// A VMM that is served.
pub(super) struct Service<'a> {
    /// Held from the beginning, so that no other descriptor gets the number.
    pub(super) process: Peer,
    pub(super) uffd: Uffd,
    pub(super) mappings: Vec<Mapping>,
    pub(super) source: VmSource<'a>,
    /// The pages of the source that may be something else than zero, in order.
    pub(super) occupied: Vec<PageRange>,
    pub(super) sizes: Sizes,
    pub(super) stream_budget: StreamBudget,
    pub(super) pages: Mutex<Pages>,
    /// Rung when there is something to do.
    pub(super) bell: Condvar,
    /// Set when the threads are to end.
    pub(super) over: AtomicBool,
    /// Set when the VMM has exited.
    pub(super) gone: AtomicBool,
    /// Set when the VMM is to be released once its memory is whole.
    pub(super) detaching: AtomicBool,
    /// The memory of the userfaultfd, once the process was seen to have it.
    pub(super) verified: Mutex<Option<Arc<ProcessMemory>>>,
    pub(super) failure: Mutex<Option<VmmError>>,
    /// Held while pages can be missing.
    pub(super) kept: Mutex<Option<WatchdogEntry>>,
    phase: Mutex<Phase>,
    /// Rung when the phase changes.
    pub(super) phase_bell: Condvar,
    /// Set once the memory was registered for write protection.
    pub(super) protects: AtomicBool,
    /// Charged for copies of pages of a frozen image, and for lists of pages.
    pub(super) budget: Option<Budget>,
    /// Of the budget, for the states of the pages.
    _charge: Option<Charge>,
}

impl<'a> Service<'a> {
    pub(super) fn new(
        process: Peer,
        (mappings, uffd): (Vec<Mapping>, Uffd),
        source: VmSource<'a>,
        (sizes, stream_budget): (Sizes, StreamBudget),
        streams: bool,
        (budget, charge): (Option<Budget>, Option<Charge>),
    ) -> Self {
        Self {
            pages: Mutex::new(Pages::new(&mappings, !source.working_set().is_empty(), streams)),
            occupied: source.occupied(),
            process,
            mappings,
            uffd,
            source,
            sizes,
            stream_budget,
            bell: Condvar::new(),
            over: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            detaching: AtomicBool::new(false),
            verified: Mutex::new(None),
            failure: Mutex::new(None),
            kept: Mutex::new(None),
            phase: Mutex::new(Phase::Serving),
            phase_bell: Condvar::new(),
            protects: AtomicBool::new(false),
            budget,
            _charge: charge,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Pages> {
        // A panic under the lock ends the service; the states stay correct.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges the budget for the work of a request.
    pub(super) fn charge(&self, bytes: usize) -> Result<Option<Charge>, RequestError> {
        let charge = self.budget.as_ref().map(|budget| budget.charge(bytes));
        charge.transpose().map_err(RequestError::Ranges)
    }

    pub(super) fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, phase: Phase) {
        *self.phase() = phase;
        self.phase_bell.notify_all();
    }

    /// Ends the threads.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.bell.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}
