//! Text that calls may be answered for inside, when its memory changes.

use std::ops::Range;

use crate::platform::{Process, has_trampolines, originals};
use crate::sentry::Sentry;
use crate::sentry::mm::layout::{Mapping, PAGE, READ_WRITE, pages};
use crate::sentry::mm::stub_calls::{Change, protect_call};
use crate::sentry::result::SyscallResult;

/// Bytes around a range that sites at its ends may have.
const AROUND: u64 = 16;

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

/// Has `change`, which makes `text` writable, bring its original bytes back.
pub(in crate::sentry) fn restore_text(
    process: &Process,
    text: &TextPart,
    change: &mut Change,
) -> SyscallResult<()> {
    let TextPart { range: text, mapping: whole, protection } = text;
    let start = text.start.saturating_sub(AROUND).max(whole.start);
    let end = text.end.saturating_add(AROUND).min(whole.end);
    let Some(bytes) = memory(process, start, (end - start) as usize)? else { return Ok(()) };
    let read = |at, len| memory(process, at, len).ok().flatten();
    for (site, original) in originals(&bytes, start, &read) {
        let last = site + original.len() as u64 - 1;
        for page in [site / PAGE * PAGE, last / PAGE * PAGE] {
            // A site may begin or end in a page that stays as it is.
            if !text.contains(&page) {
                change.before.push(protect_call(page, PAGE, READ_WRITE));
                change.after.push(protect_call(page, PAGE, *protection));
            }
        }
        change.fill.push((site, original));
    }
    Ok(())
}

impl Sentry {
    /// The parts of a range that may be twins of text, with their whole mappings and protections.
    pub(in crate::sentry) fn twins_in(&self, start: u64, len: u64) -> Vec<TextPart> {
        let Ok(range) = pages(start, len) else { return Vec::new() };
        let is_text = |m: &Mapping| {
            let access = m.protection as i32 & (libc::PROT_EXEC | libc::PROT_WRITE);
            access == libc::PROT_EXEC && m.origin.is_some()
        };
        let parts = self.state.layout.parts(&range).into_iter();
        let whole = |part: &Range<u64>| {
            self.state
                .layout
                .all()
                .map(|(whole, _)| whole)
                .find(|whole| whole.contains(&part.start))
        };
        let texts = parts.filter(|(_, m)| is_text(m));
        let text = |(range, m): (Range<u64>, Mapping)| {
            Some(TextPart { mapping: whole(&range)?, protection: m.protection, range })
        };
        texts.filter_map(text).collect()
    }

    /// Whether a range shows a part of a twin.
    pub(in crate::sentry) fn shows_twin(
        &self,
        process: &Process,
        start: u64,
        len: u64,
    ) -> SyscallResult<bool> {
        for TextPart { range: text, .. } in self.twins_in(start, len) {
            let Some(bytes) = memory(process, text.start, (text.end - text.start) as usize)? else {
                continue;
            };
            let read = |at, len| memory(process, at, len).ok().flatten();
            if has_trampolines(&bytes) || !originals(&bytes, text.start, &read).is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
