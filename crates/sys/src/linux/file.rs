//! Files other than memfds: views of them in a reservation, and reads into memory that is not a
//! Rust object. Also moving whole mappings, which is how memory that was filled elsewhere takes the
//! place of such a view.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Call, MoveError, PAGE_SIZE, PageRange, Protection, Reservation, SysError, inject};

impl Reservation {
    /// Replaces `range` by a private (copy-on-write) view of any file from `file_page` on. If the
    /// file shrinks, reading the missing part raises SIGBUS.
    ///
    /// # Errors
    /// `ENOMEM` when the number of mappings is exhausted, `ENODEV` when the file cannot be mapped.
    pub fn map_file(
        &self,
        range: PageRange,
        protection: Protection,
        file: BorrowedFd<'_>,
        file_page: usize,
    ) -> Result<(), SysError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        self.place(range, protection, flags, file.as_raw_fd(), file_page * PAGE_SIZE)
    }

    /// Moves the mapping at `from` in `staging` to `to` in this reservation. It replaces the
    /// previous mapping at once for every thread: a concurrent access finds the old memory or the
    /// new. The source range must be one mapping; it is empty afterwards.
    ///
    /// # Errors
    /// `EINVAL` for ranges of different length or outside; `ENOMEM` when mappings or a limit are
    /// exhausted. The error includes whether the old memory is lost.
    pub fn take_mapping(
        &self,
        to: PageRange,
        staging: &Reservation,
        from: PageRange,
    ) -> Result<(), MoveError> {
        self.move_here(to, staging, from)
    }
}

/// Whether a process like this one may map `file` to execute it: its file system and the security
/// modules of the host decide.
#[must_use]
pub fn can_be_executed(file: BorrowedFd<'_>) -> bool {
    let protection = libc::PROT_READ | libc::PROT_EXEC;
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
    let mapped =
        unsafe { libc::mmap(null, PAGE_SIZE, protection, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: the mapping that was just made, and nothing points into it.
    unsafe { libc::munmap(mapped, PAGE_SIZE) };
    true
}

/// Fills `len` bytes at `to` from `offset` of `file` on. Safe to call in a signal handler.
///
/// # Safety
/// `to .. to + len` must be writable memory that is not used elsewhere during the call.
///
/// # Errors
/// `EIO` when the file ends early; any error of `pread`.
pub unsafe fn read_into(
    file: BorrowedFd<'_>,
    to: *mut u8,
    len: usize,
    offset: usize,
) -> Result<(), SysError> {
    let mut done = 0;
    while done < len {
        inject::gate(Call::Read)?;
        // SAFETY: the caller promises the memory; `done < len` keeps the pointer inside it.
        let n = unsafe {
            libc::pread(
                file.as_raw_fd(),
                to.add(done).cast(),
                len - done,
                (offset + done) as libc::off_t,
            )
        };
        match n {
            0 => return Err(SysError::new(Call::Read, libc::EIO)),
            n if n > 0 => done += n as usize,
            _ => {
                let error = SysError::last(Call::Read);
                if error.errno != libc::EINTR {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Copies `len` bytes of this process's memory from `from` to `to`. Where the file behind a mapping
/// has become shorter, or cannot be read, that is an error and not a SIGBUS. About a tenth slower
/// than `memcpy`.
///
/// # Safety
/// `from .. from + len` must be mapped readable and not change during the call, `to .. to + len` be
/// writable memory that is not used elsewhere during the call; they must not overlap.
///
/// # Errors
/// `EFAULT` where a page of `from` is missing; `ENOSYS` or `EPERM` in a sandbox that filters the
/// call.
pub unsafe fn copy_mapped(from: *const u8, to: *mut u8, len: usize) -> Result<(), SysError> {
    let mut done = 0;
    while done < len {
        inject::gate(Call::Copy)?;
        // SAFETY: `done < len` keeps both pointers inside the caller's ranges. The structures are
        // only read, and the kernel checks every page itself.
        let n = unsafe {
            let part =
                |at: *mut u8| libc::iovec { iov_base: at.add(done).cast(), iov_len: len - done };
            let (local, remote) = (part(to), part(from.cast_mut()));
            libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
        };
        match n {
            n if n > 0 => done += n as usize,
            0 => return Err(SysError::new(Call::Copy, libc::EFAULT)),
            _ => {
                let error = SysError::last(Call::Copy);
                if error.errno != libc::EINTR {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// The first bytes of `file` at or behind `from` that are not a hole, or `None` when only a hole
/// follows. A file system that does not know calls everything data. Moves the file's position.
///
/// # Errors
/// Any error of `lseek`.
pub fn next_data(file: BorrowedFd<'_>, from: u64) -> Result<Option<Range<u64>>, SysError> {
    inject::gate(Call::Read)?;
    let seek = |to: u64, whence| {
        // SAFETY: plain call on a borrowed descriptor.
        match unsafe { libc::lseek(file.as_raw_fd(), to as libc::off_t, whence) } {
            at if at >= 0 => Ok(at as u64),
            _ => Err(SysError::last(Call::Read)),
        }
    };
    match seek(from, libc::SEEK_DATA) {
        Ok(start) => Ok(Some(start..seek(start, libc::SEEK_HOLE)?)),
        Err(error) if error.errno == libc::ENXIO => Ok(None),
        Err(error) => Err(error),
    }
}

/// Asks the kernel to drop the clean cached pages of `file`; they are read from disk again.
///
/// # Errors
/// Any error of `posix_fadvise`.
pub fn drop_cache(file: BorrowedFd<'_>) -> Result<(), SysError> {
    // SAFETY: plain call on a borrowed descriptor.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        errno => Err(SysError::new(Call::Advise, errno)),
    }
}

/// Asks the kernel to begin writing the dirty pages of `file` to disk, so that a later `fsync`
/// finds little left. Does not promise when they are on disk.
///
/// # Errors
/// Any error of `sync_file_range`; `ESPIPE` if it is not a file on a disk.
pub fn begin_writing(file: BorrowedFd<'_>) -> Result<(), SysError> {
    inject::gate(Call::Write)?;
    // SAFETY: plain call on a borrowed descriptor; a length of 0 means up to the end.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) } {
        0 => Ok(()),
        _ => Err(SysError::last(Call::Write)),
    }
}

/// Allocates blocks for the `len` bytes of `file` from `at` on, and keeps its length. Does nothing
/// but on ext4, where later writes and their `fsync` take a third less processor time then. tmpfs
/// would fill the blocks with zeros first.
///
/// # Errors
/// Any error of `fallocate`, such as `ENOSPC`. Blocks may have been allocated then.
pub fn reserve(file: BorrowedFd<'_>, at: u64, len: u64) -> Result<(), SysError> {
    inject::gate(Call::Write)?;
    // SAFETY: any bytes are a valid `statfs`.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: plain call on a borrowed descriptor; `system` lives through it.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &mut system) } != 0 {
        return Err(SysError::last(Call::Write));
    }
    if system.f_type != libc::EXT4_SUPER_MAGIC {
        return Ok(());
    }
    let (Ok(at), Ok(len)) = (at.try_into(), len.try_into()) else {
        return Err(SysError::new(Call::Write, libc::EFBIG));
    };
    // SAFETY: plain call on a borrowed descriptor.
    match unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, at, len) } {
        0 => Ok(()),
        _ => Err(SysError::last(Call::Write)),
    }
}

/// The flag of `open` that refuses symbolic links. Its value depends on the architecture.
pub const NO_FOLLOW: i32 = libc::O_NOFOLLOW;

/// The flag of `open` that does not wait for the other end of a pipe.
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

/// Reads consecutive bytes of `file`, from `offset` on, into at most [`MAX_PIECES`] pieces of
/// memory. Returns the bytes read, which may be fewer than wanted.
///
/// # Safety
/// As [`read_into`], for every piece.
///
/// # Errors
/// `EINVAL` for too many pieces, `EIO` when the file ends early; any error of `preadv`.
pub unsafe fn read_scattered(
    file: BorrowedFd<'_>,
    pieces: &[Piece],
    offset: usize,
) -> Result<usize, SysError> {
    if pieces.len() > MAX_PIECES {
        return Err(SysError::new(Call::Read, libc::EINVAL));
    }
    let mut vector = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_PIECES];
    for (slot, piece) in vector.iter_mut().zip(pieces) {
        *slot = libc::iovec { iov_base: piece.to.cast(), iov_len: piece.len };
    }
    loop {
        inject::gate(Call::Read)?;
        // SAFETY: the first `pieces.len()` entries name memory that the caller vouches for.
        let n = unsafe {
            libc::preadv(
                file.as_raw_fd(),
                vector.as_ptr(),
                pieces.len() as libc::c_int,
                offset as libc::off_t,
            )
        };
        match n {
            0 => return Err(SysError::new(Call::Read, libc::EIO)),
            n if n > 0 => return Ok(n as usize),
            _ => {
                let error = SysError::last(Call::Read);
                if error.errno != libc::EINTR {
                    return Err(error);
                }
            }
        }
    }
}
