//! Snapshots in object stores: S3 and what speaks it, or a directory.
//!
//! A remote holds the same layout as a local [`Store`](crate::Store), object for file, so any OCI tool
//! that can copy a directory can copy it too. [`Remote::push`] and [`Remote::pull`] copy snapshots;
//! [`Remote::load`] opens one where it is, and its pages are fetched by range requests when they are
//! used. Everything fetched is checked against its digest before it is used, whatever the server sent.
//!
//! What it promises: `index.json` changes last, so a push that is killed leaves the old meaning of a
//! name or the new one; every request has a time limit and a bounded number of attempts, so a dead
//! server is an error and not a hang.
//!
//! Calls block. They must not be made from inside an asynchronous task.

mod blob;
mod cache;
mod error;
mod list;
mod pull;
mod push;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt, ObjectStoreScheme, PutMode,
    PutPayload, RetryConfig, UpdateVersion,
};
use tokio::runtime::{Builder, Runtime};

use crate::manifest::{
    ARTIFACT_TYPE, Config, Descriptor, INDEX_FILE, IndexJson, MANIFEST_TYPE, MAX_CONFIG,
    MAX_INDEX_JSON, MAX_MANIFEST, Manifest, REF_NAME, layer_type, parse, print,
};
use crate::{Layer, OpenError, Sha256, Snapshot, Tag};

pub use cache::trim_cache;
pub use error::RemoteError;
pub use push::Progress;

/// How often and how long a request is tried.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Attempts in all.
    pub attempts: u32,
    /// Time allowed for one attempt.
    pub timeout: Duration,
    /// Pause after the first failure; doubled after each.
    pub pause: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { attempts: 4, timeout: Duration::from_secs(15), pause: Duration::from_millis(50) }
    }
}

/// An object store that holds snapshots under a prefix. Cheap to clone.
#[derive(Clone)]
pub struct Remote(Arc<Inner>);

struct Inner {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    patience: Patience,
    cache: Option<PathBuf>,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Does not wait, so that the last clone may be dropped anywhere.
            runtime.shutdown_background();
        }
    }
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({}, {})", self.0.objects, self.0.prefix)
    }
}

impl Remote {
    /// Opens `s3://bucket/prefix` (credentials, region and endpoint from the `AWS_…` environment
    /// variables) or `file:///directory`.
    ///
    /// # Errors
    /// [`RemoteError::Url`] for another scheme, [`RemoteError::Object`] when the configuration is
    /// incomplete. No request is made.
    pub fn open(url: &str, patience: Patience) -> Result<Self, RemoteError> {
        let bad = |why: String| RemoteError::Url { url: url.to_owned(), why };
        let parsed = url::Url::parse(url).map_err(|e| bad(e.to_string()))?;
        let (scheme, prefix) = ObjectStoreScheme::parse(&parsed).map_err(|e| bad(e.to_string()))?;
        let object = |source| RemoteError::Object { what: url.to_owned(), source };
        let objects: Arc<dyn ObjectStore> = match scheme {
            ObjectStoreScheme::Local => Arc::new(LocalFileSystem::new().with_fsync(true)),
            ObjectStoreScheme::AmazonS3 => Arc::new(
                AmazonS3Builder::from_env()
                    .with_url(url)
                    .with_retry(RetryConfig {
                        backoff: BackoffConfig {
                            init_backoff: patience.pause,
                            ..BackoffConfig::default()
                        },
                        max_retries: patience.attempts as usize,
                        retry_timeout: patience.timeout,
                    })
                    .with_client_options(
                        ClientOptions::new()
                            .with_allow_http(
                                std::env::var("AWS_ENDPOINT_URL")
                                    .or_else(|_| std::env::var("AWS_ENDPOINT"))
                                    .is_ok_and(|endpoint| endpoint.starts_with("http://")),
                            )
                            .with_connect_timeout(patience.timeout.min(Duration::from_secs(5)))
                            .with_timeout(patience.timeout),
                    )
                    .build()
                    .map_err(object)?,
            ),
            _ => return Err(bad("use s3://bucket/prefix or file:///directory".to_owned())),
        };
        Self::with_objects(objects, prefix, patience)
    }

    /// Uses any object store.
    ///
    /// # Errors
    /// [`RemoteError::Runtime`] when threads can not be started.
    pub fn with_objects(
        objects: Arc<dyn ObjectStore>,
        prefix: Path,
        patience: Patience,
    ) -> Result<Self, RemoteError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("afresh-remote")
            .enable_all()
            .build()
            .map_err(RemoteError::Runtime)?;
        Ok(Self(Arc::new(Inner { objects, prefix, patience, cache: None, runtime: Some(runtime) })))
    }

    /// The same remote with a cache in `dir` for the pages of snapshots opened in place. Any number of
    /// processes may share a directory; see [`trim_cache`].
    ///
    /// # Errors
    /// [`RemoteError::Runtime`] when threads can not be started.
    pub fn with_cache(&self, dir: impl Into<PathBuf>) -> Result<Self, RemoteError> {
        let inner = &self.0;
        let mut cached =
            Self::with_objects(inner.objects.clone(), inner.prefix.clone(), inner.patience)?;
        if let Some(inner) = Arc::get_mut(&mut cached.0) {
            inner.cache = Some(dir.into());
        }
        Ok(cached)
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.0.prefix.clone(), |path, part| path.join(part))
    }

    fn blob_path(&self, digest: Sha256) -> Path {
        self.path(&format!("blobs/sha256/{}", digest.hex()))
    }

    fn block_on<T>(
        &self,
        work: impl Future<Output = Result<T, RemoteError>>,
    ) -> Result<T, RemoteError> {
        match &self.0.runtime {
            Some(runtime) => runtime.block_on(work),
            None => Err(RemoteError::Runtime(std::io::Error::other("the remote was closed"))),
        }
    }

    /// Tries `request` as often as the patience allows. Errors that no repetition cures end it at once.
    async fn attempt<T, F>(&self, what: &str, request: impl Fn() -> F) -> Result<T, RemoteError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let patience = self.0.patience;
        let mut pause = patience.pause;
        let mut attempt = 1;
        loop {
            let error = match tokio::time::timeout(patience.timeout, request()).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(source)) => RemoteError::Object { what: what.to_owned(), source },
                Err(_) => RemoteError::Timeout { what: what.to_owned(), after: patience.timeout },
            };
            if attempt >= patience.attempts || !error.may_pass() {
                return Err(error);
            }
            attempt += 1;
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Fetches a small object whole.
    async fn get(
        &self,
        what: &'static str,
        path: &Path,
        limit: u64,
    ) -> Result<(Vec<u8>, UpdateVersion), RemoteError> {
        let (meta, bytes) = self
            .attempt(what, || async {
                let result = self.0.objects.get(path).await?;
                let meta = result.meta.clone();
                let mut bytes = Vec::new();
                let mut stream = result.into_stream();
                // Stops at the limit, whatever length the server announced.
                while bytes.len() as u64 <= limit
                    && let Some(part) = stream.try_next().await?
                {
                    bytes.extend_from_slice(&part);
                }
                Ok((meta, bytes))
            })
            .await?;
        if bytes.len() as u64 > limit {
            return Err(OpenError::TooLarge { what, size: meta.size, limit }.into());
        }
        Ok((bytes, UpdateVersion { e_tag: meta.e_tag, version: meta.version }))
    }

    async fn get_blob(
        &self,
        what: &'static str,
        digest: Sha256,
        limit: u64,
    ) -> Result<Vec<u8>, RemoteError> {
        let (bytes, _) = self.get(what, &self.blob_path(digest), limit).await?;
        if Sha256::of(&bytes) != digest {
            return Err(OpenError::Digest { what, expected: digest }.into());
        }
        Ok(bytes)
    }

    async fn index(&self) -> Result<Option<(IndexJson, UpdateVersion)>, RemoteError> {
        match self.get("`index.json`", &self.path(INDEX_FILE), MAX_INDEX_JSON).await {
            Ok((bytes, version)) => Ok(Some((parse("`index.json`", &bytes)?, version))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The names in the remote, in order.
    ///
    /// # Errors
    /// A damaged `index.json`, or a server that does not answer.
    pub fn tags(&self) -> Result<Vec<Tag>, RemoteError> {
        let index = self.block_on(self.index())?.map(|(index, _)| index).unwrap_or_default();
        let mut tags = Vec::new();
        for descriptor in index.manifests {
            if let Some(name) = descriptor.annotations.get(REF_NAME) {
                tags.push(Tag { name: name.clone(), id: descriptor.digest("`index.json`")? });
            }
        }
        tags.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(tags)
    }

    async fn resolve(&self, name: &str) -> Result<Sha256, RemoteError> {
        if let Ok(id) = name.parse() {
            return Ok(id);
        }
        let index = self.index().await?.map(|(index, _)| index).unwrap_or_default();
        let mut known = Vec::new();
        for descriptor in index.manifests {
            match descriptor.annotations.get(REF_NAME) {
                Some(tag) if tag == name => return Ok(descriptor.digest("`index.json`")?),
                Some(tag) => known.push(tag.clone()),
                None => {}
            }
        }
        Err(OpenError::NoSuchName { name: name.to_owned(), known }.into())
    }

    async fn manifest_of(&self, name: &str) -> Result<(Sha256, Manifest), RemoteError> {
        let id = self.resolve(name).await?;
        let bytes = self.get_blob("the manifest", id, MAX_MANIFEST).await?;
        let manifest: Manifest = parse("the manifest", &bytes)?;
        manifest.check()?;
        Ok((id, manifest))
    }

    async fn read_snapshot(&self, name: &str) -> Result<(Sha256, Manifest, Vec<u8>), RemoteError> {
        let (id, manifest) = self.manifest_of(name).await?;
        let config = manifest.config.digest("the manifest")?;
        let config = self.get_blob("the configuration", config, MAX_CONFIG).await?;
        Ok((id, manifest, config))
    }

    /// Opens a snapshot where it is: fetches manifest, configuration and the index of every layer; pages
    /// follow when they are read.
    ///
    /// # Errors
    /// [`RemoteError`] by cause.
    pub fn load(&self, name: &str) -> Result<Snapshot, RemoteError> {
        let (id, manifest, config) = self.block_on(self.read_snapshot(name))?;
        let config: Config = parse("the configuration", &config)?;
        let layers = manifest.layers.clone();
        let snapshot = Snapshot::assemble(id, manifest, config, |number, root| {
            let descriptor = &layers[number];
            let digest = descriptor.digest("the manifest")?;
            let blob = blob::RangeBlob::new(self.clone(), digest, descriptor.size)?;
            let layer = Layer::from_blob(Box::new(blob), digest, descriptor.size, root)?;
            if descriptor.media_type != layer_type(layer.role(), layer.encoding()) {
                return Err(OpenError::MediaType {
                    what: "a layer",
                    found: descriptor.media_type.clone(),
                });
            }
            Ok(layer)
        })?;
        Ok(snapshot)
    }

    /// Makes `name` mean `id`. Where the store can compare versions, a concurrent change is noticed and
    /// the update done anew; elsewhere the last writer wins.
    async fn tag(&self, name: &str, id: Sha256, size: u64) -> Result<(), RemoteError> {
        const ROUNDS: usize = 10;
        let path = self.path(INDEX_FILE);
        for _ in 0..ROUNDS {
            let (mut index, version) = match self.index().await? {
                Some((index, version)) => (index, Some(version)),
                None => (IndexJson::default(), None),
            };
            let mut descriptor = Descriptor::new(MANIFEST_TYPE, id, size);
            descriptor.artifact_type = Some(ARTIFACT_TYPE.to_owned());
            descriptor.annotations.insert(REF_NAME.to_owned(), name.to_owned());
            index.manifests.retain(|d| d.annotations.get(REF_NAME).is_none_or(|n| n != name));
            index.manifests.push(descriptor);
            index.manifests.sort_by(|a, b| a.annotations.cmp(&b.annotations));
            let bytes = print("`index.json`", &index)?;
            let mode = version.map_or(PutMode::Create, PutMode::Update);
            let mut result = self.put(&path, bytes.clone(), mode).await;
            if let Err(RemoteError::Object {
                source:
                    object_store::Error::NotImplemented { .. }
                    | object_store::Error::NotSupported { .. },
                ..
            }) = result
            {
                result = self.put(&path, bytes, PutMode::Overwrite).await;
            }
            match result {
                Err(RemoteError::Object {
                    source:
                        object_store::Error::Precondition { .. }
                        | object_store::Error::AlreadyExists { .. },
                    ..
                }) => {}
                other => return other,
            }
        }
        Err(RemoteError::Contended(name.to_owned()))
    }

    async fn put(&self, path: &Path, bytes: Vec<u8>, mode: PutMode) -> Result<(), RemoteError> {
        let payload = PutPayload::from(bytes);
        self.attempt(path.as_ref(), || async {
            self.0.objects.put_opts(path, payload.clone(), mode.clone().into()).await
        })
        .await
        .map(drop)
    }
}
