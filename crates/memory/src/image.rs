//! Images: immutable, page-granular content of an address range.
//!
//! An image is a list of extents, each a run of pages in some sealed [`Backing`]; pages that no
//! extent holds are zero and are stored nowhere. A derived image shares its parent's extents and
//! adds a backing with only the changed pages, so a chain of snapshots costs only the changes. A
//! dropped image gives back the pages of derived images' backings that no other image refers to.
//!
//! Promises: the content never changes once built (nothing maps the files writable, and those that
//! are released only as a whole are sealed); a clone is a reference count; descriptors stay bounded
//! however many images exist. A [`BorrowedFile`] is as immutable as its owner promised.

mod arrived_pages;
mod backing;
mod borrowed_file;
mod build;
mod copier;
mod diff;
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
mod file;
mod file_owner;
mod filler;
mod inserter;
mod join;
mod layout;
mod lazy;
mod loss;
mod page_origins;
mod references;
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
mod sealed;

use std::fmt;
use std::sync::{Arc, Weak};

use afresh_sys::{InheritedCell, InheritedMutex, PAGE_SIZE, PageRange};

pub(crate) use backing::Backing;
use backing::Release;
pub use borrowed_file::BorrowedFile;
pub use build::ImageBuilder;
pub(crate) use build::{BATCH_PAGES, batches, byte_len, read_batches};
pub(crate) use copier::PageCopier;
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
pub use file::ImageFile;
pub use file_owner::FileOwner;
pub(crate) use filler::FaultOutcome;
pub use filler::Filler;
pub use inserter::Inserter;
pub(crate) use lazy::Missing;
pub use loss::PageLoss;
pub use page_origins::PageOrigin;
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
pub use sealed::SealedImageFile;

use crate::ImageError;

/// A run of stored pages. It keeps the backing, but not its pages: only the image that has it does.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    /// The position of the run in the image.
    pub(crate) range: PageRange,
    /// What holds it.
    pub(crate) backing: Arc<Backing>,
    /// First page of the run inside the backing.
    pub(crate) at: usize,
}

impl Extent {
    /// Address of page `page` (an index in the image) in the read-only view.
    pub(crate) fn page_ptr(&self, page: usize) -> *const u8 {
        debug_assert!(self.range.contains(page));
        self.backing.page_ptr(self.at + page - self.range.start)
    }

    /// The part of this extent inside `range`, if any.
    fn clip(&self, range: PageRange) -> Option<Extent> {
        let part = self.range.intersect(range)?;
        Some(Extent {
            range: part,
            backing: self.backing.clone(),
            at: self.at + part.start - self.range.start,
        })
    }
}

struct Inner {
    pages: usize,
    /// Sorted, disjoint, not empty; no page in them is known to be zero.
    extents: Vec<Extent>,
    digest: InheritedCell<[u8; 32]>,
    /// Its copy with few mappings, while a slot has it.
    compacted: InheritedMutex<Weak<Inner>>,
    /// The image that this is such a copy of. Keeps its address from being used again, because both
    /// have the same number.
    original: Option<Weak<Inner>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut released = Vec::new();
        for extent in &self.extents {
            let pages = extent.backing.release(PageRange::new(extent.at, extent.range.len));
            if !pages.is_empty() {
                released.push((&extent.backing, pages));
            }
        }
        // Only after all were counted: a backing without images is released at once.
        released.into_iter().for_each(|(backing, pages)| backing.give_back(&pages));
    }
}

/// The content of a page: its address, and the backing whose view has it.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub(crate) from: *const u8,
    pub(crate) backing: *const Backing,
}

/// Immutable content of an address range; cheap to clone.
#[derive(Clone)]
pub struct Image {
    inner: Arc<Inner>,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("pages", &self.pages())
            .field("stored_pages", &self.stored_pages())
            .field("extents", &self.inner.extents.len())
            .finish()
    }
}

impl Image {
    /// An image of `pages` zero pages.
    #[must_use]
    pub fn zero(pages: usize) -> Self {
        Self::from_extents(pages, Vec::new())
    }

    fn from_extents(pages: usize, extents: Vec<Extent>) -> Self {
        debug_assert!(extents.windows(2).all(|w| w[0].range.end() <= w[1].range.start));
        debug_assert!(extents.last().is_none_or(|e| e.range.end() <= pages));
        for extent in &extents {
            extent.backing.refer(PageRange::new(extent.at, extent.range.len));
        }
        let (digest, compacted) = (InheritedCell::new(), InheritedMutex::new(Weak::new()));
        Self { inner: Arc::new(Inner { pages, extents, digest, compacted, original: None }) }
    }

    /// Length in pages, stored or not.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.inner.pages
    }

    /// The number of stored pages; the others are zero.
    #[must_use]
    pub fn stored_pages(&self) -> usize {
        self.inner.extents.iter().map(|e| e.range.len).sum()
    }

    /// Whether both are the same image, as opposed to equal images.
    #[must_use]
    pub fn same(&self, other: &Image) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// A number of this image and of its compact copy, which no other image of the process has
    /// while one of the two exists. A slot's image can be such a copy.
    #[must_use]
    pub fn id(&self) -> usize {
        let address = self.inner.original.as_ref().map_or(Arc::as_ptr(&self.inner), Weak::as_ptr);
        address.cast::<u8>() as usize
    }

    /// The runs of stored pages, in order.
    pub fn stored(&self) -> impl Iterator<Item = PageRange> + '_ {
        self.inner.extents.iter().map(|e| e.range)
    }

    /// The extents that touch `range`, clipped to it.
    pub(crate) fn extents_in(&self, range: PageRange) -> impl Iterator<Item = Extent> + '_ {
        let first = self.inner.extents.partition_point(|e| e.range.end() <= range.start);
        self.inner.extents[first..].iter().map_while(move |e| e.clip(range))
    }

    /// Content of a stored page, or `None` for a page that is zero (or past the end).
    ///
    /// # Panics
    /// When a page of a lazily filled image is lost. [`Image::resolve`] reports that beforehand.
    #[must_use]
    pub fn page(&self, page: usize) -> Option<&[u8; PAGE_SIZE]> {
        let source = self.source(page)?;
        // SAFETY: the view maps a file that is no longer written, until the backing is dropped, and
        // the borrow of `self` keeps the backing.
        Some(unsafe { &*source.from.cast::<[u8; PAGE_SIZE]>() })
    }

    /// The address of a stored page's content, for copies that continue over the pages behind it.
    ///
    /// # Panics
    /// As [`Image::page`].
    pub(crate) fn source(&self, page: usize) -> Option<Source> {
        let at = self.inner.extents.partition_point(|e| e.range.end() <= page);
        let extent = self.inner.extents.get(at).filter(|e| e.range.contains(page))?;
        if let Err(error) =
            extent.backing.resolve(PageRange::new(extent.at + page - extent.range.start, 1))
        {
            // Any other content would be wrong; callers that can return an error have resolved the
            // page before.
            panic!("{error}");
        }
        Some(Source { from: extent.page_ptr(page), backing: Arc::as_ptr(&extent.backing) })
    }

    /// Whether `live`, a page's bytes, equals page `page`.
    pub(crate) fn page_is(&self, page: usize, live: &[u8]) -> bool {
        match self.page(page) {
            Some(content) => live == content,
            None => is_zero(live),
        }
    }

    /// Copies bytes out. Bytes past the end of the image read as zero.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let mut done = 0;
        while done < out.len() {
            let at = offset + done;
            let within = at % PAGE_SIZE;
            let n = (PAGE_SIZE - within).min(out.len() - done);
            match self.page(at / PAGE_SIZE) {
                Some(page) => out[done..done + n].copy_from_slice(&page[within..within + n]),
                None => out[done..done + n].fill(0),
            }
            done += n;
        }
    }

    /// blake3 of the content: of the length, and of the index and bytes of every page that is not
    /// zero. Equal content gives equal digests however it is stored. It is computed once, at first
    /// use.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        *self.inner.digest.get_or_make(|| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(b"afresh image 1");
            hasher.update(&(self.pages() as u64).to_le_bytes());
            for range in self.stored() {
                for index in range.start..range.end() {
                    if let Some(page) = self.page(index).filter(|p| !is_zero(&p[..])) {
                        hasher.update(&(index as u64).to_le_bytes());
                        hasher.update(page);
                    }
                }
            }
            *hasher.finalize().as_bytes()
        })
    }

    /// A new image with other content in the pages of `changed`, read from `source`, the address of
    /// page 0 of a live range. All other pages are shared.
    ///
    /// `pages` is the new length; content past it is dropped. Zero pages among the changed ones are
    /// not stored. Costs time and memory in proportion to `changed` and to the number of extents.
    ///
    /// # Safety
    /// Every page of `changed` must be readable at `source`, and must not be written during the
    /// call.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out, or when `changed` is not sorted, disjoint
    /// and inside `pages`.
    pub unsafe fn derive(
        &self,
        pages: usize,
        changed: &[PageRange],
        source: *const u8,
    ) -> Result<Image, ImageError> {
        build::check_sorted(changed, pages)?;
        let mut extents = self.kept_extents(pages, changed);
        // SAFETY: the caller's promise, passed on.
        let stored = unsafe {
            build::store_nonzero(changed, source, Release::Pages, build::is_free(&extents))?
        };
        extents.extend(stored);
        extents.sort_by_key(|e| e.range.start);
        Ok(Image::from_extents(pages, extents))
    }

    /// The extents outside of `changed` (sorted and disjoint), up to page `pages`.
    fn kept_extents(&self, pages: usize, changed: &[PageRange]) -> Vec<Extent> {
        let own = PageRange::new(0, pages);
        let mut extents = Vec::new();
        let mut from = 0;
        for range in changed.iter().copied().chain([PageRange::new(pages, 0)]) {
            let kept = PageRange::new(from, range.start - from);
            extents.extend(self.extents_in(kept).filter_map(|e| e.clip(own)));
            from = range.end();
        }
        extents
    }

    /// The mappings that show the image: each a range of pages, the backing and the first page in
    /// it. Neighbouring extents of one backing are joined over the holes between them.
    pub(crate) fn runs(&self) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        for extent in &self.inner.extents {
            if let Some(last) = runs.last_mut() {
                let gap = extent.range.start - last.range.end();
                let after = last.at + last.range.len;
                if Arc::ptr_eq(&last.backing, &extent.backing)
                    && extent.at == after + gap
                    && (gap == 0 || last.backing.spans(PageRange::new(after, gap)))
                {
                    last.range.len = extent.range.end() - last.range.start;
                    continue;
                }
            }
            runs.push(extent.clone());
        }
        runs
    }

    /// The files that hold the image, for mapping it in another process: in order, each with the
    /// run of pages that it contains. Pages between the runs are zero. The image must not be
    /// dropped while it is mapped.
    ///
    /// A file may hold other images, which this process may write. Map it privately or read-only,
    /// only at the given pages, and do not leave it open in an untrusted process.
    ///
    /// # Errors
    /// [`ImageError`] when content that is filled lazily does not arrive.
    #[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
    pub fn files(&self) -> Result<Vec<ImageFile>, ImageError> {
        self.complete()?;
        Ok(self.all_files())
    }

    #[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
    fn all_files(&self) -> Vec<ImageFile> {
        let file = |extent| ImageFile { extent, image: self.clone() };
        self.runs().into_iter().map(file).collect()
    }

    /// As [`Image::files`], but content that is filled lazily may still be missing if this host can
    /// put it in place in mappings of the files ([`Image::fills_first`]). All of these mappings
    /// must be registered with a userfaultfd for missing pages before the first access, and the
    /// pages filled with [`ImageFile::resolve`]: otherwise the kernel would put a page of zeros
    /// into the file, permanently.
    ///
    /// # Errors
    /// As [`Image::files`].
    #[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
    pub fn unfilled_files(&self) -> Result<Vec<ImageFile>, ImageError> {
        if self.fills_first() {
            return self.files();
        }
        Ok(self.all_files())
    }

    /// The number of mappings of the image. A long chain of derived images fragments. Past a few
    /// hundred mappings, use [`Image::compact`].
    #[must_use]
    pub fn mapping_count(&self) -> usize {
        self.runs().len()
    }

    /// The same content in a separate backing.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out.
    pub fn compact(&self) -> Result<Image, ImageError> {
        // SAFETY: no page is read at the source.
        unsafe { self.store_apart(self.pages(), &[], std::ptr::null(), Release::Pages) }
    }

    /// The form in which slots map the image: itself, or a compact copy where it has more than
    /// `limit` mappings. All slots have the same copy.
    pub(crate) fn mappable(&self, limit: usize) -> Result<Image, ImageError> {
        if self.inner.original.is_some() || self.mapping_count() <= limit {
            return Ok(self.clone());
        }
        // Held during the copy, so that slots which are made at the same time have one.
        let mut compacted = self.inner.compacted.lock();
        if let Some(inner) = compacted.upgrade() {
            return Ok(Image { inner });
        }
        let mut copy = self.compact()?;
        // No other reference exists yet.
        if let Some(inner) = Arc::get_mut(&mut copy.inner) {
            inner.original = Some(Arc::downgrade(&self.inner));
        }
        *compacted = Arc::downgrade(&copy.inner);
        Ok(copy)
    }

    /// The compact copy of the image that slots have, or the image itself where none has one.
    pub(crate) fn mapped(&self) -> Image {
        let copy = self.inner.compacted.lock().upgrade();
        copy.map_or_else(|| self.clone(), |inner| Image { inner })
    }

    /// As [`Image::derive`], in a separate backing: shares nothing, and copies each page once.
    ///
    /// # Safety
    /// As for [`Image::derive`].
    ///
    /// # Errors
    /// As [`Image::derive`], and when pages of this image are unavailable.
    pub unsafe fn derive_apart(
        &self,
        pages: usize,
        changed: &[PageRange],
        source: *const u8,
    ) -> Result<Image, ImageError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.store_apart(pages, changed, source, Release::Whole) }
    }

    /// As [`Image::derive_apart`].
    ///
    /// # Safety
    /// As for [`Image::derive`].
    unsafe fn store_apart(
        &self,
        pages: usize,
        changed: &[PageRange],
        source: *const u8,
        release: Release,
    ) -> Result<Image, ImageError> {
        build::check_sorted(changed, pages)?;
        self.complete()?;
        let mut content = Vec::new();
        let mut from = 0;
        for range in changed.iter().copied().chain([PageRange::new(pages, 0)]) {
            let kept = PageRange::new(from, range.start - from);
            let kept = self.extents_in(kept).flat_map(|e| e.range.start..e.range.end());
            // Addresses that may be read past their page: neighbours are written in one piece.
            content.extend(kept.filter_map(|page| Some((page, self.source(page)?.from))));
            // SAFETY: the caller promises that the page is readable.
            let new = |page: usize| (page, unsafe { source.add(page * PAGE_SIZE) });
            content.extend((range.start..range.end()).map(new));
            from = range.end();
        }
        // SAFETY: pages of this image are readable and never change; the caller promises so of the
        // others.
        let extents = unsafe { build::store_pages(&content, release)? };
        Ok(Image::from_extents(pages, extents))
    }
}

/// Whether every byte is zero. Compares words, so that the compiler can use vectors.
#[must_use]
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (head, words, tail) = {
        // SAFETY: any bit pattern is a valid u64, and `align_to` keeps the parts disjoint.
        unsafe { bytes.align_to::<u64>() }
    };
    head.iter().chain(tail).all(|b| *b == 0)
        && words.chunks(32).all(|chunk| chunk.iter().fold(0, |acc, w| acc | w) == 0)
}
