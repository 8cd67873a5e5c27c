//! Stacks for calls on fibers, which threads keep for the next one.
//!
//! A store keeps the stack of its last call; a new store, in fresh mode and for every component,
//! has none, and to map one, touch it and unmap it takes longer than such a call. Stacks that come
//! back are kept by the thread on which they do, up to a bound.
//!
//! Promises: a stack has one user at a time, and a guard below it. Its content is left over from
//! the last user, unless wasmtime requests zeros; no guest can read it. Where the memory of idle
//! instances is limited, a stack without a user keeps at most [`KEPT_BYTES`], and so does that of a
//! session between two calls. Both are charged to the budget of the process. The pool of an idle
//! instance counts its stack. Without a limit the same holds after each [`LOOK_INTERVAL`]th use of
//! a stack, because a look is a system call. The stack of a running call is in no account, as its
//! memories are not: it has a fixed maximum (`EngineConfig::stack`).

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use afresh_memory::{PAGE_SIZE, PageRange, page_align_up};
use afresh_pool::{Budget, MappingCharge};
use afresh_sys::{Advice, Protection, Reservation, SysError, fork};
use wasmtime::{StackCreator, StackMemory};

/// Maximum stacks that a thread keeps.
const MAX_STACKS: usize = 64;

/// Maximum bytes of a stack without a user.
const KEPT_BYTES: usize = 128 << 10;

/// Uses of a stack between two looks at its pages, where no limit depends on them. A look takes 3
/// µs, and a short call no more.
const LOOK_INTERVAL: usize = 64;

/// Inaccessible pages below a stack.
const GUARD: usize = 1;

/// Pages that are looked at in one system call.
const STEP: usize = 16;

/// Mappings of a stack and of its guard.
pub(crate) const MAPPINGS: usize = 2;

/// A stack without a user.
struct IdleStack {
    /// The process that it was made in.
    generation: u32,
    pages: Pages,
    held: MappingCharge,
}

thread_local! {
    static IDLE: RefCell<Vec<IdleStack>> = const { RefCell::new(Vec::new()) };
    /// The stack that this thread has made last, while [`record`] asks for it.
    static MADE: Cell<Option<Weak<Pages>>> = const { Cell::new(None) };
}

/// The memory of a stack, a guard below it included.
#[derive(Debug)]
struct Pages {
    reservation: Reservation,
    /// Pages from the top on that were resident when they were last counted.
    counted: AtomicUsize,
    /// Calls that have ended on it.
    uses: AtomicUsize,
}

impl Pages {
    /// Resident pages, counted from the top to the first part that is not: compiled code touches
    /// each page of a stack on its way down. Pages that were counted before are not looked at
    /// again, so this is one system call as a rule.
    fn resident(&self) -> usize {
        let most = self.reservation.pages() - GUARD;
        let mut counted = self.counted.load(Ordering::Relaxed);
        while counted < most {
            let step = STEP.min(most - counted);
            let start = self.reservation.pages() - counted - step;
            if self.reservation.resident_pages(PageRange::new(start, step)) == 0 {
                break;
            }
            counted += step;
        }
        self.counted.store(counted, Ordering::Relaxed);
        counted
    }

    /// Whether the pages have to be looked at after another use: always if the memory of idle
    /// instances is limited, for this pool or for the process.
    fn needs_look(&self, limited: bool) -> bool {
        let uses = self.uses.fetch_add(1, Ordering::Relaxed);
        limited
            || uses.is_multiple_of(LOOK_INTERVAL)
            || Budget::process().bounds().resident_bytes != usize::MAX
    }

    /// Bytes that were resident when they were last counted.
    fn counted_bytes(&self) -> usize {
        self.counted.load(Ordering::Relaxed) * PAGE_SIZE
    }

    /// Gives back all pages but these from the top on. The stack must not be in use.
    fn shrink(&self, keep: usize) -> Result<(), SysError> {
        if self.resident() > keep {
            let rest = self.reservation.pages() - GUARD - keep;
            self.reservation.advise(PageRange::new(GUARD, rest), Advice::Discard)?;
            self.counted.store(keep, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The stack that a store keeps for its next call.
#[derive(Debug, Default)]
pub(crate) struct KeptStack(Weak<Pages>);

impl KeptStack {
    /// Bytes of memory that it keeps after another call. With `limited` the pool of its instance
    /// has a limit.
    pub(crate) fn resident_bytes(&self, limited: bool) -> usize {
        self.0.upgrade().map_or(0, |pages| match pages.needs_look(limited) {
            true => pages.resident() * PAGE_SIZE,
            false => pages.counted_bytes(),
        })
    }

    /// Leaves it at most [`KEPT_BYTES`] after a call of a session; returns how many it keeps. No
    /// call of the store may be under way.
    pub(crate) fn shrink(&self) -> usize {
        self.0.upgrade().map_or(0, |pages| {
            if pages.needs_look(false) {
                // A stack that cannot be made smaller is counted as it is.
                let _ = pages.shrink(KEPT_BYTES / PAGE_SIZE);
            }
            pages.counted_bytes()
        })
    }

    /// Gives that memory back. No call of the store may be under way.
    pub(crate) fn trim(&self) -> Result<(), SysError> {
        self.0.upgrade().map_or(Ok(()), |pages| pages.shrink(0))
    }
}

/// The stack that a store has got in `call`, which is the first to run something on a fiber in it,
/// and does so on this thread.
pub(crate) fn record<R>(call: impl FnOnce() -> R) -> (R, KeptStack) {
    MADE.set(None);
    let result = call();
    (result, KeptStack(MADE.take().unwrap_or_default()))
}

/// Gives stacks to wasmtime.
#[derive(Debug)]
pub(crate) struct Stacks;

/// A stack in use.
struct Stack {
    /// `None` only once it is dropped.
    pages: Option<Arc<Pages>>,
    base: usize,
    top: usize,
    /// Whether another call may reuse it.
    reusable: bool,
}

impl Stack {
    fn over(pages: Pages, reusable: bool) -> Self {
        let reservation = &pages.reservation;
        let base = reservation.page_ptr(GUARD) as usize;
        let top = reservation.page_ptr(reservation.pages()) as usize;
        let pages = Arc::new(pages);
        // A thread that ends records nothing.
        let _ = MADE.try_with(|made| made.set(Some(Arc::downgrade(&pages))));
        Self { pages: Some(pages), base, top, reusable }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // A thread that counts the pages at this moment drops them.
        let Some(pages) = self.pages.take().and_then(Arc::into_inner) else { return };
        if !self.reusable {
            return;
        }
        if pages.needs_look(false) && pages.shrink(KEPT_BYTES / PAGE_SIZE).is_err() {
            return;
        }
        // A thread that ends keeps nothing.
        let _ = IDLE.try_with(|idle| {
            let mut idle = idle.borrow_mut();
            if idle.len() < MAX_STACKS {
                let bytes = pages.counted_bytes();
                // Items are dropped where room is made, and their stacks come here.
                let held = Budget::process().hold_later(MAPPINGS, bytes);
                idle.push(IdleStack { generation: fork::generation(), pages, held });
            }
        });
    }
}

// SAFETY: the range is mapped, page-aligned and owned by this value alone. Below it is a guard
// page, inaccessible since it was reserved.
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

// SAFETY: each stack is a separate reservation of the requested size, zeroed on request; see
// `Stack`.
unsafe impl StackCreator for Stacks {
    fn new_stack(&self, size: usize, zeroed: bool) -> wasmtime::Result<Box<dyn StackMemory>> {
        let pages = page_align_up(size) / PAGE_SIZE + GUARD;
        let kept = || {
            IDLE.try_with(|idle| {
                let mut idle = idle.borrow_mut();
                let fits = |idle: &IdleStack| {
                    idle.generation == fork::generation() && idle.pages.reservation.pages() == pages
                };
                let at = idle.iter().rposition(fits)?;
                let IdleStack { pages, held, .. } = idle.swap_remove(at);
                drop(held);
                Some(pages)
            })
            .ok()
            .flatten()
        };
        if !zeroed && let Some(pages) = kept() {
            return Ok(Box::new(Stack::over(pages, true)));
        }
        let reservation = Reservation::new(pages)?;
        let usable = PageRange::new(GUARD, pages - GUARD);
        reservation.map_anonymous(usable, Protection::ReadWrite)?;
        let (counted, uses) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let pages = Pages { reservation, counted, uses };
        Ok(Box::new(Stack::over(pages, !zeroed)))
    }
}

#[cfg(test)]
mod tests {
    use afresh_pool::ProcessLimits;

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

    #[test]
    fn a_stack_is_looked_at_now_and_then_without_a_limit_and_always_with_one() {
        let (stack, kept) = record(|| Stacks.new_stack(5 << 20, false).unwrap());
        let pages = kept.0.upgrade().unwrap();
        let mut looks = (0..2 * LOOK_INTERVAL).filter(|_| pages.needs_look(false)).count();
        // Another test may set a limit meanwhile.
        assert!(looks >= 2, "{looks}");
        looks = (0..LOOK_INTERVAL).filter(|_| pages.needs_look(true)).count();
        assert_eq!(looks, LOOK_INTERVAL);
        touch(&*stack, 1 << 20);
        while pages.uses.load(Ordering::Relaxed) % LOOK_INTERVAL != 0 {
            kept.shrink();
        }
        assert!(kept.shrink() <= KEPT_BYTES);
    }

    /// Writes to as many bytes from the top on, as code does: page after page.
    fn touch(stack: &dyn StackMemory, bytes: usize) {
        for at in (PAGE_SIZE..=bytes).step_by(PAGE_SIZE) {
            // SAFETY: the byte is in the stack, which has no other user.
            unsafe { stack.top().sub(at).write_volatile(1) };
        }
    }

    #[test]
    fn a_stack_without_a_user_keeps_little_and_is_in_the_accounts() {
        const SIZE: usize = 3 << 20;
        // A limit, if one that nothing reaches.
        let bounds = Budget::process().bounds();
        Budget::process().set(ProcessLimits { resident_bytes: usize::MAX - 1, ..bounds });
        let idle = || {
            IDLE.with(|idle| {
                let idle = idle.borrow();
                let own =
                    idle.iter().filter(|idle| idle.pages.reservation.pages() * PAGE_SIZE > SIZE);
                let sizes = own.map(|idle| (idle.pages.resident() * PAGE_SIZE, idle.held.bytes()));
                sizes.collect::<Vec<_>>()
            })
        };
        for _ in 0..3 {
            let (stack, kept) = record(|| Stacks.new_stack(SIZE, false).unwrap());
            touch(&*stack, 2 << 20);
            let counted = kept.resident_bytes(true);
            // Pages may be large.
            assert!(counted >= 2 << 20, "{counted}");
            assert_eq!(idle(), []);
            drop(stack);
            assert_eq!(kept.resident_bytes(true), 0);
            assert_eq!(idle(), [(KEPT_BYTES, KEPT_BYTES)]);
        }
        // A store keeps its stack, and gives its memory back when that is asked for.
        let (stack, kept) = record(|| Stacks.new_stack(SIZE, false).unwrap());
        touch(&*stack, SIZE);
        assert_eq!(kept.resident_bytes(true), SIZE);
        kept.trim().unwrap();
        assert_eq!(kept.resident_bytes(true), 0);
        touch(&*stack, PAGE_SIZE);
        assert!(kept.resident_bytes(true) >= PAGE_SIZE);
    }
}
