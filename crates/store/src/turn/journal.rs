//! Journals: the turns of a session in order, in a local store as one file, in an object store as
//! one object each.
//!
//! A snapshot for every turn would cost three files and their directories. So the name of a session
//! is that of a snapshot which refers to the turns in this journal. A turn is one appending write
//! and one `fdatasync`, or one request.
//!
//! Promises: a turn that was appended is on disk. A writer that is killed at any moment leaves all
//! turns that were appended before, and the last one whole or not at all. Turns are checked when
//! they are read: each names the one before by its digest, and the first names the snapshot.
//!
//! May break it: a journal whose last turns were cut off on purpose is the same session, earlier.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use afresh_sys::crash::{point, synced};

use super::cost::MAX_CHAIN;
#[cfg(feature = "remote")]
use super::frame::closing;
use super::frame::{ALIGN, CHECK, FRAME, SIGNED, check, head};
use super::naming_index::NamingIndex;
#[cfg(feature = "remote")]
use super::remote_journal::{RemoteJournal, UnansweredTurn};
use super::space::check_parent;
use super::{ChainCost, Head, Space, Turn, TurnError};
use crate::blobs::file::read_bounded;
use crate::disk::os::{FileExt, open_regular};
use crate::disk::temporary::{new_dir, sync_dir, write_synced};
use crate::format::blob::BytesBlob;
use crate::format::descriptor::JOURNALS;
use crate::format::digest::to_hex;
use crate::seal::SealKey;
use crate::seal::access::Access;
use crate::{OpenError, SaveError, Sha256};

const MAGIC: [u8; 8] = *b"AFRESHJN";
const VERSION_1: u32 = 1;
/// Bytes of the header.
pub(crate) const HEADER: usize = 64;
/// A public key and a signature.
const SIGNATURE: usize = 96;
/// Longest journal that is read.
pub(crate) const MAX_JOURNAL: u64 = 512 << 20;

/// A journal's bytes, and where its whole turns end.
pub(crate) struct JournalFile {
    bytes: Vec<u8>,
    frames: Vec<Frame>,
    end: usize,
}

struct Frame {
    signature: Option<std::ops::Range<usize>>,
    turn: std::ops::Range<usize>,
}

fn header(base: Sha256) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION_1.to_le_bytes());
    header[16..48].copy_from_slice(&base.0);
    header
}

impl JournalFile {
    /// Reads the journal at `path`, which belongs to the manifest `base`.
    pub(crate) fn read(path: &Path, base: Sha256) -> Result<Self, OpenError> {
        let bytes = read_bounded(path, "the journal of the session", MAX_JOURNAL)?;
        Self::parse(bytes, base)
    }

    /// Puts a journal together whose frames were kept apart, and says whether it is closed. Each
    /// frame is whole or damaged.
    #[cfg(feature = "remote")]
    pub(crate) fn of_frames(frames: &[Vec<u8>], base: Sha256) -> Result<(Self, bool), OpenError> {
        let (frames, closed) = match frames.split_last() {
            Some((last, turns)) if *last == closing(&base, turns.len()) => (turns, true),
            _ => (frames, false),
        };
        let this = Self::parse([&header(base)[..], &frames.concat()].concat(), base)?;
        match this.turns() == frames.len() {
            true => Ok((this, closed)),
            false => Err(OpenError::Turn { number: this.turns(), source: TurnError::Root }),
        }
    }

    /// Whether the header of `file` names the manifest `base`.
    pub(crate) fn is_of(file: &File, base: Sha256) -> bool {
        let mut found = [0; HEADER];
        file.read_exact_at(&mut found, 0).is_ok() && found == header(base)
    }

    pub(crate) fn parse(bytes: Vec<u8>, base: Sha256) -> Result<Self, OpenError> {
        let bad = |source| OpenError::Turn { number: 0, source };
        let Some(found) = bytes.get(..HEADER) else {
            return Err(bad(TurnError::Truncated(bytes.len() as u64)));
        };
        if found[..8] != MAGIC {
            return Err(bad(TurnError::Magic));
        }
        let version = found[8..12].iter().rev().fold(0, |n, b| n << 8 | u32::from(*b));
        if version != VERSION_1 {
            return Err(bad(TurnError::Version(version)));
        }
        if found != header(base) {
            return Err(bad(TurnError::Parent));
        }
        let mut this = Self { bytes, frames: Vec::new(), end: HEADER };
        while let Some((frame, end)) = this.frame(base)? {
            this.frames.push(frame);
            this.end = end;
        }
        Ok(this)
    }

    /// The next frame, if all of it is there: a writer that was killed may leave a part of one at
    /// the end.
    fn frame(&self, base: Sha256) -> Result<Option<(Frame, usize)>, OpenError> {
        let number = self.frames.len();
        let damaged = OpenError::Turn { number, source: TurnError::Root };
        let (at, left) = (self.end, &self.bytes[self.end..]);
        let Some(found) = left.first_chunk::<FRAME>().filter(|found| **found != [0; FRAME]) else {
            return Ok(None);
        };
        let len = u32::from_le_bytes([found[0], found[1], found[2], found[3]]);
        let what = found[4];
        // As with layers: a fuzzer cannot guess a digest.
        if *found != head(&base, number, len, what) && !cfg!(fuzzing) {
            return Err(damaged);
        }
        let signature = if what == SIGNED { SIGNATURE } else { 0 };
        let (turn, len) = (at + FRAME + signature, len as usize);
        let end = turn + len;
        let next = (end + CHECK).next_multiple_of(ALIGN);
        if next > self.bytes.len() {
            return Ok(None);
        }
        let sum = check(&base, number, &self.bytes[at..end]);
        if self.bytes[end..end + CHECK] != sum && !cfg!(fuzzing) {
            // Bytes after it were written after all of it.
            return if next == self.bytes.len() { Ok(None) } else { Err(damaged) };
        }
        let signature = (signature > 0).then_some(at + FRAME..turn);
        Ok(Some((Frame { signature, turn: turn..end }, next)))
    }

    /// Applies the turns to `space`, on the terms of `access`, and returns the digest of the last.
    pub(crate) fn replay(
        &self,
        base: Sha256,
        key: Option<&SealKey>,
        access: &Access,
        space: &mut Space,
    ) -> Result<[u8; 32], OpenError> {
        // Its parents are checked below. It names all that came before, and the snapshot.
        if let Some(frame) = self.frames.last().filter(|_| access.demands_signature()) {
            let opened = self.unsealed(frame, key)?;
            let number = self.frames.len() - 1;
            let last = Head::parse(&opened).map_err(|source| OpenError::Turn { number, source })?;
            access.check_turn(&last.root, frame.signature.clone().map(|at| &self.bytes[at]))?;
        }
        let mut last = base.0;
        for (number, frame) in self.frames.iter().enumerate() {
            let bad = |source| OpenError::Turn { number, source };
            let bytes = self.unsealed(frame, key)?;
            // All programs are kept, so their sum counts, before the next is decompressed.
            space.expect(&Head::parse(&bytes).map_err(bad)?)?;
            let turn = Turn::parse(&bytes, access.limits()).map_err(bad)?;
            check_parent(&turn, &last).map_err(bad)?;
            space.apply(&turn)?;
            last = *turn.root();
        }
        space.finish()?;
        Ok(last)
    }

    /// The bytes of the turn in `frame`, decrypted with `key` if there is one.
    fn unsealed(&self, frame: &Frame, key: Option<&SealKey>) -> Result<Cow<'_, [u8]>, OpenError> {
        let stored = &self.bytes[frame.turn.clone()];
        match key {
            Some(key) => unseal(key, stored).map(Cow::Owned),
            None => Ok(Cow::Borrowed(stored)),
        }
    }

    /// Number of turns.
    pub(crate) fn turns(&self) -> usize {
        self.frames.len()
    }

    /// Bytes of whole turns and their frames.
    pub(crate) fn len(&self) -> u64 {
        self.end as u64
    }
}

fn unseal(key: &SealKey, stored: &[u8]) -> Result<Vec<u8>, OpenError> {
    let plain = key.open(Box::new(BytesBlob(stored.to_vec())))?;
    let mut bytes = vec![0; plain.len() as usize];
    let io = |e| OpenError::io(Path::new("a turn"), e);
    plain.read_at(&mut bytes, 0).map_err(io)?;
    Ok(bytes)
}

/// Where the turns of a session are.
#[derive(Clone, Debug)]
pub(crate) enum JournalPlace {
    File(PathBuf),
    #[cfg(feature = "remote")]
    Remote(RemoteJournal),
}

/// The file or the remote that frames are appended to.
#[derive(Debug)]
enum JournalBackend {
    File(FileJournal),
    #[cfg(feature = "remote")]
    Remote(RemoteJournal),
}

/// A journal's own file, in a store.
#[derive(Debug)]
struct FileJournal {
    file: File,
    path: PathBuf,
    index: NamingIndex,
}

impl FileJournal {
    fn new(file: File, path: PathBuf, name: Option<&str>) -> Self {
        let root = path.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        let index = NamingIndex::new(root, name);
        Self { file, path, index }
    }
}

/// The journal of a session, to append turns to.
#[derive(Debug)]
pub struct Journal {
    tape: JournalBackend,
    /// The manifest of its snapshot.
    base: Sha256,
    key: Option<SealKey>,
    end: u64,
    turns: usize,
    last: [u8; 32],
    cost: ChainCost,
}

impl Journal {
    /// A new journal in the store at `root`, empty and durable, of the manifest `base` that `name`
    /// will mean. Readers of the directory `blobs` may read it.
    pub(crate) fn create(
        (root, blobs): (&Path, &Path),
        (id, name): (&str, &str),
        base: Sha256,
        key: Option<SealKey>,
    ) -> Result<Self, SaveError> {
        let dir = root.join(JOURNALS);
        let path = dir.join(id);
        let io = |e| SaveError::io(&path, e);
        new_dir(&dir).map_err(io)?;
        let file = write_synced(&dir, &header(base), blobs).map_err(io)?;
        point();
        let file = file.persist_noclobber(&path).map_err(|e| io(e.error))?;
        sync_dir(&dir).and_then(|()| sync_dir(root)).map_err(io)?;
        let tape = JournalBackend::File(FileJournal::new(file, path, Some(name)));
        Ok(Self {
            tape,
            base,
            key,
            end: HEADER as u64,
            turns: 0,
            last: base.0,
            cost: ChainCost::new(),
        })
    }

    /// A new journal in a remote of the manifest `base`. Nothing is there until the first turn is.
    #[cfg(feature = "remote")]
    pub(crate) fn in_remote(journal: RemoteJournal, base: Sha256, key: Option<SealKey>) -> Self {
        let tape = JournalBackend::Remote(journal);
        Self { tape, base, key, end: HEADER as u64, turns: 0, last: base.0, cost: ChainCost::new() }
    }

    /// The journal of the manifest `base`, as it was read with these last turns, by `name` if by
    /// one.
    pub(crate) fn resume(
        (place, name): (JournalPlace, Option<&str>),
        base: Sha256,
        key: Option<SealKey>,
        (end, turns, last, cost): (u64, usize, [u8; 32], ChainCost),
    ) -> Result<Self, SaveError> {
        let tape = match place {
            JournalPlace::File(path) => {
                let file = open_regular(&path, OpenOptions::new().read(true).write(true));
                let file = file.map_err(|e| SaveError::io(&path, e))?;
                JournalBackend::File(FileJournal::new(file, path, name))
            }
            #[cfg(feature = "remote")]
            JournalPlace::Remote(journal) => JournalBackend::Remote(journal),
        };
        Ok(Self { tape, base, key, end, turns, last, cost })
    }

    /// Digest of the last turn, or of the snapshot: the parent of the next.
    #[must_use]
    pub fn last(&self) -> [u8; 32] {
        self.last
    }

    /// The manifest of its snapshot.
    #[must_use]
    pub fn base(&self) -> Sha256 {
        self.base
    }

    /// Number of turns.
    #[must_use]
    pub fn turns(&self) -> usize {
        self.turns
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.end
    }

    /// Bytes of all guest states that its turns make. Readers accept 1 GiB.
    #[must_use]
    pub fn states(&self) -> u64 {
        self.cost.states
    }

    /// Whether it approaches a limit of readers: time to fold it.
    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        #[cfg(feature = "remote")]
        if matches!(&self.tape, JournalBackend::Remote(journal) if journal.is_closed()) {
            return true;
        }
        self.cost.largest().1 >= MAX_CHAIN / 4 || self.end >= MAX_JOURNAL / 4
    }

    /// Refuses a value that readers would refuse.
    fn check_room(what: &'static str, size: u64, limit: u64) -> Result<(), SaveError> {
        if size > limit { Err(SaveError::TooLarge { what, size, limit }) } else { Ok(()) }
    }

    /// Its file, if it has one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.tape {
            JournalBackend::File(tape) => Some(&tape.path),
            #[cfg(feature = "remote")]
            JournalBackend::Remote(_) => None,
        }
    }

    /// Another writer continues from the same turn.
    fn moved(&self) -> SaveError {
        match &self.tape {
            JournalBackend::File(tape) => SaveError::Moved(tape.path.clone()),
            #[cfg(feature = "remote")]
            JournalBackend::Remote(journal) => journal.moved(),
        }
    }

    /// Appends a turn durably, and returns its bytes. It is signed if the journal has a key.
    ///
    /// # Errors
    /// [`SaveError::Moved`] when another writer has appended turns, or the name has another target;
    /// [`SaveError`] by cause. The session is saved then as it was before, or, if a remote gave no
    /// answer, with this turn: [`Journal::settle`] shows which.
    pub fn append(&mut self, turn: &Turn, sign: Option<&Signer<'_>>) -> Result<u64, SaveError> {
        self.settle()?;
        check_parent(turn, &self.last).map_err(|_| self.moved())?;
        let cost = self.cost.after(turn);
        let (_, bytes) = cost.largest();
        Self::check_room("the turns of a session (fold them)", bytes, MAX_CHAIN)?;
        let mut sealed = Vec::new();
        let stored = match &self.key {
            None => turn.bytes(),
            Some(key) => {
                let mut sealer = key.sealer()?;
                sealer.push(turn.bytes(), &mut sealed)?;
                sealer.finish(&mut sealed)?;
                &sealed
            }
        };
        let signature = sign.map(|sign| sign(turn.root())).transpose()?;
        let len = u32::try_from(stored.len()).map_err(|_| SaveError::TooLarge {
            what: "a turn",
            size: stored.len() as u64,
            limit: u32::MAX.into(),
        })?;
        let what = if signature.is_some() { SIGNED } else { 0 };
        let mut frame = head(&self.base, self.turns, len, what).to_vec();
        frame.extend_from_slice(signature.as_ref().map_or(&[], |bytes| &bytes[..]));
        frame.extend_from_slice(stored);
        let check = check(&self.base, self.turns, &frame);
        frame.extend_from_slice(&check);
        frame.resize(frame.len().next_multiple_of(ALIGN), 0);
        let len = frame.len() as u64;
        Self::check_room("the journal of a session (fold it)", self.end + len, MAX_JOURNAL)?;
        match &mut self.tape {
            JournalBackend::File(tape) => {
                let state = (self.base, self.end, self.turns);
                tape.write(state, &frame)?;
            }
            #[cfg(feature = "remote")]
            JournalBackend::Remote(journal) => {
                journal.put_next(UnansweredTurn { frame, root: *turn.root(), cost });
                self.settle()?;
                return Ok(len);
            }
        }
        self.end += len;
        self.turns += 1;
        self.cost = cost;
        self.last = *turn.root();
        Ok(len)
    }

    /// Repeats the last turn if a remote gave no answer to it, and returns whether there was one.
    /// The next turn then follows it. A request in progress cannot put another turn there.
    ///
    /// # Errors
    /// [`SaveError::Moved`] when another writer has put a turn there; [`SaveError`] by cause, after
    /// which the outcome is still unknown.
    pub fn settle(&mut self) -> Result<bool, SaveError> {
        #[cfg(feature = "remote")]
        if let JournalBackend::Remote(journal) = &mut self.tape
            && let Some(turn) = journal.settle(self.base, self.turns)?
        {
            self.end += turn.frame.len() as u64;
            self.turns += 1;
            (self.cost, self.last) = (turn.cost, turn.root);
            return Ok(true);
        }
        Ok(false)
    }
}

impl FileJournal {
    /// Writes a frame behind the last of `turns`, which end at `end`.
    fn write(
        &mut self,
        (base, end, turns): (Sha256, u64, usize),
        frame: &[u8],
    ) -> Result<(), SaveError> {
        let Self { file, path, index } = self;
        let io = |e: io::Error| SaveError::io(path, e);
        let moved = || Err(SaveError::Moved(path.clone()));
        // Released by `unlock` or with the file.
        point();
        file.lock().map_err(io)?;
        let written = (|| {
            // A change of names holds the lock of the journal until `index.json` is replaced.
            if std::fs::symlink_metadata(&*path).is_err() || !index.names(base)? {
                return moved();
            }
            let now = file.metadata().map_err(io)?;
            if now.len() != end {
                // Longer: another writer appended, or was killed during an append.
                let there = JournalFile::read(path, base)?;
                if there.turns() != turns || there.len() != end {
                    return moved();
                }
                point();
                file.set_len(end).map_err(io)?;
                // Otherwise a power failure could leave the old length over the next turn.
                point();
                file.sync_all().map_err(io)?;
                synced(file);
            }
            point();
            let done = file.write_all_at(frame, end).and_then(|()| {
                point();
                file.sync_data()
            });
            done.map(|()| synced(file)).map_err(|error| {
                // A part of it must not be taken for a turn later.
                point();
                let _ = file.set_len(end).and_then(|()| file.sync_all());
                io(error)
            })
        })();
        let _ = file.unlock();
        written
    }
}

/// Signs the digest of a turn: a public key, and the signature.
pub type Signer<'a> = dyn Fn(&[u8; 32]) -> Result<[u8; SIGNATURE], crate::SealError> + 'a;

/// An unused journal name.
pub(crate) fn new_id() -> Result<String, SaveError> {
    let mut bytes = [0; 32];
    let path = Path::new("/dev/urandom");
    let io = |e| SaveError::io(path, e);
    File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).map_err(io)?;
    Ok(to_hex(&bytes))
}
