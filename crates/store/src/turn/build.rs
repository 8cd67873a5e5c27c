//! Makes turns: equal parts are copied from the parent, and changes are stored in the shorter of
//! two forms.

use std::collections::HashMap;
use std::sync::Arc;

use afresh_sys::PAGE_SIZE;

use super::body::{COPY, PATCH, WHOLE_PAGE, ZERO};
use super::{Head, LEVEL, MAX_BODY, Turn, TurnError};
use crate::format::manifest::MAX_STATE;
use crate::{Limits, SaveError};

/// Bytes between two changes that are written with them, for a further run would take as many.
const BRIDGE: usize = 4;
/// Programs that are shorter are not compressed.
const MIN_COMPRESSED: usize = 512;
/// Bytes of a state that are looked up together.
const BLOCK: usize = 32;

/// Makes a turn, page by page, in order.
#[derive(Debug)]
pub struct TurnBuilder {
    before: usize,
    pages: usize,
    body: Vec<u8>,
    /// The last step, while it may become longer.
    open: OpenStep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenStep {
    None,
    Copy { from: usize, len: usize },
    Zero { len: usize },
}

pub(super) fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

impl TurnBuilder {
    /// Begins a turn of a memory that has `before` pages.
    #[must_use]
    pub fn new(before: usize) -> Self {
        Self { before, pages: 0, body: Vec::new(), open: OpenStep::None }
    }

    /// Pages made so far.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    fn close(&mut self) {
        match std::mem::replace(&mut self.open, OpenStep::None) {
            OpenStep::None => {}
            OpenStep::Copy { from, len } => {
                put(&mut self.body, (len as u64) << 2 | COPY);
                put(&mut self.body, from as u64);
            }
            OpenStep::Zero { len } => put(&mut self.body, (len as u64) << 2 | ZERO),
        }
    }

    /// The next `len` pages are those of the parent from `from` on.
    pub fn copy(&mut self, from: usize, len: usize) {
        if len == 0 {
            return;
        }
        self.pages += len;
        match &mut self.open {
            OpenStep::Copy { from: first, len: so_far } if *first + *so_far == from => {
                *so_far += len
            }
            _ => {
                self.close();
                self.open = OpenStep::Copy { from, len };
            }
        }
    }

    /// The next `len` pages are zero.
    pub fn zero(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        self.pages += len;
        match &mut self.open {
            OpenStep::Zero { len: so_far } => *so_far += len,
            _ => {
                self.close();
                self.open = OpenStep::Zero { len };
            }
        }
    }

    /// The next page is `now`; `was` is a page of the parent that it may be like, with its number.
    pub fn page(&mut self, was: Option<(usize, &[u8; PAGE_SIZE])>, now: &[u8; PAGE_SIZE]) {
        if let Some((from, was)) = was {
            if was == now {
                return self.copy(from, 1);
            }
            let runs = runs(was, now);
            let bytes: usize = runs.iter().map(|(_, len)| 4 + len).sum();
            if bytes < PAGE_SIZE {
                self.close();
                self.pages += 1;
                put(&mut self.body, (runs.len() as u64) << 2 | PATCH);
                put(&mut self.body, from as u64);
                let mut at = 0;
                for (start, len) in runs {
                    put(&mut self.body, (start - at) as u64);
                    put(&mut self.body, len as u64);
                    self.body.extend_from_slice(&now[start..start + len]);
                    at = start + len;
                }
                return;
            }
        }
        if now.iter().all(|byte| *byte == 0) {
            return self.zero(1);
        }
        self.close();
        self.pages += 1;
        put(&mut self.body, 1 << 2 | WHOLE_PAGE);
        self.body.extend_from_slice(now);
    }

    /// Ends the turn: the guest's state becomes `state`, and all of it follows on `parent`.
    ///
    /// # Errors
    /// [`SaveError::TooLarge`] above the limits of the format, [`SaveError::Compress`].
    pub fn finish(
        mut self,
        state_before: &[u8],
        state: &[u8],
        parent: [u8; 32],
    ) -> Result<Turn, SaveError> {
        self.close();
        let mut body = self.body;
        let most = |what, size: usize, limit: u64| match size as u64 > limit {
            true => Err(SaveError::TooLarge { what, size: size as u64, limit }),
            false => Ok(()),
        };
        most("a guest state", state.len(), MAX_STATE)?;
        make_state(&mut body, state_before, state);
        most("a turn", body.len(), MAX_BODY)?;
        let mut head = Head {
            zstd: false,
            before: self.before as u64,
            pages: self.pages as u64,
            state_before: state_before.len() as u64,
            state: state.len() as u64,
            body: body.len() as u64,
            stored: body.len() as u64,
            parent,
            root: [0; 32],
        };
        head.root = head.root_of(&body);
        let mut compressed = None;
        if body.len() > MIN_COMPRESSED {
            let shorter = zstd::bulk::compress(&body, LEVEL).map_err(SaveError::Compress)?;
            // Where it gains little it costs readers more.
            if shorter.len() + body.len() / 8 < body.len() {
                (head.zstd, head.stored) = (true, shorter.len() as u64);
                compressed = Some(shorter);
            }
        }
        let mut bytes = head.print();
        bytes.extend_from_slice(compressed.as_deref().unwrap_or(&body));
        let shape = super::body::parse(&body, &head).map_err(unsound)?;
        Ok(Turn { head, body: Arc::new(body), shape, bytes: bytes.into() })
    }
}

/// A turn that its own reader refuses: the builder got pages that the parent does not have.
fn unsound(error: TurnError) -> SaveError {
    SaveError::Source(std::io::Error::other(error))
}

impl Turn {
    /// The same turn on another parent that is equal: in another chain.
    #[must_use]
    pub fn onto(&self, parent: [u8; 32]) -> Self {
        let mut head = Head { parent, ..self.head.clone() };
        head.root = head.root_of(&self.body);
        let mut bytes = head.print();
        bytes.extend_from_slice(&self.bytes[super::HEADER..]);
        Self { head, bytes: bytes.into(), ..self.clone() }
    }

    /// As [`Turn::parse`], without limits: for one's own.
    ///
    /// # Errors
    /// [`TurnError`].
    pub fn own(bytes: &[u8]) -> Result<Self, TurnError> {
        Self::parse(bytes, &Limits::NONE)
    }
}

/// The runs of bytes in which two pages differ: where they begin and how long they are.
fn runs(was: &[u8; PAGE_SIZE], now: &[u8; PAGE_SIZE]) -> Vec<(usize, usize)> {
    const WORD: usize = 64;
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for at in (0..PAGE_SIZE).step_by(WORD) {
        if was[at..at + WORD] == now[at..at + WORD] {
            continue;
        }
        for byte in at..at + WORD {
            if was[byte] == now[byte] {
                continue;
            }
            match runs.last_mut() {
                Some((start, len)) if byte - (*start + *len) <= BRIDGE => *len = byte + 1 - *start,
                _ => runs.push((byte, 1)),
            }
        }
    }
    runs
}

/// Writes the program that makes `now` out of `was`. The common beginning and end are found by
/// comparing; the middle is looked up by blocks, since most of it has only moved.
fn make_state(body: &mut Vec<u8>, was: &[u8], now: &[u8]) {
    let prefix = same_start(was, now);
    let suffix = same_end(&was[prefix..], &now[prefix..]);
    let copy = |body: &mut Vec<u8>, from: usize, len: usize| {
        if len > 0 {
            put(body, (len as u64) << 1 | COPY);
            put(body, from as u64);
        }
    };
    let literal = |body: &mut Vec<u8>, bytes: &[u8]| {
        if !bytes.is_empty() {
            put(body, (bytes.len() as u64) << 1 | 1);
            body.extend_from_slice(bytes);
        }
    };
    copy(body, 0, prefix);
    let (old, end) = (&was[prefix..was.len() - suffix], now.len() - suffix);
    let blocks: HashMap<&[u8], usize> =
        old.chunks_exact(BLOCK).enumerate().map(|(n, block)| (block, n * BLOCK)).collect();
    // The part that is not written yet begins here.
    let mut from = prefix;
    let mut at = prefix;
    while at + BLOCK <= end && !blocks.is_empty() {
        let Some(found) = blocks.get(&now[at..at + BLOCK]) else {
            at += 1;
            continue;
        };
        let same = same_start(&old[*found..], &now[at..end]);
        literal(body, &now[from..at]);
        copy(body, prefix + found, same);
        at += same;
        from = at;
    }
    literal(body, &now[from..end]);
    copy(body, was.len() - suffix, suffix);
}

/// Length of the common prefix of both.
fn same_start(one: &[u8], two: &[u8]) -> usize {
    let pairs = one.chunks_exact(BLOCK).zip(two.chunks_exact(BLOCK));
    let whole = pairs.take_while(|(a, b)| a == b).count() * BLOCK;
    let rest = one[whole..].iter().zip(&two[whole..]);
    whole + rest.take_while(|(a, b)| a == b).count()
}

/// Length of the common suffix of both.
fn same_end(one: &[u8], two: &[u8]) -> usize {
    let pairs = one.rchunks_exact(BLOCK).zip(two.rchunks_exact(BLOCK));
    let whole = pairs.take_while(|(a, b)| a == b).count() * BLOCK;
    let (one, two) = (&one[..one.len() - whole], &two[..two.len() - whole]);
    let rest = one.iter().rev().zip(two.iter().rev());
    whole + rest.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A few numbers of chance.
    fn next(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }

    #[test]
    fn any_state_becomes_any_other() {
        let mut seed = 7;
        for round in 0..400 {
            let was: Vec<u8> =
                (0..next(&mut seed) % 700).map(|_| next(&mut seed) as u8 % 3).collect();
            let mut now = was.clone();
            for _ in 0..next(&mut seed) % 4 {
                let at = next(&mut seed) as usize % (now.len() + 1);
                match next(&mut seed) % 3 {
                    0 => now.truncate(at),
                    1 => now.insert(at, 9),
                    _ => now
                        .iter_mut()
                        .skip(at)
                        .take(5)
                        .for_each(|byte| *byte = byte.wrapping_add(1)),
                }
            }
            let turn = TurnBuilder::new(0).finish(&was, &now, [1; 32]).unwrap();
            let turn = Turn::own(turn.bytes()).unwrap();
            assert_eq!(turn.state(&was).unwrap(), now, "round {round}");
            let mut other = was.clone();
            other.push(0);
            assert_eq!(turn.state(&other), Err(TurnError::Parent));
        }
    }

    #[test]
    fn a_small_change_of_a_large_state_is_small() {
        let mut seed = 3;
        let was: Vec<u8> = (0..100_000).map(|_| next(&mut seed) as u8).collect();
        let mut now = was.clone();
        now[500] ^= 1;
        now.insert(40_000, 77);
        now[90_000] ^= 1;
        let turn = TurnBuilder::new(0).finish(&was, &now, [1; 32]).unwrap();
        assert_eq!(turn.state(&was).unwrap(), now);
        assert!(turn.bytes().len() < 500, "{}", turn.bytes().len());
    }

    #[test]
    fn a_page_is_patched_or_stored_whole_whichever_is_shorter() {
        let (mut seed, mut was) = (5, [0; PAGE_SIZE]);
        was.iter_mut().for_each(|byte| *byte = next(&mut seed) as u8);
        let mut near = was;
        near[17] ^= 1;
        near[4095] ^= 1;
        let mut far = was;
        far.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        let mut builder = TurnBuilder::new(3);
        builder.page(Some((2, &was)), &near);
        builder.page(Some((2, &was)), &far);
        builder.page(Some((2, &was)), &was);
        builder.page(Some((2, &was)), &[0; PAGE_SIZE]);
        builder.page(None, &far);
        let turn = builder.finish(b"", b"", [0; 32]).unwrap();
        assert_eq!((turn.pages(), turn.changed_pages()), (5, 3));
        let mut made: Vec<u8> = Vec::new();
        turn.pieces(|piece| {
            match piece {
                super::super::TurnPiece::Copy { from, len } => {
                    assert_eq!((from, len), (2, 1));
                    made.extend_from_slice(&was);
                }
                super::super::TurnPiece::Zero { len } => {
                    made.resize(made.len() + len * PAGE_SIZE, 0)
                }
                super::super::TurnPiece::Patch { from, patch } => {
                    assert_eq!(from, 2);
                    let mut page = was;
                    patch.apply(&mut page);
                    made.extend_from_slice(&page);
                }
                super::super::TurnPiece::Whole(bytes) => made.extend_from_slice(bytes),
            }
            Ok::<_, ()>(())
        })
        .unwrap();
        let expected: Vec<u8> = [near, far, was, [0; PAGE_SIZE], far].concat();
        assert!(made == expected);
        assert!(turn.bytes().len() < 2 * PAGE_SIZE + 200, "{}", turn.bytes().len());
    }
}
