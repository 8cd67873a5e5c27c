//! Object stores as remotes: the files of an image layout, one object each.
//!
//! Names are in `index.json`, which is replaced last, and only where no other writer replaced it
//! since it was read: the store compares versions, and one that does not is refused. A directory
//! has the lock of a local store.

mod conditions;
mod replace;
mod sweep;

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use afresh_sys::crash::point;
use async_trait::async_trait;
use futures_util::future::try_join;
use futures_util::{StreamExt, TryFutureExt, TryStreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload, UpdateVersion};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;

use self::conditions::is_conflict;
use super::backend::{Backend, CONNECTIONS, ResolvedName, Source};
use super::listen::object_options;
use super::retry::Retrier;
use super::stored_object::{NAMED_WITHIN, StoredObject};
use super::{RemoteError, retry};
use crate::disk::two_clocks::TwoClocks;
use crate::format::descriptor::{Descriptor, JOURNALS};
use crate::format::layout::{IndexJson, resolve_in, tags_of};
use crate::format::manifest::{INDEX_FILE, LAYOUT_FILE, LAYOUT_TEXT, MAX_INDEX_JSON, parse};
use crate::local::naming::ExpectedName;
use crate::local::store::{INDEX_LOCK, check_name};
use crate::turn::turn_name;
use crate::{OpenError, SaveError, Sha256, Tag, TurnError};

/// Bytes in one part of a large upload; S3 wants at least 5 MiB.
pub(super) const PART: u64 = 8 << 20;
/// Parts that an upload may have: S3 allows 10,000.
const MAX_PARTS: u64 = 9_000;
/// Parts in flight.
const IN_FLIGHT: usize = 4;
/// Bytes of an object in a list, about.
const LISTED_BYTES: usize = 256;
/// How often a change of the names is tried when others change them too.
const ROUNDS: usize = 10;

/// Waits until fewer than `most` parts are under way.
async fn wait_for_room(
    parts: &mut JoinSet<object_store::Result<()>>,
    most: usize,
) -> object_store::Result<()> {
    while parts.len() >= most
        && let Some(ended) = parts.join_next().await
    {
        ended??;
    }
    Ok(())
}

/// An object store that holds a layout under a prefix.
pub(super) struct Objects {
    objects: Arc<dyn ObjectStore>,
    /// For uploads in parts. A part that failed cannot be sent again from outside, so this client
    /// repeats requests itself; `objects` does not.
    uploads: Arc<dyn ObjectStore>,
    prefix: Path,
    retry: Retrier,
    /// Marks of collectors that were killed, as far as they were waited for.
    dead_marks: Mutex<HashSet<Path>>,
    /// Set once the store has kept conditions of writes.
    conditional: OnceCell<()>,
    /// Where the store is a directory: the file that is locked while names change.
    lock: Option<PathBuf>,
}

impl fmt::Display for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.objects, self.prefix)
    }
}

impl Objects {
    pub(super) fn new(
        objects: Arc<dyn ObjectStore>,
        uploads: Arc<dyn ObjectStore>,
        prefix: Path,
        retry: Retrier,
    ) -> Self {
        let (dead_marks, conditional) = (Mutex::default(), OnceCell::new());
        Self { objects, uploads, prefix, retry, dead_marks, conditional, lock: None }
    }

    /// The directory `root`, whose names are guarded by a lock.
    pub(super) fn in_directory(root: PathBuf, prefix: Path, retry: Retrier) -> Self {
        let files: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new().with_fsync(true));
        Self { lock: Some(root.join(INDEX_LOCK)), ..Self::new(files.clone(), files, prefix, retry) }
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn turn_path(&self, journal: &str, number: usize) -> Path {
        self.path(&format!("{JOURNALS}/{journal}/{}", turn_name(number)))
    }

    fn blob_path(&self, digest: Sha256) -> Path {
        self.path(&format!("blobs/sha256/{}", digest.hex()))
    }

    async fn attempt<T, F>(&self, what: &str, request: impl Fn() -> F) -> Result<T, RemoteError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let object = |source| RemoteError::Object { what: what.to_owned(), source };
        self.retry.attempt(what, || request().map_err(object)).await
    }

    /// Waits for all attempts of a request that repeats itself; each may send `bytes` bytes.
    async fn patiently<T>(
        &self,
        what: &str,
        bytes: u64,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, RemoteError> {
        let after = self.retry.policy.sending(bytes) * self.retry.policy.attempts.max(1);
        match tokio::time::timeout(after, work).await {
            Ok(result) => {
                result.map_err(|source| RemoteError::Object { what: what.to_owned(), source })
            }
            Err(_) => Err(RemoteError::Timeout { what: what.to_owned(), after }),
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
                let result = self.objects.get_opts(path, object_options(None)).await?;
                retry::answered();
                let meta = result.meta.clone();
                let mut bytes = Vec::new();
                let mut stream = result.into_stream();
                // Stops at the limit, whatever length the server announced.
                while bytes.len() as u64 <= limit
                    && let Some(part) = stream.try_next().await?
                {
                    retry::received(part.len());
                    bytes.extend_from_slice(&part);
                }
                Ok((meta, bytes))
            })
            .await?;
        if bytes.len() as u64 > limit {
            let size = meta.size.max(bytes.len() as u64);
            return Err(OpenError::TooLarge { what, size, limit }.into());
        }
        Ok((bytes, UpdateVersion { e_tag: meta.e_tag, version: meta.version }))
    }

    /// The objects below `prefix`, of which there may be `most`.
    async fn list_at_most(
        &self,
        what: &str,
        prefix: &Path,
        most: usize,
    ) -> Result<Vec<ObjectMeta>, RemoteError> {
        let list = || async {
            let (mut found, mut objects) = (Vec::new(), self.objects.list(Some(prefix)));
            while let Some(object) = objects.try_next().await? {
                if found.len() == most {
                    return Ok(None);
                }
                // A list of many pages makes progress.
                retry::received(LISTED_BYTES);
                found.push(object);
            }
            Ok(Some(found))
        };
        self.attempt(what, list).await?.ok_or_else(|| RemoteError::Protocol {
            what: format!("{self}: the list of {what}"),
            why: format!("it has more than {most} objects"),
        })
    }

    async fn put_object(
        &self,
        path: &Path,
        bytes: Vec<u8>,
        mode: PutMode,
    ) -> Result<(), RemoteError> {
        point();
        let what = path.as_ref();
        let payload = PutPayload::from(bytes);
        let put = || async {
            let put = self.objects.put_opts(path, payload.clone(), mode.clone().into()).await;
            put.map_err(|source| RemoteError::Object { what: what.to_owned(), source })
        };
        let sent = payload.content_length() as u64;
        let answer = self.retry.attempt_sending(what, sent, put).await;
        point();
        answer.map(drop)
    }

    async fn index(&self) -> Result<Option<(IndexJson, UpdateVersion)>, RemoteError> {
        match self.get("`index.json`", &self.path(INDEX_FILE), MAX_INDEX_JSON).await {
            Ok((bytes, version)) => Ok(Some((parse("`index.json`", &bytes)?, version))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Objects {
    /// The descriptors in `index.json` that may mean snapshots.
    async fn snapshots(&self) -> Result<Vec<Descriptor>, RemoteError> {
        let mut index = self.index().await?.map(|(index, _)| index).unwrap_or_default();
        index.manifests.retain(|descriptor| descriptor.is_snapshot() != Some(false));
        Ok(index.manifests)
    }
}

#[async_trait(?Send)]
impl Backend for Objects {
    fn prepare(&self, tasks: &Handle) {
        for _ in 0..CONNECTIONS {
            let (objects, path) = (self.objects.clone(), self.path(LAYOUT_FILE));
            let limit = self.retry.policy.timeout;
            // Later requests handle its answer, or the lack of one.
            drop(tasks.spawn(async move {
                tokio::time::timeout(limit, objects.head(&path)).await.map(drop)
            }));
        }
    }

    fn check_name(&self, name: &str) -> Result<(), RemoteError> {
        Ok(check_name(name)?)
    }

    async fn resolve(&self, name: &str) -> Result<ResolvedName, RemoteError> {
        if let Ok(id) = name.parse() {
            return Ok(ResolvedName { id, size: None, manifest: None });
        }
        let snapshots = self.snapshots().await?;
        let found = resolve_in(&snapshots, name)?;
        let id = found.digest("`index.json`")?;
        Ok(ResolvedName { id, size: Some(found.size), manifest: None })
    }

    async fn tags(&self) -> Result<Vec<Tag>, RemoteError> {
        Ok(tags_of(&self.snapshots().await?)?)
    }

    async fn manifest(&self, id: Sha256, limit: u64) -> Result<Vec<u8>, RemoteError> {
        self.blob("the manifest", id, limit).await
    }

    async fn blob(
        &self,
        what: &'static str,
        digest: Sha256,
        limit: u64,
    ) -> Result<Vec<u8>, RemoteError> {
        Ok(self.get(what, &self.blob_path(digest), limit).await?.0)
    }

    async fn range(&self, digest: Sha256, range: Range<u64>) -> Result<Vec<u8>, RemoteError> {
        let path = self.blob_path(digest);
        let what = digest.to_string();
        let wanted = range.end - range.start;
        let object = |source| RemoteError::Object { what: what.clone(), source };
        self.retry
            .persist(&what, || async {
                let part = object_options(Some(range.clone()));
                let result = self.objects.get_opts(&path, part).await.map_err(object)?;
                retry::answered();
                let mut bytes = Vec::with_capacity(wanted as usize);
                let mut stream = result.into_stream();
                // Stops at what was asked for, whatever the server sends.
                while bytes.len() as u64 <= wanted
                    && let Some(part) = stream.try_next().await.map_err(object)?
                {
                    retry::received(part.len());
                    bytes.extend_from_slice(&part);
                }
                let found = bytes.len() as u64;
                if found != wanted {
                    return Err(RemoteError::Length { what: what.clone(), found, wanted });
                }
                Ok(bytes)
            })
            .await
    }

    async fn has(&self, digest: Sha256, size: u64) -> Result<bool, RemoteError> {
        let path = self.blob_path(digest);
        match self.attempt(&digest.to_string(), || self.objects.head(&path)).await {
            // Objects appear whole under their digest, so one of the right size is the right one.
            // An old one may be collected before it has a name.
            Ok(meta) => Ok(meta.size == size && sweep::trusted(&meta)),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn put(&self, digest: Sha256, bytes: Vec<u8>) -> Result<(), RemoteError> {
        self.put_object(&self.blob_path(digest), bytes, PutMode::Overwrite).await
    }

    async fn put_parts(
        &self,
        digest: Sha256,
        size: u64,
        source: &dyn Source,
        sent: &mut dyn FnMut(u64),
    ) -> Result<(), RemoteError> {
        let to = self.blob_path(digest);
        let what = digest.to_string();
        let part_len = PART.max(size.div_ceil(MAX_PARTS));
        point();
        let mut upload = self.patiently(&what, 0, self.uploads.put_multipart(&to)).await?;
        let mut parts = JoinSet::new();
        let outcome = async {
            let mut at = 0;
            while at < size {
                let mut part = vec![0; part_len.min(size - at) as usize];
                source.read(at, &mut part)?;
                self.patiently(&what, part_len, wait_for_room(&mut parts, IN_FLIGHT)).await?;
                point();
                at += part.len() as u64;
                parts.spawn(upload.put_part(part.into()));
                sent(at);
            }
            // All that is in flight, and then the server puts it together.
            let left = part_len * IN_FLIGHT as u64;
            point();
            let finish = async {
                wait_for_room(&mut parts, 1).await?;
                upload.complete().await.map(drop)
            };
            self.patiently(&what, left, finish).await
        }
        .await;
        if outcome.is_err() {
            // A store keeps the parts of an upload that is not given up. The first error is the one
            // to report.
            parts.shutdown().await;
            let _ = self.patiently(&what, 0, upload.abort()).await;
        }
        point();
        outcome
    }

    fn keeps_turns(&self) -> bool {
        true
    }

    async fn turns(&self, journal: &str, limit: u64) -> Result<Vec<Vec<u8>>, RemoteError> {
        let found = self.list_turns(journal).await?;
        let size = found.iter().fold(0_u64, |sum, turn| sum.saturating_add(turn.size));
        if size > limit {
            let what = "the journal of the session";
            return Err(OpenError::TooLarge { what, size, limit }.into());
        }
        for (number, turn) in found.iter().enumerate() {
            if turn.location != self.turn_path(journal, number) {
                let source = TurnError::Truncated(0);
                return Err(OpenError::Turn { number, source }.into());
            }
        }
        let turns = found.into_iter().map(|turn| async move {
            Ok(self.get("a turn of the session", &turn.location, turn.size).await?.0)
        });
        stream::iter(turns).buffered(IN_FLIGHT).try_collect().await
    }

    async fn put_turn(
        &self,
        journal: &str,
        number: usize,
        turn: &[u8],
    ) -> Result<bool, RemoteError> {
        let path = self.turn_path(journal, number);
        match self.put_object(&path, turn.to_vec(), PutMode::Create).await {
            Ok(()) => Ok(true),
            // An attempt whose answer was lost may have been the one that put it there.
            Err(error) if is_conflict(&error) => {
                match self.get("a turn of the session", &path, turn.len() as u64).await {
                    Ok((there, _)) => Ok(there == turn),
                    Err(RemoteError::Open(OpenError::TooLarge { .. })) => Ok(false),
                    // Not known: another turn must not be assumed.
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    async fn stored(&self) -> Result<Vec<StoredObject>, RemoteError> {
        self.all_stored().await
    }

    async fn sweep(
        &self,
        batch: &[StoredObject],
        grace: Duration,
    ) -> Result<Vec<StoredObject>, RemoteError> {
        self.sweep_marked(batch, grace).await
    }

    async fn settled(&self) -> Result<bool, RemoteError> {
        self.wait_for_marks().await
    }

    async fn claim(&self, keeper: &str) -> Result<(), RemoteError> {
        self.put_keeper(keeper).await
    }

    async fn keepers(&self) -> Result<Vec<String>, RemoteError> {
        self.all_keepers().await
    }

    async fn index_json(&self) -> Result<Option<serde_json::Value>, RemoteError> {
        match self.get("`index.json`", &self.path(INDEX_FILE), MAX_INDEX_JSON).await {
            Ok((bytes, _)) => Ok(Some(parse("`index.json`", &bytes)?)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn put_manifest(&self, id: Sha256, manifest: Vec<u8>) -> Result<(), RemoteError> {
        self.put(id, manifest).await
    }

    async fn publish(
        &self,
        name: &str,
        id: Sha256,
        manifest: Vec<u8>,
        (expected, begun): (ExpectedName, TwoClocks),
    ) -> Result<(), RemoteError> {
        if self.lock.is_none() {
            self.check_conditions().await?;
        }
        let size = manifest.len() as u64;
        let layout = self.path(LAYOUT_FILE);
        try_join(
            self.put(id, manifest.clone()),
            self.put_object(&layout, LAYOUT_TEXT.into(), PutMode::Overwrite),
        )
        .await?;
        let _lock = self.lock.as_deref().map(|path| self.lock_names(path)).transpose()?;
        if self.lock.is_some() {
            self.check_blobs(id, &manifest).await?;
        }
        for _ in 0..ROUNDS {
            let (mut index, version) = match self.index().await? {
                Some((index, version)) => (index, Some(version)),
                None => (IndexJson::default(), None),
            };
            if index.target(name) == Some(id) {
                // Also after a write whose answer was lost.
                return Ok(());
            }
            // The host may have been suspended.
            if begun.is_older_than(NAMED_WITHIN) {
                return Err(RemoteError::Collected);
            }
            if !self.replaces(&index, name, expected).await? {
                return Err(SaveError::Moved(name.into()).into());
            }
            index.rename(name, Some(Descriptor::named(id, size, name)));
            if self.replace_index(index.bytes()?, version).await? {
                return Ok(());
            }
        }
        Err(RemoteError::Contended(name.to_owned()))
    }
}
