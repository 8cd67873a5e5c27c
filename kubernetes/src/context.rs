//! State that all reconcilers share, and their errors.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, Resource};
use reqwest::Url;
use serde_json::json;
use tokio::sync::Semaphore;

use crate::condition::READY;
use crate::health::Monitor;
use crate::interest::InterestTable;
use crate::lease::LeaseHolder;
use crate::metrics::{ErrorSource, ReconcileResult, SandboxEvent};
use crate::queue::ObjectKey;
use crate::resource::{CONTROLLER_ANNOTATION, CustomObject, Kind};
use crate::server::{Server, ServerError};

/// The name in managed fields.
pub const MANAGER: &str = "afresh-kube";
/// The finalizer of objects with a sandbox.
pub const FINALIZER: &str = "agents.x-k8s.io/afresh";
/// Pause after the first failure; it doubles with each further one.
const FIRST_RETRY: Duration = Duration::from_millis(200);
/// Maximum pause after a failure.
pub const MAX_RETRY: Duration = Duration::from_secs(30);
/// Pause after a conflict with another writer, whose event follows.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);
/// Objects that are read at once: an object has up to 3 MiB until it is decoded.
const MAX_READS: usize = 16;

/// Reasons of `Ready` of an object that waits for the controller or the server. Others are faults
/// of its specification, or wishes.
const DELAYS: [&str; 6] = [
    "BudgetExceeded",
    "KeyRefused",
    "ReconcilerError",
    "SandboxNotFound",
    "SandboxNotReady",
    "ServerUnavailable",
];

/// When an object is looked at again. None waits for a change.
pub type Wait = Option<Duration>;

/// Settings of the controller.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The identifier of the controller, which no other one of the cluster may have.
    pub controller: String,
    /// The URL of the server in statuses.
    pub public_url: Url,
    /// The domain of the server, if ports have addresses.
    pub domain: Option<String>,
    /// The only namespace, or all.
    pub namespace: Option<String>,
    /// Templates of other runtime classes belong to another controller.
    pub ignore_other_runtimes: bool,
    /// Images that objects may name; empty for the templates of the server.
    pub images: Vec<String>,
    /// Time after which the server pauses a sandbox that no controller prolongs.
    pub keep: Duration,
    /// Interval of checks of a sandbox.
    pub resync: Duration,
    /// Interval of searches for sandboxes without an object.
    pub sweep: Duration,
    /// Minimum age of sandboxes that such a search ends: younger ones may be in the making.
    pub orphan_age: Duration,
    /// Time between two looks at a sandbox that the server does not know, before it counts as
    /// ended.
    pub confirmation: Duration,
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
    /// Another controller is at work, and this one must change nothing.
    #[error("another controller has taken the lease")]
    LeaseLost,
    /// The object was removed while it was reconciled.
    #[error("the object does not exist any more")]
    Gone,
}

impl Failure {
    /// Whether the object was changed while it was reconciled.
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Kubernetes(error) if code(error) == 409)
    }

    /// Whether the status of the object names it.
    #[must_use]
    pub fn is_reported(&self) -> bool {
        !self.is_conflict() && !matches!(self, Self::LeaseLost | Self::Gone)
    }

    /// The reason in a condition.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Kubernetes(_) | Self::LeaseLost | Self::Gone => "ReconcilerError",
            Self::Server(error) => error.reason(),
            Self::Cluster { reason, .. } => reason,
        }
    }
}

impl From<&Failure> for ReconcileResult {
    fn from(failure: &Failure) -> Self {
        if failure.is_conflict() || matches!(failure, Failure::Gone) {
            Self::Conflict
        } else {
            Self::Failure
        }
    }
}

impl From<&Failure> for ErrorSource {
    fn from(failure: &Failure) -> Self {
        match failure {
            Failure::Kubernetes(_) => Self::Kubernetes,
            Failure::Server(_) => Self::Server,
            Failure::Cluster { .. } | Failure::Gone => Self::Object,
            Failure::LeaseLost => Self::Lease,
        }
    }
}

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
    /// The lease of this controller.
    pub lease: Arc<LeaseHolder>,
    /// Objects that wait for others.
    pub interests: InterestTable,
    /// Metrics and health.
    pub monitor: Arc<Monitor>,
    reads: Semaphore,
    /// Failures of each object since its last success.
    failures: Mutex<HashMap<ObjectKey, FailureRecord>>,
    observations: Mutex<HashMap<ObjectKey, Observation>>,
    /// When this process first saw an object that was not ready since.
    sights: Mutex<HashMap<ObjectKey, Instant>>,
}

/// The failures of an object.
#[derive(Clone, Debug)]
struct FailureRecord {
    uid: String,
    count: u32,
    retry: Instant,
    /// The version of the specification that failed.
    generation: Option<i64>,
}

/// The memory of this process of a sandbox.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    /// The identifier of the object.
    pub uid: String,
    /// Since when the server does not know it.
    pub missing: Option<Instant>,
    /// When its Secret was last written or seen.
    pub secret: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of an object.
#[must_use]
pub fn key_of<K: Kind>(object: &CustomObject<K>) -> ObjectKey {
    ObjectKey::new::<K>(object.namespace(), object.name())
}

impl Context {
    /// A context without failures.
    #[must_use]
    pub fn new(
        client: Client,
        server: Server,
        settings: Settings,
        cluster: String,
        lease: Arc<LeaseHolder>,
        monitor: Arc<Monitor>,
    ) -> Self {
        Self {
            client,
            server,
            settings,
            cluster,
            lease,
            interests: InterestTable::default(),
            monitor,
            reads: Semaphore::new(MAX_READS),
            failures: Mutex::default(),
            observations: Mutex::default(),
            sights: Mutex::default(),
        }
    }

    /// Notes that an object exists, from a watch.
    pub fn see(&self, key: &ObjectKey) {
        let mut sights = lock(&self.sights);
        // A key is cloned for a new object alone.
        if !sights.contains_key(key) {
            sights.insert(key.clone(), Instant::now());
        }
    }

    /// Forgets when an object was first seen, and adds the time to the metrics if it became ready.
    pub(crate) fn end_sight(&self, key: &ObjectKey, is_ready: bool) {
        let seen = lock(&self.sights).remove(key);
        if let Some(seen) = seen.filter(|_| is_ready) {
            self.monitor.metrics.observe_ready(key.kind, seen.elapsed());
        }
    }

    /// The API of a kind, in the namespace of an object.
    #[must_use]
    pub fn api<K: Kind>(&self, namespace: &str) -> Api<CustomObject<K>> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The API of a kind in all namespaces of the controller.
    #[must_use]
    pub fn api_of_all<R>(&self) -> Api<R>
    where
        R: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        match &self.settings.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    /// Reads an object, if it exists.
    ///
    /// # Errors
    /// If the API refuses it.
    pub async fn read<K: Kind>(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<CustomObject<K>>, Failure> {
        // The semaphore is never closed.
        let _permit = self.reads.acquire().await;
        Ok(self.api::<K>(namespace).get_opt(name).await?)
    }

    /// Whether another controller of the cluster serves an object.
    #[must_use]
    pub fn is_foreign<K: Kind>(&self, object: &CustomObject<K>) -> bool {
        let controller = object.annotation(CONTROLLER_ANNOTATION);
        controller.is_some_and(|controller| controller != self.settings.controller)
    }

    /// Writes the status of the version of an object that was read, if it differs.
    ///
    /// # Errors
    /// If the API refuses it, the object changed in the meantime, or fields of the status are
    /// dropped.
    pub async fn write_status<K: Kind>(
        &self,
        object: &CustomObject<K>,
        status: &K::Status,
    ) -> Result<(), Failure> {
        if object.status() == *status {
            return Ok(());
        }
        let api = self.api::<K>(object.namespace());
        // A controller that lost its lease overwrites nothing, and a new object of the same name is
        // another one.
        let version = &object.metadata.resource_version;
        let metadata = json!({"uid": object.uid(), "resourceVersion": version});
        let patch = json!({"metadata": metadata, "status": status});
        let parameters = PatchParams::apply(MANAGER);
        let written = api.patch_status(object.name(), &parameters, &Patch::Merge(patch)).await;
        let written = match written {
            Err(error) if code(&error) == 404 => return Ok(()),
            written => written?,
        };
        if written.status() == *status {
            self.note_readiness(&key_of(object), status);
            return Ok(());
        }
        let message = format!(
            "the custom resource definition of {} does not store the status of afresh; apply \
             deploy/agent-sandbox",
            K::KIND
        );
        Err(Failure::Cluster { reason: "DefinitionMismatch", message })
    }

    /// Ends the time to the readiness of an object, which a fault of its specification ends too.
    fn note_readiness(&self, key: &ObjectKey, status: &impl serde::Serialize) {
        let status = json!(status);
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        let Some(ready) = conditions.find(|condition| condition["type"] == READY) else { return };
        let is_ready = ready["status"] == "True";
        if is_ready || !DELAYS.iter().any(|delay| ready["reason"] == *delay) {
            self.end_sight(key, is_ready);
        }
    }

    async fn write_metadata<K: Kind>(
        &self,
        object: &mut CustomObject<K>,
        mut metadata: serde_json::Value,
    ) -> Result<(), Failure> {
        metadata["resourceVersion"] = json!(object.metadata.resource_version);
        metadata["uid"] = json!(object.uid());
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let api = self.api::<K>(object.namespace());
        match api.patch(object.name(), &PatchParams::apply(MANAGER), &patch).await {
            Err(error) if code(&error) == 404 => Err(Failure::Gone),
            other => {
                object.metadata = other?.metadata;
                Ok(())
            }
        }
    }

    /// Makes this controller the one of an object, whose end waits for it from now on.
    ///
    /// # Errors
    /// If the API refuses it, or the object changed or was removed in the meantime.
    pub async fn take<K: Kind>(&self, object: &mut CustomObject<K>) -> Result<(), Failure> {
        let is_ours = object.annotation(CONTROLLER_ANNOTATION).is_some();
        if object.has_finalizer(FINALIZER) && is_ours {
            return Ok(());
        }
        let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|name| name != FINALIZER);
        finalizers.push(FINALIZER.to_owned());
        let annotations = json!({CONTROLLER_ANNOTATION: self.settings.controller});
        let metadata = json!({"finalizers": finalizers, "annotations": annotations});
        self.write_metadata(object, metadata).await
    }

    /// Makes this controller the one of an object, whose end does not wait for it.
    ///
    /// # Errors
    /// If the API refuses it, or the object changed or was removed in the meantime.
    pub async fn mark<K: Kind>(&self, object: &mut CustomObject<K>) -> Result<(), Failure> {
        if object.annotation(CONTROLLER_ANNOTATION).is_some() {
            return Ok(());
        }
        let annotations = json!({CONTROLLER_ANNOTATION: self.settings.controller});
        self.write_metadata(object, json!({"annotations": annotations})).await
    }

    /// Lets an object go.
    ///
    /// # Errors
    /// If the API refuses it, or the object changed in the meantime.
    pub async fn release<K: Kind>(&self, object: &mut CustomObject<K>) -> Result<(), Failure> {
        let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|name| name != FINALIZER);
        match self.write_metadata(object, json!({"finalizers": finalizers})).await {
            // It has no finalizers any more.
            Err(Failure::Gone) => Ok(()),
            other => other,
        }
    }

    /// Whether exactly this object exists, and is not to end.
    ///
    /// # Errors
    /// If the API does not answer.
    pub async fn is_wanted<K: Kind>(&self, object: &CustomObject<K>) -> Result<bool, Failure> {
        let found = self.read::<K>(object.namespace(), object.name()).await?;
        let is_same = |found: &CustomObject<K>| {
            found.uid() == object.uid() && found.metadata.deletion_timestamp.is_none()
        };
        Ok(found.as_ref().is_some_and(is_same))
    }

    /// Deletes exactly this object.
    ///
    /// # Errors
    /// If the API refuses it. An object that does not exist any more is no error.
    pub async fn delete<K: Kind>(&self, object: &CustomObject<K>) -> Result<(), Failure> {
        let parameters = DeleteParams::default().preconditions(Preconditions {
            uid: object.metadata.uid.clone(),
            resource_version: None,
        });
        let path = <CustomObject<K> as Resource>::url_path(&(), Some(object.namespace()));
        let request = kube::core::Request::new(path).delete(object.name(), &parameters);
        let request = request.map_err(kube::Error::BuildRequest)?;
        // The answer has the whole object, which is of no interest.
        match self.client.request_text(request).await {
            Err(error) if matches!(code(&error), 404 | 409) => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }

    /// The rest of the pause after a failure. The write of the status is an event of the object,
    /// and must not begin the next attempt. A change of the specification ends the pause.
    #[must_use]
    pub fn pause<K: Kind>(&self, object: &CustomObject<K>) -> Wait {
        let record = lock(&self.failures).get(&key_of(object)).cloned()?;
        let left = record.retry.saturating_duration_since(Instant::now());
        let is_same = record.uid == object.uid() && record.generation == object.metadata.generation;
        Some(left).filter(|left| is_same && !left.is_zero())
    }

    /// Forgets the failures of an object.
    pub fn succeed<K: Kind>(&self, object: &CustomObject<K>) {
        let metrics = &self.monitor.metrics;
        metrics.count_reconcile(K::KIND, ReconcileResult::Success);
        let mut failures = lock(&self.failures);
        failures.remove(&key_of(object));
        metrics.note_failing(failures.len());
    }

    /// Ends a sandbox, if it exists.
    ///
    /// # Errors
    /// If the server does not answer.
    pub async fn kill(&self, id: &str) -> Result<(), ServerError> {
        self.server.kill(id).await?;
        self.monitor.metrics.count_sandbox(SandboxEvent::Ended);
        Ok(())
    }

    /// Notes the tenant of the key, which has a sandbox of an object, if the server names it.
    pub async fn note_tenant(&self) {
        if self.monitor.tenant.is_noted() || self.monitor.is_nameless() {
            return;
        }
        match self.server.tenant().await {
            Ok(Some(tenant)) => self.monitor.tenant.note(&tenant),
            Ok(None) => {}
            // The next reconciliation notes it.
            Err(error) => tracing::debug!(%error, "the server does not name the tenant"),
        }
    }

    /// Compares the tenant of the key with the noted one.
    ///
    /// # Errors
    /// If they differ, or the server does not answer.
    pub async fn check_tenant(&self) -> Result<(), Failure> {
        let reported = self.server.tenant().await?;
        match self.monitor.tenant.fault(reported.as_deref()) {
            Some(message) => Err(Failure::Cluster { reason: "SandboxNotFound", message }),
            None => Ok(()),
        }
    }

    /// Counts an error of the work on an object that was not read, or outside of one.
    pub fn count_error(&self, failure: &Failure) {
        self.monitor.metrics.count_error(failure.into());
    }

    /// Forgets an object that does not exist any more.
    pub fn forget(&self, key: &ObjectKey) {
        let mut failures = lock(&self.failures);
        failures.remove(key);
        self.monitor.metrics.note_failing(failures.len());
        drop(failures);
        lock(&self.observations).remove(key);
        lock(&self.sights).remove(key);
        self.interests.set(key, Vec::new());
    }

    /// The memory of this process of the sandbox of an object.
    #[must_use]
    pub fn observation<K: Kind>(&self, object: &CustomObject<K>) -> Observation {
        let found = lock(&self.observations).get(&key_of(object)).cloned();
        let found = found.filter(|found| found.uid == object.uid());
        found.unwrap_or_else(|| Observation { uid: object.uid().to_owned(), ..Default::default() })
    }

    /// Remembers it.
    pub fn observe<K: Kind>(&self, object: &CustomObject<K>, observation: Observation) {
        lock(&self.observations).insert(key_of(object), observation);
    }

    /// The identifier of the object whose sandbox this process has seen under a name.
    #[must_use]
    pub fn observed_uid(&self, key: &ObjectKey) -> Option<String> {
        lock(&self.observations).get(key).map(|found| found.uid.clone())
    }

    /// The number of objects whose sandbox this process has seen or misses.
    #[must_use]
    pub fn count_observed(&self) -> usize {
        let is_made = |found: &&Observation| found.secret.is_some() || found.missing.is_some();
        lock(&self.observations).values().filter(is_made).count()
    }

    /// Counts a failure of an object: when to try again.
    pub fn fail<K: Kind>(&self, object: &CustomObject<K>, failure: &Failure) -> Wait {
        let (kind, namespace, name) = (K::KIND, object.namespace(), object.name());
        let metrics = &self.monitor.metrics;
        metrics.count_reconcile(kind, failure.into());
        if failure.is_conflict() {
            return Some(CONFLICT_RETRY);
        }
        metrics.count_error(failure.into());
        if matches!(failure, Failure::Gone) {
            self.forget(&key_of(object));
            return None;
        }
        let mut failures = lock(&self.failures);
        let key = key_of(object);
        let before = failures.get(&key).filter(|record| record.uid == object.uid());
        let count = before.map_or(0, |record| record.count);
        let pause = FIRST_RETRY.saturating_mul(1 << count.min(16)).min(MAX_RETRY);
        let record = FailureRecord {
            uid: object.uid().to_owned(),
            count: count.saturating_add(1),
            retry: Instant::now() + pause,
            generation: object.metadata.generation,
        };
        failures.insert(key, record);
        metrics.note_failing(failures.len());
        drop(failures);
        tracing::warn!(kind, namespace, name, %failure, ?pause, "not reconciled");
        Some(pause)
    }
}
