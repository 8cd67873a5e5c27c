//! The entry into the code of a guest: a plain call, or a call on a fiber that may wait.
//!
//! wasmtime refuses plain calls into a store whose imports are asynchronous. So engine code that
//! resets an instance uses the guest's path as well. It calls no host function, and completes in
//! one poll.
//!
//! Promises: a guest whose calls are synchronous has no fiber, unless its engine allows it more
//! stack than threads have. May break it: a wasmtime whose `call_async` yields of itself; then
//! restoring fails, and the instance is dropped.

use std::panic::catch_unwind;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// How code is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallPath {
    /// By a call on the thread's own stack.
    Direct,
    /// The same, on a larger stack than a thread need have; nothing waits.
    Deep,
    /// On a separate stack, which is put aside while a host function waits.
    Fiber,
}

impl CallPath {
    /// That of a guest which waits or not, on an engine that allows it a deep stack or not.
    pub(crate) fn of(asynchronous: bool, deep: bool) -> Self {
        match (asynchronous, deep) {
            (true, _) => CallPath::Fiber,
            (false, true) => CallPath::Deep,
            (false, false) => CallPath::Direct,
        }
    }

    /// Whether calls may wait.
    pub(crate) fn waits(self) -> bool {
        self == CallPath::Fiber
    }
}

/// Polls a future once. Returns its output, or drops the future and returns `None` if it would
/// wait.
pub(crate) fn poll_once<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// As [`poll_once`], where waiting is a failure.
pub(crate) fn now<T>(future: impl Future<Output = wasmtime::Result<T>>) -> wasmtime::Result<T> {
    poll_once(future)
        .unwrap_or_else(|| Err(wasmtime::Error::msg("it waits for a host function, and may not")))
}

/// Runs the future of a host function to its end, in a plain call.
///
/// A task of tokio may make such a call, and a thread that runs tasks must not block on a future.
/// There, one that is ready at once gives its result, which output in memory and to the process is;
/// one that waits is an error.
pub(crate) fn block<T>(future: impl Future<Output = wasmtime::Result<T>>) -> wasmtime::Result<T> {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else {
        return wasmtime_wasi::runtime::in_tokio(future);
    };
    let mut future = pin!(future);
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => return result,
        Poll::Pending => {}
    }
    // A thread for blocking work also has a runtime, and may block. Nothing but an attempt shows
    // the difference.
    match catch_unwind(|| runtime.block_on(async {})) {
        Ok(()) => runtime.block_on(future),
        Err(_) => Err(wasmtime::Error::msg(
            "a plain call inside a task of tokio would block its thread: make the guest asynchronous \
             (`GuestOptions::asynchronous`), or call it in `spawn_blocking`",
        )),
    }
}

/// Runs a future to its end on this thread. Only one that goes [`CallPath::Fiber`] waits, and may
/// need a runtime, which this thread must not be a task of.
pub(crate) fn drive<F: Future>(way: CallPath, future: F) -> F::Output {
    match way {
        CallPath::Direct | CallPath::Deep => poll_once(future)
            .unwrap_or_else(|| unreachable!("nothing waits that calls no asynchronous function")),
        CallPath::Fiber => wasmtime_wasi::runtime::in_tokio(future),
    }
}
