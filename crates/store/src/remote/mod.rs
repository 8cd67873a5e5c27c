//! Snapshots on servers: object stores (S3 and compatible ones, Google's, Azure's), OCI registries,
//! or a directory.
//!
//! An object store holds the same layout as a local [`Store`](crate::Store), object for file, so
//! any OCI tool that can copy a directory can copy it too; a registry holds the same blobs and
//! manifests under its own interface. [`Remote::push`] and [`Remote::pull`] copy snapshots;
//! [`Remote::load`] opens one where it is, and its pages are fetched by range requests when they
//! are used. Everything fetched is checked against its digest before it is used, whatever the
//! server sent.
//!
//! Promises: a name changes its target last and at once, so a push that is killed leaves the old
//! target or the new one; every request has a time limit and a bounded number of attempts, so a
//! dead server is an error and not a hang; a short outage of a server delays its guests by that
//! time ([`RetryPolicy::outage`]); a server that fails most requests does not get more of them,
//! because retries have a budget ([`Remote::retry_counts`]); [`Remote::load`] takes few round trips
//! to the first page.
//!
//! Calls block. They must not be made from inside an asynchronous task.

mod backend;
mod blob;
mod cache;
mod collect;
mod container;
mod error;
mod list;
mod listen;
mod load;
mod objects;
mod open;
mod pull;
mod push;
mod registry;
mod retry;
mod retry_budget;
mod retry_ledger;
mod stored_object;
mod turns;
mod unanswered_names;

use std::path::PathBuf;
use std::sync::Arc;

use afresh_sys::fork;
use object_store::ObjectStore;
use object_store::path::Path;
use tokio::runtime::{Builder, Runtime};

use crate::Tag;
use backend::Backend;
use objects::Objects;
use retry::Retrier;
use retry_budget::RetryBudget;
use unanswered_names::UnansweredNames;

pub use crate::ReplacedName;
pub use cache::trim_cache;
pub use collect::{GRACE_PERIOD, GcRoot};
pub use error::{Cause, RemoteError};
pub use push::Progress;
pub use retry::RetryPolicy;
pub use retry_budget::RetryCounts;

/// A server that holds snapshots, or a part of one. Cheap to clone.
#[derive(Clone)]
pub struct Remote {
    backend: Arc<dyn Backend>,
    threads: Arc<Threads>,
    cache: Option<PathBuf>,
    name: Option<String>,
    budget: Arc<RetryBudget>,
    unanswered: Arc<UnansweredNames>,
}

/// The runtime, `None` only while it is dropped.
struct Threads {
    runtime: Option<Runtime>,
    /// The process that has its threads.
    generation: u32,
}

impl Threads {
    fn runtime(&self) -> Result<&Runtime, RemoteError> {
        let here = self.generation == fork::generation();
        self.runtime.as_ref().filter(|_| here).ok_or(RemoteError::Forked)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.generation != fork::generation() {
            // A child of a fork has none of the threads, and the descriptors that wake them are
            // shared with the parent.
            std::mem::forget(runtime);
        } else {
            // Does not wait, so that the last clone may be dropped anywhere.
            runtime.shutdown_background();
        }
    }
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({})", self.backend)
    }
}

impl Remote {
    fn with_backend(
        backend: Arc<dyn Backend>,
        name: Option<String>,
        budget: Arc<RetryBudget>,
    ) -> Result<Self, RemoteError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("afresh-remote")
            .enable_all()
            .build()
            .map_err(RemoteError::Runtime)?;
        let threads = Arc::new(Threads { runtime: Some(runtime), generation: fork::generation() });
        Ok(Self { backend, threads, cache: None, name, budget, unanswered: Arc::default() })
    }

    /// Uses any object store. `retry` is the policy for failed requests.
    ///
    /// # Errors
    /// [`RemoteError::Runtime`] when threads cannot be started.
    pub fn with_objects(
        objects: Arc<dyn ObjectStore>,
        prefix: Path,
        retry: RetryPolicy,
    ) -> Result<Self, RemoteError> {
        let retrier = Retrier::from(retry);
        let budget = retrier.budget.clone();
        let objects = Objects::new(objects.clone(), objects, prefix, retrier);
        Self::with_backend(Arc::new(objects), None, budget)
    }

    /// The same remote with a cache in `dir` for reads of snapshots opened in place. Any number of
    /// processes may share a directory; see [`trim_cache`].
    #[must_use]
    pub fn with_cache(&self, dir: impl Into<PathBuf>) -> Self {
        Self { cache: Some(dir.into()), ..self.clone() }
    }

    /// Starts to open the connections that [`Remote::load`] uses, and returns at once. A caller
    /// that has other work first, such as compiling the guest, saves the time of the handshakes. It
    /// costs four small requests.
    pub fn prepare(&self) {
        if let Ok(runtime) = self.threads.runtime() {
            self.backend.prepare(runtime.handle());
        }
    }

    /// The name in the address: the tag or digest of an `oci://` address.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Retries of this remote and its clones. They share a budget, which a retry draws on and
    /// successes refill: 100 retries while every request fails, and one more each second.
    #[must_use]
    pub fn retry_counts(&self) -> RetryCounts {
        self.budget.counts()
    }

    /// The names in the remote, in order. In a registry they are all tags of the repository, also
    /// those of other artifacts.
    ///
    /// # Errors
    /// A damaged `index.json`, or a server that does not answer.
    pub fn tags(&self) -> Result<Vec<Tag>, RemoteError> {
        self.block_on(self.backend.tags())
    }

    fn block_on<T>(
        &self,
        work: impl Future<Output = Result<T, RemoteError>>,
    ) -> Result<T, RemoteError> {
        self.threads.runtime()?.block_on(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_of_a_fork_is_refused_by_name_and_drops_a_remote_without_waiting() {
        let remote = Remote::with_objects(
            Arc::new(object_store::memory::InMemory::new()),
            Path::from("snapshots"),
            RetryPolicy::default(),
        )
        .unwrap();
        assert!(remote.tags().is_ok_and(|tags| tags.is_empty()));
        let mut own = Some(remote);
        assert!(afresh_sys::child_passes(|| {
            let Some(remote) = own.take() else { return false };
            remote.prepare();
            let refused = matches!(remote.tags(), Err(RemoteError::Forked));
            drop(remote);
            refused
        }));
        assert!(own.is_some_and(|remote| remote.tags().is_ok()));
    }
}
