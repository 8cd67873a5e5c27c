//! A host process that runs guest processes: its mappings, its changes, and its return to a frozen
//! state.
//!
//! One made from a frozen state is watched from then on, and is reset. One that the guest has made
//! by a fork or for another program is not: it can be frozen, because its page map shows its
//! writes, and is made anew when a reset needs it.
//!
//! Promises: a freeze covers every byte; a restored process equals the frozen one, or is reported
//! as unusable.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use afresh_files::Node;
use afresh_memory::{
    Image, PAGE_SIZE, PageRange, RemoteError, RemoteSlot, Strategy, UnreportedPages,
};
use afresh_sys::planted::{self, Bug};

use crate::file_cache::MappedRange as Contents;
use crate::file_mappings::FileMappings;
use crate::frozen_state::{FrozenMemory, MemoryPart};
use crate::limits::Limits;
use crate::platform::{
    Call, Continuation, IMAGE, MappedImage, Origin, PlatformError, Process, Segment, Segments,
    StubCommands, Trap,
};
use crate::ranges::Ranges;
use crate::sentry::{Change, InsideAnswers, Layout, protect_call, unmap_call};
use crate::shared_memory_file::LiveMapping;
use crate::subprocess_memory::SubprocessMemory;

const PAGE: u64 = PAGE_SIZE as u64;
const READ: u64 = libc::PROT_READ as u64;
/// Minimum bytes of file contents that are frozen in place: shorter ones are copied, since each is
/// a mapping of every instance.
const LENT: u64 = 128 << 10;
/// Maximum images that the mappings of one process may show. Beyond that a new process is made.
const MAX_SHOWN_IMAGES: usize = 64;

/// A host process, and the changes to its memory map.
#[derive(Debug)]
pub(crate) struct Subprocess {
    pub(crate) process: Process,
    /// Changes of the memory map since the last reset.
    pub(crate) disturbed: Ranges,
    /// Ranges with another mapping than then.
    pub(crate) replaced: Ranges,
    /// The image that it shows, except where that was replaced, if it was made from a frozen state.
    pub(crate) base: Option<FrozenMemory>,
    /// Contents of files that it shows where its memory was replaced, and may show elsewhere.
    pub(crate) showing: FileMappings,
    /// Its mappings of live shared files.
    pub(crate) attached: Vec<LiveMapping>,
    /// PID of the process whose registers are in it.
    pub(crate) holds: u32,
    /// Whether code may have run in it since it was last frozen or reset.
    pub(crate) ran: bool,
    /// The state that it was last frozen as, or reset to.
    last: Option<FrozenMemory>,
    /// The slot that resets it to its base.
    held: Option<PreparedMemory>,
    /// Images that its mappings may show because those of its parent did, which must outlive them.
    inherited: Vec<Image>,
    /// The call that waits in the kernel, while other processes run.
    pub(crate) parked: Option<Call>,
    /// The calls that are answered inside.
    pub(crate) inside: InsideAnswers,
}

/// Data of watched memory.
#[derive(Debug)]
struct PreparedMemory {
    slot: RemoteSlot,
    /// Images that the mappings may show, which must outlive them: the first whole, and of later
    /// ones the mapped pages once the process stands on another.
    shown: Vec<Image>,
    /// Pages that are mapped of the last image, unless it is the first: each once, however often
    /// resets map it.
    mapped: Ranges,
    /// The image that the window shows, if that is no more the base's. A checkpoint leaves the
    /// window as it is, because only resets and rollbacks read it, and few follow a checkpoint.
    window: Option<Image>,
    plain: bool,
}

impl PreparedMemory {
    /// Keeps `image` for mappings of its `pages`.
    fn keep(&mut self, image: &Image, pages: impl Iterator<Item = PageRange>) {
        let mut pages = pages.peekable();
        if pages.peek().is_none() {
            return;
        }
        if !self.shown.last().is_some_and(|last| last.same(image)) {
            self.shown.push(image.clone());
        }
        if self.shown.len() > 1 {
            pages.for_each(|run| self.mapped.insert(run.start as u64..run.end() as u64));
        }
    }

    /// The process stands on another image from now on. Pages of the last one that were not mapped
    /// are not kept: the process has a private copy of each, or the new image shares it.
    fn leave_image(&mut self) {
        self.plain = false;
        let mapped = std::mem::take(&mut self.mapped);
        if let Some(last) = self.shown.last_mut().filter(|_| !mapped.is_empty()) {
            let run = |pages: Range<u64>| {
                PageRange::new(pages.start as usize, (pages.end - pages.start) as usize)
            };
            *last = last.restricted_to(&mapped.iter().map(run).collect::<Vec<_>>());
        }
    }
}

/// The contents of a part of memory: populated pages, and file contents that can be shown in place.
struct WrittenPages {
    all: Ranges,
    lent: Vec<(Range<u64>, Contents)>,
}

impl WrittenPages {
    /// From populated pages `held`, private pages `own`, and file contents.
    fn new(
        contents: Vec<(Range<u64>, Contents)>,
        held: Vec<Range<u64>>,
        own: &[Range<u64>],
    ) -> Self {
        let mut all = Ranges::default();
        // Whether or not a page of contents is there it has them.
        let shown = contents.iter().map(|(part, _)| part.clone());
        held.into_iter().chain(shown).for_each(|part| all.insert(part));
        let lent = contents.into_iter().flat_map(|(part, contents)| {
            let mut left = Ranges::default();
            left.insert(part.clone());
            if !planted::is(Bug::Borrowed) {
                own.iter().for_each(|own| left.remove(own.clone()));
            }
            let cut: Vec<_> = left.iter().filter(|cut| cut.end - cut.start >= LENT).collect();
            cut.into_iter().map(move |cut| (cut.clone(), contents.from(cut.start - part.start)))
        });
        Self { all, lent: lent.collect() }
    }
}

/// Differences of a frozen state from the image before, by pages.
#[derive(Default)]
struct CapturedPages {
    placed: Vec<PageRange>,
    lent: Vec<(usize, Image)>,
    gone: Vec<PageRange>,
}

impl CapturedPages {
    /// Records the pages found in `range`; in the gaps between them, the parts in `blank` are
    /// dropped.
    fn take(
        &mut self,
        segments: &Segments,
        range: Range<u64>,
        found: WrittenPages,
        blank: impl Fn(Range<u64>) -> Vec<Range<u64>>,
    ) -> Result<(), PlatformError> {
        let mut at = range.start;
        let mut copied = found.all.clone();
        for held in found.all.iter().chain(std::iter::once(range.end..range.end)) {
            self.gone.extend(segments.pages_of(blank(at..held.start).into_iter()));
            at = held.end;
        }
        for (range, contents) in found.lent {
            let image = contents.image(range.end - range.start).map_err(|e| failed(e.into()))?;
            let pages = segments.pages_of(std::iter::once(range.clone()));
            self.lent.extend(pages.first().map(|run| (run.start, image)));
            copied.remove(range);
        }
        self.placed.extend(segments.pages_of(copied.iter()));
        Ok(())
    }

    fn sort(&mut self) {
        self.placed.sort_unstable_by_key(|run| run.start);
        self.gone.sort_unstable_by_key(|run| run.start);
        self.lent.sort_unstable_by_key(|(first, _)| *first);
    }

    fn differing(&self) -> UnreportedPages<'_> {
        UnreportedPages { placed: &self.placed, borrowed: &self.lent, gone: &self.gone }
    }
}

/// Converts an error of a slot or its owner.
fn failed(error: RemoteError<PlatformError>) -> PlatformError {
    match error {
        RemoteError::Owner(error) => error,
        other => {
            PlatformError::kernel("resetting memory", std::io::Error::other(other.to_string()))
        }
    }
}

/// The orders that copy `pages` back.
fn copies(pages: &[PageRange], segments: &Segments) -> StubCommands {
    let copy = |part: Segment| [part.start, IMAGE + part.page * PAGE, part.len];
    let copies = pages.iter().flat_map(|run| segments.showing(*run)).map(copy).collect();
    StubCommands { copies, wipe: true, ..StubCommands::default() }
}

impl Subprocess {
    /// Takes a call to the stub, if it waits in the kernel.
    pub(crate) fn detach(&mut self, call: &Call) -> Result<(), PlatformError> {
        match call.place {
            Trap::Kernel(id) => self.process.detach(id),
            Trap::Stub => Ok(()),
        }
    }

    /// A process that shows nothing.
    pub(crate) fn new(process: Process, holds: u32) -> Self {
        Self {
            process,
            disturbed: Ranges::default(),
            replaced: Ranges::default(),
            base: None,
            showing: FileMappings::default(),
            attached: Vec::new(),
            holds,
            ran: true,
            last: None,
            held: None,
            inherited: Vec::new(),
            parked: None,
            inside: InsideAnswers::default(),
        }
    }

    /// The fork `process` of this one, for the guest process `holds`.
    pub(crate) fn forked(&self, process: Process, holds: u32) -> Self {
        let shown = self.held.iter().flat_map(|held| held.shown.iter().chain(&held.window));
        Self {
            replaced: self.replaced.clone(),
            base: self.base.clone(),
            showing: self.showing.clone(),
            attached: self.attached.clone(),
            inherited: self.inherited.iter().chain(shown).cloned().collect(),
            ..Self::new(process, holds)
        }
    }

    /// A new process that is as `ground` was; from `origin`, where that has a template of it.
    pub(crate) fn new_process(
        ground: &FrozenMemory,
        limits: &Limits,
        origin: Option<&Origin>,
    ) -> Result<Self, PlatformError> {
        let part = &ground.part;
        let shown = MappedImage::ahead(&ground.image)?;
        let template =
            origin.and_then(|origin| origin.template(&ground.image, &shown, &part.segments));
        // Processes that are replaced show no pages of earlier runs.
        let template = template.filter(|from| !limits.replaced || !from.has_working_set());
        let mut process = Process::new(Some((&shown, &part.segments)), template.as_deref())?;
        process.set_registers(&part.registers);
        let slot =
            RemoteSlot::new(&ground.image, limits.strategy, limits.write_set).map_err(failed)?;
        let held = Some(PreparedMemory {
            slot,
            shown: vec![ground.image.clone()],
            mapped: Ranges::default(),
            window: None,
            plain: true,
        });
        let base = Some(ground.clone());
        let new = Self::new(process, part.holds);
        Ok(Self { ran: false, base: base.clone(), last: base, held, ..new })
    }

    /// Whether it can be reset.
    pub(crate) fn is_watched(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.shown.len() < MAX_SHOWN_IMAGES)
    }

    /// Whether it stands on `ground`, and its mappings show no other image.
    pub(crate) fn shows_only(&self, ground: &FrozenMemory) -> bool {
        let alone = self.held.as_ref().is_some_and(|held| held.shown.len() == 1);
        alone && self.inherited.is_empty() && self.base.as_ref().is_some_and(|b| b.same(ground))
    }

    /// Pages that a reset copies back.
    pub(crate) fn write_set_len(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.slot.write_set_len())
    }

    /// Runs `read` while unreadable memory is readable.
    fn opened<T>(
        &mut self,
        closed: &[Segment],
        work: impl FnOnce(&mut Self) -> Result<T, PlatformError>,
    ) -> Result<T, PlatformError> {
        if closed.is_empty() {
            return work(self);
        }
        let change = |open: bool| {
            let order = |part: &Segment| {
                protect_call(part.start, part.len, if open { READ } else { part.protection })
            };
            Change { before: closed.iter().map(order).collect(), ..Change::default() }
        };
        self.enact(change(true), Continuation::Ask)?;
        let done = work(self)?;
        self.enact(change(false), Continuation::Ask)?;
        Ok(done)
    }

    fn hands<'a>(
        &'a mut self,
        segments: &'a Segments,
    ) -> Option<(&'a mut RemoteSlot, SubprocessMemory<'a>)> {
        let held = self.held.as_mut()?;
        let hands = SubprocessMemory { process: &mut self.process, segments, plain: held.plain };
        Some((&mut held.slot, hands))
    }

    /// Maps the image of `ground` at `ranges`, and unmaps ranges that it does not have. It unmaps
    /// them all, also where the sentry knows of no mapping. The pages of the image that are there.
    fn map_back(
        &mut self,
        ground: &FrozenMemory,
        ranges: &Ranges,
    ) -> Result<Vec<PageRange>, PlatformError> {
        let calls = ranges.iter().map(|r| unmap_call(r.start, r.end - r.start)).collect();
        ranges.iter().for_each(|range| self.process.forget(range));
        let orders = StubCommands { calls, ..StubCommands::default() };
        self.process.execute(&orders, Continuation::Ask)?;
        let segments = &ground.part.segments;
        let parts: Vec<Segment> = ranges.iter().flat_map(|range| segments.within(range)).collect();
        let shown = self.process.with_missing_content(&ground.image)?;
        self.process.show(&shown, &parts)?;
        ranges.iter().for_each(|range| self.showing.remove(range));
        if let Some(held) = &mut self.held {
            let with_pages = parts.iter().filter(|part| part.has_pages());
            held.keep(&ground.image, with_pages.map(Segment::pages));
        }
        Ok(segments.pages_of(ranges.iter()))
    }

    /// Has the window show `to`. It shows the image that a checkpoint left there, or else `base`.
    fn show_in_window(&mut self, base: &Image, to: &FrozenMemory) -> Result<(), PlatformError> {
        let left = self.held.as_ref().and_then(|held| held.window.as_ref());
        let differing = left.unwrap_or(base).differing(&to.image);
        let pages = to.part.segments.pages();
        self.process.show_window(&MappedImage::new(&to.image)?, &differing, pages)?;
        if let Some(held) = &mut self.held {
            held.window = None;
        }
        Ok(())
    }

    /// It is as `ground`, once its orders are carried out.
    fn stands_on(&mut self, ground: FrozenMemory) {
        if !planted::is(Bug::Register) {
            self.process.set_registers(&ground.part.registers);
        }
        self.inside.forget(&mut self.process);
        self.holds = ground.part.holds;
        self.last = Some(ground.clone());
        self.base = Some(ground);
        self.ran = false;
    }

    /// Brings everything but the write set back, and returns the orders that copy that.
    pub(crate) fn restore(&mut self) -> Result<StubCommands, PlatformError> {
        let Some(ground) = self.base.clone() else { return Err(PlatformError::Lost) };
        let segments = &ground.part.segments;
        self.process.look_for_content();
        let mut disturbed = std::mem::take(&mut self.disturbed);
        if planted::is(Bug::Mapping) {
            disturbed = Ranges::default();
        }
        self.replaced = Ranges::default();
        let fresh = match disturbed.is_empty() {
            true => Vec::new(),
            false => self.map_back(&ground, &disturbed)?,
        };
        if self.held.as_ref().is_some_and(|held| held.window.is_some()) && !planted::is(Bug::Window)
        {
            self.show_in_window(&ground.image, &ground)?;
        }
        let Some((slot, mut hands)) = self.hands(segments) else { return Err(PlatformError::Lost) };
        slot.forget(&fresh);
        let pages = slot.reset(&mut hands).map_err(failed)?;
        let orders = copies(pages, segments);
        self.stands_on(ground);
        Ok(orders)
    }

    /// Goes to `to`, and stands on that from then on.
    pub(crate) fn move_to(&mut self, to: &FrozenMemory) -> Result<(), PlatformError> {
        let Some(from) = self.base.take() else { return Err(PlatformError::Lost) };
        let (old, new) = (&from.part.segments, &to.part.segments);
        let differing = from.image.differing(&to.image);
        // Changed mappings, and read-only pages that differ.
        let mut moved = std::mem::take(&mut self.disturbed);
        self.replaced = Ranges::default();
        old.missing_in(new).chain(new.missing_in(old)).for_each(|s| moved.insert(s.range()));
        for part in differing.iter().flat_map(|run| new.showing(*run)) {
            if !part.allows(libc::PROT_WRITE) {
                moved.insert(part.range());
            }
        }
        if let Some(held) = &mut self.held {
            held.leave_image();
        }
        let mut fresh = self.map_back(to, &moved)?;
        // Writes there are not noticed any more.
        fresh.extend(old.pages_of(moved.iter()));
        self.show_in_window(&from.image, to)?;
        let Some((slot, mut hands)) = self.hands(new) else { return Err(PlatformError::Lost) };
        let pages = slot.switch(&mut hands, &to.image, &fresh).map_err(failed)?;
        let orders = copies(pages, new);
        self.stands_on(to.clone());
        self.process.execute(&orders, Continuation::Ask)
    }

    /// Its present content, of process `memory` with this layout, without the shared memory of the
    /// files `live`. With `moves` it stands on that from then on, if it is watched.
    pub(crate) fn freeze(
        &mut self,
        memory: u32,
        layout: &Layout,
        live: &BTreeSet<Node>,
        moves: bool,
    ) -> Result<FrozenMemory, PlatformError> {
        if self.parked.is_some() {
            // Its registers are in the kernel.
            return Err(PlatformError::Lost);
        }
        let last = self.last.as_ref().filter(|_| !self.ran);
        if let Some(last) = last.filter(|last| !last.part.segments.show_shares(layout, live)) {
            return Ok(last.clone());
        }
        let (registers, holds) = (self.process.registers(), self.holds);
        let part = |segments| Arc::new(MemoryPart { memory, holds, segments, registers });
        if self.held.is_some() {
            return self.freeze_watched(layout, live, moves, part);
        }
        let before = self.last.clone().or_else(|| self.base.clone());
        let empty = || (Image::zero(0), Segments::default());
        let (image, old) = before
            .map_or_else(empty, |ground| (ground.image.clone(), ground.part.segments.clone()));
        let segments = old.place(layout.own_mappings(live));
        // Private pages, and unpopulated ones without an image.
        let mut taken = CapturedPages { gone: segments.without(&old), ..CapturedPages::default() };
        for part in segments.iter().filter(|part| part.has_pages()) {
            let own = self.process.private(part.range())?;
            let found = WrittenPages::new(self.contents(part.range()), own.clone(), &own);
            taken.take(&segments, part.range(), found, |range| self.blank(range))?;
        }
        // Pages that the image before does not have are zero.
        let had = PageRange::new(0, image.pages());
        taken.gone = taken.gone.iter().filter_map(|run| run.intersect(had)).collect();
        taken.sort();
        let closed =
            segments.iter().filter(|part| part.has_pages() && !part.allows(libc::PROT_READ));
        let closed: Vec<_> = closed.copied().collect();
        let image = self.opened(&closed, |body| {
            let mut slot = RemoteSlot::new(&image, Strategy::Auto, usize::MAX).map_err(failed)?;
            let process = &mut body.process;
            let mut hands = SubprocessMemory { process, segments: &segments, plain: false };
            slot.freeze(&mut hands, segments.pages(), &taken.differing()).map_err(failed)
        })?;
        let ground = FrozenMemory { image, part: part(segments) };
        self.last = Some(ground.clone());
        self.ran = false;
        Ok(ground)
    }

    fn freeze_watched(
        &mut self,
        layout: &Layout,
        live: &BTreeSet<Node>,
        moves: bool,
        part: impl FnOnce(Segments) -> Arc<MemoryPart>,
    ) -> Result<FrozenMemory, PlatformError> {
        let Some(base) = self.base.clone() else { return Err(PlatformError::Lost) };
        let old = &base.part.segments;
        let segments = old.place(layout.own_mappings(live));
        let disturbed = self.disturbed.clone();
        // Later mappings and changes: populated pages, and the unpopulated ones of new memory.
        let mut taken = CapturedPages { gone: segments.without(old), ..CapturedPages::default() };
        let changed = |range| segments.within(range).filter(Segment::has_pages);
        for part in disturbed.iter().flat_map(changed) {
            let held = self.process.populated(part.range())?;
            let contents = self.contents(part.range());
            let own = match contents.is_empty() {
                true => Vec::new(),
                false => self.process.private(part.range())?,
            };
            let found = WrittenPages::new(contents, held, &own);
            taken.take(&segments, part.range(), found, |range| self.blank(range))?;
        }
        taken.sort();
        let closed: Vec<_> = disturbed
            .iter()
            .flat_map(changed)
            .filter(|part| !part.allows(libc::PROT_READ))
            .collect();
        // Their writes were not noticed, or will be noticed anew, or they may not be written any
        // more. Some pages have no owner now, and others have another owner.
        let mut renewed = old.pages_of(disturbed.iter());
        renewed.extend(segments.pages_of(disturbed.iter()));
        let image = self.opened(&closed, |body| {
            let pages = segments.pages();
            let Some((slot, mut hands)) = body.hands(&segments) else {
                return Err(PlatformError::Lost);
            };
            if !moves {
                return slot.freeze(&mut hands, pages, &taken.differing()).map_err(failed);
            }
            slot.forget(&renewed);
            let image = slot.checkpoint(&mut hands, pages, &taken.differing()).map_err(failed)?;
            // Writes just before they changed are reported only now.
            slot.forget(&renewed);
            Ok(image)
        })?;
        let ground = FrozenMemory { image, part: part(segments) };
        if moves {
            // Later mappings belong to the state now: writes to them must be noticed from here on.
            self.disturbed = Ranges::default();
            self.replaced = Ranges::default();
            let parts = disturbed.iter().flat_map(|range| ground.part.segments.within(range));
            for part in parts.filter(|part| part.allows(libc::PROT_WRITE)) {
                self.process.watch(part.range())?;
            }
            if let Some(held) = &mut self.held {
                held.leave_image();
                held.window.get_or_insert_with(|| base.image.clone());
            }
            self.base = Some(ground.clone());
            self.last = Some(ground.clone());
            self.ran = false;
        }
        Ok(ground)
    }

    /// Compares all readable memory with its base: returns the compared bytes, or the first
    /// difference.
    pub(crate) fn compare(&mut self) -> Result<Result<u64, u64>, PlatformError> {
        let Some(ground) = self.base.clone() else { return Err(PlatformError::Lost) };
        let segments = &ground.part.segments;
        // Unreadable memory is unchanged, or its protection would have changed.
        let readable = segments.iter().filter(|segment| segment.allows(libc::PROT_READ));
        let mut pages: Vec<_> = readable.map(Segment::pages).collect();
        pages.sort_unstable_by_key(|run| run.start);
        let Some((slot, mut hands)) = self.hands(segments) else { return Err(PlatformError::Lost) };
        Ok(match slot.verify(&mut hands, &pages).map_err(failed)? {
            None => Ok(pages.iter().map(|run| run.byte_len() as u64).sum()),
            Some(page) => {
                let mut at = segments.showing(PageRange::new(page, 1));
                Err(at.next().map_or(0, |part| part.start))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_resets_map_again_are_kept_once() {
        let images = [Image::zero(64), Image::zero(64)];
        let slot = RemoteSlot::new::<PlatformError>(&images[0], Strategy::Auto, usize::MAX);
        let slot = slot.unwrap();
        let (shown, mapped) = (vec![images[0].clone()], Ranges::default());
        let mut held = PreparedMemory { slot, shown, mapped, window: None, plain: false };
        for _ in 0..1000 {
            let runs = [PageRange::new(3, 2), PageRange::new(9, 4), PageRange::new(5, 1)];
            held.keep(&images[1], runs.into_iter());
            assert_eq!(held.mapped.iter().collect::<Vec<_>>(), [3..6, 9..13]);
        }
        assert!(held.shown.len() == 2 && held.shown[1].same(&images[1]));
    }
}
