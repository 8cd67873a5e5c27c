//! One run of a guest: from entry to exit, serving its hypercalls.
//!
//! Promises: whatever a guest passes, a hypercall either acts on memory that the guest itself may
//! reach or ends the call with an error that says why; nothing is allocated by a length that was
//! not checked against guest memory. May break it: a host function trusting its arguments' values.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_memory::{ImageError, ResetError, SlotError, TrackError};
use kvm_bindings::kvm_regs;

use crate::abi::{
    CALL_DONE, CALL_FIND, CALL_GENERATION, CALL_HOST, CALL_LOG, CALL_PANIC, CALL_RANDOM,
    CALL_READY, ERR_ARGUMENTS, ERR_CAPACITY, ERR_FAILED, ERR_NO_FUNCTION, MAX_MESSAGE,
};
use crate::crash::{Crash, classify};
use crate::host::HostError;
use crate::machine::{Exit, KvmError};
use crate::memory::AccessError;
use crate::sandbox::Sandbox;
use crate::system::CODE;
use crate::watch::Stopped;

/// What a guest did wrong, or had done to it. The sandbox must be reset and is then pristine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// It faulted.
    #[error(transparent)]
    Crash(#[from] Crash),
    /// It panicked.
    #[error("guest panicked: {0}")]
    Panic(String),
    /// It ran longer than allowed.
    #[error("guest ran past its time limit and was stopped at RIP {rip:#x}")]
    Timeout {
        /// Where it was.
        rip: u64,
    },
    /// A [`StopHandle`](crate::StopHandle) stopped it.
    #[error("guest was stopped at RIP {rip:#x} by its stop handle")]
    Stopped {
        /// Where it was.
        rip: u64,
    },
    /// It ended the call with a status other than 0.
    #[error("guest returned status {status}")]
    Failed {
        /// The status.
        status: i64,
        /// Its output.
        output: Vec<u8>,
    },
    /// It made a hypercall that does not exist.
    #[error("guest made unknown hypercall {0}")]
    UnknownHypercall(u32),
    /// It made a hypercall that has no place there: `ready` in a call, `done` before `ready`.
    #[error("guest made hypercall {0} out of place")]
    MisplacedHypercall(u32),
    /// It passed a range outside its memory.
    #[error("guest passed a bad pointer to hypercall {call}: {access}")]
    BadPointer {
        /// The hypercall.
        call: u32,
        /// The range.
        access: AccessError,
    },
    /// It passed a message longer than the limit.
    #[error("guest passed {len} bytes to hypercall {call}, above the limit of {MAX_MESSAGE}")]
    TooLong {
        /// The hypercall.
        call: u32,
        /// The length.
        len: u64,
    },
    /// It was built for another version of the interface.
    #[error("guest speaks interface version {0}; this host speaks {version}", version = crate::abi::ABI_VERSION)]
    Version(u64),
    /// It did something that KVM does not handle.
    #[error("guest stopped for an unexpected reason: {0}")]
    Unexpected(String),
}

/// Why a call did not return output.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The guest's doing.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The input does not fit the input buffer.
    #[error(
        "input of {len} bytes exceeds the guest's input buffer of {capacity}; raise it with SandboxBuilder::input"
    )]
    InputTooLarge {
        /// Length of the input.
        len: usize,
        /// Capacity of the buffer.
        capacity: u64,
    },
    /// The last call failed and the sandbox was not reset since.
    #[error("the last call failed; reset the sandbox first")]
    NeedsReset,
    /// A reset failed; the sandbox can only be dropped.
    #[error("an earlier reset failed; this sandbox is quarantined and can only be dropped")]
    Quarantined,
    /// KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The guest's memory comes from a snapshot, and a page of it could not be fetched. The sandbox can
    /// only be dropped.
    #[error("the guest's memory is incomplete: {0}")]
    Memory(String),
    /// Noticing the guest's writes failed.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The reset failed; the sandbox is quarantined.
    #[error(transparent)]
    Reset(#[from] ResetError),
    /// The snapshot is of another guest.
    #[error(
        "the snapshot belongs to another guest; restore it in a sandbox forked from the same one"
    )]
    ForeignSnapshot,
    /// A snapshot could not be stored.
    #[error(transparent)]
    Snapshot(#[from] ImageError),
    /// The guest writes more than a dirty ring holds, and moving it to a machine with another tracker
    /// failed; the sandbox is quarantined.
    #[error("moving the guest to a machine with a dirty log failed: {0}")]
    Replace(#[source] Box<crate::BuildError>),
    /// A snapshot could not be put in place; the sandbox is quarantined.
    #[error(transparent)]
    Restore(#[from] SlotError),
}

/// How a run ended well.
#[derive(Debug)]
pub(crate) enum End {
    /// `ready`: where calls start.
    Ready(u64),
    /// `done`: the output.
    Done(Vec<u8>),
    /// The entry code's probe.
    Probe,
}

/// Which hypercalls are in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Init,
    Call,
    Probe,
}

/// A number that no other pristine state was given: in this process for certain, elsewhere but for a
/// chance of one in 2^62. A guest may keep it in a snapshot, and two processes may thaw that.
pub(crate) fn next_generation() -> u64 {
    static NEXT: OnceLock<AtomicU64> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU64::new((afresh_sys::host::random_word() >> 2).max(1)));
    next.fetch_add(1, Ordering::Relaxed)
}

impl Sandbox {
    /// Runs from the registers set before, until the guest ends the run.
    pub(crate) fn drive(&mut self, phase: Phase) -> Result<End, CallError> {
        self.watch.begin(self.config.timeout);
        let outcome = self.serve(phase);
        self.watch.end();
        outcome
    }

    fn serve(&mut self, phase: Phase) -> Result<End, CallError> {
        loop {
            match self.machine.run()? {
                Exit::Hypercall(number) => {
                    let mut regs = self.machine.regs();
                    match self.hypercall(phase, number, &regs)? {
                        Next::End(end) => return Ok(end),
                        Next::Resume => {}
                        Next::Result(value) => {
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
                        let rip = self.machine.regs().rip;
                        return Err(match stopped {
                            Stopped::Timeout => GuestError::Timeout { rip },
                            Stopped::Handle => GuestError::Stopped { rip },
                        }
                        .into());
                    }
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

    fn hypercall(&mut self, phase: Phase, call: u32, regs: &kvm_regs) -> Result<Next, GuestError> {
        let bad = |access| GuestError::BadPointer { call, access };
        let (first, second, third) = (regs.rdi, regs.rsi, regs.rdx);
        if phase == Phase::Probe {
            return Ok(Next::End(End::Probe));
        }
        match (call, phase) {
            (CALL_READY, Phase::Init) => {
                if second != u64::from(crate::abi::ABI_VERSION) {
                    return Err(GuestError::Version(second));
                }
                Ok(Next::End(End::Ready(first)))
            }
            (CALL_DONE, Phase::Call) => {
                let output = self.memory.read_vec(second, third).map_err(bad)?;
                match first as i64 {
                    0 => Ok(Next::End(End::Done(output))),
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
                Ok(Next::Resume)
            }
            (CALL_FIND, _) => {
                let name = self.message(call, first, second)?;
                let found = self.template.functions.find(&name);
                Ok(Next::Result(found.map_or(ERR_NO_FUNCTION as u64, |index| index as u64)))
            }
            (CALL_HOST, _) => self.host_call(call, regs),
            (CALL_RANDOM, _) => {
                self.memory.map().check(first, second, true).map_err(bad)?;
                self.fill_random(call, first, second)?;
                Ok(Next::Result(0))
            }
            (CALL_GENERATION, _) => Ok(Next::Result(self.generation)),
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

    fn host_call(&mut self, call: u32, regs: &kvm_regs) -> Result<Next, GuestError> {
        let bad = |access| GuestError::BadPointer { call, access };
        let (result, capacity) = (regs.r10, regs.r8);
        let Some(function) = self.template.functions.get(regs.rdi) else {
            return Ok(Next::Result(ERR_NO_FUNCTION as u64));
        };
        // Both buffers are checked before the function can have an effect.
        self.memory.map().check(result, capacity, true).map_err(bad)?;
        let arguments = self.memory.read_vec(regs.rsi, regs.rdx).map_err(bad)?;
        Ok(Next::Result(match function(&arguments) {
            Ok(bytes) if bytes.len() as u64 <= capacity => {
                self.memory.write(result, &bytes).map_err(bad)?;
                bytes.len() as u64
            }
            Ok(_) => ERR_CAPACITY as u64,
            Err(HostError::Arguments) => ERR_ARGUMENTS as u64,
            Err(HostError::Failed) => ERR_FAILED as u64,
        }))
    }

    fn fill_random(&mut self, call: u32, mut address: u64, mut len: u64) -> Result<(), GuestError> {
        let mut chunk = [0; 256];
        while len > 0 {
            let take = len.min(chunk.len() as u64) as usize;
            let n =
                rustix::rand::getrandom(&mut chunk[..take], rustix::rand::GetRandomFlags::empty())
                    .map_err(|error| GuestError::Unexpected(format!("getrandom: {error}")))?;
            self.memory
                .write(address, &chunk[..n])
                .map_err(|access| GuestError::BadPointer { call, access })?;
            address += n as u64;
            len -= n as u64;
        }
        Ok(())
    }
}

enum Next {
    End(End),
    Resume,
    Result(u64),
}
