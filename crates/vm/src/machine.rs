//! One KVM virtual machine with one vCPU: creating it, running it, reading its writes.
//!
//! Promises: memory slots are set up once and never changed on the way of a call; registers go in
//! and out through the shared run page (`KVM_SYNC_REGS`), so that a call costs one `KVM_RUN` for
//! each exit and nothing else. May break it: a kernel without `KVM_CAP_SYNC_REGS` (before 4.17),
//! which is refused.

use std::collections::BTreeMap;
use std::ffi::c_ulong;
use std::sync::Arc;

use afresh_memory::{Feature, Features};
use afresh_sys::InheritedCell;
use afresh_sys::errno::{EACCES, EFAULT, EINTR, ENODEV, ENOENT, ENXIO, EPERM};
use afresh_sys::kvm::{
    self, DirtyRing, KickSignal, StopFlag, dirty_ring_limit, enable_dirty_ring,
    enable_manual_protect,
};
use afresh_sys::planted::{Bug, is};
use kvm_bindings::{
    CpuId, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_CAP_X86_TRIPLE_FAULT_EVENT,
    KVM_EXIT_DIRTY_RING_FULL, KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY,
    KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, KVM_VCPUEVENT_VALID_NMI_PENDING,
    KVM_VCPUEVENT_VALID_SHADOW, KVM_VCPUEVENT_VALID_TRIPLE_FAULT, Msrs, kvm_debugregs,
    kvm_enable_cap, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_userspace_memory_region,
    kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};

use crate::PAGE;
use crate::abi::PORT;
use crate::error::KvmError;
use crate::layout::Span;
use crate::processor::{Processor, host_template};
use crate::strategy::{DirtyTracking, HostSupport};
use crate::system::ExtendedState;
use crate::tracker::{Source, TrackerHandle, WatchedSlot};

/// KVM facts of a process.
struct Host {
    kvm: Kvm,
    cpuid: CpuId,
    ring_limit: u32,
}

fn host() -> Result<&'static Host, KvmError> {
    static HOST: InheritedCell<Host> = InheritedCell::new();
    if let Some(host) = HOST.get() {
        return Ok(host);
    }
    let host = open()?;
    Ok(HOST.get_or_make(|| host))
}

fn open() -> Result<Host, KvmError> {
    let device = kvm::call("open(/dev/kvm)", Kvm::new).map_err(|error| match error.errno {
        ENOENT | ENXIO | ENODEV => KvmError::Missing,
        EACCES | EPERM => KvmError::Permission,
        _ => KvmError::Call(error),
    })?;
    for (cap, name) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::SyncRegs, "KVM_CAP_SYNC_REGS"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    ] {
        if !device.check_extension(cap) {
            return Err(KvmError::Lacks(name));
        }
    }
    let cpuid =
        kvm::call("KVM_GET_SUPPORTED_CPUID", || device.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
    let ring_limit = dirty_ring_limit(&device);
    Ok(Host { kvm: device, cpuid, ring_limit })
}

/// The CPUID leaves that KVM can show.
pub(crate) fn supported_cpuid() -> Result<&'static CpuId, KvmError> {
    Ok(&host()?.cpuid)
}

/// The abilities of this host.
pub(crate) fn abilities() -> Result<HostSupport, KvmError> {
    let host = host()?;
    let manual = host.kvm.check_extension_raw(c_ulong::from(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2));
    let features = Features::host();
    Ok(HostSupport {
        ring: host.ring_limit,
        log: manual > 0,
        scan: features.has(Feature::UffdAsync) && features.has(Feature::PagemapScan),
        xsave: host_template(&host.cpuid).has("xsave"),
    })
}

impl HostSupport {
    /// This host's.
    ///
    /// # Errors
    /// [`KvmError`] where KVM cannot be used at all.
    pub fn host() -> Result<Self, KvmError> {
        abilities()
    }
}

/// A range of guest-physical memory and its backing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemorySlot {
    pub(crate) span: Span,
    pub(crate) host: *mut u8,
    pub(crate) read_only: bool,
    /// Whether a reset undoes the guest's writes.
    pub(crate) tracked: bool,
}

/// Why the vCPU stopped.
#[derive(Debug)]
pub(crate) enum Exit {
    /// An `out` to the hypercall port with this value.
    Hypercall(u32),
    /// A fault without a handler.
    Shutdown,
    /// A signal, or the stop flag.
    Interrupted,
    /// The dirty ring must be emptied.
    RingFull,
    /// Anything else, in words.
    Other(String),
}

/// The part that KVM must finish when the guest runs next; see the head of this file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PendingExit {
    Nothing,
    /// An `out` at this address.
    Out(u64),
    /// Something that one run with the stop flag up finishes.
    Unfinished,
    /// Nobody knows.
    Unknown,
}

/// Registers that KVM reads in one call at most (`MAX_IO_MSRS`).
const MSRS_AT_ONCE: usize = 256;
/// RFLAGS: a debug exception after every instruction.
const TRAP: u64 = 1 << 8;
/// More runs than any instruction needs to be finished: KVM splits one into two at most.
const FINISHING_RUNS: usize = 16;

/// Extended state of a new vCPU, the same for all.
static FRESH_XSAVE: InheritedCell<[u32; 1024]> = InheritedCell::new();

/// A machine.
#[derive(Debug)]
pub(crate) struct Machine {
    vcpu: VcpuFd,
    vm: Arc<VmFd>,
    created: kvm_sregs,
    fresh: &'static [u32; 1024],
    tracking: DirtyTracking,
    ring: Option<DirtyRing>,
    left: PendingExit,
    /// The extended state that the guest may use, if the processor has XCR0.
    xcr0: Option<u64>,
    /// The vCPU events that can be set, and are set to none.
    events: u32,
    debug: kvm_debugregs,
    /// The thread on which every signal interrupts the vCPU; 0 for none.
    admitted: i32,
}

impl Machine {
    /// Creates a machine without memory.
    pub(crate) fn new(tracking: DirtyTracking, processor: &Processor) -> Result<Self, KvmError> {
        let host = host()?;
        let vm = kvm::call("KVM_CREATE_VM", || host.kvm.create_vm())?;
        match tracking {
            DirtyTracking::Off => {}
            DirtyTracking::Log => enable_manual_protect(&vm)
                .map_err(|_| KvmError::NoTracker("dirty log with manual protection"))?,
            DirtyTracking::Ring(entries) => {
                enable_dirty_ring(&vm, entries).map_err(|_| KvmError::NoTracker("dirty ring"))?
            }
        }
        let mut events = KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW;
        let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_TRIPLE_FAULT_EVENT, ..Default::default() };
        cap.args[0] = 1;
        if vm.enable_cap(&cap).is_ok() {
            events |= KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
        }
        let mut vcpu = kvm::call("KVM_CREATE_VCPU", || vm.create_vcpu(0))?;
        let ring = match tracking {
            DirtyTracking::Ring(entries) => Some(DirtyRing::map(&vcpu, entries)?),
            _ => None,
        };
        kvm::call("KVM_SET_CPUID2", || vcpu.set_cpuid2(&processor.cpuid))?;
        // Elsewhere the guest's extended state is not KVM's to set.
        let xsave = processor.extended == ExtendedState::Xsave;
        let xcr0 = xsave.then_some(processor.xcr0);
        set_xcr0(&vcpu, xcr0)?;
        let created = kvm::call("KVM_GET_SREGS", || vcpu.get_sregs())?;
        let fresh = match FRESH_XSAVE.get() {
            Some(fresh) => fresh,
            None => {
                let xsave = kvm::call("KVM_GET_XSAVE", || vcpu.get_xsave())?;
                FRESH_XSAVE.get_or_make(|| xsave.region)
            }
        };
        let debug = kvm::call("KVM_GET_DEBUGREGS", || vcpu.get_debug_regs())?;
        vcpu.get_kvm_run().kvm_valid_regs = u64::from(KVM_SYNC_X86_REGS);
        let (vm, left) = (Arc::new(vm), PendingExit::Nothing);
        let admitted = 0;
        Ok(Self { vcpu, vm, created, fresh, tracking, ring, left, xcr0, events, debug, admitted })
    }

    /// Gives the machine its memory, once. Returns the tracking resources for the engine, unless
    /// tracking is off. `pages` bounds the guest-physical space.
    ///
    /// # Safety
    /// The memory must stay mapped while the machine exists.
    pub(crate) unsafe fn attach(
        &mut self,
        memory: &[MemorySlot],
        pages: usize,
    ) -> Result<Option<TrackerHandle>, KvmError> {
        let mut watched = Vec::new();
        for (number, backing) in memory.iter().enumerate() {
            let number = number as u32;
            let track = backing.tracked && self.tracking != DirtyTracking::Off;
            let region = kvm_userspace_memory_region {
                slot: number,
                flags: if track { KVM_MEM_LOG_DIRTY_PAGES } else { 0 }
                    | if backing.read_only { KVM_MEM_READONLY } else { 0 },
                guest_phys_addr: backing.span.start,
                memory_size: backing.span.len,
                userspace_addr: backing.host as u64,
            };
            kvm::call("KVM_SET_USER_MEMORY_REGION", || {
                // SAFETY: the memory is mapped and stays so, by this function's contract.
                unsafe { self.vm.set_user_memory_region(region) }
            })?;
            if track {
                let pages = (backing.span.len / PAGE) as usize;
                let words =
                    if self.tracking == DirtyTracking::Log { pages.div_ceil(64) } else { 0 };
                watched.push(WatchedSlot {
                    number,
                    first: (backing.span.start / PAGE) as usize,
                    pages,
                    bitmap: vec![0; words],
                });
            }
        }
        let source = match (self.tracking, self.ring.take()) {
            (DirtyTracking::Ring(_), Some(ring)) => Source::Ring(ring),
            (DirtyTracking::Log, _) => Source::Log,
            _ => return Ok(None),
        };
        Ok(Some(TrackerHandle::new(Arc::clone(&self.vm), source, watched, pages)))
    }

    /// Special registers as KVM created them.
    pub(crate) fn created_sregs(&self) -> &kvm_sregs {
        &self.created
    }

    /// The byte that makes the vCPU stop.
    ///
    /// # Safety
    /// It must not be used after the machine is dropped.
    pub(crate) unsafe fn stop_flag(&mut self) -> StopFlag {
        // SAFETY: the caller's contract.
        unsafe { StopFlag::new(&mut self.vcpu) }
    }

    /// General registers at the last exit.
    pub(crate) fn regs(&mut self) -> kvm_regs {
        self.vcpu.sync_regs_mut().regs
    }

    /// Sets general registers before the next run.
    pub(crate) fn set_regs(&mut self, regs: &kvm_regs) {
        self.vcpu.sync_regs_mut().regs = *regs;
        self.vcpu.get_kvm_run().kvm_dirty_regs |= u64::from(KVM_SYNC_X86_REGS);
    }

    /// Sets special registers before the next run.
    pub(crate) fn set_sregs(&mut self, sregs: &kvm_sregs) {
        self.vcpu.sync_regs_mut().sregs = *sregs;
        self.vcpu.get_kvm_run().kvm_dirty_regs |= u64::from(KVM_SYNC_X86_SREGS);
    }

    /// Special registers now; a system call.
    pub(crate) fn get_sregs(&self) -> Result<kvm_sregs, KvmError> {
        Ok(kvm::call("KVM_GET_SREGS", || self.vcpu.get_sregs())?)
    }

    /// Extended state now, as words.
    pub(crate) fn get_xsave(&self) -> Result<[u32; 1024], KvmError> {
        Ok(kvm::call("KVM_GET_XSAVE", || self.vcpu.get_xsave())?.region)
    }

    /// Extended state of a vCPU that never ran.
    pub(crate) fn fresh_xsave(&self) -> &'static [u32; 1024] {
        self.fresh
    }

    /// The name of other state that differs from a new vCPU: the guest cannot read it, but some of
    /// it decides how the next call begins.
    pub(crate) fn compare_rest(
        &self,
        processor: &Processor,
    ) -> Result<Option<&'static str>, KvmError> {
        let debug = kvm::call("KVM_GET_DEBUGREGS", || self.vcpu.get_debug_regs())?;
        if debug != self.debug {
            return Ok(Some("debug"));
        }
        if let Some(xcr0) = self.xcr0 {
            let xcrs = kvm::call("KVM_GET_XCRS", || self.vcpu.get_xcrs())?;
            if xcrs.xcrs[0].value != xcr0 {
                return Ok(Some("extended control"));
            }
        }
        let fresh = match processor.fresh_msrs.get() {
            Some(fresh) => fresh,
            None => {
                let fresh = read_msrs(&Self::new(DirtyTracking::Off, processor)?.vcpu)?;
                processor.fresh_msrs.get_or_make(|| fresh)
            }
        };
        if read_msrs(&self.vcpu)? != *fresh {
            return Ok(Some("model-specific"));
        }
        let events = kvm::call("KVM_GET_VCPU_EVENTS", || self.vcpu.get_vcpu_events())?;
        let waiting = [
            events.exception.injected,
            events.exception.pending,
            events.interrupt.injected,
            events.interrupt.shadow,
            events.nmi.injected,
            events.nmi.pending,
            events.nmi.masked,
            events.smi.pending,
            events.triple_fault.pending,
        ];
        Ok(waiting.iter().any(|event| *event != 0).then_some("event"))
    }

    /// Prepares the vCPU for a call that starts at `rip`, after one that ended by itself.
    #[inline]
    pub(crate) fn settle(&mut self, rip: u64) -> Result<(), KvmError> {
        match self.left {
            PendingExit::Nothing => Ok(()),
            PendingExit::Out(at) if at != rip => Ok(()),
            PendingExit::Out(_) => {
                self.finish().and_then(|done| done.then_some(()).ok_or(KvmError::Unfinished))
            }
            // `revive` comes first.
            PendingExit::Unfinished | PendingExit::Unknown => Err(KvmError::Unfinished),
        }
    }

    /// Resets the vCPU after a call that did not end by itself: finishes incomplete operations, and
    /// removes pending events. Says whether it can be used again; if not, only a new machine will
    /// do. Comes before memory is reset, because an unfinished operation may write there.
    pub(crate) fn revive(&mut self) -> Result<bool, KvmError> {
        if self.left == PendingExit::Unknown {
            return Ok(false);
        }
        kvm::call("KVM_SET_MP_STATE", || self.vcpu.set_mp_state(kvm_mp_state::default()))?;
        if !self.finish()? {
            return Ok(false);
        }
        let none = kvm_vcpu_events { flags: self.events, ..Default::default() };
        kvm::call("KVM_SET_VCPU_EVENTS", || self.vcpu.set_vcpu_events(&none))?;
        // Not visible to the guest, but changed by its faults.
        kvm::call("KVM_SET_DEBUGREGS", || self.vcpu.set_debug_regs(&self.debug))?;
        // A processor that was reset by a shutdown (AMD) may have lost it.
        set_xcr0(&self.vcpu, self.xcr0)?;
        Ok(true)
    }

    /// Has KVM finish the instruction that the last exit was a part of, without running another.
    /// Says whether that is certain.
    #[cold]
    fn finish(&mut self) -> Result<bool, KvmError> {
        if is(Bug::Exit) {
            self.left = PendingExit::Nothing;
            return Ok(true);
        }
        // Registers that were set for a call that did not begin.
        self.vcpu.get_kvm_run().kvm_dirty_regs = 0;
        self.left = PendingExit::Unknown;
        self.vcpu.set_kvm_immediate_exit(1);
        for _ in 0..FINISHING_RUNS {
            match kvm::run(&mut self.vcpu) {
                // The flag is looked at after the rest was done, and not before.
                Err(error) if error.errno == EINTR => {
                    self.left = PendingExit::Nothing;
                    break;
                }
                Err(error) => {
                    self.vcpu.set_kvm_immediate_exit(0);
                    return Err(error.into());
                }
                Ok(
                    VcpuExit::IoIn(..)
                    | VcpuExit::IoOut(..)
                    | VcpuExit::MmioRead(..)
                    | VcpuExit::MmioWrite(..),
                ) => {}
                Ok(_) => break,
            }
        }
        self.vcpu.set_kvm_immediate_exit(0);
        Ok(self.left == PendingExit::Nothing)
    }

    /// Makes sure that the kick signal interrupts the vCPU on the calling thread, whose number is
    /// `thread`. Costs nothing while calls stay on one thread and are not interrupted.
    #[inline]
    pub(crate) fn admit(&mut self, kick: KickSignal, thread: i32) -> Result<(), KvmError> {
        if self.admitted == thread { Ok(()) } else { self.admit_all(kick, thread) }
    }

    #[cold]
    fn admit_all(&mut self, kick: KickSignal, thread: i32) -> Result<(), KvmError> {
        kick.admit_all(&self.vcpu)?;
        self.admitted = thread;
        Ok(())
    }

    /// After an interruption that did not stop the call: signals that the calling thread blocks
    /// interrupt it no more.
    #[cold]
    pub(crate) fn admit_unblocked(&mut self, kick: KickSignal) -> Result<(), KvmError> {
        self.admitted = 0;
        Ok(kick.admit(&self.vcpu)?)
    }

    /// Runs until the next exit.
    #[inline]
    pub(crate) fn run(&mut self) -> Result<Exit, KvmError> {
        let (exit, left) = match kvm::run(&mut self.vcpu) {
            Ok(VcpuExit::IoOut(PORT, data)) if data.len() == 4 => {
                let number = u32::from_ne_bytes([data[0], data[1], data[2], data[3]]);
                (Exit::Hypercall(number), PendingExit::Out(self.regs().rip))
            }
            Ok(VcpuExit::Shutdown) => (Exit::Shutdown, PendingExit::Nothing),
            Ok(VcpuExit::Intr) => (Exit::Interrupted, PendingExit::Nothing),
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                (Exit::RingFull, PendingExit::Nothing)
            }
            Ok(VcpuExit::IoIn(port, data)) => (
                Exit::Other(format!("it read {} bytes from port {port:#x}", data.len())),
                PendingExit::Unfinished,
            ),
            Ok(VcpuExit::IoOut(port, data)) => {
                let what = format!("it wrote {} bytes to port {port:#x}", data.len());
                (Exit::Other(what), PendingExit::Unfinished)
            }
            Ok(VcpuExit::MmioRead(address, _) | VcpuExit::MmioWrite(address, _)) => {
                let what = format!("it used address {address:#x}, where there is no memory");
                (Exit::Other(what), PendingExit::Unfinished)
            }
            Ok(VcpuExit::InternalError) => {
                let what =
                    "an instruction that this host's KVM cannot emulate (KVM_EXIT_INTERNAL_ERROR)";
                (Exit::Other(what.into()), PendingExit::Unknown)
            }
            Ok(other) => (Exit::Other(format!("{other:?}")), PendingExit::Unknown),
            Err(error) if error.errno == EINTR => (Exit::Interrupted, PendingExit::Nothing),
            Err(error) => {
                // Memory that the host does not provide: the instruction did not happen.
                self.left = if error.errno == EFAULT {
                    PendingExit::Unfinished
                } else {
                    PendingExit::Unknown
                };
                return Err(error.into());
            }
        };
        if self.regs().rflags & TRAP != 0 {
            self.left = PendingExit::Unknown;
            return Ok(match exit {
                Exit::Hypercall(_) => {
                    Exit::Other("it made a hypercall with its trap flag set".into())
                }
                other => other,
            });
        }
        self.left = left;
        Ok(exit)
    }
}

/// Sets XCR0, if the processor has it.
fn set_xcr0(vcpu: &VcpuFd, xcr0: Option<u64>) -> Result<(), KvmError> {
    let Some(value) = xcr0 else { return Ok(()) };
    let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
    xcrs.xcrs[0].value = value;
    Ok(kvm::call("KVM_SET_XCRS", || vcpu.set_xcrs(&xcrs))?)
}

/// The model-specific registers that KVM can read, less those that count time or events.
fn read_msrs(vcpu: &VcpuFd) -> Result<BTreeMap<u32, u64>, KvmError> {
    let device = &host()?.kvm;
    let list = kvm::call("KVM_GET_MSR_INDEX_LIST", || device.get_msr_index_list())?;
    let wanted: Vec<u32> = list.as_slice().iter().copied().filter(|it| !counts(*it)).collect();
    let mut found = BTreeMap::new();
    let mut rest = &wanted[..];
    while !rest.is_empty() {
        let entry = |&index: &u32| kvm_msr_entry { index, ..Default::default() };
        let entries: Vec<_> = rest.iter().take(MSRS_AT_ONCE).map(entry).collect();
        let mut msrs =
            Msrs::from_entries(&entries).map_err(|_| KvmError::Lacks("room for MSRs"))?;
        let read = kvm::call("KVM_GET_MSRS", || vcpu.get_msrs(&mut msrs))?;
        found.extend(msrs.as_slice()[..read].iter().map(|entry| (entry.index, entry.data)));
        // It stops at the first that this processor lacks.
        let skip = if read < entries.len() { read + 1 } else { read };
        rest = &rest[skip..];
    }
    Ok(found)
}

/// Whether a register changes by itself: the time stamp and its kin, and Hyper-V's clock.
fn counts(index: u32) -> bool {
    matches!(index, 0x10 | 0x3b | 0xe7 | 0xe8 | 0x6e0 | 0x4000_0020)
}
