//! Slots: a reserved range of address space that holds one image copy-on-write.
//!
//! ```text
//!  reservation (PROT_NONE where nothing else is said)
//!  ┌──────────────┬────────────────────────────────────────────┬─────────────┐
//!  │ guard before │ region 0 │ gap │ region 1 │ room to grow … │ guard after │
//!  └──────────────┴────────────────────────────────────────────┴─────────────┘
//!                 ^ base, page 0                 capacity ^
//! ```
//!
//! Pages are counted from `base`. The image's content is mapped privately where it is stored, and
//! anonymous zero memory where it is not. The last region can grow up to the capacity; a reset
//! shrinks it again.
//!
//! Promises: after a reset that returned `Ok`, every byte equals the image and the accessible size
//! is the initial one. A slot in an unknown state is quarantined and refuses every operation.
//!
//! May break it: writing the memory while a reset runs. The code that exposes [`Slot::base`] is
//! responsible for that.

mod access;
pub(crate) mod adapt;
mod capture;
mod live_freeze;
mod map;
mod prezeroed;
mod reset;
mod serve;
mod space;
mod state;
mod switch;

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::Arc;

use afresh_sys::planted::{self, Bug};
use afresh_sys::{
    Features, HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, PageRange, Protection, Reservation, ZeroPageSource,
    fork, page_align_up,
};

use crate::image::Missing;
use crate::strategy::{Choice, HostAccess, Strategy};
use crate::write_set::WriteSet;
use crate::{Image, ImageError, PageLoss, SlotError, Tracker, TrackerKind, tracker};

use adapt::Adaptation;
use live_freeze::Capture;
pub use live_freeze::FreezePreparation;
pub use reset::{Mismatch, ResetReport};
use space::Space;
use state::State;

/// Why a slot is of no use in a child of the process that made it.
const FORKED: &str = "made before a fork: a child's writes to it go unnoticed; make slots after";

/// Configuration of a slot. The default fits an image exactly, with one guard page on each side.
#[derive(Clone, Debug)]
pub struct SlotConfig {
    /// The strategy of resets.
    pub strategy: Strategy,
    /// Whether system calls write the memory.
    pub host_access: HostAccess,
    /// Inaccessible bytes before page 0, rounded up to pages.
    pub guard_before: usize,
    /// Inaccessible bytes after the capacity, rounded up to pages.
    pub guard_after: usize,
    /// Pages up to which the last region can grow; `None` for the image's length.
    pub capacity: Option<usize>,
    /// Accessible regions, sorted and disjoint; empty for one region with the size of the image.
    pub regions: Vec<PageRange>,
    /// Maximum pages of the write set before it is emptied and learned anew.
    pub write_set_limit: usize,
    /// Interval in resets of full comparisons between slot and image; `None` for never.
    pub verify_every: Option<u32>,
    /// The source of zero memory in units of 2 MiB for growth, in place of the kernel's page
    /// faults, if the tracker can watch such units; `None` for no source.
    pub zero_source: Option<Arc<dyn ZeroPageSource>>,
    /// Whether the code that runs the guest checks [`Slot::loss`] before it uses any result. If it
    /// does, an access to a lost page reads zeros instead of raising SIGSEGV. Guest instructions
    /// for which a runtime has traps ([`afresh_sys::fault::traps`]) still get SIGSEGV.
    pub checks_loss: bool,
    /// Maximum pages of zero memory in the image to take from the zero source when the slot is
    /// made.
    pub zero_pages_at_start: usize,
    /// The host's features; `None` to probe them. Tests pass a masked set to simulate a host with
    /// fewer features.
    pub features: Option<Features>,
}

impl Default for SlotConfig {
    fn default() -> Self {
        Self {
            strategy: Strategy::Auto,
            host_access: HostAccess::Threads,
            guard_before: PAGE_SIZE,
            guard_after: PAGE_SIZE,
            capacity: None,
            regions: Vec::new(),
            write_set_limit: 32_768,
            verify_every: None,
            zero_source: None,
            checks_loss: false,
            zero_pages_at_start: 0,
            features: None,
        }
    }
}

/// Counters of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlotStats {
    /// Successful resets.
    pub resets: u64,
    /// Written pages that were not in the write set.
    pub learned: u64,
    /// Pages evicted from the write set.
    pub evicted: u64,
    /// Fallbacks of the slot to discarding.
    pub fallbacks: u64,
    /// Successful growths.
    pub growths: u64,
    /// Comparisons with the image that found every byte equal.
    pub verified: u64,
}

/// The machinery of the chosen strategy.
enum Method {
    FullCopy,
    Discard,
    Reprotect(Box<dyn Tracker>),
    WriteSet(Box<dyn Tracker>),
}

/// A range of address space that holds one image and is reset to it.
pub struct Slot {
    /// A capture that is prepared, or is copied while the guest runs: see `live_freeze`.
    /// Dropped before `method`, whose barrier it uses.
    capture: Option<Capture>,
    /// Dropped before `space`: a tracker may watch the range.
    method: Method,
    space: Space,
    state: State,
    /// The image that a reset returns to.
    image: Image,
    /// The image in the mappings below private pages, if that is another than `image`: see
    /// `switch`. Held so that its content stays: the file of an image without references is
    /// released.
    shown: Option<Image>,
    /// Every page that may differ from the image without the tracker noticing again, and more:
    /// empty unless the method is the write set's.
    write_set: WriteSet,
    /// First pages of the huge pages that came from the zero source since the last reset: see
    /// `prezeroed`.
    prezeroed: Vec<usize>,
    /// Blocks whose benefit is known.
    settled: HashSet<usize>,
    /// Reused by every reset.
    written: Vec<PageRange>,
    adapt: Adaptation,
    choice: Choice,
    config: SlotConfig,
    stats: SlotStats,
    /// Whether a page was touched that will never be in place.
    loss: Arc<PageLoss>,
    /// The process that made the slot; a forked child has no protection on it.
    generation: u32,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot")
            .field("base", &self.base())
            .field("regions", &self.space.regions)
            .field("capacity", &self.space.capacity)
            .field("strategy", &self.choice.strategy)
            .field("write_set", &self.write_set.len())
            .field("stats", &self.stats)
            .field("quarantined", &self.state.reason())
            .finish_non_exhaustive()
    }
}

impl Slot {
    /// Makes a slot that holds `image`.
    ///
    /// # Errors
    /// [`SlotError`] when the image does not fit, the strategy is not available, or the kernel
    /// refuses.
    pub fn new(image: &Image, config: SlotConfig) -> Result<Self, SlotError> {
        let features = config.features.as_ref().unwrap_or_else(|| Features::host());
        let choice = config.strategy.choose(features, config.host_access)?;
        Self::build(image, config, choice, None)
    }

    /// Makes a slot over a tracker of the caller, such as KVM's dirty ring. The factory gets the
    /// address of page 0 and the capacity in pages. With [`Strategy::Reprotect`] every written page
    /// is protected again at each reset; with any other strategy the tracker serves a write set.
    ///
    /// # Errors
    /// As [`Slot::new`], and any error of the factory.
    pub fn with_tracker(
        image: &Image,
        config: SlotConfig,
        tracker: impl FnOnce(NonNull<u8>, usize) -> Result<Box<dyn Tracker>, crate::TrackError>,
    ) -> Result<Self, SlotError> {
        let strategy = match config.strategy {
            Strategy::Reprotect => Strategy::Reprotect,
            _ => Strategy::WriteSet(None),
        };
        let choice = Choice {
            strategy,
            adaptive: false,
            reason: "the guest adapter brings its own tracker".to_owned(),
        };
        Self::build(image, config, choice, Some(Box::new(tracker)))
    }

    #[allow(clippy::type_complexity)]
    fn build(
        image: &Image,
        config: SlotConfig,
        choice: Choice,
        tracker: Option<
            Box<dyn FnOnce(NonNull<u8>, usize) -> Result<Box<dyn Tracker>, crate::TrackError> + '_>,
        >,
    ) -> Result<Self, SlotError> {
        let mut first = page_align_up(config.guard_before) / PAGE_SIZE;
        let after = page_align_up(config.guard_after) / PAGE_SIZE;
        let needed = config.regions.last().map_or(image.pages(), |r| r.end());
        let capacity = config.capacity.unwrap_or(needed).max(1);
        let too_large = |pages| SlotError::TooLarge { pages, capacity };
        let align = if config.zero_source.is_some() {
            // Growth begins at a huge page of the zero source; without growth the slot itself
            // begins at one.
            let aligned = if capacity > needed { needed } else { 0 };
            first = (first + aligned).next_multiple_of(HUGE_PAGES) - aligned;
            HUGE_SIZE
        } else {
            PAGE_SIZE
        };
        let total = first
            .checked_add(capacity)
            .and_then(|n| n.checked_add(after))
            .ok_or(too_large(needed))?;
        let memory = Reservation::aligned(total, align)?;
        let base = NonNull::new(memory.page_ptr(first)).ok_or(too_large(needed))?;
        let mut slot = Self {
            method: Method::FullCopy,
            capture: None,
            space: Space::new(memory, first, capacity),
            state: State::Ready,
            image: Image::zero(0),
            shown: None,
            write_set: WriteSet::default(),
            prezeroed: Vec::new(),
            settled: HashSet::new(),
            written: Vec::new(),
            adapt: Adaptation::default(),
            choice,
            config,
            stats: SlotStats::default(),
            loss: Arc::default(),
            generation: fork::generation(),
        };
        let regions = slot.config.regions.clone();
        let external = tracker.is_some();
        if !external && !slot.answers_for_missing() {
            slot.read_first(image, "this strategy cannot wait for pages")?;
        }
        slot.place(image, &regions)?;
        if external {
            slot.serve()?;
        }
        slot.method = match (tracker, slot.choice.strategy) {
            (Some(make), Strategy::Reprotect) => Method::Reprotect(make(base, capacity)?),
            (Some(make), _) => Method::WriteSet(make(base, capacity)?),
            (None, strategy) => slot.method_for(strategy)?,
        };
        slot.prezero_image()?;
        slot.watch_regions()?;
        slot.watch_huge_pages(PageRange::new(0, capacity));
        Ok(slot)
    }

    /// Whether the strategy's tracker handles pages that are missing so far. For a caller's own
    /// tracker a thread answers; any other waits for the whole image first.
    fn answers_for_missing(&self) -> bool {
        self.choice.strategy == Strategy::WriteSet(Some(TrackerKind::UffdSigbus))
    }

    fn method_for(&self, strategy: Strategy) -> Result<Method, SlotError> {
        let Space { memory, first, capacity, .. } = &self.space;
        let tracker = |kind| {
            let missing = Missing::of(&self.image, memory, *first, *capacity, &self.loss)
                .filter(|_| self.state.filling().is_some())
                .map(|missing| missing.with_stand_ins(self.config.checks_loss));
            tracker::build(kind, memory, *first, *capacity, missing)
        };
        Ok(match strategy {
            Strategy::FullCopy => Method::FullCopy,
            Strategy::Discard => Method::Discard,
            Strategy::Reprotect => Method::Reprotect(tracker(TrackerKind::UffdScan)?),
            Strategy::WriteSet(kind) => {
                Method::WriteSet(tracker(kind.unwrap_or(TrackerKind::Everything))?)
            }
            Strategy::Auto => Method::Discard,
        })
    }

    /// Puts another image into the slot. The write set of the old one is dropped.
    ///
    /// `regions` as in [`SlotConfig::regions`].
    ///
    /// # Errors
    /// [`SlotError`]. The slot is quarantined, except when the image does not fit.
    pub fn set_image(&mut self, image: &Image, regions: &[PageRange]) -> Result<(), SlotError> {
        self.check()?;
        self.settle_capture()?;
        let regions = self.checked_regions(image, regions)?;
        let external = matches!(
            &self.method,
            Method::WriteSet(t) | Method::Reprotect(t) if matches!(t.kind(), TrackerKind::Other(_))
        );
        if !external && !self.answers_for_missing() {
            self.read_first(image, "this strategy cannot wait for pages")?;
        }
        let result = (|| {
            self.forget_prezeroed();
            match &mut self.method {
                // Earlier writes no longer matter, and may be where the image has no page.
                Method::WriteSet(tracker) | Method::Reprotect(tracker) if external => {
                    tracker.drain(&mut self.written)?;
                    self.written.clear();
                }
                // The old tracker goes first: it watches the range the new one will.
                method => *method = Method::FullCopy,
            }
            self.state = State::Ready;
            self.space.clear(self.space.all(), Protection::None)?;
            self.place(image, &regions)?;
            if external {
                self.serve()?;
            } else {
                self.method = self.method_for(self.choice.strategy)?;
            }
            self.watch_regions()
        })();
        if let Err(error) = &result {
            self.quarantine(error.to_string());
        }
        result
    }

    /// Address of page 0. It stays the same for the slot's life.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.space.base()
    }

    /// The image to which the slot is reset.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Accessible regions at the last reset, not counting growth since.
    #[must_use]
    pub fn regions(&self) -> &[PageRange] {
        &self.space.regions
    }

    /// Present end of the last region, in pages.
    #[must_use]
    pub fn end(&self) -> usize {
        self.space.end
    }

    /// Pages up to which the last region can grow.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.space.capacity
    }

    /// The configuration of the slot.
    #[must_use]
    pub fn config(&self) -> &SlotConfig {
        &self.config
    }

    /// The strategy in use, with the reason.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// The counters of the slot.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        self.stats
    }

    /// The pages of the write set, as runs.
    #[must_use]
    pub fn write_set(&self) -> Vec<PageRange> {
        self.write_set.runs()
    }

    /// Number of pages in the write set.
    #[must_use]
    pub fn write_set_len(&self) -> usize {
        self.write_set.len()
    }

    /// The reason if the slot refuses use.
    #[must_use]
    pub fn quarantined(&self) -> Option<&str> {
        self.state.reason()
    }

    /// Quarantines the slot permanently, because its content is unknown.
    pub fn quarantine(&mut self, reason: impl Into<String>) {
        self.state.quarantine(reason.into());
    }

    /// Whether it was made before a fork, in the parent of this process, and is unusable here: the
    /// protection is missing or belongs to the parent, and its filler is in the parent, with the
    /// parent's memory.
    #[inline]
    fn is_of_parent(&self) -> bool {
        self.generation != fork::generation()
            && (self.state.filling().is_some()
                || matches!(self.method, Method::WriteSet(_) | Method::Reprotect(_)))
    }

    fn check(&self) -> Result<(), SlotError> {
        if self.is_of_parent() {
            return Err(SlotError::Quarantined { reason: FORKED.to_owned() });
        }
        match &self.state {
            State::Ready => Ok(()),
            State::Filling(_) => match self.failure() {
                None => Ok(()),
                Some(cause) => Err(ImageError::Filler(cause).into()),
            },
            State::Quarantined { reason, .. } => {
                Err(SlotError::Quarantined { reason: reason.clone() })
            }
        }
    }

    /// The reason if content of a lazily filled image is lost. The memory is then closed, at the
    /// latest when a missing page is touched. A touch raises SIGSEGV, or is `EFAULT` for KVM.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let cause = match (&self.state.filling()?.served, &self.method) {
            (Some(served), _) => served.failure(),
            (None, Method::WriteSet(tracker)) => tracker.failure(),
            (None, _) => None,
        };
        match (self.loss.is_known(), self.loss.page()) {
            (false, _) => cause,
            (true, page) => {
                let cause = cause.unwrap_or_else(|| "it was left out".to_owned());
                Some(page.map_or(cause.clone(), |page| format!("page {page} is lost: {cause}")))
            }
        }
    }

    /// Whether a lost page was touched. Code that runs a guest in the slot must then refuse its
    /// results, because host code may have read zeros. The record is permanent.
    #[must_use]
    pub fn loss(&self) -> Arc<PageLoss> {
        self.loss.clone()
    }

    /// Grows the last region until it ends at page `end`. The new pages are zero.
    ///
    /// # Errors
    /// [`SlotError::TooLarge`] past the capacity, and [`SlotError::System`] when the kernel has no
    /// memory or no mapping for the pages, with nothing changed; any other error quarantines the
    /// slot.
    pub fn grow(&mut self, end: usize) -> Result<(), SlotError> {
        self.check()?;
        if end > self.space.capacity {
            return Err(SlotError::TooLarge { pages: end, capacity: self.space.capacity });
        }
        if end <= self.space.end {
            return Ok(());
        }
        let new = PageRange::new(self.space.end, end - self.space.end);
        if let Err(error) = self.space.protect(new, Protection::ReadWrite) {
            // The kernel may have opened some of them. Closing them takes no further mapping.
            if let Err(closing) = self.space.protect(new, Protection::None) {
                self.quarantine(format!("growth failed half-way: {closing}"));
            }
            return Err(error.into());
        }
        let result = self.take_in(new);
        match &result {
            Ok(()) => {
                self.space.reach(end);
                self.stats.growths += 1;
            }
            Err(error) => self.quarantine(format!("growth failed half-way: {error}")),
        }
        result
    }

    /// Makes pages accessible; those that were exposed before keep their protection state where the
    /// tracker can.
    fn expose(&mut self, range: PageRange) -> Result<(), SlotError> {
        self.space.protect(range, Protection::ReadWrite)?;
        self.take_in(range)
    }

    /// Watches pages that have become accessible.
    fn take_in(&mut self, range: PageRange) -> Result<(), SlotError> {
        let from = match &self.method {
            Method::Reprotect(tracker) | Method::WriteSet(tracker) if tracker.survives_hiding() => {
                self.space.high_water.max(range.start)
            }
            _ => range.start,
        };
        if from > range.start {
            self.prezero_regrowth(PageRange::new(
                range.start,
                range.end().min(from) - range.start,
            ))?;
        }
        let new = PageRange::new(from, range.end().saturating_sub(from));
        if new.is_empty() {
            return Ok(());
        }
        let prezeroed = self.prezero_growth(new)?;
        if let Method::Reprotect(tracker) | Method::WriteSet(tracker) = &mut self.method {
            tracker.watch(new)?;
            if self.adapt.discarding() {
                tracker.open(&[new])?;
            }
        }
        self.watch_huge_pages(prezeroed);
        Ok(())
    }

    /// Rebuilds the write set's copy list, once the content that it copies is there. On an error
    /// the slot is quarantined: the list lacks pages of the set, which no reset would restore.
    fn plan(&mut self) -> Result<(), ImageError> {
        let base = self.base();
        let initial_end = self.space.initial_end();
        if !self.image.is_complete() {
            let runs = self.write_set.runs();
            if let Err(error) = runs.into_iter().try_for_each(|run| self.image.resolve(run)) {
                if !planted::is(Bug::Halfway) {
                    self.quarantine(error.to_string());
                }
                return Err(error);
            }
        }
        self.write_set.plan(&self.image, base, initial_end);
        Ok(())
    }

    /// Pages of the slot that are in memory now (by `mincore`, so clean pages of the image count
    /// when the image has them in memory).
    #[must_use]
    pub fn resident_pages(&self) -> usize {
        self.space
            .accessible()
            .map(|r| self.space.memory.resident_pages(self.space.absolute(r)))
            .sum()
    }

    /// Releases the slot's private memory and its write set. The next run faults pages in again. It
    /// must follow a reset.
    ///
    /// # Errors
    /// [`crate::ResetError`]; the slot is quarantined.
    pub fn trim(&mut self) -> Result<(), crate::ResetError> {
        if self.is_of_parent() {
            return Err(crate::ResetError::Quarantined { reason: FORKED.to_owned() });
        }
        self.discard_all()
    }
}
