//! Files are read and written by the standard library; none is mapped.

use std::fs::File;
use std::ops::Range;
#[cfg(unix)]
use std::os::fd::BorrowedFd;
#[cfg(windows)]
use std::os::windows::io::BorrowedHandle as BorrowedFd;

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

/// The rest of the file: holes are not looked for.
///
/// # Errors
/// That of `stat`.
pub fn next_data(file: BorrowedFd<'_>, from: u64) -> Result<Option<Range<u64>>, SysError> {
    let len = file.try_clone_to_owned().and_then(|file| File::from(file).metadata());
    let len =
        len.map_err(|error| SysError::new(Call::Read, error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok((from < len.len()).then(|| from..len.len()))
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

/// Blocks are allocated when they are written.
///
/// # Errors
/// None.
pub fn reserve(_: BorrowedFd<'_>, _: u64, _: u64) -> Result<(), SysError> {
    Ok(())
}

/// The flag of `open` that refuses symbolic links.
#[cfg(unix)]
pub const NO_FOLLOW: i32 = libc::O_NOFOLLOW;

/// The flag of `open` that does not wait for the other end of a pipe.
#[cfg(unix)]
pub const NO_WAIT: i32 = libc::O_NONBLOCK;

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
