//! A snapshot that session turns follow on.
//!
//! Promises: an opened session is the snapshot after the last turn that was appended whole.

use std::path::PathBuf;

use afresh_sys::{PAGE_SIZE, PageRange};

use crate::layers::stack::group_bytes;
use crate::seal::access::Access;
use crate::turn::{Journal, JournalFile, JournalPlace, Space};
use crate::{Layer, OpenError, Origin, PageMap, SaveError, Snapshot};

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

/// The turns after a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turns {
    /// Number of turns.
    pub count: usize,
    /// Length of their file.
    pub bytes: u64,
}

impl SnapshotWithTurns {
    pub(crate) fn read(base: &Snapshot, path: PathBuf, access: &Access) -> Result<Self, OpenError> {
        if path.is_dir() {
            return Err(OpenError::RemoteJournal { journal: path });
        }
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
    /// The turns of a session after the layers; `None` if the snapshot is not a session.
    #[must_use]
    pub fn turns(&self) -> Option<Turns> {
        self.turned().map(|turned| turned.turns)
    }

    /// Digest of the last turn, which names what all of them made.
    pub(crate) fn turned_root(&self) -> Option<[u8; 32]> {
        self.turned().map(|turned| turned.last)
    }

    /// The journal of the session, for further turns; `None` if the snapshot is not a session.
    /// Appends fail once the name of the snapshot has another target.
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
