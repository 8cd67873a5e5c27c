//! Text that calls may be answered for inside, when its memory changes.

use std::ops::Range;

use crate::platform::{CELL_LEN, Process, originals, trampoline_cells};
use crate::sentry::Sentry;
use crate::sentry::mm::layout::{Mapping, READ_WRITE, pages};
use crate::sentry::mm::stub_calls::{Change, protect_call};
use crate::sentry::result::SyscallResult;
use crate::text_twin::MAX_TWIN_MAPPING;

/// Texts that one call may change. Each is read whole.
const MAX_TEXTS: usize = 8;

/// A part of a mapping that may be the twin of a text.
pub(in crate::sentry) struct TextPart {
    range: Range<u64>,
    /// The whole mapping, and its protection.
    mapping: Range<u64>,
    protection: u64,
}

/// Memory of a process; `None` where it cannot be read.
fn memory(process: &Process, at: u64, len: usize) -> SyscallResult<Option<Vec<u8>>> {
    let mut bytes = vec![0; len];
    Ok(process.read(at, &mut bytes)?.then_some(bytes))
}

/// Has `change`, which makes `text` writable, bring the original bytes of its whole mapping back: a
/// program may write where the trampolines of other sites are.
pub(in crate::sentry) fn restore_text(
    process: &Process,
    text: &TextPart,
    change: &mut Change,
) -> SyscallResult<()> {
    let TextPart { range, mapping, protection } = text;
    let len = (mapping.end - mapping.start) as usize;
    let Some(bytes) = memory(process, mapping.start, len)? else { return Ok(()) };
    let read = |at, len| memory(process, at, len).ok().flatten();
    let cells: Vec<_> = trampoline_cells(&bytes).collect();
    if cells.is_empty() {
        return Ok(());
    }
    let sites = originals(&bytes, mapping.start, &read);
    if sites.is_empty() {
        return Ok(());
    }
    for rest in [mapping.start..range.start, range.end..mapping.end] {
        if !rest.is_empty() {
            let len = rest.end - rest.start;
            change.before.push(protect_call(rest.start, len, READ_WRITE));
            change.after.push(protect_call(rest.start, len, *protection));
        }
    }
    change.fill.extend(sites);
    change.fill.extend(
        cells.into_iter().map(|at| (mapping.start + at as u64, vec![0; CELL_LEN as usize])),
    );
    Ok(())
}

impl Sentry {
    /// The parts of a range that may be twins of text, with their whole mappings and protections.
    /// None where texts are mapped as they are.
    pub(in crate::sentry) fn twins_in(&self, start: u64, len: u64) -> Vec<TextPart> {
        let Some(range) = pages(start, len).ok().filter(|_| self.contents.shows_twins) else {
            return Vec::new();
        };
        let is_text = |m: &Mapping| {
            let access = m.protection as i32 & (libc::PROT_EXEC | libc::PROT_WRITE);
            access == libc::PROT_EXEC && m.origin.is_some()
        };
        let parts = self.state.layout.parts(&range).into_iter();
        let whole =
            |part: &Range<u64>| self.state.layout.mapping_at(part.start).map(|(whole, _)| whole);
        let texts = parts.filter(|(_, m)| is_text(m));
        let text = |(range, m): (Range<u64>, Mapping)| {
            Some(TextPart { mapping: whole(&range)?, protection: m.protection, range })
        };
        let is_short = |text: &TextPart| text.mapping.end - text.mapping.start <= MAX_TWIN_MAPPING;
        texts.take(MAX_TEXTS).filter_map(text).filter(is_short).collect()
    }

    /// Whether a range is a part of one twin, and has bytes of the twin that differ from the file.
    pub(in crate::sentry) fn shows_twin(
        &self,
        process: &Process,
        start: u64,
        len: u64,
    ) -> SyscallResult<bool> {
        let texts = self.twins_in(start, len);
        let [TextPart { range: text, .. }] = &texts[..] else { return Ok(false) };
        if pages(start, len).ok().as_ref() != Some(text) {
            return Ok(false);
        }
        let len = (text.end - text.start) as usize;
        let Some(bytes) = memory(process, text.start, len)? else { return Ok(false) };
        let read = |at, len| memory(process, at, len).ok().flatten();
        let has_cells = trampoline_cells(&bytes).next().is_some();
        Ok(has_cells || !originals(&bytes, text.start, &read).is_empty())
    }
}
