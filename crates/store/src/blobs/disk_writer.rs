//! Writes the bytes of a blob to its file.
//!
//! A large blob bypasses the page cache, behind its first [`CACHED`] bytes. The kernel's copy into
//! the cache took about half of the processor time of a save, and the hash needs both processors.
//! The pages of a small blob stay in the cache, where the next reader finds them.
//!
//! Promises: the file has the same bytes either way. Where the file system or the disk refuses,
//! the rest is written through the cache.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use afresh_sys::errno::EINVAL;
use afresh_sys::file::{begin_writing, bypass_cache, write_directly};
use afresh_sys::{PAGE_SIZE, SysError};

/// Bytes that are always written through the cache.
const CACHED: u64 = 8 << 20;
/// Bytes of one write that bypasses the cache: the disk is idle between two.
const STAGE: usize = 4 << 20;
/// Bytes between requests to write cached ones to the disk, so that little is left for the fsync at
/// the end.
const WRITE_BEHIND: usize = 8 << 20;

/// Writes one file from its position on.
pub(crate) struct DiskWriter {
    file: File,
    len: u64,
    way: Way,
}

enum Way {
    Cached {
        /// Bytes since the last request to write to the disk.
        unsent: usize,
        /// Whether the cache is bypassed once the blob is large.
        yields: bool,
    },
    Direct(Stage),
}

/// Bytes that wait for the next direct write, at an address that the disk accepts.
struct Stage {
    memory: Vec<u8>,
    start: usize,
    filled: usize,
}

impl Stage {
    fn new() -> Self {
        let memory = vec![0; STAGE + PAGE_SIZE];
        let start = memory.as_ptr().align_offset(PAGE_SIZE);
        Self { memory, start, filled: 0 }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.filled]
    }

    /// Takes as much as there is room for, and returns the rest.
    fn take<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (now, rest) = bytes.split_at(bytes.len().min(STAGE - self.filled));
        let at = self.start + self.filled;
        self.memory[at..at + now.len()].copy_from_slice(now);
        self.filled += now.len();
        rest
    }
}

impl DiskWriter {
    /// Writes all of `file`, which is empty.
    pub(crate) fn whole(file: File) -> Self {
        Self::new(file, true)
    }

    /// Writes a part of `file`, whose other parts have other writers.
    pub(crate) fn part(file: File) -> Self {
        Self::new(file, false)
    }

    fn new(file: File, yields: bool) -> Self {
        Self { file, len: 0, way: Way::Cached { unsent: 0, yields } }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        if let Way::Cached { yields: true, .. } = self.way
            && self.len + bytes.len() as u64 > CACHED
        {
            // Direct writes begin at a block.
            let head = CACHED.saturating_sub(self.len) as usize;
            let (head, tail) = rest.split_at(head.min(rest.len()));
            self.write_cached(head)?;
            rest = tail;
            self.way = match bypass_cache(self.file.as_fd(), true) {
                Ok(()) => Way::Direct(Stage::new()),
                Err(_) => Way::Cached { unsent: 0, yields: false },
            };
        }
        while let Way::Direct(stage) = &mut self.way
            && !rest.is_empty()
        {
            let len = rest.len();
            rest = stage.take(rest);
            self.len += (len - rest.len()) as u64;
            if stage.filled == STAGE {
                self.write_stage()?;
            }
        }
        self.write_cached(rest)
    }

    fn write_cached(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.len += bytes.len() as u64;
        if let Way::Cached { unsent, .. } = &mut self.way {
            *unsent += bytes.len();
            if *unsent >= WRITE_BEHIND {
                *unsent = 0;
                // A hint: without it, the fsync at the end does all of the work, and says what
                // fails.
                let _ = begin_writing(self.file.as_fd());
            }
        }
        Ok(())
    }

    /// Writes the whole blocks of the stage. What the disk does not take so, and an end that is no
    /// whole block, go through the cache, as does everything behind them.
    fn write_stage(&mut self) -> io::Result<()> {
        let Way::Direct(stage) = &mut self.way else { return Ok(()) };
        let blocks = stage.filled / PAGE_SIZE * PAGE_SIZE;
        let mut done = 0;
        while done < blocks {
            match write_directly(self.file.as_fd(), &stage.bytes()[done..blocks]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(SysError { errno: EINVAL, .. }) => break,
                Err(error) => return Err(io::Error::from_raw_os_error(error.errno)),
            }
            if !done.is_multiple_of(PAGE_SIZE) {
                break;
            }
        }
        if done == STAGE {
            stage.filled = 0;
            return Ok(());
        }
        bypass_cache(self.file.as_fd(), false)
            .map_err(|error| io::Error::from_raw_os_error(error.errno))?;
        self.file.write_all(&stage.bytes()[done..])?;
        self.way = Way::Cached { unsent: 0, yields: false };
        Ok(())
    }

    /// Writes what is left. The file is complete then, and not yet durable.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.write_stage()
    }
}

#[cfg(test)]
mod tests {
    use afresh_sys::{Call, inject};

    use super::*;

    fn bytes() -> Vec<u8> {
        let len = CACHED as usize + 2 * STAGE + 5000;
        (0..len).map(|at| (at / 3 ^ at >> 11) as u8).collect()
    }

    fn write(to: &mut DiskWriter, bytes: &[u8], piece: usize) {
        bytes.chunks(piece).for_each(|piece| to.write(piece).unwrap());
        to.finish().unwrap();
    }

    #[test]
    fn a_file_has_the_bytes_of_its_blob_whatever_its_length() {
        let all = bytes();
        let cached = CACHED as usize;
        let lens = [0, 1, cached - 1, cached, cached + 1, cached + PAGE_SIZE, cached + STAGE];
        for len in lens.into_iter().chain([cached + STAGE + 1, all.len()]) {
            for piece in [1 << 20, 333_333] {
                let file = tempfile::NamedTempFile::new().unwrap();
                let mut writer = DiskWriter::whole(file.reopen().unwrap());
                write(&mut writer, &all[..len], piece);
                assert!(std::fs::read(file.path()).unwrap() == all[..len], "{len} by {piece}");
            }
        }
    }

    #[test]
    fn a_large_blob_bypasses_the_cache_and_a_part_of_a_file_does_not() {
        let file = tempfile::tempfile().unwrap();
        if let Err(error) = bypass_cache(file.as_fd(), true) {
            println!("SKIPPED: {error}");
            return;
        }
        bypass_cache(file.as_fd(), false).unwrap();
        let mut part = DiskWriter::part(file.try_clone().unwrap());
        let mut whole = DiskWriter::whole(file);
        for (writer, is_direct) in [(&mut whole, true), (&mut part, false)] {
            writer.write(&vec![1; CACHED as usize]).unwrap();
            assert!(matches!(writer.way, Way::Cached { .. }));
            writer.write(&[1]).unwrap();
            assert_eq!(matches!(writer.way, Way::Direct(_)), is_direct);
            writer.finish().unwrap();
            assert!(matches!(writer.way, Way::Cached { .. }));
        }
    }

    #[test]
    fn a_file_system_that_refuses_gets_cached_writes_and_other_errors_are_reported() {
        let all = bytes();
        // The first refuses the flag, the second the first write, the third a later one. The hint
        // behind the first bytes is a call as well.
        for after in 0..5 {
            let file = tempfile::NamedTempFile::new().unwrap();
            let mut writer = DiskWriter::whole(file.reopen().unwrap());
            let plan = inject::Plan { call: Some(Call::Write), after, times: 1, errno: EINVAL };
            let ((), _) = inject::with(plan, || write(&mut writer, &all, 1 << 20));
            assert!(std::fs::read(file.path()).unwrap() == all, "after {after}");
        }
        let file = tempfile::tempfile().unwrap();
        if bypass_cache(file.as_fd(), true).is_err() {
            println!("SKIPPED: no direct writes");
            return;
        }
        bypass_cache(file.as_fd(), false).unwrap();
        let mut writer = DiskWriter::whole(file);
        let enospc = 28;
        let plan = inject::Plan { call: Some(Call::Write), after: 2, times: 1, errno: enospc };
        let (outcome, fired) = inject::with(plan, || writer.write(&all));
        assert_eq!(fired, 1);
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(enospc));
    }
}
