//! Sealed memory files that processes share.
//!
//! The kernel refuses every change of a file with the four seals: writes, holes, other lengths and
//! shared writable mappings, for each process and permanently. So a process needs no trust in the
//! sender of such a file for its *immutability*, only for its content.
//!
//! A [`SealedMemfd`] is open for reading only. Each process gets its own open file description. A
//! mapping keeps the description that it was made from. So the kernel's count of descriptions shows
//! whether another process still has the file: `F_SETLEASE` with `F_WRLCK` is refused then. A
//! descriptor of `O_PATH` does not count. It is no open file, and keeps the memory of the file
//! without a sign.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::memfd::Memfd;
use crate::planted::{self, Bug};
use crate::{Call, SysError, inject};

/// The seals that make content and length immutable.
const SEALS: libc::c_int =
    libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;

/// `F_SETSIG` of `fcntl.h`.
const F_SETSIG: libc::c_int = 10;

/// A memory file that no process can change.
#[derive(Debug)]
pub struct SealedMemfd(Memfd);

impl SealedMemfd {
    /// Seals `file`. Its descriptor for writing is closed.
    ///
    /// # Errors
    /// As [`Memfd::seal`], and `ENOENT` without `/proc`.
    pub fn new(file: Memfd) -> Result<Self, SysError> {
        file.seal()?;
        reopen(file.as_fd()).map(|fd| Self(Memfd::from_owned(fd)))
    }

    /// Takes over a descriptor from another process, if its file is sealed, in the file system
    /// of memory files and of `bytes` bytes. It is opened again for reading only.
    ///
    /// # Errors
    /// `EPERM` where a seal is missing, `EINVAL` for another kind or length of file.
    pub fn from_received(fd: OwnedFd, bytes: usize) -> Result<Self, SysError> {
        inject::gate(Call::Seal)?;
        // SAFETY: plain call on a descriptor that this process owns.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 {
            return Err(SysError::last(Call::Seal));
        }
        if seals & SEALS != SEALS && !planted::is(Bug::Unsealed) {
            return Err(SysError::new(Call::Seal, libc::EPERM));
        }
        // SAFETY: an all-zero `statfs` is a valid value, and the call fills it.
        let is_shmem = unsafe {
            let mut stat: libc::statfs = std::mem::zeroed();
            libc::fstatfs(fd.as_raw_fd(), &raw mut stat) == 0 && stat.f_type == libc::TMPFS_MAGIC
        };
        let file = Self(Memfd::from_owned(reopen(fd.as_fd())?));
        // The file system of huge pages takes seals as well, and its pages can run out.
        if is_shmem && file.bytes() == bytes {
            Ok(file)
        } else {
            Err(SysError::invalid(Call::Seal))
        }
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Memfd {
        &self.0
    }

    /// The file itself.
    #[must_use]
    pub fn into_file(self) -> Memfd {
        self.0
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// A descriptor for another process: its own open file description.
    ///
    /// # Errors
    /// `ENOENT` without `/proc`, `EMFILE` when descriptors ran out.
    pub fn reopen(&self) -> Result<OwnedFd, SysError> {
        reopen(self.0.as_fd())
    }

    /// Whether a descriptor of [`SealedMemfd::reopen`], or a mapping made of one, still exists in
    /// any process. A descriptor of `O_PATH` is not counted: a process that opens one from its own
    /// keeps the memory while this returns false.
    ///
    /// # Errors
    /// `EINVAL` on a kernel without leases on memory files.
    pub fn is_held_elsewhere(&self) -> Result<bool, SysError> {
        inject::gate(Call::Lease)?;
        let set = |command: libc::c_int, value: libc::c_int| {
            // SAFETY: plain call on a descriptor that this process owns.
            unsafe { libc::fcntl(self.0.as_fd().as_raw_fd(), command, value) }
        };
        // The signal for an open during the lease. The default signal ends this process, and a
        // process of the same user can open the file at any time through `/proc`.
        if set(F_SETSIG, libc::SIGURG) != 0 {
            return Err(SysError::last(Call::Lease));
        }
        if set(libc::F_SETLEASE, libc::F_WRLCK) == 0 {
            set(libc::F_SETLEASE, libc::F_UNLCK);
            return Ok(false);
        }
        match SysError::last(Call::Lease) {
            error if error.errno == libc::EAGAIN => Ok(true),
            error => Err(error),
        }
    }
}

impl AsFd for SealedMemfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The file of `fd`, opened for reading.
fn reopen(fd: BorrowedFd<'_>) -> Result<OwnedFd, SysError> {
    inject::gate(Call::Reopen)?;
    let Ok(path) = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())) else {
        return Err(SysError::invalid(Call::Reopen));
    };
    // SAFETY: the path ends in a zero byte and lives through the call.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(SysError::last(Call::Reopen));
    }
    // SAFETY: the kernel just returned this descriptor, and this is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE_SIZE, PageRange, Protection, Reservation};

    fn file() -> Memfd {
        let file = Memfd::new(c"sealed").unwrap();
        file.write_at(&[7; 2 * PAGE_SIZE], 0).unwrap();
        file
    }

    #[test]
    fn a_file_is_held_elsewhere_while_a_descriptor_or_a_mapping_of_it_exists() {
        let sealed = SealedMemfd::new(file()).unwrap();
        match sealed.is_held_elsewhere() {
            Err(error) => return println!("SKIPPED: {error}"),
            Ok(held) => assert!(!held),
        }
        let received = SealedMemfd::from_received(sealed.reopen().unwrap(), 2 * PAGE_SIZE).unwrap();
        assert!(sealed.is_held_elsewhere().unwrap());
        let range = PageRange::new(0, 2);
        let view = Reservation::new(2).unwrap();
        view.map_shared(range, Protection::Read, received.file(), 0).unwrap();
        drop(received);
        assert!(sealed.is_held_elsewhere().unwrap(), "a mapping");
        drop(view);
        assert!(!sealed.is_held_elsewhere().unwrap());
    }

    #[test]
    fn files_that_a_process_could_change_are_refused() {
        let errno = |fd: OwnedFd, bytes| SealedMemfd::from_received(fd, bytes).unwrap_err().errno;
        let owned = |file: &Memfd| file.as_fd().try_clone_to_owned().unwrap();
        let unsealed = file();
        assert_eq!(errno(owned(&unsealed), 2 * PAGE_SIZE), libc::EPERM);
        for missing in [libc::F_SEAL_WRITE, libc::F_SEAL_GROW, libc::F_SEAL_SHRINK] {
            let file = file();
            // SAFETY: plain call on a descriptor that the test owns.
            let set = unsafe {
                libc::fcntl(file.as_fd().as_raw_fd(), libc::F_ADD_SEALS, SEALS & !missing)
            };
            assert_eq!(set, 0);
            assert_eq!(errno(owned(&file), 2 * PAGE_SIZE), libc::EPERM);
        }
        let sealed = SealedMemfd::new(file()).unwrap();
        for bytes in [0, PAGE_SIZE, 3 * PAGE_SIZE] {
            assert_eq!(errno(sealed.reopen().unwrap(), bytes), libc::EINVAL);
        }
        let disk = std::fs::File::open("/proc/self/exe").unwrap();
        let bytes = disk.metadata().unwrap().len() as usize;
        assert_eq!(errno(disk.into(), bytes), libc::EINVAL);
    }
}
