//! One KVM virtual machine with one vCPU: creating it, running it, reading what it wrote.
//!
//! Promises: memory slots are set up once and never changed on the way of a call; registers go in
//! and out through the shared run page (`KVM_SYNC_REGS`), so that a call costs one `KVM_RUN` for
//! each exit and nothing else. May break it: a kernel without `KVM_CAP_SYNC_REGS` (before 4.17),
//! which is refused.

use std::ffi::c_ulong;
use std::io;
use std::sync::{Arc, OnceLock};

use afresh_memory::{Feature, Features};
use afresh_sys::kvm::{
    DirtyRing, StopFlag, dirty_ring_limit, enable_dirty_ring, enable_manual_protect,
};
use kvm_bindings::{
    CpuId, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_EXIT_DIRTY_RING_FULL, KVM_MAX_CPUID_ENTRIES,
    KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, kvm_regs,
    kvm_sregs, kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::io::Errno;

use crate::PAGE;
use crate::abi::PORT;
use crate::layout::Span;
use crate::strategy::Abilities;
use crate::system::ExtendedState;
use crate::tracker::{Shared, Source, Watched};

/// Why KVM cannot be used, or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// `/dev/kvm` does not exist.
    #[error(
        "/dev/kvm is missing: load the kvm_intel or kvm_amd module, or enable nested virtualisation"
    )]
    Missing,
    /// `/dev/kvm` may not be opened.
    #[error("no permission for /dev/kvm: add this user to the group that owns it (often `kvm`)")]
    Permission,
    /// `/dev/kvm` cannot be opened for another reason.
    #[error("/dev/kvm cannot be opened")]
    Open(#[source] io::Error),
    /// The kernel lacks something that every sandbox needs.
    #[error("this kernel's KVM lacks {0}; Linux 5.5 or newer is needed")]
    Lacks(&'static str),
    /// The tracker that was asked for is not available.
    #[error("this kernel's KVM has no {0}; choose another tracker")]
    NoTracker(&'static str),
    /// A KVM call failed.
    #[error("KVM: {what} failed")]
    Call {
        /// Which call.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

pub(crate) fn failed<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> KvmError {
    move |error| KvmError::Call { what, source: error.into() }
}

/// What one process needs to know of KVM.
struct Host {
    kvm: Kvm,
    cpuid: CpuId,
    extended: ExtendedState,
    xcr0: u64,
    ring_limit: u32,
}

fn host() -> Result<&'static Host, KvmError> {
    static HOST: OnceLock<Host> = OnceLock::new();
    if let Some(host) = HOST.get() {
        return Ok(host);
    }
    let host = open()?;
    Ok(HOST.get_or_init(|| host))
}

fn open() -> Result<Host, KvmError> {
    let kvm = Kvm::new().map_err(|error| match Errno::from_raw_os_error(error.errno()) {
        Errno::NOENT | Errno::NXIO | Errno::NODEV => KvmError::Missing,
        Errno::ACCESS | Errno::PERM => KvmError::Permission,
        _ => KvmError::Open(error.into()),
    })?;
    for (cap, name) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::SyncRegs, "KVM_CAP_SYNC_REGS"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    ] {
        if !kvm.check_extension(cap) {
            return Err(KvmError::Lacks(name));
        }
    }
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(failed("KVM_GET_SUPPORTED_CPUID"))?;
    let leaf = |function, index| {
        cpuid.as_slice().iter().find(|e| e.function == function && e.index == index)
    };
    let xsave = leaf(1, 0).is_some_and(|e| e.ecx >> 26 & 1 == 1);
    // x87, SSE, AVX and AVX-512; components with other rules are left out.
    let xcr0 = leaf(0xd, 0).map_or(3, |e| u64::from(e.eax) & 0xe7 | 3);
    let extended = if xsave { ExtendedState::Xsave } else { ExtendedState::Fxsave };
    let ring_limit = dirty_ring_limit(&kvm);
    Ok(Host { kvm, cpuid, extended, xcr0, ring_limit })
}

/// The form of extended state on this host.
pub(crate) fn extended_state() -> Result<ExtendedState, KvmError> {
    Ok(host()?.extended)
}

/// How KVM reports what the guest wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracking {
    /// Not at all.
    Off,
    /// A bitmap for each memory slot.
    Log,
    /// A ring of entries, of this many.
    Ring(u32),
}

/// What this host offers.
pub(crate) fn abilities() -> Result<Abilities, KvmError> {
    let host = host()?;
    let manual = host.kvm.check_extension_raw(c_ulong::from(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2));
    let features = Features::host();
    Ok(Abilities {
        ring: host.ring_limit,
        log: manual > 0,
        scan: features.has(Feature::UffdAsync) && features.has(Feature::PagemapScan),
        xsave: host.extended == ExtendedState::Xsave,
    })
}

/// A range of guest-physical memory and what backs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backing {
    pub(crate) span: Span,
    pub(crate) host: *mut u8,
    pub(crate) read_only: bool,
    /// Whether the guest's writes are part of what a reset undoes.
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

/// Extended state of a new vCPU, the same for all.
static FRESH_XSAVE: OnceLock<[u32; 1024]> = OnceLock::new();

/// A machine.
#[derive(Debug)]
pub(crate) struct Machine {
    vcpu: VcpuFd,
    vm: Arc<VmFd>,
    created: kvm_sregs,
    fresh: &'static [u32; 1024],
    tracking: Tracking,
    ring: Option<DirtyRing>,
}

impl Machine {
    /// Creates a machine without memory.
    pub(crate) fn new(tracking: Tracking) -> Result<Self, KvmError> {
        let host = host()?;
        let vm = host.kvm.create_vm().map_err(failed("KVM_CREATE_VM"))?;
        match tracking {
            Tracking::Off => {}
            Tracking::Log => enable_manual_protect(&vm)
                .map_err(|_| KvmError::NoTracker("dirty log with manual protection"))?,
            Tracking::Ring(entries) => {
                enable_dirty_ring(&vm, entries).map_err(|_| KvmError::NoTracker("dirty ring"))?
            }
        }
        let mut vcpu = vm.create_vcpu(0).map_err(failed("KVM_CREATE_VCPU"))?;
        let ring = match tracking {
            Tracking::Ring(entries) => {
                Some(DirtyRing::map(&vcpu, entries).map_err(failed("mapping the dirty ring"))?)
            }
            _ => None,
        };
        vcpu.set_cpuid2(&host.cpuid).map_err(failed("KVM_SET_CPUID2"))?;
        if host.extended == ExtendedState::Xsave {
            let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
            xcrs.xcrs[0].value = host.xcr0;
            vcpu.set_xcrs(&xcrs).map_err(failed("KVM_SET_XCRS"))?;
        }
        let created = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
        let fresh = match FRESH_XSAVE.get() {
            Some(fresh) => fresh,
            None => {
                let xsave = vcpu.get_xsave().map_err(failed("KVM_GET_XSAVE"))?;
                FRESH_XSAVE.get_or_init(|| xsave.region)
            }
        };
        vcpu.get_kvm_run().kvm_valid_regs = u64::from(KVM_SYNC_X86_REGS);
        Ok(Self { vcpu, vm: Arc::new(vm), created, fresh, tracking, ring })
    }

    /// Gives the machine its memory, once. Returns what the engine needs to track it, unless
    /// tracking is off. `pages` bounds the guest-physical space.
    ///
    /// # Safety
    /// The backings must stay mapped for as long as the machine runs.
    pub(crate) unsafe fn attach(
        &mut self,
        memory: &[Backing],
        pages: usize,
    ) -> Result<Option<Shared>, KvmError> {
        let mut watched = Vec::new();
        for (number, backing) in memory.iter().enumerate() {
            let number = number as u32;
            let track = backing.tracked && self.tracking != Tracking::Off;
            let region = kvm_userspace_memory_region {
                slot: number,
                flags: if track { KVM_MEM_LOG_DIRTY_PAGES } else { 0 }
                    | if backing.read_only { KVM_MEM_READONLY } else { 0 },
                guest_phys_addr: backing.span.start,
                memory_size: backing.span.len,
                userspace_addr: backing.host as u64,
            };
            // SAFETY: the backing is mapped and stays so, by this function's contract.
            unsafe { self.vm.set_user_memory_region(region) }
                .map_err(failed("KVM_SET_USER_MEMORY_REGION"))?;
            if track {
                let pages = (backing.span.len / PAGE) as usize;
                let words = if self.tracking == Tracking::Log { pages.div_ceil(64) } else { 0 };
                watched.push(Watched {
                    number,
                    first: (backing.span.start / PAGE) as usize,
                    pages,
                    bitmap: vec![0; words],
                });
            }
        }
        let source = match (self.tracking, self.ring.take()) {
            (Tracking::Ring(_), Some(ring)) => Source::Ring(ring),
            (Tracking::Log, _) => Source::Log,
            _ => return Ok(None),
        };
        Ok(Some(Shared::new(Arc::clone(&self.vm), source, watched, pages)))
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
        self.vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))
    }

    /// Extended state now, as words.
    pub(crate) fn get_xsave(&self) -> Result<[u32; 1024], KvmError> {
        Ok(self.vcpu.get_xsave().map_err(failed("KVM_GET_XSAVE"))?.region)
    }

    /// Extended state of a vCPU that never ran.
    pub(crate) fn fresh_xsave(&self) -> &'static [u32; 1024] {
        self.fresh
    }

    /// Makes the vCPU runnable after a shutdown: no pending event, then every register at the
    /// next run.
    pub(crate) fn revive(&mut self) -> Result<(), KvmError> {
        self.vcpu
            .set_vcpu_events(&kvm_vcpu_events::default())
            .map_err(failed("KVM_SET_VCPU_EVENTS"))?;
        self.vcpu
            .set_mp_state(kvm_bindings::kvm_mp_state::default())
            .map_err(failed("KVM_SET_MP_STATE"))
    }

    /// Runs until the next exit.
    #[inline]
    pub(crate) fn run(&mut self) -> Result<Exit, KvmError> {
        Ok(match self.vcpu.run() {
            Ok(VcpuExit::IoOut(PORT, data)) => match data.first_chunk() {
                Some(number) if data.len() == 4 => Exit::Hypercall(u32::from_ne_bytes(*number)),
                _ => Exit::Other(format!("a hypercall of {} bytes instead of 4", data.len())),
            },
            Ok(VcpuExit::Shutdown) => Exit::Shutdown,
            Ok(VcpuExit::Intr) => Exit::Interrupted,
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => Exit::RingFull,
            Ok(VcpuExit::InternalError) => Exit::Other(
                "an instruction that this host's KVM cannot emulate (KVM_EXIT_INTERNAL_ERROR)"
                    .into(),
            ),
            Ok(other) => Exit::Other(format!("{other:?}")),
            Err(error) if error.errno() == Errno::INTR.raw_os_error() => Exit::Interrupted,
            Err(error) => return Err(failed("KVM_RUN")(error)),
        })
    }
}
