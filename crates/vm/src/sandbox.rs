//! A sandbox: one guest, called and reset.
//!
//! Promises: after a reset every byte and register the guest can see equals the image; a call that
//! failed leaves a sandbox that refuses calls until it is reset; a reset that failed leaves one
//! that refuses everything.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use afresh_memory::{HostAccess, Image, Slot, SlotConfig, TrackError};
use afresh_sys::fork;
use afresh_sys::planted::{Bug, is};
use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::config::Config;
use crate::cpu::CpuTemplate;
use crate::crash::NO_FAULT;
use crate::error::{BuildError, CallError, KvmError};
use crate::generation::next_generation;
use crate::layout::Span;
use crate::machine::{Machine, MemorySlot, abilities};
use crate::memory::{AccessError, GuestMemory};
use crate::strategy::{DirtyTracking, ResetMethod};
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
    /// The process that made it, as `fork::generation` numbers it.
    process: u32,
    /// Where calls start.
    pub(crate) entry: u64,
    /// Bytes of randomness that the present call has drawn.
    pub(crate) drawn: u64,
    /// Runs in which the dirty ring filled up.
    pub(crate) ring_overflows: u32,
    pub(crate) sregs: kvm_sregs,
    pub(crate) state: State,
    /// Nothing ran and nothing was written since memory last equalled the image.
    pub(crate) untouched: bool,
}

impl Sandbox {
    pub(crate) fn start(
        template: Arc<Template>,
        image: &Image,
        config: Config,
        entry: u64,
    ) -> Result<Self, BuildError> {
        let writable = template.writable.iter().map(|range| range.len).sum();
        let abilities = abilities()?;
        let tracking = config.reset.dirty_tracking(writable, &abilities)?;
        let mut machine = Machine::new(tracking, &template.processor)?;
        let slot_config = SlotConfig {
            strategy: config.reset.engine(&abilities),
            regions: template.accessible.clone(),
            // KVM writes guest memory in kernel mode.
            host_access: HostAccess::Syscalls,
            // The write set may be all memory: it is resident anyway.
            write_set_limit: usize::MAX,
            zero_source: config.zero_source.as_ref().map(|(source, _)| source.clone()),
            zero_pages_at_start: config.zero_source.as_ref().map_or(0, |(_, pages)| *pages),
            ..SlotConfig::default()
        };
        let mut shared = None;
        let slot = if tracking == DirtyTracking::Off {
            let slot = Slot::new(image, slot_config)?;
            let memory_slots = memory_slots(&template, slot.base());
            // SAFETY: the sandbox drops its machine before its memory, and keeps the template.
            unsafe { machine.attach(&memory_slots, slot.capacity()) }?;
            slot
        } else {
            Slot::with_tracker(image, slot_config, |base, pages| {
                let memory_slots = memory_slots(&template, base.as_ptr());
                // SAFETY: as above.
                let attached = unsafe { machine.attach(&memory_slots, pages) };
                let tracker = attached
                    .and_then(|shared| shared.ok_or(KvmError::NoTracker("dirty log or dirty ring")))
                    .map_err(|error| TrackError::Backend(Box::new(error)))?;
                Ok(shared.insert(tracker).tracker())
            })?
        };
        let mut sregs = template.system.sregs(machine.created_sregs(), template.processor.extended);
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
            process: fork::generation(),
            entry,
            drawn: 0,
            ring_overflows: 0,
            sregs,
            state: State::Ready,
            untouched: true,
        })
    }

    pub(crate) fn enter(&mut self, target: u64, arguments: [u64; 3]) -> Result<(), CallError> {
        let mut regs = self.entry_regs(target, arguments);
        self.machine.settle(regs.rip)?;
        if is(Bug::Register) {
            regs.rbx = self.machine.regs().rbx;
        }
        self.machine.set_regs(&regs);
        self.machine.set_sregs(&self.sregs);
        Ok(())
    }

    pub(crate) fn entry_regs(&self, target: u64, arguments: [u64; 3]) -> kvm_regs {
        self.template.system.regs(&self.template.layout, target, arguments)
    }

    /// Refuses a sandbox that the parent of this process made. The dirty ring and the vCPU's run
    /// page are shared with it, so actions here would be missing, or take effect, there.
    pub(crate) fn check_process(&self) -> Result<(), CallError> {
        if self.process == fork::generation() { Ok(()) } else { Err(CallError::Forked) }
    }

    /// Whether the sandbox may be used.
    pub(crate) fn check(&self) -> Result<(), CallError> {
        self.check_process()?;
        match self.state {
            // A checkpoint that failed may have left memory of unknown content.
            State::Ready if self.memory.slot.quarantined().is_some() => Err(CallError::Quarantined),
            State::Ready => Ok(()),
            State::NeedsReset => Err(CallError::NeedsReset),
            State::Quarantined => Err(CallError::Quarantined),
        }
    }

    /// The reset method of this sandbox, with automatic parts resolved.
    #[must_use]
    pub fn reset_method(&self) -> ResetMethod {
        self.config.reset.here()
    }

    /// Whether the last call was cut short, so that a reset is needed.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.state != State::Ready
    }

    /// The time limit of a call; `None` if it has none.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        self.config.timeout
    }

    /// Sets the time limit of the following calls. The state of the guest does not have it.
    ///
    /// # Errors
    /// When the thread that ends late calls cannot be started.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_some() {
            self.watch.register()?;
        }
        self.config.timeout = timeout;
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
        self.untouched = false;
        self.memory.write(address, bytes)
    }

    /// The processor that the guest sees.
    #[must_use]
    pub fn cpu(&self) -> &CpuTemplate {
        &self.template.processor.template
    }

    /// Bytes of private memory that the sandbox keeps resident between calls.
    #[must_use]
    pub fn write_set_bytes(&self) -> usize {
        self.memory.slot.write_set_len() * crate::PAGE as usize
    }

    /// The guest's heap.
    pub fn heap(&self) -> Span {
        self.template.layout.heap
    }

    /// The extra regions, in the order of the builder.
    pub fn regions(&self) -> Vec<Span> {
        self.template.layout.regions.iter().map(|region| region.span).collect()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.watch.retire();
    }
}

fn memory_slots(template: &Template, base: *mut u8) -> Vec<MemorySlot> {
    let in_slot = |span: Span, read_only, tracked| MemorySlot {
        span,
        host: base.wrapping_add(span.start as usize),
        read_only,
        tracked,
    };
    let span = |range: &afresh_memory::PageRange| Span {
        start: range.byte_start() as u64,
        len: range.byte_len() as u64,
    };
    let mut memory_slots: Vec<MemorySlot> =
        template.writable.iter().map(|range| in_slot(span(range), false, true)).collect();
    memory_slots.extend(template.read_only.iter().map(|span| in_slot(*span, true, false)));
    memory_slots.extend(template.shared.iter().map(|(span, memory)| MemorySlot {
        span: *span,
        host: memory.pointer(0),
        read_only: false,
        tracked: false,
    }));
    let system = template.system.span;
    match memory_slots.iter_mut().find(|backing| backing.span.end() == system.start) {
        Some(main) => main.span.len += system.len,
        None => memory_slots.push(in_slot(system, false, false)),
    }
    memory_slots
}
