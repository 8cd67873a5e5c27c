//! One run of a guest: from entry to exit, serving its hypercalls.
//!
//! Promises: for any arguments, a hypercall either acts on memory that the guest itself may reach
//! or ends the call with an error that gives the reason; nothing is allocated by a length that was
//! not checked against guest memory and against a limit; the time limit also holds inside
//! hypercalls.
//! May break it: a host function that trusts its arguments' values, or that takes its time.

use afresh_sys::random;
use kvm_bindings::kvm_regs;

use crate::abi::{
    CALL_DONE, CALL_FIND, CALL_GENERATION, CALL_HOST, CALL_LOG, CALL_PANIC, CALL_RANDOM,
    CALL_READY, ERR_ARGUMENTS, ERR_CAPACITY, ERR_FAILED, ERR_NO_FUNCTION, MAX_MESSAGE,
};
use crate::crash::classify;
use crate::error::{BuildError, CallError, GuestError};
use crate::host::HostError;
use crate::layout::Span;
use crate::machine::Exit;
use crate::sandbox::{Sandbox, State};
use crate::system::CODE;
use crate::watch::StopReason;

/// The regular end of a run.
#[derive(Debug)]
pub(crate) enum End {
    /// `ready`: where calls start.
    Ready(u64),
    /// `done`: the output.
    Done(Vec<u8>),
    /// The entry code's probe.
    Probe,
}

/// Bytes that a hypercall copies or makes between two looks at the time limit.
const STEP: u64 = 64 << 10;

/// Which hypercalls are in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Init,
    Call,
    Probe,
}

impl Sandbox {
    /// Runs the program's initialisation and makes the result the image.
    pub(crate) fn initialise(&mut self, boot: u64) -> Result<(), BuildError> {
        self.enter(self.entry, [boot, 0, 0]).map_err(BuildError::Init)?;
        match self.drive(Phase::Init).map_err(BuildError::Init)? {
            End::Ready(entry) => self.entry = entry,
            End::Done(_) | End::Probe => {
                let error = GuestError::MisplacedHypercall(CALL_DONE);
                return Err(BuildError::Init(error.into()));
            }
        }
        let image = self.memory.slot.freeze()?;
        self.memory.slot.set_image(&image, &self.template.accessible)?;
        self.untouched = true;
        Ok(())
    }

    /// Calls the guest with `input` and returns its output. The guest's writes stay until the next
    /// [`reset`](Self::reset).
    ///
    /// # Errors
    /// See [`CallError`]. After an error of the guest the sandbox must be reset.
    pub fn call(&mut self, input: &[u8]) -> Result<Vec<u8>, CallError> {
        self.check()?;
        let buffer = self.template.layout.input;
        if input.len() as u64 > buffer.len {
            return Err(CallError::InputTooLarge { len: input.len(), capacity: buffer.len });
        }
        // A host function that panics must not leave a half-run guest that looks ready.
        self.state = State::NeedsReset;
        self.untouched = false;
        let output = self.call_inner(buffer, input).map_err(|error| self.explain(error))?;
        self.state = State::Ready;
        Ok(output)
    }

    /// Once pages of the guest will never come, every failure is that one: KVM reports only a bad
    /// address.
    fn explain(&self, error: CallError) -> CallError {
        self.memory.slot.failure().map_or(error, CallError::Memory)
    }

    fn call_inner(&mut self, buffer: Span, input: &[u8]) -> Result<Vec<u8>, CallError> {
        let bad = |access| GuestError::BadPointer { call: CALL_DONE, access };
        self.memory.write(buffer.start, input).map_err(bad)?;
        self.enter(self.entry, [buffer.start, input.len() as u64, 0])?;
        match self.drive(Phase::Call)? {
            End::Done(output) => Ok(output),
            End::Ready(_) | End::Probe => Err(GuestError::MisplacedHypercall(CALL_READY).into()),
        }
    }

    /// Calls the guest, then resets the sandbox to its image, also after an error.
    ///
    /// # Errors
    /// The call's error, or the reset's where that failed.
    pub fn run(&mut self, input: &[u8]) -> Result<Vec<u8>, CallError> {
        let outcome = self.call(input);
        match outcome {
            Err(CallError::Quarantined | CallError::Forked) => outcome,
            _ => {
                self.reset()?;
                outcome
            }
        }
    }

    /// Runs from the registers set before, until the guest ends the run.
    pub(crate) fn drive(&mut self, phase: Phase) -> Result<End, CallError> {
        self.drawn = 0;
        // Dropped at the end, also where a host function panics.
        let call = self.watch.begin(self.config.timeout);
        self.machine.admit(self.watch.kick(), call.thread())?;
        self.serve(phase)
    }

    fn serve(&mut self, phase: Phase) -> Result<End, CallError> {
        loop {
            match self.machine.run()? {
                Exit::Hypercall(number) => {
                    let mut regs = self.machine.regs();
                    match self.hypercall(phase, number, &regs)? {
                        NextStep::End(end) => return Ok(end),
                        NextStep::Resume => {}
                        NextStep::Result(value) => {
                            regs.rax = value;
                            self.machine.set_regs(&regs);
                        }
                    }
                }
                Exit::RingFull => {
                    self.ring_overflows += 1;
                    self.memory.ring_full()?;
                }
                Exit::Interrupted => {
                    if let Some(stopped) = self.watch.interrupted() {
                        return Err(ended(stopped, self.machine.regs().rip).into());
                    }
                    // A pending signal that the thread blocks by now would interrupt every run. A
                    // stop that comes only now raises the flag as well.
                    self.watch.kick().discard();
                    self.machine.admit_unblocked(self.watch.kick())?;
                }
                Exit::Shutdown => {
                    let regs = self.machine.regs();
                    let sregs = self.machine.get_sregs()?;
                    let floor = self.template.layout.stack.start;
                    let crash = classify(&regs, &sregs, CODE, &self.memory, floor);
                    return Err(GuestError::Crash(crash).into());
                }
                Exit::Other(what) => return Err(GuestError::Unexpected(what).into()),
            }
        }
    }

    fn hypercall(
        &mut self,
        phase: Phase,
        call: u32,
        regs: &kvm_regs,
    ) -> Result<NextStep, GuestError> {
        let bad = |access| GuestError::BadPointer { call, access };
        let (first, second, third) = (regs.rdi, regs.rsi, regs.rdx);
        if phase == Phase::Probe {
            return Ok(NextStep::End(End::Probe));
        }
        match (call, phase) {
            (CALL_READY, Phase::Init) => {
                if second != u64::from(crate::abi::ABI_VERSION) {
                    return Err(GuestError::Version(second));
                }
                Ok(NextStep::End(End::Ready(first)))
            }
            (CALL_DONE, Phase::Call) => {
                let what = ("output", "output", self.config.limits.output);
                let output = self.copy_out(call, regs.rip, (second, third), what)?;
                match first as i64 {
                    0 => Ok(NextStep::End(End::Done(output))),
                    status => Err(GuestError::Failed { status, output }),
                }
            }
            (CALL_READY | CALL_DONE, _) => Err(GuestError::MisplacedHypercall(call)),
            (CALL_PANIC, _) => Err(GuestError::Panic(self.message(call, first, second)?)),
            (CALL_LOG, _) => {
                let message = self.message(call, second, third)?;
                if let Some(log) = &self.config.log {
                    log(first.clamp(1, 5) as u8, &message);
                }
                Ok(NextStep::Resume)
            }
            (CALL_FIND, _) => {
                let name = self.message(call, first, second)?;
                let found = self.template.functions.find(&name);
                Ok(NextStep::Result(found.map_or(ERR_NO_FUNCTION as u64, |index| index as u64)))
            }
            (CALL_HOST, _) => self.host_call(call, regs),
            (CALL_RANDOM, _) => {
                self.memory.map().check(first, second, true).map_err(bad)?;
                self.fill_random(call, regs.rip, first, second)?;
                Ok(NextStep::Result(0))
            }
            (CALL_GENERATION, _) => Ok(NextStep::Result(self.generation)),
            (other, _) => Err(GuestError::UnknownHypercall(other)),
        }
    }

    fn message(&self, call: u32, address: u64, len: u64) -> Result<String, GuestError> {
        if len > MAX_MESSAGE {
            return Err(GuestError::TooLong { call, len });
        }
        let bytes = self
            .memory
            .read_vec(address, len)
            .map_err(|access| GuestError::BadPointer { call, access })?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    fn host_call(&mut self, call: u32, regs: &kvm_regs) -> Result<NextStep, GuestError> {
        let bad = |access| GuestError::BadPointer { call, access };
        let (result, capacity) = (regs.r10, regs.r8);
        if self.template.functions.get(regs.rdi).is_none() {
            return Ok(NextStep::Result(ERR_NO_FUNCTION as u64));
        }
        // Both buffers are checked before the function can have an effect.
        self.memory.map().check(result, capacity, true).map_err(bad)?;
        let what = ("list of arguments", "arguments", self.config.limits.arguments);
        let arguments = self.copy_out(call, regs.rip, (regs.rsi, regs.rdx), what)?;
        let Some(function) = self.template.functions.get(regs.rdi) else {
            return Ok(NextStep::Result(ERR_NO_FUNCTION as u64));
        };
        Ok(NextStep::Result(match function(&arguments) {
            Ok(bytes) if bytes.len() as u64 <= capacity => {
                self.memory.write(result, &bytes).map_err(bad)?;
                bytes.len() as u64
            }
            Ok(_) => ERR_CAPACITY as u64,
            Err(HostError::Arguments) => ERR_ARGUMENTS as u64,
            Err(_) => ERR_FAILED as u64,
        }))
    }

    /// Copies a guest's range out, if it is within `(what, setting, limit)`.
    fn copy_out(
        &self,
        call: u32,
        rip: u64,
        (address, len): (u64, u64),
        (what, setting, limit): (&'static str, &'static str, u64),
    ) -> Result<Vec<u8>, GuestError> {
        let bad = |access| GuestError::BadPointer { call, access };
        self.memory.map().check(address, len, false).map_err(bad)?;
        if len > limit {
            return Err(GuestError::OverLimit { what, len, limit, setting });
        }
        let mut out = Vec::with_capacity(len as usize);
        for start in (0..len).step_by(STEP as usize) {
            let step = STEP.min(len - start);
            self.memory.append(address + start, step, &mut out).map_err(bad)?;
            self.in_time(rip)?;
        }
        Ok(out)
    }

    fn fill_random(
        &mut self,
        call: u32,
        rip: u64,
        address: u64,
        len: u64,
    ) -> Result<(), GuestError> {
        let limit = self.config.limits.random;
        self.drawn = self.drawn.saturating_add(len);
        if self.drawn > limit {
            let (what, setting) = ("use of randomness", "random");
            return Err(GuestError::OverLimit { what, len: self.drawn, limit, setting });
        }
        let mut chunk = [0; 1024];
        let mut done = 0;
        while done < len {
            let take = (len - done).min(chunk.len() as u64) as usize;
            random::fill(&mut chunk[..take])
                .map_err(|error| GuestError::Unexpected(error.to_string()))?;
            self.memory
                .write(address + done, &chunk[..take])
                .map_err(|access| GuestError::BadPointer { call, access })?;
            done += take as u64;
            self.in_time(rip)?;
        }
        Ok(())
    }

    /// Ends a hypercall that takes longer than the call may.
    fn in_time(&self, rip: u64) -> Result<(), GuestError> {
        self.watch.stopped().map_or(Ok(()), |stopped| Err(ended(stopped, rip)))
    }
}

fn ended(stopped: StopReason, rip: u64) -> GuestError {
    match stopped {
        StopReason::Timeout => GuestError::Timeout { rip },
        StopReason::Handle => GuestError::Stopped { rip },
    }
}

enum NextStep {
    End(End),
    Resume,
    Result(u64),
}
