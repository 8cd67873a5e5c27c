//! The state of a restore that outlives its filling: progress, failure and cause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use afresh_sys::{InheritedCell, PageRange, Protection, Reservation, futex};

use crate::{RestoreError, SourceError};

/// The text of the error when [`Control::failed`] could not store a message.
const STUCK: u32 = 1;
const BROKEN: u32 = 2;
const DROPPED: u32 = 3;
const CUT: u32 = 4;

/// Shared by the restore, its threads and its fault handler.
#[derive(Debug)]
pub(crate) struct Control {
    /// The memory to close after a failure; `None` where its users close it.
    target: Option<(Arc<Reservation>, PageRange)>,
    /// 0 while all is well, then a cause.
    failed: AtomicU32,
    /// errno of a failure in a signal handler, where nothing can be allocated.
    errno: AtomicU32,
    /// Whether access was taken away after a failure.
    closed: AtomicBool,
    /// The first cause. A child of a fork may read it at any time.
    message: InheritedCell<String>,
    /// Set when the threads should stop.
    pub(crate) stop: AtomicBool,
    /// Futex word: 1 once nothing of the source is needed.
    done: AtomicU32,
    /// Faults that were answered.
    pub(crate) faults: AtomicUsize,
    /// Time limit of a filler for one window.
    pub(crate) timeout: Duration,
}

impl Control {
    pub(crate) fn new(target: Option<(Arc<Reservation>, PageRange)>, timeout: Duration) -> Self {
        Self {
            target,
            failed: AtomicU32::new(0),
            errno: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            message: InheritedCell::new(),
            stop: AtomicBool::new(false),
            done: AtomicU32::new(0),
            faults: AtomicUsize::new(0),
            timeout,
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire) != 0
    }

    /// Whether retrying an access after a failure raises SIGSEGV.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes the memory: every later access gets SIGSEGV. Safe in a signal handler.
    fn close(&self, cause: u32) {
        let _ = self.failed.compare_exchange(0, cause, Ordering::AcqRel, Ordering::Acquire);
        // A second thread does it as well, because the first may not have finished. Nobody may see
        // a page that the filler did not finish, so access ends before anything else does. If even
        // that fails, missing pages still raise SIGBUS, and no handler takes it.
        let protect = |(target, range): &(Arc<Reservation>, PageRange)| {
            target.protect(*range, Protection::None).is_ok()
        };
        if !self.is_closed() && self.target.as_ref().is_none_or(protect) {
            self.closed.store(true, Ordering::Release);
        }
        self.stop.store(true, Ordering::Release);
        futex::wake_all(&self.done);
    }

    /// A filler took longer than it may. Safe in a signal handler.
    pub(crate) fn fail_stuck(&self) {
        self.close(STUCK);
    }

    /// A mapped page is no longer in the file. Safe in a signal handler.
    pub(crate) fn fail_cut(&self) {
        self.close(CUT);
    }

    /// Filling failed. In a signal handler only errors without allocation come here.
    pub(crate) fn fail(&self, error: &SourceError) {
        if let SourceError::Sys(sys) = error {
            self.errno.store(sys.errno as u32, Ordering::Release);
        } else {
            self.message.get_or_make(|| error.to_string());
        }
        self.close(BROKEN);
    }

    /// A filling thread ended before its work did.
    pub(crate) fn fail_ended(&self) {
        self.message.get_or_make(|| "the filling thread has ended".to_owned());
        self.close(BROKEN);
    }

    /// The restore was given up by its owner.
    pub(crate) fn abandon(&self) {
        self.close(DROPPED);
    }

    /// Everything is in place and the source is let go.
    pub(crate) fn finish(&self) {
        self.done.store(1, Ordering::Release);
        futex::wake_all(&self.done);
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) != 0
    }

    /// The failure, if there was one.
    pub(crate) fn check(&self) -> Result<(), RestoreError> {
        let text = match self.failed.load(Ordering::Acquire) {
            0 => return Ok(()),
            STUCK => format!("no page within {:?}: the filler is stuck", self.timeout),
            CUT => {
                "a page of the mapped file is missing: the file was truncated, or cannot be read"
                    .to_owned()
            }
            DROPPED => "the restore was dropped before it ended".to_owned(),
            _ => match self.message.get() {
                Some(message) => message.clone(),
                None => {
                    let errno = self.errno.load(Ordering::Acquire) as i32;
                    std::io::Error::from_raw_os_error(errno).to_string()
                }
            },
        };
        Err(RestoreError::Failed(text))
    }

    /// Waits until the restore is done.
    pub(crate) fn wait(&self, timeout: Duration) -> Result<(), RestoreError> {
        // None if the clock cannot show that time.
        let end = Instant::now().checked_add(timeout);
        loop {
            self.check()?;
            if self.is_done() {
                return Ok(());
            }
            let left =
                end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(RestoreError::Timeout(timeout));
            }
            futex::wait(&self.done, 0, left.min(Duration::from_millis(50)));
        }
    }
}

/// Fails the restore if its thread unwinds or returns early.
pub(crate) struct Guard<'a>(pub(crate) Option<&'a Control>);

impl Guard<'_> {
    /// The thread has done what it was to do.
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(control) = self.0 {
            control.fail_ended();
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    /// A thread that met a lost page may retry at once, even if another thread met one first and
    /// has not finished.
    #[test]
    fn memory_is_closed_when_any_of_its_closers_returns() {
        for _ in 0..300 {
            let memory = Arc::new(Reservation::new(512).unwrap());
            let range = PageRange::new(0, 512);
            memory.map_anonymous(range, Protection::ReadWrite).unwrap();
            let control = Control::new(Some((memory, range)), Duration::from_secs(1));
            let start = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        start.wait();
                        control.fail_cut();
                        assert!(control.is_closed());
                    });
                }
            });
        }
    }
}
