//! Writes the base of a large memory as several layers side by side.
//!
//! One SHA-256 names a blob, and cannot be divided among processors. So the pages are divided: the
//! bottom layer has the first ones, and deltas on it have the others. The processors decide who
//! writes and hashes them ([`Division`]).
//!
//! Promises: the division follows from the pages alone. Equal memories have equal layers on every
//! host, in a store and in an archive. Readers need to know nothing of it: the upper layers are
//! deltas.

use std::num::NonZero;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::{io, thread};

use afresh_sys::PageRange;

use super::{Candidates, Plan, Writer, WrittenLayer, write_layer};
use crate::blobs::file::BlobWriter;
use crate::disk::helper_threads;
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

/// A segment whose blob is complete.
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
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let is_busy = helper_threads::is_overloaded(processors);
    let division = Division::new(segments.len(), processors, is_busy);
    write_segments(shelf, source, plan, segments, &division)
}

/// The threads that write and hash segments.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Division {
    /// Threads that write.
    writers: usize,
    /// Segments that a writer takes at a time, at most two.
    lanes: usize,
    /// Whether each two segments have a further thread that hashes them.
    hashes_apart: bool,
}

impl Division {
    /// Further threads hash only on processors that no writer needs. Otherwise each writer hashes
    /// what it writes, and two segments by turns if there are more segments than processors.
    ///
    /// A busy host is the exception. Its scheduler divides the processors among the runnable
    /// threads, so six threads get three times the processor time of two. Among 30 others, a save
    /// of 256 MiB took 14 to 20 s with two threads and 6.5 to 6.9 s with six.
    fn new(segments: usize, processors: usize, is_busy: bool) -> Self {
        let hashes_apart = is_busy || processors >= segments + segments.div_ceil(2);
        let writers = if is_busy { segments } else { processors.clamp(1, segments) };
        let lanes = if hashes_apart { 1 } else { segments.div_ceil(writers).min(2) };
        Self { writers, lanes, hashes_apart }
    }
}

/// Writes several segments, which `division` gives to threads.
fn write_segments(
    shelf: &mut dyn BlobSink,
    source: &dyn Pages,
    plan: &Plan<'_>,
    segments: Vec<Vec<PageRange>>,
    division: &Division,
) -> Result<Vec<WrittenLayer>, SaveError> {
    let mut below = None;
    let mut waiting = Vec::with_capacity(segments.len());
    for (number, candidates) in segments.into_iter().enumerate() {
        let mut writer = Writer::begin(shelf, source, plan)?;
        writer.index.role = role(number);
        writer.expect(&candidates);
        let (above, next) = channel();
        let below = below.replace(next);
        waiting.push(Segment { number, writer, candidates, below, above: Some(above) });
    }
    if division.hashes_apart {
        for pair in waiting.chunks_mut(2) {
            if let [one, two] = pair {
                one.writer.blob.hash_together(&mut two.writer.blob);
            }
        }
    } else {
        for lanes in waiting.chunks_mut(division.lanes) {
            if let [one, others @ ..] = lanes {
                let other = others.first_mut().map(|other| &mut other.writer.blob);
                one.writer.blob.hash_here(other);
            }
        }
    }
    let closed = write_side_by_side(waiting, division)?;
    let mut written = Vec::with_capacity(closed.len());
    for (blob, index) in closed {
        let (digest, size) = shelf.hold(blob)?;
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
        let (digest, size) = shelf.hold(blob)?;
        written.push(WrittenLayer { digest, size, index, sealed: plan.key.is_some() });
    }
    Ok(written)
}

/// Writes segments with the threads of `division`, or those of them that can be started. They take
/// segments in order, so none waits for one without a thread.
fn write_side_by_side(
    segments: Vec<Segment<'_>>,
    division: &Division,
) -> Result<Vec<(BlobWriter, Index)>, SaveError> {
    let mut closed: Vec<Option<LayerResult>> = segments.iter().map(|_| None).collect();
    let results = Mutex::new(&mut closed);
    let waiting = Mutex::new(segments.into_iter());
    helper_threads::share(division.writers - 1, || {
        loop {
            let lanes: Vec<_> = {
                let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
                waiting.by_ref().take(division.lanes).collect()
            };
            if lanes.is_empty() {
                return;
            }
            let written = write_by_turns(lanes);
            let failed = written.iter().any(|(_, outcome)| outcome.is_err());
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            for (number, outcome) in written {
                results[number] = Some(outcome);
            }
            if failed {
                return;
            }
        }
    });
    // A failure precedes those of the segments above it, and no segment is missing without one.
    closed.into_iter().flatten().collect()
}

/// Writes segments by turns in this thread, and returns the results with their numbers. If one
/// fails, its error is the only result.
fn write_by_turns(mut lanes: Vec<Segment<'_>>) -> Vec<(usize, LayerResult)> {
    if let Err((number, error)) = fill_by_turns(&mut lanes) {
        return vec![(number, Err(error))];
    }
    let mut written = Vec::with_capacity(lanes.len());
    for segment in lanes {
        let number = segment.number;
        match segment.finish() {
            Ok(finished) => written.push((number, finished)),
            Err(error) => return vec![(number, Err(error))],
        }
    }
    // The disk makes several files durable at the same time.
    helper_threads::map(written, |(number, (mut blob, index))| {
        (number, blob.close().map(|_| (blob, index)))
    })
}

/// Stores the pages of segments by turns. An error comes with the number of its segment.
fn fill_by_turns(lanes: &mut [Segment<'_>]) -> Result<(), (usize, SaveError)> {
    let candidates: Vec<_> =
        lanes.iter_mut().map(|segment| std::mem::take(&mut segment.candidates)).collect();
    let mut rest: Vec<_> = candidates.iter().map(|ranges| Candidates::new(ranges)).collect();
    let mut more = true;
    while std::mem::take(&mut more) {
        for (segment, rest) in lanes.iter_mut().zip(&mut rest) {
            let Some(range) = rest.take(segment.writer.room()) else { continue };
            segment
                .writer
                .pages(range.start, range.len, None)
                .map_err(|error| (segment.number, error))?;
            more = true;
        }
    }
    Ok(())
}

impl Segment<'_> {
    /// Writes the index, once the layer below has its root. The blob is complete then.
    fn finish(self) -> LayerResult {
        let parent = match self.below {
            None => [0; 32],
            Some(below) => below.recv().map_err(|_| {
                SaveError::Source(io::Error::other("the layer below could not be written"))
            })?,
        };
        let (blob, index) = self.writer.finish(parent)?;
        if let Some(above) = self.above {
            // The segment above has failed if it does not receive the root.
            let _ = above.send(index.root);
        }
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
    use afresh_sys::PAGE_SIZE;

    use super::*;
    use crate::{Encoding, MemoryPages, Store};

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

    #[test]
    fn layers_are_the_same_on_any_number_of_processors() {
        let mut memory = MemoryPages(vec![0; 2000 * PAGE_SIZE]);
        for (number, page) in memory.0.chunks_exact_mut(PAGE_SIZE).enumerate() {
            // Some pages are zero, and some are duplicates.
            page.fill((number % 251) as u8);
            page[..8].copy_from_slice(&(number as u64 / 3 % 600 * 7).to_le_bytes());
        }
        let plan = Plan {
            role: Role::Base,
            encoding: Encoding::Raw,
            candidates: Vec::new(),
            below: None,
            parent: [0; 32],
            key: None,
        };
        for counts in [[500, 700, 1, 799].as_slice(), &[900, 0, 1100], &[1999, 1]] {
            let mut first = 0;
            let segments: Vec<Vec<_>> = counts
                .iter()
                .map(|&len| {
                    first += len;
                    vec![PageRange::new(first - len, len)]
                })
                .collect();
            let mut expected = None;
            for processors in 0..8 {
                let dir = tempfile::tempdir().unwrap();
                let store = Store::create(dir.path()).unwrap();
                let mut shelf = store.stage().unwrap();
                let division = Division::new(counts.len(), processors.max(1), processors == 0);
                let written =
                    write_segments(&mut shelf, &memory, &plan, segments.clone(), &division)
                        .unwrap();
                let digests: Vec<_> =
                    written.iter().map(|layer| (layer.digest, layer.index.root)).collect();
                let expected = expected.get_or_insert_with(|| digests.clone());
                assert_eq!(*expected, digests, "{counts:?} {division:?}");
            }
        }
    }

    #[test]
    fn no_more_threads_compute_than_there_are_free_processors() {
        for segments in 2..=MAX_SEGMENTS {
            for processors in 1..10 {
                let division = Division::new(segments, processors, false);
                let apart = if division.hashes_apart { segments.div_ceil(2) } else { 0 };
                assert!(division.writers + apart <= processors, "{division:?}");
                assert!(division.lanes <= 2 && division.writers <= segments, "{division:?}");
            }
        }
        assert!(Division::new(4, 6, false).hashes_apart);
        let halves = Division { writers: 2, lanes: 2, hashes_apart: false };
        assert_eq!(Division::new(4, 2, false), halves);
    }

    #[test]
    fn a_save_on_a_busy_host_has_as_many_threads_as_on_free_processors() {
        for segments in 2..=MAX_SEGMENTS {
            let free = Division::new(segments, 10, false);
            for processors in 1..10 {
                assert_eq!(Division::new(segments, processors, true), free);
            }
        }
    }

    #[test]
    fn the_error_of_a_failed_segment_is_returned() {
        /// Pages that cannot be read from one on.
        struct Unreadable(usize);
        impl Pages for Unreadable {
            fn pages(&self) -> usize {
                4000
            }
            fn occupied(&self) -> Vec<PageRange> {
                vec![PageRange::new(0, 4000)]
            }
            fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
                out.fill(1);
                if first >= self.0 { Err(io::Error::other("the cable is cut")) } else { Ok(()) }
            }
        }
        let plan = Plan {
            role: Role::Base,
            encoding: Encoding::Raw,
            candidates: Vec::new(),
            below: None,
            parent: [0; 32],
            key: None,
        };
        let segments: Vec<_> =
            (0..4).map(|number| vec![PageRange::new(number * 1000, 1000)]).collect();
        for from in [0, 1000, 2000, 3000] {
            for processors in 1..8 {
                let dir = tempfile::tempdir().unwrap();
                let store = Store::create(dir.path()).unwrap();
                let mut shelf = store.stage().unwrap();
                let division = Division::new(4, processors, false);
                let source = Unreadable(from);
                let written =
                    write_segments(&mut shelf, &source, &plan, segments.clone(), &division);
                let error = written.err().expect("the pages cannot be read").to_string();
                assert!(error.contains("cable"), "{error} {from} {division:?}");
            }
        }
    }
}
