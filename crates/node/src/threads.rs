//! Threads for operations, apart from those of libuv: these are four by default, and guests and
//! tools wait.
//!
//! Promises: at most [`MAX_ACTIVE`] operations run at a time, and others wait in order. One that
//! waits for JavaScript is not counted, so that a tool may use other sandboxes.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum operations that run at the same time in the process.
const MAX_ACTIVE: usize = 64;
/// Time after which a thread without work ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// The stack of a thread, as the main thread of a process has it.
const STACK: usize = 8 << 20;

type Work = Box<dyn FnOnce() + Send>;

struct Pool {
    queue: VecDeque<Work>,
    /// Threads that wait for work.
    idle: usize,
    /// Operations that run, without those that wait for JavaScript.
    active: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { queue: VecDeque::new(), idle: 0, active: 0 });
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs work on a thread, as soon as one is free.
pub(crate) fn run(work: impl FnOnce() + Send + 'static) {
    let mut pool = lock();
    pool.queue.push_back(Box::new(work));
    dispatch(pool);
}

/// Begins queued work while there is room for it.
fn dispatch(mut pool: MutexGuard<'static, Pool>) {
    let room = MAX_ACTIVE.saturating_sub(pool.active);
    let wanted = pool.queue.len().min(room).saturating_sub(pool.idle);
    for _ in 0..wanted {
        let builder = std::thread::Builder::new().name("afresh".to_owned()).stack_size(STACK);
        if builder.spawn(serve).is_err() {
            // Without any thread nothing would take the work: it is dropped, which reports a
            // failure.
            if pool.active == 0 && pool.idle == 0 {
                let dropped = std::mem::take(&mut pool.queue);
                drop(pool);
                drop(dropped);
                return;
            }
            break;
        }
        pool.idle += 1;
    }
    drop(pool);
    CHANGED.notify_all();
}

/// A thread: counted as idle until it takes work.
fn serve() {
    let mut pool = lock();
    loop {
        let may_run = |pool: &Pool| !pool.queue.is_empty() && pool.active < MAX_ACTIVE;
        if !may_run(&pool) {
            let waited = CHANGED.wait_timeout_while(pool, IDLE_TIMEOUT, |pool| !may_run(pool));
            pool = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let work = match may_run(&pool) {
            true => pool.queue.pop_front(),
            false => None,
        };
        pool.idle -= 1;
        let Some(work) = work else { return };
        pool.active += 1;
        drop(pool);
        // The work reports a panic itself, when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(work));
        pool = lock();
        pool.active -= 1;
        pool.idle += 1;
    }
}

/// Waits for JavaScript within work; the wait is not counted as work.
pub(crate) fn wait<T>(wait: impl FnOnce() -> T) -> T {
    let mut pool = lock();
    pool.active = pool.active.saturating_sub(1);
    dispatch(pool);
    // Also where the wait panics. It may exceed the maximum for a while: the work was admitted
    // already.
    let _active = ActiveThread;
    wait()
}

/// Counts as work again when it is dropped.
struct ActiveThread;

impl Drop for ActiveThread {
    fn drop(&mut self) {
        lock().active += 1;
    }
}
