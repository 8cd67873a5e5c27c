//! The reconciler of `SandboxWarmPool`.
//!
//! No sandbox is made before its claim: every sandbox starts from the memory of a template that is
//! warm already. A pool whose template the server has is ready with all its replicas.
//!
//! Promises: of several controllers, the first one that takes a pool writes its status.

use crate::condition::{self, READY};
use crate::context::{Context, Failure, Wait, key_of};
use crate::fields::{is_afresh, read_pool, read_template};
use crate::queue::ObjectKey;
use crate::resource::{SandboxWarmPool, TemplateKind};

/// Reconciles one pool.
///
/// # Errors
/// If the Kubernetes API or the server fails; the condition `Ready` has the cause.
pub async fn reconcile(pool: &mut SandboxWarmPool, context: &Context) -> Result<Wait, Failure> {
    if pool.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let found = check(pool, context).await;
    let (ready, reason, message) = match &found {
        Ok(None) => return Ok(None),
        Ok(Some(found)) => found.clone(),
        Err(failure) => (0, failure.reason(), failure.to_string()),
    };
    let mut status = pool.status();
    (status.replicas, status.ready_replicas) = (ready, ready);
    let is_ready = found.is_ok() && reason == "TemplateIsWarm";
    let generation = pool.metadata.generation;
    status.observed_generation = generation;
    condition::set(&mut status.conditions, READY, is_ready, reason, &message, generation);
    context.mark(pool).await?;
    context.write_status(pool, &status).await?;
    found?;
    Ok(Some(context.settings.resync))
}

type Finding = (i32, &'static str, String);

/// Ready sandboxes of the pool, with a reason and a message. None for a pool of another controller.
async fn check(pool: &SandboxWarmPool, context: &Context) -> Result<Option<Finding>, Failure> {
    let (spec, faults) = read_pool(pool.spec());
    let template = ObjectKey::new::<TemplateKind>(pool.namespace(), &spec.template);
    context.interests.set(&key_of(pool), vec![template]);
    let found = context.read::<TemplateKind>(pool.namespace(), &spec.template).await?;
    let is_ours = found.as_ref().is_some_and(|template| is_afresh(template.spec()));
    if !is_ours && context.settings.ignore_other_runtimes {
        return Ok(None);
    }
    if !faults.is_empty() {
        return Ok(Some((0, "UnsupportedField", faults.to_string())));
    }
    let Some(template) = found else {
        let message = format!("there is no SandboxTemplate {}", spec.template);
        return Ok(Some((0, "TemplateNotFound", message)));
    };
    let (plan, _, faults) = read_template(template.spec());
    if !faults.is_empty() {
        let message = format!("the SandboxTemplate {}: {faults}", spec.template);
        return Ok(Some((0, "UnsupportedField", message)));
    }
    if !context.server.has_template(&plan.template).await? {
        let message = format!("the afresh server has no template {}", plan.template);
        return Ok(Some((0, "TemplateNotFound", message)));
    }
    let message = "every claim starts from the memory of the template; no sandbox is made before";
    Ok(Some((spec.replicas, "TemplateIsWarm", message.to_owned())))
}
