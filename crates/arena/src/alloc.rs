//! A global allocator whose large blocks come from the frame pool.
//!
//! Small blocks go to the system's allocator. Blocks of [`ZeroedAlloc::LARGE_BYTES`] or more are
//! frames, used at their address in the pool's own mapping: nothing is mapped or unmapped, and a
//! zeroed block is one the background thread has zeroed already. As with any allocator, a dangling
//! pointer to a freed block reaches its next content. A forked child has no large blocks: it must
//! not touch any before it calls `exec`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;

use afresh_frames::{Order, Pool};
use afresh_sys::{InheritedCell, PAGE_SIZE};

/// Use as `#[global_allocator] static ALLOC: ZeroedAlloc = ZeroedAlloc::new();` and call
/// [`ZeroedAlloc::install`] early in `main`; until then everything comes from the system.
#[derive(Debug, Default)]
pub struct ZeroedAlloc {
    pool: InheritedCell<Arc<Pool>>,
}

impl ZeroedAlloc {
    /// Smallest block taken from the pool: 1 MiB. Blocks are rounded up to a power of two.
    pub const LARGE_BYTES: usize = 1 << 20;

    /// An allocator without a pool.
    #[must_use]
    pub const fn new() -> Self {
        Self { pool: InheritedCell::new() }
    }

    /// Serves large blocks from `pool` from now on. Returns the pool when there is one already.
    ///
    /// # Errors
    /// The pool, when another was installed before.
    pub fn install(&self, pool: Arc<Pool>) -> Result<(), Arc<Pool>> {
        self.pool.set(pool)
    }

    /// The order of block that holds `layout`, when it is one for the pool.
    fn order(layout: Layout) -> Option<Order> {
        if layout.size() < Self::LARGE_BYTES || layout.align() > Self::LARGE_BYTES {
            return None;
        }
        Order::holding(layout.size().div_ceil(PAGE_SIZE))
    }

    fn take(&self, layout: Layout) -> Option<*mut u8> {
        let frame = self.pool.get()?.take(Self::order(layout)?).ok()?;
        Some(self.pool.get()?.lend(frame.used()))
    }
}

// SAFETY: a block of the pool is naturally aligned to its size, of at least 1 MiB, so to every
// alignment that `order` lets through; it belongs to the caller until `dealloc`. While it takes or
// gives, the pool allocates only small blocks, which come from the system, so there is no
// recursion.
unsafe impl GlobalAlloc for ZeroedAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this very method.
        self.take(layout).unwrap_or_else(|| unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        self.take(layout).unwrap_or_else(|| unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let pool = self.pool.get().filter(|pool| pool.holds(pointer));
        match (pool, Self::order(layout)) {
            (Some(pool), Some(order)) => {
                // SAFETY: the pointer is in the pool, so `take` lent it for this same layout, and
                // the caller promises that the block is unused now.
                pool.give(unsafe { pool.reclaim(pointer, order) });
            }
            // SAFETY: as above; it came from the system.
            _ => unsafe { System.dealloc(pointer, layout) },
        }
    }
}
