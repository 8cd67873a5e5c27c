//! Threads for calls that block, made when they are needed and shared by the tasks of a process.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use afresh_sys::PerProcess;

/// Maximum threads for calls. Further calls wait for one.
const MAX_THREADS: usize = 512;
/// Time that a thread stays without a call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

struct Threads {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
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
pub fn run_blocking(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    THREADS.get().run(Box::new(job))
}

impl Threads {
    fn run(&'static self, job: Job) -> io::Result<()> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.jobs.push_back(job);
        if queue.jobs.len() <= queue.idle {
            self.wake.notify_one();
            return Ok(());
        }
        if queue.threads >= MAX_THREADS {
            return Ok(());
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
        Ok(())
    }

    fn work(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
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
