//! Work that several threads share, and that one can do.
//!
//! Promises: a thread that cannot be started stops nothing. The other threads do its share, the
//! calling one at least.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// Runnable threads for each processor, beyond which a host is overloaded.
const BUSY_FACTOR: usize = 2;

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

/// Whether the host has more than [`BUSY_FACTOR`] runnable threads for each of its processors.
/// False where this process may use only some of them (a quota or an affinity): further threads
/// would share the same quota.
pub(crate) fn is_overloaded(processors: usize) -> bool {
    let read = |path| std::fs::read_to_string(path).ok();
    let online = read("/proc/stat").map(|text| count_processors(&text));
    let runnable = read("/proc/loadavg").and_then(|line| parse_runnable(&line));
    online == Some(processors) && runnable > Some(BUSY_FACTOR * processors)
}

/// The processors in `/proc/stat`, which has a line `cpu0 …` for each.
fn count_processors(text: &str) -> usize {
    let number = |line: &str| line.strip_prefix("cpu")?.bytes().next();
    text.lines().filter(|line| number(line).is_some_and(|byte| byte.is_ascii_digit())).count()
}

/// The runnable threads of a line in `/proc/loadavg`, as `0.20 0.18 0.12 3/80 11206`.
fn parse_runnable(line: &str) -> Option<usize> {
    line.split_ascii_whitespace().nth(3)?.split_once('/')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_read_from_the_files_of_the_kernel() {
        assert_eq!(parse_runnable("0.20 0.18 0.12 3/80 11206\n"), Some(3));
        for line in ["", "0.20 0.18 0.12", "0.20 0.18 0.12 80 11206", "a b c d/e f"] {
            assert_eq!(parse_runnable(line), None, "{line}");
        }
        assert_eq!(count_processors("cpu  1 2\ncpu0 1 2\ncpu1 0 0\nintr 5\nctxt 1\n"), 2);
        #[cfg(target_os = "linux")]
        assert!(!is_overloaded(usize::MAX / BUSY_FACTOR));
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
