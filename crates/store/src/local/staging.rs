//! Blobs that have no name yet. A marker keeps them from `gc`, however long their writer takes.
//!
//! Promises: `gc` removes no blob, temporary file or journal of a living writer. A writer waits for
//! a collection at most, never for another writer. The kernel releases the marker of a dead writer.
//! May break it: programs that remove files without the store's locks. A version of this program
//! before the markers removes the blobs; naming them fails then.
//!
//! A marker is a file of the store, locked by its writer. It holds the digests of blobs and the ids
//! of journals, one a line. Temporary files have the writer's id in their names. A line is written
//! under `.blob-lock` shared, before its file appears or its presence is looked up. `gc` holds that
//! lock exclusively and reads every locked marker first.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use afresh_sys::crash::point;
use afresh_sys::fork;
use afresh_sys::planted::{Bug, is};

use crate::blobs::file::{BlobWriter, read_bounded};
use crate::disk::os::{OpenOptionsExt, open_regular};
use crate::disk::temporary::TEMPORARY;
use crate::format::descriptor::Descriptor;
use crate::format::digest::from_hex;
use crate::format::manifest::{INDEX_FILE, MAX_INDEX_JSON, MAX_MANIFEST};
use crate::layers::blob_sink::{BlobSink, copy_blob};
use crate::local::live_set::LiveSet;
use crate::local::naming::ExpectedName;
use crate::local::store::{BlobGate, BlobLocks, check_name};
use crate::turn::new_journal_id;
use crate::{Encoding, Layer, SaveError, Sha256, Store};

/// Prefix of the names of markers.
const MARKER: &str = ".staging-";
/// Characters of an id.
const ID_LEN: usize = 32;
/// Maximum length of a marker that is read: 250,000 lines.
const MAX_MARKER: u64 = 16 << 20;

/// The blobs of one writer, until it is dropped.
pub(crate) struct Staging {
    store: Store,
    id: String,
    path: PathBuf,
    marker: File,
    /// The locks of the store, opened once.
    locks: BlobLocks,
    /// The process that writes. A child of a fork leaves its parent's marker alone.
    generation: u32,
    /// The time of the first write to a blob that has ended.
    first_write: Option<Instant>,
    /// Blobs that have ended and have no name yet.
    held: Vec<BlobWriter>,
}

/// Maximum length of the descriptor of a snapshot with a name, in `index.json`.
const MAX_DESCRIPTOR: u64 = 512;

impl Store {
    /// Begins to write the blobs of a snapshot that gets the name `name`.
    ///
    /// # Errors
    /// A name that cannot be a tag, or has no room in `index.json`.
    pub(crate) fn stage_for(&self, name: &str) -> Result<Staging, SaveError> {
        check_name(name)?;
        let path = self.root().join(INDEX_FILE);
        let len = fs::metadata(&path).map_err(|e| SaveError::io(&path, e))?.len();
        if len.saturating_add(MAX_DESCRIPTOR) > MAX_INDEX_JSON {
            let mut index = self.index()?;
            if index.target(name).is_none() {
                index.rename(name, Some(longest_descriptor(name)));
                index.bytes()?;
            }
        }
        self.stage()
    }

    /// Begins to write blobs.
    pub(crate) fn stage(&self) -> Result<Staging, SaveError> {
        let mut id = new_journal_id()?;
        id.truncate(ID_LEN);
        let path = self.root().join(format!("{MARKER}{id}"));
        let locks = self.blob_locks()?;
        let gate = locks.lock()?;
        point();
        let marker = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .and_then(|marker| marker.lock().map(|()| marker))
            .map_err(|e| SaveError::io(&path, e))?;
        drop(gate);
        let (store, generation) = (self.clone(), fork::generation());
        let held = Vec::new();
        Ok(Staging { store, id, path, marker, locks, generation, first_write: None, held })
    }

    /// Notes what living writers have staged, and removes the markers of dead ones. Returns the
    /// beginnings of the temporary names to keep. The caller holds the lock of the blobs
    /// exclusively.
    pub(crate) fn staged(&self, live: &mut LiveSet) -> Result<HashSet<String>, SaveError> {
        let mut writers = HashSet::new();
        let io = |e| SaveError::io(self.root(), e);
        for entry in fs::read_dir(self.root()).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_prefix(MARKER)) else {
                continue;
            };
            let path = entry.path();
            let io = |e| SaveError::io(&path, e);
            let how = &mut OpenOptions::new();
            let marker = match open_regular(&path, how.read(true).write(true)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened.map_err(io)?,
            };
            match marker.try_lock() {
                Ok(()) => {
                    point();
                    remove(&path).map_err(io)?;
                }
                Err(TryLockError::WouldBlock) if is(Bug::Staged) => {}
                Err(TryLockError::WouldBlock) => {
                    let lines = match read_bounded(&path, "a marker of a writer", MAX_MARKER) {
                        // It has ended.
                        Err(error) if error.is_missing_file() => continue,
                        lines => lines?,
                    };
                    for line in String::from_utf8_lossy(&lines).lines() {
                        live.blobs.extend(from_hex(line).map(Sha256));
                        live.journals.insert(line.to_owned());
                    }
                    writers.insert(temporary(id));
                }
                Err(TryLockError::Error(error)) => return Err(io(error)),
            }
        }
        Ok(writers)
    }
}

fn longest_descriptor(name: &str) -> Descriptor {
    Descriptor::named(Sha256([0; 32]), MAX_MANIFEST, name)
}

/// Prefix of the temporary names of the writer `id`.
fn temporary(id: &str) -> String {
    format!("{TEMPORARY}{id}-")
}

/// Whether a temporary file belongs to one of `writers`.
pub(crate) fn belongs(name: &str, writers: &HashSet<String>) -> bool {
    name.get(..TEMPORARY.len() + ID_LEN + 1).is_some_and(|start| writers.contains(start))
}

/// Removes a file that its owner may remove at the same time.
pub(crate) fn remove(path: &std::path::Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

impl Staging {
    /// Keeps the blob or journal of this name, or several, one a line. No collection runs before
    /// the returned lock is dropped.
    pub(crate) fn mark(&mut self, name: &str) -> Result<BlobGate<'_>, SaveError> {
        let gate = self.locks.lock()?;
        point();
        self.marker
            .write_all(format!("{name}\n").as_bytes())
            .map_err(|e| SaveError::io(&self.path, e))?;
        Ok(gate)
    }

    /// As [`Store::rename`]. Each held blob was followed by [`BlobSink::end`], because it would
    /// have no name otherwise.
    pub(crate) fn rename(
        &self,
        name: &str,
        id: Sha256,
        expected: ExpectedName,
    ) -> Result<(), SaveError> {
        debug_assert!(self.held.is_empty(), "a held blob has no name");
        self.store.rename(name, Some(id), expected)
    }

    /// The time of the first write, once its blob has ended.
    pub(crate) fn first_write(&self) -> Option<Instant> {
        self.first_write
    }

    /// Notes when the first bytes of a blob were written.
    fn note_first_write(&mut self, blob: &BlobWriter) {
        let times = [self.first_write, blob.began()];
        self.first_write = times.into_iter().flatten().min();
    }

    /// Makes the held blobs durable, and gives them their names.
    fn place_held(&mut self) -> Result<(), SaveError> {
        let mut held = std::mem::take(&mut self.held);
        let sync = |held: &mut [BlobWriter]| held.iter_mut().try_for_each(BlobWriter::sync);
        if !is(Bug::EarlyName) {
            sync(&mut held)?;
        }
        let digests = held.iter_mut().map(|blob| Ok(blob.finish()?.0));
        let digests = digests.collect::<Result<Vec<_>, SaveError>>()?;
        let names: Vec<_> = digests.iter().map(|digest| digest.hex()).collect();
        // One lock for all.
        let _gate = self.mark(&names.join("\n"))?;
        held.iter_mut().zip(digests).try_for_each(|(blob, digest)| blob.place(digest))?;
        // Without the bug they are durable.
        sync(&mut held)
    }

    /// Whether the store has a blob of this digest and length, which stays then.
    pub(crate) fn has(&mut self, digest: Sha256, size: u64) -> Result<bool, SaveError> {
        let path = self.store.blob_path(digest);
        let _gate = self.mark(&digest.hex())?;
        Ok(fs::metadata(path).is_ok_and(|meta| meta.len() == size))
    }

    /// As [`BlobSink::end`] if the digest is `expected`; the inner error is what it is instead, and
    /// no blob appears then.
    #[cfg(feature = "remote")]
    pub(crate) fn end_as(
        &mut self,
        mut blob: BlobWriter,
        expected: Sha256,
    ) -> Result<Result<(), Sha256>, SaveError> {
        let (digest, _) = blob.close()?;
        if digest != expected {
            return Ok(Err(digest));
        }
        let _gate = self.mark(&digest.hex())?;
        blob.place(digest).map(Ok)
    }
}

impl BlobSink for Staging {
    fn begin(&mut self, _: Option<(Encoding, u64)>) -> Result<BlobWriter, SaveError> {
        BlobWriter::create(&self.store.blob_dir(), &temporary(&self.id))
    }

    fn takes_several(&self) -> bool {
        true
    }

    fn end(&mut self, mut blob: BlobWriter) -> Result<(Sha256, u64), SaveError> {
        let closed = blob.close()?;
        self.note_first_write(&blob);
        self.held.push(blob);
        self.place_held().map(|()| closed)
    }

    fn hold(&mut self, mut blob: BlobWriter) -> Result<(Sha256, u64), SaveError> {
        let ended = blob.finish()?;
        self.note_first_write(&blob);
        self.held.push(blob);
        Ok(ended)
    }

    fn keep_all(&mut self, layers: &[Layer]) -> Result<(), SaveError> {
        if layers.is_empty() {
            return Ok(());
        }
        let path = |layer: &Layer| self.store.blob_path(layer.digest());
        let paths: Vec<_> = layers.iter().map(path).collect();
        let names: Vec<_> = layers.iter().map(|layer| layer.digest().hex()).collect();
        // One lock for all: a stack has up to 128 layers.
        let gate = self.mark(&names.join("\n"))?;
        let is_missing = |(layer, path): &(&Layer, PathBuf)| {
            !fs::metadata(path).is_ok_and(|meta| meta.len() == layer.size())
        };
        let missing: Vec<_> = layers.iter().zip(paths).filter(is_missing).collect();
        drop(gate);
        missing.into_iter().try_for_each(|(layer, _)| copy_blob(self, layer))
    }

    fn keep(&mut self, layer: &Layer) -> Result<(), SaveError> {
        self.keep_all(std::slice::from_ref(layer))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.generation == fork::generation() {
            // Otherwise `gc` removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(staging: &mut Staging, byte: u8) -> BlobWriter {
        let mut blob = staging.begin(None).unwrap();
        blob.push(vec![byte; 100]).unwrap();
        blob
    }

    #[test]
    fn the_longest_descriptor_is_within_its_maximum() {
        let text = serde_json::to_vec(&longest_descriptor(&"n".repeat(128))).unwrap();
        assert!((text.len() as u64) < MAX_DESCRIPTOR, "{}", text.len());
    }

    #[test]
    fn held_blobs_get_their_names_with_the_next_one_and_leave_nothing_without_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let mut staging = store.stage().unwrap();
        let (one, two) = (begin(&mut staging, 1), begin(&mut staging, 2));
        let held = [one, two].map(|blob| staging.hold(blob).unwrap().0);
        assert!(held.iter().all(|digest| !store.blob_path(*digest).exists()));
        let last = staging.put(vec![3; 100]).unwrap().0;
        for (digest, byte) in held.into_iter().chain([last]).zip(1..) {
            assert_eq!(fs::read(store.blob_path(digest)).unwrap(), [byte; 100]);
        }
        let never = begin(&mut staging, 4);
        staging.hold(never).unwrap();
        drop(staging);
        assert_eq!(fs::read_dir(store.blob_dir()).unwrap().count(), 3);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a held blob has no name")]
    fn a_name_is_refused_while_a_blob_is_held() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        let mut staging = store.stage().unwrap();
        let id = staging.put(vec![1; 100]).unwrap().0;
        let held = begin(&mut staging, 2);
        staging.hold(held).unwrap();
        let _ = staging.rename("a", id, ExpectedName::Any);
    }
}
