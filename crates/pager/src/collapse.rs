//! Folios of 2 MiB for complete images.
//!
//! `UFFDIO_COPY` inserts single pages, so a lazily filled image consists of those. A second after
//! it is complete, `MADV_COLLAPSE` moves each of its huge pages to a folio. A mapping of the image
//! then has one fault instead of 32 for them, or a cheaper fault for each page where a slot is
//! write-protected ([decision][folios]).
//!
//! Promises: the content of the image does not change, and an access to it waits for one folio at
//! most. One thread of the process moves pages, image by image, for a tenth of the time. So the
//! time between two folios grows with the load of the host. A waiting image has no thread. A
//! dropped image is freed at once, or after the present folio. An image whose pages are in use, or
//! a kernel without such folios, keeps its single pages.
//!
//! May break it: a thread that is suspended while it moves pages, for which accesses wait.
//!
//! [folios]: ../../../docs/decisions/folios.md

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use afresh_memory::Inserter;
use afresh_sys::PerProcess;

/// Time from the completion of an image to its first folio. Programs that end before gain nothing
/// from folios.
const HEAD_START: Duration = Duration::from_secs(1);
/// Pauses, as a multiple of the time that a folio took.
const PAUSE: u32 = 9;
/// Huge pages in a row that the kernel may refuse before the image is left as it is.
const MAX_REFUSALS: usize = 8;

/// The images of the process that wait for folios.
static QUEUE: PerProcess<Queue> = PerProcess::new(Queue::default);

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

    /// Huge pages that can be moved.
    fn huge_pages(&self) -> Vec<usize> {
        self.inserter().map_or_else(Vec::new, |inserter| inserter.whole_huge_pages())
    }

    /// Ends the moves of this image.
    fn finish(&self) {
        drop(self.inserter.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Moves the huge pages of a complete image to folios, unless it is dropped before. Returns at once
/// where another thread will do that. Otherwise this thread does it, and for later images until
/// none waits.
pub(crate) fn run(image: Weak<CollapsingImage>) {
    let queue = QUEUE.get();
    if queue.add(image) {
        queue.work();
    }
}

/// Images that wait for folios, and the thread that moves pages.
#[derive(Default)]
struct Queue(Mutex<QueueState>);

#[derive(Default)]
struct QueueState {
    /// In the order in which they became complete, each with the time of its first folio.
    waiting: VecDeque<(Instant, Weak<CollapsingImage>)>,
    has_worker: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a complete image. Returns whether the caller must [`Queue::work`].
    fn add(&self, image: Weak<CollapsingImage>) -> bool {
        let Some(present) = image.upgrade() else { return false };
        if present.huge_pages().is_empty() {
            present.finish();
            return false;
        }
        let mut state = self.lock();
        state.waiting.retain(|(_, image)| image.strong_count() > 0);
        state.waiting.push_back((Instant::now() + HEAD_START, image));
        !std::mem::replace(&mut state.has_worker, true)
    }

    /// The next image that was not dropped. After `None` the caller is no longer the worker.
    fn next(&self) -> Option<(Instant, Weak<CollapsingImage>)> {
        let mut state = self.lock();
        while let Some((due, image)) = state.waiting.pop_front() {
            if image.strong_count() > 0 {
                return Some((due, image));
            }
        }
        state.has_worker = false;
        None
    }

    /// Moves the pages of one image after the other until none waits.
    fn work(&self) {
        while let Some((due, image)) = self.next() {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            move_pages(&image);
            if let Some(image) = image.upgrade() {
                image.finish();
            }
        }
    }
}

fn move_pages(image: &Weak<CollapsingImage>) {
    let huge_pages = image.upgrade().map_or_else(Vec::new, |image| image.huge_pages());
    let mut refusals = 0;
    for number in huge_pages {
        let Some(image) = image.upgrade() else { return };
        let Some(inserter) = image.inserter() else { return };
        let began = Instant::now();
        // No error says that the kernel makes no folios at all: `EINVAL` also comes where the image
        // was dropped during the call. So each image asks for itself.
        if inserter.collapse(number).is_ok() {
            image.folios.fetch_add(1, Ordering::Relaxed);
            refusals = 0;
        } else {
            refusals += 1;
        }
        if refusals == MAX_REFUSALS {
            return;
        }
        drop((image, inserter));
        std::thread::sleep(began.elapsed() * PAUSE);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use afresh_memory::{Filler, Image};
    use afresh_sys::errno::EINVAL;
    use afresh_sys::{HUGE_PAGES, HUGE_SIZE, PageRange};

    use super::*;
    use crate::RestoreError;

    const TEST_TIMEOUT: Duration = Duration::from_secs(120);
    /// More images than get separate files, so that the last one is in a pack.
    const MANY_IMAGES: usize = 110;

    struct NoFiller;

    impl Filler for NoFiller {
        fn fill_in_handler(&self, _page: usize) -> bool {
            false
        }

        fn fill(&self, _pages: PageRange) -> bool {
            false
        }

        fn failure(&self) -> Option<String> {
            None
        }
    }

    /// An image of one huge page, with `content`.
    fn image(content: &[u8]) -> (Image, Arc<CollapsingImage>) {
        let mut collapsing = None;
        let image = Image::lazy(HUGE_PAGES, &[PageRange::new(0, HUGE_PAGES)], |inserter| {
            inserter.put(0, content).unwrap();
            collapsing = Some(CollapsingImage::new(Arc::new(inserter)));
            Ok::<Arc<dyn Filler>, RestoreError>(Arc::new(NoFiller))
        });
        (image.unwrap(), collapsing.unwrap())
    }

    #[test]
    fn dropped_images_leave_no_thread_behind_a_busy_one() {
        let queue = Arc::new(Queue::default());
        // Its worker is this thread, which does nothing yet.
        let (_busy_image, busy) = image(&[]);
        assert!(queue.add(Arc::downgrade(&busy)));
        let others: Vec<_> = (0..20).map(|_| image(&[])).collect();
        let threads: Vec<_> = others
            .iter()
            .map(|(_, other)| {
                let (queue, other) = (queue.clone(), Arc::downgrade(other));
                std::thread::spawn(move || {
                    if queue.add(other) {
                        queue.work();
                    }
                })
            })
            .collect();
        let end = Instant::now() + TEST_TIMEOUT;
        while !threads.iter().all(|thread| thread.is_finished()) {
            assert!(Instant::now() < end, "threads wait for the busy image");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(queue.lock().waiting.len(), 21);
        drop(others);
        let (_, next) = queue.next().unwrap();
        assert!(next.ptr_eq(&Arc::downgrade(&busy)));
        assert!(queue.next().is_none(), "a dropped image");
        assert!(queue.add(Arc::downgrade(&busy)), "the next image finds no worker");
    }

    #[test]
    fn the_worker_ends_after_the_last_image() {
        let queue = Queue::default();
        let (_image, collapsing) = image(&[]);
        assert!(queue.add(Arc::downgrade(&collapsing)));
        queue.work();
        assert!(collapsing.inserter().is_none());
        let state = queue.lock();
        assert!(state.waiting.is_empty() && !state.has_worker);
    }

    #[test]
    fn an_image_without_pages_does_not_turn_folios_off() {
        let content = vec![1; HUGE_SIZE];
        let (_first_image, first) = image(&content);
        move_pages(&Arc::downgrade(&first));
        if first.folios() == 0 {
            return println!("SKIPPED: this kernel collapses no memory files");
        }
        let _many: Vec<_> = (0..MANY_IMAGES).map(|_| image(&[])).collect();
        let (dropped_image, dropped) = image(&content);
        drop(dropped_image);
        let refused = dropped.inserter().unwrap().collapse(0).unwrap_err();
        assert_eq!(refused.errno, EINVAL);
        move_pages(&Arc::downgrade(&dropped));
        assert_eq!(dropped.folios(), 0);
        // The kernel may refuse a page for a moment.
        let (_last_image, last) = image(&content);
        let end = Instant::now() + TEST_TIMEOUT;
        while last.folios() == 0 {
            assert!(Instant::now() < end, "folios are off");
            move_pages(&Arc::downgrade(&last));
        }
    }
}
