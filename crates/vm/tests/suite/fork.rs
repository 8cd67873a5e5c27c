//! A forked child makes its own micro-VMs, with deadlines that are kept; it cannot run those of its
//! parent.

use std::time::Duration;

use crate::common::{guest, kvm, words};
use afresh_sys::run_isolated;
use afresh_vm::{CallError, GuestError, Sandbox, VerifyError};

#[test]
fn deadlines_are_kept_in_a_child_and_the_parents_guest_is_refused_there() {
    if !kvm() {
        return;
    }
    let name = "fork::deadlines_are_kept_in_a_child_and_the_parents_guest_is_refused_there";
    // Other tests' locks might be held when it forks.
    run_isolated(name, deadlines);
}

fn deadlines() {
    let spin = guest("spin");
    let stopped = |sandbox: &mut Sandbox| {
        let error = sandbox.run(b"spin").unwrap_err();
        assert!(matches!(error, CallError::Guest(GuestError::Timeout { .. })), "{error}");
        assert_eq!(sandbox.run(b"").unwrap(), b"did not spin");
    };
    let build = || Sandbox::builder().timeout(Duration::from_millis(300)).build(&spin).unwrap();
    let mut parents = build();
    stopped(&mut parents);
    // SAFETY: no other thread of this process holds a lock that the child wants: the watchdog
    // sleeps.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(60) };
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let error = parents.run(b"").unwrap_err();
            assert!(matches!(error, CallError::Forked), "{error}");
            stopped(&mut build());
        }));
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(good.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    stopped(&mut parents);
}

/// The dirty ring is memory that parent and child share: an entry that a child took out of it, its
/// parent would not restore.
#[test]
fn a_parent_is_reset_completely_whatever_its_forked_child_does() {
    if !kvm() {
        return;
    }
    let name = "fork::a_parent_is_reset_completely_whatever_its_forked_child_does";
    run_isolated(name, tries);
}

fn tries() {
    let dirty = guest("dirty");
    let mut parents = Sandbox::builder().memory(4 << 20).build(&dirty).unwrap();
    let snapshot = parents.pristine();
    for round in 1..4 {
        // Pages that no round before wrote.
        let pages = [1, 200 * round, 200, 1, round];
        parents.call(&words(&pages)).unwrap();
        // SAFETY: the only other thread of this process is the harness's, which waits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends a child that hangs.
            unsafe { libc::alarm(60) };
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                assert!(matches!(parents.run(&words(&[0])), Err(CallError::Forked)));
                assert!(matches!(parents.reset(), Err(CallError::Forked)));
                assert!(matches!(parents.restore(&snapshot), Err(CallError::Forked)));
                assert!(matches!(parents.snapshot(), Err(CallError::Forked)));
                assert!(matches!(parents.verify(), Err(VerifyError::Call(CallError::Forked))));
                // A new guest works, and draws other numbers.
                let mut own = snapshot.fork().unwrap();
                assert_eq!(own.run(&words(&[2, 200 * round, 200, 1])).unwrap(), [0; 8]);
            }));
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(i32::from(good.is_err())) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        parents.reset().unwrap();
        parents.verify().unwrap();
        assert_eq!(parents.run(&words(&[2, 200 * round, 200, 1])).unwrap(), [0; 8]);
    }
}
