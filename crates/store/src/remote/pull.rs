//! Remote snapshots to a local store.

use std::cell::Cell;

use futures_util::{StreamExt, TryStreamExt, stream};

use super::blob::RangeBlob;
use super::{Progress, Remote, RemoteError};
use crate::format::index::Encoding;
use crate::format::manifest::{Config, Manifest, parse, parse_root, print};
use crate::layers::blob_sink::BlobSink;
use crate::local::naming::ExpectedName;
use crate::local::staging::Staging;
use crate::seal::access::Access;
use crate::snapshots::open::open_snapshot;
use crate::writing::fold::fold_into;
use crate::writing::save::descriptor;
use crate::writing::transcode::transcode;
use crate::{FoldOptions, Layer, Limits, Sha256, Store};

/// Bytes asked for by one request.
const PART: u64 = 4 << 20;
/// Maximum length of a layer that is fetched without a look at its index first.
const UNCHECKED: u64 = 64 << 20;
/// Requests in flight.
const IN_FLIGHT: usize = 8;

impl Remote {
    /// Copies the snapshot that `name` means in the remote to `local`, and tags it `local_name`.
    /// Layers get the encoding `encoding`, except those of a sealed snapshot. Existing blobs are
    /// not fetched again. Signatures are copied. A session and the lengths of sealed layers have
    /// the default limits.
    ///
    /// # Errors
    /// [`RemoteError`] by cause; `local_name` is unchanged then.
    pub fn pull(
        &self,
        local: &Store,
        name: &str,
        local_name: &str,
        encoding: Encoding,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Sha256, RemoteError> {
        self.pull_within(&Limits::default(), local, name, local_name, encoding, progress)
    }

    /// As [`Remote::pull`], within `limits`.
    ///
    /// # Errors
    /// As [`Remote::pull`].
    pub fn pull_within(
        &self,
        limits: &Limits,
        local: &Store,
        name: &str,
        local_name: &str,
        encoding: Encoding,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Sha256, RemoteError> {
        let mut staging = local.stage_for(local_name)?;
        let (manifest, config_bytes) = self.block_on(async {
            let (_, manifest) = self.manifest_of(name).await?;
            let config = self.config_of(&manifest).await?;
            Ok((manifest, config))
        })?;
        if manifest.journal()?.is_some() {
            // A session: its turns are folded on the way, as when it is pushed.
            // A fold reads all pages, and a few bytes of turns that copy one another may stand for
            // terabytes. So it keeps the limits that opening has.
            let limits = Limits { memory: u64::MAX, ..*limits };
            let session = self.load_with(name, &Access::new().with_limits(limits))?;
            #[cfg_attr(
                not(feature = "seal"),
                allow(clippy::needless_update, reason = "there is nothing else then")
            )]
            let fold = FoldOptions { encoding, layers: 0, ..FoldOptions::default() };
            let (id, _) = fold_into(&mut staging, &session, &fold)?;
            staging.rename(local_name, id, ExpectedName::Any)?;
            return Ok(id);
        }
        let roots = match manifest.is_sealed() {
            // Only its key opens it. Fetched blobs have their digests; opening checks the rest.
            true => vec![None; manifest.layers.len()],
            false => {
                let config: Config = parse("the configuration", &config_bytes)?;
                config.check()?;
                config
                    .memory
                    .layers
                    .into_iter()
                    .chain(config.memory.working_set)
                    .map(Some)
                    .collect()
            }
        };
        let sizes = manifest.layers.iter().map(|layer| layer.size);
        let total = sizes.fold(0, u64::saturating_add);
        if manifest.is_sealed() {
            // Without the key, their lengths are the remote's claim.
            limits.check_sealed(total)?;
        }
        let mut done: u64 = 0;
        let mut layers = Vec::new();
        for (there, root) in manifest.layers.iter().zip(&roots) {
            let digest = there.digest("the manifest")?;
            let path = local.blob_path(digest);
            if !staging.has(digest, there.size)? {
                if let Some(root) = root
                    && there.size > UNCHECKED
                {
                    // A wrong layer of any length is refused before it fills the disk.
                    let blob = RangeBlob::new(self.clone(), digest, there.size)?;
                    self.block_on(blob.fetch_tail(&Limits::NONE, &Cell::new(0)))?;
                    Layer::from_blob(Box::new(blob), digest, there.size, &parse_root(root)?)?;
                }
                let before = done;
                self.block_on(self.download(&mut staging, digest, there.size, &mut |bytes| {
                    progress(Progress { done: before + bytes, total });
                }))?;
            }
            done += there.size;
            progress(Progress { done, total });
            let Some(root) = root else {
                layers.push(there.clone());
                continue;
            };
            // Opening checks that the index is the one the configuration names.
            let layer = Layer::open(&path, digest, there.size, &parse_root(root)?)?;
            layers.push(if layer.encoding() == encoding {
                there.clone()
            } else {
                descriptor(&transcode(&mut staging, &layer, encoding)?)
            });
        }
        staging.put(config_bytes)?;
        let sealed = manifest.is_sealed();
        let manifest = Manifest { layers, ..manifest };
        let (id, _) = staging.put(print(&manifest)?)?;
        if !sealed {
            // The result must open, whatever the remote claimed. Running it is another matter.
            open_snapshot(local, id, &Access::new().with_limits(Limits::NONE))?;
        }
        staging.rename(local_name, id, ExpectedName::Any)?;
        Ok(id)
    }

    /// Fetches a blob in parallel ranges, checks it, and puts it under its digest.
    pub(super) async fn download(
        &self,
        staging: &mut Staging,
        digest: Sha256,
        size: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RemoteError> {
        let mut blob = staging.begin(None)?;
        let starts = (0..size).step_by(PART as usize);
        let mut parts = stream::iter(starts)
            .map(|at| self.backend.range(digest, at..size.min(at + PART)))
            .buffered(IN_FLIGHT);
        let mut done = 0;
        while let Some(part) = parts.try_next().await? {
            done += part.len() as u64;
            blob.push(part)?;
            progress(done);
        }
        match staging.end_as(blob, digest)? {
            Ok(()) => Ok(()),
            Err(found) => Err(RemoteError::Digest { expected: digest, found }),
        }
    }
}
