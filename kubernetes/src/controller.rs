//! The controller: its lease, the watches, the reconcilers and the sweep.
//!
//! Promises: each object is read and reconciled on its own. One that cannot be decoded, or whose
//! work panics, gets a condition, and no other object notices.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::condition::{self, READY};
use crate::context::{Context, Failure, MAX_RETRY, Settings, Wait, code};
use crate::health::{Loop, Monitor};
use crate::lease::LeaseHolder;
use crate::metrics::ReconcileResult;
use crate::queue::{FairQueue, MAX_RUNNING, MAX_RUNNING_OF_NAMESPACE, ObjectKey};
use crate::resource::{
    ClaimKind, ClaimStatus, CustomObject, Kind, PoolKind, PoolStatus, SandboxKind, SandboxStatus,
    TemplateKind,
};
use crate::server::Server;
use crate::watch::watch;
use crate::{claim, pool, sandbox, sweep};

/// Watches of [`reconcile_all`].
const WATCHES: u32 = 4;
/// Time for the first lists, before the work begins without them.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of attempts to reach the API at the start, and to take a lease that was lost.
const START_INTERVAL: Duration = Duration::from_secs(2);
/// Interval in which the work shows that it is alive.
const BEAT_INTERVAL: Duration = Duration::from_secs(5);
/// The namespace whose identifier is that of the cluster.
const CLUSTER_NAMESPACE: &str = "kube-system";

/// A kind that is reconciled.
trait Reconcile: Kind {
    fn reconcile(
        object: &mut CustomObject<Self>,
        context: &Context,
    ) -> impl Future<Output = Result<Wait, Failure>> + Send;

    fn conditions(status: &mut Self::Status) -> &mut Vec<Condition>;
}

impl Reconcile for SandboxKind {
    async fn reconcile(
        object: &mut CustomObject<Self>,
        context: &Context,
    ) -> Result<Wait, Failure> {
        sandbox::reconcile(object, context).await
    }

    fn conditions(status: &mut SandboxStatus) -> &mut Vec<Condition> {
        &mut status.conditions
    }
}

impl Reconcile for ClaimKind {
    async fn reconcile(
        object: &mut CustomObject<Self>,
        context: &Context,
    ) -> Result<Wait, Failure> {
        claim::reconcile(object, context).await
    }

    fn conditions(status: &mut ClaimStatus) -> &mut Vec<Condition> {
        &mut status.conditions
    }
}

impl Reconcile for PoolKind {
    async fn reconcile(
        object: &mut CustomObject<Self>,
        context: &Context,
    ) -> Result<Wait, Failure> {
        pool::reconcile(object, context).await
    }

    fn conditions(status: &mut PoolStatus) -> &mut Vec<Condition> {
        &mut status.conditions
    }
}

/// Ends the sandbox of an object that was removed without its finalizer, and that had this name.
/// The sweep ends those that an earlier process has seen.
async fn end_former(
    key: &ObjectKey,
    present: Option<&str>,
    context: &Context,
) -> Result<(), Failure> {
    let Some(uid) = context.observed_uid(key).filter(|uid| Some(uid.as_str()) != present) else {
        return Ok(());
    };
    sandbox::end_all_of((&uid, &key.namespace), context).await?;
    context.forget(key);
    Ok(())
}

/// Reads one object, and reconciles it.
async fn reconcile_one<K: Reconcile>(key: &ObjectKey, context: &Context) -> Wait {
    let (namespace, name) = (&key.namespace, &key.name);
    let mut object = match context.read::<K>(namespace, name).await {
        Ok(Some(object)) => object,
        Ok(None) => {
            if let Err(failure) = end_former(key, None, context).await {
                context.count_error(&failure);
                tracing::warn!(kind = K::KIND, namespace, name, %failure, "its sandbox may remain");
                return Some(MAX_RETRY);
            }
            context.forget(key);
            return None;
        }
        Err(failure) => {
            context.count_error(&failure);
            tracing::warn!(kind = K::KIND, namespace, name, %failure, "not read");
            return Some(MAX_RETRY);
        }
    };
    if let Err(failure) = end_former(key, Some(object.uid()), context).await {
        context.count_error(&failure);
        tracing::warn!(kind = K::KIND, namespace, name, %failure, "its sandbox may remain");
        return Some(MAX_RETRY);
    }
    if context.is_foreign(&object) {
        tracing::debug!(kind = K::KIND, namespace, name, "another controller serves it");
        context.end_sight(key, false);
        return None;
    }
    if let Some(pause) = context.pause(&object) {
        return Some(pause);
    }
    #[cfg(test)]
    assert!(name != crate::mock::PLANTED_PANIC, "a planted panic");
    match K::reconcile(&mut object, context).await {
        Ok(wait) => {
            context.succeed(&object);
            wait
        }
        Err(failure) => context.fail(&object, &failure),
    }
}

/// Writes a panic into the status of its object.
async fn report_panic<K: Reconcile>(key: &ObjectKey, context: &Context) -> Result<(), Failure> {
    let Some(object) = context.read::<K>(&key.namespace, &key.name).await? else { return Ok(()) };
    let mut status = object.status();
    let message = "the controller failed at this object, and its log has the cause; the object is \
                   tried again";
    let generation = object.metadata.generation;
    condition::set(K::conditions(&mut status), READY, false, "InternalError", message, generation);
    context.write_status(&object, &status).await
}

async fn reconcile_isolated<K: Reconcile>(key: &ObjectKey, context: &Context) -> Wait {
    if let Ok(wait) = AssertUnwindSafe(reconcile_one::<K>(key, context)).catch_unwind().await {
        return wait;
    }
    let (namespace, name) = (&key.namespace, &key.name);
    context.monitor.metrics.count_reconcile(K::KIND, ReconcileResult::Panic);
    tracing::error!(kind = K::KIND, namespace, name, "the work on an object panicked");
    let told = AssertUnwindSafe(report_panic::<K>(key, context)).catch_unwind().await;
    if !matches!(told, Ok(Ok(()))) {
        tracing::warn!(kind = K::KIND, namespace, name, "its status does not name the panic");
    }
    Some(MAX_RETRY)
}

async fn reconcile(key: &ObjectKey, context: &Context) -> Wait {
    match key.kind {
        SandboxKind::KIND => reconcile_isolated::<SandboxKind>(key, context).await,
        ClaimKind::KIND => reconcile_isolated::<ClaimKind>(key, context).await,
        PoolKind::KIND => reconcile_isolated::<PoolKind>(key, context).await,
        _ => None,
    }
}

/// Takes objects from the queue, as many at once as it allows. Ends never.
///
/// It begins after the lists, so that namespaces take turns from the beginning. One that fails, as
/// without a definition of its kind, delays it only for a while.
async fn work(context: &Arc<Context>, queue: &Arc<FairQueue>, listed: &Semaphore) {
    let all = tokio::time::timeout(LIST_TIMEOUT, listed.acquire_many(WATCHES)).await;
    if all.is_err() {
        tracing::warn!("some kinds are not listed yet");
    }
    // Dropping it ends the work, which a controller without its lease must do at once.
    let mut tasks = JoinSet::new();
    let mut beats = tokio::time::interval(BEAT_INTERVAL);
    loop {
        context.monitor.beat(Loop::Work);
        let (waiting, running) = queue.counts();
        context.monitor.metrics.note_queue(waiting, running);
        tokio::select! {
            _ = beats.tick() => {}
            key = queue.next() => {
                let (context, queue) = (context.clone(), queue.clone());
                tasks.spawn(async move {
                    let wait = reconcile(&key, &context).await;
                    queue.finish(key, wait);
                });
            }
            Some(_) = tasks.join_next() => {}
        }
    }
}

/// Reconciles until `stop` is ready; no lease is taken.
pub async fn reconcile_all(context: Arc<Context>, stop: impl Future<Output = ()>) {
    let limit = match context.settings.namespace {
        Some(_) => MAX_RUNNING,
        None => MAX_RUNNING_OF_NAMESPACE,
    };
    let queue = Arc::new(FairQueue::new(limit));
    let listed = Semaphore::new(0);
    let sweeps = async {
        loop {
            match sweep::sweep(&context).await {
                Ok(report) if report.failed > 0 => {
                    let sweep::SweepReport { ended, failed } = report;
                    tracing::warn!(ended, failed, "sandboxes without an object remain");
                }
                Ok(_) => {}
                Err(failure) => {
                    context.count_error(&failure);
                    tracing::warn!(%failure, "sandboxes without an object are not searched");
                }
            }
            tokio::time::sleep(context.settings.sweep).await;
        }
    };
    tokio::select! {
        () = watch::<SandboxKind>(&context, &queue, &listed) => {}
        () = watch::<ClaimKind>(&context, &queue, &listed) => {}
        () = watch::<PoolKind>(&context, &queue, &listed) => {}
        () = watch::<TemplateKind>(&context, &queue, &listed) => {}
        () = work(&context, &queue, &listed) => {}
        () = sweeps => {}
        () = stop => {}
    }
}

/// Where the lease is.
#[derive(Clone, Debug)]
pub struct LeaseSettings {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The name of this process.
    pub identity: String,
}

/// The identifier of the cluster: that of a namespace which no cluster lacks. It waits for an API
/// that does not answer.
async fn find_cluster(client: &Client, monitor: &Monitor) -> anyhow::Result<String> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let found = loop {
        // The lease is the next step.
        monitor.beat(Loop::Lease);
        match namespaces.get_metadata(CLUSTER_NAMESPACE).await {
            Ok(found) => break found,
            Err(error) if matches!(code(&error), 401 | 403 | 404) => anyhow::bail!(
                "cannot read the namespace {CLUSTER_NAMESPACE}, which names the cluster: {error}; \
                 give --cluster-id, or the right to read it"
            ),
            Err(error) => tracing::warn!(%error, "the identifier of the cluster cannot be read"),
        }
        tokio::time::sleep(START_INTERVAL).await;
    };
    let uid = found.metadata.uid.filter(|uid| !uid.is_empty());
    uid.ok_or_else(|| anyhow::anyhow!("the namespace {CLUSTER_NAMESPACE} has no identifier"))
}

/// Runs the controller until `stop` is ready. A lease that is lost is waited for again. Without an
/// identifier of the cluster one is read from it.
///
/// # Errors
/// If the API refuses what the controller needs from the beginning.
pub async fn run(
    client: Client,
    server: Server,
    settings: Settings,
    cluster: Option<String>,
    lease: LeaseSettings,
    monitor: Arc<Monitor>,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let probing = server.clone();
    tokio::select! {
        () = monitor.probe(&probing) => Ok(()),
        ended = run_by_lease(client, server, settings, cluster, lease, &monitor, stop) => ended,
    }
}

/// As [`run`], without the probes.
async fn run_by_lease(
    client: Client,
    server: Server,
    settings: Settings,
    cluster: Option<String>,
    lease: LeaseSettings,
    monitor: &Arc<Monitor>,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let mut stop = std::pin::pin!(stop);
    let cluster = match cluster {
        Some(cluster) => cluster,
        None => tokio::select! {
            () = &mut stop => return Ok(()),
            found = find_cluster(&client, monitor) => found?,
        },
    };
    let holder = Arc::new(LeaseHolder::new(
        client.clone(),
        &lease.namespace,
        &lease.name,
        lease.identity.clone(),
        monitor.clone(),
    ));
    let mut had_lease = false;
    loop {
        let acquired = tokio::select! {
            () = &mut stop => return Ok(()),
            acquired = holder.acquire() => acquired,
        };
        if let Err(error) = acquired {
            // An API that starts may refuse what it allowed before.
            if had_lease {
                tracing::warn!(%error, "the lease is refused");
                tokio::time::sleep(START_INTERVAL).await;
                continue;
            }
            let LeaseSettings { namespace, name, .. } = lease;
            anyhow::bail!("cannot take the lease {namespace}/{name}: {error}");
        }
        had_lease = true;
        tracing::info!(lease.identity, "this controller holds the lease");
        let (client, server, settings) = (client.clone(), server.clone(), settings.clone());
        let (holding, monitor) = (holder.clone(), monitor.clone());
        let context =
            Context::new(client, server, settings, cluster.clone(), holding, monitor.clone());
        tokio::select! {
            () = reconcile_all(Arc::new(context), stop.as_mut()) => {
                holder.release().await;
                return Ok(());
            }
            () = holder.hold() => tracing::warn!("the lease is waited for again"),
        }
        monitor.note_lease(false);
    }
}
