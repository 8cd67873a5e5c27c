//! The controller: its lease, the reconcilers and the sweep.

use std::future::Future;
use std::sync::Arc;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Namespace;
use kube::runtime::controller::{self, Config, Controller};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, Client};

use crate::context::{Context, Failure, Settings};
use crate::fields::{read_claim, read_pool};
use crate::lease::LeaseHolder;
use crate::resource::{
    ClaimKind, PoolKind, SandboxClaim, SandboxKind, SandboxTemplate, SandboxWarmPool, TemplateKind,
};
use crate::server::Server;
use crate::{claim, pool, sandbox, sweep};

/// Objects of one kind that are reconciled at once.
const MAX_CONCURRENT: u16 = 64;
/// The namespace whose identifier is that of the cluster.
const CLUSTER_NAMESPACE: &str = "kube-system";

/// The claims of a store that a change concerns.
fn claims_of(
    store: &Store<SandboxClaim>,
    namespace: &str,
    concerns: impl Fn(&crate::fields::ClaimSpec) -> bool,
) -> Vec<ObjectRef<SandboxClaim>> {
    let all = store.state().into_iter();
    let own = all.filter(|claim| claim.namespace() == namespace);
    own.filter(|claim| concerns(&read_claim(&claim.spec).0))
        .map(|claim| ObjectRef::from_obj(&*claim))
        .collect()
}

/// Logs an error of a watch, which is begun again. Failures of objects are logged where they occur.
async fn note_watch_error<T>(result: Result<T, controller::Error<Failure, watcher::Error>>) {
    if let Err(controller::Error::QueueError(error)) = result {
        tracing::warn!(%error, "a watch of the Kubernetes API failed");
    }
}

/// Reconciles until `stop` is ready; no lease is taken.
pub async fn reconcile_all(context: Arc<Context>, stop: impl Future<Output = ()>) {
    let config = || Config::default().concurrency(MAX_CONCURRENT);
    let watch = watcher::Config::default;

    let sandboxes = Controller::new(context.api_of_all::<SandboxKind>(), watch())
        .with_config(config())
        .run(
            sandbox::reconcile,
            |object, failure: &Failure, context| context.fail(&object, failure),
            context.clone(),
        )
        .for_each(note_watch_error);

    let claims = Controller::new(context.api_of_all::<ClaimKind>(), watch()).with_config(config());
    let (by_template, by_pool) = (claims.store(), claims.store());
    let claims = claims
        .owns(context.api_of_all::<SandboxKind>(), watch())
        .watches(context.api_of_all::<TemplateKind>(), watch(), move |template: SandboxTemplate| {
            let name = template.name().to_owned();
            claims_of(&by_template, template.namespace(), |claim| claim.template == name)
        })
        .watches(context.api_of_all::<PoolKind>(), watch(), move |pool: SandboxWarmPool| {
            let name = Some(pool.name().to_owned());
            claims_of(&by_pool, pool.namespace(), |claim| claim.pool == name)
        })
        .run(
            claim::reconcile,
            |object, failure: &Failure, context| context.fail(&object, failure),
            context.clone(),
        )
        .for_each(note_watch_error);

    let pools = Controller::new(context.api_of_all::<PoolKind>(), watch()).with_config(config());
    let store = pools.store();
    let pools = pools
        .watches(context.api_of_all::<TemplateKind>(), watch(), move |template: SandboxTemplate| {
            let all = store.state().into_iter();
            let own = all.filter(|pool| {
                pool.namespace() == template.namespace()
                    && read_pool(&pool.spec).0.template == template.name()
            });
            own.map(|pool| ObjectRef::from_obj(&*pool)).collect::<Vec<_>>()
        })
        .run(
            pool::reconcile,
            |object, failure: &Failure, context| context.fail(&object, failure),
            context.clone(),
        )
        .for_each(note_watch_error);

    let sweeps = async {
        loop {
            if let Err(failure) = sweep::sweep(&context).await {
                tracing::warn!(%failure, "sandboxes without an object are not searched");
            }
            tokio::time::sleep(context.settings.sweep).await;
        }
    };
    tokio::select! {
        () = sandboxes => {}
        () = claims => {}
        () = pools => {}
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

/// Runs the controller until `stop` is ready or the lease is lost; whether it was stopped.
///
/// # Errors
/// If the API refuses what the controller needs from the beginning.
pub async fn run(
    client: Client,
    server: Server,
    settings: Settings,
    lease: LeaseSettings,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<bool> {
    let mut stop = std::pin::pin!(stop);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let cluster = namespaces.get_metadata(CLUSTER_NAMESPACE).await.map_err(|error| {
        anyhow::anyhow!(
            "cannot read the namespace {CLUSTER_NAMESPACE}, which names the cluster: {error}"
        )
    })?;
    let cluster = cluster.metadata.uid.unwrap_or_default();
    let holder =
        LeaseHolder::new(client.clone(), &lease.namespace, &lease.name, lease.identity.clone());
    tokio::select! {
        () = &mut stop => return Ok(true),
        acquired = holder.acquire() => acquired.map_err(|error| {
            anyhow::anyhow!("cannot take the lease {}/{}: {error}", lease.namespace, lease.name)
        })?,
    }
    tracing::info!(lease.identity, "this controller holds the lease");
    let context = Arc::new(Context::new(client, server, settings, cluster));
    let stopped = tokio::select! {
        () = reconcile_all(context, &mut stop) => true,
        () = holder.hold() => false,
    };
    if stopped {
        holder.release().await;
    }
    Ok(stopped)
}
