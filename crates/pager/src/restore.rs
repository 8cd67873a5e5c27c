//! A restore: memory that is being filled, and the handle to wait for it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use afresh_sys::fault::Registration;
use afresh_sys::planted::{self, Bug};
use afresh_sys::{
    Advice, Call, Features, HUGE_PAGES, HUGE_SIZE, Interest, PageRange, Protection, Reservation,
    SysError, Uffd, UffdMode, WithholdGuard, fault, fork, withhold,
};

use crate::control::Control;
use crate::detach::Detach;
use crate::lazy::{Fill, HugePageTarget, LazyMemory};
use crate::staging::Staging;
use crate::strategy::MAX_PIECES;
use crate::{
    Answer, FillStrategy, Options, PageSource, RestoreError, SourceError, coordinator, eager,
};

/// Memory that is being filled.
///
/// While it lives, touching a page of the range waits for the page. Dropping it before it is done
/// closes the memory. In a child that is forked before it is done the memory is inaccessible,
/// unless it is mapped, and every method returns the error at once. Once done, the memory is
/// ordinary and nothing of the source is mapped or open; only with [`FillStrategy::Held`] it stays
/// mapped.
#[derive(Debug)]
pub struct Restore {
    control: Arc<Control>,
    strategy: FillStrategy,
    engine: Arc<Mutex<Option<Engine>>>,
    range: PageRange,
    /// The process that fills it. A child may inherit `engine` locked, and has no thread of it.
    generation: u32,
}

/// What serves faults. Taken out, and dropped, when the restore ends.
pub(crate) struct Engine {
    pub(crate) work: Work,
    /// Dropped first: no handler runs afterwards.
    pub(crate) registration: Option<Registration>,
    /// Whether a separate thread ends it.
    pub(crate) coordinated: bool,
    /// Keeps memory with missing pages from forked children, who would read zeros.
    pub(crate) withheld: Option<WithholdGuard>,
}

#[derive(Clone)]
pub(crate) enum Work {
    Lazy(Arc<LazyMemory>),
    Detach(Arc<Detach>),
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("coordinated", &self.coordinated).finish_non_exhaustive()
    }
}

/// The progress of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The strategy in use.
    pub strategy: FillStrategy,
    /// Faults answered so far, not counting those the kernel answers.
    pub faults: usize,
    /// Whether nothing of the source is needed any more.
    pub done: bool,
}

/// Replaces what is mapped at `range` by the pieces of the source.
fn map_source(
    target: &Reservation,
    range: PageRange,
    source: &dyn PageSource,
    strategy: FillStrategy,
) -> Result<Vec<PageRange>, RestoreError> {
    let unsupported =
        |why: &str| RestoreError::Unsupported { strategy: strategy.name(), why: why.to_owned() };
    let pieces = source.pieces().ok_or_else(|| {
        unsupported("the source cannot be mapped, or was not checked; use stream")
    })?;
    if pieces.len() > MAX_PIECES {
        return Err(unsupported("the source is in too many pieces; compact it or use stream"));
    }
    let mut zero = Vec::new();
    let mut next = 0;
    for piece in pieces {
        if next == range.len {
            break;
        }
        // A mapping in a gap would be taken for content.
        let len = piece.pages.len.min(range.len - next);
        if piece.pages.start != next || len == 0 {
            return Err(unsupported("the source names its pieces out of order, or leaves a gap"));
        }
        let pages = PageRange::new(next, len);
        next += len;
        let at = PageRange::new(range.start + pages.start, pages.len);
        match piece.file {
            None => {
                target.map_anonymous(at, Protection::ReadWrite)?;
                zero.push(pages);
            }
            Some((file, page)) => {
                target.map_file(at, Protection::ReadWrite, file, page)?;
            }
        }
    }
    if next < range.len {
        return Err(unsupported("the source names pieces for fewer pages than it has"));
    }
    Ok(zero)
}

impl Restore {
    /// Starts to fill the pages `range` of `target` with the first pages of `source`.
    ///
    /// Mappings at `range` are replaced. Nobody may touch the range until this returns. After an
    /// error the range is inaccessible or empty and must be mapped anew.
    ///
    /// # Errors
    /// [`RestoreError::Unsupported`] when the strategy does not fit the source or the host.
    pub fn start(
        target: Arc<Reservation>,
        range: PageRange,
        source: Arc<dyn PageSource>,
        options: &Options,
    ) -> Result<Self, RestoreError> {
        if range.start.checked_add(range.len).is_none_or(|end| end > target.pages()) {
            return Err(SysError::new(Call::Map, 22).into());
        }
        if source.pages() < range.len {
            let (pages, wanted) = (source.pages(), range.len);
            return Err(SourceError::TooShort { pages, wanted }.into());
        }
        let strategy = options.strategy.unwrap_or_else(|| {
            FillStrategy::choose(&*source, options.mostly_written, Features::host())
        });
        let control = Arc::new(Control::new(Some((target.clone(), range)), options.timeout));
        let this = |engine| Self {
            control: control.clone(),
            strategy,
            engine: Arc::new(Mutex::new(engine)),
            range,
            generation: fork::generation(),
        };
        if range.is_empty() {
            control.finish();
            return Ok(this(None));
        }
        match strategy {
            FillStrategy::Held => {
                if source.held_memfd().is_none() {
                    return Err(RestoreError::Unsupported {
                        strategy: strategy.name(),
                        why: "the source is not held in memory; use map-detach".to_owned(),
                    });
                }
                map_source(&target, range, &*source, strategy)?;
                control.finish();
                Ok(this(None))
            }
            FillStrategy::Read => {
                eager::read_all(&target, range, &*source)?;
                control.finish();
                Ok(this(None))
            }
            FillStrategy::MapDetach => {
                let zero = map_source(&target, range, &*source, strategy)?;
                let detach = Arc::new(Detach::new(
                    control.clone(),
                    source.clone(),
                    target.clone(),
                    range,
                    &zero,
                )?);
                let registration = fault::register(
                    target.page_ptr(range.start),
                    range.byte_len(),
                    detach.clone(),
                )?;
                let restore = this(Some(Engine {
                    work: Work::Detach(detach.clone()),
                    registration: Some(registration),
                    coordinated: true,
                    // Its pages are those of the file, in children too.
                    withheld: None,
                }));
                coordinator::spawn(
                    restore.engine.clone(),
                    Work::Detach(detach),
                    Some(source),
                    (1, Duration::ZERO),
                    None,
                )?;
                Ok(restore)
            }
            FillStrategy::Stream | FillStrategy::WorkingSet => {
                let streams = if options.background { options.streams.max(1) } else { 0 };
                let lazy = lazy(control.clone(), target.clone(), range, source, strategy, options)?;
                let lazy = Arc::new(lazy);
                let withheld = match planted::is(Bug::Withhold) {
                    false => Some(withhold(&target, range)?),
                    true => None,
                };
                let registration = match options.answer {
                    Answer::Thread => None,
                    Answer::Sigbus => Some(fault::register(
                        target.page_ptr(range.start),
                        range.byte_len(),
                        lazy.clone(),
                    )?),
                };
                let coordinated = streams > 0 || options.answer == Answer::Thread || !lazy.inline;
                let restore = this(Some(Engine {
                    work: Work::Lazy(lazy.clone()),
                    registration,
                    coordinated,
                    withheld,
                }));
                if coordinated {
                    let streams = (streams, Duration::ZERO);
                    coordinator::spawn(
                        restore.engine.clone(),
                        Work::Lazy(lazy),
                        None,
                        streams,
                        None,
                    )?;
                }
                Ok(restore)
            }
        }
    }

    /// The strategy in use.
    #[must_use]
    pub fn strategy(&self) -> FillStrategy {
        self.strategy
    }

    /// The progress of the restore.
    #[must_use]
    pub fn status(&self) -> Status {
        Status {
            strategy: self.strategy,
            faults: self.control.faults.load(Ordering::Relaxed),
            done: self.control.is_done(),
        }
    }

    fn is_of_parent(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Refuses what only the process that fills the memory can do.
    fn check_process(&self) -> Result<(), RestoreError> {
        if !self.is_of_parent() || self.control.is_done() {
            return Ok(());
        }
        let cause = "it is filled by the process that this one was forked from";
        Err(RestoreError::Failed(cause.to_owned()))
    }

    fn work(&self) -> Option<Work> {
        if self.is_of_parent() {
            return None;
        }
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        engine.as_ref().map(|engine| engine.work.clone())
    }

    /// Puts `pages` (relative to the restored range) in place now, so that a system call may touch
    /// them: one that meets a missing page fails with `EFAULT`.
    ///
    /// # Errors
    /// [`RestoreError::Failed`] when they cannot be filled.
    pub fn resolve(&self, pages: PageRange) -> Result<(), RestoreError> {
        self.check_process()?;
        let Some(pages) = pages.intersect(PageRange::new(0, self.range.len)) else {
            return self.control.check();
        };
        match self.work() {
            None => {}
            Some(Work::Lazy(lazy)) => {
                lazy.resolve(pages, true);
            }
            Some(Work::Detach(detach)) => detach.resolve(pages)?,
        }
        self.control.check()
    }

    /// The pages that are in place, relative to the restored range: with [`Options::recording`],
    /// those that were touched. Empty for strategies that do not track pages, and once the restore
    /// has ended.
    #[must_use]
    pub fn present(&self) -> Vec<PageRange> {
        match self.work() {
            Some(Work::Lazy(lazy)) => lazy.present(),
            _ => Vec::new(),
        }
    }

    /// Waits until everything is in place and the source is let go. A restore without a background
    /// starts to stream now.
    ///
    /// # Errors
    /// [`RestoreError::Failed`] with the cause, [`RestoreError::Timeout`] while it continues.
    pub fn wait(&self, timeout: Duration) -> Result<(), RestoreError> {
        self.check_process()?;
        if !self.is_of_parent() {
            let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(engine) = &mut *engine
                && let Work::Lazy(lazy) = &engine.work
            {
                lazy.rush.store(true, Ordering::Release);
                if !engine.coordinated {
                    engine.coordinated = true;
                    let streams = (0, Duration::ZERO);
                    coordinator::spawn(
                        self.engine.clone(),
                        engine.work.clone(),
                        None,
                        streams,
                        None,
                    )?;
                }
            }
        }
        self.control.wait(timeout)
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        if self.control.is_done() {
            return;
        }
        // The mapping stays correct, but it would keep the source; the owner has to see that.
        if let Some(Work::Detach(detach)) = self.work() {
            detach.stop();
        }
        self.control.abandon();
        if !self.is_of_parent() {
            coordinator::end(&self.engine);
        }
    }
}

/// Maps and registers what `strategy` needs.
fn lazy(
    control: Arc<Control>,
    target: Arc<Reservation>,
    range: PageRange,
    source: Arc<dyn PageSource>,
    strategy: FillStrategy,
    options: &Options,
) -> Result<LazyMemory, RestoreError> {
    let set_first = strategy == FillStrategy::WorkingSet;
    // Pages outside of the set are used here and there, and so are pages that are not streamed.
    let default = if set_first || !options.background { 64 } else { HUGE_PAGES };
    let window = options.window.unwrap_or(default);
    let unsupported = |why: String| RestoreError::Unsupported { strategy: strategy.name(), why };
    if !window.is_power_of_two() || window > HUGE_PAGES {
        return Err(unsupported(format!(
            "a window of {window} pages is not a power of two up to 512"
        )));
    }
    let mode = match options.answer {
        Answer::Sigbus => UffdMode::Sigbus,
        Answer::Thread => UffdMode::Events,
    };
    let uffd = Uffd::open(mode).map_err(|e| unsupported(format!("{e}; use map-detach")))?;
    target.map_anonymous(range, Protection::ReadWrite)?;
    let small = if window < HUGE_PAGES { Some(Staging::new(window)?) } else { None };
    let (fill, huge) = if set_first {
        // Its pages are small, and so are the gaps between them.
        target.advise(range, Advice::NoHugePage)?;
        eager::read_working_set(&target, range, &*source)?;
        (Fill::Copy, HugePageTarget::Pool(Staging::new(HUGE_PAGES)?))
    } else {
        let staging = Reservation::aligned(range.len, HUGE_SIZE)?;
        staging.map_anonymous(PageRange::new(0, range.len), Protection::ReadWrite)?;
        staging.advise(PageRange::new(0, range.len), Advice::HugePage)?;
        (Fill::Move, HugePageTarget::Once(staging))
    };
    uffd.register(target.page_ptr(range.start), range.byte_len(), Interest::MISSING)
        .map_err(|e| unsupported(format!("{e}; use map-detach")))?;
    let windows = range.len.div_ceil(window);
    Ok(LazyMemory {
        inline: options.answer == Answer::Thread || source.signal_safe(),
        control,
        source,
        uffd: Some(uffd),
        target: Some(target),
        range,
        window,
        around: 1,
        fill,
        small,
        huge: Some(huge),
        states: (0..windows).map(|_| AtomicU32::new(0)).collect(),
        remaining: AtomicUsize::new(windows),
        next_hugepage: AtomicUsize::new(usize::MAX / 2),
        wanted: (0..windows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        bell: AtomicU32::new(0),
        busy: AtomicU64::new(0),
        rush: AtomicBool::new(false),
        set: Box::default(),
    })
}

#[cfg(all(test, not(miri)))]
mod tests {
    use afresh_sys::{PAGE_SIZE, child_passes};

    use super::*;

    /// Pages that come once `open` is set.
    struct HeldSource {
        open: AtomicBool,
    }

    impl PageSource for HeldSource {
        fn pages(&self) -> usize {
            4
        }

        unsafe fn read(&self, _: usize, to: *mut u8, pages: usize) -> Result<(), SourceError> {
            while !self.open.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            // SAFETY: the caller's promise.
            unsafe { to.write_bytes(7, pages * PAGE_SIZE) };
            Ok(())
        }
    }

    #[test]
    fn a_child_waits_for_no_lock_and_no_thread_of_its_parents_restore() {
        let memory = Arc::new(Reservation::aligned(4, HUGE_SIZE).unwrap());
        let source = Arc::new(HeldSource { open: AtomicBool::new(false) });
        let options = Options { strategy: Some(FillStrategy::Stream), ..Options::default() };
        let all = PageRange::new(0, 4);
        let mut restore = match Restore::start(memory.clone(), all, source.clone(), &options) {
            Ok(restore) => Some(restore),
            Err(error) => return println!("SKIPPED: {error}"),
        };
        let engine = restore.as_ref().unwrap().engine.clone();
        let held = engine.lock().unwrap();
        assert!(child_passes(|| {
            let restore = restore.take().unwrap();
            let refused =
                restore.resolve(all).is_err() && restore.wait(Duration::from_secs(3600)).is_err();
            let empty = restore.present().is_empty() && !restore.status().done;
            drop(restore);
            refused && empty
        }));
        drop(held);
        source.open.store(true, Ordering::Release);
        restore.unwrap().wait(Duration::from_secs(60)).unwrap();
        // SAFETY: mapped, and whole.
        assert_eq!(unsafe { memory.page_ptr(3).read_volatile() }, 7);
    }
}
