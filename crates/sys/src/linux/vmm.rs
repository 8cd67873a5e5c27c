//! Operations of a userfaultfd for the memory of a virtual machine, in addition to filling: faults
//! that KVM takes in the kernel, and, when a VMM and its pager are two processes, remove events and
//! poisoned pages.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{
    UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_EVENT_UNMAP,
    UFFD_FEATURE_POISON, uffdio_poison, uffdio_range,
};

use crate::{Call, SysError, Uffd, UffdMode, inject};

/// `_IOWR(0xAA, 8, struct uffdio_poison)`.
const UFFDIO_POISON: u32 = 0xc020_aa08;

/// `_IO(0xAA, 0)`, of `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00_u32 as libc::Ioctl;

impl Uffd {
    /// Opens a descriptor with events that also answers for faults taken in the kernel: by KVM for
    /// a guest, or by a system call.
    ///
    /// # Errors
    /// `EPERM` or `EACCES` without `CAP_SYS_PTRACE` and without access to `/dev/userfaultfd` (Linux
    /// 6.1); otherwise as [`Uffd::open`].
    pub fn open_for_kernel() -> Result<Self, SysError> {
        inject::gate(Call::UffdOpen)?;
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call takes flags only.
        let mut fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::c_long::from(flags)) };
        if fd < 0 {
            let denied = SysError::last(Call::UffdOpen);
            let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd");
            let device = device.map_err(|_| denied)?;
            // SAFETY: the device's one request takes the same flags.
            fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) }.into();
            if fd < 0 {
                return Err(SysError::last(Call::UffdOpen));
            }
        }
        // SAFETY: the kernel just returned this descriptor, and this is its only owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
        Self::negotiate(fd, UffdMode::Events, 0)
    }

    /// Sleeps until there is an event.
    ///
    /// # Errors
    /// An error of `poll`; `EIO` when the descriptor is broken.
    pub fn wait(&self) -> Result<(), SysError> {
        loop {
            let mut poll =
                libc::pollfd { fd: self.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one descriptor, which lives through the call.
            if unsafe { libc::poll(&mut poll, 1, -1) } < 0 {
                let error = SysError::last(Call::UffdRead);
                if error.errno != libc::EINTR {
                    return Err(error);
                }
            } else if poll.revents & libc::POLLIN != 0 {
                return Ok(());
            } else {
                return Err(SysError::new(Call::UffdRead, libc::EIO));
            }
        }
    }

    /// Opens a descriptor as a VMM does that hands it to a pager: events, discarded ranges among
    /// them, and pages that can be poisoned.
    ///
    /// # Errors
    /// As [`Uffd::open`]; `EINVAL` before Linux 6.6.
    pub fn open_for_pager() -> Result<Self, SysError> {
        let more = u64::from(UFFD_FEATURE_EVENT_REMOVE) | u64::from(UFFD_FEATURE_POISON);
        Self::open_with(UffdMode::Events, more)
    }

    /// As [`Uffd::open_for_pager`], with events for mappings that are moved or released.
    ///
    /// # Errors
    /// As [`Uffd::open_for_pager`].
    pub fn open_for_pager_with_moves() -> Result<Self, SysError> {
        let more = u64::from(UFFD_FEATURE_EVENT_REMOVE)
            | u64::from(UFFD_FEATURE_EVENT_REMAP)
            | u64::from(UFFD_FEATURE_EVENT_UNMAP)
            | u64::from(UFFD_FEATURE_POISON);
        Self::open_with(UffdMode::Events, more)
    }

    /// Marks missing pages as unreadable: touching one raises SIGBUS, now and ever after. Wakes
    /// whoever waits. Returns the bytes marked.
    ///
    /// # Errors
    /// `EINVAL` when the descriptor was opened without poisoning, `EEXIST` when a page is there.
    pub fn poison(&self, start: *const u8, len: usize) -> Result<usize, SysError> {
        inject::gate(Call::UffdFill)?;
        let mut argument = uffdio_poison {
            range: uffdio_range { start: start as u64, len: len as u64 },
            mode: 0,
            updated: 0,
        };
        let result = self.ioctl(Call::UffdFill, UFFDIO_POISON, &mut argument);
        match result {
            Err(_) if argument.updated > 0 => Ok(argument.updated as usize),
            other => other.map(|()| argument.updated.max(0) as usize),
        }
    }
}
