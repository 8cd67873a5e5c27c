//! Stops of traced threads, their notifications, and the ends of tracers and tracees.

use super::{EVENT_STOP, KILLS, ResumeMode, Trace, TraceStop};
use crate::sentry::kernel::exited_process::ExitedProcess;
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::Wait;

/// Calls whose interrupted result is `ERESTARTNOHAND`, and those with a rest of time, which is
/// `ERESTART_RESTARTBLOCK`.
const RESTART: i64 = -512;
const RESTART_WITHOUT_HANDLER: i64 = -514;
const RESTART_WITH_TIME: i64 = -516;

/// The result that a tracer sees while a call waits.
pub(in crate::sentry) fn interrupted_result(number: i64) -> i64 {
    use crate::platform::calls;
    match number {
        calls::SYS_pause | calls::SYS_select => RESTART_WITHOUT_HANDLER,
        libc::SYS_rt_sigsuspend | libc::SYS_ppoll | libc::SYS_pselect6 => RESTART_WITHOUT_HANDLER,
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep => RESTART_WITH_TIME,
        calls::SYS_poll | libc::SYS_futex => RESTART_WITH_TIME,
        _ => RESTART,
    }
}

/// Whether a result is that of a call which is repeated.
pub(in crate::sentry) fn is_interrupted(result: i64) -> bool {
    matches!(result, RESTART | -513 | RESTART_WITHOUT_HANDLER | RESTART_WITH_TIME)
}

impl Kernel {
    /// The trace of the current thread.
    pub(in crate::sentry) fn own_trace(&self) -> Option<&Trace> {
        self.processes.tracing.get(self.processes.current.threads.current_id())
    }

    /// As [`Self::own_trace`], to be changed.
    pub(in crate::sentry) fn own_trace_mut(&mut self) -> Option<&mut Trace> {
        let id = self.processes.current.threads.current_id();
        self.processes.tracing.get_mut(id)
    }

    /// The wait of a thread of any process.
    pub(in crate::sentry) fn wait_of(&self, process: u32, thread: u32) -> Option<&Wait> {
        self.processes.get(process)?.threads.get(thread)?.wait.as_ref()
    }

    /// Stops a traced thread, and notifies its tracer.
    pub(in crate::sentry) fn stop_tracee(&mut self, thread: u32, stop: TraceStop) {
        let Some(trace) = self.processes.tracing.get_mut(thread) else { return };
        let (tracer, process) = (trace.tracer, trace.process);
        let stop = match stop {
            TraceStop::Event(event, message) if event != EVENT_STOP => {
                trace.message = message;
                TraceStop::Event(event, message)
            }
            TraceStop::Event(..) => {
                trace.take_trap();
                let by = self.processes.info(process).and_then(|info| info.stopped);
                TraceStop::Event(EVENT_STOP, by.unwrap_or(libc::SIGTRAP as u8).into())
            }
            stop => stop,
        };
        let Some(trace) = self.processes.tracing.get_mut(thread) else { return };
        let code = trace.code(&stop) & 0x7f;
        (trace.stop, trace.reported, trace.listens) = (Some(stop), false, false);
        if self.processes.get(tracer).is_some_and(|tracer| !tracer.ignores_stops()) {
            let [_, user] = self.sender(process);
            let (signal, code) = (libc::SIGCHLD as u8, (libc::CLD_TRAPPED, code));
            let info = SignalInfo::new(signal, code.0, [thread, user], code.1.into());
            self.send_to(tracer, None, info);
        }
    }

    /// Continues a thread from its stop.
    pub(in crate::sentry) fn resume_tracee(&mut self, thread: u32, mode: ResumeMode) {
        let Some(trace) = self.processes.tracing.get_mut(thread) else { return };
        let process = trace.process;
        let was = trace.stop.take();
        (trace.mode, trace.listens) = (mode, false);
        if matches!(was, Some(TraceStop::Group(_) | TraceStop::Event(EVENT_STOP, _)))
            && let Some(info) = self.processes.info_mut(process)
        {
            info.stopped = None;
        }
    }

    /// A traced thread of the current process takes a signal that stops its process: all of its
    /// traced threads stop.
    pub(in crate::sentry) fn stop_traced_process(&mut self, signal: u8) {
        let process = self.processes.current_id();
        let parent = self.processes.current.info.parent;
        let threads = self.processes.tracing.threads_of(process);
        let traced_by_parent = threads
            .iter()
            .any(|thread| self.processes.tracing.get(*thread).map(|t| t.tracer) == Some(parent));
        if traced_by_parent {
            self.processes.current.info.stopped = Some(signal);
        } else {
            self.set_stopped(process, Some(signal));
        }
        for thread in threads {
            if !self.processes.tracing.is_stopped(thread) {
                self.stop_tracee(thread, TraceStop::Group(signal));
            }
        }
    }

    /// A stopped process continues: tracers that have seized its threads get to know.
    pub(in crate::sentry) fn note_continued(&mut self, process: u32) {
        for thread in self.processes.tracing.threads_of(process) {
            let Some(trace) = self.processes.tracing.get_mut(thread) else { continue };
            if !trace.seized {
                continue;
            }
            if trace.listens {
                self.stop_tracee(thread, TraceStop::Event(EVENT_STOP, 0));
            } else {
                trace.plan(TraceStop::Event(EVENT_STOP, u64::from(libc::SIGTRAP as u32)));
            }
        }
    }

    /// A thread ends: its tracer learns of it, unless it waits for it as a parent.
    pub(in crate::sentry) fn drop_tracee(&mut self, thread: u32, status: i32) {
        let Some(trace) = self.processes.tracing.remove(thread) else { return };
        let (tracer, process) = (trace.tracer, trace.process);
        let Some(info) = self.processes.info(process) else { return };
        let (group, is_child) = (info.group, info.parent == tracer && process == thread);
        if tracer == 0 || is_child || !self.processes.lives(tracer) {
            return;
        }
        let ended = ExitedProcess { parent: tracer, group, status, spent: 0 };
        self.processes.tracing.keep_end(thread, ended);
        if process == thread {
            let [_, user] = self.sender(process);
            let info = SignalInfo::new(
                libc::SIGCHLD as u8,
                libc::CLD_EXITED,
                [thread, user],
                status as u64,
            );
            self.send_to(tracer, None, info);
        }
    }

    /// The current thread runs another program in its process, whose only thread it is then, with
    /// the number `id`.
    pub(in crate::sentry) fn keep_own_trace(&mut self, id: u32) {
        if self.processes.tracing.is_empty() {
            return;
        }
        let own = self.processes.current.threads.current_id();
        let trace = self.processes.tracing.remove(own);
        for thread in self.processes.tracing.threads_of(id) {
            self.drop_tracee(thread, 0);
        }
        if let Some(trace) = trace {
            self.processes.tracing.insert(id, trace);
        }
    }

    /// The current thread has made a process or a thread, as `event` has it: its tracer may trace
    /// that as well.
    pub(in crate::sentry) fn trace_new(&mut self, event: u8, process: u32, thread: u32) {
        let Some(own) = self.own_trace_mut().filter(|own| own.options & 1 << event != 0) else {
            return;
        };
        let mut trace = Trace::new(own.tracer, process, own.options, own.seized);
        own.plan(TraceStop::Event(event, thread.into()));
        if trace.seized {
            trace.plan(TraceStop::Event(EVENT_STOP, u64::from(libc::SIGTRAP as u32)));
        } else if let Some(found) = self.processes.get_mut(process)
            && let Some(found) = found.threads.get_mut(thread)
        {
            found.pending.add(SignalInfo::new(libc::SIGSTOP as u8, 0, KERNEL, 0));
        }
        self.processes.tracing.insert(thread, trace);
    }

    /// The current thread has made no process `child` after all: its tracer learns of none.
    pub(in crate::sentry::kernel) fn forget_traced_child(&mut self, child: u32) {
        for thread in self.processes.tracing.threads_of(child) {
            self.processes.tracing.remove(thread);
        }
        if let Some(own) = self.own_trace_mut() {
            own.forget_child(child);
        }
    }

    /// A tracer ends: its tracees continue by themselves, or are killed.
    pub(in crate::sentry) fn drop_tracer(&mut self, tracer: u32) {
        let own = self.processes.tracing.tracees_of(tracer);
        let own: Vec<_> = own.map(|(id, trace)| (id, trace.process, trace.options)).collect();
        for (thread, process, options) in own {
            self.processes.tracing.release(thread);
            if options & KILLS != 0 {
                let info = SignalInfo::new(libc::SIGKILL as u8, 0, KERNEL, 0);
                self.send_to(process, None, info);
            }
        }
        self.processes.tracing.ended.retain(|_, ended| ended.parent != tracer);
    }
}
