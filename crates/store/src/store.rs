//! A directory of snapshots in the OCI image layout.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use crate::blobs::{BlobRead, FileBlob, read_bounded, replace_file, sync_dir};
use crate::manifest::{
    ARTIFACT_TYPE, INDEX_FILE, IndexJson, LAYOUT_FILE, LAYOUT_TEXT, LayoutJson, MAX_INDEX_JSON,
    REF_NAME, parse, print,
};
use crate::open::{Blobs, open_snapshot};
use crate::seal::Access;
use crate::{OpenError, SaveError, Sha256, Snapshot};

/// A name and the snapshot it means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The name.
    pub name: String,
    /// The snapshot.
    pub id: Sha256,
}

/// A directory in the OCI image layout that holds snapshots.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens a directory that is an image layout already.
    ///
    /// # Errors
    /// [`OpenError::NotALayout`] when it is none.
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

    /// Opens a directory, making it an empty image layout first when it is missing or empty.
    ///
    /// # Errors
    /// [`OpenError::NotALayout`] when it holds something else; an I/O error when it can not be made.
    pub fn create(root: impl Into<PathBuf>) -> Result<Self, SaveError> {
        let root = root.into();
        let io = |e| SaveError::io(&root, e);
        fs::create_dir_all(&root).map_err(io)?;
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
            fs::create_dir_all(store.blob_dir()).map_err(io)?;
            let _index = store.lock_index()?;
            if !root.join(INDEX_FILE).exists() {
                replace_file(
                    &root.join(INDEX_FILE),
                    &print("`index.json`", &IndexJson::default())?,
                )?;
            }
            // Last, for it is what makes the directory a layout.
            replace_file(&root.join(LAYOUT_FILE), LAYOUT_TEXT.as_bytes())?;
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

    /// Where the blob named `digest` is.
    #[must_use]
    pub fn blob_path(&self, digest: Sha256) -> PathBuf {
        self.blob_dir().join(digest.hex())
    }

    /// Takes one of the store's locks, waiting for it; dropping the file releases it.
    pub(crate) fn lock(&self, name: &str, exclusive: bool) -> Result<File, SaveError> {
        let path = self.root.join(name);
        (|| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)?;
            if exclusive {
                file.lock()?
            } else {
                file.lock_shared()?
            }
            Ok(file)
        })()
        .map_err(|e| SaveError::io(&path, e))
    }

    /// Keeps others from changing `index.json`.
    pub(crate) fn lock_index(&self) -> Result<File, SaveError> {
        self.lock(INDEX_LOCK, true)
    }

    pub(crate) fn index(&self) -> Result<IndexJson, OpenError> {
        let bytes = read_bounded(&self.root.join(INDEX_FILE), "`index.json`", MAX_INDEX_JSON)?;
        let index: IndexJson = parse("`index.json`", &bytes)?;
        index.check()?;
        Ok(index)
    }

    /// The names in the store, in order.
    ///
    /// # Errors
    /// A damaged `index.json`.
    pub fn tags(&self) -> Result<Vec<Tag>, OpenError> {
        let mut tags = Vec::new();
        for descriptor in self.index()?.manifests {
            if let Some(name) = descriptor.annotations.get(REF_NAME) {
                tags.push(Tag { name: name.clone(), id: descriptor.digest("`index.json`")? });
            }
        }
        tags.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(tags)
    }

    /// The snapshot that `name` means: a tag, or a manifest digest in the form `sha256:…`.
    ///
    /// # Errors
    /// [`OpenError::NoSuchName`] with the names there are.
    pub fn resolve(&self, name: &str) -> Result<Sha256, OpenError> {
        if let Ok(id) = name.parse::<Sha256>()
            && self.blob_path(id).exists()
        {
            return Ok(id);
        }
        let tags = self.tags()?;
        tags.iter().find(|tag| tag.name == name).map(|tag| tag.id).ok_or_else(|| {
            OpenError::NoSuchName {
                name: name.to_owned(),
                known: tags.iter().map(|tag| tag.name.clone()).collect(),
            }
        })
    }

    /// Opens the snapshot that `name` means, a tag or a digest.
    ///
    /// Reads and checks the manifest, the configuration and the index of every layer, and no page.
    ///
    /// # Errors
    /// [`OpenError`] by cause.
    pub fn load(&self, name: &str) -> Result<Snapshot, OpenError> {
        self.load_id(self.resolve(name)?)
    }

    /// Opens the snapshot whose manifest has digest `id`.
    ///
    /// # Errors
    /// [`OpenError`] by cause.
    pub fn load_id(&self, id: Sha256) -> Result<Snapshot, OpenError> {
        open_snapshot(self, id, &Access::new())
    }

    /// Opens the snapshot that `name` means if it is what `access` demands: signed by a trusted key, or
    /// sealed with the given one. A signature is verified before anything but the manifest is read.
    ///
    /// # Errors
    /// [`OpenError::Seal`] by cause, and those of [`Store::load`].
    #[cfg(feature = "seal")]
    pub fn load_with(&self, name: &str, access: &Access) -> Result<Snapshot, OpenError> {
        open_snapshot(self, self.resolve(name)?, access)
    }

    /// Makes `name` mean `id`, or removes the name when `id` is `None`. Atomic and durable: the blobs
    /// that `id` needs are made durable first.
    ///
    /// # Errors
    /// A name that can not be a tag, or an I/O error; the old meaning stays then.
    pub fn tag(&self, name: &str, id: Option<Sha256>) -> Result<(), SaveError> {
        check_name(name)?;
        let dir = self.blob_dir();
        sync_dir(&dir).map_err(|e| SaveError::io(&dir, e))?;
        let _lock = self.lock_index()?;
        let descriptor = match id {
            None => None,
            Some(id) => {
                let path = self.blob_path(id);
                let size = fs::metadata(&path).map_err(|e| SaveError::io(&path, e))?.len();
                let mut descriptor =
                    crate::manifest::Descriptor::new(crate::manifest::MANIFEST_TYPE, id, size);
                descriptor.artifact_type = Some(ARTIFACT_TYPE.to_owned());
                descriptor.annotations.insert(REF_NAME.to_owned(), name.to_owned());
                Some(descriptor)
            }
        };
        let mut index = self.index()?;
        index.manifests.retain(|d| d.annotations.get(REF_NAME).is_none_or(|n| n != name));
        index.manifests.extend(descriptor);
        index.manifests.sort_by(|a, b| a.annotations.cmp(&b.annotations));
        replace_file(&self.root.join(INDEX_FILE), &print("`index.json`", &index)?)
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
}

/// Refuses what can not name a snapshot.
pub(crate) fn check_name(name: &str) -> Result<(), SaveError> {
    let valid = |c: char| c.is_ascii_alphanumeric() || "._-/:".contains(c);
    let is_digest = name.parse::<Sha256>().is_ok();
    if name.is_empty() || name.len() > 128 || !name.chars().all(valid) || is_digest {
        return Err(SaveError::Name(name.chars().take(140).collect()));
    }
    Ok(())
}

/// Serialises changes of `index.json`.
const INDEX_LOCK: &str = ".index-lock";
/// Held shared while blobs are being written and not yet named, exclusively by `gc`.
pub(crate) const BLOB_LOCK: &str = ".blob-lock";
