//! Changes of the memory map of a guest process: orders to its stub, calls that the guest makes
//! itself, and shared mappings of live files.
//!
//! Promises: the mappings of the process are those of the layout; each change is noted for the next
//! reset. May break it: a call of the guest that the kernel refuses, which [`Subprocess::may_make`]
//! rules out.

use std::ops::Range;
use std::sync::Arc;

use afresh_sys::planted::{self, Bug};

use crate::file_cache::MappedRange as Contents;
use crate::platform::{
    Call, Continuation, PlatformError, Segment, StubCommands, is_memory_accounted,
};
use crate::ranges::Ranges;
use crate::sentry::{Change, Content, PAGE, StubCall};
use crate::shared_memory_file::LiveMapping;
use crate::subprocess::Subprocess;

/// Memory files that a process is lent at a time.
const LENT_FILES: usize = 32;

/// The call that closes a descriptor.
fn close_call(descriptor: u64) -> StubCall {
    [libc::SYS_close as u64, descriptor, 0, 0, 0, 0, 0]
}

/// Consecutive changes in steps. The ranges within a step are disjoint. A later change
/// replaces an earlier one where they overlap, as `MAP_FIXED` does.
fn disjoint_steps(changes: Vec<Change>) -> Vec<Vec<Change>> {
    let (mut steps, mut step, mut covered) = (Vec::new(), Vec::new(), Ranges::default());
    for change in changes {
        let overlaps = change.ranges().any(|range| !covered.within(range).is_empty());
        if overlaps && !planted::is(Bug::Overlap) {
            steps.push(std::mem::take(&mut step));
            covered = Ranges::default();
        }
        change.ranges().for_each(|range| covered.insert(range));
        step.push(change);
    }
    steps.push(step);
    steps
}

impl Subprocess {
    /// Notes orders that are carried out next. Returns the ranges that show no contents of files
    /// any more.
    fn note<'a>(&mut self, orders: impl Iterator<Item = &'a StubCall>) -> Vec<Range<u64>> {
        let mut gone = Vec::new();
        for order in orders {
            let range = order[1]..order[1] + order[2];
            let kind = order[0] as i64;
            if kind == libc::SYS_mmap || kind == libc::SYS_munmap {
                self.process.forget(range.clone());
                self.replaced.insert(range.clone());
                // The shown image must outlive the mapping.
                gone.push(range.clone());
            }
            for part in self.cut(&range) {
                if kind == libc::SYS_mprotect {
                    self.attached.push(LiveMapping { protection: order[3], ..part });
                }
            }
            self.attached.sort_unstable_by_key(|one| one.range.start);
            self.disturbed.insert(range);
        }
        gone
    }

    /// Whether the guest's own call, which waits in the kernel, may be made in place of the orders
    /// of `change`: they are that call, or have its effect, and the kernel cannot refuse it. So the
    /// mappings are what the layout says.
    pub(crate) fn may_make(&mut self, call: &Call, change: &Change) -> bool {
        let Change { before, content: None, fill, copies, after } = change else { return false };
        let ([order], [], [], []) = (&before[..], &fill[..], &copies[..], &after[..]) else {
            return false;
        };
        let [number, start, len, protection, ..] = *order;
        let is_it = |number: i64| {
            call.number == number
                && call.args[0] == start
                && call.args[1].checked_next_multiple_of(PAGE) == Some(len)
        };
        let same = match number as i64 {
            libc::SYS_munmap => is_it(libc::SYS_munmap),
            libc::SYS_mprotect => {
                let executes = protection & libc::PROT_EXEC as u64 != 0;
                // A security module may refuse the one, and accounting of memory the other.
                is_it(libc::SYS_mprotect)
                    && call.args[2] == protection
                    && !executes
                    && !is_memory_accounted()
            }
            // New memory is that which was discarded, unless the kernel would bring a file's
            // content back.
            libc::SYS_mmap => {
                let range = start..start + len;
                let own = match &self.base {
                    Some(_) => self.replaced.within(range.clone()) == [range.clone()],
                    None => true,
                };
                is_it(libc::SYS_madvise) && own && self.showing.within(range).is_empty()
            }
            _ => false,
        };
        same && self.process.has_room_for_mappings()
    }

    /// Has the guest make its own call `id` in place of the only order of `change`.
    pub(crate) fn let_make(&mut self, id: u64, change: &Change) -> Result<(), PlatformError> {
        let gone = self.note(change.before.iter());
        self.process.let_make(id)?;
        gone.into_iter().for_each(|range| self.showing.remove(range));
        Ok(())
    }

    /// Puts a change of the layout into effect, while the stub waits for orders.
    pub(crate) fn enact(
        &mut self,
        change: Change,
        then: Continuation,
    ) -> Result<(), PlatformError> {
        self.enact_all(vec![change], then)
    }

    /// Puts changes of the layout into effect in their order, while the stub waits for orders.
    pub(crate) fn enact_all(
        &mut self,
        changes: Vec<Change>,
        then: Continuation,
    ) -> Result<(), PlatformError> {
        let mut steps = disjoint_steps(changes);
        let last = steps.pop().unwrap_or_default();
        steps.into_iter().try_for_each(|step| self.enact_step(step, Continuation::Ask))?;
        self.enact_step(last, then)
    }

    /// Puts changes into effect together, no two of one range: all mappings are made first, then
    /// filled, and protected at last.
    fn enact_step(
        &mut self,
        changes: Vec<Change>,
        then: Continuation,
    ) -> Result<(), PlatformError> {
        let (mut new, mut gone, mut filled, mut after) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut first = StubCommands::default();
        let mut lent: Vec<(Contents, u64)> = Vec::new();
        for change in changes {
            gone.extend(self.note(change.before.iter().chain(&change.after)));
            first.calls.extend(change.before);
            first.copies.extend(change.copies);
            filled.extend(change.fill);
            after.extend(change.after);
            match change.content {
                Some((start, Content::Shown(shown, len, protection))) => {
                    self.note_mapped(start..start + len);
                    let known = lent.iter().find(|(other, _)| other.shares_file(&shown));
                    let descriptor = match known {
                        Some((_, descriptor)) => *descriptor,
                        None => {
                            let descriptor = self.process.lend(shown.file()?)?;
                            lent.push((shown.clone(), descriptor));
                            descriptor
                        }
                    };
                    first.calls.push(shown.order(start, len, protection, descriptor));
                    new.push((start..start + len, shown));
                }
                Some((start, Content::Shared(memory, offset, len, protection))) => {
                    let range = start..start + len;
                    self.note_mapped(range.clone());
                    let attachment = LiveMapping { range, protection, offset, memory };
                    let descriptor = self.process.lend(attachment.memory.file())?;
                    first.calls.push(attachment.order(descriptor));
                    first.calls.push(close_call(descriptor));
                    gone.push(attachment.range.clone());
                    self.attached.push(attachment);
                    self.attached.sort_unstable_by_key(|one| one.range.start);
                }
                Some((start, Content::Bytes(content))) => filled.push((start, content)),
                Some((_, Content::Copied(_))) => unreachable!("it is put into effect in parts"),
                None => {}
            }
        }
        first.calls.extend(lent.iter().map(|(_, descriptor)| close_call(*descriptor)));
        // With nothing to fill or to copy before them, the last calls need no further question.
        if filled.is_empty() && first.copies.is_empty() {
            first.calls.append(&mut after);
        }
        let whole = filled.is_empty() && after.is_empty();
        self.process.execute(&first, if whole { then } else { Continuation::Ask })?;
        gone.into_iter().for_each(|range| self.showing.remove(range));
        new.into_iter().for_each(|(range, shown)| self.showing.insert(range, shown));
        if whole {
            return Ok(());
        }
        filled.iter().try_for_each(|(address, bytes)| self.fill(*address, bytes))?;
        if after.is_empty() && then == Continuation::Ask {
            // The stub waits for orders already.
            return Ok(());
        }
        self.process.execute(&StubCommands { calls: after, ..StubCommands::default() }, then)
    }

    /// Writes the first bytes of a mapping.
    pub(crate) fn fill(&mut self, address: u64, bytes: &[u8]) -> Result<(), PlatformError> {
        if self.process.write(address, bytes)? {
            return Ok(());
        }
        let error = std::io::Error::from_raw_os_error(libc::ENOMEM);
        Err(PlatformError::kernel("filling a mapping of a file", error))
    }

    /// Notes that `range` is about to show a file.
    fn note_mapped(&mut self, range: Range<u64>) {
        self.process.forget(range.clone());
        self.cut(&range);
        self.replaced.insert(range.clone());
        self.disturbed.insert(range);
    }

    /// Takes the parts in `range` out of the mappings of live files.
    fn cut(&mut self, range: &Range<u64>) -> Vec<LiveMapping> {
        let (mut cut, mut kept) = (Vec::new(), Vec::new());
        for one in std::mem::take(&mut self.attached) {
            if !one.overlaps(range) {
                kept.push(one);
                continue;
            }
            let Range { start, end } = one.range;
            let before = (start < range.start).then(|| one.part(start..range.start));
            let behind = (range.end < end).then(|| one.part(range.end..end));
            kept.extend(before.into_iter().chain(behind));
            cut.push(one.part(start.max(range.start)..end.min(range.end)));
        }
        self.attached = kept;
        cut
    }

    /// Makes the mappings of live files `wanted`, while the stub waits for orders.
    pub(crate) fn attach(&mut self, wanted: Vec<LiveMapping>) -> Result<(), PlatformError> {
        if self.attached == wanted {
            return Ok(());
        }
        self.unpark()?;
        // A mapping that no layout has any more must not outlive the next reset.
        let mut strays = Ranges::default();
        let gone = self.attached.iter().filter(|one| !wanted.contains(one));
        gone.for_each(|one| strays.insert(one.range.clone()));
        wanted.iter().for_each(|one| strays.remove(one.range.clone()));
        for stray in strays.iter() {
            self.disturbed.insert(stray.clone());
            self.replaced.insert(stray);
        }
        let mut calls = Vec::new();
        let mut lent: Vec<(&LiveMapping, u64)> = Vec::new();
        for attachment in wanted.iter().filter(|wanted| !self.attached.contains(wanted)) {
            let file = |other: &LiveMapping| Arc::ptr_eq(&other.memory, &attachment.memory);
            let descriptor = match lent.iter().find(|(other, _)| file(other)) {
                Some((_, descriptor)) => *descriptor,
                None => {
                    let descriptor = self.process.lend(attachment.memory.file())?;
                    lent.push((attachment, descriptor));
                    descriptor
                }
            };
            let range = &attachment.range;
            self.process.forget(range.clone());
            self.showing.remove(range.clone());
            let base = self.base.as_ref().map(|base| &base.part.segments);
            if base.is_some_and(|base| base.within(range.clone()).next().is_some()) {
                self.disturbed.insert(range.clone());
                self.replaced.insert(range.clone());
            }
            calls.push(attachment.order(descriptor));
            if lent.len() == LENT_FILES {
                calls.extend(lent.drain(..).map(|(_, descriptor)| close_call(descriptor)));
                let calls = std::mem::take(&mut calls);
                self.process.execute(
                    &StubCommands { calls, ..StubCommands::default() },
                    Continuation::Ask,
                )?;
            }
        }
        calls.extend(lent.drain(..).map(|(_, descriptor)| close_call(descriptor)));
        let orders = StubCommands { calls, ..StubCommands::default() };
        self.process.execute(&orders, Continuation::Ask)?;
        self.attached = wanted;
        Ok(())
    }

    /// Has the next reset unmap all mappings of live files but the `wanted` ones. It also unmaps
    /// those in ranges that were changed since, which [`attach`](Self::attach) makes again.
    pub(crate) fn disturb_strays(&mut self, wanted: &[LiveMapping]) {
        let disturbed = &self.disturbed;
        let stays = |one: &LiveMapping| {
            wanted.contains(one) && disturbed.within(one.range.clone()).is_empty()
        };
        let (kept, strays) = self.attached.drain(..).partition::<Vec<_>, _>(stays);
        self.attached = kept;
        for stray in strays {
            self.disturbed.insert(stray.range.clone());
            self.replaced.insert(stray.range);
        }
    }

    /// The parts of `range` that show contents of files.
    pub(crate) fn contents(&self, range: Range<u64>) -> Vec<(Range<u64>, Contents)> {
        let parts = match &self.base {
            Some(_) => self.replaced.within(range),
            // All that it shows was mapped since it began.
            None => vec![range],
        };
        parts.into_iter().flat_map(|part| self.showing.within(part)).collect()
    }

    /// The parts of `range` that show no image.
    pub(crate) fn blank(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut blank = Ranges::default();
        blank.insert(range.clone());
        if let Some(base) = &self.base {
            let shown = base.part.segments.within(range.clone()).filter(Segment::has_pages);
            shown.for_each(|part| blank.remove(part.range()));
            self.replaced.within(range).into_iter().for_each(|gone| blank.insert(gone));
        }
        blank.iter().collect()
    }
}
