//! Anonymous memory files: the store behind images.
//!
//! A memfd is written with `pwrite` only, never through a shared writable mapping, so that
//! [`Memfd::seal`] (F_SEAL_WRITE) can make it immutable. Another process gets it only through
//! [`Memfd::read_only`], where it is not to write.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::page_size::check_page_size;
use crate::{Call, InheritedCell, PageRange, SysError, inject};

/// Pieces that the kernel takes in one call (`IOV_MAX`).
const MOST_VECTORS: usize = 1024;
/// Attempts to seal a file with pinned pages; the kernel itself waits in each.
const SEAL_ATTEMPTS: u32 = 20;

/// Skips `written` bytes of the pieces from `first` on; returns the first piece with bytes left.
fn advance(vectors: &mut [libc::iovec], mut first: usize, mut written: usize) -> usize {
    while let Some(vector) = vectors.get_mut(first) {
        let part = written.min(vector.iov_len);
        vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(part).cast();
        vector.iov_len -= part;
        written -= part;
        if vector.iov_len > 0 {
            break;
        }
        first += 1;
    }
    first
}

/// Refuses to extend a file to `end` beyond the limit of this process (`RLIMIT_FSIZE`), for which
/// the kernel would send `SIGXFSZ`, whose default action ends the process.
fn check_file_size(call: Call, end: usize) -> Result<(), SysError> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the call only writes the structure. It fails for no valid resource.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if end as u64 > limit.rlim_cur { Err(SysError::new(call, libc::EFBIG)) } else { Ok(()) }
}

/// An anonymous file in memory.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
    /// The same file, opened for reading.
    reader: InheritedCell<OwnedFd>,
}

impl Memfd {
    /// Takes over a descriptor of an anonymous file.
    pub(super) fn from_owned(fd: OwnedFd) -> Self {
        Self { fd, reader: InheritedCell::new() }
    }

    /// Creates an empty file; `name` shows in `/proc/self/maps`.
    ///
    /// # Errors
    /// `EMFILE` when descriptors ran out; [`Call::PageSize`] on a kernel with other pages than
    /// [`PAGE_SIZE`](crate::PAGE_SIZE).
    pub fn new(name: &std::ffi::CStr) -> Result<Self, SysError> {
        check_page_size()?;
        inject::gate(Call::MemfdCreate)?;
        // SAFETY: `name` is a valid NUL-terminated string for the length of the call.
        let fd = unsafe {
            libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        };
        if fd < 0 {
            return Err(SysError::last(Call::MemfdCreate));
        }
        // SAFETY: the kernel just returned this descriptor, and this is its only owner.
        Ok(Self::from_owned(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Sets the length in bytes; new bytes read as zero and take no memory until written.
    ///
    /// # Errors
    /// `EPERM` on a sealed file; `EFBIG` beyond the limit of files of this process.
    pub fn set_len(&self, bytes: usize) -> Result<(), SysError> {
        inject::gate(Call::Truncate)?;
        check_file_size(Call::Truncate, bytes)?;
        // SAFETY: plain call on a descriptor we own.
        if unsafe { libc::ftruncate(self.fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
            return Err(SysError::last(Call::Truncate));
        }
        Ok(())
    }

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// `ENOSPC` or `ENOMEM` when the memory limit is reached; `EFBIG` beyond the limit of files of
    /// this process.
    pub fn write_at(&self, bytes: &[u8], offset: usize) -> Result<(), SysError> {
        // SAFETY: the slice is valid for reads of its length.
        unsafe { self.write_from(&[(bytes.as_ptr(), bytes.len())], offset) }
    }

    /// Writes pieces of raw memory (address, bytes) one after the other from `offset` on: for
    /// sources that are not Rust objects, such as a live slot.
    ///
    /// # Safety
    /// Each piece must be mapped and readable for the whole call. Concurrent writers are allowed:
    /// the kernel copies, and the copied bytes are unspecified then, but harmless.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub unsafe fn write_from(
        &self,
        pieces: &[(*const u8, usize)],
        offset: usize,
    ) -> Result<(), SysError> {
        let mut vectors: Vec<libc::iovec> = pieces
            .iter()
            .map(|(at, len)| libc::iovec { iov_base: at.cast_mut().cast(), iov_len: *len })
            .collect();
        let len: usize = pieces.iter().map(|(_, len)| len).sum();
        check_file_size(Call::Write, offset.saturating_add(len))?;
        let (mut first, mut done) = (0, 0);
        loop {
            while vectors.get(first).is_some_and(|vector| vector.iov_len == 0) {
                first += 1;
            }
            if first == vectors.len() {
                return Ok(());
            }
            inject::gate(Call::Write)?;
            let at_once = &vectors[first..vectors.len().min(first + MOST_VECTORS)];
            // SAFETY: the caller promises that the pieces are readable; the kernel only reads them.
            let n = unsafe {
                libc::pwritev(
                    self.fd.as_raw_fd(),
                    at_once.as_ptr(),
                    at_once.len() as libc::c_int,
                    (offset + done) as libc::off_t,
                )
            };
            match n {
                0 => return Err(SysError::new(Call::Write, libc::ENOSPC)),
                n if n > 0 => {
                    done += n as usize;
                    first = advance(&mut vectors, first, n as usize);
                }
                _ => {
                    let error = SysError::last(Call::Write);
                    if error.errno != libc::EINTR {
                        return Err(error);
                    }
                }
            }
        }
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

    /// Makes content and length immutable for every process, permanently.
    ///
    /// The kernel refuses while a page is pinned, because the holder could write to it; memory that
    /// is being compacted or reclaimed is pinned too. It waits some 150 ms for them
    /// (`memfd_wait_for_pins`), which a busy host can exceed, so the call is repeated a bounded
    /// number of times.
    ///
    /// # Errors
    /// `EBUSY` while a shared writable mapping exists, and when pages are still pinned after all
    /// that.
    pub fn seal(&self) -> Result<(), SysError> {
        let seals =
            libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
        for attempt in 1.. {
            let added = inject::gate(Call::Seal).and_then(|()| {
                // SAFETY: plain call on a descriptor we own.
                match unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
                    0 => Ok(()),
                    _ => Err(SysError::last(Call::Seal)),
                }
            });
            match added {
                Err(error) if error.errno == libc::EBUSY && attempt < SEAL_ATTEMPTS => {}
                done => return done,
            }
        }
        Ok(())
    }

    /// A descriptor of the file for reading: for a process that must not write to it. It can
    /// neither be written through nor mapped shared and writable. The file keeps it once it is
    /// made.
    ///
    /// # Errors
    /// `ENOENT` without `/proc`, `EMFILE` when descriptors ran out.
    pub fn read_only(&self) -> Result<BorrowedFd<'_>, SysError> {
        if let Some(reader) = self.reader.get() {
            return Ok(reader.as_fd());
        }
        inject::gate(Call::Reopen)?;
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let Ok(path) = CString::new(path) else {
            return Err(SysError::new(Call::Reopen, libc::EINVAL));
        };
        // SAFETY: the path ends in a zero byte and lives through the call.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        if fd < 0 {
            return Err(SysError::last(Call::Reopen));
        }
        // SAFETY: the kernel just returned this descriptor, and this is its only owner.
        let opened = unsafe { OwnedFd::from_raw_fd(fd) };
        // Another thread may have been faster; then this one is closed.
        Ok(self.reader.get_or_make(|| opened).as_fd())
    }

    fn stat(&self) -> Option<libc::stat> {
        // SAFETY: an all-zero `stat` is a valid value, and `fstat` fills it for a valid descriptor.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            (libc::fstat(self.fd.as_raw_fd(), &mut stat) == 0).then_some(stat)
        }
    }

    /// Length in bytes; 0 if it is unknown.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.stat().map_or(0, |stat| usize::try_from(stat.st_size).unwrap_or(0))
    }

    /// Bytes of memory the file holds.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        self.stat().map_or(0, |stat| stat.st_blocks as usize * 512)
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inject::{Plan, with};

    #[test]
    fn a_file_is_not_written_through_its_descriptor_for_reading() {
        let file = Memfd::new(c"read").unwrap();
        file.write_at(&[7; crate::PAGE_SIZE], 0).unwrap();
        let reader = file.read_only().unwrap().as_raw_fd();
        assert_eq!(file.read_only().unwrap().as_raw_fd(), reader);
        let mut byte = 0u8;
        // SAFETY: both calls have one byte, which lives through them.
        let (read, written) = unsafe {
            let byte = (&raw mut byte).cast();
            (libc::pread(reader, byte, 1, 9), libc::pwrite(reader, byte, 1, 9))
        };
        assert_eq!((read, byte, written), (1, 7, -1));
        let map = |flags| {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let null = std::ptr::null_mut();
            // SAFETY: a new mapping, which replaces none.
            unsafe { libc::mmap(null, crate::PAGE_SIZE, protection, flags, reader, 0) }
        };
        assert_eq!(map(libc::MAP_SHARED), libc::MAP_FAILED);
        let private = map(libc::MAP_PRIVATE);
        assert_ne!(private, libc::MAP_FAILED);
        // SAFETY: the mapping that was just made, and no one else has.
        unsafe {
            private.cast::<u8>().write(8);
            libc::munmap(private, crate::PAGE_SIZE);
        }
        let full = Plan { call: Some(Call::Reopen), after: 0, times: 1, errno: libc::EMFILE };
        let other = Memfd::new(c"read").unwrap();
        let (refused, _) = with(full, || other.read_only().map(|_| ()));
        assert!(refused.unwrap_err().to_string().contains("raise ulimit -n"));
    }

    #[test]
    fn a_file_beyond_the_limit_of_files_is_refused_without_a_signal() {
        const PAGE: usize = crate::PAGE_SIZE;
        crate::run_isolated(
            "linux::memfd::tests::a_file_beyond_the_limit_of_files_is_refused_without_a_signal",
            || {
                let file = Memfd::new(c"limited").unwrap();
                file.set_len(4 * PAGE).unwrap();
                let limit =
                    libc::rlimit { rlim_cur: 2 * PAGE as u64, rlim_max: libc::RLIM_INFINITY };
                // SAFETY: the call only reads the structure.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
                let refused = [
                    file.set_len(5 * PAGE),
                    file.write_at(&[1; PAGE], 2 * PAGE),
                    file.write_at(&[1; 2], 2 * PAGE - 1),
                ];
                assert!(
                    refused.iter().all(|done| done.is_err_and(|error| error.errno == libc::EFBIG))
                );
                let message = refused[0].unwrap_err().to_string();
                assert!(message.contains("raise ulimit -f"), "{message}");
                file.write_at(&[1; PAGE], PAGE).unwrap();
                file.set_len(2 * PAGE).unwrap();
            },
        );
    }

    #[test]
    fn a_file_whose_pages_are_held_for_a_while_is_sealed_afterwards() {
        let file = Memfd::new(c"held").unwrap();
        file.set_len(crate::PAGE_SIZE).unwrap();
        let held = |times| Plan { call: Some(Call::Seal), after: 0, times, errno: libc::EBUSY };
        let (sealed, _) = with(held(usize::MAX), || file.seal());
        assert_eq!(sealed.unwrap_err().errno, libc::EBUSY);
        file.write_at(b"still open", 0).unwrap();
        let (sealed, fired) = with(held(2), || file.seal());
        sealed.unwrap();
        assert_eq!(fired, 2);
        assert_eq!(file.write_at(b"sealed", 0).unwrap_err().errno, libc::EPERM);
    }

    #[test]
    fn written_bytes_are_removed_from_the_pieces() {
        let bytes = [0u8; 10];
        let piece = |at: usize, len| libc::iovec {
            iov_base: bytes[at..].as_ptr().cast_mut().cast(),
            iov_len: len,
        };
        let mut vectors = [piece(0, 3), piece(3, 0), piece(3, 4), piece(7, 3)];
        assert_eq!(advance(&mut vectors, 0, 5), 2);
        assert_eq!((vectors[2].iov_base, vectors[2].iov_len), (piece(5, 2).iov_base, 2));
        assert_eq!(advance(&mut vectors, 2, 5), 4);
    }

    #[test]
    fn more_pieces_than_one_call_takes_are_written_in_order() {
        let bytes: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        let file = Memfd::new(c"pieces").unwrap();
        let pieces: Vec<_> = bytes.iter().map(|byte| (std::ptr::from_ref(byte), 1)).collect();
        // SAFETY: each piece is a byte of the vector.
        unsafe { file.write_from(&pieces, 7).unwrap() };
        let mut found = vec![0xff; 5007];
        let file = std::fs::File::from(file.as_fd().try_clone_to_owned().unwrap());
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, 0).unwrap();
        assert!(found[..7] == [0; 7] && found[7..] == bytes);
    }
}
