//! Deadlines of running calls, and stopping a call from outside.
//!
//! Promises: a call past its deadline leaves the guest within about a millisecond of it. A call
//! that ended, also by a panic of a host function, is never disturbed afterwards, and neither is
//! its thread. A call costs a few atomic operations here.
//!
//! May break it: a host function that blocks, which is stopped only when it returns to the guest.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use afresh_sys::kvm::{KickSignal, StopFlag, install_kick_handler};
use afresh_sys::{InheritedCell, InheritedMutex, PerProcess, fork, host, lock};

/// No call is running.
const IDLE: u64 = 0;
/// The running call must stop because its time is over.
const TIMED_OUT: u64 = u64::MAX;
/// A [`StopHandle`] stopped the running call.
const STOPPED: u64 = u64::MAX - 1;
/// The running call has no deadline.
const NEVER: u64 = u64::MAX - 2;

/// Why a call was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    Timeout,
    Handle,
}

/// One vCPU as the watchdog sees it.
#[derive(Debug)]
pub(crate) struct Watch {
    /// `None` in a child of a fork, if a thread of its parent held the lock.
    flag: InheritedMutex<Option<StopFlag>>,
    /// The process that made it.
    process: u32,
    signal: KickSignal,
    thread: AtomicI32,
    /// Nanoseconds since the watchdog's epoch, or one of the constants above.
    deadline: AtomicU64,
    /// Whether the watchdog looks after it.
    registered: AtomicBool,
    /// Whether calls are stopped until the next reset.
    stops: AtomicBool,
}

impl Watch {
    pub(crate) fn new(flag: StopFlag) -> io::Result<Arc<Self>> {
        let watch = Arc::new(Self {
            flag: InheritedMutex::new(Some(flag)),
            process: fork::generation(),
            signal: install_kick_handler()?,
            thread: AtomicI32::new(0),
            deadline: AtomicU64::new(IDLE),
            registered: AtomicBool::new(false),
            stops: AtomicBool::new(false),
        });
        Ok(watch)
    }

    /// Lets the watchdog look after this vCPU.
    pub(crate) fn register(self: &Arc<Self>) -> io::Result<()> {
        if !self.registered.load(Ordering::Relaxed) {
            watchdog()?.add(self);
            self.registered.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The signal that stops a call.
    pub(crate) fn kick(&self) -> KickSignal {
        self.signal
    }

    /// A call begins on this thread, and ends when the result is dropped.
    pub(crate) fn begin(self: &Arc<Self>, timeout: Option<Duration>) -> RunningCall {
        let thread = this_thread();
        self.thread.store(thread, Ordering::Relaxed);
        let deadline = timeout
            .map_or(NEVER, |timeout| now().saturating_add(nanoseconds(timeout)).clamp(1, NEVER));
        self.deadline.store(deadline, Ordering::SeqCst);
        if timeout.is_some()
            && let Ok(watchdog) = watchdog()
        {
            watchdog.wake_if_parked();
        }
        // After the deadline: a handle that came before it saw no call.
        if self.stops.load(Ordering::SeqCst) {
            self.stop(deadline, STOPPED);
        }
        RunningCall { watch: self.clone(), thread }
    }

    /// Calls are no longer stopped.
    pub(crate) fn permit_calls(&self) {
        self.stops.store(false, Ordering::SeqCst);
    }

    /// Whether the running call must stop. If not, a stale stop flag is lowered.
    pub(crate) fn interrupted(&self) -> Option<StopReason> {
        let flag = self.flag.lock();
        match self.deadline.load(Ordering::SeqCst) {
            TIMED_OUT => Some(StopReason::Timeout),
            STOPPED => Some(StopReason::Handle),
            _ => {
                if let Some(flag) = flag.as_ref() {
                    flag.lower();
                }
                None
            }
        }
    }

    /// Whether the running call must stop, between two looks at the guest.
    pub(crate) fn stopped(&self) -> Option<StopReason> {
        match self.deadline.load(Ordering::Relaxed) {
            TIMED_OUT => Some(StopReason::Timeout),
            STOPPED => Some(StopReason::Handle),
            _ => None,
        }
    }

    /// The call is over, however it ended. Called by the thread on which it began.
    fn end(&self) {
        let last = self.deadline.swap(IDLE, Ordering::SeqCst);
        if last == TIMED_OUT || last == STOPPED {
            // The signal is sent under this lock.
            if let Some(flag) = self.flag.lock().as_ref() {
                flag.lower();
            }
            self.signal.discard();
        }
    }

    /// The vCPU that this watches is replaced by the one that `other` watches, and the reverse.
    /// Neither is running.
    pub(crate) fn swap(&self, other: &Watch) {
        std::mem::swap(&mut *self.flag.lock(), &mut *other.flag.lock());
    }

    /// The vCPU is about to go away.
    pub(crate) fn retire(&self) {
        *self.flag.lock() = None;
    }

    fn stop(&self, expected: u64, reason: u64) {
        let flag = self.flag.lock();
        if let Some(flag) = flag.as_ref()
            && self
                .deadline
                .compare_exchange(expected, reason, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        {
            flag.raise();
            self.signal.send(self.thread.load(Ordering::Relaxed));
        }
    }
}

/// A call that runs on this thread. Its end cancels the deadline.
pub(crate) struct RunningCall {
    watch: Arc<Watch>,
    thread: i32,
}

impl RunningCall {
    /// The number of the thread.
    pub(crate) fn thread(&self) -> i32 {
        self.thread
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        self.watch.end();
    }
}

/// Stops the call that a sandbox is running, from any thread. The sandbox is then as after a
/// timeout: it must be reset, and is pristine again.
#[derive(Debug, Clone)]
pub struct StopHandle(pub(crate) Arc<Watch>);

impl StopHandle {
    /// Stops the running call; does nothing where none is running.
    pub fn stop(&self) {
        let deadline = self.0.deadline.load(Ordering::SeqCst);
        // In a forked child the flag is still the parent's.
        if deadline != IDLE && self.0.process == fork::generation() {
            self.0.stop(deadline, STOPPED);
        }
    }

    /// Stops the running call, and every later one until the sandbox is reset.
    pub fn stop_until_reset(&self) {
        self.0.stops.store(true, Ordering::SeqCst);
        self.stop();
    }
}

/// The calling thread's number. In a child of a fork the same thread has another one.
fn this_thread() -> i32 {
    thread_local!(static THREAD: Cell<(u32, i32)> = const { Cell::new((0, 0)) });
    let process = fork::generation();
    let (of, known) = THREAD.get();
    if of == process && known != 0 {
        return known;
    }
    let tid = host::thread_id();
    THREAD.set((process, tid));
    tid
}

fn epoch() -> Instant {
    static EPOCH: InheritedCell<Instant> = InheritedCell::new();
    *EPOCH.get_or_make(Instant::now)
}

fn now() -> u64 {
    nanoseconds(epoch().elapsed())
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(NEVER)
}

/// One thread a process, asleep while no call with a deadline runs.
struct Watchdog {
    watched: Mutex<Vec<Weak<Watch>>>,
    wake: Condvar,
    parked: AtomicBool,
    started: OnceLock<Result<(), io::ErrorKind>>,
}

/// The watchdog of this process: a child of a fork does not have its parent's thread.
fn watchdog() -> io::Result<&'static Watchdog> {
    static DOG: PerProcess<Watchdog> = PerProcess::new(|| Watchdog {
        watched: Mutex::new(Vec::new()),
        wake: Condvar::new(),
        parked: AtomicBool::new(false),
        started: OnceLock::new(),
    });
    let dog = DOG.get();
    dog.started
        .get_or_init(|| {
            std::thread::Builder::new()
                .name("afresh-watchdog".into())
                .spawn(|| dog.watch())
                .map(|_| ())
                .map_err(|error| error.kind())
        })
        .map_err(io::Error::from)?;
    Ok(dog)
}

impl Watchdog {
    fn add(&self, watch: &Arc<Watch>) {
        let mut watched = lock(&self.watched);
        watched.retain(|weak| weak.strong_count() > 0);
        watched.push(Arc::downgrade(watch));
    }

    fn wake_if_parked(&self) {
        if self.parked.load(Ordering::SeqCst) {
            let _held = lock(&self.watched);
            self.wake.notify_one();
        }
    }

    fn watch(&self) {
        let mut watched = lock(&self.watched);
        loop {
            // Announce first, look second: a call that begins in between sees the flag.
            self.parked.store(true, Ordering::SeqCst);
            let mut next = NEVER;
            for watch in watched.iter().filter_map(Weak::upgrade) {
                match watch.deadline.load(Ordering::SeqCst) {
                    IDLE | NEVER | STOPPED | TIMED_OUT => {}
                    deadline if deadline <= now() => watch.stop(deadline, TIMED_OUT),
                    deadline => next = next.min(deadline),
                }
            }
            if next == NEVER {
                watched = self.wake.wait(watched).unwrap_or_else(PoisonError::into_inner);
            } else {
                // Calls that begin in the meantime may have nearer deadlines: look every
                // millisecond instead of being woken by each of them.
                self.parked.store(false, Ordering::SeqCst);
                let pause = (next - now().min(next)).clamp(50_000, 1_000_000);
                (watched, _) = self
                    .wake
                    .wait_timeout(watched, Duration::from_nanos(pause))
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
