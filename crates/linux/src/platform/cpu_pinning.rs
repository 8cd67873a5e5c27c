//! Sentry and guest on one processor.
//!
//! A call costs 6 µs where both are on the same processor, and more than ten times as much across
//! two. The guest is kept where the sentry is ([`super::Process::follow`]); but a sentry that is
//! woken while another processor is idle is moved there by the kernel, again and again. So it also
//! stays there while it serves a call.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// As long as it lives, the thread that made it stays on the processor that it was on. No thread
/// must be started in that time: it would stay there permanently.
#[derive(Debug)]
pub(crate) struct CpuPinning {
    /// The CPUs that it may use otherwise; `None` if unknown, or for a single CPU.
    before: Option<CpuSet>,
    /// It is this thread's.
    _here: std::marker::PhantomData<*const ()>,
}

impl CpuPinning {
    pub(crate) fn new() -> Self {
        let stay = || {
            let before = sched_getaffinity(None).ok().filter(|set| set.count() > 1)?;
            let mut here = CpuSet::new();
            here.set(sched_getcpu());
            // Refused, it is only slower.
            sched_setaffinity(None, &here).ok()?;
            Some(before)
        };
        Self { before: stay(), _here: std::marker::PhantomData }
    }
}

impl Drop for CpuPinning {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // The former CPUs are allowed again, unless an administrator has changed them.
            let _ = sched_setaffinity(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_and_is_let_go() {
        let before = sched_getaffinity(None).unwrap();
        {
            let _together = CpuPinning::new();
            let mut here = CpuSet::new();
            here.set(sched_getcpu());
            assert_eq!(sched_getaffinity(None).unwrap(), here);
        }
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
