//! The program of a turn: parsing, which checks every number before its use, and execution.
//!
//! Numbers are little-endian base 128 (LEB128). The steps that make the pages of the header come
//! first, and then those that make the state. Nothing follows.

use std::ops::Range;

use afresh_sys::PAGE_SIZE;
use afresh_sys::planted::{Bug, is};

use super::{Head, TurnError};

/// Tags of the steps of the pages: the lower two bits of their first number; the others are a
/// count.
pub(super) const COPY: u64 = 0;
pub(super) const ZERO: u64 = 1;
pub(super) const PATCH: u64 = 2;
pub(super) const WHOLE_PAGE: u64 = 3;

/// One step of the program of the pages. Ranges are positions in the program's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Pages of the parent.
    Copy { from: usize, len: usize },
    /// Pages of zeros.
    Zero { len: usize },
    /// A page of the parent, in which runs of bytes change.
    Patch { from: usize, runs: Range<usize> },
    /// Pages as they are.
    Whole { at: usize, len: usize },
}

/// Reads numbers and bytes from a place on.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

const TRUNCATED: TurnError = TurnError::Program("it ends in the middle of a step");

impl Reader<'_> {
    fn number(&mut self) -> Result<u64, TurnError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = *self.bytes.get(self.at).ok_or(TRUNCATED)?;
            self.at += 1;
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                break;
            }
            value |= part << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(TurnError::Program("a number is too long"))
    }

    /// Skips `len` bytes, and returns where they begin.
    fn skip(&mut self, len: u64) -> Result<usize, TurnError> {
        let left = (self.bytes.len() - self.at) as u64;
        if len > left {
            return Err(TRUNCATED);
        }
        let at = self.at;
        self.at += len as usize;
        Ok(at)
    }
}

/// A run of `len` from `from` on, inside of `all`.
fn inside(from: u64, len: u64, all: u64) -> Result<(), TurnError> {
    match from.checked_add(len) {
        Some(end) if end <= all => Ok(()),
        _ => Err(TurnError::Program("it takes over what the parent does not have")),
    }
}

/// Numbers that describe a parsed program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Where the steps of the state begin.
    pub(super) state_at: usize,
    /// Steps that make pages.
    pub(super) steps: u64,
    /// Steps among them that use pages of the parent.
    pub(super) lookups: u64,
    /// Steps that make the state.
    pub(super) state_steps: u64,
    /// Pages that are patched or stored whole.
    pub(super) changed: u64,
    /// Bytes of patches, with [`PATCH_OVERHEAD`] for each.
    pub(super) patches: u64,
    /// Maximum number of steps that use one page of the parent.
    pub(super) passes: u64,
}

/// Cost of a patch in addition to its bytes.
pub(super) const PATCH_OVERHEAD: u64 = 16;

/// Reads a step that makes pages out of a memory of `before` pages; returns it with the number of
/// these pages.
fn step(reader: &mut Reader<'_>, before: u64) -> Result<(Step, u64), TurnError> {
    let first = reader.number()?;
    let count = first >> 2;
    Ok(match first & 3 {
        COPY => {
            let from = reader.number()?;
            inside(from, count, before)?;
            (Step::Copy { from: from as usize, len: count as usize }, count)
        }
        ZERO => (Step::Zero { len: count as usize }, count),
        PATCH => {
            let from = reader.number()?;
            inside(from, 1, before)?;
            let at = reader.at;
            check_runs(reader, count)?;
            (Step::Patch { from: from as usize, runs: at..reader.at }, 1)
        }
        _ => {
            let bytes = count.checked_mul(PAGE_SIZE as u64).ok_or(TRUNCATED)?;
            let at = reader.skip(bytes)?;
            (Step::Whole { at, len: count as usize }, count)
        }
    })
}

/// The steps of a parsed program that make its pages, decoded one by one: a step takes more memory
/// than its bytes.
pub(super) struct Steps<'a> {
    reader: Reader<'a>,
    before: u64,
    left: u64,
}

impl<'a> Steps<'a> {
    pub(super) fn new(body: &'a [u8], head: &Head) -> Self {
        Self { reader: Reader { bytes: body, at: 0 }, before: head.before, left: head.pages }
    }
}

impl Iterator for Steps<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.left == 0 {
            return None;
        }
        // The program was parsed before.
        let (step, pages) = step(&mut self.reader, self.before).ok()?;
        self.left = self.left.saturating_sub(pages);
        Some(step)
    }
}

/// Checks the whole program.
pub(super) fn parse(body: &[u8], head: &Head) -> Result<Shape, TurnError> {
    let mut reader = Reader { bytes: body, at: 0 };
    let mut shape = Shape { passes: 1, ..Shape::default() };
    let mut made = 0;
    // The page behind the last one that the present pass uses.
    let mut used = 0;
    while made < head.pages {
        let (step, pages) = step(&mut reader, head.before)?;
        if pages == 0 || pages > head.pages - made {
            return Err(TurnError::Program("a step makes no page, or more than there are"));
        }
        made += pages;
        shape.steps += 1;
        let source = match step {
            Step::Copy { from, len } => Some((from, len)),
            Step::Patch { from, runs } => {
                shape.changed += 1;
                shape.patches += runs.len() as u64 + PATCH_OVERHEAD;
                Some((from, 1))
            }
            Step::Whole { len, .. } => {
                shape.changed += len as u64;
                None
            }
            Step::Zero { .. } => None,
        };
        if let Some((from, len)) = source {
            shape.lookups += 1;
            shape.passes += u64::from(from < used);
            used = from + len;
        }
    }
    shape.state_at = reader.at;
    let mut made = 0;
    while made < head.state {
        let (count, from) = state_step(&mut reader)?;
        if let Some(from) = from {
            inside(from, count, head.state_before)?;
        }
        if count == 0 || count > head.state - made {
            return Err(TurnError::Program("a step makes nothing of the state, or too much"));
        }
        made += count;
        shape.state_steps += 1;
    }
    if reader.at != body.len() {
        return Err(TurnError::Program("there are bytes after its end"));
    }
    Ok(shape)
}

/// A step of the state: its length, and where it is taken from in the state before, or the bytes
/// follow.
fn state_step(reader: &mut Reader<'_>) -> Result<(u64, Option<u64>), TurnError> {
    let first = reader.number()?;
    let count = first >> 1;
    if first & 1 == COPY {
        return Ok((count, Some(reader.number()?)));
    }
    reader.skip(count)?;
    Ok((count, None))
}

/// Checks that `count` runs are in a page, one behind the other.
fn check_runs(reader: &mut Reader<'_>, count: u64) -> Result<(), TurnError> {
    const OUTSIDE: TurnError = TurnError::Program("a patch reaches past the end of its page");
    let mut end = 0;
    for _ in 0..count {
        let (skip, len) = (reader.number()?, reader.number()?);
        let room = PAGE_SIZE as u64;
        if skip > room || len > room || len == 0 {
            return Err(OUTSIDE);
        }
        end += skip + len;
        if end > room {
            return Err(OUTSIDE);
        }
        reader.skip(len)?;
    }
    if count == 0 {
        return Err(TurnError::Program("a patch changes nothing"));
    }
    Ok(())
}

/// Applies runs that were checked.
pub(super) fn patch(body: &[u8], runs: Range<usize>, page: &mut [u8; PAGE_SIZE]) {
    let mut reader = Reader { bytes: &body[..runs.end], at: runs.start };
    let mut at = 0;
    while reader.at < runs.end {
        let run = (|| {
            let (skip, len) = (reader.number()?, reader.number()?);
            Ok::<_, TurnError>((skip as usize, len as usize, reader.skip(len)?))
        })();
        // They were parsed before.
        let Ok((skip, len, from)) = run else { return };
        at += skip;
        if is(Bug::Patch) && reader.at == runs.end {
            return;
        }
        page[at..at + len].copy_from_slice(&body[from..from + len]);
        at += len;
    }
}

/// The state that the program makes out of `before`, from byte `at` of the program on.
pub(super) fn state(
    body: &[u8],
    at: usize,
    before: &[u8],
    len: usize,
) -> Result<Vec<u8>, TurnError> {
    let mut reader = Reader { bytes: body, at };
    let mut state = Vec::with_capacity(len);
    while state.len() < len {
        let at = reader.at;
        let (count, from) = state_step(&mut reader)?;
        let count = count as usize;
        match from {
            Some(from) => {
                let part = before.get(from as usize..).and_then(|rest| rest.get(..count));
                state.extend_from_slice(part.ok_or(TurnError::Parent)?);
            }
            None => {
                debug_assert!(reader.at - at > count);
                state.extend_from_slice(&body[reader.at - count..reader.at]);
            }
        }
    }
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(bytes: &[u8]) -> Result<u64, TurnError> {
        Reader { bytes, at: 0 }.number()
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        assert_eq!(number(&[0x7f]), Ok(127));
        assert_eq!(number(&[0x80, 1]), Ok(128));
        let most = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        assert_eq!(number(&most), Ok(u64::MAX));
        number(&[0xff; 10]).unwrap_err();
        number(&[0x80; 12]).unwrap_err();
        number(&[0x80]).unwrap_err();
        number(&[]).unwrap_err();
    }
}
