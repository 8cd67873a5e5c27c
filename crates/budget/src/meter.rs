//! An allocator that measures how much one thread allocates.
//!
//! A test installs [`Meter`] as its global allocator and runs a decoder in [`peak`], [`within`] or
//! [`total`].
//!
//! Promises: the peak counts every byte that the closure's own thread had allocated at once.
//! May break it: memory that bypasses the allocator (`mmap`), and work on other threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, measured per thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static LIMIT: Cell<isize> = const { Cell::new(isize::MAX) };
    static TOTAL: Cell<usize> = const { Cell::new(0) };
}

/// Counts `bytes`; `false` where the limit forbids them.
fn count(bytes: isize) -> bool {
    // A thread whose locals are destroyed is not measured.
    LIVE.try_with(|live| {
        let sum = live.get().saturating_add(bytes);
        if bytes > 0 && sum > LIMIT.get() {
            return false;
        }
        live.set(sum);
        TOTAL.set(TOTAL.get().saturating_add(usize::try_from(bytes).unwrap_or(0)));
        PEAK.set(PEAK.get().max(sum));
        true
    })
    .unwrap_or(true)
}

fn size(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap_or(isize::MAX)
}

// SAFETY: every call passes to `System` unchanged; a null pointer is an allowed answer to a
// request.
unsafe impl GlobalAlloc for Meter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !count(size(layout.size())) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !count(size(layout.size())) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-size(layout.size()));
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks exist while the bytes are copied.
        if !count(size(new_size)) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those of `System`.
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        count(-size(if moved.is_null() { new_size } else { layout.size() }));
        moved
    }
}

/// Runs `run` and returns its result with the most bytes that it had allocated at once.
pub fn peak<T>(run: impl FnOnce() -> T) -> (T, usize) {
    measure(isize::MAX, run)
}

/// Runs `run` with at most `limit` bytes. An allocation beyond them fails, which aborts the process
/// unless it was fallible: a fuzzer sees a crash at the line that allocates.
pub fn within<T>(limit: usize, run: impl FnOnce() -> T) -> (T, usize) {
    measure(size(limit), run)
}

/// Runs `run` and returns its result with the sum of all bytes that it allocated, those that it
/// freed again included: a measure of copying that no clock is needed for.
pub fn total<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = TOTAL.get();
    let result = run();
    (result, TOTAL.get().wrapping_sub(before))
}

fn measure<T>(limit: isize, run: impl FnOnce() -> T) -> (T, usize) {
    struct Restore(isize, isize);
    impl Drop for Restore {
        fn drop(&mut self) {
            PEAK.set(self.0);
            LIMIT.set(self.1);
        }
    }
    let base = LIVE.get();
    let restore = Restore(PEAK.replace(base), LIMIT.replace(base.saturating_add(limit)));
    let result = run();
    let most = PEAK.get() - base;
    drop(restore);
    (result, usize::try_from(most).unwrap_or(0))
}
