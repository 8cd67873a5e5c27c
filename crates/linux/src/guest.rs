//! A guest: processes, their sentry, and the changes to their memory maps.
//!
//! Its threads take turns in the one thread that its process has: when one waits, when it gives
//! way, and when others are ready and its time is over.

mod caller_input;
mod caller_polls;
mod cpu_budget;
mod scheduler;
mod sparse_memory;
mod time_slice;

use std::time::{Duration, Instant};

use crate::frozen_state::IdleWait;
use crate::guest::cpu_budget::CpuBudget;
use crate::guest::scheduler::NextThread;
use crate::guest::time_slice::TimeSlice;
use crate::http;
use crate::limits::POLL_INTERVAL;
use crate::platform::{
    Call, Continuation, Event, PlatformError, StubCommands, Trap, is_taken_for_restart,
};
use crate::sentry::{
    Change, End, InputSource, ReadySets, Sentry, SignalDelivery, SyscallControl, TracedEntry,
};
use crate::start_turn::StartTurn;
use crate::subprocess::Subprocess;
use crate::subprocesses::ParkedSubprocesses;

/// Why a guest stopped running.
#[derive(Debug)]
pub(crate) enum StopReason {
    /// It waits for the caller, in this way.
    Idle(IdleWait),
    /// It ended; [`Trap`] shows whether its process waits in the stub.
    End(End, Trap),
    /// Time is up.
    Late,
    /// It has used its CPU time.
    CpuTime,
    /// The caller ended the call.
    Unheard,
}

/// The thread that continues.
enum NextStep {
    /// A thread, which runs.
    Runs,
    /// A thread that has waited: this call of its is served again.
    Calls(Call),
    Halts(StopReason),
}

/// Processes with a sentry.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The host process that runs the current process.
    pub(crate) body: Subprocess,
    pub(crate) sentry: Sentry,
    pub(crate) others: ParkedSubprocesses,
    /// When the turn of the thread that runs has begun.
    turn: Instant,
    /// Its time slice.
    slice: TimeSlice,
    /// Duration of the search for it.
    search: Duration,
    /// The last time that the caller was polled.
    asked: Instant,
    /// When an answered call ends though a thread could run, if it does.
    pub(crate) rests: Option<Instant>,
    /// Interval of polls of a caller that receives output.
    pub(crate) poll: Duration,
    /// CPU time that the present call may use.
    cpu: CpuBudget,
    /// Maximum sleep before it counts as a server that waits for its first caller, though other
    /// threads work.
    patience: Duration,
}

/// Time in which the starter of a server notices that it is up.
const START_TIMEOUT: Duration = Duration::from_secs(2);

impl Guest {
    /// A guest whose first process runs in `body`. The other processes are as `others` has them.
    pub(crate) fn new(body: Subprocess, sentry: Sentry, others: ParkedSubprocesses) -> Self {
        let (now, rests) = (Instant::now(), None);
        let (poll, patience) = (POLL_INTERVAL, START_TIMEOUT);
        let (search, cpu) = (Duration::ZERO, CpuBudget::default());
        let slice = TimeSlice::new(None);
        Self {
            body,
            sentry,
            others,
            turn: now,
            slice,
            search,
            asked: now,
            rests,
            poll,
            cpu,
            patience,
        }
    }

    /// Runs the guest until it waits for the caller, ends, or `deadline` is there, or its caller
    /// ends the call. Files have all that was written to their mappings then.
    pub(crate) fn run(&mut self, deadline: Instant) -> Result<StopReason, PlatformError> {
        let stopped = self.run_until_halt(deadline);
        self.body.process.bill();
        let halt = stopped?;
        self.sentry.publish_lasting()?;
        Ok(halt)
    }

    fn run_until_halt(&mut self, deadline: Instant) -> Result<StopReason, PlatformError> {
        self.asked = Instant::now();
        loop {
            if !self.proceeds() {
                return Ok(StopReason::Unheard);
            }
            if self.has_used_cpu_time() {
                return Ok(StopReason::CpuTime);
            }
            let turn_ends = self.cpu.bound(self.turn_ends(deadline));
            let event = self.body.process.next(turn_ends)?;
            if event != Event::Late {
                self.take_over();
            }
            let halt = match event {
                Event::Call(call) => self.serve(&call, deadline)?,
                Event::Late if Instant::now() >= deadline => Some(StopReason::Late),
                Event::Late => {
                    if !self.turn_lasts(deadline) {
                        self.body.process.interrupt()?;
                    }
                    None
                }
                Event::Interrupted => {
                    self.body.process.leave_inside(false)?;
                    match self.stop_traced()? {
                        Some(end) => {
                            self.outlive(Some(StopReason::End(end, Trap::Stub)), deadline)?
                        }
                        None => self.take_turns(deadline)?,
                    }
                }
                Event::Fault(signal) => {
                    // The call reports an address that it cannot use.
                    let steps = signal == libc::SIGTRAP;
                    let called = self.body.process.leave_inside(steps)? && !steps;
                    let served = |guest: &mut Self| {
                        if guest.sentry.is_traced() {
                            guest.sentry.fault_traced(&mut guest.body.process, signal);
                            return Ok(None);
                        }
                        guest.sentry.served_fault(&mut guest.body.process, signal)
                    };
                    match if called || self.opens_block(signal)? { None } else { served(self)? } {
                        Some(end) => {
                            self.outlive(Some(StopReason::End(end, Trap::Stub)), deadline)?
                        }
                        None => self.take_on(deadline)?,
                    }
                }
            };
            if let Some(halt) = halt {
                return Ok(halt);
            }
        }
    }

    /// Serves one call, and waiting calls of threads that may continue then, until a thread runs or
    /// the guest stops.
    pub(crate) fn serve(
        &mut self,
        call: &Call,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let halt = self.serve_one(call, deadline)?;
        self.outlive(halt, deadline)
    }

    fn serve_one(
        &mut self,
        call: &Call,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        let mut call = *call;
        self.sentry.deadline = Some(deadline);
        loop {
            self.sentry.pump();
            let mut control = match self.enter_traced(&mut call)? {
                TracedEntry::Serves => self.serve_open(&mut call)?,
                TracedEntry::Stops => SyscallControl::Gone,
                TracedEntry::Skips(value) => SyscallControl::Value(value as u64),
            };
            self.sentry.leave_held(&mut control);
            self.sentry.note_call(&mut self.body.inside, &call, &control);
            match control {
                SyscallControl::Value(value) if self.sentry.unattached => {
                    self.body.detach(&call)?;
                    self.attach()?;
                    return self.finish(&Call { place: Trap::Stub, ..call }, value);
                }
                SyscallControl::Value(value) => return self.finish(&call, value),
                SyscallControl::Memory(value, change) if change.is_large() => {
                    return self.enact_in_parts(&call, value, change, deadline);
                }
                SyscallControl::Memory(value, change) => {
                    if let Trap::Kernel(id) = call.place {
                        if change.is_empty() && !self.sentry.unattached {
                            return self.finish(&call, value);
                        }
                        if !self.sentry.unattached && self.body.may_make(&call, &change) {
                            return self.let_make(id, change);
                        }
                        self.body.process.detach(id)?;
                    }
                    self.body.process.set_result(value as i64);
                    if self.sentry.unattached {
                        self.enact(change, Continuation::Ask)?;
                        self.attach()?;
                        return self.go_on();
                    }
                    if self.is_due() {
                        self.enact(change, Continuation::Ask)?;
                        return self.go_on();
                    }
                    self.give_answers();
                    self.enact(change, Continuation::Resume)?;
                    return Ok(None);
                }
                SyscallControl::Resumed => return self.go_on(),
                SyscallControl::Idle => {
                    self.body.detach(&call)?;
                    return Ok(Some(StopReason::Idle(self.read_of(&call)?)));
                }
                SyscallControl::End(end) => return Ok(Some(StopReason::End(end, call.place))),
                SyscallControl::Wait(wait) => {
                    self.park(&call)?;
                    self.sentry.resumed = None;
                    self.sentry.change().current_mut().threads.current_mut().wait = Some(wait);
                }
                SyscallControl::Yield => self.body.process.set_result(0),
                SyscallControl::Gone => {}
                SyscallControl::Exec(command) => return self.exec(*command, deadline),
                SyscallControl::Trace(request) => return self.trace(&call, *request),
                SyscallControl::Peer(copy) => return self.copy_peer(&call, &copy, deadline),
                SyscallControl::Fork(fork) => {
                    self.fork(fork)?;
                    if self.sentry.state.current().threads.current().wait.is_none() {
                        return self.go_on();
                    }
                }
            }
            match self.next(deadline)? {
                NextStep::Runs => return Ok(None),
                NextStep::Calls(next) => call = next,
                NextStep::Halts(halt) => return Ok(Some(halt)),
            }
        }
    }

    /// Lets others run, while the guest is in the stub.
    pub(crate) fn take_turns(
        &mut self,
        deadline: Instant,
    ) -> Result<Option<StopReason>, PlatformError> {
        match self.next(deadline)? {
            NextStep::Runs => Ok(None),
            NextStep::Calls(call) => self.serve(&call, deadline),
            NextStep::Halts(halt) => self.outlive(Some(halt), deadline),
        }
    }

    /// The current thread runs on, or ends.
    fn take_on(&mut self, deadline: Instant) -> Result<Option<StopReason>, PlatformError> {
        let halt = self.go_on()?;
        self.outlive(halt, deadline)
    }

    /// Whether the current thread has to enter the stub: for a signal, a stop, or because its turn
    /// is over.
    fn is_due(&mut self) -> bool {
        self.sentry.is_traced()
            || self.sentry.has_signal()
            || self.sentry.state.is_to_stop()
            || self.turn_is_over()
    }

    /// Has the guest make its own call `id`, which is the only order of `change`.
    fn let_make(&mut self, id: u64, change: Change) -> Result<Option<StopReason>, PlatformError> {
        self.sentry.resumed = None;
        self.sentry.unmask();
        if self.is_due() {
            // It comes behind the call.
            self.body.process.interrupt()?;
        }
        self.give_answers();
        self.body.let_make(id, &change)?;
        Ok(None)
    }

    /// The call returns, and its thread continues.
    pub(crate) fn finish(
        &mut self,
        call: &Call,
        value: u64,
    ) -> Result<Option<StopReason>, PlatformError> {
        self.sentry.resumed = None;
        self.sentry.unmask();
        if matches!(call.place, Trap::Kernel(_)) && !is_taken_for_restart(value) {
            if self.is_due() {
                self.body.process.interrupt()?;
            }
            self.give_answers();
            self.body.process.answer(call, value as i64)?;
            return Ok(None);
        }
        self.body.detach(call)?;
        self.body.process.set_result(value as i64);
        self.go_on()
    }

    /// The current thread, which is in the stub, runs on; in a handler, if it has a signal to take.
    pub(crate) fn go_on(&mut self) -> Result<Option<StopReason>, PlatformError> {
        if self.sentry.is_traced() {
            return self.go_on_traced();
        }
        if self.sentry.has_signal()
            && let SignalDelivery::Ends(end) =
                self.sentry.served_signals(&mut self.body.process, false)?
        {
            return Ok(Some(StopReason::End(end, Trap::Stub)));
        }
        if self.sentry.state.is_to_stop() || self.turn_is_over() {
            // It comes back at once, and is stopped then, or others run.
            self.body.process.interrupt()?;
        }
        self.give_answers();
        self.body.process.execute(&StubCommands::default(), Continuation::Resume)?;
        Ok(None)
    }

    /// Has calls be answered inside while the guest runs.
    fn give_answers(&mut self) {
        if self.sentry.is_traced() {
            // Its tracer sees each call.
            return;
        }
        self.sentry.give_answers(&mut self.body.inside, &mut self.body.process);
    }

    /// Takes over the effects of calls that were answered inside. The guest stands still.
    fn take_over(&mut self) {
        self.sentry.take_over(&mut self.body.inside, &mut self.body.process);
    }

    /// Makes a thread the one that is in the stub.
    pub(crate) fn switch(&mut self, id: u32) {
        if self.sentry.state.current().threads.current_id() == id {
            return;
        }
        let context = self.body.process.context();
        if self.sentry.state.processes.timed {
            self.sentry.account(&mut self.body.process);
        }
        let context = self.sentry.change().current_mut().threads.switch(id, context);
        if let Some(context) = context {
            self.body.process.set_context(&context);
        }
    }

    /// The wait in a call that reads input.
    fn read_of(&self, call: &Call) -> Result<IdleWait, PlatformError> {
        let (to, wanted) = self.sentry.input_place(&self.body.process, call)?;
        Ok(IdleWait::Read { to, wanted })
    }

    /// Finds the next thread while the guest is in the stub; waits for threads that only need time.
    fn next(&mut self, deadline: Instant) -> Result<NextStep, PlatformError> {
        loop {
            self.sentry.measure(&mut self.body.process);
            // However threads hand on to each other, it ends in time.
            self.turn = Instant::now();
            if let Some(halt) = self.halt(deadline) {
                return Ok(NextStep::Halts(halt));
            }
            if self.rests.is_some_and(|rests| self.turn >= rests)
                && let Some(ear) = self.answered()
            {
                self.settle()?;
                self.sentry.streams.expects = false;
                return Ok(NextStep::Halts(StopReason::Idle(IdleWait::Resting(ear))));
            }
            self.sentry.pump();
            let now = self.sentry.now();
            let (member, id) = match self.find(now, deadline) {
                NextThread::Thread(member, id) => {
                    self.begin_turn();
                    (member, id)
                }
                NextThread::Nothing => match self.nobody(now, deadline)? {
                    Some(halt) => return Ok(NextStep::Halts(halt)),
                    None => continue,
                },
                NextThread::Halt(halt) => {
                    self.settle()?;
                    return Ok(NextStep::Halts(halt));
                }
            };
            self.switch_to(member)?;
            self.switch(id);
            self.begin_slice();
            let Some(wait) = self.sentry.state.current().threads.current().wait.clone() else {
                if self.sentry.takes_held_call() {
                    return Ok(NextStep::Calls(self.body.process.call()));
                }
                return Ok(self.go_on()?.map_or(NextStep::Runs, NextStep::Halts));
            };
            let mut sets = ReadySets::default();
            let over = self.sentry.state.is_over(&self.sentry.streams, id, &wait, now, &mut sets);
            // A call that has to end for a signal is not repeated.
            if over && !self.sentry.is_dying() {
                self.sentry.resume(wait);
                return Ok(NextStep::Calls(self.body.waited_call()));
            }
            self.sentry.resumed = Some(wait);
            self.body.unpark()?;
            match self.sentry.served_signals(&mut self.body.process, true)? {
                SignalDelivery::Ends(end) => {
                    return Ok(NextStep::Halts(StopReason::End(end, Trap::Stub)));
                }
                SignalDelivery::Handled => {
                    self.sentry.end_wait();
                    return Ok(self.go_on()?.map_or(NextStep::Runs, NextStep::Halts));
                }
                // An ignored signal does not wake it.
                SignalDelivery::Nothing | SignalDelivery::Stops => self.sentry.resumed = None,
            }
        }
    }

    /// Makes the first process the current one, with a thread in the stub, as in a frozen guest.
    pub(crate) fn settle(&mut self) -> Result<(), PlatformError> {
        self.come_home()?;
        self.sentry.resumed = None;
        Ok(())
    }

    /// No thread can run: the guest waits for the caller or for a moment, or is deadlocked.
    fn nobody(&mut self, now: u64, deadline: Instant) -> Result<Option<StopReason>, PlatformError> {
        StartTurn::end();
        self.settle()?;
        let state = &self.sentry.state;
        let until = state.next_moment(now).map(|at| Duration::from_nanos(at - now));
        let left = deadline.saturating_duration_since(Instant::now());
        if self.sentry.may_be_woken() {
            let length = until.map_or(left, |until| until.min(left));
            self.sentry.await_host(self.body.process.ends(), length);
            self.body.process.check_alive()?;
            return Ok(None);
        }
        let lines = &self.sentry.lines;
        let through = self.sentry.streams.through;
        Ok(match (state.ear(through), until) {
            (Some(InputSource::Port), Some(until))
                if through.is_none() && !self.patience.is_zero() && state.is_underway() =>
            {
                let pause = self.bounded(until.min(left).min(self.patience));
                self.patience -= pause;
                self.body.process.pause(pause);
                None
            }
            (Some(ear), until) => {
                if self.owes(ear) && lines.is_owed(state) {
                    lines.wait(state, self.bounded(until.map_or(left, |until| until.min(left))));
                    return Ok(None);
                }
                let owes = self.owes(ear) && (ear == InputSource::Port || state.may_answer(now));
                if let Some(until) = until.filter(|until| *until < left && owes) {
                    self.body.process.pause(self.bounded(until));
                    return Ok(None);
                }
                self.sentry.streams.expects = false;
                Some(StopReason::Idle(IdleWait::Parked(ear)))
            }
            (None, until) if !lines.is_empty() => {
                lines.wait(state, self.bounded(until.map_or(left, |until| until.min(left))));
                None
            }
            // Time may be up before; then the next look ends it.
            (None, Some(until)) => {
                self.body.process.pause(self.bounded(until.min(left)));
                None
            }
            (None, None) => Some(StopReason::End(End::Deadlock, Trap::Stub)),
        })
    }

    /// The object of the next call, if this one was read whole and answered.
    fn answered(&self) -> Option<InputSource> {
        let streams = &self.sentry.streams;
        let ear = self.sentry.state.ear(streams.through)?;
        (!streams.has_input() && !self.owes(ear)).then_some(ear)
    }

    /// Whether the caller has a right to wait for an answer.
    fn owes(&self, ear: InputSource) -> bool {
        let streams = &self.sentry.streams;
        if streams.uncalled && ear == InputSource::Port {
            // It only runs its own work.
            return true;
        }
        streams.expects
            && match ear {
                InputSource::Input => !streams.has_answered(),
                InputSource::Port => {
                    self.sentry.state.is_called()
                        && !http::is_whole(&streams.input, &streams.output)
                }
            }
    }

    /// Puts a change of the layout into effect, while the stub waits for orders.
    pub(crate) fn enact(
        &mut self,
        change: Change,
        then: Continuation,
    ) -> Result<(), PlatformError> {
        self.body.enact(change, then)
    }

    /// Takes the last bytes of standard error.
    pub(crate) fn messages(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.sentry.streams.messages)).into_owned()
    }
}

/// A moment `length` from now, or as good as never.
pub(crate) fn after(length: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(length).unwrap_or(now + Duration::from_secs(1 << 30))
}
