//! x86-64.

/// Whether the access was a write: a bit of the page fault's error code.
///
/// # Safety
/// `context` must be the one that the kernel passed to a handler.
pub(in crate::linux) unsafe fn was_write(context: *const libc::c_void) -> Option<bool> {
    const WRITE: i64 = 1 << 1;
    // SAFETY: the caller's promise.
    let error =
        unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_ERR as usize] };
    Some(error & WRITE != 0)
}

/// Address of the interrupted instruction.
///
/// # Safety
/// `context` must be the one that the kernel passed to a handler.
pub(in crate::linux) unsafe fn instruction(context: *const libc::c_void) -> usize {
    // SAFETY: the caller's promise.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_RIP as usize] as usize
}
