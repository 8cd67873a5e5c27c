//! A guest: a process, who it takes itself for, and what it did to its memory map.
//!
//! Its threads take turns in the one thread that its process has: when one waits, when it gives way, and when others are ready
//! and its time is over.

use std::time::{Duration, Instant};

use crate::bodies::Others;
use crate::body::Body;
use crate::http;
use crate::personality::{Change, Ear, End, FIRST, Outcome, Person, Taken, now_moment};
use crate::platform::{Call, Event, Orders, Place, PlatformError, Then};
use crate::standing::Wait;

/// How long a thread runs while others could.
const TURN: Duration = Duration::from_millis(4);
/// How long a thread runs at least.
const MOMENT: Duration = Duration::from_micros(50);

/// Why a guest stopped running.
#[derive(Debug)]
pub(crate) enum Halt {
    /// It waits for the caller, so.
    Idle(Wait),
    /// It ended. The place says whether the stub has it.
    End(End, Place),
    /// Time is up.
    Late,
}

/// Who goes on.
enum Next {
    /// A thread, which runs.
    Runs,
    /// A thread that has waited: this call of its is served once more.
    Calls(Call),
    Halts(Halt),
}

/// Processes with a personality.
#[derive(Debug)]
pub(crate) struct Guest {
    /// What plays the current process.
    pub(crate) body: Body,
    pub(crate) person: Person,
    pub(crate) others: Others,
    /// When the turn of the thread that runs has begun.
    turn: Instant,
    /// When a call that was answered ends though somebody could go on, if it does.
    pub(crate) rests: Option<Instant>,
    /// How long it may sleep on before it is taken for a server that waits for its first caller, though somebody beside it is at work.
    patience: Duration,
}

/// As long as who starts a server needs to see that it is there.
const PATIENCE: Duration = Duration::from_secs(2);

impl Guest {
    /// A guest whose first process `body` plays. Those besides it are as `others` has them.
    pub(crate) fn new(body: Body, person: Person, others: Others) -> Self {
        let (turn, rests) = (Instant::now(), None);
        Self { body, person, others, turn, rests, patience: PATIENCE }
    }

    /// Runs the guest until it waits for the caller, ends, or `deadline` is there.
    pub(crate) fn run(&mut self, deadline: Instant) -> Result<Halt, PlatformError> {
        loop {
            let halt = match self.body.process.next(self.turn_ends(deadline))? {
                Event::Call(call) => self.serve(&call, deadline)?,
                Event::Late if Instant::now() >= deadline => Some(Halt::Late),
                Event::Late => {
                    self.body.process.interrupt()?;
                    None
                }
                Event::Interrupted => self.take_turns(deadline)?,
                Event::Fault(signal) => {
                    match self.person.served_fault(&mut self.body.process, signal)? {
                        Some(end) => self.outlive(Some(Halt::End(end, Place::Stub)), deadline)?,
                        None => self.take_on(deadline)?,
                    }
                }
            };
            if let Some(halt) = halt {
                return Ok(halt);
            }
        }
    }

    /// When the thread that runs is to be interrupted: after its turn, or when the alarm rings.
    fn turn_ends(&self, deadline: Instant) -> Instant {
        let state = &self.person.state;
        if state.is_alone() {
            return deadline;
        }
        let now = Instant::now();
        let mut ends = self.turn + TURN;
        if let Some(at) = state.rings_at() {
            ends = ends.min(now + Duration::from_nanos(at.saturating_sub(now_moment())));
        }
        if let Some(left) = state.processor_left() {
            ends = ends.min(now + Duration::from_nanos(left));
        }
        if let Some(rests) = self.rests {
            ends = ends.min(rests);
        }
        // Who was told to interrupt itself gets a moment to do so.
        ends.max(now + MOMENT).min(deadline)
    }

    /// Serves one call, and whatever calls threads have waited in that may go on then, until one runs or the guest halts.
    pub(crate) fn serve(
        &mut self,
        call: &Call,
        deadline: Instant,
    ) -> Result<Option<Halt>, PlatformError> {
        let halt = self.serve_one(call, deadline)?;
        self.outlive(halt, deadline)
    }

    fn serve_one(&mut self, call: &Call, deadline: Instant) -> Result<Option<Halt>, PlatformError> {
        let mut call = *call;
        loop {
            self.person.pump();
            match self.person.serve(&mut self.body.process, &call)? {
                Outcome::Value(value) => return self.finish(&call, value),
                Outcome::Memory(value, change) => {
                    self.body.process.set_result(value as i64);
                    self.enact(change, Then::Resume)?;
                    return Ok(None);
                }
                Outcome::Resumed => return self.go_on(),
                Outcome::Idle => {
                    if let Place::Kernel(id) = call.place {
                        self.body.process.detach(id)?;
                    }
                    return Ok(Some(Halt::Idle(Wait::of(self, &call)?)));
                }
                Outcome::End(end) => return Ok(Some(Halt::End(end, call.place))),
                Outcome::Wait(wait) => {
                    if let Place::Kernel(id) = call.place {
                        self.body.process.detach(id)?;
                    }
                    self.person.resumed = None;
                    self.person.change().threads.current_mut().wait = Some(wait);
                }
                Outcome::Yield => self.body.process.set_result(0),
                Outcome::Gone => {}
                Outcome::Exec(command) => return self.exec(*command),
                Outcome::Fork(fork) => {
                    self.fork(fork)?;
                    if self.person.state.threads.current().wait.is_none() {
                        return self.go_on();
                    }
                }
            }
            match self.next(deadline)? {
                Next::Runs => return Ok(None),
                Next::Calls(next) => call = next,
                Next::Halts(halt) => return Ok(Some(halt)),
            }
        }
    }

    /// Lets others run, while the guest is in the stub.
    pub(crate) fn take_turns(&mut self, deadline: Instant) -> Result<Option<Halt>, PlatformError> {
        match self.next(deadline)? {
            Next::Runs => Ok(None),
            Next::Calls(call) => self.serve(&call, deadline),
            Next::Halts(halt) => self.outlive(Some(halt), deadline),
        }
    }

    /// The current thread runs on, or what it does ends it.
    fn take_on(&mut self, deadline: Instant) -> Result<Option<Halt>, PlatformError> {
        let halt = self.go_on()?;
        self.outlive(halt, deadline)
    }

    /// The call returns, and its thread goes on.
    fn finish(&mut self, call: &Call, value: u64) -> Result<Option<Halt>, PlatformError> {
        self.person.resumed = None;
        self.person.unmask();
        match call.place {
            Place::Kernel(_) => {
                if self.person.has_signal() || self.person.state.is_to_stop() {
                    self.body.process.interrupt()?;
                }
                self.body.process.answer(call, value as i64)?;
                Ok(None)
            }
            Place::Stub => {
                self.body.process.set_result(value as i64);
                self.go_on()
            }
        }
    }

    /// The current thread, which is in the stub, runs on; in a handler, if it has a signal to take.
    pub(crate) fn go_on(&mut self) -> Result<Option<Halt>, PlatformError> {
        if self.person.has_signal()
            && let Taken::Ends(end) = self.person.served_signals(&mut self.body.process, false)?
        {
            return Ok(Some(Halt::End(end, Place::Stub)));
        }
        if self.person.state.is_to_stop() {
            // It comes back at once, and is stopped then.
            self.body.process.interrupt()?;
        }
        self.body.process.carry_out(&Orders::default(), Then::Resume)?;
        Ok(None)
    }

    /// Makes a thread the one that is in the stub.
    fn switch(&mut self, id: u32) {
        let threads = &self.person.state.threads;
        if threads.current_id() == id {
            return;
        }
        let context = threads.get(threads.current_id()).map(|_| self.body.process.context());
        if self.person.state.family.timed {
            self.person.account(&mut self.body.process);
        }
        let context = self.person.change().threads.switch(id, context);
        if let Some(context) = context {
            self.body.process.set_context(&context);
        }
    }

    /// Finds who goes on, while the guest is in the stub; waits for them where only time is missing.
    fn next(&mut self, deadline: Instant) -> Result<Next, PlatformError> {
        loop {
            self.person.measure(&mut self.body.process);
            // However threads hand on to each other, it ends in time.
            self.turn = Instant::now();
            if self.turn >= deadline {
                return Ok(Next::Halts(Halt::Late));
            }
            if self.rests.is_some_and(|rests| self.turn >= rests)
                && let Some(ear) = self.answered()
            {
                self.settle()?;
                self.person.streams.expects = false;
                return Ok(Next::Halts(Halt::Idle(Wait::Resting(ear))));
            }
            self.person.pump();
            let now = now_moment();
            let Some((member, id)) = self.find(now) else {
                match self.nobody(now, deadline)? {
                    Some(halt) => return Ok(Next::Halts(halt)),
                    None => continue,
                }
            };
            self.seat(member)?;
            self.switch(id);
            let Some(wait) = self.person.state.threads.current().wait.clone() else {
                return Ok(self.go_on()?.map_or(Next::Runs, Next::Halts));
            };
            let over = self.person.state.is_over(&self.person.streams, id, &wait, now);
            self.person.resumed = Some(wait);
            if over {
                self.person.change().threads.current_mut().wait = None;
                return Ok(Next::Calls(self.body.process.call()));
            }
            match self.person.served_signals(&mut self.body.process, true)? {
                Taken::Ends(end) => return Ok(Next::Halts(Halt::End(end, Place::Stub))),
                Taken::Handled => {
                    self.person.resumed = None;
                    self.person.change().threads.current_mut().wait = None;
                    return Ok(self.go_on()?.map_or(Next::Runs, Next::Halts));
                }
                // What it ignores does not wake it.
                Taken::Nothing => self.person.resumed = None,
            }
        }
    }

    /// The process and the thread in it that may go on; alarms ring meanwhile.
    fn find(&mut self, now: u64) -> Option<(u32, u32)> {
        if self.person.state.family.is_single() {
            self.person.ring(now);
            self.heed_stops();
            return self.person.next_ready(now).map(|id| (FIRST, id));
        }
        let mut stopped = false;
        for member in self.person.state.family.in_turn() {
            self.person.change().seat(member);
            self.person.ring(now);
            stopped |= self.heed_stops();
            if let Some(id) = self.person.next_ready(now) {
                return Some((member, id));
            }
        }
        // Who stopped was the last to be asked, and its parent may go on now.
        if stopped { self.find(now) } else { None }
    }

    /// Stops the current process, if a signal says so; whether it did.
    fn heed_stops(&mut self) -> bool {
        let stops = self.person.state.is_to_stop();
        if stops {
            self.person.change().heed_stops();
        }
        stops
    }

    /// Makes the first process the current one, with a thread in the stub, as what is frozen or ended has.
    fn settle(&mut self) -> Result<(), PlatformError> {
        self.come_home()?;
        self.person.resumed = None;
        let threads = &self.person.state.threads;
        if threads.get(threads.current_id()).is_none() {
            let first = threads.iter().next().map(|(id, _)| id);
            first.into_iter().for_each(|id| self.switch(id));
        }
        Ok(())
    }

    /// Nobody can go on: the guest waits for the caller, for a time to come, or for ever.
    fn nobody(&mut self, now: u64, deadline: Instant) -> Result<Option<Halt>, PlatformError> {
        self.settle()?;
        let state = &self.person.state;
        let until = state.next_moment(now).map(|at| Duration::from_nanos(at - now));
        let left = deadline.saturating_duration_since(Instant::now());
        let lines = &self.person.lines;
        let through = self.person.streams.through;
        Ok(match (state.ear(through), until) {
            (Some(Ear::Port), Some(until))
                if through.is_none() && !self.patience.is_zero() && state.is_underway() =>
            {
                let pause = until.min(left).min(self.patience);
                self.patience -= pause;
                self.body.process.pause(pause);
                None
            }
            (Some(ear), until) => {
                if self.owes(ear) && lines.is_owed(state) {
                    lines.wait(state, until.map_or(left, |until| until.min(left)));
                    return Ok(None);
                }
                let owes = self.owes(ear) && (ear == Ear::Port || state.may_answer(now));
                if let Some(until) = until.filter(|until| *until < left && owes) {
                    self.body.process.pause(until);
                    return Ok(None);
                }
                self.person.streams.expects = false;
                Some(Halt::Idle(Wait::Parked(ear)))
            }
            (None, until) if !lines.is_empty() => {
                lines.wait(state, until.map_or(left, |until| until.min(left)));
                None
            }
            (None, Some(until)) if until < left => {
                self.body.process.pause(until);
                None
            }
            (None, Some(_)) => {
                self.body.process.pause(left);
                Some(Halt::Late)
            }
            (None, None) => Some(Halt::End(End::Deadlock, Place::Stub)),
        })
    }

    /// What the next call comes through, if this one was taken whole and answered.
    fn answered(&self) -> Option<Ear> {
        let streams = &self.person.streams;
        let ear = self.person.state.ear(streams.through)?;
        (!streams.has_input() && !self.owes(ear)).then_some(ear)
    }

    /// Whether the caller has a right to wait for an answer.
    fn owes(&self, ear: Ear) -> bool {
        let streams = &self.person.streams;
        if streams.uncalled && ear == Ear::Port {
            // What it does by itself is all that it does.
            return true;
        }
        streams.expects
            && match ear {
                Ear::Input => !streams.has_answered(),
                Ear::Port => {
                    self.person.state.is_called()
                        && !http::is_whole(&streams.input, &streams.output)
                }
            }
    }

    /// Hands in what the caller sends (nothing is the end of its input), if it calls, after `orders`, and lets the guest go on from where
    /// it waits.
    pub(crate) fn resume(
        &mut self,
        wait: &Wait,
        request: Option<&[u8]>,
        mut orders: Orders,
        deadline: Instant,
    ) -> Result<Option<Halt>, PlatformError> {
        let bytes = request.unwrap_or_default();
        let streams = &mut self.person.streams;
        streams.input.clear();
        streams.input.extend(bytes);
        streams.taken = 0;
        streams.ended = false;
        streams.expects = !bytes.is_empty();
        streams.through = Some(match wait {
            Wait::Read { .. } => Ear::Input,
            Wait::Parked(ear) | Wait::Resting(ear) => *ear,
        });
        self.person.resumed = None;
        match (wait, request) {
            (Wait::Read { .. }, None) => {
                // Its only thread waits for the caller.
                self.body.process.carry_out(&orders, Then::Ask)?;
                return Ok(Some(Halt::Idle(*wait)));
            }
            (Wait::Read { to, wanted }, Some(request)) => {
                let taken = request.len().min(crate::platform::INPUT_LEN).min(*wanted as usize);
                self.person.streams.taken = taken;
                orders.input = Some((*to, request[..taken].to_vec()));
                self.body.process.set_result(taken as i64);
                self.body.process.carry_out(&orders, Then::Resume)?;
                return Ok(None);
            }
            (Wait::Parked(ear) | Wait::Resting(ear), request) => {
                if !orders.is_empty() {
                    self.body.process.carry_out(&orders, Then::Ask)?;
                }
                if let Some(request) = request {
                    if self.person.state.has_callers() {
                        self.person.change().hang_up();
                    }
                    match ear {
                        Ear::Input => self.person.streams.ended = request.is_empty(),
                        Ear::Port => {
                            self.person.streams.taken = request.len();
                            if !self.person.change().call_in(request) {
                                return Ok(Some(Halt::End(End::Deadlock, Place::Stub)));
                            }
                        }
                    }
                }
            }
        }
        self.take_turns(deadline)
    }

    /// Puts a change of the layout into effect, while the stub waits for orders.
    pub(crate) fn enact(&mut self, change: Change, then: Then) -> Result<(), PlatformError> {
        self.body.enact(change, then)
    }

    /// The end of what the guest wrote to its standard error, which is then forgotten.
    pub(crate) fn messages(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.person.streams.messages)).into_owned()
    }
}

/// A moment `length` from now, or as good as never.
pub(crate) fn after(length: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(length).unwrap_or(now + Duration::from_secs(1 << 30))
}
