//! State that all reconcilers share, and their errors.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::api::{Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::{Api, Client};
use reqwest::Url;
use serde_json::json;

use crate::resource::{CustomObject, Kind};
use crate::server::{Server, ServerError};

/// The name in managed fields.
pub const MANAGER: &str = "afresh-kube";
/// Pause after the first failure; it doubles with each further one.
const FIRST_RETRY: Duration = Duration::from_millis(200);
/// Maximum pause after a failure.
const MAX_RETRY: Duration = Duration::from_secs(30);

/// Settings of the controller.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The URL of the server in statuses.
    pub public_url: Url,
    /// The domain of the server, if ports have addresses.
    pub domain: Option<String>,
    /// The only namespace, or all.
    pub namespace: Option<String>,
    /// Templates of other runtime classes belong to another controller.
    pub ignore_other_runtimes: bool,
    /// Time after which the server pauses a sandbox that no controller prolongs.
    pub keep: Duration,
    /// Interval of checks of a sandbox.
    pub resync: Duration,
    /// Interval of searches for sandboxes without an object.
    pub sweep: Duration,
    /// Minimum age of sandboxes that such a search ends: younger ones may be in the making.
    pub orphan_age: Duration,
}

/// Why an object is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The Kubernetes API refused a request.
    #[error("the Kubernetes API: {0}")]
    Kubernetes(#[from] kube::Error),
    /// The afresh server refused a request.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// Something else in the cluster stands in the way.
    #[error("{message}")]
    Cluster {
        /// The reason of the condition.
        reason: &'static str,
        /// Cause and way out.
        message: String,
    },
}

impl Failure {
    /// The next attempt, if the object was changed while it was reconciled.
    #[must_use]
    pub fn conflict(&self) -> Option<Action> {
        let is_conflict = matches!(self, Self::Kubernetes(error) if code(error) == 409);
        is_conflict.then(|| Action::requeue(CONFLICT_RETRY))
    }

    /// The reason in a condition.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Kubernetes(_) => "ReconcilerError",
            Self::Server(error) => error.reason(),
            Self::Cluster { reason, .. } => reason,
        }
    }
}

/// Pause after a conflict with another writer, whose event follows.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);

/// The status code of an error of the Kubernetes API.
#[must_use]
pub fn code(error: &kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        _ => 0,
    }
}

/// What reconcilers share.
pub struct Context {
    /// The Kubernetes API.
    pub client: Client,
    /// The afresh server.
    pub server: Server,
    /// Settings.
    pub settings: Settings,
    /// The identifier of the cluster.
    pub cluster: String,
    /// Failures of each object since its last success.
    failures: Mutex<HashMap<String, FailureRecord>>,
}

/// The failures of an object.
#[derive(Clone, Copy, Debug)]
struct FailureRecord {
    count: u32,
    retry: Instant,
    /// The version of the specification that failed.
    generation: Option<i64>,
}

impl Context {
    /// A context without failures.
    #[must_use]
    pub fn new(client: Client, server: Server, settings: Settings, cluster: String) -> Self {
        Self { client, server, settings, cluster, failures: Mutex::default() }
    }

    fn failures(&self) -> MutexGuard<'_, HashMap<String, FailureRecord>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The API of a kind, in the namespace of an object.
    #[must_use]
    pub fn api<K: Kind>(&self, namespace: &str) -> Api<CustomObject<K>> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The API of a kind in all namespaces of the controller.
    #[must_use]
    pub fn api_of_all<K: Kind>(&self) -> Api<CustomObject<K>> {
        match &self.settings.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    /// Writes the status of an object, if it differs.
    ///
    /// # Errors
    /// If the API refuses it, or drops fields of it.
    pub async fn write_status<K: Kind>(
        &self,
        object: &CustomObject<K>,
        status: &K::Status,
    ) -> Result<(), Failure> {
        if object.status() == *status {
            return Ok(());
        }
        let api = self.api::<K>(object.namespace());
        // The identifier protects a new object of the same name.
        let patch = json!({"metadata": {"uid": object.uid()}, "status": status});
        let parameters = PatchParams::apply(MANAGER);
        let written = api.patch_status(object.name(), &parameters, &Patch::Merge(patch)).await;
        let written = match written {
            Err(error) if code(&error) == 404 => return Ok(()),
            written => written?,
        };
        if written.status() == *status {
            return Ok(());
        }
        let message = format!(
            "the custom resource definition of {} does not store the status of afresh; apply \
             deploy/agent-sandbox",
            K::KIND
        );
        Err(Failure::Cluster { reason: "DefinitionMismatch", message })
    }

    /// Sets the finalizers of an object.
    ///
    /// # Errors
    /// If the API refuses it, or the object changed in the meantime.
    pub async fn set_finalizers<K: Kind>(
        &self,
        object: &CustomObject<K>,
        finalizers: &[String],
    ) -> Result<(), Failure> {
        let patch = json!({"metadata": {
            "resourceVersion": object.metadata.resource_version,
            "finalizers": finalizers,
        }});
        let api = self.api::<K>(object.namespace());
        let parameters = PatchParams::apply(MANAGER);
        match api.patch_metadata(object.name(), &parameters, &Patch::Merge(patch)).await {
            // The object does not exist any more, and neither do its finalizers.
            Err(error) if code(&error) == 404 => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }

    /// The rest of the pause after a failure. The write of the status is an event of the object,
    /// and must not begin the next attempt. A change of the specification ends the pause.
    #[must_use]
    pub fn pause<K: Kind>(&self, object: &CustomObject<K>) -> Option<Action> {
        let record = self.failures().get(object.uid()).copied()?;
        let left = record.retry.saturating_duration_since(Instant::now());
        let applies = record.generation == object.metadata.generation && !left.is_zero();
        applies.then(|| Action::requeue(left))
    }

    /// Forgets the failures of an object.
    pub fn succeed(&self, uid: &str) {
        self.failures().remove(uid);
    }

    /// Counts a failure of an object: when to try again.
    pub fn fail<K: Kind>(&self, object: &CustomObject<K>, failure: &Failure) -> Action {
        let mut failures = self.failures();
        let count = failures.get(object.uid()).map_or(0, |record| record.count);
        let pause = FIRST_RETRY.saturating_mul(1 << count.min(16)).min(MAX_RETRY);
        let record = FailureRecord {
            count: count.saturating_add(1),
            retry: Instant::now() + pause,
            generation: object.metadata.generation,
        };
        failures.insert(object.uid().to_owned(), record);
        drop(failures);
        let (kind, namespace, name) = (K::KIND, object.namespace(), object.name());
        tracing::warn!(kind, namespace, name, %failure, ?pause, "not reconciled");
        Action::requeue(pause)
    }
}
