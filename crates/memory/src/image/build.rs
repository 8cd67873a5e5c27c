//! Building images: from segments, from a live range, from a file.
//!
//! For every source, zero pages are found and left out, and the rest goes into one sealed backing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Read;

use afresh_sys::{Memfd, PAGE_SIZE, PageRange, SysError};

use super::backing::Release;
use super::layout::BackingLayout;
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
        store(
            &runs,
            Release::Whole,
            |_| true,
            |file, runs, at| {
                pieces.clear();
                let pages = runs.iter().flat_map(|run| run.start..run.end());
                let content = pages.filter_map(|page| self.content.get(&page));
                pieces.extend(content.map(|page| (page.as_ptr(), PAGE_SIZE)));
                // SAFETY: the pieces are the builder's own pages.
                unsafe { file.write_from(&pieces, at * PAGE_SIZE) }
            },
        )
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
        let extents = unsafe {
            store_nonzero(&[PageRange::new(0, pages)], source, Release::Whole, |_| true)?
        };
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
/// `can_bridge` as for [`super::layout::bridged_gaps`].
///
/// # Safety
/// Every page of `ranges` must be readable at `source` and stay unchanged through the call.
pub(super) unsafe fn store_nonzero(
    ranges: &[PageRange],
    source: *const u8,
    release: Release,
    can_bridge: impl Fn(PageRange) -> bool,
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
    store(&runs, release, can_bridge, |file, runs, at| {
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
    store(
        &runs,
        release,
        |_| true,
        |file, runs, at| {
            pieces.clear();
            for page in left.by_ref().take(runs.iter().map(|run| run.len).sum()) {
                match pieces.last_mut() {
                    Some((start, len)) if start.wrapping_add(*len) == page => *len += PAGE_SIZE,
                    _ => pieces.push((page, PAGE_SIZE)),
                }
            }
            // SAFETY: as above.
            unsafe { file.write_from(&pieces, at * PAGE_SIZE) }
        },
    )
}

/// Packs `runs` into a new backing. `write` gets those that follow one another there, and the page
/// at which they begin. `can_bridge` as for [`super::layout::bridged_gaps`].
fn store(
    runs: &[PageRange],
    release: Release,
    can_bridge: impl Fn(PageRange) -> bool,
    mut write: impl FnMut(&Memfd, &[PageRange], usize) -> Result<(), SysError>,
) -> Result<Vec<Extent>, ImageError> {
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    let layout = BackingLayout::new(runs, can_bridge);
    let places = layout.places().to_vec();
    let backing = Backing::create::<SysError>(places, release, |file, start| {
        layout.groups().try_for_each(|(runs, first)| write(file, runs, start + first))
    })?;
    Ok(layout.extents(&backing))
}

/// Pages that are read at a time.
pub(crate) const BATCH_PAGES: usize = 256;

/// `runs`, cut into parts of [`BATCH_PAGES`] pages.
pub(crate) fn batches(runs: &[PageRange]) -> impl Iterator<Item = Vec<PageRange>> {
    let (mut at, mut taken) = (0, 0);
    std::iter::from_fn(move || {
        let mut batch = Vec::new();
        let mut left = BATCH_PAGES;
        while let Some(run) = runs.get(at).filter(|_| left > 0) {
            let part = PageRange::new(run.start + taken, left.min(run.len - taken));
            (taken, left) = (taken + part.len, left - part.len);
            if taken == run.len {
                (at, taken) = (at + 1, 0);
            }
            if part.len > 0 {
                batch.push(part);
            }
        }
        (!batch.is_empty()).then_some(batch)
    })
}

/// Reads the pages of `runs` through `read` in batches, one run after the other, and passes each
/// batch and its bytes to `each`.
pub(crate) fn read_batches<E>(
    runs: &[PageRange],
    mut read: impl FnMut(&[PageRange], &mut [u8]) -> Result<(), E>,
    mut each: impl FnMut(&[PageRange], &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let all: usize = runs.iter().map(|run| run.len).sum();
    let mut buffer = vec![0; all.min(BATCH_PAGES) * PAGE_SIZE];
    batches(runs).try_for_each(|batch| {
        let bytes = &mut buffer[..byte_len(&batch)];
        read(&batch, bytes)?;
        each(&batch, bytes)
    })
}

/// Bytes of the pages of `runs`.
pub(crate) fn byte_len(runs: &[PageRange]) -> usize {
    runs.iter().map(|run| run.byte_len()).sum()
}

/// `runs` up to their first `pages` pages, and from there on.
fn split(runs: &[PageRange], pages: usize) -> (Vec<PageRange>, Vec<PageRange>) {
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    let mut left = pages;
    for run in runs {
        let now = left.min(run.len);
        left -= now;
        first.extend((now > 0).then_some(PageRange::new(run.start, now)));
        rest.extend((now < run.len).then_some(PageRange::new(run.start + now, run.len - now)));
    }
    (first, rest)
}

/// Whether none of `extents`, which are in order, has a page in a range.
pub(super) fn is_free(extents: &[Extent]) -> impl Fn(PageRange) -> bool {
    |range| {
        let at = extents.partition_point(|extent| extent.range.end() <= range.start);
        extents.get(at).is_none_or(|extent| extent.range.start >= range.end())
    }
}

impl Image {
    /// This image, of `pages` pages, but for `changed`: of those the pages `stored` hold something.
    /// `kept` is the content of the first of these, and `read` puts that of the others into bytes,
    /// a few runs after one another at a time. Both lists are sorted and disjoint, and all of
    /// `stored` is in `changed`. Shares the rest.
    ///
    /// # Errors
    /// As [`ImageBuilder::build`], when the pages violate this, and any error of `read`.
    pub(crate) fn with_pages<E: From<SysError> + From<ImageError>>(
        &self,
        pages: usize,
        changed: &[PageRange],
        stored: &[PageRange],
        kept: &[u8],
        read: impl FnMut(&[PageRange], &mut [u8]) -> Result<(), E>,
    ) -> Result<Image, E> {
        check_sorted(changed, pages)?;
        check_sorted(stored, pages)?;
        let mut all = self.kept_extents(pages, changed);
        if !stored.is_empty() {
            let layout = BackingLayout::new(stored, is_free(&all));
            let places = layout.places().to_vec();
            let backing = Backing::create(places, Release::Pages, |file, start| {
                let (first, rest) = split(stored, kept.len() / PAGE_SIZE);
                layout.write(file, start, &first, &kept[..byte_len(&first)])?;
                read_batches(&rest, read, |batch, bytes| {
                    Ok::<(), E>(layout.write(file, start, batch, bytes)?)
                })
            })?;
            all.extend(layout.extents(&backing));
            all.sort_by_key(|extent| extent.range.start);
        }
        Ok(Image::from_extents(pages, all))
    }
}
