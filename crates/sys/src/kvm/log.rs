//! The dirty log: one bitmap for each memory slot, read without re-protecting anything.
//!
//! Promises: with manual protection on, reading the log changes nothing, and a set bit stays set
//! until `clear_dirty_log` names it. May break it: forgetting `enable_manual_protect`, after which
//! every read re-protects the whole slot (correct, but slow).

use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_enable_cap,
};
use kvm_ioctls::VmFd;

use super::{call, result_of};
use crate::{Call, SysError};

/// `struct kvm_dirty_log`: bitmaps are 64 bits a word, bit 0 of word 0 is the slot's first page.
#[repr(C)]
struct GetLog {
    slot: u32,
    padding: u32,
    bitmap: *mut u64,
}

/// `struct kvm_clear_dirty_log`.
#[repr(C)]
struct ClearLog {
    slot: u32,
    num_pages: u32,
    first_page: u64,
    bitmap: *const u64,
}

// _IOW(0xAE, 0x42, struct kvm_dirty_log) and _IOWR(0xAE, 0xc0, struct kvm_clear_dirty_log).
const KVM_GET_DIRTY_LOG: libc::Ioctl = 0x4010_ae42_u32 as libc::Ioctl;
const KVM_CLEAR_DIRTY_LOG: libc::Ioctl = 0xc018_aec0_u32 as libc::Ioctl;

/// Turns on manual protection: reading the log no longer write-protects the pages it reports.
///
/// # Errors
/// `EINVAL` where the kernel is older than 5.5.
pub fn enable_manual_protect(vm: &VmFd) -> Result<(), SysError> {
    let mut cap = kvm_enable_cap { cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, ..Default::default() };
    cap.args[0] = u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE);
    call("KVM_ENABLE_CAP(dirty log)", || vm.enable_cap(&cap))
}

/// Copies the dirty bitmap of memory slot `slot`, which has `pages` pages, into `bitmap`.
///
/// # Errors
/// `EINVAL` where `bitmap` is too short for `pages`; otherwise the kernel's error.
pub fn get_dirty_log(vm: &VmFd, slot: u32, pages: u64, bitmap: &mut [u64]) -> Result<(), SysError> {
    if (bitmap.len() as u64) < pages.div_ceil(64) {
        return Err(SysError::invalid(Call::Kvm("KVM_GET_DIRTY_LOG")));
    }
    let mut log = GetLog { slot, padding: 0, bitmap: bitmap.as_mut_ptr() };
    call("KVM_GET_DIRTY_LOG", || {
        // SAFETY: the fd is a VM; the kernel writes one bit a page of the slot, rounded up to a
        // word. `pages` is the slot's size as its creator states it, and the buffer holds that many
        // bits.
        result_of(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_GET_DIRTY_LOG, &mut log) })
    })?;
    Ok(())
}

/// Clears the bits set in `bitmap` for pages `first_page..first_page + num_pages` of the slot and
/// write-protects those pages, so that the next write to each is logged again.
///
/// `first_page` is a multiple of 64; `num_pages` is one too, unless the range ends at the slot's
/// end.
///
/// # Errors
/// `EINVAL` for a misaligned range or a bitmap that is too short; otherwise the kernel's error.
pub fn clear_dirty_log(
    vm: &VmFd,
    slot: u32,
    first_page: u64,
    num_pages: u32,
    bitmap: &[u64],
) -> Result<(), SysError> {
    if (bitmap.len() as u64) < u64::from(num_pages).div_ceil(64) {
        return Err(SysError::invalid(Call::Kvm("KVM_CLEAR_DIRTY_LOG")));
    }
    let mut log = ClearLog { slot, num_pages, first_page, bitmap: bitmap.as_ptr() };
    call("KVM_CLEAR_DIRTY_LOG", || {
        // SAFETY: the fd is a VM; the kernel reads `num_pages` bits from the bitmap, which holds
        // them.
        result_of(unsafe { libc::ioctl(vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG, &mut log) })
    })?;
    Ok(())
}
