//! Fault injection: make a chosen system call of this thread fail.
//!
//! Every wrapper in this crate passes `gate` first. Tests arm a [`Plan`]; without one the gate
//! costs one thread-local load per system call. Plans belong to a thread, so that tests which run
//! side by side do not disturb one another; a fault handler runs in the faulting thread and is
//! reached too.

use std::cell::Cell;

use crate::{Call, SysError};

/// Which call fails, and how.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Only calls of this kind count, or every call when `None`.
    pub call: Option<Call>,
    /// Matching calls that succeed before the one that fails.
    pub after: usize,
    /// Calls that fail from there on.
    pub times: usize,
    /// The errno to fail with.
    pub errno: i32,
}

thread_local! {
    static PLAN: Cell<Option<Plan>> = const { Cell::new(None) };
    static FIRED: Cell<usize> = const { Cell::new(0) };
}

/// Runs `body` with `plan` armed on this thread; returns its result and how many calls were failed.
pub fn with<R>(plan: Plan, body: impl FnOnce() -> R) -> (R, usize) {
    struct Disarm;
    impl Drop for Disarm {
        fn drop(&mut self) {
            PLAN.set(None);
        }
    }
    PLAN.set(Some(plan));
    FIRED.set(0);
    let disarm = Disarm;
    let result = body();
    drop(disarm);
    (result, FIRED.get())
}

/// Fails if the armed plan selects this call.
#[inline]
pub(crate) fn gate(call: Call) -> Result<(), SysError> {
    match PLAN.get() {
        None => Ok(()),
        Some(plan) => decide(plan, call),
    }
}

#[cold]
fn decide(mut plan: Plan, call: Call) -> Result<(), SysError> {
    if plan.times == 0 || plan.call.is_some_and(|wanted| wanted != call) {
        return Ok(());
    }
    if plan.after > 0 {
        plan.after -= 1;
        PLAN.set(Some(plan));
        return Ok(());
    }
    plan.times -= 1;
    PLAN.set(Some(plan));
    FIRED.set(FIRED.get() + 1);
    Err(SysError::new(call, plan.errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_matching_call_fails_and_only_that_one() {
        let plan = Plan { call: Some(Call::Map), after: 1, times: 1, errno: libc::ENOMEM };
        let ((), fired) = with(plan, || {
            assert!(gate(Call::Map).is_ok());
            assert!(gate(Call::Seal).is_ok());
            assert_eq!(gate(Call::Map).unwrap_err().errno, libc::ENOMEM);
            assert!(gate(Call::Map).is_ok());
        });
        assert_eq!(fired, 1);
        assert!(gate(Call::Map).is_ok());
    }
}
