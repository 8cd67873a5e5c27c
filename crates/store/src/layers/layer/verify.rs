//! Checks pages against the index, by several threads where it pays, and a whole blob against its
//! name.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use afresh_sys::PAGE_SIZE;
use sha2::Digest;

use super::{BATCH_GROUPS, Layer};
use crate::disk::helper_threads;
use crate::format::index::Encoding;
use crate::{LayerError, OpenError, Sha256};

/// Bytes read at a time where there are no groups.
const PIECE: u64 = 1 << 20;

/// Groups that a thread reads and checks at a time: few enough that they are in its cache when they
/// are digested.
const TURN_GROUPS: usize = 8;
/// Groups from which on one more thread pays: 16 MiB of pages as written by this version, two
/// milliseconds.
const THREAD_GROUPS: usize = 256;
/// Maximum threads that check a layer. More would wait for memory.
const THREADS: usize = 4;

impl Layer {
    /// Checks the groups of stored pages `first .. first + len` that were not checked before. Large
    /// parts of local layers are checked by several threads.
    ///
    /// # Errors
    /// As [`Layer::read`].
    pub fn verify(&self, first: u64, len: u64) -> Result<(), OpenError> {
        let per_group = u64::from(self.index.group_pages);
        let end = first.saturating_add(len).min(self.index.stored);
        if first >= end {
            return Ok(());
        }
        let groups = (first / per_group) as usize..end.div_ceil(per_group) as usize;
        if self.is_distant() {
            return self.verify_groups(groups, BATCH_GROUPS, &mut Vec::new());
        }
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let threads = (groups.len() / THREAD_GROUPS).min(processors).clamp(1, THREADS);
        // Threads take turns, so that one that has to wait for a processor delays no other.
        let next = AtomicUsize::new(groups.start);
        let failure = Mutex::new(None);
        let work = || {
            let mut scratch = Vec::new();
            loop {
                let from = next.fetch_add(TURN_GROUPS, Ordering::Relaxed);
                if from >= groups.end {
                    return;
                }
                let turn = from..groups.end.min(from + TURN_GROUPS);
                if let Err(error) = self.verify_groups(turn, TURN_GROUPS, &mut scratch) {
                    next.store(groups.end, Ordering::Relaxed);
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
            }
        };
        helper_threads::share(threads - 1, work);
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Checks those of `groups` that were not checked before, at most `batch` at a time.
    fn verify_groups(
        &self,
        groups: Range<usize>,
        batch: usize,
        scratch: &mut Vec<u8>,
    ) -> Result<(), OpenError> {
        let mut at = groups.start;
        while at < groups.end {
            if self.is_verified(at) {
                at += 1;
                continue;
            }
            let mut run = at..at + 1;
            while run.len() < batch && run.end < groups.end && !self.is_verified(run.end) {
                run.end += 1;
            }
            at = run.end;
            let pages =
                self.index.group_range(run.end - 1).end - self.index.group_range(run.start).start;
            scratch.resize(pages as usize * PAGE_SIZE, 0);
            self.read_groups(run, scratch)?;
        }
        Ok(())
    }

    /// Checks every byte of the blob in one sequential read, regardless of earlier checks: each
    /// group against its digest, and the blob against the SHA-256 in its name. `progress` receives
    /// the checked bytes. A sealed blob is read twice, because its digest is that of the sealed
    /// bytes.
    ///
    /// # Errors
    /// [`OpenError::Layer`] with the first damage.
    pub fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<(), OpenError> {
        let mut hasher = sha2::Sha256::new();
        let (mut bytes, mut pages) = (Vec::new(), Vec::new());
        let groups = self.index.groups.len();
        let mut at = 0;
        for first in (0..groups).step_by(BATCH_GROUPS) {
            let batch = first..(first + BATCH_GROUPS).min(groups);
            let range = self.bytes_of(&batch);
            let checked = self.check_batch(batch.clone(), &mut bytes, &mut pages);
            match checked {
                // Asked for again where that may bring others.
                Err(OpenError::Layer { .. })
                    if self.blob.distrust(range.start, range.end - range.start) =>
                {
                    self.check_batch(batch, &mut bytes, &mut pages)?;
                }
                other => other?,
            }
            if self.key.is_none() {
                hasher.update(&bytes);
                at = range.end;
                progress(at);
            }
        }
        // The bytes after the pages.
        while at < self.size() {
            bytes.resize(PIECE.min(self.size() - at) as usize, 0);
            self.blob().read_at(&mut bytes, at).map_err(|e| self.io(e))?;
            hasher.update(&bytes);
            at += bytes.len() as u64;
            progress(at);
        }
        if Sha256(hasher.finalize().into()) != self.digest {
            return Err(self.bad(LayerError::Name));
        }
        Ok(())
    }

    /// Reads the bytes of whole groups and checks their pages.
    fn check_batch(
        &self,
        groups: Range<usize>,
        bytes: &mut Vec<u8>,
        pages: &mut Vec<u8>,
    ) -> Result<(), OpenError> {
        let range = self.bytes_of(&groups);
        bytes.resize((range.end - range.start) as usize, 0);
        self.blob.read_at(bytes, range.start).map_err(|e| self.io(e))?;
        match self.encoding() {
            Encoding::Raw => self.check_groups(groups, &[], bytes),
            Encoding::Zstd => {
                let first = self.index.group_range(groups.start).start;
                let end = self.index.group_range(groups.end - 1).end;
                pages.resize((end - first) as usize * PAGE_SIZE, 0);
                self.check_groups(groups, bytes, pages)
            }
        }
    }
}
