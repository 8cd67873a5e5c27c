//! Memory that the host and any number of guests see at once.
//!
//! Promises: it is mapped for as long as anyone refers to it, and only copied from and to, never
//! borrowed; threads of the host may read and write it at the same time, and find a mixture at worst. May break it: expecting it to be reset; it is not part of any image.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes in a word.
const WORD: usize = 8;

/// A shared region, to be given to [`SandboxBuilder::shared`](crate::SandboxBuilder::shared).
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread, and is only accessed through atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `len` bytes of zeros; rounded up to whole pages.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate` or `mmap` say.
    pub fn new(len: usize) -> Result<Self, Errno> {
        let len = len.max(1).next_multiple_of(crate::PAGE as usize);
        let file = memfd_create("afresh-shared", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: there is at least one page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn pointer(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// The memory as words. Every access of the host goes through them, and all are of this size: two threads
    /// of the host may come to the same word.
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is readable and writable, begins at a page and is whole pages long, and lasts as
        // long as `self`. Whoever else writes it is a guest, which no rule of this process's memory model speaks of.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len / WORD) }
    }

    /// Copies out `out.len()` bytes from `offset`; false where they do not fit.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.len) {
            return false;
        }
        let (words, mut done) = (self.words(), 0);
        while done < out.len() {
            let (word, within) = ((offset + done) / WORD, (offset + done) % WORD);
            let bytes = words[word].load(Ordering::Relaxed).to_ne_bytes();
            let len = (WORD - within).min(out.len() - done);
            out[done..done + len].copy_from_slice(&bytes[within..within + len]);
            done += len;
        }
        true
    }

    /// Copies `bytes` in at `offset`; false where they do not fit.
    #[must_use]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.len) {
            return false;
        }
        let (words, mut done) = (self.words(), 0);
        while done < bytes.len() {
            let (word, within) = ((offset + done) / WORD, (offset + done) % WORD);
            let len = (WORD - within).min(bytes.len() - done);
            let part = &bytes[done..done + len];
            let merge = |before: u64| {
                let mut after = before.to_ne_bytes();
                after[within..within + len].copy_from_slice(part);
                u64::from_ne_bytes(after)
            };
            if len == WORD {
                words[word].store(merge(0), Ordering::Relaxed);
            } else {
                // What others write beside it stays.
                let mut before = words[word].load(Ordering::Relaxed);
                while let Err(now) = words[word].compare_exchange_weak(
                    before,
                    merge(before),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    before = now;
                }
            }
            done += len;
        }
        true
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: nobody refers to the mapping any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_wherever_they_begin_and_end() {
        let memory = SharedMemory::new(1).unwrap();
        let bytes: Vec<u8> = (1..=40).collect();
        for offset in 0..16 {
            for len in 0..bytes.len() {
                assert!(memory.write(0, &[0; 64]));
                assert!(memory.write(offset, &bytes[..len]));
                let mut out = [0xff; 64];
                assert!(memory.read(0, &mut out));
                let mut expected = [0; 64];
                expected[offset..offset + len].copy_from_slice(&bytes[..len]);
                assert_eq!(out, expected, "{len} bytes at {offset}");
                let mut part = vec![0; len];
                assert!(memory.read(offset, &mut part));
                assert_eq!(part, &bytes[..len]);
            }
        }
        assert!(!memory.write(memory.len() - 1, b"no"));
        assert!(!memory.read(usize::MAX, &mut [0; 2]));
    }

    #[test]
    fn threads_that_write_side_by_side_lose_nothing_of_each_other() {
        let memory = SharedMemory::new(1).unwrap();
        std::thread::scope(|scope| {
            // Neighbours in the same words.
            for thread in 0..4_usize {
                let memory = &memory;
                scope.spawn(move || {
                    for round in 1..=20_000_u32 {
                        let at = thread * 5 + 1;
                        let mine = [round as u8, thread as u8, (round >> 8) as u8, 1, 2];
                        assert!(memory.write(at, &mine));
                        let mut seen = [0; 5];
                        assert!(memory.read(at, &mut seen));
                        assert_eq!(seen, mine);
                    }
                });
            }
        });
    }
}
