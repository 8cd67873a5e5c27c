//! Local snapshots to a remote.

use std::path::Path;

use super::backend::Source;
use super::{Remote, RemoteError};
use crate::blobs::source::Blobs;
use crate::format::blob::BlobRead;
use crate::format::descriptor::Descriptor;
use crate::format::index::Encoding;
use crate::format::manifest::{Manifest, print};
use crate::writing::save::descriptor;
use crate::writing::transcode::transcode;
use crate::{FoldOptions, OpenError, ReplacedName, SaveError, Sha256, Snapshot, Store};

/// Maximum bytes of a blob that one request sends.
const MAX_SINGLE_REQUEST: u64 = 8 << 20;

/// The progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied, or present already.
    pub done: u64,
    /// Total bytes, as far as known. Compression reduces it during the copy.
    pub total: u64,
}

/// A blob of pages, wherever it is.
struct PageBlob<'a>(&'a dyn BlobRead, Sha256);

impl Source for PageBlob<'_> {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RemoteError> {
        self.0
            .read_at(out, offset)
            .map_err(|e| SaveError::from(OpenError::io(Path::new(&self.1.to_string()), e)).into())
    }
}

/// A blob in memory.
impl Source for Vec<u8> {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RemoteError> {
        let from = offset as usize;
        let part = self.get(from..from + out.len()).ok_or_else(|| {
            RemoteError::Runtime(std::io::Error::from(std::io::ErrorKind::UnexpectedEof))
        })?;
        out.copy_from_slice(part);
        Ok(())
    }
}

impl Remote {
    /// Copies `snapshot`, of `local` or of an archive, and tags it `name`. Layers get the encoding
    /// `encoding`. Blobs that the remote has are not sent again. Returns the id in the remote,
    /// which differs from the local one if layers were compressed.
    ///
    /// Compressed copies of raw layers stay in `local` until its next `gc`.
    ///
    /// # Errors
    /// [`RemoteError`] by cause; `name` is unchanged then.
    pub fn push(
        &self,
        local: &Store,
        snapshot: &Snapshot,
        name: &str,
        encoding: Encoding,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Sha256, RemoteError> {
        self.push_over(local, snapshot, name, encoding, ReplacedName::Any, progress)
    }

    /// As [`Remote::push`], if `name` has the target that is to be replaced. A registry that
    /// ignores conditions of a write may lose the tag of a writer that finished while this one sent
    /// its last request; a tag that another writer replaces before it is read back is an error
    /// here.
    ///
    /// # Errors
    /// As [`Remote::push`]; [`SaveError::Moved`] when the name has another target.
    pub fn push_over(
        &self,
        local: &Store,
        snapshot: &Snapshot,
        name: &str,
        encoding: Encoding,
        replaced: ReplacedName<'_>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Sha256, RemoteError> {
        self.backend.check_name(name)?;
        let (begun, (id, manifest)) = self.lasting(|| {
            let manifest = print(&self.send(local, snapshot, encoding, progress)?)?;
            let id = Sha256::of(&manifest);
            if self.keeps_turns() {
                // It is as old as whatever had the same digest, until it is sent.
                self.block_on(self.backend.put_manifest(id, manifest.clone()))?;
            }
            Ok((id, manifest))
        })?;
        let condition = (replaced.expected(), begun);
        self.block_on(self.backend.publish(name, id, manifest, condition))?;
        Ok(id)
    }

    /// Copies `snapshot` as [`Remote::push`] does, but gives it no name: it is opened by the id
    /// that this returns. A caller that stores ids elsewhere avoids the write of the file of names.
    ///
    /// # Errors
    /// As [`Remote::push`].
    pub fn keep(
        &self,
        local: &Store,
        snapshot: &Snapshot,
        encoding: Encoding,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Sha256, RemoteError> {
        let kept = self.lasting(|| {
            let manifest = print(&self.send(local, snapshot, encoding, progress)?)?;
            let id = Sha256::of(&manifest);
            self.block_on(self.backend.put_manifest(id, manifest))?;
            Ok(id)
        });
        Ok(kept?.1)
    }

    /// Copies everything but the manifest, which is returned.
    pub(super) fn send(
        &self,
        local: &Store,
        snapshot: &Snapshot,
        encoding: Encoding,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Manifest, RemoteError> {
        if snapshot.turns().is_some() {
            let folded =
                local.folded(snapshot, &FoldOptions { encoding, ..FoldOptions::default() })?;
            return self.send(local, &folded, encoding, progress);
        }
        let sources: Vec<_> =
            snapshot.layers().iter().chain(snapshot.working_set_layer()).collect();
        let mut total: u64 = sources.iter().map(|layer| layer.size()).sum();
        let mut done = 0;
        let mut layers: Vec<Descriptor> = Vec::new();
        for (layer, there) in sources.iter().zip(&snapshot.manifest().layers) {
            let mut described = there.clone();
            let mut recoded = None;
            if layer.encoding() != encoding {
                // Until it is open. An upload reads open files only.
                let mut staging = local.stage()?;
                described = descriptor(&transcode(&mut staging, layer, encoding)?);
                recoded = Some(local.open(described.digest("the manifest")?)?);
            }
            total = total - layer.size() + described.size;
            let digest = described.digest("the manifest")?;
            let before = done;
            let blob = PageBlob(recoded.as_deref().unwrap_or(layer.blob()), digest);
            self.block_on(self.upload(&blob, digest, described.size, &mut |bytes| {
                progress(Progress { done: before + bytes, total });
            }))?;
            done += described.size;
            progress(Progress { done, total });
            layers.push(described);
        }
        let config = snapshot.manifest().config.clone();
        let digest = config.digest("the manifest")?;
        let bytes = snapshot.config_blob()?;
        // Signatures cover the configuration, which stays the same.
        let annotations = snapshot.manifest().annotations.clone();
        let manifest = Manifest { annotations, ..Manifest::new(config, layers) };
        self.block_on(self.upload(&bytes, digest, bytes.len() as u64, &mut |_| {}))?;
        Ok(manifest)
    }

    /// Makes sure that what a snapshot consists of, which was opened from here, stays until it has
    /// a name again.
    pub(super) fn renew(&self, snapshot: &Snapshot) -> Result<(), RemoteError> {
        let sources = snapshot.layers().iter().chain(snapshot.working_set_layer());
        for (layer, there) in sources.zip(&snapshot.manifest().layers) {
            let digest = there.digest("the manifest")?;
            let blob = PageBlob(layer.blob(), digest);
            self.block_on(self.upload(&blob, digest, there.size, &mut |_| {}))?;
        }
        let digest = snapshot.manifest().config.digest("the manifest")?;
        let bytes = snapshot.config_blob()?;
        self.block_on(self.upload(&bytes, digest, bytes.len() as u64, &mut |_| {}))
    }

    async fn upload(
        &self,
        blob: &dyn Source,
        digest: Sha256,
        size: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RemoteError> {
        if self.backend.has(digest, size).await? {
            return Ok(());
        }
        if size > MAX_SINGLE_REQUEST {
            return self.backend.put_parts(digest, size, blob, progress).await;
        }
        let mut bytes = vec![0; size as usize];
        blob.read(0, &mut bytes)?;
        self.backend.put(digest, bytes).await
    }
}
