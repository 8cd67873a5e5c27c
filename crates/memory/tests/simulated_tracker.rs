//! A slot over a tracker that the test plays: every strategy's bookkeeping, without a kernel's
//! help.
//!
//! The test reports each write to the tracker, which holds the slot to its contract: a page that
//! was not armed again is not reported again. So a page that the slot forgets to copy back, or to
//! arm, is found by the comparison with plain vectors. It needs nothing from the host, so Miri can
//! run it over the pretend kernel, where it finds undefined behaviour that tests on hardware
//! cannot.

use std::sync::{Arc, Mutex};

use afresh_memory::{
    Image, ImageBuilder, PAGE_SIZE, PageRange, Slot, SlotConfig, Strategy, TrackError, Tracker,
    TrackerKind,
};
use afresh_sys::SplitMix64;
use afresh_sys::planted::{self, Bug};

/// Pages of the image; the last region can grow to the capacity.
const PAGES: usize = if cfg!(miri) { 6 } else { 10 };
const CAPACITY: usize = if cfg!(miri) { 9 } else { 16 };
/// Programs, and steps of each.
const PROGRAMS: u64 = if cfg!(miri) { 1 } else { 40 };
const STEPS: usize = if cfg!(miri) { 10 } else { 120 };
/// Resets of a steady stretch: one sample of the write set, or enough of them to evict idle pages.
const STEADY: usize = if cfg!(miri) { 34 } else { 110 };

/// State that the test and its tracker share: the protected pages, and the pages written since.
#[derive(Debug)]
struct Pages {
    armed: [bool; CAPACITY],
    written: [bool; CAPACITY],
}

type SharedPages = Arc<Mutex<Pages>>;

/// Reports a write of `page` to the tracker, as a fault would.
fn touch(shared: &SharedPages, page: usize) {
    let mut pages = shared.lock().unwrap();
    if std::mem::take(&mut pages.armed[page]) {
        pages.written[page] = true;
    }
}

struct Events {
    pages: SharedPages,
    survives: bool,
}

impl Events {
    fn set(&self, ranges: &[PageRange], armed: bool) {
        let mut pages = self.pages.lock().unwrap();
        for page in ranges.iter().flat_map(|r| r.start..r.end()) {
            pages.armed[page] = armed;
        }
    }
}

// SAFETY: reports the pages that the test marked as written, which it watches, and protects none.
unsafe impl Tracker for Events {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Other("reported")
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.set(&[range], true);
        Ok(())
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        let mut pages = self.pages.lock().unwrap();
        for page in 0..CAPACITY {
            if std::mem::take(&mut pages.written[page]) {
                written.push(PageRange::new(page, 1));
            }
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.set(pages, true);
        Ok(())
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.set(pages, false);
        Ok(())
    }

    fn survives_hiding(&self) -> bool {
        self.survives
    }
}

/// An image with holes, different for each seed, and its bytes.
fn image(seed: usize, regions: &[PageRange]) -> (Image, Vec<u8>) {
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    let mut builder = ImageBuilder::new(PAGES);
    for page in regions.iter().flat_map(|r| r.start..r.end()) {
        if !(page * 5 + seed).is_multiple_of(3) {
            let at = page * PAGE_SIZE + seed;
            bytes[at..at + 900].fill((page + 16 * seed + 1) as u8);
            builder.segment(at, &bytes[at..at + 900]).unwrap();
        }
    }
    (builder.build().unwrap(), bytes)
}

/// A slot, its expected content, and the content that it returns to.
struct Play {
    slot: Slot,
    reported: Option<SharedPages>,
    live: Vec<u8>,
    back: Vec<u8>,
    context: String,
}

impl Play {
    fn writable(&self) -> Vec<usize> {
        let regions = self.slot.regions();
        let last = regions.len() - 1;
        let end = |i: usize, r: &PageRange| if i == last { self.slot.end() } else { r.end() };
        regions.iter().enumerate().flat_map(|(i, r)| r.start..end(i, r)).collect()
    }

    /// Writes some bytes of one page, as a guest does.
    fn write(&mut self, page: usize, at: usize, byte: u8) {
        if let Some(reported) = &self.reported {
            touch(reported, page);
        }
        for offset in [0, at, PAGE_SIZE - 1] {
            // SAFETY: the page is accessible, and this is the only user of the slot.
            unsafe { self.slot.base().add(page * PAGE_SIZE + offset).write_volatile(byte) };
            self.live[page * PAGE_SIZE + offset] = byte;
        }
    }

    fn reset(&mut self) {
        self.slot.reset().unwrap();
        self.live.clone_from(&self.back);
    }

    fn compare(&self) {
        let mut page = vec![0; PAGE_SIZE];
        for at in self.writable() {
            self.slot.read(at * PAGE_SIZE, &mut page).unwrap();
            let expected = &self.live[at * PAGE_SIZE..][..PAGE_SIZE];
            assert!(page == expected, "{}: page {at} differs from the model", self.context);
        }
    }

    fn same(&self, image: &Image) {
        let mut page = vec![0; PAGE_SIZE];
        for at in self.writable() {
            image.read(at * PAGE_SIZE, &mut page);
            let expected = &self.live[at * PAGE_SIZE..][..PAGE_SIZE];
            assert!(page == expected, "{}: page {at} of the frozen image differs", self.context);
        }
    }

    fn step(&mut self, random: &mut SplitMix64, regions: &[PageRange]) {
        let pages = self.writable();
        match random.below(13) {
            0..5 => {
                let byte = random.below(255) as u8 + 1;
                self.write(pages[random.below(pages.len())], random.below(PAGE_SIZE), byte);
            }
            5 | 6 => {
                self.reset();
                assert_eq!(self.slot.verify().unwrap(), []);
            }
            7 => {
                let end = (self.slot.end() + 1 + random.below(3)).min(CAPACITY);
                self.slot.grow(end).unwrap();
                self.live.resize(self.live.len().max(end * PAGE_SIZE), 0);
            }
            // Steady calls, until pages that are written no more are evicted; then those are
            // written.
            8 => {
                self.reset();
                let page = pages[random.below(pages.len())];
                let one = if self.writable().contains(&page) { page } else { regions[0].start };
                for n in 0..STEADY {
                    self.write(one, 7, n as u8 | 1);
                    self.reset();
                }
            }
            9 => {
                self.reset();
                let (next, bytes) = image(random.below(6), regions);
                if random.below(2) == 0 {
                    self.slot.switch(&next).unwrap();
                } else {
                    self.slot.set_image(&next, regions).unwrap();
                }
                (self.live, self.back) = (bytes.clone(), bytes);
            }
            // The same content in another place; the old place is free then.
            10 => {
                let before = self.slot.image().clone();
                self.slot.switch(&before.compact().unwrap()).unwrap();
                drop(before);
                self.live.clone_from(&self.back);
            }
            11 => {
                let frozen = self.slot.freeze().unwrap();
                self.same(&frozen);
                if self.slot.end() == regions[regions.len() - 1].end() && random.below(2) == 0 {
                    let kept = self.slot.checkpoint().unwrap();
                    self.same(&kept);
                    self.back.clone_from(&self.live);
                }
            }
            _ => {
                self.reset();
                self.slot.trim().unwrap();
            }
        }
        self.compare();
    }
}

fn play(strategy: Strategy, survives: Option<bool>, regions: &[PageRange], seed: u64) {
    let (first, bytes) = image(1, regions);
    let config = SlotConfig {
        strategy,
        capacity: Some(CAPACITY),
        regions: regions.to_vec(),
        // Small, so that it is reached.
        write_set_limit: 8,
        ..SlotConfig::default()
    };
    let pages = Pages { armed: [false; CAPACITY], written: [false; CAPACITY] };
    let reported = survives.map(|_| Arc::new(Mutex::new(pages)));
    let slot = match (survives, &reported) {
        (Some(survives), Some(pages)) => Slot::with_tracker(&first, config, |_, capacity| {
            assert_eq!(capacity, CAPACITY);
            Ok(Box::new(Events { pages: pages.clone(), survives }))
        }),
        _ => Slot::new(&first, config),
    };
    let mut random = SplitMix64::new(seed);
    let mut play = Play {
        slot: slot.unwrap(),
        reported,
        live: bytes.clone(),
        back: bytes,
        context: String::new(),
    };
    for step in 0..STEPS {
        play.context = format!("{strategy}, {survives:?}, seed {seed}, step {step}");
        play.step(&mut random, regions);
    }
    play.reset();
    play.compare();
    assert_eq!(play.slot.verify().unwrap(), []);
}

fn all(strategy: Strategy, survives: Option<bool>) {
    for seed in 0..PROGRAMS {
        play(strategy, survives, &[PageRange::new(0, PAGES)], seed);
        if !cfg!(miri) {
            play(strategy, survives, &[PageRange::new(1, 3), PageRange::new(6, 4)], seed);
        }
    }
}

#[test]
fn ranges_reported_to_the_tracker_are_restored() {
    all(Strategy::WriteSet(None), Some(true));
}

#[test]
fn a_tracker_that_forgets_hidden_pages_is_asked_anew() {
    all(Strategy::WriteSet(None), Some(false));
}

#[test]
fn protecting_again_at_every_reset_restores_too() {
    all(Strategy::Reprotect, Some(true));
}

#[test]
fn without_a_tracker_every_page_is_restored() {
    for strategy in
        [Strategy::FullCopy, Strategy::Discard, Strategy::WriteSet(Some(TrackerKind::Everything))]
    {
        all(strategy, None);
    }
}

#[test]
#[cfg_attr(miri, ignore = "runs this program again")]
fn planted_bugs_are_caught() {
    planted::must_be_caught(
        &[Bug::CopyBack, Bug::Learn, Bug::Sample, Bug::Rearm, Bug::GrownContent, Bug::GrownSize],
        &["ranges_reported_to_the_tracker_are_restored"],
    );
    planted::must_be_caught(
        &[Bug::Switch, Bug::Shown, Bug::Freeze],
        &["ranges_reported_to_the_tracker_are_restored"],
    );
    planted::must_be_caught(&[Bug::Scan], &["protecting_again_at_every_reset_restores_too"]);
    planted::must_be_caught(
        &[Bug::Discard, Bug::FullCopy],
        &["without_a_tracker_every_page_is_restored"],
    );
}
