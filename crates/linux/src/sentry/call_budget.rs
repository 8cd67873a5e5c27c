//! The work of the call that is served, counted in steps.
//!
//! Promises: a call whose length the guest chooses looks at least once every [`STEPS_PER_LOOK`]
//! steps whether it has to end: at its deadline, where its caller stops it, and where a signal ends
//! the guest. Its thread then waits in the call, which is repeated if the guest continues. May
//! break it: a loop over objects of a guest that counts no steps.

use std::time::Instant;

use crate::limits::POLL_INTERVAL;
use crate::sentry::Sentry;
use crate::sentry::kernel::identity::FIRST;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult};

/// Steps between two looks. One step costs about as much as a small system call.
const STEPS_PER_LOOK: usize = 1 << 10;

/// The work since the last look.
#[derive(Debug)]
pub(in crate::sentry) struct CallBudget {
    steps: usize,
    /// When the caller was polled last.
    polled: Instant,
    /// Number of looks so far.
    pub(in crate::sentry) looks: u64,
}

impl Default for CallBudget {
    fn default() -> Self {
        Self { steps: 0, polled: Instant::now(), looks: 0 }
    }
}

impl Sentry {
    /// Counts `steps` of work of the call that is served. Returns whether the call has to end.
    pub(in crate::sentry) fn is_spent(&mut self, steps: usize) -> bool {
        self.budget.steps = self.budget.steps.saturating_add(steps);
        if self.budget.steps < STEPS_PER_LOOK {
            return false;
        }
        (self.budget.steps, self.budget.looks) = (0, self.budget.looks + 1);
        let is_late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        is_late || self.is_ended_by_signal() || !self.is_wanted()
    }

    /// As [`Sentry::is_spent`], for calls that can be repeated from their start.
    pub(in crate::sentry) fn spend(&mut self, steps: usize) -> SyscallResult<()> {
        if self.is_spent(steps) { Err(SyscallError::Paused) } else { Ok(()) }
    }

    /// Bytes that the served call has done before it waited.
    pub(in crate::sentry) fn resumed_bytes(&self) -> u64 {
        self.resumed.as_ref().map_or(0, |wait| wait.done)
    }

    /// The outcome of a call that has to end, with `done` bytes of it done.
    pub(in crate::sentry) fn pause(&self, done: u64) -> SyscallControl {
        let until = self.resumed.as_ref().and_then(|wait| wait.until);
        let wait = Wait::new(WaitReason::Nothing, until);
        SyscallControl::Wait(Wait { done, woken: true, ..wait })
    }

    /// Whether a signal of the host, or one that was sent before, ends the first process.
    fn is_ended_by_signal(&self) -> bool {
        let Some(console) = &self.console else { return false };
        self.state.is_dying(FIRST, console.pending_signals())
    }

    /// Whether the caller lets the call continue, polled at intervals.
    fn is_wanted(&mut self) -> bool {
        if self.budget.polled.elapsed() < POLL_INTERVAL {
            return true;
        }
        self.budget.polled = Instant::now();
        self.streams.proceeds()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use afresh_egress::EgressPolicy;
    use afresh_files::{Access, Budget, Node, Tree};

    use super::*;
    use crate::sentry::console::{Console, OutputFailure, RunControl};
    use crate::sentry::kernel::fd_table::{Description, FileObject};
    use crate::sentry::kernel::signals::SignalInfo;
    use crate::sentry::kernel::state::Kernel;
    use crate::sentry::mm::layout::Layout;
    use crate::sentry::syscalls::stream_write::StreamWrite;
    use crate::sentry::tty::terminals::{Terminal, TerminalEnd};

    fn sentry() -> Sentry {
        let tree = Tree::new(Budget::default());
        let state = Kernel::new(Layout::new(1 << 20), tree, None, Vec::new());
        Sentry::new(Arc::new(state), 0, EgressPolicy::default())
    }

    #[test]
    fn a_call_looks_after_so_many_steps_and_ends_at_its_deadline() {
        let mut sentry = sentry();
        for _ in 0..4 * STEPS_PER_LOOK {
            assert!(!sentry.is_spent(1));
        }
        assert_eq!(sentry.budget.looks, 4);
        sentry.deadline = Some(Instant::now());
        assert!(!sentry.is_spent(STEPS_PER_LOOK - 1), "it has not looked");
        assert!(
            sentry.is_spent(1) && matches!(sentry.spend(usize::MAX), Err(SyscallError::Paused))
        );
        let SyscallControl::Wait(wait) = sentry.pause(7) else { unreachable!() };
        assert_eq!((wait.done, wait.woken), (7, true));
    }

    #[test]
    fn a_call_ends_for_a_signal_that_ends_the_guest() {
        let mut sentry = sentry();
        let control = RunControl::new().unwrap();
        let console =
            Console::new(Some(control.clone()), None, OutputFailure::default(), Tree::ROOT);
        sentry.console = Some(console);
        assert!(!sentry.is_spent(STEPS_PER_LOOK));
        // Its default action is to do nothing.
        control.signal(libc::SIGWINCH);
        assert!(!sentry.is_spent(STEPS_PER_LOOK));
        control.signal(libc::SIGTERM);
        assert!(sentry.is_spent(STEPS_PER_LOOK));
        // It is pending in the guest then.
        sentry.attend();
        assert!(sentry.is_spent(STEPS_PER_LOOK));
        sentry.change().current_mut().threads.current_mut().blocked = u64::MAX;
        assert!(!sentry.is_spent(STEPS_PER_LOOK), "its handler comes later");
        sentry.change().send(None, SignalInfo::new(libc::SIGKILL as u8, 0, [0; 2], 0));
        sentry.change().current_mut().threads.current_mut().blocked = 0;
        assert!(sentry.is_spent(STEPS_PER_LOOK));
    }

    #[test]
    fn a_large_write_to_a_terminal_ends_at_the_deadline_and_continues_after_its_bytes() {
        let mut sentry = sentry();
        let state = sentry.change();
        let open = state.tree.open(Tree::ROOT, Access::reading()).unwrap();
        let terminal = Terminal::new(Node(7));
        state.terminals.add(0, Terminal { group: FIRST, ..terminal });
        let end = TerminalEnd { id: Some(0), master: true, hung: false, open };
        let object = FileObject::Terminal(end);
        let number = state.table.add(Description::new(object, libc::O_RDWR), false).ok().unwrap();
        // Each byte is a signal to the group.
        let bytes = vec![3; 1 << 20];
        let written = StreamWrite::whole(&bytes);
        sentry.deadline = Some(Instant::now());
        let outcome = sentry.put_shown(number.into(), &written);
        let Ok(SyscallControl::Wait(wait)) = outcome else { panic!("{outcome:?}") };
        assert!(wait.woken && (1..1 << 14).contains(&wait.done), "{wait:?}");
        (sentry.deadline, sentry.resumed) = (None, Some(wait));
        let outcome = sentry.put_shown(number.into(), &written);
        assert!(matches!(outcome, Ok(SyscallControl::Value(0x10_0000))), "{outcome:?}");
        let thread = sentry.state.current().threads.current();
        assert_eq!((thread.pending.set(), thread.pending.came), (1 << (libc::SIGINT - 1), 1));
    }
}
