//! Local snapshots to a remote.

use std::os::unix::fs::FileExt;

use futures_util::TryFutureExt;
use object_store::{ObjectStoreExt, PutMode, WriteMultipart};

use super::{Remote, RemoteError};
use crate::blobs::open_file;
use crate::index::Encoding;
use crate::manifest::{Descriptor, LAYOUT_FILE, LAYOUT_TEXT, MAX_CONFIG, Manifest, print};
use crate::save::descriptor;
use crate::store::BLOB_LOCK;
use crate::transcode::transcode;
use crate::{OpenError, SaveError, Sha256, Snapshot, Store};

/// Bytes in one part of a large upload; S3 wants at least 5 MiB.
const PART: usize = 8 << 20;
/// Parts in flight.
const IN_FLIGHT: usize = 4;

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes copied or found to be there already.
    pub done: u64,
    /// Bytes in all, as far as known: compression shrinks it on the way.
    pub total: u64,
}

impl Remote {
    /// Copies `snapshot`, which lives in `local`, and makes `name` mean it. Layers are stored as
    /// `encoding` says; blobs that the remote has already are not sent again. Returns its id there,
    /// which differs from the local one when layers were compressed on the way.
    ///
    /// Compressed copies of raw layers stay in `local` until its next `gc`.
    ///
    /// # Errors
    /// [`RemoteError`] by cause; `name` means then what it meant before.
    pub fn push(
        &self,
        local: &Store,
        snapshot: &Snapshot,
        name: &str,
        encoding: Encoding,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Sha256, RemoteError> {
        let _lock = local.lock(BLOB_LOCK, false)?;
        let sources: Vec<_> =
            snapshot.layers().iter().chain(snapshot.working_set_layer()).collect();
        let mut total: u64 = sources.iter().map(|layer| layer.size()).sum();
        let mut done = 0;
        let mut layers: Vec<Descriptor> = Vec::new();
        for (layer, there) in sources.iter().zip(&snapshot.manifest().layers) {
            let described = if layer.encoding() == encoding {
                there.clone()
            } else {
                descriptor(&transcode(&local.blob_dir(), layer, encoding)?)
            };
            total = total - layer.size() + described.size;
            let digest = described.digest("the manifest")?;
            let before = done;
            self.block_on(self.upload(local, digest, described.size, &mut |bytes| {
                progress(Progress { done: before + bytes, total });
            }))?;
            done += described.size;
            progress(Progress { done, total });
            layers.push(described);
        }
        let config = snapshot.manifest().config.clone();
        let digest = config.digest("the manifest")?;
        let bytes = local.read_blob("the configuration", digest, MAX_CONFIG)?;
        let manifest = print("the manifest", &Manifest::new(config, layers))?;
        let id = Sha256::of(&manifest);
        self.block_on(async {
            let overwrite = PutMode::Overwrite;
            self.put(&self.blob_path(digest), bytes, overwrite.clone()).await?;
            let size = manifest.len() as u64;
            self.put(&self.blob_path(id), manifest, overwrite.clone()).await?;
            self.put(&self.path(LAYOUT_FILE), LAYOUT_TEXT.into(), overwrite).await?;
            self.tag(name, id, size).await
        })?;
        Ok(id)
    }

    async fn upload(
        &self,
        local: &Store,
        digest: Sha256,
        size: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RemoteError> {
        let to = self.blob_path(digest);
        let what = digest.to_string();
        match self.attempt(&what, || self.0.objects.head(&to)).await {
            // Objects appear whole under their digest, so one of the right size is the right one.
            Ok(meta) if meta.size == size => return Ok(()),
            Ok(_) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        let path = local.blob_path(digest);
        let io = |e| RemoteError::from(SaveError::from(OpenError::io(&path, e)));
        let file = open_file(&path).map_err(io)?;
        let mut buffer = vec![0; PART.min(size as usize)];
        if size <= PART as u64 {
            file.read_exact_at(&mut buffer, 0).map_err(io)?;
            return self.put(&to, buffer, PutMode::Overwrite).await;
        }
        let object = |source| RemoteError::Object { what: what.clone(), source };
        let upload = self.attempt(&what, || self.0.objects.put_multipart(&to)).await?;
        let mut writer = WriteMultipart::new_with_chunk_size(upload, PART);
        let mut at = 0;
        while at < size {
            let part = &mut buffer[..PART.min((size - at) as usize)];
            if let Err(error) = file.read_exact_at(part, at) {
                // The parts already sent are given up; the first error is the one to report.
                let _ = writer.abort().await;
                return Err(io(error));
            }
            writer.wait_for_capacity(IN_FLIGHT).map_err(object).await?;
            writer.write(part);
            at += part.len() as u64;
            progress(at);
        }
        writer.finish().await.map_err(object).map(drop)
    }
}
