//! External operations of the table and its counts; their model (`tests/fault_model.rs`) replaces
//! them.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::linux::futex;

/// Changes at every leave that a thread may wait for. One word for all: the value that was left may
/// be freed.
static LEFT: AtomicU32 = AtomicU32::new(0);

/// Wakes waiting threads, which look again. May be called in a signal handler.
pub(crate) fn wake_waiters() {
    LEFT.fetch_add(1, Ordering::AcqRel);
    futex::wake_all(&LEFT);
}

/// Returns when `done` is true, which it becomes before a call of [`wake_waiters`].
pub(crate) fn wait_for_leavers(done: impl Fn() -> bool) {
    loop {
        let seen = LEFT.load(Ordering::Acquire);
        if done() {
            return;
        }
        futex::wait(&LEFT, seen, Duration::from_secs(1));
    }
}

/// Where the model notices that a node is looked at, and when it is freed.
pub(crate) struct Probe;

impl Probe {
    pub(crate) fn new() -> Self {
        Self
    }

    #[inline]
    pub(crate) fn touch(&self) {
        let _ = self;
    }
}

/// A constructor that can make a static; the model's atomics cannot.
macro_rules! constant {
    ($(#[$doc:meta])* fn new() -> Self $body:block) => {
        $(#[$doc])*
        pub(crate) const fn new() -> Self $body
    };
}
pub(crate) use constant;
