//! Memory that children made by `fork` do not get.
//!
//! A child inherits mappings without their userfaultfd. In a shared file whose pages are still to come, a
//! child that touches one has the kernel put a zero page there, and its parent finds that too. So such
//! mappings are not inherited (`MADV_DONTFORK`), and the child has inaccessible memory in their place, so
//! that nothing else is mapped where old pointers lead.
//!
//! What it promises: the kernel itself keeps the mapping from every child, however it is made. In one made
//! by the C library's `fork` the addresses stay taken; one made by a bare system call has a hole there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use crate::{Advice, PAGE_SIZE, PageRange, Reservation, SysError};

/// Ranges by their first address, with their length in bytes. A lock of its own, because it is taken in one
/// call and given back in another when the process forks.
struct Ranges {
    taken: AtomicBool,
    ranges: std::cell::UnsafeCell<BTreeMap<usize, usize>>,
}

// SAFETY: `ranges` is only reached between `lock` and `unlock`.
unsafe impl Sync for Ranges {}

static RANGES: Ranges =
    Ranges { taken: AtomicBool::new(false), ranges: std::cell::UnsafeCell::new(BTreeMap::new()) };

impl Ranges {
    fn lock(&self) {
        while self.taken.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn unlock(&self) {
        self.taken.store(false, Ordering::Release);
    }

    fn with<R>(&self, edit: impl FnOnce(&mut BTreeMap<usize, usize>) -> R) -> R {
        self.lock();
        // SAFETY: locked, so nobody else has a reference.
        let result = edit(unsafe { &mut *self.ranges.get() });
        self.unlock();
        result
    }
}

extern "C" fn before_fork() {
    RANGES.lock();
}

extern "C" fn in_parent() {
    RANGES.unlock();
}

extern "C" fn in_child() {
    // SAFETY: the forking thread locked it and is the only one here.
    let ranges = std::mem::take(unsafe { &mut *RANGES.ranges.get() });
    for (start, len) in &ranges {
        // SAFETY: the range was not inherited, so the address is free; the flag refuses to replace
        // anything that has come there since.
        let raw = unsafe {
            libc::mmap(
                *start as *mut libc::c_void,
                *len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE
                    | libc::MAP_ANONYMOUS
                    | libc::MAP_NORESERVE
                    | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        if raw as usize != *start {
            // Pointers into the range would lead to somebody else's memory.
            // SAFETY: ends the child.
            unsafe { libc::abort() };
        }
    }
    // Not freed: which allocator may be used here is not for this module to know.
    std::mem::forget(ranges);
    RANGES.unlock();
}

/// Keeps a range from children until it is dropped.
#[derive(Debug)]
pub struct Withheld {
    memory: Arc<Reservation>,
    range: PageRange,
    generation: u32,
}

/// Keeps `range` of `memory`, as it is mapped now, from children that are forked from now on.
///
/// # Errors
/// `ENOMEM` when splitting a mapping would exceed `vm.max_map_count`.
pub fn withhold(memory: &Arc<Reservation>, range: PageRange) -> Result<Withheld, SysError> {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        // SAFETY: the three functions take and release a lock and make mappings. Out of memory for the
        // hooks, children have holes.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
    let start = memory.page_ptr(range.start) as usize;
    RANGES.with(|ranges| {
        // Under the lock, so that no fork comes between the two.
        memory.advise(range, Advice::DontFork)?;
        ranges.insert(start, range.len * PAGE_SIZE);
        Ok(())
    })?;
    Ok(Withheld { memory: memory.clone(), range, generation: super::fork::generation() })
}

impl Drop for Withheld {
    fn drop(&mut self) {
        let start = self.memory.page_ptr(self.range.start) as usize;
        RANGES.with(|ranges| {
            ranges.remove(&start);
            if self.generation == super::fork::generation() {
                // Whatever is mapped there now is inherited again. Fails only where nothing is mapped.
                let _ = self.memory.advise(self.range, Advice::DoFork);
            }
        });
    }
}
