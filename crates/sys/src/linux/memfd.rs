//! Anonymous memory files: the store behind images.
//!
//! A memfd is written with `pwrite` only, never through a shared writable mapping, so that
//! [`Memfd::seal`] (F_SEAL_WRITE) can make it immutable for ever.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Call, PageRange, SysError, inject};

/// An anonymous file in memory.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
}

impl Memfd {
    /// Takes over a descriptor of an anonymous file.
    pub(super) fn from_owned(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Creates an empty file; `name` shows in `/proc/self/maps`.
    ///
    /// # Errors
    /// `EMFILE` when descriptors ran out.
    pub fn new(name: &std::ffi::CStr) -> Result<Self, SysError> {
        inject::gate(Call::MemfdCreate)?;
        // SAFETY: `name` is a valid NUL-terminated string for the length of the call.
        let fd = unsafe {
            libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        if fd < 0 {
            return Err(SysError::last(Call::MemfdCreate));
        }
        // SAFETY: the kernel just returned this descriptor and nobody else owns it.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Sets the length in bytes; new bytes read as zero and take no memory until written.
    ///
    /// # Errors
    /// `EPERM` on a sealed file.
    pub fn set_len(&self, bytes: usize) -> Result<(), SysError> {
        inject::gate(Call::Truncate)?;
        // SAFETY: plain call on a descriptor we own.
        if unsafe { libc::ftruncate(self.fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
            return Err(SysError::last(Call::Truncate));
        }
        Ok(())
    }

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// `ENOSPC` or `ENOMEM` when the memory limit is reached.
    pub fn write_at(&self, bytes: &[u8], offset: usize) -> Result<(), SysError> {
        // SAFETY: the slice is valid for reads of its length.
        unsafe { self.write_from(bytes.as_ptr(), bytes.len(), offset) }
    }

    /// Writes `len` bytes from raw memory at `offset`: for sources that are not Rust objects, such
    /// as a live slot.
    ///
    /// # Safety
    /// `source .. source + len` must be mapped and readable for the whole call. Concurrent writers
    /// are allowed: the kernel copies, and what it copies then is unspecified but harmless.
    ///
    /// # Errors
    /// `ENOSPC` or `ENOMEM` when the memory limit is reached.
    pub unsafe fn write_from(
        &self,
        source: *const u8,
        len: usize,
        offset: usize,
    ) -> Result<(), SysError> {
        let mut done = 0;
        while done < len {
            inject::gate(Call::Write)?;
            // SAFETY: the caller promises that the source is readable; `done < len` keeps the
            // pointer inside it.
            let n = unsafe {
                libc::pwrite(
                    self.fd.as_raw_fd(),
                    source.add(done).cast(),
                    len - done,
                    (offset + done) as libc::off_t,
                )
            };
            match n {
                0 => return Err(SysError::new(Call::Write, libc::ENOSPC)),
                n if n > 0 => done += n as usize,
                _ => {
                    let error = SysError::last(Call::Write);
                    if error.errno != libc::EINTR {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Gives the memory of `range` back; it reads as zero afterwards.
    ///
    /// # Errors
    /// `EPERM` on a sealed file.
    pub fn punch_hole(&self, range: PageRange) -> Result<(), SysError> {
        inject::gate(Call::PunchHole)?;
        // SAFETY: plain call on a descriptor we own.
        let rc = unsafe {
            libc::fallocate(
                self.fd.as_raw_fd(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                range.byte_start() as libc::off_t,
                range.byte_len() as libc::off_t,
            )
        };
        if rc != 0 {
            return Err(SysError::last(Call::PunchHole));
        }
        Ok(())
    }

    /// Makes content and length immutable for every process, for ever.
    ///
    /// # Errors
    /// `EBUSY` while a shared writable mapping exists.
    pub fn seal(&self) -> Result<(), SysError> {
        inject::gate(Call::Seal)?;
        let seals =
            libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
        // SAFETY: plain call on a descriptor we own.
        if unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
            return Err(SysError::last(Call::Seal));
        }
        Ok(())
    }

    /// Bytes of memory the file holds.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        // SAFETY: an all-zero `stat` is a valid value, and `fstat` fills it for a valid descriptor.
        let stat = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(self.fd.as_raw_fd(), &mut stat) != 0 {
                return 0;
            }
            stat
        };
        stat.st_blocks as usize * 512
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
