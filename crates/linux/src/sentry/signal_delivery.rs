//! Signal delivery: the default action, or the frame that a handler returns through.

use crate::platform::{Process, Register, calls};
use crate::sentry::Sentry;
use crate::sentry::abi::{HandlerFrame, RED_ZONE, ReturnedState, StructBuilder, leave};
use crate::sentry::kernel::signals::{
    DefaultAction, KERNEL, SignalAction, SignalInfo, UNTOUCHABLE, bit,
};
use crate::sentry::kernel::streams::End;
use crate::sentry::kernel::threads::{NO_STACK, Wait, WaitReason};
use crate::sentry::mm::user_memory::word_in;
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::syscalls::thread::takes_lock;

/// The outcome of delivering a thread's signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignalDelivery {
    Nothing,
    /// It continues in a handler.
    Handled,
    /// It has stopped for its tracer.
    Stops,
    Ends(End),
}

impl Sentry {
    /// Whether the current thread has a signal to take, and ought to come to the stub for it.
    pub(crate) fn has_signal(&self) -> bool {
        self.state.deliverable(self.state.current().threads.current_id())
    }

    /// Whether the current process has a signal that ends it.
    pub(crate) fn is_dying(&self) -> bool {
        self.has_signal() && self.state.is_dying(self.state.processes.current_id(), 0)
    }

    /// Has the current thread, which waits in the stub, take the signals that it may. `interrupted`
    /// is whether it was in a call that waited.
    pub(crate) fn take_signals(
        &mut self,
        process: &mut Process,
        mut interrupted: bool,
    ) -> SyscallResult<SignalDelivery> {
        if self.is_traced() {
            return self.take_traced_signal(process, interrupted);
        }
        let mut taken = SignalDelivery::Nothing;
        while self.has_signal() {
            let id = self.state.current().threads.current_id();
            let stopping = self.state.stopping();
            let state = self.change();
            let Some(thread) = state.processes.current.threads.get(id) else { break };
            let open = !thread.blocked & !stopping;
            let Some(info) = state.take_signal(open) else { break };
            match self.state.fate(info.signal) {
                DefaultAction::Ignored | DefaultAction::Stops => {}
                DefaultAction::Deadly => {
                    return Ok(SignalDelivery::Ends(End::Signal(info.signal.into())));
                }
                DefaultAction::Handled(action) => {
                    taken = SignalDelivery::Handled;
                    if interrupted {
                        self.break_off(process, &action)?;
                        interrupted = false;
                    }
                    if let Some(end) = self.handle(process, &info, action)?
                        && let Some(end) = self.unhandled(process, info.signal, end)?
                    {
                        return Ok(SignalDelivery::Ends(end));
                    }
                }
            }
        }
        Ok(taken)
    }

    /// The handler of `signal` has no stack. As in Linux that is a fault, for which there may be
    /// another handler, on another stack. How it ends, if so.
    pub(in crate::sentry) fn unhandled(
        &mut self,
        process: &mut Process,
        signal: u8,
        end: End,
    ) -> SyscallResult<Option<End>> {
        const FAULT: u8 = libc::SIGSEGV as u8;
        const FROM_KERNEL: i32 = 0x80;
        match self.state.fate(FAULT) {
            DefaultAction::Handled(action)
                if signal != FAULT
                    && self.state.current().threads.current().blocked & bit(FAULT) == 0 =>
            {
                self.handle(process, &SignalInfo::new(FAULT, FROM_KERNEL, KERNEL, 0), action)
            }
            _ => Ok(Some(end)),
        }
    }

    /// The return value of a call that a signal interrupted: an error, or the call restarts after
    /// the handler.
    pub(in crate::sentry) fn break_off(
        &mut self,
        process: &mut Process,
        action: &SignalAction,
    ) -> SyscallResult<()> {
        let call = process.call();
        let until = self.resumed.as_ref().and_then(|wait| wait.until);
        // A sleep returns the time that is left.
        let left = match call.number {
            libc::SYS_nanosleep => call.args[1],
            libc::SYS_clock_nanosleep if call.args[1] & 1 == 0 => call.args[3],
            _ => 0,
        };
        let mut error = libc::EINTR;
        if let Some(until) = until.filter(|_| left != 0) {
            let nanos = until.saturating_sub(self.now());
            let time =
                StructBuilder::default().word(nanos / 1_000_000_000).word(nanos % 1_000_000_000);
            if !process.write(left, &time.0)? {
                error = libc::EFAULT;
            }
        }
        if matches!(self.resumed, Some(Wait { reason: WaitReason::Fifo(_), .. })) {
            let state = self.change();
            let wait = state.processes.current.threads.current_mut().wait.take();
            state.give_up(wait);
        }
        let timed = until.is_some();
        let again = match call.number {
            libc::SYS_futex | libc::SYS_recvfrom | libc::SYS_accept | libc::SYS_accept4 => !timed,
            libc::SYS_read | libc::SYS_readv | libc::SYS_write | libc::SYS_writev => true,
            libc::SYS_recvmsg | libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_connect => true,
            libc::SYS_recvmmsg | libc::SYS_sendmmsg | libc::SYS_sendfile => true,
            libc::SYS_futex_waitv => true,
            calls::SYS_open | libc::SYS_openat | calls::SYS_creat => true,
            libc::SYS_wait4 | libc::SYS_waitid | libc::SYS_fcntl | libc::SYS_flock => true,
            _ => false,
        };
        // The wait for a lock restarts after every handler, as in Linux. Its timeout is absolute.
        let locks = call.number == libc::SYS_futex && takes_lock(call.args[1]);
        let done = self.resumed_bytes();
        if done > 0 {
            process.set_result(done as i64);
        } else if locks || again && action.has(libc::SA_RESTART) {
            process.rewind();
        } else {
            process.set_result(-i64::from(error));
        }
        Ok(())
    }

    /// An instruction of the current thread's failed.
    pub(crate) fn fault(
        &mut self,
        process: &mut Process,
        signal: i32,
    ) -> SyscallResult<Option<End>> {
        let info = self.fault_info(process, signal as u8);
        let signal = info.signal;
        match self.state.fate(signal) {
            DefaultAction::Handled(action)
                if self.state.current().threads.current().blocked & bit(signal) == 0 =>
            {
                self.handle(process, &info, action)
            }
            _ => Ok(Some(End::Signal(signal.into()))),
        }
    }

    /// The signal of an instruction that failed.
    pub(in crate::sentry) fn fault_info(&self, process: &Process, signal: u8) -> SignalInfo {
        let info = SignalInfo::of_frame(signal, &process.frame_bytes());
        let (layout, at) = (&self.state.layout, info.address());
        // Sparse memory without access has no room within the limit.
        let lost = layout.is_beyond(at) || layout.sparse_at(at).is_some();
        match signal == libc::SIGSEGV as u8 && lost {
            true => SignalInfo::of_address(libc::SIGBUS as u8, libc::BUS_ADRERR, at),
            false => info,
        }
    }

    /// Pushes a frame on the guest's stack, as Linux does, and continues the thread in the handler.
    pub(in crate::sentry) fn handle(
        &mut self,
        process: &mut Process,
        info: &SignalInfo,
        action: SignalAction,
    ) -> SyscallResult<Option<End>> {
        let thread = self.state.current().threads.current();
        let [stack, disabled, len] = thread.signal_stack;
        let pointer = process.register(Register::STACK);
        // Its end belongs to the stack, its beginning does not.
        let holds = |at: u64| at > stack && at - stack <= len;
        let on_it = holds(pointer);
        let enters = action.has(libc::SA_ONSTACK) && disabled & 2 == 0 && !on_it;
        let top = if enters { stack.wrapping_add(len) } else { pointer.wrapping_sub(RED_ZONE) };
        let frame = HandlerFrame {
            info,
            action: &action,
            mask: thread.masked.unwrap_or(thread.blocked),
            stack: thread.signal_stack,
        };
        if !frame.enter(process, top, |at| !(on_it || enters) || holds(at))? {
            return Ok(Some(End::Signal(libc::SIGSEGV)));
        }
        let state = self.change();
        let thread = state.processes.current.threads.current_mut();
        thread.masked = None;
        let own = if action.has(libc::SA_NODEFER) { 0 } else { bit(info.signal) };
        thread.blocked = (thread.blocked | action.mask | own) & !UNTOUCHABLE;
        if action.has(libc::SA_RESETHAND) {
            // Its flags and its mask stay.
            let kept = state.processes.current.handlers.get_mut(&u64::from(info.signal));
            if let Some(kept) = kept {
                kept[..8].fill(0);
            }
            state.spread_action(info.signal.into());
        }
        Ok(None)
    }

    /// `rt_sigreturn(2)`: registers that only the kernel may change stay, whatever the frame has.
    pub(in crate::sentry) fn sys_rt_sigreturn(&mut self, process: &mut Process) -> SyscallResult {
        let ReturnedState { mask, stack } = leave(process)?;
        let thread = self.change().current_mut().threads.current_mut();
        thread.blocked = mask & !UNTOUCHABLE;
        thread.signal_stack = if stack[1] & 2 == 0 { stack } else { NO_STACK };
        Ok(SyscallControl::Resumed)
    }

    /// Waits with other signals blocked until the call is over. Address 0 means no set.
    pub(in crate::sentry) fn mask_in(
        &mut self,
        process: &Process,
        set: u64,
        size: u64,
    ) -> SyscallResult<()> {
        if set == 0 || self.resumed.is_some() {
            return Ok(());
        }
        if size != 8 {
            return Err(rustix::io::Errno::INVAL.into());
        }
        let mask = word_in(process, set)? & !UNTOUCHABLE;
        let thread = self.change().current_mut().threads.current_mut();
        thread.masked = Some(thread.blocked);
        thread.blocked = mask;
        Ok(())
    }

    /// Ends the effect of [`Sentry::mask_in`].
    pub(crate) fn unmask(&mut self) {
        if self.state.current().threads.current().masked.is_some() {
            let thread = self.change().current_mut().threads.current_mut();
            if let Some(mask) = thread.masked.take() {
                thread.blocked = mask;
            }
        }
    }
}
