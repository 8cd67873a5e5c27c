//! A snapshot that turns follow on: opening it, going on with it, and folding the turns into a
//! layer.
//!
//! Promises: an opened session is the snapshot after the last turn that was appended whole. Folding
//! does not change that; a writer that is killed during it leaves the turns or the layer.

use std::path::PathBuf;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::access::Access;
use crate::blob_sink::BlobSink;
use crate::manifest::print;
use crate::naming::Expected;
use crate::open::open_snapshot;
use crate::save::write_memory;
use crate::stack::group_bytes;
use crate::staging::Staging;
use crate::turn::{Journal, JournalFile, JournalPlace, Space, new_journal_id};
use crate::{
    Encoding, Layer, OpenError, Origin, PageMap, SaveError, SaveOptions, Sha256, Snapshot, Store,
};

/// The result of the turns of a session.
#[derive(Debug)]
pub(crate) struct SnapshotWithTurns {
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

impl SnapshotWithTurns {
    pub(crate) fn read(base: &Snapshot, path: PathBuf, access: &Access) -> Result<Self, OpenError> {
        let file = JournalFile::read(&path, base.id()).map_err(|error| {
            // A session that was renamed meanwhile is looked up again; one without the file was
            // copied without its turns.
            match error.is_missing_file() && path.parent().is_some_and(|dir| !dir.exists()) {
                true => OpenError::NoJournal { journal: path.display().to_string() },
                false => error,
            }
        })?;
        Self::of(base, &file, JournalPlace::File(path), access)
    }

    /// The result of applying the turns in `file`, which is at `place`, to `base`.
    pub(crate) fn of(
        base: &Snapshot,
        file: &JournalFile,
        place: JournalPlace,
        access: &Access,
    ) -> Result<Self, OpenError> {
        let limits = access.limits();
        let mut space = Space::new(base.pages(), base.state().to_vec(), limits)?;
        let last = file.replay(base.id(), base.key(), access, &mut space)?;
        let map = space.map(base.map())?;
        let filled = map.runs().iter().filter(|run| run.origin != Origin::Zero);
        let pages: u64 = filled.map(|run| run.pages.len as u64).sum();
        limits.check_content(pages.saturating_mul(PAGE_SIZE as u64))?;
        let below = space.bases().flat_map(|page| base.map().within(PageRange::new(page, 1)));
        let below: u64 =
            below.map(|run| group_bytes(base.layers(), [&run])).fold(0, u64::saturating_add);
        let groups = below.saturating_add(group_bytes(base.layers(), map.runs()));
        let blobs = base.layers().iter().map(Layer::size).fold(file.len(), u64::saturating_add);
        limits.check_groups(groups, blobs)?;
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

    /// The journal of the session, to append to it. None for a snapshot that is no session's.
    /// Appends fail once the name that the snapshot was opened by means something else.
    ///
    /// # Errors
    /// [`SaveError::Io`].
    pub fn resume_turns(&self) -> Result<Option<Journal>, SaveError> {
        let Some(turned) = self.turned() else { return Ok(None) };
        let SnapshotWithTurns { turns, last, ref space, .. } = *turned;
        let state = (turns.bytes, turns.count, last, space.cost());
        let place = (turned.place.clone(), self.opened_by().map(|(_, name)| name));
        Journal::resume(place, self.id(), self.key().cloned(), state).map(Some)
    }

    /// Reads pages that turns made, from number `page` on.
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
    pub(crate) fn turned_pages(&self) -> Vec<PageRange> {
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
    /// Layers that the result may have. A stack that would be higher is written whole: as one
    /// layer, or as four from 256 MiB on.
    pub layers: usize,
    /// Sign the result.
    #[cfg(feature = "seal")]
    pub sign: Option<crate::seal::SigningKey>,
}

impl Default for FoldOptions {
    fn default() -> Self {
        Self {
            encoding: Encoding::Raw,
            layers: 12,
            #[cfg(feature = "seal")]
            sign: None,
        }
    }
}

/// Writes a snapshot with turns as one without, and returns digest and length of its manifest.
pub(crate) fn fold_into(
    shelf: &mut dyn BlobSink,
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
    /// Makes `name` mean `snapshot`, wherever it was opened from, with turns to follow, and returns
    /// the journal to append them to. Blobs of it that the store lacks are copied from its open
    /// files.
    ///
    /// # Errors
    /// [`SaveError`] by cause; the name means then what it meant before.
    pub fn begin_turns(&self, name: &str, snapshot: &Snapshot) -> Result<Journal, SaveError> {
        let mut staging = self.stage()?;
        let plain = self.fold_here(&mut staging, snapshot, &FoldOptions::default())?;
        self.follow(&mut staging, name, &plain, Expected::Any)
    }

    /// Folds the turns of the session that `name` means and `journal` belongs to, and returns the
    /// journal that follows on the result. Every other name of the session means the result, too.
    ///
    /// # Errors
    /// [`SaveError::Moved`] when the name means something else, or the session has other turns than
    /// `journal`; [`SaveError`] by cause. The name means then what it meant before, and `journal`
    /// is as good as before.
    pub fn fold_turns(
        &self,
        name: &str,
        journal: &Journal,
        access: &Access,
        options: &FoldOptions,
    ) -> Result<Journal, SaveError> {
        let mut staging = self.stage()?;
        let id = journal.base();
        let session = match open_snapshot(self, id, access) {
            // `gc` removes a manifest without a name, and its journal.
            Err(error) if error.is_missing_file() => return Err(self.moved(name)),
            Err(OpenError::NoJournal { .. }) => return Err(self.moved(name)),
            opened => opened?,
        };
        if session.turned_root() != Some(journal.last()) {
            return Err(self.moved(name));
        }
        let plain = self.fold_here(&mut staging, &session, options)?;
        self.follow(&mut staging, name, &plain, Expected::Folded(id, journal.size()))
    }

    /// Names `snapshot`, which has no turns, with turns to follow.
    fn follow(
        &self,
        staging: &mut Staging,
        name: &str,
        snapshot: &Snapshot,
        expected: Expected,
    ) -> Result<Journal, SaveError> {
        self.keep(staging, snapshot)?;
        let id = new_journal_id()?;
        let manifest = print(&snapshot.manifest().with_journal(Some(&id)))?;
        let (base, _) = staging.put(manifest)?;
        let gate = staging.mark(&id)?;
        let journal = Journal::create(self, (&id, name), base, snapshot.key().cloned())?;
        drop(gate);
        let named = self.rename(name, Some(base), expected);
        if named.is_err()
            && let Some(path) = journal.path()
        {
            // Otherwise `gc` removes it.
            let _ = std::fs::remove_file(path);
        }
        named.map(|()| journal)
    }

    /// Copies the blobs of `snapshot` that are missing here from its open files.
    fn keep(&self, staging: &mut Staging, snapshot: &Snapshot) -> Result<(), SaveError> {
        for layer in snapshot.layers().iter().chain(snapshot.working_set_layer()) {
            staging.keep(layer)?;
        }
        let config = &snapshot.manifest().config;
        if !staging.has(config.digest("the manifest")?, config.size)? {
            staging.put(snapshot.config_blob()?)?;
        }
        Ok(())
    }

    /// The same memory and state as a snapshot without turns, which has no name yet: `gc` removes
    /// it unless it gets one.
    ///
    /// # Errors
    /// [`SaveError`] by cause.
    pub fn folded(
        &self,
        snapshot: &Snapshot,
        options: &FoldOptions,
    ) -> Result<Snapshot, SaveError> {
        // Until the result is open.
        let mut staging = self.stage()?;
        self.fold_here(&mut staging, snapshot, options)
    }

    /// As [`Store::folded`]; `staging` keeps the blobs of the result.
    pub(crate) fn fold_here(
        &self,
        staging: &mut Staging,
        snapshot: &Snapshot,
        options: &FoldOptions,
    ) -> Result<Snapshot, SaveError> {
        if snapshot.turns().is_none() {
            return Ok(snapshot.clone());
        }
        let (id, _) = fold_into(staging, snapshot, options)?;
        let mut access = Access::new().with_limits(*snapshot.limits());
        access = access.with_seal(snapshot.key().cloned());
        Ok(open_snapshot(self, id, &access)?)
    }
}
