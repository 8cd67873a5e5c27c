//! KVM: the gate that its calls pass, and features that `kvm-ioctls` lacks: the dirty ring, and the
//! dirty log with manual protection.
//!
//! Promises: an entry of the ring is reported exactly once; a page that was reported stays writable
//! until it is returned (`DirtyRing::give_back` and `reset_dirty_rings`, or `clear_dirty_log`). May
//! break it: an older kernel without the capability, which is an error when the capability is
//! enabled and never later.
//!
//! Source of the interface: `Documentation/virt/kvm/api.rst`, sections 4.37, 4.117 and 8.29.

mod log;
mod ring;
mod watch;

pub use log::{clear_dirty_log, enable_manual_protect, get_dirty_log};
pub use ring::{DirtyGfn, DirtyRing, dirty_ring_limit, enable_dirty_ring, reset_dirty_rings};
pub use watch::{KickSignal, StopFlag, install_kick_handler};

use std::io;

use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::{Call, SysError, inject};

/// Makes a KVM call, which `name` names in errors and in plans of [`inject`].
///
/// # Errors
/// The call's error.
pub fn call<T, E: Into<io::Error>>(
    name: &'static str,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<T, SysError> {
    inject::gate(Call::Kvm(name))?;
    make().map_err(|error| SysError::new(Call::Kvm(name), error.into().raw_os_error().unwrap_or(0)))
}

/// Runs a vCPU until its next exit.
///
/// # Errors
/// Any error of `KVM_RUN`; `EINTR` when a signal came or its stop flag is up.
pub fn run(vcpu: &mut VcpuFd) -> Result<VcpuExit<'_>, SysError> {
    call("KVM_RUN", || vcpu.run())
}

/// The result of an `ioctl`, with errno on failure.
fn result_of(returned: libc::c_int) -> io::Result<u32> {
    u32::try_from(returned).map_err(|_| io::Error::last_os_error())
}
