//! Reads scattered pages of a remote snapshot with few requests.

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::disk::helper_threads;
use crate::{Layer, OpenError, Origin, Snapshot};

/// Pages of the working set that are fetched together: 16 MiB.
const WINDOW: usize = 4096;

/// Runs of stored pages, and where each goes.
type Parts<'a> = Vec<(u64, &'a mut [u8])>;

impl Snapshot {
    /// Whether reads cost round trips, so that large requests are better.
    #[must_use]
    pub fn is_distant(&self) -> bool {
        self.layers().iter().any(Layer::is_distant)
    }

    /// As [`Snapshot::read`], for a range that was checked: one scattered read of every layer that
    /// has pages of it, all at the same time.
    pub(crate) fn read_distant(
        &self,
        range: PageRange,
        mut out: &mut [u8],
    ) -> Result<(), OpenError> {
        let mut wanted: Vec<Parts<'_>> = self.layers().iter().map(|_| Vec::new()).collect();
        for run in self.map().within(range) {
            let (part, rest) = out.split_at_mut(run.pages.byte_len());
            out = rest;
            match run.origin {
                Origin::Zero => part.fill(0),
                Origin::Layer { layer, stored } => wanted[layer].push((stored, part)),
                Origin::Turn { page } => self.read_turned(page, part)?,
            }
        }
        let work: Vec<(&Layer, Parts<'_>)> =
            self.layers().iter().zip(wanted).filter(|(_, parts)| !parts.is_empty()).collect();
        helper_threads::map(work, |(layer, mut parts)| layer.read_many(&mut parts))
            .into_iter()
            .collect()
    }

    /// As [`Snapshot::read_working_set`], with `layer`, in windows that are fetched by scattered
    /// reads.
    pub(crate) fn read_distant_set<E: From<OpenError>>(
        layer: &Layer,
        mut each: impl FnMut(PageRange, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut pieces = Vec::new();
        for extent in &layer.index().extents {
            for skip in (0..extent.len).step_by(WINDOW) {
                let len = (extent.len - skip).min(WINDOW as u64) as usize;
                let pages = PageRange::new((extent.first + skip) as usize, len);
                pieces.push((pages, extent.stored.map(|stored| stored + skip)));
            }
        }
        let mut at = 0;
        while at < pieces.len() {
            let mut pages = 0;
            let window = pieces[at..].iter().take_while(|(range, _)| {
                pages += range.len;
                pages <= WINDOW
            });
            let window = &pieces[at..at + window.count()];
            at += window.len();
            let mut buffer = vec![0; window.iter().map(|(range, _)| range.byte_len()).sum()];
            let mut rest = buffer.as_mut_slice();
            let mut parts = Parts::new();
            for (range, stored) in window {
                let (part, after) = rest.split_at_mut(range.byte_len());
                rest = after;
                parts.extend(stored.map(|stored| (stored, part)));
            }
            layer.read_many(&mut parts)?;
            let mut from = 0;
            for (range, _) in window {
                each(*range, &buffer[from..from + range.byte_len()])?;
                from += range.len * PAGE_SIZE;
            }
        }
        Ok(())
    }
}
