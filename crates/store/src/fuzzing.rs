//! Entry points of fuzz targets, under `cfg(fuzzing)` only.

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::format::json::{parse, weight};
use crate::format::layout::IndexJson;
use crate::format::manifest::{Config, Manifest};
use crate::format::map::{MapRun, Origin, PageMap};
use crate::turn::{JournalFile, Space};
use crate::{Access, Limits, OpenError, Sha256};

/// A JSON document of a store.
#[derive(Clone, Copy, Debug)]
pub enum JsonDocument {
    /// `index.json`.
    Index,
    /// A manifest.
    Manifest,
    /// A configuration.
    Config,
}

/// Parses a document.
///
/// # Errors
/// [`OpenError`].
pub fn parse_json(document: JsonDocument, text: &[u8]) -> Result<(), OpenError> {
    match document {
        JsonDocument::Index => parse::<IndexJson>("`index.json`", text)?.check(),
        JsonDocument::Manifest => Manifest::parse(text).map(drop),
        JsonDocument::Config => parse::<Config>("the configuration", text)?.check(),
    }
}

/// The memory that a document is charged before it is parsed.
#[must_use]
pub fn json_weight(text: &[u8]) -> usize {
    weight(text)
}

/// A memory and a state after the turns of a journal.
#[derive(Debug)]
pub struct ReplayedJournal {
    space: Space,
    map: PageMap,
    turns: usize,
}

impl ReplayedJournal {
    /// Replays a journal of the manifest `base` on a snapshot of `pages` pages with this state.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn new(
        bytes: Vec<u8>,
        base: Sha256,
        (pages, state): (usize, Vec<u8>),
        limits: &Limits,
    ) -> Result<Self, OpenError> {
        let journal = JournalFile::parse(bytes, base)?;
        let mut space = Space::new(pages, state, limits)?;
        journal.replay(base, None, &Access::new().with_limits(*limits), &mut space)?;
        let origin = Origin::Layer { layer: 0, stored: 0 };
        let below = MapRun { pages: PageRange::new(0, pages), origin };
        let map = space.map(&PageMap::from_runs(pages, vec![below]))?;
        Ok(Self { space, map, turns: journal.turns() })
    }

    /// Turns of the journal.
    #[must_use]
    pub fn turns(&self) -> usize {
        self.turns
    }

    /// Pages of the memory.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.map.pages()
    }

    /// The guest's state.
    #[must_use]
    pub fn state(&self) -> &[u8] {
        self.space.state()
    }

    /// Page `page` of the memory. `base` reads a page of the snapshot.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn page(
        &self,
        page: usize,
        base: impl Fn(usize, &mut [u8]),
    ) -> Result<[u8; PAGE_SIZE], OpenError> {
        let mut made = [0; PAGE_SIZE];
        for run in self.map.within(PageRange::new(page, 1)) {
            match run.origin {
                Origin::Zero => {}
                Origin::Layer { stored, .. } => base(stored as usize, &mut made),
                Origin::Turn { page } => self.space.read(page, &mut made, |from, out| {
                    base(from, out);
                    Ok(())
                })?,
            }
        }
        Ok(made)
    }
}
