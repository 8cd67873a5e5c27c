//! A sandbox: one guest, called and brought back.
//!
//! Promises: after a reset every byte and register the guest can see equals the image; a call that
//! failed leaves a sandbox that refuses calls until it is reset; a reset that failed leaves one that
//! refuses everything. May break it: strategy `None`, which is for measuring only.

use std::sync::Arc;

use afresh_memory::{HostAccess, Image, ResetReport, Slot, SlotConfig, TrackError};
use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::PAGE;
use crate::builder::{BuildError, Config, SandboxBuilder};
use crate::call::{CallError, End, Phase, next_generation};
use crate::crash::NO_FAULT;
use crate::layout::Span;
use crate::machine::{Backing, Machine, Tracking, abilities, extended_state};
use crate::memory::{AccessError, GuestMemory};
use crate::strategy::Strategy;
use crate::template::Template;
use crate::watch::{StopHandle, Watch};

/// Whether a sandbox may be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It may.
    Ready,
    /// A call failed; it must be reset first.
    NeedsReset,
    /// Its state is unknown.
    Quarantined,
}

/// Full rings after which a sandbox gives its ring up.
const OVERFLOWS: u32 = 2;

/// A guest and everything it needs to run.
#[derive(Debug)]
pub struct Sandbox {
    // Dropped in this order: the machine before the memory that it maps.
    pub(crate) watch: Arc<Watch>,
    pub(crate) machine: Machine,
    pub(crate) memory: GuestMemory,
    pub(crate) template: Arc<Template>,
    pub(crate) config: Config,
    pub(crate) generation: u64,
    /// Where calls start.
    pub(crate) entry: u64,
    /// Runs in which the dirty ring filled up.
    pub(crate) ring_overflows: u32,
    sregs: kvm_sregs,
    pub(crate) state: State,
}

/// The first thing that differs from the image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Difference {
    /// A page of memory.
    #[error("page {page} (guest address {:#x}) differs from the image", *page as u64 * PAGE)]
    Memory {
        /// Its index.
        page: usize,
    },
    /// General, special or extended registers.
    #[error("the {0} registers differ from the initial state")]
    Registers(&'static str),
}

/// Why [`Sandbox::verify`] did not confirm that the sandbox is pristine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// It is not.
    #[error(transparent)]
    Differs(#[from] Difference),
    /// It could not be told.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl Sandbox {
    /// Starts describing a sandbox.
    pub fn builder() -> SandboxBuilder {
        SandboxBuilder::default()
    }

    pub(crate) fn start(
        template: Arc<Template>,
        image: &Image,
        config: Config,
        entry: u64,
    ) -> Result<Self, BuildError> {
        let extended = extended_state()?;
        let writable = template.writable.iter().map(|range| range.len).sum();
        let abilities = abilities()?;
        let tracking = config.strategy.tracking(writable, &abilities)?;
        let mut machine = Machine::new(tracking)?;
        let slot_config = SlotConfig {
            strategy: config.strategy.engine(&abilities),
            regions: template.accessible.clone(),
            // KVM writes guest memory in kernel mode.
            host_access: HostAccess::Syscalls,
            // The write set may be all memory: it is resident anyway.
            write_set_limit: usize::MAX,
            stock: config.stock.as_ref().map(|(stock, _)| stock.clone()),
            stock_at_start: config.stock.as_ref().map_or(0, |(_, pages)| *pages),
            ..SlotConfig::default()
        };
        let mut shared = None;
        let slot = if tracking == Tracking::Off {
            let slot = Slot::new(image, slot_config)?;
            let backings = backings(&template, slot.base());
            // SAFETY: the sandbox drops its machine before its memory, and keeps the template.
            unsafe { machine.attach(&backings, slot.capacity()) }?;
            slot
        } else {
            Slot::with_tracker(image, slot_config, |base, pages| {
                let backings = backings(&template, base.as_ptr());
                // SAFETY: as above.
                let attached = unsafe { machine.attach(&backings, pages) };
                let tracker = attached
                    .and_then(|shared| {
                        shared.ok_or(crate::KvmError::NoTracker("dirty log or dirty ring"))
                    })
                    .map_err(|error| TrackError::Backend(Box::new(error)))?;
                Ok(shared.insert(tracker).tracker())
            })?
        };
        let mut sregs = template.system.sregs(machine.created_sregs(), extended);
        sregs.cr2 = NO_FAULT;
        // SAFETY: `Drop` retires the flag before the machine goes.
        let flag = unsafe { machine.stop_flag() };
        let watch = Watch::new(flag).map_err(BuildError::Watchdog)?;
        if config.timeout.is_some() {
            watch.register().map_err(BuildError::Watchdog)?;
        }
        let memory = GuestMemory::new(slot, Arc::clone(&template.map), shared);
        Ok(Self {
            watch,
            machine,
            memory,
            template,
            config,
            generation: next_generation(),
            entry,
            ring_overflows: 0,
            sregs,
            state: State::Ready,
        })
    }

    /// Runs the program's initialisation and makes the result the image.
    pub(crate) fn initialise(&mut self, boot: u64) -> Result<(), BuildError> {
        self.enter(self.entry, [boot, 0, 0]);
        match self.drive(Phase::Init).map_err(BuildError::Init)? {
            End::Ready(entry) => self.entry = entry,
            End::Done(_) | End::Probe => {
                let call = crate::abi::CALL_DONE;
                let error = crate::call::GuestError::MisplacedHypercall(call);
                return Err(BuildError::Init(error.into()));
            }
        }
        let image = self.memory.slot.freeze()?;
        self.memory.slot.set_image(&image, &self.template.accessible)?;
        Ok(())
    }

    fn enter(&mut self, target: u64, arguments: [u64; 3]) {
        let regs = self.entry_regs(target, arguments);
        self.machine.set_regs(&regs);
        self.machine.set_sregs(&self.sregs);
    }

    fn entry_regs(&self, target: u64, arguments: [u64; 3]) -> kvm_regs {
        self.template.system.regs(&self.template.layout, target, arguments)
    }

    /// Whether the sandbox may be used.
    pub(crate) fn check(&self) -> Result<(), CallError> {
        match self.state {
            State::Ready => Ok(()),
            State::NeedsReset => Err(CallError::NeedsReset),
            State::Quarantined => Err(CallError::Quarantined),
        }
    }

    /// Calls the guest with `input` and returns its output. What the guest wrote stays until the
    /// next [`reset`](Self::reset).
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
        let output = self.call_inner(buffer, input).map_err(|error| self.explain(error))?;
        self.state = State::Ready;
        Ok(output)
    }

    /// Once pages of the guest will never come, every failure is that one: KVM says no more than that an
    /// address is bad.
    fn explain(&self, error: CallError) -> CallError {
        self.memory.slot.failure().map_or(error, CallError::Memory)
    }

    fn call_inner(&mut self, buffer: Span, input: &[u8]) -> Result<Vec<u8>, CallError> {
        let call = crate::abi::CALL_DONE;
        let bad = |access| crate::call::GuestError::BadPointer { call, access };
        self.memory.write(buffer.start, input).map_err(bad)?;
        self.enter(self.entry, [buffer.start, input.len() as u64, 0]);
        match self.drive(Phase::Call)? {
            End::Done(output) => Ok(output),
            End::Ready(_) | End::Probe => {
                let call = crate::abi::CALL_READY;
                Err(crate::call::GuestError::MisplacedHypercall(call).into())
            }
        }
    }

    /// Calls the guest, then brings the sandbox back to its image whatever came of the call.
    ///
    /// # Errors
    /// The call's error, or the reset's where that failed.
    pub fn run(&mut self, input: &[u8]) -> Result<Vec<u8>, CallError> {
        let outcome = self.call(input);
        match outcome {
            Err(CallError::Quarantined) => outcome,
            _ => {
                self.reset()?;
                outcome
            }
        }
    }

    /// Brings memory and registers back to the image.
    ///
    /// # Errors
    /// KVM's or the kernel's; the sandbox is then quarantined.
    pub fn reset(&mut self) -> Result<ResetReport, CallError> {
        if self.state == State::Quarantined {
            return Err(CallError::Quarantined);
        }
        let outcome = self.reset_inner();
        self.state = match outcome {
            Ok(_) => State::Ready,
            Err(_) => State::Quarantined,
        };
        self.generation = next_generation();
        outcome
    }

    fn reset_inner(&mut self) -> Result<ResetReport, CallError> {
        if self.config.strategy == Strategy::Auto && self.ring_overflows >= OVERFLOWS {
            self.replace_machine()?;
            return Ok(ResetReport::default());
        }
        if self.state == State::NeedsReset {
            self.machine.revive()?;
        }
        Ok(self.memory.slot.reset()?)
    }

    /// Moves to a new machine with a dirty log: a write set larger than the ring would be protected
    /// and noticed anew in every run.
    #[cold]
    fn replace_machine(&mut self) -> Result<(), CallError> {
        let snapshot = self.pristine().with_strategy(Strategy::WriteSetLog);
        let mut other = snapshot.spawn().map_err(|error| CallError::Replace(Box::new(error)))?;
        std::mem::swap(self, &mut other);
        // Stop handles that were given out keep working.
        self.watch.swap(&other.watch);
        std::mem::swap(&mut self.watch, &mut other.watch);
        Ok(())
    }

    /// How this sandbox is reset: never [`Strategy::Auto`], but what that came to mean.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        match abilities() {
            Ok(abilities) => self.config.strategy.resolve(&abilities).0,
            Err(_) => self.config.strategy,
        }
    }

    /// Compares all memory and all registers with the image. The registers are those of a call's
    /// start, after the entry code cleared the extended state.
    ///
    /// # Errors
    /// The first difference, or why it could not be told.
    pub fn verify(&mut self) -> Result<(), VerifyError> {
        self.check()?;
        if let Some(first) = self.memory.slot.verify().map_err(CallError::from)?.first() {
            return Err(Difference::Memory { page: first.page }.into());
        }
        let probe = self.template.system.probe();
        self.enter(probe, [0; 3]);
        self.drive(Phase::Probe)?;
        let mut regs = self.machine.regs();
        let mut expected = self.entry_regs(probe, [0; 3]);
        // The entry code used these three and stands at, or just after, its `out`.
        (expected.rax, expected.rdx) = (0, 0);
        if regs.rip == probe + 2 {
            regs.rip = probe;
        }
        (expected.rip, expected.rflags, regs.rflags) = (probe, 0, 0);
        if regs != expected {
            return Err(Difference::Registers("general").into());
        }
        if self.machine.get_sregs().map_err(CallError::from)? != self.sregs {
            return Err(Difference::Registers("special").into());
        }
        let state = self.machine.get_xsave().map_err(CallError::from)?;
        let fresh = self.machine.fresh_xsave();
        // Everything but the header, which says how the state is stored rather than what it is.
        let differs =
            |(index, (a, b)): (usize, (&u32, &u32))| !(128..144).contains(&index) && a != b;
        if state.iter().zip(fresh).enumerate().any(differs) {
            return Err(Difference::Registers("extended").into());
        }
        Ok(())
    }

    /// A handle that stops a running call from another thread.
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(Arc::clone(&self.watch))
    }

    /// Copies guest memory out.
    ///
    /// # Errors
    /// Where the range is not readable by the guest.
    pub fn read_memory(&self, address: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.memory.read(address, out)
    }

    /// Copies bytes into guest memory; the next reset undoes it.
    ///
    /// # Errors
    /// Where the range is not writable by the guest.
    pub fn write_memory(&mut self, address: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.memory.write(address, bytes)
    }

    /// Where the guest's heap lies.
    pub fn heap(&self) -> Span {
        self.template.layout.heap
    }

    /// Where the extra regions lie, in the order of the builder.
    pub fn regions(&self) -> Vec<Span> {
        self.template.layout.regions.iter().map(|region| region.span).collect()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.watch.retire();
    }
}

fn backings(template: &Template, base: *mut u8) -> Vec<Backing> {
    let in_slot = |span: Span, read_only, tracked| Backing {
        span,
        host: base.wrapping_add(span.start as usize),
        read_only,
        tracked,
    };
    let span = |range: &afresh_memory::PageRange| Span {
        start: range.byte_start() as u64,
        len: range.byte_len() as u64,
    };
    let mut backings: Vec<Backing> =
        template.writable.iter().map(|range| in_slot(span(range), false, true)).collect();
    backings.extend(template.read_only.iter().map(|span| in_slot(*span, true, false)));
    backings.extend(template.shared.iter().map(|(span, memory)| Backing {
        span: *span,
        host: memory.pointer(0),
        read_only: false,
        tracked: false,
    }));
    let system = template.system.span;
    match backings.iter_mut().find(|backing| backing.span.end() == system.start) {
        Some(main) => main.span.len += system.len,
        None => backings.push(in_slot(system, false, false)),
    }
    backings
}
