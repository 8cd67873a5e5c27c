//! The part of a tracker that lets a capture be copied while the guest runs: pages are protected
//! again from any thread, and are copied before they are opened.
//!
//! Promises: once a barrier has a copier, no captured page is opened before it is copied. May break
//! it: a copier that is set or removed while a guest runs.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use afresh_sys::planted::{self, Bug};
use afresh_sys::{PageRange, fork};

use crate::TrackError;
use crate::image::PageCopier;

/// The part of a tracker that a barrier uses.
pub(crate) trait Barrier: Send + Sync {
    /// Protects pages, at any time and in any thread. A write after it is reported.
    fn protect(&self, range: PageRange) -> Result<(), TrackError>;

    /// The copier that the tracker's fault handler calls.
    fn copier(&self) -> &CopierCell;
}

/// A tracker's write barrier, for captures that are copied while the guest runs.
#[derive(Clone)]
pub struct WriteBarrier(Arc<dyn Barrier>);

impl fmt::Debug for WriteBarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteBarrier").finish_non_exhaustive()
    }
}

impl WriteBarrier {
    pub(super) fn new(barrier: Arc<dyn Barrier>) -> Self {
        Self(barrier)
    }

    /// Protects pages, at any time and in any thread. A write after it is reported.
    pub(crate) fn protect(&self, range: PageRange) -> Result<(), TrackError> {
        self.0.protect(range)
    }

    /// Sets or removes the copier, while no guest runs.
    pub(crate) fn set_copier(&self, copier: Option<Arc<PageCopier>>) {
        planted::prepare();
        self.0.copier().set(copier);
    }
}

/// The copier of a capture under way, if there is one.
#[derive(Default)]
pub(crate) struct CopierCell {
    copier: Mutex<Option<Arc<PageCopier>>>,
    /// Whether there is one: all that a fault looks at in a slot without a capture.
    any: AtomicBool,
    /// The process that set it. A forked child may inherit the lock locked.
    generation: AtomicU32,
}

impl CopierCell {
    fn set(&self, copier: Option<Arc<PageCopier>>) {
        let any = copier.is_some();
        *self.copier.lock().unwrap_or_else(PoisonError::into_inner) = copier;
        self.generation.store(fork::generation(), Ordering::Relaxed);
        self.any.store(any, Ordering::Release);
    }

    /// Copies the captured pages of `range`, which a fault handler is about to open.
    pub(super) fn keep(&self, range: PageRange) {
        if !self.any.load(Ordering::Acquire) || planted::is_in_handler(Bug::CopyLive) {
            return;
        }
        if self.generation.load(Ordering::Relaxed) != fork::generation() {
            return;
        }
        // The lock is held for the clone alone, which touches no guest memory, so no handler
        // interrupts its holder. The clone is not the last one: the slot has one while a guest
        // runs, and nothing is freed here.
        let copier = self.copier.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(copier) = copier {
            copier.keep(range);
        }
    }
}
