//! Crashes at a chosen operation, for tests of durability.
//!
//! Code that writes names and files passes [`point`] before each operation that a crash could fall
//! on. A test arms one thread of a child process, which then aborts at the nth point. Without the
//! feature `planted` a point costs nothing.

#[cfg(feature = "planted")]
use std::cell::Cell;

#[cfg(feature = "planted")]
thread_local! {
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Aborts the process at the point after `count` others, on this thread.
#[cfg(feature = "planted")]
pub fn arm(count: usize) {
    LEFT.set(Some(count));
}

/// Lets this thread pass every further point.
#[cfg(feature = "planted")]
pub fn disarm() {
    LEFT.set(None);
}

/// An operation that a crash could fall on.
#[inline(always)]
pub fn point() {
    #[cfg(feature = "planted")]
    match LEFT.get() {
        None => {}
        Some(0) => std::process::abort(),
        Some(count) => LEFT.set(Some(count - 1)),
    }
}

/// Notes that `file`, a file or a directory, was synced: see `power`. Without the feature `planted`
/// it costs nothing.
#[inline(always)]
pub fn synced(file: &std::fs::File) {
    #[cfg(feature = "planted")]
    crate::power::synced(file);
    #[cfg(not(feature = "planted"))]
    let _ = file;
}
