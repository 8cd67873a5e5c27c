//! A directory of snapshots in the OCI image layout.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use afresh_sys::crash::point;

use crate::blobs::file::{FileBlob, read_bounded};
use crate::blobs::source::{Blobs, read_kind};
use crate::disk::os::OpenOptionsExt;
use crate::disk::temporary::{new_dir, readers, replace_file};
use crate::format::blob::BlobRead;
use crate::format::descriptor::{ARTIFACT_TYPE, Descriptor, JOURNALS};
use crate::format::layout::{IndexJson, LayoutJson, resolve_in, tags_of};
use crate::format::manifest::{INDEX_FILE, LAYOUT_FILE, LAYOUT_TEXT, MAX_INDEX_JSON, parse, print};
use crate::{OpenError, SaveError, Sha256, Tag};

/// A directory in the OCI image layout that holds snapshots.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens an existing image layout.
    ///
    /// # Errors
    /// [`OpenError::NotALayout`] for any other directory.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, OpenError> {
        let root = root.into();
        let layout = read_bounded(&root.join(LAYOUT_FILE), "`oci-layout`", 4096)
            .ok()
            .and_then(|bytes| parse::<LayoutJson>("`oci-layout`", &bytes).ok())
            .filter(|layout| layout.image_layout_version.starts_with("1."));
        if layout.is_none() {
            return Err(OpenError::NotALayout(root));
        }
        Ok(Self { root })
    }

    /// Opens a directory. A missing or empty one becomes an empty image layout.
    ///
    /// # Errors
    /// [`OpenError::NotALayout`] when it holds something else; an I/O error when it cannot be made.
    pub fn create(root: impl Into<PathBuf>) -> Result<Self, SaveError> {
        let root = root.into();
        let io = |e| SaveError::io(&root, e);
        new_dir(&root).map_err(io)?;
        if !root.join(LAYOUT_FILE).exists() {
            // A directory with an unfinished layout is ours; one with other files is not.
            let foreign = fs::read_dir(&root).map_err(io)?.flatten().any(|entry| {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                name != "blobs" && name != INDEX_FILE && !name.starts_with('.')
            });
            if foreign {
                return Err(OpenError::NotALayout(root).into());
            }
            let store = Self { root: root.clone() };
            new_dir(&store.blob_dir()).map_err(io)?;
            let _index = store.lock_index()?;
            if !root.join(INDEX_FILE).exists() {
                store.put_file(INDEX_FILE, &print(&IndexJson::default())?)?;
            }
            // Last, for it is what makes the directory a layout.
            store.put_file(LAYOUT_FILE, LAYOUT_TEXT.as_bytes())?;
        }
        Ok(Self::open(root)?)
    }

    /// The directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn blob_dir(&self) -> PathBuf {
        self.root.join("blobs").join("sha256")
    }

    /// The path of the blob with this digest.
    #[must_use]
    pub fn blob_path(&self, digest: Sha256) -> PathBuf {
        self.blob_dir().join(digest.hex())
    }

    /// Where a session's turns are.
    pub(crate) fn journal_path(&self, id: &str) -> PathBuf {
        self.root.join(JOURNALS).join(id)
    }

    /// Replaces a file of the store; the readers of blobs may read it.
    pub(crate) fn put_file(&self, name: &str, bytes: &[u8]) -> Result<(), SaveError> {
        replace_file(&self.root.join(name), &self.blob_dir(), bytes)
    }

    /// Opens a lock of the store.
    fn open_lock(&self, name: &str) -> Result<File, SaveError> {
        let path = self.root.join(name);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o200 | readers(&self.blob_dir()))
            .open(&path)
            .map_err(|e| SaveError::io(&path, e))
    }

    /// Takes a lock of the store for this process alone, waiting for it; dropping the file releases
    /// it.
    fn lock(&self, name: &str) -> Result<File, SaveError> {
        point();
        let file = self.open_lock(name)?;
        file.lock().map_err(|e| SaveError::io(&self.root.join(name), e))?;
        Ok(file)
    }

    /// Opens the locks that a writer of blobs takes.
    pub(crate) fn blob_locks(&self) -> Result<BlobLocks, SaveError> {
        Ok(BlobLocks {
            root: self.root.clone(),
            collection: self.open_lock(GC_LOCK)?,
            blobs: self.open_lock(BLOB_LOCK)?,
        })
    }

    /// Keeps others from writing blobs, as `gc` needs it.
    pub(crate) fn lock_all_blobs(&self) -> Result<[File; 2], SaveError> {
        let gate = self.lock(GC_LOCK)?;
        Ok([gate, self.lock(BLOB_LOCK)?])
    }

    /// Keeps others from changing `index.json`.
    pub(crate) fn lock_index(&self) -> Result<File, SaveError> {
        self.lock(INDEX_LOCK)
    }

    pub(crate) fn index(&self) -> Result<IndexJson, OpenError> {
        let bytes = read_bounded(&self.root.join(INDEX_FILE), "`index.json`", MAX_INDEX_JSON)?;
        let index: IndexJson = parse("`index.json`", &bytes)?;
        index.check()?;
        Ok(index)
    }

    /// The names of snapshots in the store, in order. Other content of an image layout (images,
    /// artifacts of other tools) is left out.
    ///
    /// # Errors
    /// A damaged `index.json`.
    pub fn tags(&self) -> Result<Vec<Tag>, OpenError> {
        tags_of(&self.snapshots()?)
    }

    /// The descriptors in `index.json` that mean snapshots, with a name or without.
    fn snapshots(&self) -> Result<Vec<Descriptor>, OpenError> {
        let mut manifests = self.index()?.manifests;
        manifests.retain(|descriptor| match descriptor.is_snapshot() {
            Some(known) => known,
            // Copied by a tool that left the type out: the manifest has it, and an unreadable one
            // may be a snapshot.
            None => descriptor
                .digest("`index.json`")
                .and_then(|id| read_kind(self, id))
                .map_or(true, |kind| kind == ARTIFACT_TYPE),
        });
        Ok(manifests)
    }

    /// Resolves a tag, or a manifest digest in the form `sha256:…`. If no snapshot has the tag
    /// `latest`, that resolves to the only snapshot, with or without a tag.
    ///
    /// # Errors
    /// [`OpenError::NoSuchName`] with the existing names.
    pub fn resolve(&self, name: &str) -> Result<Sha256, OpenError> {
        Ok(self.resolve_named(name)?.0)
    }

    /// As [`Store::resolve`], with the name in `index.json`: `latest` may stand for another one.
    pub(crate) fn resolve_named(&self, name: &str) -> Result<(Sha256, Option<String>), OpenError> {
        if let Ok(id) = name.parse::<Sha256>()
            && self.blob_path(id).exists()
        {
            return Ok((id, None));
        }
        let snapshots = self.snapshots()?;
        let found = resolve_in(&snapshots, name)?;
        Ok((found.digest("`index.json`")?, found.name().map(str::to_owned)))
    }
}

impl Blobs for Store {
    fn read(&self, what: &'static str, digest: Sha256, limit: u64) -> Result<Vec<u8>, OpenError> {
        read_bounded(&self.blob_path(digest), what, limit)
    }

    fn open(&self, digest: Sha256) -> Result<Box<dyn BlobRead>, OpenError> {
        let path = self.blob_path(digest);
        Ok(Box::new(FileBlob::open(&path).map_err(|e| OpenError::io(&path, e))?))
    }

    fn journal(&self, id: &str) -> Option<PathBuf> {
        Some(self.journal_path(id))
    }
}

/// The locks that a writer of blobs takes for a moment, several times.
pub(crate) struct BlobLocks {
    root: PathBuf,
    collection: File,
    blobs: File,
}

impl BlobLocks {
    /// Keeps `gc` from running, for a moment: [`Staging`](crate::local::staging::Staging) keeps
    /// blobs for longer. Waits for a `gc` that waits itself, so that a stream of writers cannot
    /// keep it waiting.
    pub(crate) fn lock(&self) -> Result<BlobGate<'_>, SaveError> {
        let failed = |name| move |error| SaveError::io(&self.root.join(name), error);
        point();
        let passed = self.collection.lock_shared().and_then(|()| self.collection.unlock());
        passed.map_err(failed(GC_LOCK))?;
        point();
        self.blobs.lock_shared().map_err(failed(BLOB_LOCK))?;
        Ok(BlobGate(&self.blobs))
    }
}

/// The shared lock of the blobs, until it is dropped.
pub(crate) struct BlobGate<'a>(&'a File);

impl Drop for BlobGate<'_> {
    fn drop(&mut self) {
        // If it fails, the lock lasts until the writer closes its files.
        let _ = self.0.unlock();
    }
}

/// Refuses what cannot name a snapshot.
pub(crate) fn check_name(name: &str) -> Result<(), SaveError> {
    let valid = |c: char| c.is_ascii_alphanumeric() || "._-/:".contains(c);
    let is_digest = name.parse::<Sha256>().is_ok();
    if name.is_empty() || name.len() > 128 || !name.chars().all(valid) || is_digest {
        return Err(SaveError::Name(name.chars().take(140).collect()));
    }
    Ok(())
}

/// Serialises changes of `index.json`.
pub(crate) const INDEX_LOCK: &str = ".index-lock";
/// Held shared while a writer records a blob in its marker and moves it to its path, and
/// exclusively by `gc`.
pub(crate) const BLOB_LOCK: &str = ".blob-lock";
/// Held exclusively by a `gc` that waits for [`BLOB_LOCK`], and taken for a moment by every other
/// holder of that.
const GC_LOCK: &str = ".gc-lock";
