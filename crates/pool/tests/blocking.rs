//! Jobs that block: those that wait for a thread can be withdrawn.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use afresh_pool::{JobHandle, MAX_CALL_THREADS, run_blocking};

/// Maximum wait for an end that is due.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Ends when its job is dropped or done.
fn end_of_job(job: impl FnOnce() + Send + 'static) -> (JobHandle, Receiver<()>) {
    let (alive, end) = channel::<()>();
    let handle = run_blocking(move || {
        job();
        drop(alive);
    });
    (handle.unwrap(), end)
}

#[test]
fn a_job_that_waits_for_a_thread_can_be_withdrawn_and_one_that_has_begun_cannot() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let (begun, first) = channel();
    let mut busy: Vec<_> = (0..MAX_CALL_THREADS)
        .map(|_| {
            let (gate, begun) = (Arc::clone(&gate), begun.clone());
            end_of_job(move || {
                // Only the first one has a receiver.
                let _ = begun.send(());
                let open = gate.0.lock().unwrap();
                drop(gate.1.wait_while(open, |open| !*open));
            })
        })
        .collect();
    first.recv_timeout(END_TIMEOUT).unwrap();
    let [(job, end), (last, end_of_last)] = [(); 2].map(|()| end_of_job(|| {}));
    assert!(job.withdraw());
    // Dropped, and so disconnected, before any thread is free.
    assert_eq!(end.try_recv(), Err(TryRecvError::Disconnected));
    assert!(!job.withdraw());
    assert_eq!(end_of_last.try_recv(), Err(TryRecvError::Empty));
    // The first job has begun, because jobs begin in order.
    let (running, end) = busy.swap_remove(0);
    assert!(!running.withdraw());
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    let ends = busy.into_iter().map(|(_, end)| end).chain([end, end_of_last]);
    for end in ends {
        let ended = end.recv_timeout(END_TIMEOUT).unwrap_err();
        assert_eq!(ended, RecvTimeoutError::Disconnected);
    }
    assert!(!last.withdraw());
}
