//! Building images: from segments, from a live range, from a file.
//!
//! For every source, zero pages are found and left out, and the rest goes into one sealed backing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Read;
use std::sync::Arc;

use afresh_sys::{Memfd, PAGE_SIZE, PageRange, SysError};

use super::backing::Release;
use super::{Backing, Extent, Image, is_zero};
use crate::ImageError;

/// Collects segments and builds an image of them.
///
/// ```
/// use afresh_memory::{Image, ImageBuilder};
///
/// let mut builder = ImageBuilder::new(16);
/// builder.segment(5000, b"warm")?;
/// let image: Image = builder.build()?;
/// assert_eq!(image.stored_pages(), 1);
/// let mut out = [0; 4];
/// image.read(5000, &mut out);
/// assert_eq!(&out, b"warm");
/// # Ok::<(), afresh_memory::ImageError>(())
/// ```
#[derive(Debug)]
pub struct ImageBuilder {
    pages: usize,
    content: BTreeMap<usize, Box<[u8; PAGE_SIZE]>>,
}

impl ImageBuilder {
    /// Begins an image of `pages` pages, all zero.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self { pages, content: BTreeMap::new() }
    }

    /// Writes `bytes` at byte `offset`; a later segment overwrites an earlier one.
    ///
    /// # Errors
    /// [`ImageError::OutOfBounds`] when the segment does not fit, in which case nothing is written.
    pub fn segment(&mut self, offset: usize, bytes: &[u8]) -> Result<&mut Self, ImageError> {
        let end = offset.checked_add(bytes.len());
        if end.is_none_or(|end| end > self.pages * PAGE_SIZE) {
            return Err(ImageError::OutOfBounds {
                offset,
                len: bytes.len(),
                image: self.pages * PAGE_SIZE,
            });
        }
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done;
            let within = at % PAGE_SIZE;
            let n = (PAGE_SIZE - within).min(bytes.len() - done);
            let part = &bytes[done..done + n];
            done += n;
            // Zeros take no room where nothing was written before.
            let page = match self.content.entry(at / PAGE_SIZE) {
                Entry::Vacant(_) if is_zero(part) => continue,
                Entry::Vacant(page) => page.insert(Box::new([0; PAGE_SIZE])),
                Entry::Occupied(page) => page.into_mut(),
            };
            page[within..within + n].copy_from_slice(part);
        }
        Ok(self)
    }

    /// Builds the image.
    ///
    /// # Errors
    /// [`ImageError::System`] when memory or descriptors ran out.
    pub fn build(self) -> Result<Image, ImageError> {
        let pages = self.pages;
        Ok(Image::from_extents(pages, self.store()?))
    }

    /// Stores the pages that are not zero.
    fn store(mut self) -> Result<Vec<Extent>, ImageError> {
        self.content.retain(|_, page| !is_zero(&page[..]));
        let mut runs: Vec<PageRange> = Vec::new();
        for &page in self.content.keys() {
            push_page(&mut runs, page);
        }
        let mut pieces = Vec::new();
        store(&runs, Release::Whole, |file, runs, at| {
            pieces.clear();
            let pages = runs.iter().flat_map(|run| run.start..run.end());
            let content = pages.filter_map(|page| self.content.get(&page));
            pieces.extend(content.map(|page| (page.as_ptr(), PAGE_SIZE)));
            // SAFETY: the pieces are the builder's own pages.
            unsafe { file.write_from(&pieces, at * PAGE_SIZE) }
        })
    }
}

impl Image {
    /// Captures `pages` pages of live memory at `source`.
    ///
    /// # Safety
    /// The whole range must be readable, and must not be written during the call.
    ///
    /// # Errors
    /// [`ImageError::System`] when memory or descriptors ran out.
    pub unsafe fn capture(source: *const u8, pages: usize) -> Result<Image, ImageError> {
        // SAFETY: the caller's promise, passed on.
        let extents =
            unsafe { store_nonzero(&[PageRange::new(0, pages)], source, Release::Whole)? };
        Ok(Image::from_extents(pages, extents))
    }

    /// Reads an image from a file or any other reader, to its end; a last partial page is padded
    /// with zeros.
    ///
    /// # Errors
    /// [`ImageError::Read`] when reading fails or the content exceeds `max_bytes`.
    pub fn read_from(mut reader: impl Read, max_bytes: usize) -> Result<Image, ImageError> {
        let mut builder = ImageBuilder::new(max_bytes.div_ceil(PAGE_SIZE));
        let mut buffer = vec![0; 1 << 20];
        let mut len = 0;
        loop {
            let n = match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ImageError::Read(error)),
            };
            if n > max_bytes - len {
                return Err(ImageError::Read(std::io::Error::other(format!(
                    "content is larger than the limit of {max_bytes} bytes"
                ))));
            }
            builder.segment(len, &buffer[..n])?;
            len += n;
        }
        builder.pages = len.div_ceil(PAGE_SIZE);
        builder.build()
    }
}

/// Adds `page`, which is larger than any before, to sorted runs.
fn push_page(runs: &mut Vec<PageRange>, page: usize) {
    match runs.last_mut() {
        Some(last) if last.end() == page => last.len += 1,
        _ => runs.push(PageRange::new(page, 1)),
    }
}

/// Refuses ranges that are not sorted, disjoint and inside `pages`.
pub(super) fn check_sorted(ranges: &[PageRange], pages: usize) -> Result<(), ImageError> {
    let mut from = 0;
    for range in ranges {
        if range.start < from || range.start.checked_add(range.len).is_none_or(|e| e > pages) {
            return Err(ImageError::OutOfBounds {
                offset: range.byte_start(),
                len: range.byte_len(),
                image: pages * PAGE_SIZE,
            });
        }
        from = range.end();
    }
    Ok(())
}

/// Stores those pages of `ranges` that are not zero, read at `source` (the address of page 0).
///
/// # Safety
/// Every page of `ranges` must be readable at `source` and stay unchanged through the call.
pub(super) unsafe fn store_nonzero(
    ranges: &[PageRange],
    source: *const u8,
    release: Release,
) -> Result<Vec<Extent>, ImageError> {
    let mut runs = Vec::new();
    for range in ranges {
        for page in range.start..range.end() {
            // SAFETY: the caller promises that the page is readable and unchanging.
            let bytes =
                unsafe { std::slice::from_raw_parts(source.add(page * PAGE_SIZE), PAGE_SIZE) };
            if !is_zero(bytes) {
                push_page(&mut runs, page);
            }
        }
    }
    let mut pieces = Vec::new();
    store(&runs, release, |file, runs, at| {
        pieces.clear();
        // SAFETY: as above.
        let piece = |run: &PageRange| unsafe { (source.add(run.byte_start()), run.byte_len()) };
        pieces.extend(runs.iter().map(piece));
        // SAFETY: as above.
        unsafe { file.write_from(&pieces, at * PAGE_SIZE) }
    })
}

/// Stores those of `content` that are not zero: pages by number, ascending, each with where it is
/// read.
///
/// # Safety
/// Every page must be readable at its address and stay unchanged through the call.
pub(super) unsafe fn store_pages(
    content: &[(usize, *const u8)],
    release: Release,
) -> Result<Vec<Extent>, ImageError> {
    // SAFETY: the caller promises that the page is readable and unchanging.
    let zero = |at: *const u8| is_zero(unsafe { std::slice::from_raw_parts(at, PAGE_SIZE) });
    let content: Vec<_> = content.iter().copied().filter(|(_, at)| !zero(*at)).collect();
    let mut runs = Vec::new();
    content.iter().for_each(|(page, _)| push_page(&mut runs, *page));
    // Runs come in order, and so do their pages.
    let mut left = content.iter().map(|(_, at)| *at);
    let mut pieces: Vec<(*const u8, usize)> = Vec::new();
    store(&runs, release, |file, runs, at| {
        pieces.clear();
        for page in left.by_ref().take(runs.iter().map(|run| run.len).sum()) {
            match pieces.last_mut() {
                Some((start, len)) if start.wrapping_add(*len) == page => *len += PAGE_SIZE,
                _ => pieces.push((page, PAGE_SIZE)),
            }
        }
        // SAFETY: as above.
        unsafe { file.write_from(&pieces, at * PAGE_SIZE) }
    })
}

/// Maximum mappings that a slot should need for one backing.
const MAX_RUNS: usize = 256;
/// Gaps of up to this many pages are always kept as holes.
const SMALL_GAP: usize = 16;

/// The smallest gap limit that leaves at most [`MAX_RUNS`] runs: gaps up to it become holes in the
/// backing, so that the runs on both sides can be mapped as one. A hole takes no memory until a
/// guest reads it through such a mapping.
pub(super) fn gap_limit(runs: &[PageRange]) -> usize {
    let mut gaps: Vec<usize> = runs.windows(2).map(|w| w[1].start - w[0].end()).collect();
    gaps.sort_unstable();
    let kept_apart = (MAX_RUNS - 1).min(gaps.len());
    match gaps.len() - kept_apart {
        0 => SMALL_GAP,
        merged => gaps[merged - 1].max(SMALL_GAP),
    }
}

/// The places of `runs` in a separate backing: one after the other, except for small gaps between
/// them.
fn places(runs: &[PageRange]) -> Vec<PageRange> {
    let limit = gap_limit(runs);
    let mut places = Vec::with_capacity(runs.len());
    let mut at = 0;
    let mut previous_end = runs.first().map_or(0, |first| first.start);
    for run in runs {
        let gap = run.start - previous_end;
        at += if gap <= limit { gap } else { 0 };
        places.push(PageRange::new(at, run.len));
        at += run.len;
        previous_end = run.end();
    }
    places
}

/// `runs`, stored at `places` of a backing.
fn extents(runs: &[PageRange], places: &[PageRange], backing: &Arc<Backing>) -> Vec<Extent> {
    let extent = |(run, place): (&PageRange, &PageRange)| Extent {
        range: *run,
        backing: backing.clone(),
        at: place.start,
    };
    runs.iter().zip(places).map(extent).collect()
}

/// Packs `runs` into a new backing. `write` gets those that follow one another there, and the page
/// at which they begin.
fn store(
    runs: &[PageRange],
    release: Release,
    mut write: impl FnMut(&Memfd, &[PageRange], usize) -> Result<(), SysError>,
) -> Result<Vec<Extent>, ImageError> {
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    let places = places(runs);
    let backing = Backing::create::<SysError>(places.clone(), release, |file, start| {
        let mut from = 0;
        while from < runs.len() {
            let follow = places[from..].windows(2).take_while(|w| w[0].end() == w[1].start);
            let to = from + 1 + follow.count();
            write(file, &runs[from..to], start + places[from].start)?;
            from = to;
        }
        Ok(())
    })?;
    Ok(extents(runs, &places, &backing))
}

/// Pages that are read at a time.
const BATCH_PAGES: usize = 256;

/// Reads the pages of `runs` through `read` in batches, one run after the other, and passes them to
/// `each`, one run or a part of one per call.
pub(crate) fn read_parts<E>(
    runs: &[PageRange],
    mut read: impl FnMut(&[PageRange], &mut [u8]) -> Result<(), E>,
    mut each: impl FnMut(PageRange, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let all: usize = runs.iter().map(|run| run.len).sum();
    let mut buffer = vec![0; all.min(BATCH_PAGES) * PAGE_SIZE];
    let mut hand = |part: &[PageRange]| {
        let bytes = &mut buffer[..part.iter().map(|piece| piece.byte_len()).sum()];
        read(part, bytes)?;
        let mut rest = &*bytes;
        part.iter().try_for_each(|piece| {
            let (bytes, after) = rest.split_at(piece.byte_len());
            rest = after;
            each(*piece, bytes)
        })
    };
    let mut part: Vec<PageRange> = Vec::new();
    let mut left = BATCH_PAGES;
    for run in runs {
        let mut at = run.start;
        while at < run.end() {
            let piece = PageRange::new(at, left.min(run.end() - at));
            part.push(piece);
            (at, left) = (piece.end(), left - piece.len);
            if left == 0 {
                hand(&part)?;
                part.clear();
                left = BATCH_PAGES;
            }
        }
    }
    if part.is_empty() { Ok(()) } else { hand(&part) }
}

impl Image {
    /// This image, of `pages` pages, but for `changed`: of those the pages `stored` hold something,
    /// which `read` puts into bytes, a few runs after one another at a time. Both are sorted and
    /// disjoint, and all of `stored` is in `changed`. Shares the rest.
    ///
    /// # Errors
    /// As [`ImageBuilder::build`], when the pages violate this, and any error of `read`.
    pub(crate) fn with_pages<E: From<SysError> + From<ImageError>>(
        &self,
        pages: usize,
        changed: &[PageRange],
        stored: &[PageRange],
        read: impl FnMut(&[PageRange], &mut [u8]) -> Result<(), E>,
    ) -> Result<Image, E> {
        check_sorted(changed, pages)?;
        check_sorted(stored, pages)?;
        let mut all = self.kept_extents(pages, changed);
        if !stored.is_empty() {
            let places = places(stored);
            let backing = Backing::create(places.clone(), Release::Pages, |file, start| {
                read_parts(stored, read, |piece, bytes| {
                    let at = stored.partition_point(|run| run.end() <= piece.start);
                    let page = start + places[at].start + piece.start - stored[at].start;
                    Ok::<(), E>(file.write_at(bytes, page * PAGE_SIZE)?)
                })
            })?;
            all.extend(extents(stored, &places, &backing));
            all.sort_by_key(|extent| extent.range.start);
        }
        Ok(Image::from_extents(pages, all))
    }
}
