//! Scattered reads of a layer that is far away, with few round trips.
//!
//! The groups that are needed are gathered to runs, small gaps between them included, and the runs
//! are fetched at the same time. Every group is checked on each read, as in [`Layer::read`].

use std::ops::Range;

use afresh_sys::PAGE_SIZE;

use super::Layer;
use crate::format::index::Encoding;
use crate::{LayerError, OpenError};

/// Groups in one request: 1 MiB of pages as written by this version.
const RUN_GROUPS: usize = 16;
/// Groups that are fetched without a reader, because they cost less than a request.
const BRIDGE: usize = 1;
/// Requests made at once; bounds the memory to about 32 MiB.
const WINDOW: usize = 32;

impl Layer {
    /// Whether a read costs a round trip.
    pub(crate) fn is_distant(&self) -> bool {
        self.blob.is_distant()
    }

    /// Reads several runs of stored pages, each from its first page on.
    ///
    /// # Errors
    /// As [`Layer::read`]; nothing of any part may be used then.
    pub(crate) fn read_many(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), OpenError> {
        if !self.is_distant() {
            return parts.iter_mut().try_for_each(|(first, out)| self.read(*first, out));
        }
        for window in self.runs_of(parts)?.chunks(WINDOW) {
            let fetched = self.fetch(window)?;
            for (run, pages) in window.iter().zip(fetched) {
                let have = self.index.group_range(run.start).start
                    ..self.index.group_range(run.end - 1).end;
                for (first, out) in parts.iter_mut() {
                    let from = have.start.max(*first);
                    let to = have.end.min(*first + (out.len() / PAGE_SIZE) as u64);
                    if from < to {
                        let len = (to - from) as usize * PAGE_SIZE;
                        out[(from - *first) as usize * PAGE_SIZE..][..len].copy_from_slice(
                            &pages[(from - have.start) as usize * PAGE_SIZE..][..len],
                        );
                    }
                }
            }
        }
        Ok(())
    }

    /// The groups that hold the pages of `parts`, as runs in order.
    fn runs_of(&self, parts: &[(u64, &mut [u8])]) -> Result<Vec<Range<usize>>, OpenError> {
        let per_group = u64::from(self.index.group_pages);
        let mut needed: Vec<Range<usize>> = Vec::with_capacity(parts.len());
        for (first, out) in parts {
            let end = first.saturating_add((out.len() / PAGE_SIZE) as u64);
            if end > self.index.stored {
                return Err(
                    self.bad(LayerError::Layout("a page past the stored ones was asked for"))
                );
            }
            if *first < end {
                needed.push((*first / per_group) as usize..end.div_ceil(per_group) as usize);
            }
        }
        needed.sort_by_key(|groups| groups.start);
        let mut merged: Vec<Range<usize>> = Vec::new();
        for groups in needed {
            match merged.last_mut() {
                Some(last) if groups.start <= last.end + BRIDGE => {
                    last.end = last.end.max(groups.end);
                }
                _ => merged.push(groups),
            }
        }
        let split = |groups: Range<usize>| {
            let end = groups.end;
            groups.step_by(RUN_GROUPS).map(move |start| start..end.min(start + RUN_GROUPS))
        };
        Ok(merged.into_iter().flat_map(split).collect())
    }

    /// The checked pages of each run.
    fn fetch(&self, runs: &[Range<usize>]) -> Result<Vec<Vec<u8>>, OpenError> {
        let ranges: Vec<_> = runs.iter().map(|run| self.bytes_of(run)).collect();
        // The index was checked: no run is longer than the blob.
        let mut fetched: Vec<_> =
            ranges.iter().map(|range| vec![0; (range.end - range.start) as usize]).collect();
        let mut parts: Vec<_> = ranges
            .iter()
            .zip(&mut fetched)
            .map(|(range, buffer)| (range.start, buffer.as_mut_slice()))
            .collect();
        self.blob.read_many(&mut parts).map_err(|e| self.io(e))?;
        for (run, buffer) in runs.iter().zip(&mut fetched) {
            let frames = match self.index.encoding {
                Encoding::Raw => Vec::new(),
                Encoding::Zstd => {
                    let pages = self.index.group_range(run.end - 1).end
                        - self.index.group_range(run.start).start;
                    std::mem::replace(buffer, vec![0; pages as usize * PAGE_SIZE])
                }
            };
            match self.check_groups(run.clone(), &frames, buffer) {
                // Asks again, past what may be cached.
                Err(OpenError::Layer { .. }) => self.read_groups(run.clone(), buffer)?,
                other => other?,
            }
        }
        Ok(fetched)
    }
}
