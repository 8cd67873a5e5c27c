//! The listener of a guest filter, where calls arrive and are answered.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::process::Pid;

use super::PlatformError;

// `_IOWR('!', 0, struct seccomp_notif)` and its kin.
const RECV: libc::Ioctl = 0xc050_2100_u32 as libc::Ioctl;
const SEND: libc::Ioctl = 0xc018_2101_u32 as libc::Ioctl;
const SET_FLAGS: libc::Ioctl = 0x4008_2104_u32 as libc::Ioctl;
const ADD_DESCRIPTOR: libc::Ioctl = 0x4018_2103_u32 as libc::Ioctl;
/// Sentry and guest take turns on one processor.
const SYNC_WAKE_UP: u64 = 1;
/// The call is made as it stands.
const CONTINUE: u32 = 1;

/// `SECCOMP_ADDFD_FLAG_SETFD`.
const SET_NUMBER: u32 = 1;

/// `ERESTARTSYS`.
const RESTART: i32 = 512;

/// A call that waits in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeccompNotification {
    pub(crate) id: u64,
    /// The process that makes the call.
    pub(crate) pid: u32,
    pub(crate) number: i64,
    pub(crate) args: [u64; 6],
    /// The instruction after the call.
    pub(crate) pointer: u64,
}

impl SeccompNotification {
    /// The process that makes the call; `None` where this process cannot see it.
    pub(crate) fn process(&self) -> Option<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw)
    }
}

/// The answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// This value, or an error if it is a negative error number.
    Value(i64),
    /// It is repeated, after the signal that waits for the process.
    Again,
    /// It is made. Only for calls whose arguments the sentry chose, or has checked and put into
    /// effect in the layout: they are in the kernel, and the one thread that could change them
    /// waits.
    Made,
}

/// The listener's descriptor.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

impl Listener {
    pub(crate) fn new(descriptor: OwnedFd) -> Result<Self, PlatformError> {
        // SAFETY: the request takes its flags by value.
        if unsafe { libc::ioctl(descriptor.as_raw_fd(), SET_FLAGS, SYNC_WAKE_UP) } == 0 {
            return Ok(Self(descriptor));
        }
        Err(PlatformError::missing(
            "waking guest and sentry on one processor",
            io::Error::last_os_error(),
            "it needs Linux 6.6 or newer",
        ))
    }

    /// The next call; `None` if it was withdrawn. Blocks until there is one.
    pub(crate) fn receive(&self) -> Result<Option<SeccompNotification>, PlatformError> {
        // SAFETY: it is plain data, for which zeros are a value; the kernel demands them.
        let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request fills one such structure, which lives through the call.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), RECV, &raw mut notice) } == 0 {
            return Ok(Some(SeccompNotification {
                id: notice.id,
                pid: notice.pid,
                number: i64::from(notice.data.nr),
                args: notice.data.args,
                pointer: notice.data.instruction_pointer,
            }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // Interrupted, or the process died since.
            Some(libc::ENOENT | libc::EINTR) => Ok(None),
            _ => Err(PlatformError::kernel("receiving a call", error)),
        }
    }

    /// Installs a descriptor of `file` in the process of call `id`, and returns its number there.
    pub(crate) fn lend(&self, id: u64, file: BorrowedFd<'_>) -> Result<u64, PlatformError> {
        self.add(id, file, None)
    }

    fn add(
        &self,
        id: u64,
        file: BorrowedFd<'_>,
        number: Option<u32>,
    ) -> Result<u64, PlatformError> {
        let mut added = libc::seccomp_notif_addfd {
            id,
            flags: if number.is_some() { SET_NUMBER } else { 0 },
            srcfd: file.as_raw_fd() as u32,
            newfd: number.unwrap_or_default(),
            newfd_flags: 0,
        };
        // SAFETY: the request reads one such structure, which lives through the call.
        let number = unsafe { libc::ioctl(self.0.as_raw_fd(), ADD_DESCRIPTOR, &raw mut added) };
        u64::try_from(number).map_err(|_| {
            PlatformError::kernel("lending the guest's process a file", io::Error::last_os_error())
        })
    }

    /// As [`Listener::lend`], under the number `number`, which is free or replaced.
    pub(crate) fn lend_as(
        &self,
        id: u64,
        file: BorrowedFd<'_>,
        number: u64,
    ) -> Result<(), PlatformError> {
        self.add(id, file, Some(number as u32)).map(|_| ())
    }

    /// Answers the call `id`; `false` if it does not wait any more.
    pub(crate) fn answer(&self, id: u64, answer: Answer) -> Result<bool, PlatformError> {
        let (val, error, flags) = match answer {
            Answer::Value(error @ -4095..0) => (0, error as i32, 0),
            Answer::Value(value) => (value, 0, 0),
            Answer::Again => (0, -RESTART, 0),
            Answer::Made => (0, 0, CONTINUE),
        };
        let mut answer = libc::seccomp_notif_resp { id, val, error, flags };
        // SAFETY: the request reads one such structure, which lives through the call.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), SEND, &raw mut answer) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT) => Ok(false),
            _ => Err(PlatformError::kernel("answering a call", error)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
