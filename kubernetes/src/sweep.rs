//! Ends sandboxes of this cluster that have no object: their object was removed without its
//! finalizer, or two controllers made one for the same object.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;

use crate::context::{Context, Failure};
use crate::resource::{ObjectHeader, SandboxKind};
use crate::server::{CLUSTER_LABEL, CONTROLLER_LABEL, NAMESPACE_LABEL, UID_LABEL};
use crate::watch::PAGE_ITEMS;

/// The result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Sandboxes that were ended.
    pub ended: usize,
    /// Sandboxes that could not be ended; the next sweep tries them again.
    pub failed: usize,
}

/// The sandboxes that objects of this controller name, by the identifier of the object.
async fn wanted(context: &Context) -> Result<HashMap<String, Option<String>>, Failure> {
    let api: Api<ObjectHeader<SandboxKind>> = context.api_of_all();
    let mut objects = HashMap::new();
    let mut page = ListParams::default().limit(PAGE_ITEMS);
    loop {
        let list = api.list(&page).await?;
        for object in list.items {
            // One that another controller serves has no sandbox of this one.
            let controller = object.controller();
            if controller.is_none_or(|controller| controller == context.settings.controller) {
                objects.insert(object.uid().to_owned(), object.sandbox_id);
            }
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// Ends them.
///
/// # Errors
/// If the Kubernetes API or the server does not list what there is.
pub async fn sweep(context: &Context) -> Result<SweepReport, Failure> {
    // Before the objects: each object of a sandbox in this list exists by now. Where it lacks some,
    // those are left for a later sweep.
    let mut remotes = context.server.list(CLUSTER_LABEL, &context.cluster).await?.sandboxes;
    let is_old = |started: Option<Timestamp>| {
        let age = started.map(|started| Timestamp::now().duration_since(started));
        age.is_some_and(|age| {
            Duration::try_from(age).is_ok_and(|age| age >= context.settings.orphan_age)
        })
    };
    remotes.retain(|remote| {
        let label = |name| remote.metadata.get(name);
        let namespace = context.settings.namespace.as_ref();
        is_old(remote.started_at)
            && label(CONTROLLER_LABEL) == Some(&context.settings.controller)
            && namespace.is_none_or(|namespace| label(NAMESPACE_LABEL) == Some(namespace))
    });
    if remotes.is_empty() {
        return Ok(SweepReport::default());
    }
    let objects = wanted(context).await?;
    // The status is a hint of users: it counts only if it names a sandbox of the object.
    let own = |uid: &String, id: &String| {
        remotes.iter().any(|other| other.metadata.get(UID_LABEL) == Some(uid) && other.id == *id)
    };
    let mut report = SweepReport::default();
    for remote in &remotes {
        let is_wanted = remote.metadata.get(UID_LABEL).is_some_and(|uid| match objects.get(uid) {
            None => false,
            // One whose status is not written yet.
            Some(None) => true,
            Some(Some(id)) => *id == remote.id || !own(uid, id),
        });
        if is_wanted {
            continue;
        }
        context.lease.check().await?;
        match context.kill(&remote.id).await {
            Ok(()) => {
                tracing::warn!(id = remote.id, "a sandbox without an object is ended");
                report.ended += 1;
            }
            Err(error) => {
                tracing::warn!(id = remote.id, %error, "a sandbox without an object is not ended");
                report.failed += 1;
            }
        }
    }
    Ok(report)
}
