//! Zero memory mapped at a given place, and the duty to unmap it before it is returned.

use std::sync::Arc;

use afresh_sys::{PageRange, Protection, Reservation, SysError};

use crate::frame::{DirtyFrame, Order};
use crate::{Pool, TakeError};

/// A source of zero memory for ranges of a reservation: slots, Wasm memories, KVM guests.
///
/// After [`ZeroSource::fill`] every byte of the range reads as zero and may be written; touching it
/// needs no further memory (so no signal for want of it) unless the source documents otherwise.
pub trait ZeroSource: Send + Sync {
    /// Maps zero memory over `range` of `memory`, replacing earlier mappings.
    ///
    /// # Errors
    /// When memory ran out or the kernel refused; the range is inaccessible or as before then.
    fn fill(&self, memory: &Reservation, range: PageRange) -> Result<Lease, TakeError>;
}

/// Memory lent and mapped. [`Lease::release`] unmaps it and returns it; a lease that is dropped
/// without that never returns to the pool, since it may still be mapped.
#[derive(Debug)]
#[must_use = "memory that is not released stays out of the pool"]
pub struct Lease {
    pool: Option<Arc<Pool>>,
    frames: Vec<DirtyFrame>,
    range: PageRange,
}

/// The kernel's own anonymous memory as a source: the baseline of comparisons, and the fallback
/// without a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelZero;

impl ZeroSource for KernelZero {
    /// Faults are the kernel's: memory is allocated at the first touch of each page, and running
    /// out of it then is a kill.
    fn fill(&self, memory: &Reservation, range: PageRange) -> Result<Lease, TakeError> {
        memory.map_anonymous(range, Protection::ReadWrite)?;
        Ok(Lease::of_kernel(range))
    }
}

impl ZeroSource for Arc<Pool> {
    fn fill(&self, memory: &Reservation, range: PageRange) -> Result<Lease, TakeError> {
        let mut lease = Lease {
            pool: Some(self.clone()),
            frames: Vec::new(),
            range: PageRange::new(range.start, 0),
        };
        while lease.range.len < range.len {
            let rest = PageRange::new(lease.range.end(), range.len - lease.range.len);
            match self.map_some(memory, rest) {
                Ok(frame) => {
                    lease.range.len += frame.pages().min(rest.len);
                    lease.frames.push(frame);
                }
                Err(error) => {
                    // The mapped part is returned; the first error is reported.
                    let _ = lease.release(memory);
                    return Err(error);
                }
            }
        }
        Ok(lease)
    }
}

impl Pool {
    /// Maps one frame at the start of `range`: the largest the alignment and the length of the rest
    /// make sensible. The last frame may be larger than the rest; the surplus is not mapped.
    fn map_some(&self, memory: &Reservation, range: PageRange) -> Result<DirtyFrame, TakeError> {
        let least = self.min_mappable_order();
        let (smallest, largest) = if range.len >= Order::HUGE.pages() {
            (Order::HUGE, Order::fitting(range.len))
        } else {
            // A tail: one piece that holds it beats many small ones, each with its own mapping.
            let whole = Order::holding(range.len).unwrap_or(Order::HUGE).max(least);
            (whole, whole)
        };
        let frame = self.take_between(smallest, largest)?.used();
        let place = PageRange::new(range.start, frame.pages().min(range.len));
        match self.map(&frame, 0, memory, place) {
            Ok(()) => Ok(frame),
            Err(error) => {
                self.give(frame);
                Err(error.into())
            }
        }
    }
}

impl Lease {
    /// Memory that is the kernel's: nothing goes back to a pool.
    pub(crate) fn of_kernel(range: PageRange) -> Self {
        Self { pool: None, frames: Vec::new(), range }
    }

    /// The range it is mapped at.
    #[must_use]
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// Makes the range inaccessible and returns the memory.
    ///
    /// # Errors
    /// When the range cannot be unmapped; its memory is withdrawn permanently then.
    pub fn release(mut self, memory: &Reservation) -> Result<(), SysError> {
        if self.range.is_empty() {
            return Ok(());
        }
        memory.map_anonymous(self.range, Protection::None)?;
        if let Some(pool) = self.pool.take() {
            pool.give_all(self.frames.drain(..));
        }
        Ok(())
    }

    /// Returns the memory after the caller has itself replaced or removed the mapping.
    ///
    /// # Safety
    /// No mapping of this memory made by [`ZeroSource::fill`] may be left, in any thread.
    pub unsafe fn release_unmapped(mut self) {
        if let Some(pool) = self.pool.take() {
            pool.give_all(self.frames.drain(..));
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            for frame in self.frames.drain(..) {
                pool.quarantine(frame);
            }
        }
    }
}
