//! Turns: the changes of a session's memory and state since its last save, in runs of bytes.
//!
//! A turn is a short program that makes a memory from that of its parent: copied runs of pages,
//! zero pages, pages with patched runs of bytes, and whole pages if they are shorter. The guest's
//! own state is made in the same way. `docs/format.md` describes every byte.
//!
//! Promises: a turn applies to the parent that it names and to no other; a parsed program makes
//! exactly the pages and bytes of its header, copies only pages of the parent, and patches only
//! within a page. May break it: nothing outside.

mod body;
mod build;
mod cost;
mod frame;
mod grow;
mod journal;
mod naming_index;
#[cfg(feature = "remote")]
mod remote_journal;
mod space;

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;

use afresh_sys::PAGE_SIZE;

use crate::format::index::{MAX_PAGES, ZSTD_LEVEL};
use crate::format::manifest::MAX_STATE;
use crate::{Limits, TurnError};

pub(crate) use body::Step;
use body::{Shape, Steps};
pub use build::TurnBuilder;
pub(crate) use cost::ChainCost;
pub(crate) use frame::{CLOSING_LEN, closing as closing_frame, turn_name};
#[cfg(feature = "remote")]
pub(crate) use journal::{HEADER as JOURNAL_HEADER, MAX_JOURNAL};
pub use journal::{Journal, Signer};
pub(crate) use journal::{JournalFile, JournalPlace, new_id as new_journal_id};
#[cfg(feature = "remote")]
pub(crate) use remote_journal::{NAMED_FOR, RemoteJournal, TurnObjects};
pub(crate) use space::Space;

/// The header's first field.
const MAGIC: [u8; 8] = *b"AFRESHTN";
/// The version written.
const VERSION_1: u32 = 1;
/// Bytes of the header.
const HEADER: usize = 128;
/// Longest program, not compressed.
const MAX_BODY: u64 = 256 << 20;
/// Domain of the root digest.
const ROOT_CONTEXT: &str = "afresh 2026-11 turn version 1 root";
/// The largest window that a compressed program may ask for: 8 MiB, far above what is written.
const WINDOW: u32 = 23;
/// zstd level, as for pages.
const LEVEL: i32 = ZSTD_LEVEL;

/// A turn: parsed and checked, or made by a [`TurnBuilder`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Turn {
    head: Head,
    /// The program, not compressed.
    body: Arc<Vec<u8>>,
    shape: Shape,
    /// Header and program, as they are stored.
    bytes: Arc<[u8]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Head {
    zstd: bool,
    before: u64,
    pages: u64,
    state_before: u64,
    state: u64,
    body: u64,
    stored: u64,
    parent: [u8; 32],
    root: [u8; 32],
}

impl Head {
    fn parse(bytes: &[u8]) -> Result<Self, TurnError> {
        let Some(header) = bytes.get(..HEADER) else {
            return Err(TurnError::Truncated(bytes.len() as u64));
        };
        if header[..8] != MAGIC {
            return Err(TurnError::Magic);
        }
        let long =
            |at: usize| header[at..at + 4].iter().rev().fold(0, |n, b| n << 8 | u32::from(*b));
        let word =
            |at: usize| header[at..at + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        let digest = |at: usize| {
            let mut digest = [0; 32];
            digest.copy_from_slice(&header[at..at + 32]);
            digest
        };
        if long(8) != VERSION_1 {
            return Err(TurnError::Version(long(8)));
        }
        let head = Self {
            zstd: match long(12) {
                0 => false,
                1 => true,
                other => return Err(field("encoding", other.into())),
            },
            before: word(16),
            pages: word(24),
            state_before: word(32),
            state: word(40),
            body: word(48),
            stored: word(56),
            parent: digest(64),
            root: digest(96),
        };
        for (name, value, most) in [
            ("before", head.before, MAX_PAGES),
            ("pages", head.pages, MAX_PAGES),
            ("state_before", head.state_before, MAX_STATE),
            ("state", head.state, MAX_STATE),
            ("body", head.body, MAX_BODY),
        ] {
            if value > most {
                return Err(field(name, value));
            }
        }
        if head.stored != (bytes.len() - HEADER) as u64 {
            return Err(TurnError::Truncated(bytes.len() as u64));
        }
        if !head.zstd && head.stored != head.body {
            return Err(field("stored", head.stored));
        }
        Ok(head)
    }

    fn print(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&VERSION_1.to_le_bytes());
        out.extend_from_slice(&u32::from(self.zstd).to_le_bytes());
        let lengths =
            [self.before, self.pages, self.state_before, self.state, self.body, self.stored];
        lengths.iter().for_each(|length| out.extend_from_slice(&length.to_le_bytes()));
        out.extend_from_slice(&self.parent);
        out.extend_from_slice(&self.root);
        out
    }

    /// The digest of the turn in any encoding.
    fn root_of(&self, body: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
        for length in [self.before, self.pages, self.state_before, self.state, self.body] {
            hasher.update(&length.to_le_bytes());
        }
        hasher.update(&self.parent);
        hasher.update(body);
        hasher.finalize().into()
    }
}

/// Decompresses a program of `len` bytes. Room is made as bytes arrive, so that a wrong length
/// costs nothing.
fn decompress(stored: &[u8], len: u64) -> Result<Vec<u8>, TurnError> {
    const FIRST: usize = 64 << 10;
    let damaged = |_| TurnError::Decompress;
    let len = usize::try_from(len).map_err(|_| TurnError::Decompress)?;
    let mut decoder = zstd::stream::read::Decoder::with_buffer(stored).map_err(damaged)?;
    decoder.window_log_max(WINDOW).map_err(damaged)?;
    let mut body = Vec::new();
    while body.len() < len {
        let room = body.len().max(FIRST).min(len - body.len());
        body.reserve_exact(room);
        let read = decoder.by_ref().take(room as u64).read_to_end(&mut body).map_err(damaged)?;
        if read < room {
            return Err(TurnError::Decompress);
        }
    }
    match decoder.read(&mut [0]).map_err(damaged)? {
        0 => Ok(body),
        _ => Err(TurnError::Decompress),
    }
}

fn field(field: &'static str, value: u64) -> TurnError {
    TurnError::Field { field, value }
}

impl Turn {
    /// Parses a turn and checks it against its own root, within `limits`. Its user checks that it
    /// fits a parent.
    ///
    /// # Errors
    /// [`TurnError`].
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, TurnError> {
        let head = Head::parse(bytes)?;
        let limit = |error: crate::OpenError| TurnError::Limit(error.to_string());
        limits.check_memory(head.pages * PAGE_SIZE as u64).map_err(limit)?;
        limits.check_expansion(head.body, head.stored).map_err(limit)?;
        let stored = &bytes[HEADER..];
        let body = if head.zstd { decompress(stored, head.body)? } else { stored.to_vec() };
        // As with layers: a fuzzer cannot guess a digest.
        if head.root_of(&body) != head.root && !cfg!(fuzzing) {
            return Err(TurnError::Root);
        }
        let shape = body::parse(&body, &head)?;
        Ok(Self { head, body: Arc::new(body), shape, bytes: bytes.into() })
    }

    /// The turn as it is stored.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The digest of its parent.
    #[must_use]
    pub fn parent(&self) -> &[u8; 32] {
        &self.head.parent
    }

    /// Digest of the turn and its parent: it names the state that it makes.
    #[must_use]
    pub fn root(&self) -> &[u8; 32] {
        &self.head.root
    }

    /// Pages of the memory before.
    #[must_use]
    pub fn before(&self) -> usize {
        self.head.before as usize
    }

    /// Pages of the memory after.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.head.pages as usize
    }

    /// Pages that it changes.
    #[must_use]
    pub fn changed_pages(&self) -> usize {
        self.shape.changed as usize
    }

    /// The steps that make its pages.
    fn steps(&self) -> Steps<'_> {
        Steps::new(&self.body, &self.head)
    }

    /// Refuses a parent of another size.
    fn fits(&self, pages: usize, state: usize) -> Result<(), TurnError> {
        if self.head.before != pages as u64 || self.head.state_before != state as u64 {
            return Err(TurnError::Parent);
        }
        Ok(())
    }

    /// The guest's state after the turn, from that before it.
    ///
    /// # Errors
    /// [`TurnError::Parent`] for a state of another length, [`TurnError::Program`].
    pub fn state(&self, before: &[u8]) -> Result<Vec<u8>, TurnError> {
        self.fits(self.before(), before.len())?;
        body::state(&self.body, self.shape.state_at, before, self.head.state as usize)
    }

    /// Passes the parts of the memory after the turn to `take`, in order.
    ///
    /// # Errors
    /// Any error of `take`.
    pub fn pieces<E>(&self, mut take: impl FnMut(TurnPiece<'_>) -> Result<(), E>) -> Result<(), E> {
        for step in self.steps() {
            take(match step {
                Step::Copy { from, len } => TurnPiece::Copy { from, len },
                Step::Zero { len } => TurnPiece::Zero { len },
                Step::Patch { from, runs } => {
                    TurnPiece::Patch { from, patch: Patch { body: &self.body, runs } }
                }
                Step::Whole { at, len } => TurnPiece::Whole(&self.body[at..at + len * PAGE_SIZE]),
            })?;
        }
        Ok(())
    }
}

/// A part of the memory that a turn makes.
#[derive(Debug)]
pub enum TurnPiece<'a> {
    /// Pages of the memory before.
    Copy {
        /// The first.
        from: usize,
        /// How many.
        len: usize,
    },
    /// Pages of zeros.
    Zero {
        /// How many.
        len: usize,
    },
    /// A page of the memory before, changed.
    Patch {
        /// Which.
        from: usize,
        /// What changes.
        patch: Patch<'a>,
    },
    /// Pages as they are.
    Whole(&'a [u8]),
}

/// Runs of bytes that change a page.
#[derive(Clone, Debug)]
pub struct Patch<'a> {
    body: &'a [u8],
    runs: Range<usize>,
}

impl Patch<'_> {
    /// Changes `page`.
    pub fn apply(&self, page: &mut [u8; PAGE_SIZE]) {
        body::patch(self.body, self.runs.clone(), page);
    }
}

#[cfg(test)]
mod tests;
