//! A thread's own cache of frames of one order, refilled and emptied in bundles.
//!
//! Between two bundles, taking and giving touch no shared state. Used frames are collected and
//! returned as a bundle; they are never reused here, since they are dirty.

use std::sync::Arc;

use crate::frame::{CleanFrame, DirtyFrame, Order};
use crate::{Pool, TakeError};

/// Frames one thread keeps at hand.
#[derive(Debug)]
pub struct FrameCache {
    pool: Arc<Pool>,
    order: Order,
    bundle: usize,
    clean: Vec<CleanFrame>,
    dirty: Vec<DirtyFrame>,
}

impl FrameCache {
    /// A cache of frames of `order`, moved `bundle` (at least one, rounded up to a power of two) at
    /// a time.
    #[must_use]
    pub fn new(pool: Arc<Pool>, order: Order, bundle: usize) -> Self {
        let bundle = bundle.clamp(1, Order::MAX.pages()).next_power_of_two();
        let (clean, dirty) = (Vec::with_capacity(bundle), Vec::with_capacity(bundle));
        Self { pool, order, bundle, clean, dirty }
    }

    /// Takes a zero frame.
    ///
    /// # Errors
    /// As [`Pool::take_between`].
    #[inline]
    pub fn take(&mut self) -> Result<CleanFrame, TakeError> {
        match self.clean.pop() {
            Some(frame) => Ok(frame),
            None => self.refill(),
        }
    }

    #[cold]
    fn refill(&mut self) -> Result<CleanFrame, TakeError> {
        // One block, split here: one trip under the lock for the whole bundle.
        let largest = Order::fitting(self.order.pages() * self.bundle);
        let block = self.pool.take_between(self.order, largest)?;
        let mut frames = block.split(self.order);
        let first = frames.next();
        self.clean.extend(frames);
        // Low addresses first, as prefetchers prefer.
        self.clean.reverse();
        first.ok_or(TakeError::Fragmented { wanted: self.order.pages() })
    }

    /// Gives a used frame back.
    #[inline]
    pub fn give(&mut self, frame: DirtyFrame) {
        self.dirty.push(frame);
        if self.dirty.len() >= self.bundle {
            self.pool.give_all(self.dirty.drain(..));
        }
    }

    /// Empties the cache into the pool.
    pub fn flush(&mut self) {
        self.pool.give_all(self.dirty.drain(..));
        self.pool.give_unused(self.clean.drain(..));
    }
}

impl Drop for FrameCache {
    fn drop(&mut self) {
        self.flush();
    }
}
