//! Tracers and tracees (`ptrace`): plain data. Each traced thread has an entry, with its tracer,
//! the way it was resumed, and the stop that it is in.
//!
//! All threads of a guest stand still while a call is served. So a stop is a mark in the entry: the
//! scheduler passes over a thread that has one, and its registers are where those of any waiting
//! thread are.
//!
//! Promises: an entry is of a thread that lives; its tracer is another process that lives, or 0
//! after its end. A snapshot has all entries. May break it: an end of a thread or process that
//! does not call [`Kernel::drop_tracee`] or [`Kernel::drop_tracer`].

mod stops;

pub(in crate::sentry) use stops::{interrupted_result, is_interrupted};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::exited_process::ExitedProcess;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::threads::THREADS;

// Options of a tracer. Those for an event from 1 on are the bits of its number.
pub(in crate::sentry) const TRACES_CALLS: u32 = 1;
pub(in crate::sentry) const TRACES_EXEC: u32 = 1 << 4;
pub(in crate::sentry) const TRACES_VFORK_DONE: u32 = 1 << 5;
pub(in crate::sentry) const TRACES_EXIT: u32 = 1 << 6;
/// `PTRACE_O_EXITKILL`.
pub(in crate::sentry) const KILLS: u32 = 1 << 20;
/// All of them, and `PTRACE_O_TRACESECCOMP`: no guest has a filter, so that event never comes.
pub(in crate::sentry) const ALL_OPTIONS: u32 = 0xff | KILLS;

// Events.
pub(in crate::sentry) const EVENT_FORK: u8 = 1;
pub(in crate::sentry) const EVENT_VFORK: u8 = 2;
pub(in crate::sentry) const EVENT_CLONE: u8 = 3;
pub(in crate::sentry) const EVENT_EXEC: u8 = 4;
pub(in crate::sentry) const EVENT_VFORK_DONE: u8 = 5;
pub(in crate::sentry) const EVENT_EXIT: u8 = 6;
pub(in crate::sentry) const EVENT_STOP: u8 = 128;

/// Stops that a thread may have ahead of it.
const MAX_DUE: usize = 8;
/// Debug registers: 0 to 3, 6 and 7.
pub(in crate::sentry) const DEBUG_REGISTERS: usize = 8;

/// The way a thread was resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) enum ResumeMode {
    /// Until a signal or an event.
    Runs,
    /// Until its next call begins or ends as well.
    ToCall,
    /// For one instruction.
    Steps,
}

/// A stop of a traced thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) enum TraceStop {
    /// A call begins.
    Entry,
    /// A call ends.
    Exit,
    /// A signal is about to be delivered.
    Signal(SignalInfo),
    /// An event; with its message.
    Event(u8, u64),
    /// Its process is stopped by this signal.
    Group(u8),
}

/// The call that a thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct TracedCall {
    /// Its number, which the tracer may change; negative for none.
    pub(in crate::sentry) number: i32,
    /// Its result if it is skipped.
    pub(in crate::sentry) result: i64,
}

/// The trace of one thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct Trace {
    /// PID of the tracer. It is 0 if the tracer has ended while a call was held at its entry.
    pub(in crate::sentry) tracer: u32,
    /// PID of the thread.
    pub(in crate::sentry) process: u32,
    pub(in crate::sentry) options: u32,
    /// Whether it was seized, not attached.
    pub(in crate::sentry) seized: bool,
    pub(in crate::sentry) mode: ResumeMode,
    /// The stop that it is in.
    pub(in crate::sentry) stop: Option<TraceStop>,
    /// Whether the tracer has waited for that.
    pub(in crate::sentry) reported: bool,
    /// Whether it waits for the end of a group stop (`PTRACE_LISTEN`).
    pub(in crate::sentry) listens: bool,
    /// Stops that come before its next instruction.
    due: Vec<TraceStop>,
    pub(in crate::sentry) call: Option<TracedCall>,
    /// The number of its last call, as `orig_rax`.
    pub(in crate::sentry) number: i32,
    /// Whether its call has been held at its entry, and is made when it continues.
    pub(in crate::sentry) held: bool,
    /// Whether the event of its end was reported.
    pub(in crate::sentry) exits: bool,
    /// Whether its trap flag is the tracer's.
    pub(in crate::sentry) stepping: bool,
    /// The signal that the tracer delivers.
    pub(in crate::sentry) injected: Option<SignalInfo>,
    pub(in crate::sentry) message: u64,
    pub(in crate::sentry) debug: [u64; DEBUG_REGISTERS],
}

impl Trace {
    pub(in crate::sentry) fn new(tracer: u32, process: u32, options: u32, seized: bool) -> Self {
        Self {
            tracer,
            process,
            options,
            seized,
            mode: ResumeMode::Runs,
            stop: None,
            reported: false,
            listens: false,
            due: Vec::new(),
            call: None,
            number: -1,
            held: false,
            exits: false,
            stepping: false,
            injected: None,
            message: 0,
            debug: [0; DEBUG_REGISTERS],
        }
    }

    /// Adds a stop, unless the same is due.
    pub(in crate::sentry) fn plan(&mut self, stop: TraceStop) {
        if self.due.len() < MAX_DUE && !self.due.contains(&stop) {
            self.due.push(stop);
        }
    }

    pub(in crate::sentry) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// The next stop that is due.
    pub(in crate::sentry) fn take_due(&mut self) -> Option<TraceStop> {
        if self.due.is_empty() { None } else { Some(self.due.remove(0)) }
    }

    /// Drops the event that announces a process which was not made after all.
    fn forget_child(&mut self, child: u32) {
        let is_of = |stop: &TraceStop| match stop {
            TraceStop::Event(EVENT_FORK | EVENT_VFORK | EVENT_CLONE, of) => *of == u64::from(child),
            _ => false,
        };
        self.due.retain(|stop| !is_of(stop));
    }

    /// Whether a trap of `PTRACE_INTERRUPT`, or of the end of a group stop, is due.
    pub(in crate::sentry) fn take_trap(&mut self) -> bool {
        let before = self.due.len();
        self.due.retain(|stop| !matches!(stop, TraceStop::Event(EVENT_STOP, _)));
        self.due.len() < before
    }

    /// The signal of a stop, with the event in the second byte.
    pub(in crate::sentry) fn code(&self, stop: &TraceStop) -> u32 {
        const TRAP: u32 = libc::SIGTRAP as u32;
        match stop {
            TraceStop::Entry | TraceStop::Exit if self.options & TRACES_CALLS != 0 => TRAP | 0x80,
            TraceStop::Entry | TraceStop::Exit => TRAP,
            TraceStop::Signal(info) => info.signal.into(),
            TraceStop::Event(EVENT_STOP, signal) => *signal as u32 & 0x7f | 0x8000,
            TraceStop::Event(event, _) => TRAP | u32::from(*event) << 8,
            TraceStop::Group(signal) if self.seized => u32::from(*signal) | 0x8000,
            TraceStop::Group(signal) => (*signal).into(),
        }
    }

    fn is_sound(&self) -> bool {
        let sound = |stop: &TraceStop| match stop {
            TraceStop::Signal(info) => (1..=64).contains(&info.signal),
            TraceStop::Event(EVENT_STOP, signal) => (1..=64).contains(signal),
            TraceStop::Group(signal) => (1..=64).contains(signal),
            TraceStop::Event(event, _) => (EVENT_FORK..=EVENT_EXIT).contains(event),
            TraceStop::Entry | TraceStop::Exit => true,
        };
        let info = self.injected.iter().all(|info| (1..=64).contains(&info.signal));
        self.options & !ALL_OPTIONS == 0
            && self.due.len() <= MAX_DUE
            && self.due.iter().chain(&self.stop).all(sound)
            && info
    }
}

/// All traces of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tracing {
    /// By the numbers of threads.
    traces: BTreeMap<u32, Trace>,
    /// Ended threads, and ended processes that the tracer is no parent of, until it waits for them.
    pub(in crate::sentry) ended: BTreeMap<u32, ExitedProcess>,
}

impl Tracing {
    pub(crate) fn is_empty(&self) -> bool {
        self.traces.is_empty() && self.ended.is_empty()
    }

    /// The trace of a thread that has a tracer.
    pub(in crate::sentry) fn get(&self, thread: u32) -> Option<&Trace> {
        self.traces.get(&thread).filter(|trace| trace.tracer != 0)
    }

    /// As [`Self::get`], to be changed.
    pub(in crate::sentry) fn get_mut(&mut self, thread: u32) -> Option<&mut Trace> {
        self.traces.get_mut(&thread).filter(|trace| trace.tracer != 0)
    }

    pub(in crate::sentry) fn insert(&mut self, thread: u32, trace: Trace) {
        self.traces.insert(thread, trace);
    }

    pub(in crate::sentry) fn remove(&mut self, thread: u32) -> Option<Trace> {
        self.traces.remove(&thread)
    }

    /// Whether a thread is in a stop.
    pub(crate) fn is_stopped(&self, thread: u32) -> bool {
        !self.traces.is_empty()
            && self.traces.get(&thread).is_some_and(|trace| trace.stop.is_some())
    }

    /// Whether a thread of a process is traced.
    pub(in crate::sentry) fn traces_process(&self, process: u32) -> bool {
        self.traces.values().any(|trace| trace.process == process && trace.tracer != 0)
    }

    /// The traced threads of a process.
    pub(in crate::sentry) fn threads_of(&self, process: u32) -> Vec<u32> {
        let of = |(_, trace): &(&u32, &Trace)| trace.process == process;
        self.traces.iter().filter(of).map(|(thread, _)| *thread).collect()
    }

    /// The threads that a process traces.
    pub(in crate::sentry) fn tracees_of(
        &self,
        tracer: u32,
    ) -> impl Iterator<Item = (u32, &Trace)> + '_ {
        let own = self.traces.iter().map(|(thread, trace)| (*thread, trace));
        own.filter(move |(_, trace)| trace.tracer == tracer && tracer != 0)
    }

    /// Whether the call of a thread was held at its entry, and is to be made now. A trace without a
    /// tracer ends with it.
    pub(in crate::sentry) fn take_held(&mut self, thread: u32) -> bool {
        let Some(trace) = self.traces.get_mut(&thread) else { return false };
        let held = std::mem::take(&mut trace.held);
        if trace.tracer == 0 {
            self.traces.remove(&thread);
        }
        held
    }

    /// Whether a call of a thread is held.
    pub(in crate::sentry) fn holds_call(&self, thread: u32) -> bool {
        self.traces.get(&thread).is_some_and(|trace| trace.held)
    }

    /// Ends the trace of a thread, which continues by itself.
    pub(in crate::sentry) fn release(&mut self, thread: u32) {
        let Some(trace) = self.traces.get_mut(&thread) else { return };
        if trace.held {
            (trace.tracer, trace.stop, trace.mode) = (0, None, ResumeMode::Runs);
            trace.due.clear();
        } else {
            self.traces.remove(&thread);
        }
    }

    /// A process is about to be killed: none of its threads stays in a stop.
    pub(in crate::sentry) fn end_stops(&mut self, process: u32) {
        for trace in self.traces.values_mut().filter(|trace| trace.process == process) {
            (trace.stop, trace.held) = (None, false);
            trace.due.clear();
        }
    }

    /// Keeps an end for its tracer, if there is room.
    pub(in crate::sentry) fn keep_end(&mut self, thread: u32, ended: ExitedProcess) {
        if self.ended.len() < THREADS {
            self.ended.insert(thread, ended);
        }
    }

    /// Whether a guest could have these. `home` is the process of a thread.
    pub(in crate::sentry) fn is_sound(
        &self,
        home: impl Fn(u32) -> Option<u32>,
        lives: impl Fn(u32) -> bool,
        next: u32,
    ) -> bool {
        let traces = self.traces.iter().all(|(thread, trace)| {
            let tracer = trace.tracer;
            home(*thread) == Some(trace.process)
                && (tracer == 0 || lives(tracer) && tracer != trace.process)
                && trace.is_sound()
        });
        let ended = self.ended.iter();
        traces
            && self.ended.len() <= THREADS
            && ended.into_iter().all(|(id, ended)| *id < next && lives(ended.parent))
    }
}
