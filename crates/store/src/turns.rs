//! A snapshot that turns follow on: opening it, going on with it, and folding the turns into a layer.
//!
//! What it promises: whoever opens a session sees the snapshot after the last turn that was appended whole. Folding
//! changes nothing of what is seen; whoever is killed meanwhile leaves the turns or the layer.

use std::path::PathBuf;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::access::Access;
use crate::manifest::print;
use crate::open::open_snapshot;
use crate::save::write_memory;
use crate::shelf::Shelf;
use crate::turn::{Journal, JournalFile, JournalPlace, Space, new_journal_id};
use crate::{
    Encoding, OpenError, Origin, PageMap, SaveError, SaveOptions, Sha256, Snapshot, Store,
};

/// What the turns of a session made of a snapshot.
#[derive(Debug)]
pub(crate) struct Turned {
    pub(crate) space: Space,
    pub(crate) map: PageMap,
    /// The working set, as far as pages are where they were.
    pub(crate) set: Vec<PageRange>,
    place: JournalPlace,
    turns: Turns,
    last: [u8; 32],
}

/// The turns that follow on a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turns {
    /// How many.
    pub count: usize,
    /// Length of their file.
    pub bytes: u64,
}

impl Turned {
    pub(crate) fn read(base: &Snapshot, path: PathBuf, access: &Access) -> Result<Self, OpenError> {
        let file = JournalFile::read(&path, base.id()).map_err(|error| {
            // What was renamed meanwhile is looked up again; what is nowhere was copied without its turns.
            match error.is_missing_file() && path.parent().is_some_and(|dir| !dir.exists()) {
                true => OpenError::NoJournal { journal: path.display().to_string() },
                false => error,
            }
        })?;
        Self::of(base, &file, JournalPlace::File(path), access)
    }

    /// What the turns in `file`, which lie in `place`, made of `base`.
    pub(crate) fn of(
        base: &Snapshot,
        file: &JournalFile,
        place: JournalPlace,
        access: &Access,
    ) -> Result<Self, OpenError> {
        let mut space = Space::new(base.pages(), base.state().to_vec());
        let last = file.replay(base.id(), base.key(), access, &mut space)?;
        let limits = access.limits();
        let map = space.map(base.map(), limits)?;
        let filled = map.runs().iter().filter(|run| run.origin != Origin::Zero);
        let pages: u64 = filled.map(|run| run.pages.len as u64).sum();
        limits.check_content(pages.saturating_mul(PAGE_SIZE as u64))?;
        let all = PageRange::new(0, space.pages());
        let set = base.working_set().iter().filter_map(|run| run.intersect(all)).collect();
        let turns = Turns { count: file.turns(), bytes: file.len() };
        Ok(Self { space, map, set, place, turns, last })
    }
}

impl Snapshot {
    /// The turns of a session that follow on the layers; none for a snapshot that is no session's.
    #[must_use]
    pub fn turns(&self) -> Option<Turns> {
        self.turned().map(|turned| turned.turns)
    }

    /// Digest of the last turn, which names what all of them made.
    pub(crate) fn turned_root(&self) -> Option<[u8; 32]> {
        self.turned().map(|turned| turned.last)
    }

    /// The journal of the session, to go on with it. None for a snapshot that is no session's.
    ///
    /// # Errors
    /// [`SaveError::Io`].
    pub fn resume_turns(&self) -> Result<Option<Journal>, SaveError> {
        let Some(turned) = self.turned() else { return Ok(None) };
        let state = (turned.turns.bytes, turned.turns.count, turned.last);
        Journal::resume(turned.place.clone(), self.id(), self.key().cloned(), state).map(Some)
    }

    /// Reads pages that turns made, from number `page` of theirs on.
    pub(crate) fn read_turned(&self, page: usize, out: &mut [u8]) -> Result<(), OpenError> {
        let Some(turned) = self.turned() else { return Ok(()) };
        let base = self.base();
        let (pages, _) = out.as_chunks_mut::<PAGE_SIZE>();
        pages
            .iter_mut()
            .enumerate()
            .try_for_each(|(n, out)| turned.space.read(page + n, out, |at, out| base.read(at, out)))
    }

    /// Hands out runs of pages, read from where they are.
    pub(crate) fn read_each<E: From<OpenError>>(
        &self,
        runs: &[PageRange],
        mut each: impl FnMut(PageRange, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        const BATCH: usize = 512;
        let mut buffer = Vec::new();
        for run in runs {
            for first in (run.start..run.end()).step_by(BATCH) {
                let part = PageRange::new(first, BATCH.min(run.end() - first));
                buffer.resize(part.byte_len(), 0);
                self.read(part.start, &mut buffer)?;
                each(part, &buffer)?;
            }
        }
        Ok(())
    }

    /// The pages that turns changed or moved.
    fn turned_pages(&self) -> Vec<PageRange> {
        let base = self.base();
        let mut changed: Vec<PageRange> = Vec::new();
        for run in self.map().runs() {
            let below: Vec<_> = base.map().within(run.pages).collect();
            if below.len() == 1 && below[0] == *run {
                continue;
            }
            match changed.last_mut() {
                Some(last) if last.end() == run.pages.start => last.len += run.pages.len,
                _ => changed.push(run.pages),
            }
        }
        changed
    }
}

/// How turns are folded.
#[derive(Clone, Debug)]
pub struct FoldOptions {
    /// How pages are stored.
    pub encoding: Encoding,
    /// Layers that the result may have; a stack that would be higher becomes one.
    pub layers: usize,
    /// Sign the result.
    #[cfg(feature = "seal")]
    pub sign: Option<crate::seal::SigningKey>,
}

impl Default for FoldOptions {
    fn default() -> Self {
        Self {
            encoding: Encoding::Raw,
            layers: 8,
            #[cfg(feature = "seal")]
            sign: None,
        }
    }
}

/// Writes a snapshot with turns as one without, and returns digest and length of its manifest.
pub(crate) fn fold_into(
    shelf: &mut dyn Shelf,
    snapshot: &Snapshot,
    options: &FoldOptions,
) -> Result<(Sha256, u64), SaveError> {
    let base = snapshot.base();
    let as_delta = base.layers().len() < options.layers && snapshot.pages() >= base.pages();
    #[cfg_attr(not(feature = "seal"), allow(unused_mut, reason = "nothing seals it"))]
    let mut save = SaveOptions {
        state: snapshot.state().to_vec(),
        encoding: options.encoding,
        changed: as_delta.then(|| snapshot.turned_pages()),
        parent: as_delta.then_some(base),
        working_set: snapshot.working_set(),
        ..SaveOptions::new(snapshot.guest().clone())
    };
    #[cfg(feature = "seal")]
    {
        save.seal = snapshot.key().cloned();
        save.sign = options.sign.clone();
    }
    write_memory(shelf, snapshot, &save)
}

impl Store {
    /// Makes `name` mean `snapshot`, which is in this store, with turns to follow, and returns the journal to append
    /// them to.
    ///
    /// # Errors
    /// [`SaveError`] by cause; the name means then what it meant before.
    pub fn begin_turns(&self, name: &str, snapshot: &Snapshot) -> Result<Journal, SaveError> {
        if snapshot.turns().is_some() {
            return self.begin_turns(name, &self.folded(snapshot, &FoldOptions::default())?);
        }
        let _lock = self.lock_blobs()?;
        let id = new_journal_id()?;
        let manifest = print("the manifest", &snapshot.manifest().with_journal(Some(&id)))?;
        let (base, _) = self.shelf().put(manifest)?;
        let journal = Journal::create(self, &id, base, snapshot.key().cloned())?;
        self.tag(name, Some(base))?;
        Ok(journal)
    }

    /// The same memory and state as a snapshot without turns, which has no name yet: `gc` removes it unless it gets
    /// one.
    ///
    /// # Errors
    /// [`SaveError`] by cause.
    pub fn folded(
        &self,
        snapshot: &Snapshot,
        options: &FoldOptions,
    ) -> Result<Snapshot, SaveError> {
        if snapshot.turns().is_none() {
            return Ok(snapshot.clone());
        }
        let (id, _) = fold_into(&mut self.shelf(), snapshot, options)?;
        let mut access = Access::new().with_limits(*snapshot.limits());
        access = access.with_seal(snapshot.key().cloned());
        Ok(open_snapshot(self, id, &access)?)
    }
}
