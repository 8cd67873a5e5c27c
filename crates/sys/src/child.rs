//! A forked child that checks something, for tests of this workspace.

/// Runs `check` in a forked child; whether it returned true there within a minute.
///
/// `check` may take locks that no other thread holds, and the memory allocator's, which the C
/// library keeps whole.
///
/// # Panics
/// When no child can be made.
pub fn child_passes(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `check` and ends without the parent's destructors. What `check` may do
    // there is the caller's promise; it can hang at worst, for a minute.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(60) };
        let check = std::panic::AssertUnwindSafe(check);
        let passed = std::panic::catch_unwind(check).unwrap_or(false);
        // SAFETY: ends the child and nothing else.
        unsafe { libc::_exit(i32::from(!passed)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just made.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    waited == child && status == 0
}
