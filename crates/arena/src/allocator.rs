//! A region as the allocator of a collection, by the `Allocator` trait of the crate
//! `allocator-api2`.
//!
//! The *borrowed* region is the allocator: while a collection holds the borrow, the region cannot
//! be reset. Memory that a collection frees comes back when the region is reset.

use std::alloc::Layout;
use std::ptr::NonNull;

use allocator_api2::alloc::{AllocError, Allocator};

use crate::Region;

fn block(start: Option<NonNull<u8>>, len: usize) -> Result<NonNull<[u8]>, AllocError> {
    start.map(|start| NonNull::slice_from_raw_parts(start, len)).ok_or(AllocError)
}

// SAFETY: every block is a separate part of the arena, aligned as asked, and mapped until the
// region is reset or dropped, which takes more than the shared borrow that is the allocator here.
// Copies of the borrow mean the same region. Blocks that grow in place keep their address, and
// others are copied.
unsafe impl Allocator for &Region {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        block(Region::allocate(self, layout), layout.size())
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // Memory is allocated once between two resets, so it is still zero.
        self.allocate(layout)
    }

    unsafe fn deallocate(&self, _: NonNull<u8>, _: Layout) {}

    unsafe fn grow(
        &self,
        start: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        if start.addr().get().is_multiple_of(new.align()) && self.extend(start, old, new.size()) {
            return block(Some(start), new.size());
        }
        let moved = self.allocate(new)?;
        // SAFETY: the caller vouches for the old block; the new one is larger and apart from it.
        unsafe { moved.cast::<u8>().copy_from_nonoverlapping(start, old.size()) };
        Ok(moved)
    }

    unsafe fn grow_zeroed(
        &self,
        start: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: the caller keeps the contract of this same method; the added bytes are zero, as
        // in `allocate_zeroed`.
        unsafe { self.grow(start, old, new) }
    }

    unsafe fn shrink(
        &self,
        start: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        if start.addr().get().is_multiple_of(new.align()) {
            return block(Some(start), new.size());
        }
        let moved = self.allocate(new)?;
        debug_assert!(new.size() <= old.size());
        // SAFETY: as in `grow`; the new block has the length of the copy.
        unsafe { moved.cast::<u8>().copy_from_nonoverlapping(start, new.size()) };
        Ok(moved)
    }
}
