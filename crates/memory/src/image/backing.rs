//! Storage for the bytes of images: memfds, and packs that many images share.
//!
//! The first images of a process get a file each. A process with thousands of images would run out
//! of descriptors that way. So once [`OWN_FILES`] are alive, the next ones share a pack, and small
//! ones do so at once. A pack is a file that only this module writes, each range of it exactly
//! once: before it is mapped, or, in packs of images that are filled lazily, page by page through
//! their inserters. Borrowed content is in files of other owners ([`super::borrowed_file`]).
//!
//! The file of one image is sealed permanently if it is released only as a whole. A seal also
//! forbids the release of single pages, so files of derived states have none ([`Release`]). Other
//! processes get descriptors for reading only ([`super::ImageFile`]).

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use afresh_sys::{
    Advice, HUGE_PAGES, Memfd, PageRange, PerProcess, Protection, Reservation, SysError,
    fork::Epoch,
};
#[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
use afresh_sys::{Call, SealedMemfd};

use super::arrived_pages::ArrivedPages;
use super::file_owner::FileOwner;
use super::filler::{FaultOutcome, Filler};
use super::references::References;
use crate::ImageError;

/// Backings alive that own their file. With packs of [`PACK_IMAGES`] each, ten thousand images need
/// about 140 descriptors, well under the usual limit of 1024.
const OWN_FILES: usize = 100;
/// Pages of a backing that goes into a pack at once: making a file and sealing it would cost as
/// much as writing so little.
const MIN_FILE_PAGES: usize = 256;
/// Backings alive that share one pack.
const PACK_IMAGES: usize = 256;

static OWNED: AtomicUsize = AtomicUsize::new(0);
/// A child of a fork begins new packs: only the parent writes the files of its packs.
static PACKS: PerProcess<Packs> = PerProcess::new(Packs::default);
/// For images that are filled lazily: each range is filled while slots map it.
static FILLED_PACKS: PerProcess<Packs> = PerProcess::new(Packs::default);

/// A file shared by many backings.
struct Pack {
    file: Memfd,
    /// Next free page.
    next: Mutex<usize>,
    /// Set when space could not be released: no further backing may keep it.
    closed: AtomicBool,
}

/// Packs with live backings. A new one is made only while all others are full, so their number
/// follows the number of live backings, in any order of drops.
#[derive(Default)]
struct Packs(Mutex<Vec<Weak<Pack>>>);

impl Packs {
    /// Room for `pages` pages in a pack, from a multiple of `align` on. No other backing ever gets
    /// it.
    fn room(&self, pages: usize, align: usize) -> Result<(Arc<Pack>, usize), SysError> {
        let mut packs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        packs.retain(|pack| pack.strong_count() > 0);
        let room = |pack: &Arc<Pack>| {
            // Counts `pack` as well.
            Arc::strong_count(pack) <= PACK_IMAGES && !pack.closed.load(Ordering::Relaxed)
        };
        let pack = match packs.iter().filter_map(Weak::upgrade).find(room) {
            Some(pack) => pack,
            None => {
                let file = Memfd::new(c"afresh-pack")?;
                let pack = Arc::new(Pack { file, next: Mutex::new(0), closed: false.into() });
                packs.push(Arc::downgrade(&pack));
                pack
            }
        };
        let mut next = pack.next.lock().unwrap_or_else(PoisonError::into_inner);
        let start = next.next_multiple_of(align);
        pack.file.set_len(PageRange::new(0, start + pages).byte_len())?;
        *next = start + pages;
        drop(next);
        Ok((pack, start))
    }
}

impl Pack {
    /// Gives the memory of a range back.
    fn give_back(&self, range: PageRange) {
        if self.file.punch_hole(range).is_err() {
            self.closed.store(true, Ordering::Relaxed);
        }
    }
}

/// The method of releasing the memory of a backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Release {
    /// With the last image that refers to any page of it.
    Whole,
    /// Page by page, with the last image that refers to the page.
    Pages,
}

enum Store {
    Own(Memfd),
    /// Only the process that made it writes there.
    Packed {
        pack: Arc<Pack>,
        start: usize,
    },
    /// A part of a borrowed file.
    Borrowed(Arc<dyn FileOwner>),
}

/// The method of filling a backing.
pub(super) struct FillState {
    pub(super) filler: Arc<dyn Filler>,
    pub(super) arrived: Arc<ArrivedPages>,
    /// Whether slots may map the file before all is there.
    pub(super) live: bool,
}

impl FillState {
    /// Why a requested page does not come.
    fn refusal(&self) -> ImageError {
        let unknown = || "the filler left pages out".to_owned();
        ImageError::Filler(self.filler.failure().unwrap_or_else(unknown))
    }
}

/// Immutable pages in a file, and a read-only view of them.
pub(crate) struct Backing {
    store: Store,
    view: Reservation,
    pages: usize,
    /// Pages that hold content, sorted; between them the file has holes, which read as zero.
    stored: Vec<PageRange>,
    made: Epoch,
    /// The images that refer to each page, if pages are released one by one.
    references: Option<References>,
    /// Fills in content that is missing so far.
    filling: Option<FillState>,
    /// Whether all content is in place: then the filler need not be called.
    complete: AtomicBool,
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.store {
            Store::Own(_) => "own",
            Store::Packed { .. } => "packed",
            Store::Borrowed(_) => "borrowed",
        };
        f.debug_struct("Backing").field("pages", &self.pages).field("store", &kind).finish()
    }
}

impl Backing {
    /// Creates a backing with content in the pages `stored`; `write` fills it through the file, at
    /// the given first page.
    pub(super) fn create<E: From<SysError>>(
        stored: Vec<PageRange>,
        release: Release,
        write: impl FnOnce(&Memfd, usize) -> Result<(), E>,
    ) -> Result<Arc<Self>, E> {
        let pages = stored.last().map_or(0, |run| run.end());
        let view = Reservation::new(pages)?;
        let store = match pages > MIN_FILE_PAGES && claim_own() {
            true => match Self::own(pages, release, write) {
                Ok(file) => Store::Own(file),
                Err(error) => {
                    OWNED.fetch_sub(1, Ordering::Relaxed);
                    return Err(error);
                }
            },
            false => Self::packed(pages, write)?,
        };
        let mut this = Self::viewed(store, view, pages, stored)?;
        this.references = (release == Release::Pages).then(References::default);
        Ok(Arc::new(this))
    }

    /// A backing without content, for a filler.
    pub(super) fn unfilled(pages: usize) -> Result<Self, SysError> {
        let view = Reservation::new(pages)?;
        if !claim_own() {
            // On boundaries of huge pages, so that none ever holds pages of two images: a missing
            // page of one image must not arrive with a page of another.
            let (pack, start) =
                FILLED_PACKS.get().room(pages.next_multiple_of(HUGE_PAGES), HUGE_PAGES)?;
            let store = Store::Packed { pack, start };
            return Self::viewed(store, view, pages, Vec::new());
        }
        let file = Memfd::new(c"afresh-image").and_then(|file| {
            file.set_len(PageRange::new(0, pages).byte_len())?;
            Ok(file)
        });
        match file {
            Ok(file) => Self::viewed(Store::Own(file), view, pages, Vec::new()),
            Err(error) => {
                OWNED.fetch_sub(1, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    /// A backing over a borrowed file. Pages outside every image may hold anything, so none counts
    /// as a hole.
    pub(super) fn from_lender(lender: Arc<dyn FileOwner>) -> Result<Self, SysError> {
        let pages = lender.part().len;
        let view = Reservation::new(pages)?;
        Self::viewed(Store::Borrowed(lender), view, pages, vec![PageRange::new(0, pages)])
    }

    /// A backing in a sealed file of `pages` pages, with content in the pages `stored`. `None`
    /// where all places for separate files are taken.
    #[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
    pub(super) fn from_sealed(
        file: SealedMemfd,
        pages: usize,
        stored: Vec<PageRange>,
    ) -> Result<Option<Arc<Self>>, SysError> {
        // A page past the end of the file would be a SIGBUS at its first use.
        if file.bytes() != PageRange::new(0, pages).byte_len() {
            return Err(SysError::invalid(Call::Seal));
        }
        let view = Reservation::new(pages)?;
        if !claim_own() {
            return Ok(None);
        }
        let backing = Self::viewed(Store::Own(file.into_file()), view, pages, stored)?;
        Ok(Some(Arc::new(backing)))
    }

    /// Whether a place for a separate file is free.
    #[cfg(all(target_os = "linux", not(any(miri, afresh_portable))))]
    pub(super) fn has_room_for_file() -> bool {
        OWNED.load(Ordering::Relaxed) < OWN_FILES
    }

    /// The backing, once each page has a known filler.
    pub(super) fn filled_by(mut self, stored: Vec<PageRange>, filling: FillState) -> Self {
        self.stored = stored;
        self.filling = Some(filling);
        self.complete = AtomicBool::new(false);
        self
    }

    /// Gives pages back one by one, with the last image that refers to each.
    pub(super) fn release_pages(mut self) -> Self {
        self.references = Some(References::default());
        self
    }

    fn viewed(
        store: Store,
        view: Reservation,
        pages: usize,
        stored: Vec<PageRange>,
    ) -> Result<Self, SysError> {
        // From here on dropping `this` gives file and space back.
        let this = Self {
            store,
            view,
            pages,
            stored,
            made: Epoch::now(),
            references: None,
            filling: None,
            complete: AtomicBool::new(true),
        };
        let (file, start) = this.file();
        this.view.map_shared(PageRange::new(0, pages), Protection::Read, file, start)?;
        Ok(this)
    }

    /// Keeps the kernel from reading the view for a core dump, which would put zeros into the file.
    pub(super) fn leave_out_of_dumps(&self) -> Result<(), SysError> {
        self.view.advise(PageRange::new(0, self.pages), Advice::DontDump)
    }

    /// Whether all content is in place.
    pub(crate) fn is_complete(&self) -> bool {
        if self.complete.load(Ordering::Acquire) {
            return true;
        }
        let complete = self.filling.as_ref().is_none_or(|filling| filling.arrived.all());
        if complete {
            self.complete.store(true, Ordering::Release);
        }
        complete
    }

    /// Whether slots must wait until all content is in place.
    pub(super) fn fills_first(&self) -> bool {
        self.filling.as_ref().is_some_and(|filling| !filling.live) && !self.is_complete()
    }

    /// Waits for pages of the backing.
    #[inline]
    pub(super) fn resolve(&self, pages: PageRange) -> Result<(), ImageError> {
        if self.complete.load(Ordering::Acquire) { Ok(()) } else { self.fill(pages) }
    }

    #[cold]
    fn fill(&self, pages: PageRange) -> Result<(), ImageError> {
        let Some(filling) = &self.filling else { return Ok(()) };
        let there = |pages| filling.arrived.has_all(pages);
        if there(pages) || filling.filler.fill(pages) && there(pages) {
            Ok(())
        } else {
            Err(filling.refusal())
        }
    }

    /// Waits for everything.
    pub(super) fn finish(&self) -> Result<(), ImageError> {
        match &self.filling {
            Some(filling) if !self.is_complete() => {
                filling.arrived.filled().iter().try_for_each(|run| self.fill(*run))
            }
            _ => Ok(()),
        }
    }

    /// Answers a fault on a page of the backing. Safe in a signal handler.
    pub(super) fn answer(&self, page: usize) -> FaultOutcome {
        match &self.filling {
            Some(filling) if !filling.arrived.has(page) => {
                let came = filling.filler.fill_in_handler(page) && filling.arrived.has(page);
                if came { FaultOutcome::Filled } else { FaultOutcome::Closed }
            }
            _ => FaultOutcome::Present,
        }
    }

    pub(super) fn failure(&self) -> Option<String> {
        if self.is_complete() { None } else { self.filling.as_ref()?.filler.failure() }
    }

    fn own<E: From<SysError>>(
        pages: usize,
        release: Release,
        write: impl FnOnce(&Memfd, usize) -> Result<(), E>,
    ) -> Result<Memfd, E> {
        let file = Memfd::new(c"afresh-image")?;
        file.set_len(PageRange::new(0, pages).byte_len())?;
        write(&file, 0)?;
        if release == Release::Whole {
            file.seal()?;
        }
        Ok(file)
    }

    fn packed<E: From<SysError>>(
        pages: usize,
        write: impl FnOnce(&Memfd, usize) -> Result<(), E>,
    ) -> Result<Store, E> {
        let (pack, start) = PACKS.get().room(pages, 1)?;
        // The range is ours alone and nothing maps it yet, so it is written exactly once.
        if let Err(error) = write(&pack.file, start) {
            pack.give_back(PageRange::new(start, pages));
            return Err(error);
        }
        Ok(Store::Packed { pack, start })
    }

    /// The file and the first page of this backing in it.
    pub(crate) fn file(&self) -> (&Memfd, usize) {
        match &self.store {
            Store::Own(file) => (file, 0),
            Store::Packed { pack, start } => (&pack.file, *start),
            Store::Borrowed(lender) => (lender.file(), lender.part().start),
        }
    }

    /// Whether a mapping may span `range` of the file, because it holds no content and, where the
    /// rest is filled lazily, will read as zero.
    pub(crate) fn spans(&self, range: PageRange) -> bool {
        let at = self.stored.partition_point(|run| run.end() <= range.start);
        let hole = self.stored.get(at).is_none_or(|run| run.start >= range.end());
        hole && match &self.filling {
            None => true,
            Some(filling) => {
                let filled = filling.arrived.filled();
                let at = filled.partition_point(|run| run.end() <= range.start);
                filled.get(at).is_some_and(|run| run.intersect(range) == Some(range))
            }
        }
    }

    /// The counts of references, where pages may be given back. A process that has forked since
    /// gives none back, because its child may read them; neither does the child, which could also
    /// wait for a lock that another thread of its parent held.
    fn references(&self) -> Option<&References> {
        self.references.as_ref().filter(|_| self.made.is_current())
    }

    /// Records an extent of a new image.
    pub(super) fn refer(&self, range: PageRange) {
        if let Some(references) = self.references() {
            references.add(range);
        }
    }

    /// Removes an extent of a dropped image. Returns the pages that no image refers to any more.
    pub(super) fn release(&self, range: PageRange) -> Vec<PageRange> {
        self.references().map_or_else(Vec::new, |references| references.remove(range))
    }

    /// Gives the memory of released pages back, unless all of the backing is about to be.
    pub(super) fn give_back(&self, released: &[PageRange]) {
        if self.references().is_none_or(References::are_none) {
            return;
        }
        let (file, start) = self.file();
        for range in released {
            // Pages of a file are never used twice, so an error costs memory, never content.
            let _ = file.punch_hole(PageRange::new(start + range.start, range.len));
        }
    }

    /// Address of page `page` in the read-only view.
    pub(crate) fn page_ptr(&self, page: usize) -> *const u8 {
        self.view.page_ptr(page)
    }
}

/// Takes one of the places for backings with a separate file.
fn claim_own() -> bool {
    OWNED
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < OWN_FILES).then_some(n + 1))
        .is_ok()
}

impl Drop for Backing {
    fn drop(&mut self) {
        match &self.store {
            Store::Own(_) => {
                OWNED.fetch_sub(1, Ordering::Relaxed);
            }
            // The space is not reused, so an error costs memory until the pack is dropped, never
            // content.
            Store::Packed { pack, start } if self.made.is_current() => {
                pack.give_back(PageRange::new(*start, self.pages));
            }
            // A child may use it. Its memory goes with the pack.
            Store::Packed { pack, .. } => pack.closed.store(true, Ordering::Relaxed),
            Store::Borrowed(_) => {}
        }
    }
}
