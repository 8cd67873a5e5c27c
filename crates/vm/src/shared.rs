//! Memory that the host and any number of guests see at once.
//!
//! Promises: it is mapped until the last reference is dropped, and only copied from and to, never
//! borrowed; host threads may read and write it at the same time, and find a mixture at worst. May
//! break it: expecting it to be reset; it is not part of any image.

use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::{Memfd, PAGE_SIZE, PageRange, Protection, Reservation, SysError};

/// Bytes in a word.
const WORD: usize = 8;

/// A shared region, to be given to [`SandboxBuilder::shared`](crate::SandboxBuilder::shared).
#[derive(Debug)]
pub struct SharedMemory {
    mapping: Reservation,
}

impl SharedMemory {
    /// `len` bytes of zeros; rounded up to whole pages.
    ///
    /// # Errors
    /// The call that failed: `memfd_create`, `ftruncate` or `mmap`.
    pub fn new(len: usize) -> Result<Self, SysError> {
        let pages = len.max(1).div_ceil(PAGE_SIZE);
        let mapping = Reservation::new(pages)?;
        let file = Memfd::new(c"afresh-shared")?;
        file.set_len(pages * PAGE_SIZE)?;
        mapping.map_shared(PageRange::new(0, pages), Protection::ReadWrite, &file, 0)?;
        Ok(Self { mapping })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.mapping.pages() * PAGE_SIZE
    }

    /// Never true: there is at least one page.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn pointer(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len());
        self.mapping.base().as_ptr().wrapping_add(offset)
    }

    /// The memory as words. Every access of the host goes through them, and all are of this size:
    /// two threads of the host may come to the same word.
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is readable and writable, begins at a page and is whole pages long,
        // and lasts until `self` is dropped. Other writers are guests, which are outside this
        // process's memory model.
        unsafe {
            std::slice::from_raw_parts(self.mapping.base().as_ptr().cast(), self.len() / WORD)
        }
    }

    /// Copies out `out.len()` bytes from `offset`; false where they do not fit.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.len()) {
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
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.len()) {
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
                // Concurrent writes to the rest of the word stay.
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
