//! A region: values allocated one after the other in an arena, and freed all at once.
//!
//! Freeing is resetting the arena, so memory comes back zero, and a region reused a million times
//! costs what one costs. Values are not dropped: allocate only values that need no destructor.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_frames::Pool;
use afresh_sys::PAGE_SIZE;

use crate::{Arena, ArenaError, ArenaOptions};

/// A bump allocator over an arena.
#[derive(Debug)]
pub struct Region {
    arena: Arena,
    /// Bytes in use, counted from the base.
    used: AtomicUsize,
}

impl Region {
    /// A region of `pages` pages; with [`crate::CommitPolicy::OnTouch`] it takes memory as it is
    /// used.
    ///
    /// # Errors
    /// As [`Arena::new`] and [`Arena::grow`].
    pub fn new(pool: Arc<Pool>, options: ArenaOptions) -> Result<Self, ArenaError> {
        let mut arena = Arena::new(pool, options)?;
        arena.grow(options.max)?;
        Ok(Self { arena, used: 0.into() })
    }

    /// Allocates zeroed memory, or `None` when the region is full, or was made before a fork by the
    /// parent.
    #[must_use]
    pub fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        if self.arena.is_of_parent() {
            return None;
        }
        let base = self.arena.base() as usize;
        let end = self.arena.pages() * PAGE_SIZE;
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            // Alignments beyond a page are of the address, not of the offset.
            let start = (base + used).checked_next_multiple_of(layout.align())? - base;
            let next = start.checked_add(layout.size())?;
            if next > end {
                return None;
            }
            match self.used.compare_exchange_weak(used, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                // SAFETY: `start + size` is at most the arena's length, just checked.
                Ok(_) => return NonNull::new(unsafe { self.arena.base().add(start) }),
                Err(now) => used = now,
            }
        }
    }

    /// Resizes the newest block to `size` bytes in place; `false` when it is not the newest, or the
    /// region is full.
    #[cfg(feature = "allocator-api2")]
    pub(crate) fn extend(&self, start: NonNull<u8>, old: Layout, size: usize) -> bool {
        let from = start.addr().get() - self.arena.base() as usize;
        let end = self.arena.pages() * PAGE_SIZE;
        from.checked_add(size).filter(|next| *next <= end).is_some_and(|next| {
            let used = &self.used;
            let old_end = from + old.size();
            used.compare_exchange(old_end, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }

    /// Allocates a zeroed slice that lives while the region is borrowed.
    ///
    /// `None` when the region is full.
    #[must_use]
    #[expect(clippy::mut_from_ref, reason = "every call returns separate memory")]
    pub fn bytes(&self, len: usize) -> Option<&mut [u8]> {
        let layout = Layout::array::<u8>(len).ok()?;
        let start = self.allocate(layout)?;
        // SAFETY: the memory is mapped, zero (hence initialised), and allocated once; the borrow of
        // the region keeps it from being reset.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) })
    }

    /// Bytes in use, with the padding between them.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Frees everything at once; the memory is zero again.
    ///
    /// # Errors
    /// As [`Arena::reset`].
    pub fn reset(&mut self) -> Result<(), ArenaError> {
        self.used.store(0, Ordering::Relaxed);
        self.arena.reset()
    }

    /// The arena beneath.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }
}

// SAFETY: every allocation is a separate part of the arena, aligned as asked and mapped until the
// region is reset, which needs the exclusive borrow that a user of the allocator cannot have given.
// Nothing here panics: overflow ends in a null pointer.
unsafe impl GlobalAlloc for Region {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.allocate(layout).map_or(null_mut(), NonNull::as_ptr)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // Memory is allocated once between two resets, so it is still zero.
        self.allocate(layout).map_or(null_mut(), NonNull::as_ptr)
    }

    /// Frees nothing: memory comes back when the region is reset.
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}
