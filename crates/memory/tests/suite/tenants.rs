//! Slots whose missing pages are handled by threads, as for virtual machines: a slow source delays
//! only its own guests.
#![cfg(not(miri))]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::common::lazy_image;
use afresh_memory::{
    Feature, Features, Filler, Image, ImageError, Inserter, PAGE_SIZE, PageRange, Slot, SlotConfig,
    TrackError, Tracker, TrackerKind,
};

const PAGES: usize = 64;
/// Far more than the work takes on any machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Delivers nothing until the gate opens.
struct GatedFiller {
    inserter: Mutex<Inserter>,
    open: Arc<AtomicBool>,
    /// Threads that wait at the gate.
    asked: Arc<AtomicUsize>,
}

impl Filler for GatedFiller {
    fn fill_in_handler(&self, page: usize) -> bool {
        self.asked.fetch_add(1, Ordering::AcqRel);
        while !self.open.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let inserter = self.inserter.lock().unwrap();
        inserter.has(page) || inserter.put(page, &[7; PAGE_SIZE]).is_ok()
    }

    fn fill(&self, pages: PageRange) -> bool {
        (pages.start..pages.end()).all(|page| self.fill_in_handler(page))
    }

    fn failure(&self) -> Option<String> {
        None
    }
}

struct TenantSource;

// SAFETY: reports every watched page as written, and protects none.
unsafe impl Tracker for TenantSource {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Other("own")
    }

    fn watch(&mut self, _: PageRange) -> Result<(), TrackError> {
        Ok(())
    }

    fn drain(&mut self, _: &mut Vec<PageRange>) -> Result<(), TrackError> {
        Ok(())
    }

    fn arm(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }

    fn open(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }
}

fn slot(image: &Image) -> Slot {
    Slot::with_tracker(image, SlotConfig::default(), |_, _| Ok(Box::new(TenantSource))).unwrap()
}

/// A byte of a page, as a guest would read it.
fn byte_at(base: usize, page: usize) -> u8 {
    // SAFETY: callers pass pages inside a live slot.
    unsafe { ((base + page * PAGE_SIZE + 3) as *const u8).read_volatile() }
}

#[test]
fn slow_tenants_do_not_delay_others() {
    if !Features::host().has(Feature::UffdKernel) {
        println!("SKIPPED: no userfaultfd for faults of the kernel here");
        return;
    }
    let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    // Some images with sources that hang, each with more guests that wait than it gets threads.
    let slow: Vec<Slot> = (0..4)
        .map(|_| {
            let all = [PageRange::new(0, PAGES)];
            let image = Image::lazy::<ImageError>(PAGES, &all, |inserter| {
                let (open, asked) = (open.clone(), asked.clone());
                Ok(Arc::new(GatedFiller { inserter: Mutex::new(inserter), open, asked }))
            });
            slot(&image.unwrap())
        })
        .collect();
    let content: Vec<u8> = (0..PAGES * PAGE_SIZE).map(|at| (at / PAGE_SIZE) as u8 + 1).collect();
    let (quick, _) = lazy_image(&content, &[PageRange::new(0, PAGES)], Duration::ZERO);
    let quick = slot(&quick);
    let (send, seen) = mpsc::channel();
    std::thread::scope(|scope| {
        for slot in &slow {
            for page in 0..6 {
                let base = slot.base() as usize;
                scope.spawn(move || assert_eq!(byte_at(base, page), 7));
            }
        }
        while asked.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        // By then as many threads as answer for the slow ones are stuck.
        std::thread::sleep(Duration::from_millis(200));
        let base = quick.base() as usize;
        scope.spawn(move || {
            (0..PAGES).for_each(|page| assert_eq!(usize::from(byte_at(base, page)), page + 1));
            send.send(()).unwrap();
        });
        let answered = seen.recv_timeout(TEST_TIMEOUT);
        // Before any assertion, or the scope would wait without end.
        open.store(true, Ordering::Release);
        assert!(answered.is_ok(), "a guest of a quick source waited for the slow ones");
    });
}
