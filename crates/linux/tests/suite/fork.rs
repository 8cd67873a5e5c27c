//! A forked child of the sentry leaves its parent's guest alone, and has a new one.

use crate::common;

use afresh_sys::run_isolated;

#[test]
fn a_forked_child_calls_its_own_guest() {
    run_isolated("fork::a_forked_child_calls_its_own_guest", check);
}

fn check() {
    let Some(mut warm) = common::warm("canary.c", |program| program) else { return };
    let clean = warm.call_pristine(b"look\n").unwrap();
    let id = warm.process_id();
    // SAFETY: the child uses the allocator, which the C library's fork keeps whole, and nothing
    // that another thread holds.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(60) };
        let good = warm.call_pristine(b"dirty\n").is_ok_and(|answer| answer == b"done\n")
            && warm.call_pristine(b"look\n").is_ok_and(|answer| answer == clean)
            && warm.process_id() != id;
        drop(warm);
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(warm.call_pristine(b"look\n").unwrap(), clean);
    warm.verify().unwrap();
    assert_eq!((warm.process_id(), warm.stats().processes), (id, 1));
}
