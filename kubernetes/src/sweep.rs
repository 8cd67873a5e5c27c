//! Ends sandboxes of this cluster that have no object: their object was removed without its
//! finalizer, or two controllers made one for the same object.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::ListParams;

use crate::context::{Context, Failure};
use crate::resource::SandboxKind;
use crate::server::{CLUSTER_LABEL, NAMESPACE_LABEL, UID_LABEL};

/// Objects of one page.
const PAGE: u32 = 500;

/// Ends them; how many.
///
/// # Errors
/// If the Kubernetes API or the server fails.
pub async fn sweep(context: &Context) -> Result<usize, Failure> {
    // Before the objects: each object of a sandbox in this list exists by now.
    let mut remotes = context.server.list(CLUSTER_LABEL, &context.cluster).await?;
    let is_old = |started: Option<Timestamp>| {
        let age = started.map(|started| Timestamp::now().duration_since(started));
        age.is_some_and(|age| {
            Duration::try_from(age).is_ok_and(|age| age >= context.settings.orphan_age)
        })
    };
    remotes.retain(|remote| is_old(remote.started_at));
    if let Some(namespace) = &context.settings.namespace {
        remotes.retain(|remote| remote.metadata.get(NAMESPACE_LABEL) == Some(namespace));
    }
    if remotes.is_empty() {
        return Ok(0);
    }
    let api = context.api_of_all::<SandboxKind>();
    let mut objects: HashMap<String, Option<String>> = HashMap::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = api.list(&page).await?;
        for object in &list.items {
            objects.insert(object.uid().to_owned(), object.status().access.sandbox_id);
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    let mut ended = 0;
    for remote in remotes {
        let object = remote.metadata.get(UID_LABEL).and_then(|uid| objects.get(uid));
        let is_wanted = match object {
            None => false,
            // One whose status is not written yet.
            Some(None) => true,
            Some(Some(id)) => *id == remote.id,
        };
        if !is_wanted {
            tracing::warn!(id = remote.id, "a sandbox without an object is ended");
            context.server.kill(&remote.id).await?;
            ended += 1;
        }
    }
    Ok(ended)
}
