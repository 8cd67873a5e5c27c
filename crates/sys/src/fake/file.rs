//! No files in the interpreter but vectors.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::{Call, MoveError, PageRange, Protection, Reservation, SysError};

impl Reservation {
    /// Always fails.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn map_file(
        &self,
        _: PageRange,
        _: Protection,
        _: BorrowedFd<'_>,
        _: usize,
    ) -> Result<(), SysError> {
        Err(SysError::new(Call::Map, libc::ENODEV))
    }

    /// Always fails.
    ///
    /// # Errors
    /// `ENOSYS`.
    pub fn take_mapping(&self, _: PageRange, _: &Self, _: PageRange) -> Result<(), MoveError> {
        Err(MoveError { error: SysError::new(Call::Remap, libc::ENOSYS), lost: false })
    }
}

/// Always fails.
///
/// # Safety
/// None needed.
///
/// # Errors
/// `ENOSYS`.
pub unsafe fn read_into(_: BorrowedFd<'_>, _: *mut u8, _: usize, _: usize) -> Result<(), SysError> {
    Err(SysError::new(Call::Read, libc::ENOSYS))
}

/// Always fails.
///
/// # Safety
/// None needed.
///
/// # Errors
/// `ENOSYS`.
pub unsafe fn copy_mapped(_: *const u8, _: *mut u8, _: usize) -> Result<(), SysError> {
    Err(SysError::new(Call::Copy, libc::ENOSYS))
}

/// Always fails.
///
/// # Errors
/// `ENOSYS`.
pub fn next_data(_: BorrowedFd<'_>, _: u64) -> Result<Option<Range<u64>>, SysError> {
    Err(SysError::new(Call::Read, libc::ENOSYS))
}

/// Nothing is cached.
///
/// # Errors
/// None.
pub fn drop_cache(_: BorrowedFd<'_>) -> Result<(), SysError> {
    Ok(())
}

/// Nothing is cached.
///
/// # Errors
/// None.
pub fn begin_writing(_: BorrowedFd<'_>) -> Result<(), SysError> {
    Ok(())
}

/// The flag of `open` that refuses symbolic links. Its value depends on the architecture.
pub const NO_FOLLOW: i32 = libc::O_NOFOLLOW;

/// Memory to read into: an address and a length in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First address.
    pub to: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

/// Maximum pieces of one scattered read.
pub const MAX_PIECES: usize = 1024;

/// Always fails.
///
/// # Safety
/// None needed.
///
/// # Errors
/// `ENOSYS`.
pub unsafe fn read_scattered(_: BorrowedFd<'_>, _: &[Piece], _: usize) -> Result<usize, SysError> {
    Err(SysError::new(Call::Read, libc::ENOSYS))
}
