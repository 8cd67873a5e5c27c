//! Memory that children made by `fork` do not get.
//!
//! A child inherits mappings without their userfaultfd. In a shared file whose pages are still to
//! come, a child that touches one has the kernel put a zero page there, and its parent finds that
//! too. So such mappings are not inherited (`MADV_DONTFORK`), and the child has inaccessible memory
//! in their place, so that nothing else is mapped where old pointers lead.
//!
//! Promises: the kernel itself keeps the mapping from every child, however it is made. In one made
//! by the C library's `fork` the addresses stay taken; one made by a bare system call has a hole
//! there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use crate::{Advice, PAGE_SIZE, PageRange, Reservation, SysError};

/// A range that children do not get.
#[derive(Clone, Copy)]
struct WithheldRange {
    /// In bytes.
    len: usize,
    /// Whether a child has inherited parts of it.
    in_part: bool,
}

/// Ranges by their first address. `fork` takes the lock in one call and gives it back in another,
/// which a `Mutex` does not allow.
struct Ranges {
    taken: AtomicBool,
    ranges: std::cell::UnsafeCell<BTreeMap<usize, WithheldRange>>,
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

    fn with<R>(&self, edit: impl FnOnce(&mut BTreeMap<usize, WithheldRange>) -> R) -> R {
        self.lock();
        // SAFETY: locked, so there is no other reference.
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
    for (start, kept) in &ranges {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // Inherited parts belong to the same reservation, and are replaced.
        let place = if kept.in_part { libc::MAP_FIXED } else { libc::MAP_FIXED_NOREPLACE };
        // SAFETY: the parent's reservation covers the range, and no other thread exists that could
        // use it. A range that was not inherited at all is free; the flag refuses to replace a
        // newer mapping.
        let raw = unsafe {
            let at = *start as *mut libc::c_void;
            libc::mmap(at, kept.len, libc::PROT_NONE, flags | place, -1, 0)
        };
        if raw as usize != *start {
            // Pointers into the range would lead to another owner's memory.
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
pub struct WithholdGuard {
    memory: Arc<Reservation>,
    range: PageRange,
    generation: u32,
    /// Whether the mappings themselves are inherited again afterwards.
    restores: bool,
}

/// Registers the handlers of `fork`, once a process.
fn hook() {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        // SAFETY: the three functions take and release a lock and make mappings. Out of memory for
        // the hooks, children have holes.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}

/// Keeps `range` of `memory`, as it is mapped now, from children that are forked from now on.
///
/// # Errors
/// `ENOMEM` when splitting a mapping would exceed `vm.max_map_count`.
pub fn withhold(memory: &Arc<Reservation>, range: PageRange) -> Result<WithholdGuard, SysError> {
    hook();
    let start = memory.page_ptr(range.start) as usize;
    RANGES.with(|ranges| {
        // Under the lock, so that no fork comes between the two.
        memory.advise(range, Advice::DontFork)?;
        ranges.insert(start, WithheldRange { len: range.len * PAGE_SIZE, in_part: false });
        Ok(())
    })?;
    let (memory, generation) = (memory.clone(), super::fork::generation());
    Ok(WithholdGuard { memory, range, generation, restores: true })
}

/// Keeps all of `memory` from children, which have inaccessible memory there, for every later
/// mapping in it. A child made by a bare system call inherits memory without other advice.
#[must_use]
pub fn withhold_all(memory: &Arc<Reservation>) -> WithholdGuard {
    hook();
    let range = PageRange::new(0, memory.pages());
    memory.keep();
    RANGES.with(|ranges| {
        let kept = WithheldRange { len: range.byte_len(), in_part: true };
        ranges.insert(memory.page_ptr(0) as usize, kept);
    });
    let (memory, generation) = (memory.clone(), super::fork::generation());
    WithholdGuard { memory, range, generation, restores: false }
}

impl Drop for WithholdGuard {
    fn drop(&mut self) {
        let start = self.memory.page_ptr(self.range.start) as usize;
        RANGES.with(|ranges| {
            ranges.remove(&start);
            if self.restores && self.generation == super::fork::generation() {
                // The present mapping there is inherited again. Fails only where nothing is mapped.
                let _ = self.memory.advise(self.range, Advice::DoFork);
            }
        });
    }
}
