//! Trackers: how a slot knows which pages were written.
//!
//! Several mechanisms share one interface; the host's features decide which one is used (see
//! [`crate::Strategy`]). All share one contract, and one test drives them all:
//!
//! * a page that was written since it was last armed is reported by the next [`Tracker::drain`];
//! * reporting too much is allowed, reporting too little never;
//! * a reported page stays writable, at no further cost, until it is armed again.

mod barrier;
pub(crate) mod descriptor;
pub(crate) mod dirty;
mod mprotect;
mod scan;
mod sigbus;

use std::fmt;
use std::sync::Arc;

use afresh_sys::{PageRange, Reservation};

pub use barrier::WriteBarrier;
use descriptor::Descriptor;
pub use dirty::DirtyPages;
pub(crate) use dirty::push_run;

use crate::TrackError;
use crate::image::Missing;

/// The trackers of this crate. A kind of guest can add another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrackerKind {
    /// userfaultfd write protection, answered by SIGBUS in the writing thread.
    UffdSigbus,
    /// userfaultfd write protection lifted by the kernel, read by `PAGEMAP_SCAN`.
    UffdScan,
    /// mprotect, answered by SIGSEGV in the writing thread.
    Mprotect,
    /// Nothing: every page counts as written.
    Everything,
    /// A mechanism of another crate.
    Other(&'static str),
}

impl TrackerKind {
    /// The name used in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TrackerKind::UffdSigbus => "uffd",
            TrackerKind::UffdScan => "scan",
            TrackerKind::Mprotect => "mprotect",
            TrackerKind::Everything => "everything",
            TrackerKind::Other(name) => name,
        }
    }
}

impl fmt::Display for TrackerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Records writes to a slot.
///
/// Ranges are pages relative to the slot's first accessible page. The slot calls these methods only
/// while no guest runs.
///
/// # Safety
/// The slot copies over every reported page, through raw pointers, and treats every unreported page
/// as pristine. An implementation must therefore ensure that
///
/// * [`Tracker::drain`] reports only pages that the slot asked to be watched and has not hidden
///   since, in order and without overlaps;
/// * it reports *every* page that was written since it was last armed, by any writer that the
///   mechanism is documented to notice;
/// * pages named in [`Tracker::open`], and pages that were reported and not armed again, can be
///   written without an unhandled fault;
/// * it changes no memory and no mapping outside the slot, and handles the slot's faults until it
///   is dropped.
pub unsafe trait Tracker: Send {
    /// Which mechanism this is.
    fn kind(&self) -> TrackerKind;

    /// Starts to watch pages that just became accessible: they are armed afterwards.
    ///
    /// # Errors
    /// [`TrackError`]; the slot is quarantined.
    fn watch(&mut self, range: PageRange) -> Result<(), TrackError>;

    /// The mapping behind `range` was replaced or thrown away (which may have lost its protection):
    /// it is armed afterwards.
    ///
    /// # Errors
    /// [`TrackError`]; the slot is quarantined.
    fn rearm(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.watch(range)
    }

    /// Appends every page that was written since it was last armed, in order and without overlaps,
    /// and forgets it; except that a tracker which looks at the pages themselves may report a page
    /// that was left writable again each time.
    ///
    /// # Errors
    /// [`TrackError`]; the slot is quarantined.
    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError>;

    /// Write-protects pages again. Only called once they are copied back. Pages that the kernel
    /// cannot protect, for want of mappings, may stay open if the next drain reports them.
    ///
    /// # Errors
    /// [`TrackError`]; the slot is quarantined.
    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError>;

    /// Leaves pages writable without reporting them: the caller copies them back every time. May
    /// open other watched pages, too, if the next drain reports them.
    ///
    /// # Errors
    /// [`TrackError`]; the slot is quarantined.
    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError>;

    /// Pages that were watched become inaccessible until they are watched again.
    fn hide(&mut self, range: PageRange) {
        let _ = range;
    }

    /// The barrier that protects pages while the guest runs, and has captured pages copied before
    /// they open. `None` where the kernel opens pages, or other threads cannot protect them.
    fn barrier(&self) -> Option<WriteBarrier> {
        None
    }

    /// Whether a write to a huge page can be noticed, and open it, as a whole: see
    /// [`Tracker::by_huge_page`].
    fn watches_huge_pages(&self) -> bool {
        false
    }

    /// From now on the first write to a page of `huge`, which is watched, opens and reports all of
    /// it (`on`), or its own page as usual. Only called where [`Tracker::watches_huge_pages`].
    fn by_huge_page(&mut self, huge: PageRange, on: bool) {
        let _ = (huge, on);
    }

    /// Whether protection survives `mprotect` to no access and back. When it does not, the slot
    /// forgets the pages that it hides.
    fn survives_hiding(&self) -> bool {
        true
    }

    /// Why pages that the tracker also answers for, because the image is filled lazily, will never
    /// come. The memory is closed then.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Whether [`Tracker::drain`] costs next to nothing when nothing was written.
    fn drains_for_free(&self) -> bool {
        true
    }
}

/// Builds the tracker of `kind` for the pages of `memory` from `first` on, `capacity` of them. Only
/// the `uffd` tracker answers for pages that are `missing`.
pub(crate) fn build(
    kind: TrackerKind,
    memory: &Arc<Reservation>,
    first: usize,
    capacity: usize,
    missing: Option<Missing>,
) -> Result<Box<dyn Tracker>, TrackError> {
    let base = memory.page_ptr(first);
    Ok(match kind {
        TrackerKind::UffdSigbus => Box::new(sigbus::Sigbus::new(memory, first, capacity, missing)?),
        TrackerKind::UffdScan => Box::new(scan::Scan::new(base, capacity)?),
        TrackerKind::Mprotect => Box::new(mprotect::Mprotect::new(memory, first, capacity)?),
        TrackerKind::Everything | TrackerKind::Other(_) => Box::new(EverythingTracker::default()),
    })
}

/// The fallback where nothing can be noticed: every watched page counts as written, always.
#[derive(Debug, Default)]
struct EverythingTracker {
    watched: Vec<PageRange>,
}

// SAFETY: reports exactly the watched ranges, sorted, and protects nothing. The slot registers
// every page that it hides again before the next drain.
unsafe impl Tracker for EverythingTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Everything
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.watched.push(range);
        self.watched.sort_unstable();
        Ok(())
    }

    fn rearm(&mut self, _: PageRange) -> Result<(), TrackError> {
        Ok(())
    }

    fn hide(&mut self, range: PageRange) {
        // The remaining parts below and above it.
        let parts = |watched: PageRange| {
            let below = PageRange::new(
                watched.start,
                watched.end().min(range.start).saturating_sub(watched.start),
            );
            let start = watched.start.max(range.end());
            [below, PageRange::new(start, watched.end().saturating_sub(start))]
        };
        self.watched = std::mem::take(&mut self.watched)
            .into_iter()
            .flat_map(parts)
            .filter(|part| !part.is_empty())
            .collect();
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        written.extend_from_slice(&self.watched);
        Ok(())
    }

    fn arm(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }

    fn open(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }

    fn drains_for_free(&self) -> bool {
        false
    }
}
