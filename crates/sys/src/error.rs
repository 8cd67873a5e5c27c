//! A failed system call: which call, which errno, and the way out.

use std::fmt;

use crate::PAGE_SIZE;

/// The kinds of system call this crate makes; also the names that [`crate::inject`] understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// Reserve address space or place a mapping in it.
    Map,
    /// Release address space.
    Unmap,
    /// Change page protection.
    Protect,
    /// `madvise`.
    Advise,
    /// Move pages between mappings.
    Remap,
    /// `memfd_create`.
    MemfdCreate,
    /// `ftruncate` of a memfd.
    Truncate,
    /// Seal a memfd.
    Seal,
    /// Open a memfd again, for reading.
    Reopen,
    /// Query the kernel for other holders of a memfd.
    Lease,
    /// Write into a memfd.
    Write,
    /// Read from a memfd.
    Read,
    /// Give a range of a memfd back.
    PunchHole,
    /// Open a userfaultfd and negotiate its features.
    UffdOpen,
    /// Register a range with a userfaultfd.
    UffdRegister,
    /// Unregister a range.
    UffdUnregister,
    /// Set or clear write protection.
    UffdWriteProtect,
    /// Fill a missing page (copy, zero, continue, move) or wake a waiter.
    UffdFill,
    /// Read events from a userfaultfd.
    UffdRead,
    /// `PAGEMAP_SCAN`.
    PagemapScan,
    /// Install a signal handler.
    Signal,
    /// Change a thread's scheduling.
    Schedule,
    /// Count events of the processor.
    Perf,
    /// Copy memory that may be unmapped.
    Copy,
    /// Wait for descriptors.
    Poll,
    /// Make, name or change a socket.
    Socket,
    /// Receive bytes and descriptors.
    Receive,
    /// Send bytes and descriptors.
    Send,
    /// Refer to another process, or send it a signal.
    Process,
    /// Keep other processes from this one.
    Access,
    /// Draw random bytes.
    Random,
    /// Compare the kernel's page size with [`crate::PAGE_SIZE`].
    PageSize,
    /// A KVM call, by its name.
    Kvm(&'static str),
}

impl Call {
    /// The name the kernel's documentation uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Call::Map => "mmap",
            Call::Unmap => "munmap",
            Call::Protect => "mprotect",
            Call::Advise => "madvise",
            Call::Remap => "mremap",
            Call::MemfdCreate => "memfd_create",
            Call::Truncate => "ftruncate",
            Call::Seal => "fcntl(F_ADD_SEALS)",
            Call::Reopen => "open(/proc/self/fd)",
            Call::Lease => "fcntl(F_SETLEASE)",
            Call::Write => "pwrite",
            Call::Read => "pread",
            Call::PunchHole => "fallocate(PUNCH_HOLE)",
            Call::UffdOpen => "userfaultfd",
            Call::UffdRegister => "ioctl(UFFDIO_REGISTER)",
            Call::UffdUnregister => "ioctl(UFFDIO_UNREGISTER)",
            Call::UffdWriteProtect => "ioctl(UFFDIO_WRITEPROTECT)",
            Call::UffdFill => "ioctl(UFFDIO_COPY/ZEROPAGE/CONTINUE/MOVE/WAKE)",
            Call::UffdRead => "read(userfaultfd)",
            Call::PagemapScan => "ioctl(PAGEMAP_SCAN)",
            Call::Signal => "sigaction",
            Call::Schedule => "sched_setscheduler",
            Call::Perf => "perf_event_open",
            Call::Copy => "process_vm_readv",
            Call::Poll => "poll",
            Call::Socket => "socket",
            Call::Receive => "recvmsg",
            Call::Send => "sendmsg",
            Call::Process => "pidfd_open",
            Call::Access => "prctl(PR_SET_DUMPABLE)",
            Call::Random => "getrandom",
            Call::PageSize => "getauxval(AT_PAGESZ)",
            Call::Kvm(name) => name,
        }
    }
}

/// A system call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct SysError {
    /// Which call.
    pub call: Call,
    /// The errno it returned.
    pub errno: i32,
}

impl SysError {
    /// An error of `call` with `errno`.
    #[must_use]
    pub fn new(call: Call, errno: i32) -> Self {
        Self { call, errno }
    }

    /// An error of `call` for an argument it cannot have (`EINVAL`).
    #[must_use]
    pub fn invalid(call: Call) -> Self {
        Self::new(call, libc::EINVAL)
    }

    /// An error of `call` with the calling thread's current errno.
    #[must_use]
    pub fn last(call: Call) -> Self {
        Self::new(call, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// Whether memory, maps or descriptors ran out, which releasing some can cure.
    #[must_use]
    pub fn is_exhaustion(&self) -> bool {
        matches!(self.errno, libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::ENOSPC)
    }

    fn hint(&self) -> Option<&'static str> {
        match (self.call, self.errno) {
            (Call::Map | Call::Protect | Call::Remap, libc::ENOMEM) => Some(
                "out of address space or of mappings: raise vm.max_map_count, or ulimit -v, or use \
                 fewer or smaller slots",
            ),
            (Call::MemfdCreate | Call::UffdOpen | Call::Reopen, libc::EMFILE | libc::ENFILE) => {
                Some("out of file descriptors: raise ulimit -n")
            }
            (Call::Reopen, libc::ENOENT) => Some("/proc is not mounted here: mount it"),
            (Call::Write | Call::Truncate, libc::ENOSPC | libc::ENOMEM) => {
                Some("out of memory for images: raise the memory limit or drop images")
            }
            (Call::Write | Call::Truncate, libc::EFBIG) => {
                Some("a file in memory would exceed the limit of files: raise ulimit -f")
            }
            (Call::UffdOpen, libc::EPERM) => Some(
                "userfaultfd is not permitted here: set vm.unprivileged_userfaultfd=1, allow it in \
                 the seccomp profile, or let afresh use another tracker",
            ),
            (Call::UffdOpen, libc::ENOSYS | libc::EINVAL) => {
                Some("this kernel's userfaultfd lacks a feature: Linux 6.1 or newer is needed")
            }
            #[cfg(unix)]
            (Call::Signal, libc::EUSERS) => Some(
                "too many signal handlers of others were installed over one another: install them once",
            ),
            (Call::PagemapScan, libc::ENOTTY) => Some("PAGEMAP_SCAN needs Linux 6.7 or newer"),
            _ => None,
        }
    }
}

impl fmt::Display for SysError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.call == Call::PageSize {
            let found = crate::imp::page_size();
            return write!(
                f,
                "this kernel has pages of {found} bytes, and afresh works with {PAGE_SIZE}: boot a kernel with pages of \
                 4 KiB (on Debian linux-image-arm64, not its 16k variant)",
            );
        }
        let io = std::io::Error::from_raw_os_error(self.errno);
        write!(f, "{} failed: {io}", self.call.name())?;
        if let Some(hint) = self.hint() {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

/// A mapping was not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct MoveError {
    /// The kernel's error.
    pub error: SysError,
    /// Whether the destination has lost its mapping: it is inaccessible then. Otherwise it is as it
    /// was.
    pub lost: bool,
}
