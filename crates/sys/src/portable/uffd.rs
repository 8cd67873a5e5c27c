//! userfaultfd is missing: opening one fails, so no value of it exists.

use crate::{Call, SysError};

/// How faults on registered ranges are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UffdMode {
    /// SIGBUS in the faulting thread.
    Sigbus,
    /// Write protection lifted by the kernel.
    Async,
    /// Events on the descriptor.
    Events,
}

/// Which faults a registered range reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Missing pages.
    pub missing: bool,
}

impl Interest {
    /// Only writes to write-protected pages.
    pub const WRITES: Self = Self { missing: false };
    /// Only missing pages.
    pub const MISSING: Self = Self { missing: true };
}

/// An event; none ever comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UffdEvent {
    /// A thread waits for the page at this address.
    Fault {
        /// The faulting address.
        address: usize,
    },
}

/// A userfaultfd that cannot be opened.
#[derive(Debug)]
pub enum Uffd {}

impl Uffd {
    /// Always fails.
    ///
    /// # Errors
    /// `ENOSYS`.
    pub fn open(_mode: UffdMode) -> Result<Self, SysError> {
        Err(SysError::new(Call::UffdOpen, libc::ENOSYS))
    }

    /// Unreachable: no value exists.
    ///
    /// # Errors
    /// None.
    pub fn register(&self, _: *const u8, _: usize, _: Interest) -> Result<(), SysError> {
        match *self {}
    }

    /// Unreachable: no value exists.
    ///
    /// # Errors
    /// None.
    pub fn unregister(&self, _: *const u8, _: usize) -> Result<(), SysError> {
        match *self {}
    }

    /// Unreachable: no value exists.
    ///
    /// # Errors
    /// None.
    pub fn write_protect(&self, _: *const u8, _: usize, _: bool) -> Result<(), SysError> {
        match *self {}
    }

    /// Unreachable: no value exists.
    ///
    /// # Safety
    /// None is needed.
    ///
    /// # Errors
    /// None.
    pub unsafe fn copy(&self, _: *mut u8, _: *const u8, _: usize) -> Result<usize, SysError> {
        match *self {}
    }

    /// Always fails.
    ///
    /// # Errors
    /// `ENOSYS`.
    pub fn open_for_kernel() -> Result<Self, SysError> {
        Err(SysError::new(Call::UffdOpen, libc::ENOSYS))
    }

    /// Unreachable: no value exists.
    ///
    /// # Errors
    /// None.
    pub fn wait(&self) -> Result<(), SysError> {
        match *self {}
    }

    /// Unreachable: no value exists.
    ///
    /// # Errors
    /// None.
    pub fn next_event(&self) -> Result<Option<UffdEvent>, SysError> {
        match *self {}
    }

    /// Unreachable: no value exists.
    ///
    /// # Errors
    /// None.
    pub fn wake(&self, _: *const u8, _: usize) -> Result<(), SysError> {
        match *self {}
    }
}
