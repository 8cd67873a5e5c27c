//! Threads for calls that block, made when they are needed and shared by the tasks of a process.
//!
//! Promises: jobs begin in the order in which they came, and one that is withdrawn before it began
//! is dropped at once.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use afresh_sys::PerProcess;

/// Maximum threads for calls of a process. Further calls wait for one.
pub const MAX_CALL_THREADS: usize = 512;
/// Time that a thread stays without a call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

struct Threads {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Jobs by their numbers, which ascend.
    jobs: VecDeque<(u64, Job)>,
    next: u64,
    threads: usize,
    /// Threads that wait for a job.
    idle: usize,
}

/// The threads of this process: a child of a fork has none of its parent's.
static THREADS: PerProcess<Threads> =
    PerProcess::new(|| Threads { queue: Mutex::default(), wake: Condvar::new() });

/// Runs a job on a thread for calls that block.
///
/// # Errors
/// When the host has no thread for it; the job is dropped then.
pub fn run_blocking(job: impl FnOnce() + Send + 'static) -> io::Result<JobHandle> {
    let threads = THREADS.get();
    let number = threads.run(Box::new(job))?;
    Ok(JobHandle { threads, number })
}

/// A job that was given to [`run_blocking`]. The job runs whether its handle is kept or not.
pub struct JobHandle {
    threads: &'static Threads,
    number: u64,
}

impl std::fmt::Debug for JobHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobHandle").field("number", &self.number).finish_non_exhaustive()
    }
}

impl JobHandle {
    /// Drops the job if it still waits for a thread; `false` if it has begun, or was withdrawn
    /// before. A child of a fork cannot withdraw jobs of its parent.
    pub fn withdraw(&self) -> bool {
        // A thread of the parent may have held the lock at the fork.
        std::ptr::eq(self.threads, THREADS.get()) && self.threads.withdraw(self.number)
    }
}

impl Threads {
    fn run(&'static self, job: Job) -> io::Result<u64> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let number = queue.next;
        queue.next += 1;
        queue.jobs.push_back((number, job));
        if queue.jobs.len() <= queue.idle {
            self.wake.notify_one();
            return Ok(number);
        }
        if queue.threads >= MAX_CALL_THREADS {
            return Ok(number);
        }
        let builder = std::thread::Builder::new().name("afresh-call".into());
        match builder.spawn(|| self.work()) {
            Ok(_) => queue.threads += 1,
            Err(error) if queue.threads == 0 => {
                let job = queue.jobs.pop_back();
                drop(queue);
                drop(job);
                return Err(error);
            }
            // It waits for another thread.
            Err(_) => {}
        }
        Ok(number)
    }

    fn withdraw(&self, number: u64) -> bool {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let at = queue.jobs.binary_search_by_key(&number, |(number, _)| *number);
        let job = at.ok().and_then(|at| queue.jobs.remove(at));
        drop(queue);
        job.is_some()
    }

    fn work(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some((_, job)) = queue.jobs.pop_front() {
                drop(queue);
                // A job reports its own panics.
                let _ = catch_unwind(AssertUnwindSafe(job));
                queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            queue.idle += 1;
            let (woken, waited) =
                self.wake.wait_timeout(queue, IDLE_TIMEOUT).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if waited.timed_out() && queue.jobs.is_empty() {
                queue.threads -= 1;
                return;
            }
        }
    }
}
