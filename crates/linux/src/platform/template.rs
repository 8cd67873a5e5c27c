//! Templates: processes that show an image, and that others which show it are forked from.
//!
//! Mapping an image takes some hundred calls in each process; a fork copies the result of all. A
//! template is made for a state that processes are made from again and again. Once two runs of the
//! state have recorded their pages ([`super::working_set`]), a second template replaces the first,
//! and its children have those pages from the beginning. Other processes take a fault for each page
//! that they touch.
//!
//! Promises: no guest runs in a template, so its children contain no trace of one; at most
//! [`MAX_TEMPLATES`] templates exist; each is dropped with its state, and belongs to the process
//! that made it: a forked process makes new ones. If a template cannot be made, or was killed, a
//! process is made without.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use afresh_memory::Image;
use afresh_sys::{PerProcess, fork};

use super::control::Control;
use super::forker::{Forker, SpawnedProcess, ends};
use super::mapped_image::{MappedImage, reader};
use super::segments::Segments;
use super::working_set::{WorkingSet, WorkingSetRecord};
use super::{PlatformError, boot, zygote};

/// Templates of this process, at most.
const MAX_TEMPLATES: usize = 16;
/// Maximum steps of a template: mappings and pages that it touches.
const MAX_STEPS: usize = 4 * boot::MAX_TEMPLATE_STEPS;
/// Maximum steps of one stage of a template. Those of tests have more stages.
const STEPS_OF_STAGE: usize = if cfg!(test) { 16 } else { boot::MAX_TEMPLATE_STEPS };
/// Processes that are made of a state without a template.
const FORKS_BEFORE_TEMPLATE: u32 = 2;
/// Processes that are made of a state before runs record their pages.
const FORKS_BEFORE_RECORD: u32 = 6;
/// How long a thread waits for another one to fork: ten forks. Afterwards it makes a process
/// without the template, which takes ten times as long as a fork. A thread that forks may not exist
/// in this process, which may be a fork itself.
const TURN_TIMEOUT: Duration = Duration::from_millis(3);
/// Pause between two attempts to take a lock.
const TURN_PAUSE: Duration = Duration::from_micros(20);

/// Templates there are.
static TEMPLATES: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

/// One of the templates that there may be, in the process of this generation.
struct TemplateSlot(u32);

impl TemplateSlot {
    fn take() -> Option<Self> {
        let seats = TEMPLATES.get();
        let more = |taken: usize| (taken < MAX_TEMPLATES).then_some(taken + 1);
        seats
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()
            .map(|_| Self(fork::generation()))
    }
}

impl Drop for TemplateSlot {
    fn drop(&mut self) {
        // A child that this process forks has taken none.
        if self.0 == fork::generation() {
            TEMPLATES.get().fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Takes `lock`, unless another thread holds it longer than [`TURN_TIMEOUT`].
fn take_turn<T>(lock: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    let mut deadline = None;
    loop {
        match lock.try_lock() {
            Ok(held) => return Some(held),
            Err(TryLockError::Poisoned(_)) => return None,
            Err(TryLockError::WouldBlock) => {}
        }
        let now = Instant::now();
        if now >= *deadline.get_or_insert(now + TURN_TIMEOUT) {
            return None;
        }
        std::thread::sleep(TURN_PAUSE);
    }
}

/// A process that is killed with its owner, in the process of this generation.
struct OwnedProcess(SpawnedProcess, u32);

impl OwnedProcess {
    fn is_ours(&self) -> bool {
        self.1 == fork::generation()
    }
}

impl Drop for OwnedProcess {
    fn drop(&mut self) {
        if self.is_ours() {
            self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// A process that has made the first steps of a template.
struct Stage {
    process: OwnedProcess,
    forker: Forker,
}

impl Stage {
    /// A process with the mappings of the stage `before`, which then makes `steps`.
    fn new(
        before: Option<&Self>,
        steps: &[[u64; 7]],
        files: &[BorrowedFd<'_>],
    ) -> Result<Self, PlatformError> {
        let mut control = Control::new()?;
        boot::write_template(&mut control, steps, files.len());
        let (socket, theirs) =
            ends().map_err(|error| PlatformError::kernel("making a template", error))?;
        let mut lent = files.to_vec();
        lent.push(theirs.as_fd());
        let process = match before {
            None => zygote::start(&control, &lent)?,
            Some(before) => before.forker.fork(&control, &lent).map_err(|_| PlatformError::Lost)?,
        };
        drop(theirs);
        let process = OwnedProcess(process, fork::generation());
        let mut forker = Forker::new(process.0.pid, socket, control);
        forker.clock = process.0.clock;
        forker.prepared(Forker::hear)?;
        Ok(Self { process, forker })
    }
}

/// A process that shows an image.
pub(crate) struct Template {
    process: OwnedProcess,
    forker: Mutex<Forker>,
    /// Pages that its children copy, if it has a working set.
    copied: Option<Vec<Range<u64>>>,
    /// The image that it shows, which must outlive it.
    image: Image,
    /// Whether a fork failed once. A later answer may belong to that one.
    failed: AtomicBool,
    _seat: TemplateSlot,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("pid", &self.process.0.pid).finish_non_exhaustive()
    }
}

impl Template {
    /// A template that shows `image`; `None` if that takes too many files or mappings.
    /// Its children have the pages of `working_set`.
    fn new(
        image: &Image,
        shown: &MappedImage,
        segments: &Segments,
        seat: TemplateSlot,
        working_set: Option<&WorkingSet>,
    ) -> Result<Option<Self>, PlatformError> {
        let Some((files, pieces)) = shown.pieces(segments) else { return Ok(None) };
        let mut steps = boot::template_calls(&pieces, &files);
        let Some(room) = MAX_STEPS.checked_sub(steps.len()) else { return Ok(None) };
        steps.extend(working_set.iter().flat_map(|set| set.mapping_calls(segments, room)));
        // The boot code maps the files privately and closes them before a guest is in the process.
        let lent = files.iter().map(|file| reader(file)).collect::<Result<Vec<_>, _>>()?;
        let mut stage: Option<Stage> = None;
        for steps in steps.chunks(STEPS_OF_STAGE) {
            // The process of the stage before ends here.
            stage = Some(Stage::new(stage.as_ref(), steps, &lent)?);
        }
        let Some(Stage { process, forker }) = stage else { return Ok(None) };
        Ok(Some(Self {
            process,
            forker: Mutex::new(forker),
            copied: working_set.map(WorkingSet::copied),
            image: image.clone(),
            failed: AtomicBool::new(false),
            _seat: seat,
        }))
    }

    fn is_ours(&self) -> bool {
        self.process.is_ours()
    }

    /// Whether its children would be this process's, with its present IDs.
    fn is_useful(&self) -> bool {
        let user = self.forker.try_lock().map_or(true, |forker| forker.is_ours());
        let failed = self.failed.load(Ordering::Relaxed);
        self.is_ours() && user && !failed && !self.process.0.has_ended()
    }

    /// Whether its children have the pages of a working set.
    pub(crate) fn has_working_set(&self) -> bool {
        self.copied.is_some()
    }

    /// Pages that its children copy before their guests run.
    pub(super) fn copied(&self) -> &[Range<u64>] {
        self.copied.as_deref().unwrap_or_default()
    }

    /// Forks a process that carries out the orders in `control`. Nothing if it is busy, or cannot.
    pub(super) fn fork(&self, control: &Control) -> Option<SpawnedProcess> {
        if !self.is_ours() {
            return None;
        }
        let forker = take_turn(&self.forker)?;
        if self.failed.load(Ordering::Relaxed) {
            return None;
        }
        let born = forker.fork(control, &[]).ok();
        self.failed.store(born.is_none(), Ordering::Relaxed);
        born
    }
}

/// The template of a state. It does not belong to the state: any two are equal.
#[derive(Debug, Default)]
pub(crate) struct Origin(Mutex<TemplateState>);

#[derive(Debug, Default)]
struct TemplateState {
    /// Processes that were made.
    processes: u32,
    /// Whether making a template failed.
    refused: bool,
    template: Option<Arc<Template>>,
    record: WorkingSetRecord,
}

impl PartialEq for Origin {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Origin {}

impl Origin {
    /// The template for a further process, if it exists or is worth making.
    pub(crate) fn template(
        &self,
        image: &Image,
        shown: &MappedImage,
        segments: &Segments,
    ) -> Option<Arc<Template>> {
        // Another thread makes one just now, or did when this process was forked.
        let mut made = take_turn(&self.0)?;
        if made.template.as_ref().is_some_and(|template| !template.is_useful()) {
            *made = TemplateState::default();
        }
        made.processes = made.processes.saturating_add(1);
        if let Some(template) = &made.template {
            if template.has_working_set() || made.record.finished().is_none() {
                return Some(template.clone()).filter(|template| template.image.same(image));
            }
            // The next one has the working set.
            made.template = None;
        }
        if made.processes <= FORKS_BEFORE_TEMPLATE || made.refused || shown.is_coming() {
            return None;
        }
        let seat = TemplateSlot::take()?;
        let working_set = made.record.finished();
        let template = Template::new(image, shown, segments, seat, working_set);
        made.template = template.ok().flatten().map(Arc::new);
        if made.template.is_none() && made.record.finished().is_some_and(|set| !set.is_empty()) {
            // The next one is made without.
            made.record.abandon();
            return None;
        }
        // A failure now is a failure later.
        made.refused = made.template.is_none();
        made.template.clone()
    }

    /// Whether the run of a process that was made for the state is to record its pages.
    pub(crate) fn records_runs(&self) -> bool {
        let made = self.0.try_lock();
        made.is_ok_and(|made| made.processes > FORKS_BEFORE_RECORD && made.record.is_open())
    }

    /// Pages that the processes of its template copy.
    #[cfg(test)]
    pub(crate) fn copied(&self) -> Vec<Range<u64>> {
        let made = self.0.lock().unwrap();
        made.template.as_ref().map(|template| template.copied().to_vec()).unwrap_or_default()
    }

    /// Adds the pages of a run to the working set.
    pub(crate) fn record(&self, run: WorkingSet) {
        if let Ok(mut made) = self.0.try_lock() {
            made.record.add(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::PoisonError;

    use super::*;
    use crate::error::WarmError;
    use crate::{Program, Warm};

    use rustix::process::{Pid, Signal, kill_process, test_kill_process};

    /// The number of templates is shared by all tests.
    static ALONE: Mutex<()> = Mutex::new(());

    fn cat() -> Option<Warm> {
        match Program::new("/bin/cat").warm() {
            Ok(warm) => Some(warm),
            Err(WarmError::Platform(error @ PlatformError::Missing { .. })) => {
                println!("SKIPPED: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The template of a state, and its process.
    fn template(warm: &Warm) -> Option<Pid> {
        let made = warm.standing.rest.origin.0.lock().unwrap();
        made.template.as_ref().map(|template| template.process.0.pid)
    }

    fn call(warm: &Warm) {
        let mut instance = warm.instance();
        assert_eq!(instance.call(b"one\n").unwrap(), b"one\n");
        instance.verify().unwrap();
        assert_eq!(instance.call_pristine(b"two\n").unwrap(), b"two\n");
        instance.verify().unwrap();
    }

    #[test]
    fn a_template_is_made_for_many_processes_and_goes_with_their_state() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(warm) = cat() else { return };
        for _ in 0..FORKS_BEFORE_TEMPLATE {
            call(&warm);
        }
        assert_eq!(template(&warm), None, "few are made without");
        let mut kept = warm.instance();
        kept.call(b"kept\n").unwrap();
        let made = template(&warm).unwrap();
        for _ in 0..3 {
            call(&warm);
        }
        assert_eq!(template(&warm), Some(made));
        drop(warm);
        assert!(test_kill_process(made).is_ok(), "an instance may need further processes");
        drop(kept);
        assert!(test_kill_process(made).is_err());
    }

    #[test]
    fn there_are_so_many_templates_and_no_more() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(warm) = cat() else { return };
        let seats: Vec<_> = std::iter::from_fn(TemplateSlot::take).collect();
        assert!(seats.len() <= MAX_TEMPLATES);
        (0..=FORKS_BEFORE_TEMPLATE).for_each(|_| call(&warm));
        assert_eq!(template(&warm), None);
        drop(seats);
        call(&warm);
        assert!(template(&warm).is_some(), "there is room again");
    }

    #[test]
    fn a_template_that_was_killed_or_is_another_process_is_not_used() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(warm) = cat() else { return };
        let many = || (0..=FORKS_BEFORE_TEMPLATE).for_each(|_| call(&warm));
        many();
        let first = template(&warm).unwrap();
        kill_process(first, Signal::KILL).unwrap();
        // It may take a while to end.
        many();
        many();
        let second = template(&warm).unwrap();
        assert_ne!(first, second);
        // As in a fork of this process: the children of the template have another parent there.
        {
            let mut made = warm.standing.rest.origin.0.lock().unwrap();
            Arc::get_mut(made.template.as_mut().unwrap()).unwrap().process.1 += 1;
        }
        call(&warm);
        assert_eq!(template(&warm), None);
        assert!(test_kill_process(second).is_ok(), "it belongs to another process");
        kill_process(second, Signal::KILL).unwrap();
        many();
        assert!(template(&warm).is_some());
    }
}
