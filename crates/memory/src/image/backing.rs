//! What holds the bytes of images: sealed memfds, and packs that many images share.
//!
//! The first images of a process get a file each, sealed for ever. A process with thousands of images
//! would run out of descriptors that way, so once [`OWN_FILES`] are alive the next ones share a pack: a
//! file that only this module writes, each range of it exactly once, before anybody maps it.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use afresh_sys::{Memfd, PageRange, Protection, Reservation, SysError};

/// Backings alive that own their file. With packs of [`PACK_IMAGES`] each, ten thousand images need
/// about 140 descriptors, well under the usual limit of 1024.
const OWN_FILES: usize = 100;
/// Backings that share one pack.
const PACK_IMAGES: usize = 256;

static OWNED: AtomicUsize = AtomicUsize::new(0);
static PACK: Mutex<Weak<Pack>> = Mutex::new(Weak::new());

/// A file shared by many backings.
struct Pack {
    file: Memfd,
    /// Next free page, and backings placed so far.
    next: Mutex<(usize, usize)>,
}

enum Store {
    Own(Memfd),
    Packed { pack: Arc<Pack>, start: usize },
}

/// Immutable pages in a file, and a read-only view of them.
pub(crate) struct Backing {
    store: Store,
    view: Reservation,
    pages: usize,
    /// Pages that hold content, sorted; between them the file has holes, which read as zero.
    stored: Vec<PageRange>,
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.store {
            Store::Own(_) => "own",
            Store::Packed { .. } => "packed",
        };
        f.debug_struct("Backing").field("pages", &self.pages).field("store", &kind).finish()
    }
}

impl Backing {
    /// Creates a backing with content in the pages `stored`; `write` fills it through the file, at the
    /// given first page.
    pub(crate) fn create(
        stored: Vec<PageRange>,
        write: impl FnOnce(&Memfd, usize) -> Result<(), SysError>,
    ) -> Result<Arc<Self>, SysError> {
        let pages = stored.last().map_or(0, |run| run.end());
        let view = Reservation::new(pages)?;
        let store = match claim_own() {
            true => match Self::own(pages, write) {
                Ok(file) => Store::Own(file),
                Err(error) => {
                    OWNED.fetch_sub(1, Ordering::Relaxed);
                    return Err(error);
                }
            },
            false => Self::packed(pages, write)?,
        };
        // From here on dropping `this` gives file and space back.
        let this = Self { store, view, pages, stored };
        let (file, start) = this.file();
        this.view.map_shared(PageRange::new(0, pages), Protection::Read, file, start)?;
        Ok(Arc::new(this))
    }

    fn own(
        pages: usize,
        write: impl FnOnce(&Memfd, usize) -> Result<(), SysError>,
    ) -> Result<Memfd, SysError> {
        let file = Memfd::new(c"afresh-image")?;
        file.set_len(PageRange::new(0, pages).byte_len())?;
        write(&file, 0)?;
        file.seal()?;
        Ok(file)
    }

    fn packed(
        pages: usize,
        write: impl FnOnce(&Memfd, usize) -> Result<(), SysError>,
    ) -> Result<Store, SysError> {
        let mut current = PACK.lock().unwrap_or_else(PoisonError::into_inner);
        let open = current.upgrade().filter(|pack| {
            pack.next.lock().unwrap_or_else(PoisonError::into_inner).1 < PACK_IMAGES
        });
        let pack = match open {
            Some(pack) => pack,
            None => {
                let file = Memfd::new(c"afresh-pack")?;
                let pack = Arc::new(Pack { file, next: Mutex::new((0, 0)) });
                *current = Arc::downgrade(&pack);
                pack
            }
        };
        let start = {
            let mut next = pack.next.lock().unwrap_or_else(PoisonError::into_inner);
            let start = next.0;
            pack.file.set_len(PageRange::new(0, start + pages).byte_len())?;
            *next = (start + pages, next.1 + 1);
            start
        };
        drop(current);
        // The range is ours alone and nothing maps it yet, so it is written exactly once.
        if let Err(error) = write(&pack.file, start) {
            let _ = pack.file.punch_hole(PageRange::new(start, pages));
            return Err(error);
        }
        Ok(Store::Packed { pack, start })
    }

    /// The file and the first page of this backing in it.
    pub(crate) fn file(&self) -> (&Memfd, usize) {
        match &self.store {
            Store::Own(file) => (file, 0),
            Store::Packed { pack, start } => (&pack.file, *start),
        }
    }

    /// Whether `range` of the file holds no content.
    pub(crate) fn is_hole(&self, range: PageRange) -> bool {
        let at = self.stored.partition_point(|run| run.end() <= range.start);
        self.stored.get(at).is_none_or(|run| run.start >= range.end())
    }

    /// Address of page `page` in the read-only view.
    pub(crate) fn page_ptr(&self, page: usize) -> *const u8 {
        self.view.page_ptr(page)
    }
}

/// Takes one of the places for backings with a file of their own.
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
            // The space is not handed out again, so an error costs memory until the pack goes, never
            // content.
            Store::Packed { pack, start } => {
                let _ = pack.file.punch_hole(PageRange::new(*start, self.pages));
            }
        }
    }
}
