//! The reconciler of `SandboxClaim`: a claim controls one `Sandbox`, made from a template.
//!
//! Promises: the `Sandbox` has the name of its claim, so a claim never gets two. A `Sandbox` of
//! another owner is not touched. The status mirrors that of the `Sandbox`.

use std::time::Duration;

use jiff::SignedDuration;
use kube::api::{ObjectMeta, PostParams};
use serde_json::{Value, json};

use crate::condition::{self, FINISHED, READY};
use crate::context::{Context, FINALIZER, Failure, MANAGER, Wait, code, key_of};
use crate::fields::{
    ClaimSpec, EnvPolicy, RUNTIME_CLASS, SandboxPlan, is_afresh, read_claim, read_pool,
    read_template,
};
use crate::queue::ObjectKey;
use crate::resource::{
    CONTROLLER_ANNOTATION, ClaimStatus, ClaimedSandbox, PoolKind, Sandbox, SandboxClaim,
    SandboxKind, SandboxTemplate, TemplateKind,
};
use crate::sandbox::until;

/// Interval of checks for the end of a deleted `Sandbox`, in case its event is lost.
const DELETION_CHECK: Duration = Duration::from_secs(5);

/// The annotation of a `Sandbox` with the fingerprint of its claim.
const CLAIM_ANNOTATION: &str = "agents.x-k8s.io/afresh-claim";
/// The message for a claim that differs from that of its sandbox.
const SPEC_CHANGED: &str = "the template, variables or labels of the claim were changed after its \
    sandbox was made, which has no effect on it; restore them, or delete the claim and make another";

/// Reconciles one claim.
///
/// # Errors
/// If the Kubernetes API fails; the condition `Ready` has the cause.
pub async fn reconcile(claim: &mut SandboxClaim, context: &Context) -> Result<Wait, Failure> {
    if claim.metadata.deletion_timestamp.is_some() {
        return end(claim, context).await;
    }
    let mut status = claim.status();
    let work = Reconciliation { claim, context, status: &mut status };
    match work.run().await {
        Ok(Outcome::NotOurs) => Ok(None),
        Ok(Outcome::Wait(wait)) => {
            context.write_status(claim, &status).await?;
            Ok(wait)
        }
        Err(failure) => {
            if !failure.is_reported() {
                return Err(failure);
            }
            let message = failure.to_string();
            let (reason, generation) = (failure.reason(), claim.metadata.generation);
            condition::set(&mut status.conditions, READY, false, reason, &message, generation);
            context.write_status(claim, &status).await?;
            // The object that is missing wakes the claim when it appears.
            match failure {
                Failure::Cluster { .. } => Ok(Some(context.settings.resync)),
                failure => Err(failure),
            }
        }
    }
}

/// Deletes the `Sandbox`. Returns true once it does not exist any more.
async fn remove_sandbox(claim: &SandboxClaim, context: &Context) -> Result<bool, Failure> {
    match context.read::<SandboxKind>(claim.namespace(), claim.name()).await? {
        Some(found) if found.is_controlled_by(claim.uid()) => {
            if found.metadata.deletion_timestamp.is_none() {
                context.delete(&found).await?;
            }
            Ok(false)
        }
        _ => Ok(true),
    }
}

async fn end(claim: &mut SandboxClaim, context: &Context) -> Result<Wait, Failure> {
    if claim.has_finalizer(FINALIZER) {
        if !remove_sandbox(claim, context).await? {
            return Ok(Some(DELETION_CHECK));
        }
        context.release(claim).await?;
    }
    Ok(None)
}

fn refuse<T>(reason: &'static str, message: String) -> Result<T, Failure> {
    Err(Failure::Cluster { reason, message })
}

enum Outcome {
    /// The claim belongs to another controller.
    NotOurs,
    Wait(Wait),
}

struct Reconciliation<'a> {
    claim: &'a mut SandboxClaim,
    context: &'a Context,
    status: &'a mut ClaimStatus,
}

impl Reconciliation<'_> {
    async fn run(mut self) -> Result<Outcome, Failure> {
        let context = self.context;
        let (spec, faults) = read_claim(self.claim.spec());
        let is_taken = self.claim.has_finalizer(FINALIZER);
        let mut found = None;
        if is_taken {
            found = context.read(self.claim.namespace(), self.claim.name()).await?;
        }
        let mut source = None;
        if found.is_none() {
            let read = self.read_source(&spec).await;
            let other = match &read {
                Ok(template) => !is_afresh(template.spec()),
                Err(Failure::Cluster { .. }) => true,
                Err(_) => false,
            };
            // Not even its end is ours.
            if context.settings.ignore_other_runtimes && other && !is_taken {
                return Ok(Outcome::NotOurs);
            }
            source = Some(read);
        }
        if self.time_left(&spec).is_some_and(|left| left.is_zero()) {
            return self.expire(&spec).await.map(Outcome::Wait);
        }
        let found = match (found, source) {
            (Some(found), _) => found,
            (None, source) => {
                if !faults.is_empty() {
                    return refuse("UnsupportedField", faults.to_string());
                }
                let template = match source {
                    Some(template) => template?,
                    None => self.read_source(&spec).await?,
                };
                let body = self.sandbox(&spec, &template)?;
                self.create(&body).await?
            }
        };
        let key = key_of(self.claim);
        // A change of the template affects later claims only.
        context.interests.set(&key, Vec::new());
        if !found.is_controlled_by(self.claim.uid()) {
            let name = self.claim.name();
            let message = format!("the Sandbox {name} is not one of this claim; rename the claim");
            return refuse("SandboxNameConflict", message);
        }
        self.mirror(&found);
        let made_from = found.annotation(CLAIM_ANNOTATION);
        let fault = if !faults.is_empty() {
            Some(("UnsupportedField", faults.to_string()))
        } else if made_from.is_some_and(|made_from| made_from != spec.fingerprint()) {
            Some(("SpecChanged", SPEC_CHANGED.to_owned()))
        } else {
            None
        };
        if let Some((reason, message)) = fault {
            let generation = self.claim.metadata.generation;
            let conditions = &mut self.status.conditions;
            condition::set(conditions, READY, false, reason, &message, generation);
        }
        let wait = self.time_left(&spec).map_or(context.settings.resync, |left| {
            context.settings.resync.min(left.saturating_add(Duration::from_millis(1)))
        });
        Ok(Outcome::Wait(Some(wait)))
    }

    /// Time until the claim ends.
    fn time_left(&self, spec: &ClaimSpec) -> Option<Duration> {
        let finished = condition::find(&self.status.conditions, FINISHED)
            .filter(|finished| finished.status == "True");
        let ttl = spec.ttl_after_finished.zip(finished).and_then(|(seconds, finished)| {
            let ttl = SignedDuration::from_secs(i64::from(seconds));
            finished.last_transition_time.0.checked_add(ttl).ok()
        });
        spec.shutdown_time.into_iter().chain(ttl).map(until).min()
    }

    /// The template of the claim: the one that it names, or that of its pool.
    async fn read_source(&self, spec: &ClaimSpec) -> Result<SandboxTemplate, Failure> {
        let (context, namespace) = (self.context, self.claim.namespace());
        let pool = spec.pool.as_ref().map(|name| ObjectKey::new::<PoolKind>(namespace, name));
        let template = |name: &String| ObjectKey::new::<TemplateKind>(namespace, name);
        let key = key_of(self.claim);
        // Before they are read, so that no change is lost.
        let named = spec.template.as_ref().map(template);
        context.interests.set(&key, pool.clone().into_iter().chain(named).collect());
        let mut found = None;
        if let Some(name) = &spec.template {
            found = Some(self.read_template(name).await?);
        }
        let Some(pool_name) = &spec.pool else {
            let fault = || "the claim names no template and no pool".to_owned();
            return found.map_or_else(|| refuse("TemplateNotFound", fault()), Ok);
        };
        let Some(of_pool) = context.read::<PoolKind>(namespace, pool_name).await? else {
            return refuse("WarmPoolNotFound", format!("there is no SandboxWarmPool {pool_name}"));
        };
        let other = read_pool(of_pool.spec()).0.template;
        match found {
            Some(found) if found.name() == other => Ok(found),
            Some(found) => refuse(
                "WarmPoolNotFound",
                format!(
                    "the SandboxWarmPool {pool_name} is for the template {other}, and not for {}",
                    found.name()
                ),
            ),
            None => {
                context.interests.set(&key, pool.into_iter().chain([template(&other)]).collect());
                self.read_template(&other).await
            }
        }
    }

    async fn read_template(&self, name: &str) -> Result<SandboxTemplate, Failure> {
        match self.context.read::<TemplateKind>(self.claim.namespace(), name).await? {
            Some(template) => Ok(template),
            None => refuse("TemplateNotFound", format!("there is no SandboxTemplate {name}")),
        }
    }

    /// The `Sandbox` of the claim.
    fn sandbox(&self, spec: &ClaimSpec, template: &SandboxTemplate) -> Result<Sandbox, Failure> {
        let (plan, policy, faults) = read_template(template.spec());
        if !faults.is_empty() {
            let message = format!("the SandboxTemplate {}: {faults}", template.name());
            return refuse("UnsupportedField", message);
        }
        check_envs(spec, &plan, policy)?;
        let controller = self.context.settings.controller.clone();
        let annotations = [
            (CLAIM_ANNOTATION.to_owned(), spec.fingerprint()),
            (CONTROLLER_ANNOTATION.to_owned(), controller),
        ];
        let metadata = ObjectMeta {
            name: Some(self.claim.name().to_owned()),
            namespace: Some(self.claim.namespace().to_owned()),
            owner_references: Some(vec![self.claim.owner_reference()]),
            annotations: Some(annotations.into()),
            // From the beginning, which spares a request.
            finalizers: Some(vec![FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        };
        Ok(Sandbox::new(metadata, json!({"podTemplate": pod(spec, plan)})))
    }

    async fn create(&mut self, body: &Sandbox) -> Result<Sandbox, Failure> {
        let context = self.context;
        let api = context.api::<SandboxKind>(self.claim.namespace());
        let create = async {
            let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), dry_run: false };
            match api.create(&parameters, body).await {
                Err(error) if code(&error) == 409 => Ok(api.get(body.name()).await?),
                other => Ok(other?),
            }
        };
        // At once: the owner reference protects from a leak between them.
        let (found, ()) = tokio::try_join!(create, context.take(self.claim))?;
        Ok(found)
    }

    fn mirror(&mut self, found: &Sandbox) {
        let status = found.status();
        let generation = self.claim.metadata.generation;
        let conditions = &mut self.status.conditions;
        if status.conditions.is_empty() && conditions.is_empty() {
            // Its first status follows within milliseconds, and is worth one write.
            return;
        }
        self.status.sandbox =
            ClaimedSandbox { name: Some(found.name().to_owned()), access: status.access };
        match condition::find(&status.conditions, READY) {
            Some(ready) => {
                let (is_true, reason) = (ready.status == "True", &ready.reason);
                condition::set(conditions, READY, is_true, reason, &ready.message, generation);
            }
            None => {
                let message = "the Sandbox is being made";
                condition::set(conditions, READY, false, "SandboxNotReady", message, generation);
            }
        }
        match condition::find(&status.conditions, FINISHED) {
            Some(finished) => {
                let (is_true, reason) = (finished.status == "True", &finished.reason);
                let message = &finished.message;
                condition::set(conditions, FINISHED, is_true, reason, message, generation);
            }
            None => condition::remove(conditions, FINISHED),
        }
    }

    /// The time of the claim is over.
    async fn expire(self, spec: &ClaimSpec) -> Result<Wait, Failure> {
        if spec.delete_at_end {
            // The finalizer keeps it until its sandbox has ended.
            self.context.delete(self.claim).await?;
            return Ok(None);
        }
        let gone = remove_sandbox(self.claim, self.context).await?;
        self.status.sandbox = ClaimedSandbox::default();
        let generation = self.claim.metadata.generation;
        let message = "the time of the claim is over";
        let conditions = &mut self.status.conditions;
        condition::set(conditions, READY, false, "ClaimExpired", message, generation);
        Ok(if gone { None } else { Some(DELETION_CHECK) })
    }
}

/// The pod template of a `Sandbox`: what was read of the `SandboxTemplate`, and the variables and
/// labels of the claim.
fn pod(spec: &ClaimSpec, plan: SandboxPlan) -> Value {
    let SandboxPlan { template, container, mut envs, mut labels, ports } = plan;
    envs.extend(spec.envs.clone());
    labels.extend(spec.labels.clone());
    let envs = envs.into_iter().map(|(name, value)| json!({"name": name, "value": value}));
    let ports = ports.into_iter().map(|port| {
        let mut entry = json!({"containerPort": port.number, "protocol": "TCP"});
        if !port.name.is_empty() {
            entry["name"] = port.name.into();
        }
        entry
    });
    let container = json!({
        "name": container, "image": template, "env": envs.collect::<Value>(),
        "ports": ports.collect::<Value>(),
    });
    json!({
        "metadata": {"labels": labels},
        "spec": {"runtimeClassName": RUNTIME_CLASS, "containers": [container]},
    })
}

/// Refuses variables that the template does not allow.
fn check_envs(spec: &ClaimSpec, plan: &SandboxPlan, policy: EnvPolicy) -> Result<(), Failure> {
    const REASON: &str = "EnvVarsInjectionRejected";
    if spec.envs.is_empty() {
        return Ok(());
    }
    if let Some(container) = spec.env_container.as_ref().filter(|name| **name != plan.container) {
        let message = format!("the template has no container {container}");
        return refuse(REASON, message);
    }
    let taken = spec.envs.keys().find(|name| plan.envs.contains_key(*name));
    match (policy, taken) {
        (EnvPolicy::Disallowed, _) => refuse(
            REASON,
            "spec.env needs `envVarsInjectionPolicy: Allowed` or `Overrides` in the template"
                .to_owned(),
        ),
        (EnvPolicy::Allowed, Some(name)) => refuse(
            REASON,
            format!(
                "spec.env sets {name} of the template, which needs `envVarsInjectionPolicy: \
                 Overrides` there"
            ),
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_follow_the_policy_of_the_template() {
        let envs = [("A".to_owned(), "2".to_owned())].into();
        let claim = ClaimSpec { envs, ..ClaimSpec::default() };
        let container = "main".to_owned();
        let mut plan = SandboxPlan { container, ..SandboxPlan::default() };
        assert!(check_envs(&claim, &plan, EnvPolicy::Disallowed).is_err());
        assert!(check_envs(&claim, &plan, EnvPolicy::Allowed).is_ok());
        plan.envs.insert("A".to_owned(), "1".to_owned());
        assert!(check_envs(&claim, &plan, EnvPolicy::Allowed).is_err());
        assert!(check_envs(&claim, &plan, EnvPolicy::Overrides).is_ok());
        let env_container = Some("other".to_owned());
        let claim = ClaimSpec { env_container, ..claim };
        assert!(check_envs(&claim, &plan, EnvPolicy::Overrides).is_err());
        assert!(check_envs(&ClaimSpec::default(), &plan, EnvPolicy::Disallowed).is_ok());
    }

    #[test]
    fn a_pod_template_is_read_back_as_it_was_made() {
        let envs = [("A".to_owned(), "1".to_owned())].into();
        let plan = SandboxPlan {
            template: "script".to_owned(),
            container: "main".to_owned(),
            envs,
            labels: [("a".to_owned(), "b".to_owned())].into(),
            ports: vec![
                crate::fields::Port { name: "web".to_owned(), number: 80 },
                crate::fields::Port { name: String::new(), number: 81 },
            ],
        };
        let claim = ClaimSpec {
            envs: [("B".to_owned(), "2".to_owned())].into(),
            labels: [("a".to_owned(), "c".to_owned())].into(),
            ..ClaimSpec::default()
        };
        let spec = json!({"podTemplate": pod(&claim, plan.clone())});
        let (read, faults) = crate::fields::read_sandbox(Ok(&spec));
        assert!(faults.is_empty(), "{faults}");
        assert_eq!(read.plan.ports, plan.ports);
        assert_eq!(read.plan.envs.len(), 2);
        assert_eq!(read.plan.labels["a"], "c");
    }
}
