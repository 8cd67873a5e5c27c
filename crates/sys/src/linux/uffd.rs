//! userfaultfd: write protection that the kernel checks, and missing pages that we fill.
//!
//! One descriptor serves any number of ranges. Three modes exist, because the kernel fixes the
//! answer to a fault when the descriptor is opened:
//!
//! * [`UffdMode::Sigbus`]: the faulting thread gets SIGBUS, see [`crate::fault`]. No handler
//!   thread; but a *system call* that touches such a page fails with `EFAULT`.
//! * [`UffdMode::Async`]: the kernel lifts write protection itself, and [`crate::pagemap`] reports
//!   the written pages afterwards.
//! * [`UffdMode::Events`]: faults are read from the descriptor by a handler thread.
//!
//! All three work without privilege (`UFFD_USER_MODE_ONLY`), unless seccomp forbids the call.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_EXACT_ADDRESS, UFFD_FEATURE_MISSING_SHMEM, UFFD_FEATURE_MOVE,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_SIGBUS, UFFD_FEATURE_WP_ASYNC,
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, uffd_msg, uffdio_api,
    uffdio_continue, uffdio_copy, uffdio_move, uffdio_range, uffdio_register, uffdio_writeprotect,
    uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE,
    UFFDIO_WRITEPROTECT, UFFDIO_ZEROPAGE,
};

use super::fork;
use crate::{Call, SysError, inject};

/// `_IOWR(0xAA, 5, struct uffdio_move)`.
const UFFDIO_MOVE: u32 = 0xc028_aa05;
const REGISTER_MISSING: u64 = 1;
const REGISTER_WP: u64 = 2;
const REGISTER_MINOR: u64 = 4;
const WRITEPROTECT_WP: u64 = 1;
/// `UFFD_USER_MODE_ONLY`: the descriptor refuses faults taken inside the kernel, so it is available
/// without privilege.
const USER_MODE_ONLY: libc::c_long = 1;
/// `UFFD_FEATURE_MINOR_SHMEM`, needed for CONTINUE on a memfd.
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;

/// How faults on registered ranges are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UffdMode {
    /// SIGBUS in the faulting thread.
    Sigbus,
    /// Write protection lifted by the kernel, reported by a scan.
    Async,
    /// Events on the descriptor.
    Events,
}

/// Which faults a registered range reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Missing pages.
    pub missing: bool,
    /// Writes to write-protected pages.
    pub write_protect: bool,
    /// Pages of a shared file that are in the page cache but not mapped.
    pub minor: bool,
}

impl Interest {
    /// Only writes to write-protected pages.
    pub const WRITES: Self = Self { missing: false, write_protect: true, minor: false };
    /// Only missing pages.
    pub const MISSING: Self = Self { missing: true, write_protect: false, minor: false };
    /// Only unmapped pages of a shared file.
    pub const MINOR: Self = Self { missing: false, write_protect: false, minor: true };

    fn bits(self) -> u64 {
        let mut bits = 0;
        if self.missing {
            bits |= REGISTER_MISSING;
        }
        if self.write_protect {
            bits |= REGISTER_WP;
        }
        if self.minor {
            bits |= REGISTER_MINOR;
        }
        bits
    }
}

/// An event read from a descriptor in [`UffdMode::Events`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UffdEvent {
    /// A thread waits for the page at this address.
    Fault {
        /// The faulting address, exact.
        address: usize,
        /// Whether the access was a write.
        write: bool,
        /// Whether the page is there but write-protected.
        write_protected: bool,
    },
    /// A range was discarded (`MADV_DONTNEED` and similar calls).
    Remove {
        /// First address.
        start: usize,
        /// One past the last address.
        end: usize,
    },
    /// A range is mapped no more.
    Unmap {
        /// First address.
        start: usize,
        /// One past the last address.
        end: usize,
    },
    /// A range was moved by `mremap`.
    Remap {
        /// First address before.
        from: usize,
        /// First address now.
        to: usize,
        /// Length in bytes.
        len: usize,
    },
    /// Any other event, by its kernel number.
    Other(u8),
}

/// A userfaultfd. In a child forked from the process that opened it every call fails with `ESRCH`.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    mode: UffdMode,
    /// The process that has it. In a forked child the descriptor still stands for the memory that
    /// it stood for, and dropping a slot there would end the parent's protection.
    generation: u32,
}

impl Uffd {
    /// Opens a descriptor in `mode`, without needing privilege.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where seccomp or the kernel forbids it; `EINVAL` where the kernel lacks
    /// a feature that the mode needs (6.1 for write protection of files, 6.7 for async, 6.8 for
    /// move).
    pub fn open(mode: UffdMode) -> Result<Self, SysError> {
        Self::open_with(mode, 0)
    }

    /// As [`Uffd::open`], with more features, as the kernel numbers them.
    pub(super) fn open_with(mode: UffdMode, more: u64) -> Result<Self, SysError> {
        inject::gate(Call::UffdOpen)?;
        // SAFETY: the call takes flags only.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_userfaultfd,
                libc::c_long::from(libc::O_CLOEXEC | libc::O_NONBLOCK) | USER_MODE_ONLY,
            )
        };
        if fd < 0 {
            return Err(SysError::last(Call::UffdOpen));
        }
        // SAFETY: the kernel just returned this descriptor, and this is its only owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
        Self::negotiate(fd, mode, more)
    }

    /// Settles the features of a new descriptor.
    pub(super) fn negotiate(fd: OwnedFd, mode: UffdMode, more: u64) -> Result<Self, SysError> {
        let write = u64::from(UFFD_FEATURE_PAGEFAULT_FLAG_WP)
            | u64::from(UFFD_FEATURE_WP_HUGETLBFS_SHMEM)
            | u64::from(UFFD_FEATURE_WP_UNPOPULATED);
        let features = match mode {
            UffdMode::Sigbus => write | u64::from(UFFD_FEATURE_SIGBUS),
            UffdMode::Async => write | u64::from(UFFD_FEATURE_WP_ASYNC),
            UffdMode::Events => write,
        } | u64::from(UFFD_FEATURE_EXACT_ADDRESS)
            | more;
        // Filling wants more where it exists: shared memory, minor faults, moves (6.8).
        let fill = u64::from(UFFD_FEATURE_MISSING_SHMEM)
            | FEATURE_MINOR_SHMEM
            | u64::from(UFFD_FEATURE_MOVE);
        let this = Self { fd, mode, generation: fork::generation() };
        let api = |features| {
            let mut api = uffdio_api { api: u64::from(UFFD_API), features, ioctls: 0 };
            this.ioctl(Call::UffdOpen, UFFDIO_API, &mut api)
        };
        if mode == UffdMode::Async || api(features | fill).is_err() {
            api(features)?;
        }
        Ok(this)
    }

    /// The mode it was opened in.
    #[must_use]
    pub fn mode(&self) -> UffdMode {
        self.mode
    }

    pub(super) fn ioctl<T>(
        &self,
        call: Call,
        request: u32,
        argument: &mut T,
    ) -> Result<(), SysError> {
        if self.generation != fork::generation() {
            return Err(SysError::new(call, libc::ESRCH));
        }
        // SAFETY: every caller in this file pairs the request with the structure the kernel's ABI
        // names for it, and the reference keeps it alive through the call.
        let rc = unsafe {
            libc::ioctl(self.fd.as_raw_fd(), request as libc::Ioctl, std::ptr::from_mut(argument))
        };
        if rc < 0 { Err(SysError::last(call)) } else { Ok(()) }
    }

    /// Registers `len` bytes at `start` (both page multiples).
    ///
    /// # Errors
    /// `EBUSY` when another descriptor has the range, `EINVAL` when the mapping cannot be watched.
    pub fn register(
        &self,
        start: *const u8,
        len: usize,
        interest: Interest,
    ) -> Result<(), SysError> {
        inject::gate(Call::UffdRegister)?;
        let mut argument = uffdio_register {
            range: uffdio_range { start: start as u64, len: len as u64 },
            mode: interest.bits(),
            ioctls: 0,
        };
        self.ioctl(Call::UffdRegister, UFFDIO_REGISTER, &mut argument)
    }

    /// Unregisters a range; its write protection is lifted.
    ///
    /// # Errors
    /// `EINVAL` when the range is not registered here.
    pub fn unregister(&self, start: *const u8, len: usize) -> Result<(), SysError> {
        inject::gate(Call::UffdUnregister)?;
        let mut argument = uffdio_range { start: start as u64, len: len as u64 };
        self.ioctl(Call::UffdUnregister, UFFDIO_UNREGISTER, &mut argument)
    }

    /// Sets (`true`) or lifts (`false`) write protection. Safe to call in a signal handler.
    ///
    /// # Errors
    /// `ENOENT` when the range is not registered; `EAGAIN` is retried a bounded number of times.
    pub fn write_protect(
        &self,
        start: *const u8,
        len: usize,
        protect: bool,
    ) -> Result<(), SysError> {
        for attempt in 0.. {
            inject::gate(Call::UffdWriteProtect)?;
            let mut argument = uffdio_writeprotect {
                range: uffdio_range { start: start as u64, len: len as u64 },
                mode: if protect { WRITEPROTECT_WP } else { 0 },
            };
            match self.ioctl(Call::UffdWriteProtect, UFFDIO_WRITEPROTECT, &mut argument) {
                Err(e) if e.errno == libc::EAGAIN && attempt < 100 => {}
                other => return other,
            }
        }
        Ok(())
    }

    /// Fills `len` bytes of missing pages at `to` with a copy of `from` and wakes waiting threads.
    /// Returns the bytes filled, which are fewer when a page was there already.
    ///
    /// # Safety
    /// `from .. from + len` must be readable and `to .. to + len` must be memory that the caller
    /// may fill.
    ///
    /// # Errors
    /// `EEXIST` when the first page was there already, `ENOENT` when the range went away.
    pub unsafe fn copy(&self, to: *mut u8, from: *const u8, len: usize) -> Result<usize, SysError> {
        inject::gate(Call::UffdFill)?;
        let mut argument =
            uffdio_copy { dst: to as u64, src: from as u64, len: len as u64, mode: 0, copy: 0 };
        let result = self.ioctl(Call::UffdFill, UFFDIO_COPY, &mut argument);
        partial(result, argument.copy)
    }

    /// Fills missing pages with zeros. Returns the bytes filled.
    ///
    /// # Errors
    /// As [`Uffd::copy`].
    pub fn zero(&self, to: *mut u8, len: usize) -> Result<usize, SysError> {
        inject::gate(Call::UffdFill)?;
        let mut argument = uffdio_zeropage {
            range: uffdio_range { start: to as u64, len: len as u64 },
            mode: 0,
            zeropage: 0,
        };
        let result = self.ioctl(Call::UffdFill, UFFDIO_ZEROPAGE, &mut argument);
        partial(result, argument.zeropage)
    }

    /// Maps pages of a shared file that are in its page cache. Returns the bytes mapped.
    ///
    /// # Errors
    /// `EEXIST` when mapped already, `EFAULT` when the page cache does not hold the page.
    pub fn resume(&self, to: *mut u8, len: usize) -> Result<usize, SysError> {
        inject::gate(Call::UffdFill)?;
        let mut argument = uffdio_continue {
            range: uffdio_range { start: to as u64, len: len as u64 },
            mode: 0,
            mapped: 0,
        };
        let result = self.ioctl(Call::UffdFill, UFFDIO_CONTINUE, &mut argument);
        partial(result, argument.mapped)
    }

    /// Moves anonymous pages from `from` to the missing pages at `to` (Linux 6.8). Holes in the
    /// source are skipped. Returns the bytes moved.
    ///
    /// # Safety
    /// The source range must be anonymous memory without another user; it is empty afterwards.
    ///
    /// # Errors
    /// `EEXIST` when a destination page was already present, `EBUSY` when a source page is pinned.
    pub unsafe fn take(&self, to: *mut u8, from: *mut u8, len: usize) -> Result<usize, SysError> {
        const ALLOW_SRC_HOLES: u64 = 2;
        inject::gate(Call::UffdFill)?;
        let mut argument = uffdio_move {
            dst: to as u64,
            src: from as u64,
            len: len as u64,
            mode: ALLOW_SRC_HOLES,
            move_: 0,
        };
        let result = self.ioctl(Call::UffdFill, UFFDIO_MOVE, &mut argument);
        partial(result, argument.move_)
    }

    /// Wakes threads that wait for pages in a range, without filling anything.
    ///
    /// # Errors
    /// `EINVAL` for a range that is not a multiple of pages.
    pub fn wake(&self, start: *const u8, len: usize) -> Result<(), SysError> {
        inject::gate(Call::UffdFill)?;
        let mut argument = uffdio_range { start: start as u64, len: len as u64 };
        self.ioctl(Call::UffdFill, UFFDIO_WAKE, &mut argument)
    }

    /// Reads the next event, or returns `None` if no event is pending.
    ///
    /// # Errors
    /// `EINVAL` when the descriptor is not in [`UffdMode::Events`].
    pub fn next_event(&self) -> Result<Option<UffdEvent>, SysError> {
        const EVENT_PAGEFAULT: u8 = 0x12;
        const EVENT_FORK: u8 = 0x13;
        const EVENT_REMAP: u8 = 0x14;
        const EVENT_REMOVE: u8 = 0x15;
        const EVENT_UNMAP: u8 = 0x16;
        const FLAG_WRITE: u64 = 1;
        const FLAG_WP: u64 = 2;
        inject::gate(Call::UffdRead)?;
        // SAFETY: `uffd_msg` is plain data for which all-zero bytes are a value.
        let mut message: uffd_msg = unsafe { std::mem::zeroed() };
        match self.read_now(&mut message) {
            Ok(read) if read == size_of::<uffd_msg>() => {}
            Ok(_) => return Err(SysError::new(Call::UffdRead, libc::EIO)),
            Err(error) if error.errno == libc::EAGAIN => return Ok(None),
            Err(error) => return Err(error),
        }
        Ok(Some(match message.event {
            EVENT_PAGEFAULT => {
                // SAFETY: the event number identifies the member of the union that the kernel
                // wrote.
                let fault = unsafe { message.arg.pagefault };
                UffdEvent::Fault {
                    address: fault.address as usize,
                    write: fault.flags & FLAG_WRITE != 0,
                    write_protected: fault.flags & FLAG_WP != 0,
                }
            }
            EVENT_REMOVE => {
                // SAFETY: as above.
                let remove = unsafe { message.arg.remove };
                UffdEvent::Remove { start: remove.start as usize, end: remove.end as usize }
            }
            EVENT_REMAP => {
                // SAFETY: as above.
                let remap = unsafe { message.arg.remap };
                UffdEvent::Remap {
                    from: remap.from as usize,
                    to: remap.to as usize,
                    len: remap.len as usize,
                }
            }
            EVENT_UNMAP => {
                // SAFETY: as above; the member is that of remove events.
                let unmap = unsafe { message.arg.remove };
                UffdEvent::Unmap { start: unmap.start as usize, end: unmap.end as usize }
            }
            EVENT_FORK => {
                // SAFETY: as above.
                let child = unsafe { message.arg.fork }.ufd;
                // The child's memory is not served. Left open, each fork of a peer would cost a
                // descriptor.
                // SAFETY: reading the event has made the descriptor, and this is its only owner.
                drop(unsafe { OwnedFd::from_raw_fd(child as libc::c_int) });
                UffdEvent::Other(EVENT_FORK)
            }
            other => UffdEvent::Other(other),
        }))
    }

    /// Reads a message without waiting for one.
    ///
    /// `O_NONBLOCK` does not ensure that: it belongs to the open file, and a process that has sent
    /// the descriptor can clear it at any time. Kernels whose userfaultfd does not know the flag of
    /// the call (before 6.10) still wait where it is cleared between the two calls.
    fn read_now(&self, message: &mut uffd_msg) -> Result<usize, SysError> {
        const ONE: libc::c_long = 1;
        const CURRENT_POSITION: libc::c_long = -1;
        let fd = self.fd.as_raw_fd();
        let (to, len) = (std::ptr::from_mut(message).cast::<libc::c_void>(), size_of::<uffd_msg>());
        let vector = libc::iovec { iov_base: to, iov_len: len };
        // SAFETY: the only entry of the vector is the message, and both live through the call.
        let read = unsafe {
            libc::syscall(
                libc::SYS_preadv2,
                libc::c_long::from(fd),
                &raw const vector,
                ONE,
                CURRENT_POSITION,
                CURRENT_POSITION,
                libc::c_long::from(libc::RWF_NOWAIT),
            )
        };
        if let Ok(read) = usize::try_from(read) {
            return Ok(read);
        }
        let error = SysError::last(Call::UffdRead);
        if !matches!(error.errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM) {
            return Err(error);
        }
        // SAFETY: reads and sets flags of a descriptor that this value owns.
        unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFL);
            if flags & libc::O_NONBLOCK == 0 {
                libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            }
        }
        // SAFETY: the buffer is exactly one message long.
        let read = unsafe { libc::read(fd, to, len) };
        usize::try_from(read).map_err(|_| SysError::last(Call::UffdRead))
    }

    /// Takes over a descriptor that another process opened and sent, with its mode known from the
    /// protocol that sent it.
    #[must_use]
    pub fn from_fd(fd: OwnedFd, mode: UffdMode) -> Self {
        Self { fd, mode, generation: fork::generation() }
    }
}

/// The fill calls report progress in their argument and an error when they stopped early; progress
/// of at least a page counts as success.
fn partial(result: Result<(), SysError>, done: i64) -> Result<usize, SysError> {
    match result {
        Ok(()) => Ok(done.max(0) as usize),
        Err(_) if done > 0 => Ok(done as usize),
        Err(error) => Err(error),
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
