//! Start and end of a run.

use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::abi::{ABI_VERSION, BOOT_MAGIC, BootInfo, CALL_DONE, CALL_READY};
use crate::heap;
use crate::hypercall::{fail, hypercall};

static BOOT: AtomicPtr<BootInfo> = AtomicPtr::new(core::ptr::null_mut());

/// The host's information about this guest's memory.
pub fn boot() -> &'static BootInfo {
    let boot = BOOT.load(Ordering::Relaxed);
    if boot.is_null() {
        fail("boot() before the entry point");
    }
    // SAFETY: `ready` stored the boot page's address; the page is read-only and stays.
    unsafe { &*boot }
}

/// Sets the heap up, initialises, and passes the entry of calls to the host.
///
/// # Safety
/// `boot` is the argument of the entry point.
pub unsafe fn ready(
    boot: *const BootInfo,
    init: fn(),
    enter: extern "C" fn(*const u8, usize) -> !,
) -> ! {
    // SAFETY: the caller's contract.
    let info = unsafe { &*boot };
    if info.magic != BOOT_MAGIC || info.version != ABI_VERSION {
        fail("the host speaks another version of the interface");
    }
    BOOT.store(boot.cast_mut(), Ordering::Relaxed);
    // SAFETY: the host gives the heap to this guest alone, and this runs once.
    unsafe { heap::HEAP.start(info.heap as usize, info.heap_len as usize) };
    init();
    loop {
        hypercall(CALL_READY, [enter as usize as u64, u64::from(ABI_VERSION), 0, 0, 0]);
    }
}

/// Ends a call with a status (0 is success) and its output.
pub fn finish(status: i64, output: &[u8]) -> ! {
    loop {
        hypercall(CALL_DONE, [status as u64, output.as_ptr() as u64, output.len() as u64, 0, 0]);
    }
}

/// The output of the last call, freed by the next: calls may follow each other without a reset.
struct LastOutput(UnsafeCell<Vec<u8>>);

// SAFETY: a guest has one thread.
unsafe impl Sync for LastOutput {}

static LAST: LastOutput = LastOutput(UnsafeCell::new(Vec::new()));

/// Ends a call successfully with an output on the heap.
pub fn finish_owned(output: Vec<u8>) -> ! {
    // SAFETY: one thread, and no other reference to the cell's content exists.
    let last = unsafe { &mut *LAST.0.get() };
    *last = output;
    finish(0, last)
}
