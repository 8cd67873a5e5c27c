//! Work that several threads share, and that one can do.
//!
//! Promises: a thread that cannot be started stops nothing. The other threads do its share, the
//! calling one at least.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// Calls `work` in this thread and in `helpers` more, or as many of these as can be started.
/// Returns once all have ended.
pub(crate) fn share(helpers: usize, work: impl Fn() + Sync) {
    thread::scope(|scope| {
        for _ in 0..helpers {
            let thread = thread::Builder::new().name("afresh-store".to_owned());
            if thread.spawn_scoped(scope, &work).is_err() {
                // pids.max, RLIMIT_NPROC or memory: the next one would fail as well.
                break;
            }
        }
        work();
    });
}

/// Calls `work` for each of `items` at the same time, as far as threads can be started. The results
/// are in the order of the items.
pub(crate) fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let helpers = items.len().saturating_sub(1);
    let waiting = Mutex::new(items.into_iter().zip(&mut results));
    share(helpers, || {
        loop {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((item, result)) = next else { return };
            *result = Some(work(item));
        }
    });
    results.into_iter().flatten().collect()
}

/// Threads on this host that run or wait for a processor, this one included. `None` where the
/// kernel does not report them.
pub(crate) fn runnable() -> Option<usize> {
    parse_runnable(&std::fs::read_to_string("/proc/loadavg").ok()?)
}

/// The runnable threads of a line in `/proc/loadavg`, as `0.20 0.18 0.12 3/80 11206`.
fn parse_runnable(line: &str) -> Option<usize> {
    line.split_ascii_whitespace().nth(3)?.split_once('/')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runnable_threads_are_the_fourth_number_of_the_load() {
        assert_eq!(parse_runnable("0.20 0.18 0.12 3/80 11206\n"), Some(3));
        for line in ["", "0.20 0.18 0.12", "0.20 0.18 0.12 80 11206", "a b c d/e f"] {
            assert_eq!(parse_runnable(line), None, "{line}");
        }
        #[cfg(target_os = "linux")]
        assert!(runnable() > Some(0));
    }

    #[test]
    fn results_are_in_the_order_of_their_items() {
        for len in 0..6 {
            let items: Vec<usize> = (0..len).collect();
            let doubled: Vec<usize> = items.iter().map(|item| 2 * item).collect();
            assert_eq!(map(items, |item| 2 * item), doubled);
        }
    }
}
