//! Noticing `fork`: a child inherits memory but not its userfaultfd protection, so that writes to a slot
//! would go unnoticed there. Whoever depends on protection compares generations and refuses.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A number that differs between this process and any child forked from it after the first call.
#[inline]
#[must_use]
pub fn generation() -> u32 {
    static HOOKED: Once = Once::new();
    if !HOOKED.is_completed() {
        HOOKED.call_once(|| {
            // SAFETY: the handler only increments an atomic. Out of memory for the hook, a child goes
            // unnoticed, as it would without this module.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
    }
    GENERATION.load(Ordering::Relaxed)
}
