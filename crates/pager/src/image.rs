//! Images of the engine that are filled from a page source while slots use them.
//!
//! Every slot of the image shares what has arrived: the second guest finds the pages of the first.
//! A recorded working set is read first. Another thread reads it from a near source, while the
//! guest's code is loaded, and a guest that touches one of its pages waits for that page. The set
//! is read before the image is returned where the source is not near, where a window has several
//! pages, where nothing is streamed, and where the host lacks userfaultfd. Other pages are streamed
//! while guests run.
//!
//! Promises: a page is used only whole, and after its digest was checked: the source delivers to
//! memory that no guest sees. When the source fails, the image has failed permanently, and slots
//! refuse use with the cause. So does an image with a damaged working set. When it is complete,
//! nothing of the source is held.
//!
//! May break it: dropping the last slot and image early ends the filling, as it should.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use afresh_memory::{Filler, Image, Inserter};
use afresh_sys::{HUGE_PAGES, PageRange, fork};

use crate::collapse::CollapsingImage;
use crate::control::Control;
use crate::lazy::{self, Fill, LazyMemory};
use crate::restore::{Engine, Work};
use crate::staging::Staging;
use crate::working_set::put_set;
use crate::{Options, PageSource, RestoreError, SourceError, coordinator};

/// Pages fetched for a fault: what the digests of a snapshot cover at once.
const WINDOW: usize = 16;
/// Windows of an image, unless each of them would have more than 512 pages. A window takes 4 bytes.
const MAX_WINDOWS: usize = 1 << 20;
/// Threads that stream from a source that is far away: what each does is mostly waiting.
const DISTANT_STREAMS: usize = 6;
/// Delay of the streams after a working set was read from a near source. The first answer needs few
/// other pages. A stream makes it slower even on another processor: it uses the same locks of the
/// address space, and each page that the guest copies then takes an interrupt there.
const HEAD_START: Duration = Duration::from_millis(10);

/// An image that is being filled, and the handle to wait for it. The image lives on without the
/// handle.
#[derive(Clone, Debug)]
pub struct LazyImage {
    image: Image,
    filling: Option<Arc<ImageFiller>>,
}

impl LazyImage {
    /// Begins an image with the content of `source`. Of the options it heeds the window, the
    /// background (on, unless it is turned off), the streams and the time limit.
    ///
    /// # Errors
    /// [`RestoreError`] when the image cannot be made or the working set cannot be read.
    pub fn start(source: Arc<dyn PageSource>, options: &Options) -> Result<Self, RestoreError> {
        let set = source.working_set();
        let windows = choose_windows(source.pages(), options.window, !set.is_empty());
        let streams = match options.background {
            false => 0,
            true if source.is_distant() => options.streams.max(DISTANT_STREAMS),
            true => options.streams.max(1),
        };
        let delay = match !set.is_empty() && source.is_near() {
            true => options.delay.max(HEAD_START),
            false => options.delay,
        };
        Self::fill(source, windows, (streams, delay), options.timeout, &set)
    }

    /// Begins an image that fetches exactly the pages that are touched, to learn the working set:
    /// [`LazyImage::touched`] lists them.
    ///
    /// # Errors
    /// As [`LazyImage::start`].
    pub fn record(source: Arc<dyn PageSource>) -> Result<Self, RestoreError> {
        Self::fill(source, (1, 1), (0, Duration::ZERO), Options::default().timeout, &[])
    }

    fn fill(
        source: Arc<dyn PageSource>,
        (window, around): (usize, usize),
        streams: (usize, Duration),
        timeout: Duration,
        set: &[PageRange],
    ) -> Result<Self, RestoreError> {
        let mut filling = None;
        let image = Image::lazy(source.pages(), &source.occupied(), |inserter: Inserter| {
            let control = Arc::new(Control::new(None, timeout));
            let inserter = Arc::new(inserter);
            // An image that is filled on demand stays as it is.
            let collapsing = (streams.0 > 0).then(|| CollapsingImage::new(inserter.clone()));
            // The reader shows each page by itself, while slots are made.
            let beside = source.is_near() && streams.0 > 0 && window == 1 && inserter.is_live();
            if !beside && !set.is_empty() {
                source.read_working_set(&mut |run, bytes| put_set(&inserter, run, bytes))?;
            }
            let left = if beside { set } else { &[] };
            let lazy = lazy_image(&control, inserter, source.clone(), (window, around), left)?;
            let lazy = Arc::new(lazy);
            let engine = Arc::new(Mutex::new(Some(Engine {
                work: Work::Lazy(lazy.clone()),
                registration: None,
                coordinated: true,
                // Slots see to that.
                withheld: None,
            })));
            let collapse = collapsing.as_ref().map(Arc::downgrade);
            coordinator::spawn(engine.clone(), Work::Lazy(lazy), None, streams, collapse)?;
            let generation = fork::generation();
            let made = Arc::new(ImageFiller { control, engine, collapsing, generation });
            filling = Some(made.clone());
            Ok::<Arc<dyn Filler>, RestoreError>(made)
        })?;
        Ok(Self { image, filling })
    }

    /// The image. Slots may use it at once.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The pages that are in place: of an image that is recorded, those that were touched. Empty
    /// once everything is.
    #[must_use]
    pub fn touched(&self) -> Vec<PageRange> {
        let Some(lazy) = self.filling.as_ref().and_then(|filling| filling.lazy()) else {
            return Vec::new();
        };
        let stored: Vec<PageRange> = self.image.stored().collect();
        let mut touched: Vec<PageRange> = Vec::new();
        for range in lazy.present() {
            touched.extend(stored.iter().filter_map(|run| run.intersect(range)));
        }
        touched
    }

    /// Number of answered faults.
    #[must_use]
    pub fn faults(&self) -> usize {
        self.filling.as_ref().map_or(0, |f| f.control.faults.load(Ordering::Relaxed))
    }

    /// The number of folios of 2 MiB that were made of pages of the image since it is complete.
    #[must_use]
    pub fn huge_folios(&self) -> usize {
        let collapsing = self.filling.as_ref().and_then(|filling| filling.collapsing.as_ref());
        collapsing.map_or(0, |image| image.folios())
    }

    /// Waits until everything is in place and the source is let go.
    ///
    /// # Errors
    /// [`RestoreError::Failed`] with the cause, [`RestoreError::Timeout`] while it continues.
    pub fn wait(&self, timeout: Duration) -> Result<(), RestoreError> {
        let Some(filling) = &self.filling else { return Ok(()) };
        if let Some(lazy) = filling.lazy() {
            lazy.rush.store(true, Ordering::Release);
        }
        filling.control.wait(timeout)
    }
}

/// Pages of a window of an image of `pages` pages, and windows that are fetched around one. With a
/// working set in place page by page, faults are few, and fetch around themselves. The windows of a
/// larger image have more pages, because each window takes memory.
fn choose_windows(pages: usize, wanted: Option<usize>, with_set: bool) -> (usize, usize) {
    let (window, around) = match (wanted, with_set) {
        (Some(window), _) => (window.clamp(1, HUGE_PAGES), 1),
        (None, true) => (1, WINDOW),
        (None, false) => (WINDOW, 1),
    };
    let least = pages.div_ceil(MAX_WINDOWS).next_power_of_two();
    match window >= least {
        true => (window, around),
        false => (least.min(HUGE_PAGES), (WINDOW / least).max(1)),
    }
}

/// Pages that are staged at a time, at most: few enough to stay in the processor's cache.
const STAGED: usize = 64;

/// Windows over the inserter of an image, missing where something is to come that is not there yet.
/// Those of `set`, of one page each, are left to the coordinator.
fn lazy_image(
    control: &Arc<Control>,
    inserter: Arc<Inserter>,
    source: Arc<dyn PageSource>,
    (window, around): (usize, usize),
    set: &[PageRange],
) -> Result<LazyMemory, RestoreError> {
    let range = PageRange::new(0, inserter.pages());
    let windows = range.len.div_ceil(window);
    let mut awaited = vec![false; windows];
    for page in inserter.filled().iter().flat_map(|run| run.start..run.end()) {
        awaited[page / window] |= !inserter.has(page);
    }
    // Pages that were filled before their first use, or need no filling, are present; a guest may
    // have reserved far more than it has.
    let set = set.iter().filter_map(|run| run.intersect(range));
    let mut set: Vec<usize> =
        set.flat_map(|run| run.start..run.end()).filter(|page| awaited[*page]).collect();
    // Each is published once, whatever the source says.
    set.sort_unstable();
    set.dedup();
    let mut claimed = set.iter().copied().peekable();
    let state = |(window, awaited): (usize, &bool)| {
        let claimed = claimed.next_if_eq(&window).is_some();
        AtomicU32::new(lazy::first_state(*awaited, claimed))
    };
    let states = awaited.iter().enumerate().map(state).collect();
    let remaining = awaited.iter().filter(|awaited| **awaited).count();
    Ok(LazyMemory {
        inline: source.signal_safe(),
        control: control.clone(),
        source,
        uffd: None,
        target: None,
        range,
        window,
        around,
        fill: Fill::Insert(inserter),
        small: Some(Staging::new(window.max(STAGED)).map_err(SourceError::from)?),
        huge: None,
        states,
        remaining: AtomicUsize::new(remaining),
        next_hugepage: AtomicUsize::new(usize::MAX / 2),
        wanted: (0..windows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        bell: AtomicU32::new(0),
        busy: AtomicU64::new(0),
        rush: AtomicBool::new(false),
        set: set.into_boxed_slice(),
    })
}

/// The filler of an image.
#[derive(Debug)]
struct ImageFiller {
    control: Arc<Control>,
    /// Empty once everything is in place.
    engine: Arc<Mutex<Option<Engine>>>,
    /// Dropped with the image: nothing else keeps its memory.
    collapsing: Option<Arc<CollapsingImage>>,
    /// Of the process that fills.
    generation: u32,
}

impl ImageFiller {
    fn lazy(&self) -> Option<Arc<LazyMemory>> {
        // Never held where a guest's memory is touched, so a fault handler may take it.
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        match engine.as_ref()?.work.clone() {
            Work::Lazy(lazy) => Some(lazy),
            Work::Detach(_) => None,
        }
    }

    /// What `ask` says, or whether all went well once everything is over.
    fn with_lazy(&self, body: impl FnOnce(&LazyMemory) -> bool) -> bool {
        // A child has neither the threads nor a way to put pages in place, and waiting would be in
        // vain.
        if self.generation != fork::generation() {
            return false;
        }
        match self.lazy() {
            Some(lazy) => body(&lazy),
            None => !self.control.has_failed(),
        }
    }
}

impl Filler for ImageFiller {
    fn fill_in_handler(&self, page: usize) -> bool {
        self.with_lazy(|lazy| lazy.answer_page(page))
    }

    fn fill(&self, pages: PageRange) -> bool {
        // A thread outside of a handler reads near sources itself, because asking another thread
        // takes longer.
        self.with_lazy(|lazy| lazy.resolve(pages, lazy.inline || lazy.source.is_near()))
    }

    fn failure(&self) -> Option<String> {
        if self.generation != fork::generation() {
            return Some("it is filled by the process that this one was forked from".to_owned());
        }
        self.control.check().err().map(|error| error.to_string())
    }
}

impl Drop for ImageFiller {
    fn drop(&mut self) {
        if self.generation == fork::generation() && !self.control.is_done() {
            self.control.abandon();
            coordinator::end(&self.engine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_few_windows_however_large_it_is() {
        const GIB: usize = (1 << 30) / afresh_sys::PAGE_SIZE;
        assert_eq!(choose_windows(4 * GIB, None, true), (1, WINDOW));
        assert_eq!(choose_windows(4 * GIB, None, false), (WINDOW, 1));
        assert_eq!(choose_windows(64 * GIB, None, true), (16, 1));
        assert_eq!(choose_windows(16 * GIB, None, true), (4, 4));
        for gib in [1, 5, 64, 1000, 2048] {
            for wanted in [None, Some(1), Some(64), Some(1000)] {
                let (window, around) = choose_windows(gib * GIB, wanted, true);
                let windows = (gib * GIB).div_ceil(window);
                assert!(windows <= MAX_WINDOWS, "{gib} GiB, {wanted:?}: {windows} windows");
                assert!(window <= HUGE_PAGES && around <= WINDOW);
            }
        }
    }
}
