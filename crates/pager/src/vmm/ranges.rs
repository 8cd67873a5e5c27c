//! Lists of ranges, whose lengths a guest decides by the pages that it touches.
//!
//! Promises: a list is charged to the budget of its endpoint before it grows.

use std::ops::{Deref, DerefMut};

use afresh_budget::{Budget, BudgetExceeded, Charge};
use afresh_sys::PageRange;

/// Entries of the smallest list.
const MIN_CAPACITY: usize = 4;

/// A list that is charged to a budget, if there is one.
#[derive(Debug)]
pub(super) struct ChargedList<T> {
    items: Vec<T>,
    charge: Option<Charge>,
}

impl<T> ChargedList<T> {
    pub(super) fn new(budget: Option<&Budget>) -> Self {
        Self { items: Vec::new(), charge: budget.map(Budget::empty) }
    }

    /// Appends an item.
    ///
    /// # Errors
    /// [`BudgetExceeded`] where the budget has no room for a longer list.
    pub(super) fn push(&mut self, item: T) -> Result<(), BudgetExceeded> {
        let (len, before) = (self.items.len(), self.items.capacity());
        if len == before {
            let after = before.saturating_mul(2).max(MIN_CAPACITY);
            // The old list and the new one exist together for a moment.
            if let Some(charge) = &mut self.charge {
                charge.add_items::<T>(after)?;
            }
            self.items.reserve_exact(after - len);
            if let Some(charge) = &mut self.charge {
                charge.release(before * size_of::<T>());
            }
        }
        self.items.push(item);
        Ok(())
    }

    /// The list, and its charge.
    pub(super) fn into_parts(self) -> (Vec<T>, Option<Charge>) {
        (self.items, self.charge)
    }
}

impl<T> Deref for ChargedList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items
    }
}

impl<T> DerefMut for ChargedList<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items
    }
}

/// The runs of equal values, with their places.
pub(super) fn runs<V: PartialEq>(
    values: impl Iterator<Item = V>,
) -> impl Iterator<Item = (PageRange, V)> {
    let mut values = values.enumerate().peekable();
    std::iter::from_fn(move || {
        let (start, value) = values.next()?;
        let mut len = 1;
        while values.next_if(|(_, next)| *next == value).is_some() {
            len += 1;
        }
        Some((PageRange::new(start, len), value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_never_exceeds_its_budget() {
        let budget = Budget::new("test", 1000);
        let mut list = ChargedList::new(Some(&budget));
        let pushed = (0..1000u64).take_while(|item| list.push(*item).is_ok()).count();
        // 64 items are 512 bytes, and 128 would be 1024.
        assert_eq!((pushed, list.len(), budget.used()), (64, 64, 512));
        let (items, charge) = list.into_parts();
        assert_eq!((items.last(), budget.used()), (Some(&63), 512));
        drop(charge);
        assert_eq!(budget.used(), 0);
        let mut free = ChargedList::new(None);
        assert!((0..1000).all(|item| free.push(item).is_ok()));
    }

    #[test]
    fn runs_have_every_value_once() {
        let found: Vec<_> = runs([1, 1, 2, 1].into_iter()).collect();
        let run = PageRange::new;
        assert_eq!(found, [(run(0, 2), 1), (run(2, 1), 2), (run(3, 1), 1)]);
        assert_eq!(runs(std::iter::empty::<u8>()).count(), 0);
    }
}
