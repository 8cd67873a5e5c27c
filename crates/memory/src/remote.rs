//! Slots whose memory has no address in this process: it belongs to another process.
//!
//! Image, write set and strategy are those of every [`crate::Slot`]. Operations on the memory
//! itself belong to its owner: noticing writes, reading, protecting and copying. The slot only
//! returns the pages to copy. Pages are counted in the image; the owner knows their addresses in
//! the other process.
//!
//! Promises: once the pages that a reset or a switch named are copied back, every page that the
//! owner watches equals the image, if the owner reported every page that was written. A slot whose
//! owner failed refuses further use.
//!
//! May break it: a guest that runs while a method of the slot does.

use afresh_sys::planted::{self, Bug};
use afresh_sys::{PAGE_SIZE, PageRange, SysError};

use crate::image::{BATCH_PAGES, batches, byte_len, is_zero, read_batches};
use crate::slot::adapt::{Adaptation, NextAction};
use crate::tracker::push_run;
use crate::write_set::WriteSet;
use crate::{Image, ImageError, SlotStats, Strategy};

/// The owner of the memory of a [`RemoteSlot`].
///
/// Runs that are passed are in order and do not overlap.
pub trait Remote {
    /// Why it cannot.
    type Error: std::error::Error + 'static;

    /// Every page that is watched: that the guest may write.
    fn watched(&self) -> Vec<PageRange>;

    /// Appends every page that was written since it was last protected, in any order, and forgets
    /// it. It stays writable.
    ///
    /// # Errors
    /// The owner's own; the slot refuses further use.
    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), Self::Error>;

    /// Protects pages again, which equal the image.
    ///
    /// # Errors
    /// As [`Remote::drain`].
    fn arm(&mut self, pages: &[PageRange]) -> Result<(), Self::Error>;

    /// Makes pages writable without reporting them.
    ///
    /// # Errors
    /// As [`Remote::drain`].
    fn open(&mut self, pages: &[PageRange]) -> Result<(), Self::Error>;

    /// Throws private copies away, so that the pages show `image`, and protects them.
    ///
    /// # Errors
    /// As [`Remote::drain`].
    fn renew(&mut self, image: &Image, pages: &[PageRange]) -> Result<(), Self::Error>;

    /// Reads pages into `out`, which has their total length, one run after the other.
    ///
    /// # Errors
    /// As [`Remote::drain`].
    fn read(&mut self, pages: &[PageRange], out: &mut [u8]) -> Result<(), Self::Error>;
}

/// Pages that may differ from a slot's image without a report, because the owner has changed the
/// mappings of the memory. Each is in order, and no page is in two.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnreportedPages<'a> {
    /// Pages at which something is mapped, which are compared and copied.
    pub placed: &'a [PageRange],
    /// Mapped images that were not written, each from a page on: they are mapped, not copied.
    pub borrowed: &'a [(usize, Image)],
    /// Pages that are now unmapped, and become zero.
    pub gone: &'a [PageRange],
}

/// A slot of another process failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError<E: std::error::Error + 'static> {
    /// Its owner failed.
    #[error(transparent)]
    Owner(E),
    /// Its content could not be stored.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// It failed before.
    #[error("the memory's content is unknown since its owner failed: make a new slot")]
    Quarantined,
    /// Only a write set and discarding serve memory that this process cannot reach.
    #[error(
        "strategy {0} is not available for memory in another process; auto, write-set and discard are"
    )]
    Strategy(Strategy),
}

impl<E: std::error::Error + 'static> From<SysError> for RemoteError<E> {
    fn from(error: SysError) -> Self {
        Self::Image(error.into())
    }
}

/// Maximum pages whose content a freeze keeps between their comparison and their copy: 4 MiB. It
/// reads the changed pages behind them twice.
const MAX_KEPT: usize = 1024;

/// Pages that differ from an image and are not zero.
struct ChangedContent {
    pages: Vec<PageRange>,
    /// The content of the first of them.
    kept: Vec<u8>,
}

/// Memory of another process that holds one image and is reset to it.
#[derive(Debug)]
pub struct RemoteSlot {
    image: Image,
    discards: bool,
    limit: usize,
    write_set: WriteSet,
    /// The write set, as runs.
    runs: Vec<PageRange>,
    written: Vec<PageRange>,
    adapt: Adaptation,
    stats: SlotStats,
    failed: bool,
}

impl RemoteSlot {
    /// A slot whose memory maps `image`, with all guest-writable pages protected. A write set of
    /// more than `limit` pages is emptied and learned anew.
    ///
    /// # Errors
    /// [`RemoteError::Strategy`].
    pub fn new<E: std::error::Error + 'static>(
        image: &Image,
        strategy: Strategy,
        limit: usize,
    ) -> Result<Self, RemoteError<E>> {
        let discards = match strategy {
            Strategy::Auto | Strategy::WriteSet(None) => false,
            Strategy::Discard => true,
            other => return Err(RemoteError::Strategy(other)),
        };
        Ok(Self {
            image: image.clone(),
            discards,
            limit,
            write_set: WriteSet::default(),
            runs: Vec::new(),
            written: Vec::new(),
            adapt: Adaptation::default(),
            stats: SlotStats::default(),
            failed: false,
        })
    }

    /// The image to which it is reset.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Its counters so far.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        self.stats
    }

    /// Number of pages in the write set.
    #[must_use]
    pub fn write_set_len(&self) -> usize {
        self.write_set.len()
    }

    /// Forgets pages that show the image again, because their owner has mapped them anew.
    pub fn forget(&mut self, pages: &[PageRange]) {
        for range in pages {
            self.write_set.forget(*range);
        }
        self.runs = self.write_set.runs();
    }

    /// Runs `work`; when it fails, the memory's content is not known.
    fn guarded<T, R: Remote>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, RemoteError<R::Error>>,
    ) -> Result<T, RemoteError<R::Error>> {
        if self.failed {
            return Err(RemoteError::Quarantined);
        }
        self.failed = true;
        let done = work(self)?;
        self.failed = false;
        Ok(done)
    }

    /// Adds the written pages to the write set.
    fn take<R: Remote>(&mut self, remote: &mut R) -> Result<(), RemoteError<R::Error>> {
        self.written.clear();
        remote.drain(&mut self.written).map_err(RemoteError::Owner)?;
        if !self.written.is_empty() {
            self.written.sort_unstable_by_key(|run| run.start);
            let learned = self.write_set.learn(planted::but_last(Bug::Learn, &self.written));
            self.stats.learned += learned as u64;
            self.runs = self.write_set.runs();
        }
        Ok(())
    }

    /// Prepares the return to the image, and returns the pages that the owner must now copy back
    /// from it. All others equal it.
    ///
    /// # Errors
    /// [`RemoteError`]; the slot refuses further use.
    pub fn reset<R: Remote>(
        &mut self,
        remote: &mut R,
    ) -> Result<&[PageRange], RemoteError<R::Error>> {
        self.guarded::<_, R>(|slot| {
            slot.take(remote)?;
            if slot.discards || slot.write_set.len() > slot.limit {
                slot.renew_all(remote)?;
            }
            match slot.adapt.next(slot.write_set.len()) {
                NextAction::Sample => slot.sample(remote)?,
                NextAction::Look(pages) => slot.look(remote, pages)?,
                NextAction::Copy => {}
            }
            slot.stats.resets += 1;
            Ok(())
        })?;
        Ok(planted::but_last(Bug::CopyBack, &self.runs))
    }

    fn renew_all<R: Remote>(&mut self, remote: &mut R) -> Result<(), RemoteError<R::Error>> {
        let all = remote.watched();
        remote.renew(&self.image, &all).map_err(RemoteError::Owner)?;
        self.write_set.clear();
        self.runs.clear();
        Ok(())
    }

    /// Compares a few pages of the set with the image.
    #[cold]
    fn look<R: Remote>(
        &mut self,
        remote: &mut R,
        pages: usize,
    ) -> Result<(), RemoteError<R::Error>> {
        let (image, mut failure, mut live) = (&self.image, None, [0; PAGE_SIZE]);
        let (looked, written) = self.write_set.look_by(usize::MAX, pages, |page| {
            match remote.read(&[PageRange::new(page, 1)], &mut live) {
                Ok(()) => !image.page_is(page, &live),
                Err(error) => {
                    failure.get_or_insert(error);
                    true
                }
            }
        });
        self.adapt.record_comparison(looked, written);
        failure.map_or(Ok(()), |error| Err(RemoteError::Owner(error)))
    }

    /// Compares the whole set with the image, and evicts pages that have been idle for long enough.
    #[cold]
    fn sample<R: Remote>(&mut self, remote: &mut R) -> Result<(), RemoteError<R::Error>> {
        let changed = self.changed(remote, &self.runs)?;
        let mut runs = changed.iter().copied().peekable();
        let set = self.write_set.len();
        let found = self.write_set.sample_by(usize::MAX, |page| {
            while runs.next_if(|run| run.end() <= page).is_some() {}
            runs.peek().is_some_and(|run| run.contains(page))
        });
        let evicted: usize = found.evicted.iter().map(|range| range.len).sum();
        self.stats.evicted += evicted as u64;
        self.adapt.sampled(set, found.changed, evicted, found.idle, found.used);
        if evicted > 0 {
            let again = planted::but_last(Bug::Rearm, &found.evicted);
            remote.renew(&self.image, again).map_err(RemoteError::Owner)?;
            self.runs = self.write_set.runs();
        }
        Ok(())
    }

    /// Those of `runs` whose bytes differ from the image, and the content of those that hold
    /// something. Reads each page once.
    fn read_changed<R: Remote>(
        &self,
        remote: &mut R,
        runs: &[PageRange],
    ) -> Result<(Vec<PageRange>, ChangedContent), RemoteError<R::Error>> {
        let (mut changed, mut pages) = (Vec::new(), Vec::new());
        let room = byte_len(runs).min((MAX_KEPT + BATCH_PAGES) * PAGE_SIZE);
        // Kept pages, and behind them the present batch.
        let mut buffer = vec![0; room];
        let (mut kept, mut is_full) = (0, false);
        for batch in batches(runs) {
            let first = kept;
            let end = first + byte_len(&batch);
            remote.read(&batch, &mut buffer[first..end]).map_err(RemoteError::Owner)?;
            let numbers = batch.iter().flat_map(|part| part.start..part.end());
            for (page, at) in numbers.zip((first..end).step_by(PAGE_SIZE)) {
                let live = &buffer[at..at + PAGE_SIZE];
                if self.image.page_is(page, live) {
                    continue;
                }
                push_run(&mut changed, PageRange::new(page, 1));
                if is_zero(live) {
                    continue;
                }
                push_run(&mut pages, PageRange::new(page, 1));
                is_full |= kept == MAX_KEPT * PAGE_SIZE;
                if !is_full {
                    buffer.copy_within(at..at + PAGE_SIZE, kept);
                    kept += PAGE_SIZE;
                }
            }
        }
        buffer.truncate(kept);
        Ok((changed, ChangedContent { pages, kept: buffer }))
    }

    /// Those of `runs` whose bytes differ from the image.
    fn changed<R: Remote>(
        &self,
        remote: &mut R,
        runs: &[PageRange],
    ) -> Result<Vec<PageRange>, RemoteError<R::Error>> {
        let mut changed = Vec::new();
        read_runs(remote, runs, |page, live| {
            if !self.image.page_is(page, live) {
                push_run(&mut changed, PageRange::new(page, 1));
            }
        })?;
        Ok(changed)
    }

    /// An image of the present content, of `pages` pages, without a change of the slot.
    ///
    /// # Errors
    /// [`RemoteError`]. An error of the image does not change the slot. After others it refuses
    /// further use.
    pub fn freeze<R: Remote>(
        &mut self,
        remote: &mut R,
        pages: usize,
        differing: &UnreportedPages<'_>,
    ) -> Result<Image, RemoteError<R::Error>> {
        Ok(self.capture(remote, pages, differing)?.0)
    }

    fn capture<R: Remote>(
        &mut self,
        remote: &mut R,
        pages: usize,
        UnreportedPages { placed, borrowed, gone }: &UnreportedPages<'_>,
    ) -> Result<(Image, Vec<PageRange>), RemoteError<R::Error>> {
        let (changed, mut content) = self.guarded::<_, R>(|slot| {
            slot.take(remote)?;
            let mut looked_at = WriteSet::default();
            looked_at.learn(&slot.runs);
            looked_at.learn(placed);
            gone.iter().for_each(|range| looked_at.forget(*range));
            slot.read_changed(remote, &looked_at.runs())
        })?;
        let mut replaced = WriteSet::default();
        replaced.learn(planted::but_last(Bug::Freeze, &changed));
        // Each is within one run of changed pages; a planted bug leaves one out, behind the others.
        content.pages.retain(|run| replaced.count_in(*run) > 0);
        let inside = |range: &PageRange| range.intersect(PageRange::new(0, pages));
        replaced.learn(&gone.iter().filter_map(inside).collect::<Vec<_>>());
        // Pages that were not kept are read again, while nothing runs that could change them.
        let read =
            |runs: &[PageRange], out: &mut [u8]| remote.read(runs, out).map_err(RemoteError::Owner);
        let (stored, kept) = (&content.pages, &content.kept);
        let image = self.image.with_pages(pages, &replaced.runs(), stored, kept, read);
        self.failed |= matches!(image, Err(RemoteError::Owner(_)));
        let image = image?;
        // A range written before it was mapped anew is copied as well, with the same result.
        let image = if borrowed.is_empty() { image } else { image.with_parts(pages, borrowed)? };
        Ok((image, changed))
    }

    /// As [`RemoteSlot::freeze`], and resets go to that image from then on. Pages that were not
    /// written for some checkpoints are protected again.
    ///
    /// # Errors
    /// As [`RemoteSlot::freeze`].
    pub fn checkpoint<R: Remote>(
        &mut self,
        remote: &mut R,
        pages: usize,
        differing: &UnreportedPages<'_>,
    ) -> Result<Image, RemoteError<R::Error>> {
        let (image, changed) = self.capture(remote, pages, differing)?;
        self.guarded::<_, R>(|slot| {
            slot.image = image.clone();
            differing.gone.iter().for_each(|range| slot.write_set.forget(*range));
            let evicted = slot.write_set.settle(&changed);
            slot.stats.evicted += evicted.iter().map(|range| range.len as u64).sum::<u64>();
            remote.arm(planted::but_last(Bug::Rearm, &evicted)).map_err(RemoteError::Owner)?;
            slot.runs = slot.write_set.runs();
            Ok(())
        })?;
        Ok(image)
    }

    /// Prepares the switch to `image`, and returns the pages that the owner must now copy from it:
    /// those in which the images differ, and those that were written. `fresh` are pages whose owner
    /// maps them anew, so that they show `image`.
    ///
    /// # Errors
    /// [`RemoteError`]; the slot refuses further use.
    pub fn switch<R: Remote>(
        &mut self,
        remote: &mut R,
        image: &Image,
        fresh: &[PageRange],
    ) -> Result<&[PageRange], RemoteError<R::Error>> {
        self.guarded::<_, R>(|slot| {
            slot.take(remote)?;
            let mut differing = WriteSet::default();
            differing.learn(&slot.image.differing(image));
            for range in fresh {
                differing.forget(*range);
                slot.write_set.forget(*range);
            }
            // Memory without write access equals its mapping, or is mapped anew.
            let watched = remote.watched();
            let runs = differing.runs();
            let inside = |run: &PageRange| {
                watched.iter().filter_map(|range| range.intersect(*run)).collect::<Vec<_>>()
            };
            let inside: Vec<PageRange> = runs.iter().flat_map(inside).collect();
            let inside = planted::but_last(Bug::Switch, &inside);
            slot.image = image.clone();
            if slot.discards || slot.write_set.len() + differing.len() > slot.limit {
                return slot.renew_all(remote);
            }
            remote.open(inside).map_err(RemoteError::Owner)?;
            slot.write_set.learn(inside);
            slot.runs = slot.write_set.runs();
            Ok(())
        })?;
        Ok(&self.runs)
    }

    /// Compares all of `pages` with the image: the first page that differs. Must follow a reset
    /// whose pages were copied.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn verify<R: Remote>(
        &mut self,
        remote: &mut R,
        pages: &[PageRange],
    ) -> Result<Option<usize>, RemoteError<R::Error>> {
        if self.failed {
            return Err(RemoteError::Quarantined);
        }
        if planted::is(Bug::Verify) {
            return Ok(None);
        }
        let mut first = None;
        read_runs(remote, pages, |page, live| {
            if first.is_none() && !self.image.page_is(page, live) {
                first = Some(page);
            }
        })?;
        self.stats.verified += u64::from(first.is_none());
        Ok(first)
    }
}

/// Hands every page of `runs` to `each`.
fn read_runs<R: Remote>(
    remote: &mut R,
    runs: &[PageRange],
    mut each: impl FnMut(usize, &[u8]),
) -> Result<(), RemoteError<R::Error>> {
    let read =
        |part: &[PageRange], live: &mut [u8]| remote.read(part, live).map_err(RemoteError::Owner);
    read_batches(runs, read, |batch, live| {
        let pages = batch.iter().flat_map(|part| part.start..part.end());
        pages.zip(live.chunks_exact(PAGE_SIZE)).for_each(|(page, bytes)| each(page, bytes));
        Ok(())
    })
}

#[cfg(test)]
mod tests;
