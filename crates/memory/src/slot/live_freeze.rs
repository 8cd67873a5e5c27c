//! Freezing a slot in a short stop: at the stop pages are only protected, and they are copied while
//! the guest runs.
//!
//! A capture has three steps. [`Slot::prepare_freeze`] takes the write set, and its
//! [`FreezePreparation`] protects these pages in another thread while the guest runs. At the stop
//! [`Slot::freeze_live`] protects the pages that are open by then: those that the tracker has
//! reported since, and what the preparation had no time for. From there on a write to a captured
//! page has it copied first ([`crate::image::PageCopier`]).
//!
//! Every byte of the image is that of the stop:
//!
//! * A page outside the write set at the stop equals the slot's image, whose page the capture
//!   shares. The tracker has reported every other page, or would at this drain.
//! * A page of the write set is protected at the stop. It was protected by the preparation, and the
//!   tracker reports each that was opened again afterwards; or the stop protects it. That includes
//!   pages of the set that the slot has grown into since the preparation: they are open.
//! * No captured page opens before it is copied. Only fault handlers and methods of the slot open
//!   pages. Handlers call the copier. Every method that opens, changes, hides or discards pages
//!   first has the rest copied ([`Slot::settle_capture`]).
//!
//! A reset is as before: captured pages stay in the write set, and are open again when it copies
//! them back. Its copy list is planned when the capture is settled, not at the stop.
//!
//! Without a barrier, the pages are copied at the stop, as [`Slot::freeze`] does: where the kernel
//! opens pages by itself (the scan), where KVM or another owner tracks the writes, where nothing is
//! tracked, and while the image of the slot has missing pages.
//!
//! May break it: a guest that runs during the freeze.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_sys::planted::{Bug, but_last};
use afresh_sys::{PageRange, Reservation, fork};

use super::{Method, Slot};
use crate::image::PageCopier;
use crate::{Image, ImageError, SlotError, TrackError, WriteBarrier};

/// Pages of a capture without a preparation that are copied at the stop: a file for them would take
/// longer, and each holds two mappings.
const FEW_PAGES: usize = 32;
/// Runs that a preparation protects before it looks whether the stop has come.
const CHUNK_RUNS: usize = 8;

/// A capture of a slot.
pub(super) struct Capture {
    protection: Arc<Protection>,
    /// The pages that it has protected, in order.
    runs: Vec<PageRange>,
    /// Copies them; `None` before the freeze.
    copier: Option<Arc<PageCopier>>,
}

/// The pages to protect, in order, and the number of runs that are protected.
struct Protection {
    barrier: WriteBarrier,
    /// Keeps the addresses from being used again.
    _memory: Arc<Reservation>,
    runs: Vec<PageRange>,
    /// The number of `runs` that are protected.
    done: Mutex<usize>,
    /// Set when the slot needs the lock, or the preparation is over.
    over: AtomicBool,
    /// The process that made it. A forked child may inherit `done` locked.
    generation: u32,
}

impl Protection {
    fn is_of_parent(&self) -> bool {
        self.generation != fork::generation()
    }

    fn progress(&self) -> MutexGuard<'_, usize> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Protects some more; returns whether all are protected.
    fn protect_some(&self, done: &mut usize) -> Result<bool, TrackError> {
        let rest = &self.runs[*done..];
        for run in rest.iter().take(CHUNK_RUNS) {
            self.barrier.protect(*run)?;
            *done += 1;
        }
        Ok(rest.len() <= CHUNK_RUNS)
    }

    /// Ends the preparation: afterwards only the holder of the result protects pages.
    fn take_over(&self) -> MutexGuard<'_, usize> {
        self.over.store(true, Ordering::Release);
        self.progress()
    }
}

/// The part of a capture that can run beside the guest.
#[derive(Debug)]
pub struct FreezePreparation(Option<Arc<Protection>>);

impl std::fmt::Debug for Protection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Protection").field("runs", &self.runs.len()).finish_non_exhaustive()
    }
}

impl FreezePreparation {
    /// Protects the pages that the guest has written so far. It may run in any thread, at any time,
    /// and ends early if the slot is frozen, reset or dropped.
    ///
    /// # Errors
    /// [`TrackError`] when the kernel refuses. The freeze tries again.
    pub fn run(&self) -> Result<(), TrackError> {
        let Some(protection) = &self.0 else { return Ok(()) };
        if protection.is_of_parent() {
            return Ok(());
        }
        loop {
            let mut done = protection.progress();
            // Under the lock: its last holder may have ended the preparation.
            if protection.over.load(Ordering::Acquire) || protection.protect_some(&mut done)? {
                return Ok(());
            }
        }
    }

    /// Whether there is nothing to prepare: the freeze copies all pages at the stop.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}

/// The parts of `runs` that are not in `others`. Both are sorted and disjoint.
fn subtract(runs: &[PageRange], others: &[PageRange]) -> Vec<PageRange> {
    let mut parts = Vec::new();
    for run in runs {
        let mut from = run.start;
        let first = others.partition_point(|other| other.end() <= run.start);
        for other in others[first..].iter().take_while(|other| other.start < run.end()) {
            if other.start > from {
                parts.push(PageRange::new(from, other.start - from));
            }
            from = other.end();
        }
        if from < run.end() {
            parts.push(PageRange::new(from, run.end() - from));
        }
    }
    parts
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.protection.is_of_parent() {
            return;
        }
        // A preparation may outlive the slot.
        drop(self.protection.take_over());
        if let Some(copier) = &self.copier {
            copier.finish();
            self.protection.barrier.set_copier(None);
        }
    }
}

impl Slot {
    /// Begins a capture that [`Slot::freeze_live`] completes. The guest may run in between. If
    /// another thread runs the preparation during that time, the stop of the freeze is shorter. A
    /// reset, or any other change of the slot except growth, abandons the capture.
    ///
    /// # Errors
    /// As [`Slot::freeze`].
    pub fn prepare_freeze(&mut self) -> Result<FreezePreparation, ImageError> {
        self.settle_or_refuse()?;
        let Some(barrier) = self.barrier() else { return Ok(FreezePreparation(None)) };
        self.learn_written()?;
        let capture = self.capture_of(barrier);
        let preparation = FreezePreparation(Some(capture.protection.clone()));
        self.capture = Some(capture);
        Ok(preparation)
    }

    /// The slot's content as an image, as [`Slot::freeze`] returns it, in a shorter stop. Pages are
    /// copied when the image is read, before the guest writes to them, and before the slot changes
    /// otherwise, whichever is first. [`Image::complete`] copies them all, in any thread.
    ///
    /// The image holds the pages of the write set, also those that equal the slot's image. The
    /// stop costs a system call for each run of pages that are open for writing: all of the write
    /// set, or those that were written since [`Slot::prepare_freeze`]. Until such a
    /// page is opened again, a system call that writes to it fails with `EFAULT`, as on any other
    /// page that is protected.
    ///
    /// Without a tracker that can do this, and where only a few pages were written, all is copied
    /// at once, and the image is complete.
    ///
    /// A failed image panics in [`Image::page`], [`Image::read`] and [`Image::digest`], so call
    /// [`Image::complete`] before them.
    ///
    /// # Errors
    /// As [`Slot::freeze`]. A page that cannot be copied later fails the image, not the slot.
    pub fn freeze_live(&mut self) -> Result<Image, ImageError> {
        if self.capture.as_ref().is_some_and(|capture| capture.copier.is_some()) {
            self.settle_or_refuse()?;
        }
        let Some(barrier) = self.barrier() else { return self.freeze() };
        let since = self.learn_written()?;
        if self.capture.is_none() && self.write_set.len() <= FEW_PAGES {
            self.plan()?;
            return self.freeze();
        }
        let (mut capture, reopened) = match self.capture.take() {
            Some(prepared) => (prepared, since),
            None => (self.capture_of(barrier.clone()), Vec::new()),
        };
        capture.runs = self.captured_runs();
        let protected = {
            let mut done = capture.protection.take_over();
            loop {
                match capture.protection.protect_some(&mut done) {
                    Ok(false) => {}
                    Ok(true) => break Ok(()),
                    Err(error) => break Err(error),
                }
            }
        };
        // Pages that a growth has made accessible again are in the set, and open without a report.
        let others = subtract(&subtract(&capture.runs, &capture.protection.runs), &reopened);
        let reopened = but_last(Bug::Prepare, &reopened);
        let mut open = reopened.iter().chain(&others);
        let protected = protected.and_then(|()| open.try_for_each(|run| barrier.protect(*run)));
        if protected.is_err() {
            // The kernel has no mapping left, say.
            self.capture = Some(capture);
            return self.freeze();
        }
        let memory = (self.space.memory.clone(), self.image.clone(), self.shown.clone());
        let capture_result =
            self.image.capture_live(self.space.end, &capture.runs, memory, self.base());
        let image = capture_result.map(|(image, copier)| {
            barrier.set_copier(copier.clone());
            capture.copier = copier;
            image
        });
        self.capture = Some(capture);
        if image.is_err() {
            self.settle_or_refuse()?;
        }
        image
    }

    /// The barrier of the tracker, if the guest can run while captures are copied.
    fn barrier(&self) -> Option<WriteBarrier> {
        match &self.method {
            Method::WriteSet(tracker) if !self.adapt.discarding() && self.image.is_complete() => {
                tracker.barrier()
            }
            _ => None,
        }
    }

    /// A capture of the pages of the write set, all still open.
    fn capture_of(&self, barrier: WriteBarrier) -> Capture {
        let runs = self.captured_runs();
        let protection = Protection {
            barrier,
            _memory: self.space.memory.clone(),
            runs: runs.clone(),
            done: Mutex::new(0),
            over: AtomicBool::new(false),
            generation: fork::generation(),
        };
        Capture { protection: Arc::new(protection), runs, copier: None }
    }

    /// The accessible pages of the write set.
    pub(super) fn captured_runs(&self) -> Vec<PageRange> {
        let accessible = PageRange::new(0, self.space.end);
        self.write_set.runs().iter().filter_map(|run| run.intersect(accessible)).collect()
    }

    /// Takes the pages that the tracker reports into the write set, and returns them. The copy list
    /// is planned when the capture is settled.
    pub(super) fn learn_written(&mut self) -> Result<Vec<PageRange>, ImageError> {
        let broken = |e: String| ImageError::Read(std::io::Error::other(e));
        self.check().map_err(|e| broken(e.to_string()))?;
        let mut written = Vec::new();
        if let Method::WriteSet(tracker) = &mut self.method
            && let Err(error) = tracker.drain(&mut written)
        {
            self.quarantine(error.to_string());
            return Err(broken(error.to_string()));
        }
        self.stats.learned += self.write_set.learn(&written) as u64;
        Ok(written)
    }

    /// Has the rest of a capture copied, if its image is still in use, and opens its pages. Called
    /// by every method that is about to change pages or their protection.
    pub(super) fn settle_capture(&mut self) -> Result<(), SlotError> {
        let Some(mut capture) = self.capture.take() else { return Ok(()) };
        let runs = std::mem::take(&mut capture.runs);
        drop(capture);
        if let Method::WriteSet(tracker) = &mut self.method
            && let Err(error) = tracker.open(&runs)
        {
            self.quarantine(error.to_string());
            return Err(error.into());
        }
        Ok(self.plan()?)
    }

    /// As [`Slot::settle_capture`], for methods that return images.
    pub(super) fn settle_or_refuse(&mut self) -> Result<(), ImageError> {
        let broken = |e: SlotError| ImageError::Read(std::io::Error::other(e.to_string()));
        self.check().map_err(broken)?;
        self.settle_capture().map_err(broken)
    }
}
