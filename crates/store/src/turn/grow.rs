//! Lists whose room is charged before it is allocated.

use afresh_budget::{Budget, BudgetExceeded, Charge};

/// A list of values that charges its capacity to a budget.
#[derive(Debug)]
pub(super) struct ChargedList<T> {
    items: Vec<T>,
    charge: Charge,
}

impl<T> ChargedList<T> {
    pub(super) fn new(budget: &Budget) -> Self {
        Self { items: Vec::new(), charge: budget.empty() }
    }

    pub(super) fn push(&mut self, item: T) -> Result<(), BudgetExceeded> {
        if self.items.len() == self.items.capacity() {
            let room = (self.items.len() / 4).max(64);
            self.charge.add_items::<T>(room)?;
            self.items.reserve_exact(room);
        }
        self.items.push(item);
        Ok(())
    }

    pub(super) fn last_mut(&mut self) -> Option<&mut T> {
        self.items.last_mut()
    }

    pub(super) fn into_items(self) -> Vec<T> {
        self.items
    }
}

impl<T> std::ops::Deref for ChargedList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items
    }
}
