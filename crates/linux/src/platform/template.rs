//! Templates: processes that show an image, and that others which show it are forked from.
//!
//! Mapping an image takes some hundred calls in each process; a fork copies the result of all. A
//! process still takes a fault for each page that it touches. A template is made for a state that
//! processes are made from again and again.
//!
//! Promises: no guest runs in a template, so its children contain no trace of one; at most
//! [`MAX_TEMPLATES`] templates exist; each is dropped with its state, and belongs to the process
//! that made it: a forked process makes new ones. If a template cannot be made, or was killed, a
//! process is made without.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use afresh_memory::Image;
use afresh_sys::{PerProcess, fork};

use super::control::Control;
use super::forker::{Forker, SpawnedProcess, ends};
use super::mapped_image::{MappedImage, reader};
use super::segments::Segments;
use super::{PlatformError, boot, zygote};

/// Templates of this process, at most.
const MAX_TEMPLATES: usize = 16;
/// Processes that are made of a state without a template.
const FORKS_BEFORE_TEMPLATE: u32 = 2;

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

/// A process that shows an image.
pub(crate) struct Template {
    process: SpawnedProcess,
    /// Other threads make a process without it, rather than wait.
    forker: Mutex<Forker>,
    /// The image that it shows, which must outlive it.
    image: Image,
    /// Whether a fork failed once. A later answer may belong to that one.
    failed: AtomicBool,
    _seat: TemplateSlot,
    generation: u32,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("pid", &self.process.pid).finish_non_exhaustive()
    }
}

impl Template {
    /// A template that shows `image`; `None` if that takes too many files or mappings.
    fn new(
        image: &Image,
        shown: &MappedImage,
        segments: &Segments,
        seat: TemplateSlot,
    ) -> Result<Option<Self>, PlatformError> {
        let Some((files, pieces)) = shown.pieces(segments) else { return Ok(None) };
        if pieces.len() > boot::PIECES {
            return Ok(None);
        }
        let mut control = Control::new()?;
        boot::write_template(&mut control, &pieces, &files);
        let (socket, theirs) =
            ends().map_err(|error| PlatformError::kernel("making a template", error))?;
        // The boot code maps the files privately and closes them before a guest is in the process.
        let mut lent = files.iter().map(|file| reader(file)).collect::<Result<Vec<_>, _>>()?;
        lent.push(theirs.as_fd());
        let process = zygote::start(&control, &lent)?;
        drop(theirs);
        let mut forker = Forker::new(process.pid, socket, control);
        forker.clock = process.clock;
        let template = Self {
            process,
            forker: Mutex::new(forker),
            image: image.clone(),
            failed: AtomicBool::new(false),
            _seat: seat,
            generation: fork::generation(),
        };
        let ready = template.forker.try_lock().map(|forker| forker.prepared(Forker::hear));
        ready.unwrap_or(Ok(())).map(|()| Some(template))
    }

    fn is_ours(&self) -> bool {
        self.generation == fork::generation()
    }

    /// Whether its children would be this process's, with its present IDs.
    fn is_useful(&self) -> bool {
        let user = self.forker.try_lock().map_or(true, |forker| forker.is_ours());
        let failed = self.failed.load(Ordering::Relaxed);
        self.is_ours() && user && !failed && !self.process.has_ended()
    }

    /// Forks a process that carries out the orders in `control`. Nothing if it is busy, or cannot.
    pub(super) fn fork(&self, control: &Control) -> Option<SpawnedProcess> {
        let forker = self.forker.try_lock().ok().filter(|_| self.is_ours())?;
        if self.failed.load(Ordering::Relaxed) {
            return None;
        }
        let born = forker.fork(control, &[]).ok();
        self.failed.store(born.is_none(), Ordering::Relaxed);
        born
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        if self.is_ours() {
            self.process.kill();
            let _ = self.process.wait();
        }
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
        let mut made = self.0.try_lock().ok()?;
        if made.template.as_ref().is_some_and(|template| !template.is_useful()) {
            *made = TemplateState::default();
        }
        if let Some(template) = &made.template {
            return Some(template.clone()).filter(|template| template.image.same(image));
        }
        made.processes = made.processes.saturating_add(1);
        if made.processes <= FORKS_BEFORE_TEMPLATE || made.refused || shown.is_coming() {
            return None;
        }
        let seat = TemplateSlot::take()?;
        made.template = Template::new(image, shown, segments, seat).ok().flatten().map(Arc::new);
        // A failure now is a failure later.
        made.refused = made.template.is_none();
        made.template.clone()
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
        made.template.as_ref().map(|template| template.process.pid)
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
            Arc::get_mut(made.template.as_mut().unwrap()).unwrap().generation += 1;
        }
        call(&warm);
        assert_eq!(template(&warm), None);
        assert!(test_kill_process(second).is_ok(), "it belongs to another process");
        kill_process(second, Signal::KILL).unwrap();
        many();
        assert!(template(&warm).is_some());
    }
}
