//! The thread that a restore with background work has: it runs the fillers, watches them, and lets
//! go of the source when all is in place.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use afresh_sys::{SysError, Uffd, UffdEvent, UffdMode, futex, poll};

use crate::collapse::{self, CollapsingImage};
use crate::control::Guard;
use crate::lazy::LazyMemory;
use crate::restore::{Engine, Work};
use crate::wait_budget::WaitBudget;
use crate::{PageSource, RestoreError, SourceError};

/// Interval of checks by waiting threads.
const TICK: Duration = Duration::from_millis(20);

/// Ends an engine: no handler runs afterwards, and missing pages are no longer reported. Only
/// called when every page is in place or the memory is closed.
pub(crate) fn end(slot: &Mutex<Option<Engine>>) {
    let engine = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(engine) = engine {
        if let Work::Lazy(lazy) = &engine.work {
            lazy.release();
        }
        drop(engine.registration);
        drop(engine.withheld);
    }
}

/// Starts the thread for `work`, with so many that stream after a delay. `keep` is dropped when the
/// work ends. If all went well, huge pages of `collapsing` become folios then.
pub(crate) fn spawn(
    slot: Arc<Mutex<Option<Engine>>>,
    work: Work,
    keep: Option<Arc<dyn PageSource>>,
    (streams, delay): (usize, Duration),
    collapsing: Option<Weak<CollapsingImage>>,
) -> Result<(), RestoreError> {
    let control = match &work {
        Work::Lazy(lazy) => lazy.control.clone(),
        Work::Detach(detach) => detach.control.clone(),
    };
    let body = move || {
        let guard = Guard(Some(&*control));
        let whole = match &work {
            Work::Lazy(lazy) => {
                run(lazy, streams, delay);
                lazy.remaining.load(Ordering::Acquire) == 0
            }
            Work::Detach(detach) => match detach.run() {
                Ok(()) => !control.stop.load(Ordering::Acquire),
                Err(error) => {
                    control.fail(&error);
                    false
                }
            },
        };
        guard.disarm();
        if whole || control.has_failed() {
            end(&slot);
        }
        // The last references to the source.
        drop(work);
        drop(keep);
        if whole && !control.has_failed() {
            control.finish();
            if let Some(image) = collapsing {
                // This thread may do that for other images, too.
                drop((slot, control));
                collapse::run(image);
            }
        }
    };
    std::thread::Builder::new()
        .name("afresh-pager".to_owned())
        .spawn(body)
        .map(drop)
        .map_err(|e| RestoreError::Source(SourceError::Io(e)))
}

/// Runs the fillers until every window is present or the restore has failed.
fn run(lazy: &LazyMemory, streams: usize, delay: Duration) {
    let control = &*lazy.control;
    let over =
        || control.stop.load(Ordering::Acquire) || lazy.remaining.load(Ordering::Acquire) == 0;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let events = lazy.uffd.as_ref().filter(|uffd| uffd.mode() == UffdMode::Events);
        if let Some(uffd) = events {
            let over = &over;
            scope.spawn(move || {
                let guard = Guard(Some(control));
                if let Err(error) = handle_events(lazy, uffd, over) {
                    control.fail(&error.into());
                }
                guard.disarm();
            });
        } else if !lazy.inline {
            scope.spawn(|| {
                let guard = Guard(Some(control));
                while !over() {
                    let bell = lazy.bell.load(Ordering::Acquire);
                    if !lazy.serve() {
                        futex::wait(&lazy.bell, bell, TICK);
                    }
                }
                guard.disarm();
            });
        }
        // A thread that needs a page of the working set waits for this thread, and the scope waits
        // for the threads above. A panic here has to fail the image, which ends these waits.
        let guard = Guard(Some(control));
        lazy.fill_working_set();
        guard.disarm();
        let stream = || {
            let guard = Guard(Some(control));
            lazy.stream();
            guard.disarm();
        };
        let mut streaming = false;
        let (mut answering, mut budget) = (0, WaitBudget::new(control.timeout));
        // Windows that faulting threads still fill, or a filler that hangs.
        while !over() {
            let due = streams > 0 && started.elapsed() >= delay;
            if !streaming && (due || lazy.rush.load(Ordering::Acquire)) {
                streaming = true;
                lazy.next_hugepage.store(0, Ordering::Release);
                (0..streams.max(1)).for_each(|_| drop(scope.spawn(stream)));
            }
            let waited = budget.step(TICK / 10, std::thread::sleep);
            let busy = lazy.busy.load(Ordering::Acquire);
            if busy == 0 || busy != answering {
                (answering, budget) = (busy, WaitBudget::new(control.timeout));
            } else if waited.is_none() {
                control.fail_stuck();
            }
        }
        if control.has_failed() {
            // Threads that sleep in the kernel wake and find closed memory; the fillers may never
            // end.
            lazy.release();
        }
    });
}

/// Answers events until the work is over.
fn handle_events(lazy: &LazyMemory, uffd: &Uffd, over: &dyn Fn() -> bool) -> Result<(), SysError> {
    let mut number = 0;
    while !over() {
        poll::readable([uffd.as_fd()], TICK)?;
        while let Some(event) = uffd.next_event()? {
            if let UffdEvent::Fault { address, .. } = event {
                number += 1;
                lazy.busy.store(number, Ordering::Release);
                lazy.answer(address);
                lazy.wake(address);
                lazy.busy.store(0, Ordering::Release);
            }
        }
    }
    Ok(())
}
