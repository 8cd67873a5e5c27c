//! KVM's dirty log and dirty ring as trackers of the engine.
//!
//! Promises: a page that the guest, or the host through this crate, wrote since it was last armed
//! is reported by the next drain; a reported page stays writable and is not reported again until it
//! is armed. The ring protects everything it reported when any page is armed; pages that the engine
//! still holds open are then noticed again, and kept to ourselves.
//!
//! May break it: writes by the host past `TrackerHandle::host_wrote`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh_memory::{PageRange, TrackError, Tracker, TrackerKind};
use afresh_sys::kvm::{DirtyRing, clear_dirty_log, get_dirty_log, reset_dirty_rings};
use kvm_ioctls::VmFd;

use crate::pages::PageSet;

/// A memory slot that KVM watches.
#[derive(Debug)]
pub(crate) struct WatchedSlot {
    /// KVM's number for it.
    pub(crate) number: u32,
    /// Its first page, counted from guest address 0.
    pub(crate) first: usize,
    /// Its length in pages.
    pub(crate) pages: usize,
    /// The destination of the bitmap from KVM; empty with a ring.
    pub(crate) bitmap: Vec<u64>,
}

/// How KVM reports.
#[derive(Debug)]
pub(crate) enum Source {
    Log,
    Ring(DirtyRing),
}

/// State that the tracker and the running vCPU share: a full ring is emptied in the middle of a
/// run.
#[derive(Debug)]
struct State {
    vm: Arc<VmFd>,
    source: Source,
    watched: Vec<WatchedSlot>,
    /// Reported to the engine and not armed since.
    open: PageSet,
    /// Written and not reported yet.
    fresh: PageSet,
}

/// A handle to the tracker's state.
#[derive(Debug, Clone)]
pub(crate) struct TrackerHandle(Arc<Mutex<State>>);

fn backend(error: afresh_sys::SysError) -> TrackError {
    TrackError::Backend(Box::new(error))
}

impl TrackerHandle {
    pub(crate) fn new(
        vm: Arc<VmFd>,
        source: Source,
        watched: Vec<WatchedSlot>,
        pages: usize,
    ) -> Self {
        Self(Arc::new(Mutex::new(State {
            vm,
            source,
            watched,
            open: PageSet::new(pages),
            fresh: PageSet::new(pages),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between two lines of this file leaves at worst a page that is reported twice.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host is about to write `range`.
    pub(crate) fn host_wrote(&self, range: PageRange) {
        let mut state = self.lock();
        if !state.open.holds(range) {
            state.fresh.insert_range(range);
        }
    }

    /// Empties a full ring.
    pub(crate) fn ring_full(&self) -> Result<(), TrackError> {
        let mut state = self.lock();
        state.collect()?;
        state.protect_ring()
    }

    /// The tracker to give to a slot.
    pub(crate) fn tracker(&self) -> Box<dyn Tracker> {
        Box::new(KvmTracker(self.clone()))
    }
}

impl State {
    /// Moves the pages that KVM noticed into `fresh`, except open ones.
    fn collect(&mut self) -> Result<(), TrackError> {
        match &mut self.source {
            Source::Ring(ring) => {
                while let Some(gfn) = ring.pop() {
                    if let Some(slot) = self.watched.iter().find(|s| s.number == gfn.slot) {
                        let page = slot.first + gfn.offset as usize;
                        if !self.open.contains(page) {
                            self.fresh.insert(page);
                        }
                    }
                }
            }
            Source::Log => {
                for slot in &mut self.watched {
                    get_dirty_log(&self.vm, slot.number, slot.pages as u64, &mut slot.bitmap)
                        .map_err(backend)?;
                    for (index, word) in slot.bitmap.iter().enumerate() {
                        if *word == 0 {
                            continue;
                        }
                        let first = slot.first + index * 64;
                        let mut word = *word & !self.open.word_at(first);
                        while word != 0 {
                            self.fresh.insert(first + word.trailing_zeros() as usize);
                            word &= word - 1;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn protect_ring(&mut self) -> Result<(), TrackError> {
        if let Source::Ring(ring) = &mut self.source {
            ring.give_back();
            reset_dirty_rings(&self.vm).map_err(backend)?;
        }
        Ok(())
    }

    fn protect_log(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        for slot in &self.watched {
            let whole = PageRange::new(slot.first, slot.pages);
            let mut wanted = PageSet::new(slot.pages);
            for part in pages.iter().filter_map(|range| range.intersect(whole)) {
                wanted.insert_range(PageRange::new(part.start - slot.first, part.len));
            }
            for (word, bits) in wanted.word_runs() {
                let count = (bits.len() * 64).min(slot.pages - word * 64);
                clear_dirty_log(&self.vm, slot.number, word as u64 * 64, count as u32, bits)
                    .map_err(backend)?;
            }
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        if pages.is_empty() {
            return Ok(());
        }
        // The entries of the ring must be read before it is returned to KVM.
        if matches!(self.source, Source::Ring(_)) {
            self.collect()?;
        }
        for range in pages {
            self.open.remove_range(*range);
            self.fresh.remove_range(*range);
        }
        match self.source {
            Source::Ring(_) => self.protect_ring(),
            Source::Log => self.protect_log(pages),
        }
    }
}

struct KvmTracker(TrackerHandle);

// SAFETY: pages come from KVM's log or ring of the memory slots that were set up for this very
// range, or from the host's own notes, and `PageSet` appends them in order, each once. KVM reports
// the guest's writes, `host_wrote` the host's.
unsafe impl Tracker for KvmTracker {
    fn kind(&self) -> TrackerKind {
        match self.0.lock().source {
            Source::Log => TrackerKind::Other("kvm-log"),
            Source::Ring(_) => TrackerKind::Other("kvm-ring"),
        }
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.0.lock().arm(&[range])
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        let mut state = self.0.lock();
        state.collect()?;
        if state.fresh.is_empty() {
            return Ok(());
        }
        let first = written.len();
        state.fresh.append_runs(written);
        state.fresh.clear();
        for range in &written[first..] {
            state.open.insert_range(*range);
        }
        Ok(())
    }

    fn arm(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        self.0.lock().arm(pages)
    }

    fn open(&mut self, pages: &[PageRange]) -> Result<(), TrackError> {
        let mut state = self.0.lock();
        for range in pages {
            state.open.insert_range(*range);
        }
        Ok(())
    }

    fn drains_for_free(&self) -> bool {
        matches!(self.0.lock().source, Source::Ring(_))
    }
}
