//! Waiting for an item as a task does: no thread is blocked, and no runtime is needed.
//!
//! Promises: a task that waits is woken after an item came back; if it is dropped before it has
//! taken one, the next task is woken in its place. Tasks are woken in the order in which they came.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use crate::gate::{Gate, Turn};

/// A pool without the type of its items.
pub(crate) trait WaitingRoom: Send + Sync {
    /// Its waiting threads and tasks.
    fn gate(&self) -> &Gate;

    /// Whether the next look may find an item, or a place for one.
    fn has_room(&self) -> bool;
}

/// The wait of one task for an item of a pool. It keeps its place in the queue until it is dropped,
/// so use one value for all attempts of a request.
pub struct NextItem {
    pool: Arc<dyn WaitingRoom>,
    turn: Turn,
}

impl std::fmt::Debug for NextItem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NextItem").field("turn", &self.turn).finish_non_exhaustive()
    }
}

impl NextItem {
    pub(crate) fn new(pool: Arc<dyn WaitingRoom>) -> Self {
        Self { pool, turn: Turn::default() }
    }

    /// Waits until the pool may have an item, or a place for one. Another thread may be faster, so
    /// try again and wait again.
    ///
    /// The pool keeps the place in the queue when the future is dropped.
    pub async fn wait(&mut self) {
        poll_fn(|context| {
            let room = || self.pool.has_room();
            match self.pool.gate().poll(&mut self.turn, context.waker(), room) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}

impl Drop for NextItem {
    fn drop(&mut self) {
        self.pool.gate().leave(&mut self.turn, || self.pool.has_room());
    }
}
