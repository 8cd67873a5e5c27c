//! Internal crate of `afresh` (`afresh::budget`). Memory budgets for untrusted input.
//!
//! A decoder charges a [`Budget`] before it allocates, with the bytes the decoded value will
//! occupy, not the bytes of its encoding. A budget may be part of a larger one: each charge then
//! counts in both, so a server bounds every request and all requests together.
//!
//! Promises: the charges of a budget never exceed its limit, nor those of the budgets above it. A
//! refused charge changes nothing. Bytes return when their [`Charge`] is dropped. May break it: a
//! decoder that allocates first or charges too little. [`meter`] measures that.

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
    parent: Option<Budget>,
}

/// A charge that a budget refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetExceeded {
    /// Name of the budget that refused: the requested one or one above it.
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
        Self::with_parent(name, limit, None)
    }

    /// Creates a budget whose charges count in `self` as well.
    #[must_use]
    pub fn child(&self, name: &'static str, limit: usize) -> Self {
        Self::with_parent(name, limit, Some(self.clone()))
    }

    fn with_parent(name: &'static str, limit: usize, parent: Option<Budget>) -> Self {
        Self { inner: Arc::new(Inner { name, limit, used: AtomicUsize::new(0), parent }) }
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
    /// [`BudgetExceeded`] if this budget or one above it has fewer bytes left. Nothing is charged
    /// then.
    pub fn charge(&self, bytes: usize) -> Result<Charge, BudgetExceeded> {
        let mut charge = self.empty();
        charge.add(bytes)?;
        Ok(charge)
    }

    fn take(&self, bytes: usize) -> Result<(), BudgetExceeded> {
        let Inner { name, limit, used, parent } = &*self.inner;
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| sum <= limit)
        })
        .map_err(|_| BudgetExceeded { budget: name, limit: *limit, requested: bytes })?;
        let Some(parent) = parent else { return Ok(()) };
        parent.take(bytes).inspect_err(|_| {
            used.fetch_sub(bytes, Ordering::Relaxed);
        })
    }

    fn give(&self, bytes: usize) {
        let mut budget = Some(self);
        while let Some(Budget { inner }) = budget {
            inner.used.fetch_sub(bytes, Ordering::Relaxed);
            budget = inner.parent.as_ref();
        }
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
    fn a_child_is_bounded_by_its_parent() {
        let server = Budget::new("server", 10);
        let request = server.child("request", 8);
        let other = server.child("request", 8);
        let charge = request.charge(8).unwrap();
        assert_eq!(request.charge(1).unwrap_err().budget, "request");
        let refused = other.charge(3).unwrap_err();
        assert_eq!((refused.budget, refused.limit), ("server", 10));
        assert_eq!((other.used(), server.used()), (0, 8));
        drop(charge);
        assert_eq!((request.used(), server.used()), (0, 0));
    }

    #[test]
    fn items_that_overflow_are_refused() {
        let budget = Budget::new("test", usize::MAX - 1);
        assert!(budget.empty().add_items::<u64>(usize::MAX / 2).is_err());
        assert_eq!(budget.used(), 0);
    }
}
