//! Events from threads to JavaScript.
//!
//! Promises: events arrive in the order in which they were sent; after [`Mailbox::close`] none is
//! sent, and no thread touches the environment. Its sender counts output until it is delivered, and
//! can wait.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory of an event apart from its bytes: here, in the queue of Node, and with its allocation.
const EVENT_COST: usize = 256;

/// The kinds of events, as `native.js` numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum EventKind {
    /// The operation has succeeded: its result in JSON, and bytes.
    Done = 0,
    /// It has failed: the error in JSON.
    Failed = 1,
    /// The guest has printed bytes to the stream `detail`.
    Output = 2,
    /// The guest calls a tool: the call's number, and the request.
    Tool = 3,
}

/// An event of one operation.
pub(crate) struct Event {
    pub(crate) number: u32,
    pub(crate) kind: EventKind,
    pub(crate) detail: u32,
    pub(crate) text: String,
    pub(crate) bytes: Vec<u8>,
    /// The sender's count of memory of events that were not delivered yet.
    pub(crate) pending: Option<Arc<AtomicUsize>>,
}

impl Event {
    /// Bytes of memory that it takes until it is delivered.
    pub(crate) fn cost(&self) -> usize {
        EVENT_COST + self.bytes.len()
    }

    /// JavaScript has taken it.
    pub(crate) fn delivered(&self) {
        if let Some(pending) = &self.pending {
            pending.fetch_sub(self.cost(), Ordering::AcqRel);
        }
    }
}

/// Events for JavaScript, oldest first.
#[derive(Default)]
pub(crate) struct Queue(Mutex<VecDeque<Event>>);

impl Queue {
    pub(crate) fn take(&self) -> Option<Event> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

/// Wakes the thread of JavaScript, for the events that are queued.
pub(crate) trait Wake: Send {
    fn wake(&self);
}

/// The way to one environment.
#[derive(Default)]
pub(crate) struct Mailbox {
    queue: Arc<Queue>,
    waker: Mutex<Option<Box<dyn Wake>>>,
}

impl Mailbox {
    fn waker(&self) -> MutexGuard<'_, Option<Box<dyn Wake>>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue of the environment.
    pub(crate) fn queue(&self) -> Arc<Queue> {
        Arc::clone(&self.queue)
    }

    /// Sends events from now on.
    pub(crate) fn open(&self, waker: Box<dyn Wake>) {
        *self.waker() = Some(waker);
    }

    /// Sends no event any more.
    pub(crate) fn close(&self) {
        drop(self.waker().take());
    }

    /// Sends an event; it is dropped if the environment has ended.
    pub(crate) fn send(&self, event: Event) {
        // Held during the call, so that `close` waits for it.
        let waker = self.waker();
        if let Some(waker) = &*waker {
            self.queue.0.lock().unwrap_or_else(PoisonError::into_inner).push_back(event);
            waker.wake();
        }
    }
}
