//! Writes the base of a large memory as several layers side by side.
//!
//! One SHA-256 names a blob, and cannot be divided among processors. So the pages are divided: the
//! bottom layer has the first ones, and deltas on it have the others. Each layer has a thread that
//! writes it, and each two share one that hashes them.
//!
//! Promises: the division follows from the pages alone. Equal memories have equal layers on every
//! host, in a store and in an archive. Readers need to know nothing of it: the upper layers are
//! deltas.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::{io, thread};

use afresh_sys::PageRange;

use super::{Plan, Writer, WrittenLayer, write_layer};
use crate::blobs::file::BlobWriter;
use crate::format::index::{Index, Role};
use crate::layers::blob_sink::BlobSink;
use crate::{Pages, SaveError};

/// Minimum pages of a segment: 64 MiB. Smaller memories gain less than another request costs their
/// readers.
const MIN_SEGMENT: usize = 16 << 10;
/// Maximum layers of a base. Each is one of [`crate::format::manifest::MAX_LAYERS`].
const MAX_SEGMENTS: usize = 4;
/// Segments begin at a multiple of this many candidates: 2 MiB, a huge page where all before are
/// stored.
const SEGMENT_ALIGN: usize = 512;

/// A segment that is not yet written.
struct Segment<'a> {
    number: usize,
    writer: Writer<'a>,
    candidates: Vec<PageRange>,
    /// Where the root of the layer below arrives.
    below: Option<Receiver<[u8; 32]>>,
    /// Takes the root for the layer above.
    above: Option<Sender<[u8; 32]>>,
}

/// A segment whose blob is closed: durable and hashed.
type LayerResult = Result<(BlobWriter, Index), SaveError>;

/// Writes the base that `plan` describes, as one layer or several, and returns them bottom first.
pub(crate) fn write_base(
    shelf: &mut dyn BlobSink,
    source: &dyn Pages,
    plan: &Plan<'_>,
) -> Result<Vec<WrittenLayer>, SaveError> {
    let segments = divide(&plan.candidates);
    if segments.len() < 2 {
        return Ok(vec![write_layer(shelf, source, plan)?]);
    }
    if !shelf.takes_several() {
        return write_in_turn(shelf, source, plan, segments);
    }
    let mut below = None;
    let mut waiting = Vec::with_capacity(segments.len());
    for (number, candidates) in segments.into_iter().enumerate() {
        let mut writer = Writer::begin(shelf, source, plan)?;
        writer.index.role = role(number);
        let (above, next) = channel();
        let below = below.replace(next);
        waiting.push(Segment { number, writer, candidates, below, above: Some(above) });
    }
    for pair in waiting.chunks_mut(2) {
        if let [one, two] = pair {
            one.writer.blob.hash_together(&mut two.writer.blob)?;
        }
    }
    let closed = write_side_by_side(waiting)?;
    let mut written = Vec::with_capacity(closed.len());
    for (blob, index) in closed {
        let (digest, size) = shelf.end(blob)?;
        written.push(WrittenLayer { digest, size, index, sealed: plan.key.is_some() });
    }
    Ok(written)
}

/// Writes the same segments one after the other.
fn write_in_turn(
    shelf: &mut dyn BlobSink,
    source: &dyn Pages,
    plan: &Plan<'_>,
    segments: Vec<Vec<PageRange>>,
) -> Result<Vec<WrittenLayer>, SaveError> {
    let mut written: Vec<WrittenLayer> = Vec::with_capacity(segments.len());
    for (number, candidates) in segments.into_iter().enumerate() {
        let parent = written.last().map_or([0; 32], |below| below.index.root);
        let mut writer = Writer::begin(shelf, source, plan)?;
        writer.index.role = role(number);
        writer.fill(&candidates, None)?;
        let (blob, index) = writer.finish(parent)?;
        let (digest, size) = shelf.end(blob)?;
        written.push(WrittenLayer { digest, size, index, sealed: plan.key.is_some() });
    }
    Ok(written)
}

/// Writes segments with as many threads as there are processors. Threads take them in order, so a
/// segment never waits for one without a thread.
fn write_side_by_side(segments: Vec<Segment<'_>>) -> Result<Vec<(BlobWriter, Index)>, SaveError> {
    let count = segments.len();
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get().min(count));
    let mut closed: Vec<Option<LayerResult>> = (0..count).map(|_| None).collect();
    let results = Mutex::new(&mut closed);
    let waiting = Mutex::new(segments.into_iter());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(segment) = next else { return };
                    let number = segment.number;
                    let outcome = segment.write();
                    let failed = outcome.is_err();
                    results.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(outcome);
                    if failed {
                        return;
                    }
                }
            });
        }
    });
    // A failure precedes those of the segments above it, and no segment is missing without one.
    closed.into_iter().flatten().collect()
}

impl Segment<'_> {
    fn write(mut self) -> LayerResult {
        self.writer.fill(&self.candidates, None)?;
        let parent = match self.below {
            None => [0; 32],
            Some(below) => below.recv().map_err(|_| {
                SaveError::Source(io::Error::other("the layer below could not be written"))
            })?,
        };
        let (mut blob, index) = self.writer.finish(parent)?;
        if let Some(above) = self.above {
            // The segment above has failed if it does not receive the root.
            let _ = above.send(index.root);
        }
        blob.close()?;
        Ok((blob, index))
    }
}

fn role(number: usize) -> Role {
    if number == 0 { Role::Base } else { Role::Delta }
}

/// Divides pages into segments of about equal size.
fn divide(candidates: &[PageRange]) -> Vec<Vec<PageRange>> {
    let pages: usize = candidates.iter().map(|range| range.len).sum();
    let count = (pages / MIN_SEGMENT).clamp(1, MAX_SEGMENTS);
    let each = pages.div_ceil(count).next_multiple_of(SEGMENT_ALIGN);
    let mut segments = vec![Vec::new()];
    let mut room = each;
    for range in candidates {
        let mut rest = *range;
        while !rest.is_empty() {
            if room == 0 {
                segments.push(Vec::new());
                room = each;
            }
            let len = rest.len.min(room);
            let last = segments.len() - 1;
            segments[last].push(PageRange::new(rest.start, len));
            rest = PageRange::new(rest.start + len, rest.len - len);
            room -= len;
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_have_every_page_once_and_in_order() {
        for pages in [0, 1, MIN_SEGMENT, 2 * MIN_SEGMENT - 1, 2 * MIN_SEGMENT, 1_000_003] {
            let holes: Vec<PageRange> = (0..pages)
                .step_by(1000)
                .map(|at| PageRange::new(2 * at, 1000.min(pages - at)))
                .collect();
            let segments = divide(&holes);
            assert!(segments.len() <= MAX_SEGMENTS, "{pages}");
            assert_eq!(segments.len() > 1, pages >= 2 * MIN_SEGMENT, "{pages}");
            assert_eq!(PageRange::merge(segments.concat()), PageRange::merge(holes), "{pages}");
        }
    }
}
