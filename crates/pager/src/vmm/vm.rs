//! A VMM that is served, and what can be requested of it while it runs.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use afresh_budget::Charge;
use afresh_store::{Encoding, GuestBuild, SaveRequest, Sha256, Store};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{PAGE_SIZE, PageRange};

use super::connection::Connection;
use super::freeze::{FrozenMemory, PreparedMemory};
use super::memory::{VmMemory, verify};
use super::page::Page;
use super::ranges::ChargedList;
use super::request_error::RequestError;
use super::serve::{accept, accept_from};
use super::service::{Phase, Service, VmSource};
use super::watch::Watch;
use super::watch_end::{WatchEnd, WatchId};
use super::{ServeCounts, VmmError, VmmOptions};
use crate::PageSource;

/// Bytes of a range in the work of a save: copies of the list of changed pages, here and in the
/// store.
const SAVE_COST: usize = 8 * size_of::<PageRange>();
/// Bytes of a range in an answer: JSON values, and their text.
const ANSWER_COST: usize = 192;
/// Maximum time of one wait for the end of a detach.
const TICK: Duration = Duration::from_millis(50);

/// A VMM whose handshake was taken. Clones stand for the same.
#[derive(Clone)]
pub struct Vm {
    service: Arc<Service<'static>>,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm").field("stats", &self.stats()).finish()
    }
}

/// The progress of a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VmState {
    /// Pages are missing.
    Filling,
    /// All pages are in place; discards are still answered.
    Filled,
    /// It needs the pager no more.
    Detached,
    /// It has exited, or its service has ended.
    Ended,
}

impl VmState {
    /// Its name in the control protocol.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Filling => "filling",
            Self::Filled => "filled",
            Self::Detached => "detached",
            Self::Ended => "ended",
        }
    }
}

/// Counts of a VMM.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct VmStats {
    /// Its progress.
    pub state: VmState,
    /// Pages of its mappings.
    pub pages: usize,
    /// Pages whose content is still to come.
    pub missing: usize,
    /// Pages in place.
    pub present: usize,
    /// Pages that the VMM has discarded.
    pub removed: usize,
    /// The work so far.
    pub served: ServeCounts,
    /// The watch of its memory, if it is prepared or frozen.
    pub watch: Option<WatchId>,
    /// Whether its memory is frozen.
    pub frozen: bool,
    /// Bytes of pages that were written to since, copied before.
    pub copied: usize,
}

/// Pages of the source that a VMM has touched since its restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TouchedPages {
    /// Pages with a fault: the first access to each page that was not filled ahead of it.
    pub read: Vec<PageRange>,
    /// Pages whose content differs from the source.
    pub written: Vec<PageRange>,
    /// Pages that the VMM has discarded.
    pub removed: Vec<PageRange>,
    /// Whether `read` has every touched page, because none was filled ahead.
    pub exact: bool,
}

/// Options of saving the memory of a VMM.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VmSaveOptions {
    /// The state of the VMM (registers, devices), stored with the memory.
    pub state: Vec<u8>,
    /// How pages are stored.
    pub encoding: Encoding,
    /// The guest of a source that is not a snapshot.
    pub guest: GuestBuild,
    /// The frozen memory to save. Without it the present memory is saved, whose guest must be
    /// paused.
    pub watch: Option<WatchId>,
}

impl Default for VmSaveOptions {
    fn default() -> Self {
        let guest = GuestBuild {
            kind: "raw".to_owned(),
            module: "none".to_owned(),
            engine: "none".to_owned(),
            cpu: Vec::new(),
        };
        Self { state: Vec::new(), encoding: Encoding::Raw, guest, watch: None }
    }
}

impl Vm {
    /// Takes the handshake from `stream`.
    ///
    /// # Errors
    /// As [`super::serve`].
    pub fn accept(
        stream: &UnixStream,
        source: Arc<dyn PageSource>,
        options: &VmmOptions<'_>,
    ) -> Result<Self, VmmError> {
        accept(stream, VmSource::Shared(source), options)
            .map(|service| Self { service: Arc::new(service) })
    }

    /// Takes the handshake of a VMM that has connected.
    pub(super) fn accept_connection(
        connection: Connection,
        source: Arc<dyn PageSource>,
        options: &VmmOptions<'_>,
    ) -> Result<Self, VmmError> {
        let Connection { stream, process, kept } = connection;
        accept_from(&stream, (process, kept), VmSource::Shared(source), options)
            .map(|service| Self { service: Arc::new(service) })
    }

    /// Serves the VMM until it exits or `options.stop` is set. Called once.
    ///
    /// # Errors
    /// As [`super::serve`].
    pub fn serve(&self, options: &VmmOptions<'_>) -> Result<ServeCounts, VmmError> {
        self.service.serve(options)
    }

    /// Its counts.
    #[must_use]
    pub fn stats(&self) -> VmStats {
        let phase = self.service.phase().clone();
        let pages = self.service.lock();
        let counts = pages.counts();
        VmStats {
            state: match phase {
                Phase::Serving if counts.awaited() > 0 => VmState::Filling,
                Phase::Serving => VmState::Filled,
                Phase::Detached => VmState::Detached,
                Phase::Ended(_) => VmState::Ended,
            },
            pages: counts.awaited() + counts.present + counts.removed,
            missing: counts.awaited(),
            present: counts.present,
            removed: counts.removed,
            served: pages.served,
            watch: pages.watches.live().map(|watch| watch.id),
            frozen: pages.watches.live().is_some_and(Watch::is_frozen),
            copied: pages.watches.live().map_or(0, |watch| watch.copies() * PAGE_SIZE),
        }
    }

    fn check_alive(&self) -> Result<(), RequestError> {
        match &*self.service.phase() {
            Phase::Ended(why) => Err(RequestError::Ended(why.clone())),
            Phase::Serving | Phase::Detached => Ok(()),
        }
    }

    fn check_serving(&self) -> Result<(), RequestError> {
        self.check_alive()?;
        match &*self.service.phase() {
            Phase::Detached => Err(RequestError::Detached),
            Phase::Serving | Phase::Ended(_) => Ok(()),
        }
    }

    /// Pages of the source for which `is` is true.
    fn source_pages(
        &self,
        is: impl Fn(Page, bool) -> bool,
    ) -> Result<ChargedList<PageRange>, RequestError> {
        let pages = self.service.lock();
        let mut all = ChargedList::new(self.service.budget.as_ref());
        for (number, mapping) in self.service.mappings.iter().enumerate() {
            for run in pages.ranges(number, &is) {
                let run = PageRange::new(run.start + mapping.offset, run.len);
                all.push(run).map_err(RequestError::Ranges)?;
            }
        }
        all.sort_unstable();
        Ok(all)
    }

    /// The pages that the VMM has touched. Compares all pages that it holds with the source.
    ///
    /// # Errors
    /// [`RequestError::Process`] where its memory cannot be read; [`RequestError::Ranges`].
    pub fn touched(&self) -> Result<TouchedPages, RequestError> {
        Ok(self.touched_charged()?.0)
    }

    /// As [`Vm::touched`], with the charges for the lists, and for an answer that has them as text.
    pub(super) fn touched_charged(&self) -> Result<(TouchedPages, Vec<Charge>), RequestError> {
        self.check_alive()?;
        let written = VmMemory::of(&self.service)?.differing()?;
        let (written, of_written) = written.into_parts();
        let (read, of_read) = self.source_pages(|_, touched| touched)?.into_parts();
        let removed = self.source_pages(|page, _| page == Page::Removed)?;
        let (removed, of_removed) = removed.into_parts();
        let ranges = read.len() + written.len() + removed.len();
        let of_answer = self.service.charge(ranges.saturating_mul(ANSWER_COST))?;
        let exact = self.service.lock().is_recording();
        let charges = [of_written, of_read, of_removed, of_answer];
        Ok((
            TouchedPages { read, written, removed, exact },
            charges.into_iter().flatten().collect(),
        ))
    }

    /// The pages that the VMM has touched so far.
    ///
    /// # Errors
    /// [`RequestError::NotRecorded`] unless it is served with [`VmmOptions::record`];
    /// [`RequestError::Ranges`].
    pub fn working_set(&self) -> Result<Vec<PageRange>, RequestError> {
        Ok(self.recorded_set()?.into_parts().0)
    }

    fn recorded_set(&self) -> Result<ChargedList<PageRange>, RequestError> {
        if !self.service.lock().is_recording() {
            return Err(RequestError::NotRecorded);
        }
        self.source_pages(|_, touched| touched)
    }

    /// Stores the pages that the VMM has touched as the working set of its snapshot, and makes
    /// `name` mean the snapshot with it. Returns its digest and the number of pages.
    ///
    /// # Errors
    /// As [`Vm::working_set`]; [`RequestError::Save`].
    pub fn record(&self, store: &Store, name: &str) -> Result<(Sha256, usize), RequestError> {
        let snapshot = self.service.source.snapshot().ok_or(RequestError::NoSnapshot)?;
        let set = self.recorded_set()?;
        let _work = self.service.charge(set.len().saturating_mul(SAVE_COST))?;
        let id = store.set_working_set(name, snapshot, &set)?;
        Ok((id, set.iter().map(|run| run.len).sum()))
    }

    /// Fills `pages` of the source, or all of them, ahead of the VMM. Returns at once, with the
    /// number of pages that are missing.
    ///
    /// # Errors
    /// [`RequestError::Outside`], [`RequestError::TooManyRanges`]; nothing is requested then, or a
    /// part.
    pub fn prefetch(&self, pages: Option<&[PageRange]>) -> Result<usize, RequestError> {
        self.check_serving()?;
        let source_pages = self.service.source.pages();
        for run in pages.into_iter().flatten() {
            let end = run.start.saturating_add(run.len);
            if end > source_pages {
                return Err(RequestError::Outside { first: run.start, end, pages: source_pages });
            }
        }
        let mut known = self.service.lock();
        match pages {
            None => known.request_all(),
            Some(runs) => {
                for run in runs {
                    for (number, mapping) in self.service.mappings.iter().enumerate() {
                        let of_source = PageRange::new(mapping.offset, mapping.pages);
                        let Some(part) = run.intersect(of_source) else { continue };
                        let start = (part.start - mapping.offset) / mapping.unit * mapping.unit;
                        let end = (part.end() - mapping.offset).next_multiple_of(mapping.unit);
                        if !known.request(number, PageRange::new(start, end - start)) {
                            return Err(RequestError::TooManyRanges);
                        }
                    }
                }
            }
        }
        let missing = known.counts().awaited();
        drop(known);
        self.service.bell.notify_all();
        Ok(missing)
    }

    /// Fills all memory of the VMM and returns it to the kernel. The VMM no longer needs the pager
    /// then. A preparation for a freeze is over with it.
    ///
    /// # Errors
    /// [`RequestError::Frozen`]. [`RequestError::NotYet`] after `timeout`; it is detached later.
    /// [`RequestError::Ended`] if its service ends before.
    pub fn detach(&self, timeout: Duration) -> Result<(), RequestError> {
        self.check_alive()?;
        verify(&self.service);
        self.begin_detach()?;
        self.service.bell.notify_all();
        let began = Instant::now();
        let mut phase = self.service.phase();
        loop {
            match &*phase {
                Phase::Detached => return Ok(()),
                Phase::Ended(why) => return Err(RequestError::Ended(why.clone())),
                Phase::Serving => {}
            }
            let waited = began.elapsed();
            if waited >= timeout {
                drop(phase);
                let missing = self.service.lock().counts().awaited();
                return Err(RequestError::NotYet { missing, waited });
            }
            let step = TICK.min(timeout - waited);
            let guard = self.service.phase_bell.wait_timeout(phase, step);
            phase = guard.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// From now on no memory is frozen: it is about to be unregistered.
    fn begin_detach(&self) -> Result<(), RequestError> {
        let mut pages = self.service.lock();
        if let Some(watch) = pages.watches.frozen_id() {
            return Err(RequestError::Frozen(watch));
        }
        // Its protection is lifted with the registration, and a page is opened by a write until
        // then.
        pages.watches.end_live(WatchEnd::Detached);
        self.service.detaching.store(true, Ordering::Release);
        pages.request_all();
        Ok(())
    }

    /// Write-protects the memory while the guest runs, so that [`Vm::freeze`] takes little time.
    /// Returns the watch, and the number of pages that the guest has written to meanwhile. A second
    /// call, or one of another client, protects those, and returns the same watch.
    ///
    /// # Errors
    /// [`RequestError::Frozen`], [`RequestError::SharedMemory`], [`RequestError::HugePages`],
    /// [`RequestError::OtherMemory`], [`RequestError::Process`], [`RequestError::Budget`],
    /// [`RequestError::Protect`]. A watch that this call has begun is over then.
    /// [`RequestError::WatchOver`] if another client ends it meanwhile.
    pub fn prepare(&self) -> Result<PreparedMemory, RequestError> {
        self.check_serving()?;
        self.service.prepare()
    }

    /// Freezes the memory, whose guest must be paused, and returns its watch. The guest may run
    /// then: [`Vm::snapshot`] with this watch saves the memory as it was.
    ///
    /// With the `watch` of [`Vm::prepare`] that one is frozen, or the call fails. Without it,
    /// memory that is not prepared is protected first, which takes longer.
    ///
    /// Each page that the guest writes to before it is saved is copied. The copies are charged to
    /// the budget.
    ///
    /// # Errors
    /// As [`Vm::prepare`].
    pub fn freeze(&self, watch: Option<WatchId>) -> Result<FrozenMemory, RequestError> {
        self.check_serving()?;
        self.service.freeze(watch)
    }

    /// Gives up the frozen memory of a watch, or the preparation for it. Returns whether there was
    /// such a watch.
    pub fn thaw(&self, watch: WatchId) -> bool {
        self.service.end_watch(watch, WatchEnd::Thawed)
    }

    /// Saves the frozen memory of `options.watch` under `name`, and thaws it. Without a watch it
    /// saves the present memory; the guest must be paused then. The snapshot is a delta to the one
    /// that the VMM was restored from. Returns the digest of the new snapshot and the number of
    /// bytes that were compared.
    ///
    /// # Errors
    /// [`RequestError::WatchOver`], [`RequestError::NotFrozen`]; without a watch
    /// [`RequestError::Frozen`] while memory is frozen. [`RequestError::Lost`]: the watch is over
    /// then. [`RequestError::Process`], [`RequestError::OtherMemory`], [`RequestError::Ranges`],
    /// [`RequestError::Save`]: frozen memory stays so. After each, the name means what it meant
    /// before.
    pub fn snapshot(
        &self,
        store: &Store,
        name: &str,
        options: &VmSaveOptions,
    ) -> Result<(Sha256, u64), RequestError> {
        self.check_alive()?;
        let memory = match options.watch {
            Some(watch) => self.frozen_memory(watch)?,
            None => {
                let frozen = self.service.lock().watches.frozen_id();
                frozen.map_or_else(
                    || VmMemory::of(&self.service),
                    |id| Err(RequestError::Frozen(id)),
                )?
            }
        };
        let parent = self.service.source.snapshot();
        let guest = parent.map_or(&options.guest, |parent| parent.guest());
        let work = self.service.charge(memory.ranges().saturating_mul(SAVE_COST))?;
        let changed = memory.changed();
        let bytes = changed.iter().map(|run| (run.len * PAGE_SIZE) as u64).sum();
        let mut save = SaveRequest::new(guest.clone());
        save.state.clone_from(&options.state);
        save.options.encoding = options.encoding;
        save.options.parent = parent.cloned();
        save.options.changed = parent.is_some().then_some(changed);
        // Pages of a process that has ended cannot be read, so the save fails.
        let saved = store.save(name, &memory, &save);
        drop((memory, save, work));
        match (options.watch, saved) {
            (Some(watch), Ok(id)) => {
                self.service.end_watch(watch, WatchEnd::Saved);
                Ok((id, bytes))
            }
            (Some(watch), Err(error)) => Err(self.loss_of(watch).unwrap_or(error.into())),
            (None, saved) => Ok((saved?, bytes)),
        }
    }

    fn frozen_memory(&self, watch: WatchId) -> Result<VmMemory<'_>, RequestError> {
        match VmMemory::frozen(&self.service, watch) {
            Err(RequestError::WatchOver { .. }) if planted::is(Bug::Over) => {
                VmMemory::of(&self.service)
            }
            Err(RequestError::Lost(loss)) => {
                self.service.end_watch(watch, WatchEnd::Lost(loss));
                Err(RequestError::Lost(loss))
            }
            memory => memory,
        }
    }

    /// Why frozen memory could not be saved, if it is lost. The watch is over then.
    fn loss_of(&self, watch: WatchId) -> Option<RequestError> {
        self.check_alive().ok()?;
        self.frozen_memory(watch).err()
    }
}
