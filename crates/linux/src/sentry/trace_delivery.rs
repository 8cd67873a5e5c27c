//! Stops of traced threads: at calls, signals, events and steps.
//!
//! A stop is made while the thread is in the stub, so that its tracer finds all of its registers.
//!
//! Promises: the tracer sees every call and every signal of its tracee first, except SIGKILL. May
//! break it: a way to continue a thread that passes by `Guest::go_on`.

use crate::platform::{Call, Process};
use crate::sentry::Sentry;
use crate::sentry::abi::set_step;
use crate::sentry::kernel::signals::{DefaultAction, KERNEL, SignalInfo, bit};
use crate::sentry::kernel::streams::End;
use crate::sentry::kernel::tracing::{
    EVENT_EXEC, EVENT_EXIT, EVENT_VFORK_DONE, ResumeMode, TRACES_EXEC, TRACES_EXIT,
    TRACES_VFORK_DONE, TraceStop, TracedCall,
};
use crate::sentry::result::SyscallResult;
use crate::sentry::signal_delivery::SignalDelivery;

/// `TRAP_TRACE`: a step.
const STEP: i32 = 2;

/// The effect of a tracer on a call of its tracee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TracedEntry {
    /// It is served.
    Serves,
    /// Its thread has stopped.
    Stops,
    /// The tracer has removed it; its result.
    Skips(i64),
}

impl Sentry {
    /// Whether the current thread is traced.
    pub(crate) fn is_traced(&self) -> bool {
        !self.state.processes.tracing.is_empty() && self.state.own_trace().is_some()
    }

    /// Whether a stop is ahead of the current thread.
    pub(crate) fn has_due_stop(&self) -> bool {
        self.state.own_trace().is_some_and(|trace| trace.is_due() || trace.stop.is_some())
    }

    /// Whether the tracer delivers a signal.
    pub(crate) fn has_injected(&self) -> bool {
        self.state.own_trace().is_some_and(|trace| trace.injected.is_some())
    }

    /// Whether the current thread makes a call now that was held.
    pub(crate) fn takes_held_call(&mut self) -> bool {
        let id = self.state.current().threads.current_id();
        !self.state.processes.tracing.is_empty()
            && self.state.processes.tracing.holds_call(id)
            && self.change().processes.tracing.take_held(id)
    }

    /// Removes the trap flag that a step has set.
    pub(crate) fn end_step(&mut self, process: &mut Process) {
        if self.state.own_trace().is_some_and(|trace| trace.stepping) {
            set_step(process, false);
            if let Some(trace) = self.change().own_trace_mut() {
                trace.stepping = false;
            }
        }
    }

    /// Sets the trap flag if the tracer has ordered a step.
    pub(crate) fn begin_step(&mut self, process: &mut Process) {
        if self.state.own_trace().is_some_and(|trace| trace.mode == ResumeMode::Steps) {
            set_step(process, true);
            if let Some(trace) = self.change().own_trace_mut() {
                trace.stepping = true;
            }
        }
    }

    /// The current thread makes a call, and is in the stub.
    pub(crate) fn enter_traced(&mut self, process: &mut Process, call: &mut Call) -> TracedEntry {
        self.end_step(process);
        if self.resumed.is_some() {
            return TracedEntry::Serves;
        }
        let id = self.state.current().threads.current_id();
        let state = self.change();
        let Some(trace) = state.own_trace_mut() else { return TracedEntry::Serves };
        match trace.call {
            None => {
                let number = call.number as i32;
                let refused = -i64::from(libc::ENOSYS);
                trace.call = Some(TracedCall { number, result: refused });
                trace.number = number;
                if trace.mode == ResumeMode::ToCall {
                    trace.held = true;
                    state.stop_tracee(id, TraceStop::Entry);
                    return TracedEntry::Stops;
                }
            }
            Some(TracedCall { number, result }) if number < 0 => return TracedEntry::Skips(result),
            // The tracer may have changed it.
            Some(_) => *call = process.call(),
        }
        let ends = matches!(call.number, libc::SYS_exit | libc::SYS_exit_group);
        if ends && trace.options & TRACES_EXIT != 0 && !trace.exits {
            (trace.exits, trace.held) = (true, true);
            let status = (call.args[0] & 0xff) << 8;
            state.stop_tracee(id, TraceStop::Event(EVENT_EXIT, status));
            return TracedEntry::Stops;
        }
        TracedEntry::Serves
    }

    /// The call of the current thread is over, if it was in one.
    pub(crate) fn leave_traced(&mut self) {
        let Some(trace) = self.change().own_trace_mut() else { return };
        if trace.is_due() || trace.call.take().is_none() {
            return;
        }
        match trace.mode {
            ResumeMode::ToCall => trace.plan(TraceStop::Exit),
            ResumeMode::Steps => trace.plan(TraceStop::Signal(step_info())),
            ResumeMode::Runs => {}
        }
    }

    /// Stops the current thread if that is due. Returns whether it is stopped.
    pub(crate) fn stop_if_due(&mut self) -> bool {
        let id = self.state.current().threads.current_id();
        if !self.has_due_stop() {
            return false;
        }
        let state = self.change();
        if let Some(trace) = state.own_trace_mut()
            && trace.stop.is_none()
            && let Some(stop) = trace.take_due()
        {
            state.stop_tracee(id, stop);
        }
        true
    }

    /// The current thread has made a process or a thread.
    pub(in crate::sentry) fn note_new(&mut self, event: u8, process: u32, thread: u32) {
        if self.is_traced() {
            self.change().trace_new(event, process, thread);
        }
    }

    /// The child that the current thread has lent its memory has its own now.
    pub(in crate::sentry) fn note_grown(&mut self, child: u32) {
        if self.state.own_trace().is_some_and(|trace| trace.options & TRACES_VFORK_DONE != 0)
            && let Some(trace) = self.change().own_trace_mut()
        {
            trace.plan(TraceStop::Event(EVENT_VFORK_DONE, child.into()));
        }
    }

    /// The current process runs another program.
    pub(crate) fn note_traced_exec(&mut self, thread: u32) {
        let Some(trace) = self.change().own_trace_mut() else { return };
        if trace.options & TRACES_EXEC != 0 {
            trace.plan(TraceStop::Event(EVENT_EXEC, thread.into()));
        } else if !trace.seized {
            let own = self.state.sender(self.state.processes.current_id());
            let info = SignalInfo::new(libc::SIGTRAP as u8, 0, own, 0);
            let thread = self.state.current().threads.current_id();
            self.change().send(Some(thread), info);
        }
    }

    /// An instruction of the current thread has failed, or a step is made: it stops.
    pub(crate) fn fault_traced(&mut self, process: &mut Process, signal: i32) {
        self.end_step(process);
        let info = self.fault_info(process, signal as u8);
        let id = self.state.current().threads.current_id();
        let ignored = self.state.fate(info.signal) == DefaultAction::Ignored;
        let state = self.change();
        let thread = state.processes.current.threads.current_mut();
        // As in Linux a fault is neither blocked nor ignored.
        if thread.blocked & bit(info.signal) != 0 || ignored {
            thread.blocked &= !bit(info.signal);
            state.processes.current.handlers.remove(&info.signal.into());
        }
        if let Some(trace) = state.own_trace_mut() {
            trace.number = -1;
        }
        state.stop_tracee(id, TraceStop::Signal(info));
    }

    /// As [`Sentry::take_signals`], of a traced thread: at most one signal, which its tracer sees
    /// first.
    pub(in crate::sentry) fn take_traced_signal(
        &mut self,
        process: &mut Process,
        interrupted: bool,
    ) -> SyscallResult<SignalDelivery> {
        let id = self.state.current().threads.current_id();
        let state = self.change();
        let current = &mut state.processes.current;
        let kill = bit(libc::SIGKILL as u8);
        let own = current.threads.current_mut().pending.take(kill);
        if own.or_else(|| current.pending.take(kill)).is_some() {
            return Ok(SignalDelivery::Ends(End::Signal(libc::SIGKILL)));
        }
        let Some(trace) = state.own_trace_mut() else { return Ok(SignalDelivery::Nothing) };
        if let Some(info) = trace.injected.take() {
            return self.deliver_injected(process, info, interrupted);
        }
        if interrupted && trace.mode == ResumeMode::ToCall && trace.call.take().is_some() {
            state.stop_tracee(id, TraceStop::Exit);
            return Ok(SignalDelivery::Stops);
        }
        trace.call = None;
        if !interrupted {
            trace.number = -1;
        }
        let current = &mut state.processes.current;
        let thread = current.threads.current_mut();
        let open = !thread.blocked;
        let taken = thread.pending.take(open).or_else(|| current.pending.take(open));
        let Some(info) = taken else { return Ok(SignalDelivery::Nothing) };
        state.stop_tracee(id, TraceStop::Signal(info));
        Ok(SignalDelivery::Stops)
    }

    /// Delivers the signal that the tracer has chosen.
    fn deliver_injected(
        &mut self,
        process: &mut Process,
        info: SignalInfo,
        interrupted: bool,
    ) -> SyscallResult<SignalDelivery> {
        let id = self.state.current().threads.current_id();
        let fate = self.state.fate(info.signal);
        let state = self.change();
        let thread = state.processes.current.threads.current_mut();
        if thread.blocked & bit(info.signal) != 0 {
            thread.pending.add(info);
            return Ok(SignalDelivery::Nothing);
        }
        match fate {
            DefaultAction::Ignored => {
                // The call goes back to its wait, which its tracer sees as another call.
                let trace = state.own_trace_mut().filter(|trace| trace.mode == ResumeMode::ToCall);
                let Some(trace) = trace.filter(|_| interrupted) else {
                    return Ok(SignalDelivery::Nothing);
                };
                let (number, result) = (trace.number, -i64::from(libc::ENOSYS));
                trace.call = Some(TracedCall { number, result });
                state.stop_tracee(id, TraceStop::Entry);
                Ok(SignalDelivery::Stops)
            }
            DefaultAction::Stops => {
                state.stop_traced_process(info.signal);
                Ok(SignalDelivery::Stops)
            }
            DefaultAction::Deadly => Ok(SignalDelivery::Ends(End::Signal(info.signal.into()))),
            DefaultAction::Handled(action) => {
                if interrupted {
                    self.break_off(process, &action)?;
                }
                if let Some(end) = self.handle(process, &info, action)?
                    && let Some(end) = self.unhandled(process, info.signal, end)?
                {
                    return Ok(SignalDelivery::Ends(end));
                }
                if let Some(trace) = self.change().own_trace_mut() {
                    trace.number = -1;
                    if trace.mode == ResumeMode::Steps {
                        trace.plan(TraceStop::Signal(step_info()));
                    }
                }
                Ok(SignalDelivery::Handled)
            }
        }
    }
}

fn step_info() -> SignalInfo {
    SignalInfo::new(libc::SIGTRAP as u8, STEP, KERNEL, 0)
}
