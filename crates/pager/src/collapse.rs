//! Folios of 2 MiB for complete images.
//!
//! `UFFDIO_COPY` inserts single pages, so a lazily filled image consists of those. A second after
//! it is complete, `MADV_COLLAPSE` moves each of its huge pages to a folio. A mapping of the image
//! then has one fault instead of 32 for them, or a cheaper fault for each page where a slot is
//! write-protected ([decision][folios]).
//!
//! Promises: the content of the image does not change, and an access to it waits for one folio at
//! most. One thread of the process moves pages at a time, for a tenth of the time. So the time
//! between two folios grows with the load of the host. A dropped image is freed at once, or after
//! the present folio. An image whose pages are in use, or a kernel without such folios, keeps its
//! single pages.
//!
//! May break it: a thread that is suspended while it moves pages, for which accesses wait.
//!
//! [folios]: ../../../docs/decisions/folios.md

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use afresh_memory::Inserter;
use afresh_sys::PerProcess;
use afresh_sys::errno::EINVAL;

/// Time from the completion of an image to its first folio. Programs that end before gain nothing
/// from folios.
const HEAD_START: Duration = Duration::from_secs(1);
/// Pauses, as a multiple of the time that a folio took.
const PAUSE: u32 = 9;
/// Huge pages in a row that the kernel may refuse before the image is left as it is.
const MAX_REFUSALS: usize = 8;

/// Held by the thread that moves pages, also while it pauses.
static TURN: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);
/// Whether the kernel makes no folios of 2 MiB for memory files.
static IS_UNSUPPORTED: AtomicBool = AtomicBool::new(false);

/// An image that gets folios.
#[derive(Debug)]
pub(crate) struct CollapsingImage {
    /// `None` once no page will be moved.
    inserter: Mutex<Option<Arc<Inserter>>>,
    folios: AtomicUsize,
}

impl CollapsingImage {
    pub(crate) fn new(inserter: Arc<Inserter>) -> Arc<Self> {
        Arc::new(Self { inserter: Mutex::new(Some(inserter)), folios: AtomicUsize::new(0) })
    }

    /// The number of folios so far.
    pub(crate) fn folios(&self) -> usize {
        self.folios.load(Ordering::Relaxed)
    }

    fn inserter(&self) -> Option<Arc<Inserter>> {
        self.inserter.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Moves the huge pages of a complete image to folios, unless it is dropped before.
pub(crate) fn run(image: &Weak<CollapsingImage>) {
    let inserter = || image.upgrade()?.inserter();
    let huge_pages = inserter().map_or_else(Vec::new, |inserter| inserter.whole_huge_pages());
    if !huge_pages.is_empty() && !IS_UNSUPPORTED.load(Ordering::Relaxed) {
        std::thread::sleep(HEAD_START);
        move_pages(image, &huge_pages);
    }
    if let Some(image) = image.upgrade() {
        drop(image.inserter.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

fn move_pages(image: &Weak<CollapsingImage>, huge_pages: &[usize]) {
    let mut refusals = 0;
    for number in huge_pages {
        let _turn = TURN.get().lock().unwrap_or_else(PoisonError::into_inner);
        let Some(image) = image.upgrade() else { return };
        let Some(inserter) = image.inserter() else { return };
        let began = Instant::now();
        match inserter.collapse(*number) {
            Ok(()) => {
                image.folios.fetch_add(1, Ordering::Relaxed);
                refusals = 0;
            }
            Err(error) if error.errno == EINVAL => {
                IS_UNSUPPORTED.store(true, Ordering::Relaxed);
                return;
            }
            Err(_) => refusals += 1,
        }
        if refusals == MAX_REFUSALS {
            return;
        }
        drop((image, inserter));
        std::thread::sleep(began.elapsed() * PAUSE);
    }
}
