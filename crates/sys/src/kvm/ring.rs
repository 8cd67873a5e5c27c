//! The dirty ring: KVM appends one entry for each page at its first write, in memory shared with
//! us, so that reading the writes of a run costs no system call.
//!
//! Promises: `pop` reports each entry once, in order. May break it: two readers (prevented by
//! `&mut self`), or reading while the vCPU runs (allowed; entries that come later are seen later).

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, kvm_dirty_gfn, kvm_enable_cap,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use super::{call, result_of};
use crate::{Call, SysError};

use crate::PAGE_SIZE;

/// Page offset of the ring in the vCPU's mapping (`KVM_DIRTY_LOG_PAGE_OFFSET` on x86).
const RING_PAGE_OFFSET: i64 = 64;
const F_DIRTY: u32 = 1;
const F_RESET: u32 = 2;
// _IO(0xAE, 0xc7)
const KVM_RESET_DIRTY_RINGS: libc::Ioctl = 0xaec7_u32 as libc::Ioctl;

/// Names of calls, in errors.
const ENABLE: &str = "KVM_ENABLE_CAP(dirty ring)";
const MAP: &str = "mmap(dirty ring)";

/// The two names of the capability, the better ordered one first.
const CAPABILITIES: [u32; 2] = [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING];

/// The most entries a ring of this kernel may have; 0 where it has no dirty ring.
pub fn dirty_ring_limit(kvm: &Kvm) -> u32 {
    let bytes = CAPABILITIES
        .into_iter()
        .map(|cap| kvm.check_extension_raw(libc::c_ulong::from(cap)))
        .find(|bytes| *bytes > 0);
    bytes.unwrap_or(0) as u32 / size_of::<kvm_dirty_gfn>() as u32
}

/// Gives every vCPU created from now on a ring of `entries` entries (a power of two). The dirty
/// log of this VM can no longer be read.
///
/// # Errors
/// `ENOTSUP` where the kernel has no dirty ring; `EINVAL` for a bad size or an existing vCPU.
pub fn enable_dirty_ring(vm: &VmFd, entries: u32) -> Result<(), SysError> {
    let cap = CAPABILITIES
        .into_iter()
        .find(|cap| vm.check_extension_raw(libc::c_ulong::from(*cap)) > 0)
        .ok_or(SysError::new(Call::Kvm(ENABLE), libc::ENOTSUP))?;
    let mut enable = kvm_enable_cap { cap, ..Default::default() };
    enable.args[0] = u64::from(entries) * size_of::<kvm_dirty_gfn>() as u64;
    call(ENABLE, || vm.enable_cap(&enable))
}

/// Write-protects again every page whose ring entry was returned.
///
/// # Errors
/// The kernel's error; the pages are then in an unknown state and the VM must be given up.
pub fn reset_dirty_rings(vm: &VmFd) -> Result<u32, SysError> {
    call("KVM_RESET_DIRTY_RINGS", || {
        // SAFETY: the fd is a VM and the call takes no argument.
        result_of(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_RESET_DIRTY_RINGS) })
    })
}

/// One page the guest wrote: `offset` pages into memory slot `slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyGfn {
    /// The memory slot's number (address space 0).
    pub slot: u32,
    /// Pages from the start of that slot.
    pub offset: u64,
}

/// One vCPU's dirty ring, mapped.
#[derive(Debug)]
pub struct DirtyRing {
    base: NonNull<kvm_dirty_gfn>,
    entries: u32,
    /// Next entry to read.
    fetch: u32,
    /// Entries read but not returned; they keep their place in the ring.
    held: u32,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread.
unsafe impl Send for DirtyRing {}

impl DirtyRing {
    /// Maps the ring of `vcpu`, created after `enable_dirty_ring(vm, entries)`.
    ///
    /// # Errors
    /// Any error of `mmap`; `EINVAL` where the ring is not enabled.
    pub fn map(vcpu: &VcpuFd, entries: u32) -> Result<Self, SysError> {
        let len = entries as usize * size_of::<kvm_dirty_gfn>();
        let base = call(MAP, || {
            // SAFETY: a fresh mapping at an address that the kernel chooses.
            let base = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED,
                    vcpu.as_raw_fd(),
                    RING_PAGE_OFFSET * PAGE_SIZE as i64,
                )
            };
            if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base) }
        })?;
        let base = NonNull::new(base.cast()).ok_or(SysError::invalid(Call::Kvm(MAP)))?;
        Ok(Self { base, entries, fetch: 0, held: 0 })
    }

    /// Entries that were read and still hold their place: the ring is full for the guest a little
    /// before this reaches `entries`.
    pub fn held_entries(&self) -> u32 {
        self.held
    }

    /// The ring's size in entries.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// The next page the guest wrote, if any.
    #[inline]
    pub fn pop(&mut self) -> Option<DirtyGfn> {
        if self.held == self.entries {
            return None;
        }
        let entry = self.entry(self.fetch);
        // SAFETY: `flags` is the first, 4-byte aligned field of an entry inside the mapping; the
        // kernel accesses it with atomic operations too.
        let flags = unsafe { AtomicU32::from_ptr(&raw mut (*entry).flags) };
        if flags.load(Ordering::Acquire) & F_DIRTY == 0 {
            return None;
        }
        // SAFETY: the entry is inside the mapping and the kernel wrote it before it set the flag.
        let (slot, offset) =
            unsafe { ((&raw const (*entry).slot).read(), (&raw const (*entry).offset).read()) };
        self.fetch = self.fetch.wrapping_add(1);
        self.held += 1;
        Some(DirtyGfn { slot: slot & 0xffff, offset })
    }

    /// Marks every entry that was read as free. `reset_dirty_rings` then write-protects their
    /// pages.
    pub fn give_back(&mut self) {
        let first = self.fetch.wrapping_sub(self.held);
        for index in 0..self.held {
            let entry = self.entry(first.wrapping_add(index));
            // SAFETY: as in `pop`.
            let flags = unsafe { AtomicU32::from_ptr(&raw mut (*entry).flags) };
            flags.store(F_RESET, Ordering::Release);
        }
        self.held = 0;
    }

    fn entry(&self, index: u32) -> *mut kvm_dirty_gfn {
        let place = (index & (self.entries - 1)) as usize;
        // SAFETY: `entries` is a power of two, so `place < entries`, which the mapping holds.
        unsafe { self.base.as_ptr().add(place) }
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe {
            libc::munmap(
                self.base.as_ptr().cast(),
                self.entries as usize * size_of::<kvm_dirty_gfn>(),
            )
        };
    }
}
