//! Stacks for calls on fibers, which threads keep for the next one.
//!
//! A store keeps the stack of its last call; a new store, in fresh mode and for every component, has none, and
//! to map one, touch it and unmap it takes longer than such a call. Stacks that come back are kept by the thread
//! on which they do, up to a bound.
//!
//! Promises: a stack has one user at a time, and a guard below it. Its content is left over from the last user,
//! unless wasmtime requests zeros; no guest can read it.

use std::cell::RefCell;
use std::ops::Range;

use afresh_memory::{PAGE_SIZE, PageRange, page_align_up};
use afresh_sys::{Protection, Reservation, fork};
use wasmtime::{StackCreator, StackMemory};

/// Maximum stacks that a thread keeps.
const MAX_STACKS: usize = 64;

/// Inaccessible pages below a stack.
const GUARD: usize = 1;

thread_local! {
    /// Stacks without a user, with the process that they were made in.
    static IDLE: RefCell<Vec<(u32, Reservation)>> = const { RefCell::new(Vec::new()) };
}

/// Gives stacks to wasmtime.
#[derive(Debug)]
pub(crate) struct Stacks;

/// A stack in use.
struct Stack {
    /// `None` only once it is dropped.
    reservation: Option<Reservation>,
    base: usize,
    top: usize,
    /// Whether another call may reuse it.
    reusable: bool,
}

impl Stack {
    fn over(reservation: Reservation, reusable: bool) -> Self {
        let base = reservation.page_ptr(GUARD) as usize;
        let top = reservation.page_ptr(reservation.pages()) as usize;
        Self { reservation: Some(reservation), base, top, reusable }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let Some(reservation) = self.reservation.take().filter(|_| self.reusable) else { return };
        // A thread that ends keeps nothing.
        let _ = IDLE.try_with(|idle| {
            let mut idle = idle.borrow_mut();
            if idle.len() < MAX_STACKS {
                idle.push((fork::generation(), reservation));
            }
        });
    }
}

// SAFETY: the range is mapped, page-aligned and owned by this value alone. Below it is a guard page, inaccessible
// since it was reserved.
unsafe impl StackMemory for Stack {
    fn top(&self) -> *mut u8 {
        self.top as *mut u8
    }

    fn range(&self) -> Range<usize> {
        self.base..self.top
    }

    fn guard_range(&self) -> Range<*mut u8> {
        (self.base - GUARD * PAGE_SIZE) as *mut u8..self.base as *mut u8
    }
}

// SAFETY: each stack is a separate reservation of the requested size, zeroed on request; see `Stack`.
unsafe impl StackCreator for Stacks {
    fn new_stack(&self, size: usize, zeroed: bool) -> wasmtime::Result<Box<dyn StackMemory>> {
        let pages = page_align_up(size) / PAGE_SIZE + GUARD;
        let kept = || {
            IDLE.try_with(|idle| {
                let mut idle = idle.borrow_mut();
                let fits = |(generation, stack): &(u32, Reservation)| {
                    *generation == fork::generation() && stack.pages() == pages
                };
                let at = idle.iter().rposition(fits)?;
                Some(idle.swap_remove(at).1)
            })
            .ok()
            .flatten()
        };
        if !zeroed && let Some(reservation) = kept() {
            return Ok(Box::new(Stack::over(reservation, true)));
        }
        let reservation = Reservation::new(pages)?;
        let usable = PageRange::new(GUARD, pages - GUARD);
        reservation.map_anonymous(usable, Protection::ReadWrite)?;
        Ok(Box::new(Stack::over(reservation, !zeroed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_has_one_user_at_a_time_and_comes_back_to_its_thread() {
        let first = Stacks.new_stack(1 << 20, false).unwrap();
        let second = Stacks.new_stack(1 << 20, false).unwrap();
        assert_ne!(first.top(), second.top());
        let (top, other) = (first.top(), second.top());
        drop(first);
        let again = Stacks.new_stack(1 << 20, false).unwrap();
        assert_eq!(again.top(), top);
        let larger = Stacks.new_stack(2 << 20, false).unwrap();
        assert_eq!(larger.range().len(), 2 << 20);
        assert_eq!(larger.guard_range().end as usize, larger.range().start);
        drop(second);
        let zeroed = Stacks.new_stack(1 << 20, true).unwrap();
        assert_ne!(zeroed.top(), other);
    }
}
