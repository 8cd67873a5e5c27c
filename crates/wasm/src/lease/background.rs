//! Code of the guest that prepares an instance, on another thread than the task's.
//!
//! Promises: the task that waits blocks no thread of its runtime, and needs none. If it is dropped,
//! the code is stopped as a call is, and the instance goes back to its pool.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use afresh_pool::{JobHandle, run_blocking};
use tokio::sync::oneshot;

use crate::host::watch::StopHandle;
use crate::{LeaseOptions, WarmError};

/// Stops the code when the task is dropped, or withdraws it if no thread has begun it.
struct StopGuard {
    stop: StopHandle,
    job: JobHandle,
    /// Whether the outcome is there: the handle is that of its lease then.
    ended: bool,
}

impl Drop for StopGuard {
    fn drop(&mut self) {
        if !self.ended && !self.job.withdraw() {
            self.stop.stop();
        }
    }
}

/// Runs `prepare` on a thread for calls that block, with `options` and a handle to stop it.
pub(crate) async fn prepare_elsewhere<T: Send + 'static>(
    options: &LeaseOptions,
    prepare: impl FnOnce(&LeaseOptions) -> Result<T, WarmError> + Send + 'static,
) -> Result<T, WarmError> {
    type Outcome<T> = Result<Result<T, WarmError>, Box<dyn Any + Send>>;
    let stop = StopHandle::default();
    let options = options.clone().stopped_by(stop.clone());
    let (sender, receiver) = oneshot::channel::<Outcome<T>>();
    let job = run_blocking(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| prepare(&options)));
        // Where nothing waits any more, a lease ends here.
        drop(sender.send(outcome));
    });
    let mut guard = StopGuard { stop, job: job.map_err(WarmError::Thread)?, ended: false };
    let outcome = receiver.await;
    guard.ended = true;
    match outcome {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => resume_unwind(panic),
        Err(_) => unreachable!("the job sends its outcome"),
    }
}
