//! Internal crate of `afresh` (`afresh::budget`). Memory budgets for untrusted input.
//!
//! A decoder charges a [`Budget`] before it allocates, with the bytes the decoded value will
//! occupy, not the bytes of its encoding.
//!
//! Promises: the charges of a budget never exceed its limit. A refused charge changes nothing.
//! Bytes return when their [`Charge`] is dropped. May break it: a decoder that allocates first or
//! charges too little. [`meter`] measures that.

#[cfg(feature = "postcard")]
mod decode;
#[cfg(feature = "postcard")]
mod encode;
#[cfg(feature = "meter")]
pub mod meter;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(feature = "postcard")]
pub use decode::{DecodeError, Decoder, MAX_DECODED, MAX_UNCHECKED, decode};
#[cfg(feature = "postcard")]
pub use encode::{Encoder, encode};

/// A limit on bytes in use. Clones share it.
#[derive(Clone, Debug)]
pub struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: &'static str,
    limit: usize,
    used: AtomicUsize,
}

/// A charge that a budget refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetExceeded {
    /// Name of the budget that refused.
    pub budget: &'static str,
    /// Its limit, in bytes.
    pub limit: usize,
    /// Bytes that were requested in addition to those in use.
    pub requested: usize,
}

impl fmt::Display for BudgetExceeded {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { budget, limit, requested } = self;
        write!(formatter, "{requested} more bytes exceed the {budget} budget of {limit} bytes")
    }
}

impl std::error::Error for BudgetExceeded {}

impl Budget {
    /// Creates a budget of `limit` bytes. Errors mention `name`, for example "request body".
    #[must_use]
    pub fn new(name: &'static str, limit: usize) -> Self {
        Self { inner: Arc::new(Inner { name, limit, used: AtomicUsize::new(0) }) }
    }

    /// Limit in bytes.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.inner.limit
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.inner.used.load(Ordering::Relaxed)
    }

    /// A charge of no bytes, to which bytes can be added.
    #[must_use]
    pub fn empty(&self) -> Charge {
        Charge { budget: self.clone(), bytes: 0 }
    }

    /// Charges `bytes`.
    ///
    /// # Errors
    ///
    /// [`BudgetExceeded`] if fewer bytes are left. Nothing is charged then.
    pub fn charge(&self, bytes: usize) -> Result<Charge, BudgetExceeded> {
        let mut charge = self.empty();
        charge.add(bytes)?;
        Ok(charge)
    }

    fn take(&self, bytes: usize) -> Result<(), BudgetExceeded> {
        let Inner { name, limit, used } = &*self.inner;
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| sum <= limit)
        })
        .map(drop)
        .map_err(|_| BudgetExceeded { budget: name, limit: *limit, requested: bytes })
    }

    fn give(&self, bytes: usize) {
        self.inner.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes counted in a budget until this value is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Budget,
    bytes: usize,
}

impl Charge {
    /// Bytes charged.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Charges `bytes` more.
    ///
    /// # Errors
    ///
    /// [`BudgetExceeded`] as for [`Budget::charge`]; the charge keeps its former size.
    pub fn add(&mut self, bytes: usize) -> Result<(), BudgetExceeded> {
        self.budget.take(bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Charges `count` more values of type `T`.
    ///
    /// # Errors
    ///
    /// [`BudgetExceeded`] as for [`Charge::add`], also where the product overflows.
    pub fn add_items<T>(&mut self, count: usize) -> Result<(), BudgetExceeded> {
        self.add(count.saturating_mul(size_of::<T>()))
    }

    /// Returns `bytes` early; at most all of them.
    pub fn release(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.budget.give(bytes);
        self.bytes -= bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.give(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_charge_counts_nothing() {
        let budget = Budget::new("test", 10);
        let mut one = budget.charge(6).unwrap();
        let two = budget.charge(4).unwrap();
        assert!(budget.charge(1).is_err() && one.add(usize::MAX).is_err());
        assert_eq!((budget.used(), one.bytes()), (10, 6));
        drop(two);
        one.add(4).unwrap();
        one.release(3);
        assert_eq!(budget.used(), 7);
        drop(one);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn items_that_overflow_are_refused() {
        let budget = Budget::new("test", usize::MAX - 1);
        assert!(budget.empty().add_items::<u64>(usize::MAX / 2).is_err());
        assert_eq!(budget.used(), 0);
    }
}
