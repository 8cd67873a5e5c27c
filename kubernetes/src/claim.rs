//! The reconciler of `SandboxClaim`: a claim controls one `Sandbox`, made from a template.
//!
//! Promises: the `Sandbox` has the name of its claim, so a claim never gets two. A `Sandbox` of
//! another owner is not touched. The status mirrors that of the `Sandbox`.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use kube::Resource;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::controller::Action;
use serde_json::{Value, json};

use crate::condition::{self, FINISHED, READY};
use crate::context::{Context, Failure, MANAGER, code};
use crate::fields::{
    ClaimSpec, EnvPolicy, RUNTIME_CLASS, SandboxPlan, read_claim, read_template, runtime_class,
};
use crate::resource::{
    ClaimKind, ClaimStatus, ClaimedSandbox, PoolKind, Sandbox, SandboxClaim, SandboxKind,
    TemplateKind,
};
use crate::sandbox::{FINALIZER, delete, until};

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
pub async fn reconcile(claim: Arc<SandboxClaim>, context: Arc<Context>) -> Result<Action, Failure> {
    if let Some(pause) = context.pause(&claim) {
        return Ok(pause);
    }
    if claim.metadata.deletion_timestamp.is_some() {
        return end(&claim, &context).await;
    }
    let mut status = claim.status();
    let work = Reconciliation { claim: &claim, context: &context, status: &mut status };
    match work.run().await {
        Ok(Outcome::NotOurs) => Ok(Action::await_change()),
        Ok(Outcome::Action(action)) => {
            context.write_status(&claim, &status).await?;
            context.succeed(claim.uid());
            Ok(action)
        }
        Err(failure) => {
            if let Some(action) = failure.conflict() {
                return Ok(action);
            }
            let message = failure.to_string();
            let (reason, generation) = (failure.reason(), claim.metadata.generation);
            condition::set(&mut status.conditions, READY, false, reason, &message, generation);
            context.write_status(&claim, &status).await?;
            // The object that is missing wakes the claim when it appears.
            match failure {
                Failure::Cluster { .. } => Ok(Action::requeue(context.settings.resync)),
                failure => Err(failure),
            }
        }
    }
}

/// Deletes the `Sandbox`. Returns true once it does not exist any more.
async fn remove_sandbox(claim: &SandboxClaim, context: &Context) -> Result<bool, Failure> {
    let api = context.api::<SandboxKind>(claim.namespace());
    match api.get_opt(claim.name()).await? {
        Some(found) if found.is_controlled_by(claim.uid()) => {
            if found.metadata.deletion_timestamp.is_none() {
                delete(&api, &found).await?;
            }
            Ok(false)
        }
        _ => Ok(true),
    }
}

async fn end(claim: &SandboxClaim, context: &Context) -> Result<Action, Failure> {
    let mut finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
    if finalizers.iter().any(|name| name == FINALIZER) {
        if !remove_sandbox(claim, context).await? {
            return Ok(Action::requeue(DELETION_CHECK));
        }
        finalizers.retain(|name| name != FINALIZER);
        context.set_finalizers(claim, &finalizers).await?;
    }
    context.succeed(claim.uid());
    Ok(Action::await_change())
}

fn refuse<T>(reason: &'static str, message: String) -> Result<T, Failure> {
    Err(Failure::Cluster { reason, message })
}

enum Outcome {
    /// The claim belongs to another controller.
    NotOurs,
    Action(Action),
}

struct Reconciliation<'a> {
    claim: &'a SandboxClaim,
    context: &'a Context,
    status: &'a mut ClaimStatus,
}

impl Reconciliation<'_> {
    async fn run(mut self) -> Result<Outcome, Failure> {
        let (claim, context) = (self.claim, self.context);
        let (spec, faults) = read_claim(&claim.spec);
        let finalizers = claim.metadata.finalizers.as_deref().unwrap_or_default();
        let is_taken = finalizers.iter().any(|name| name == FINALIZER);
        let api = context.api::<SandboxKind>(claim.namespace());
        let (mut found, mut template) = (None, None);
        if is_taken {
            found = api.get_opt(claim.name()).await?;
        }
        if found.is_none() {
            let templates = context.api::<TemplateKind>(claim.namespace());
            template = templates.get_opt(&spec.template).await?;
            let other = template.as_ref().is_none_or(|template| {
                runtime_class(&template.spec).is_none_or(|class| class != RUNTIME_CLASS)
            });
            // Not even its end is ours.
            if context.settings.ignore_other_runtimes && other && !is_taken {
                return Ok(Outcome::NotOurs);
            }
        }
        if self.time_left(&spec).is_some_and(|left| left.is_zero()) {
            return self.expire(&spec).await.map(Outcome::Action);
        }
        let found = match found {
            Some(found) => found,
            None => {
                if !faults.is_empty() {
                    return refuse("UnsupportedField", faults.to_string());
                }
                let Some(template) = template else {
                    let message = format!("there is no SandboxTemplate {}", spec.template);
                    return refuse("TemplateNotFound", message);
                };
                self.check_pool(&spec).await?;
                let body = self.sandbox(&spec, &template.spec)?;
                self.create(&api, &body, is_taken).await?
            }
        };
        if !found.is_controlled_by(claim.uid()) {
            let name = claim.name();
            let message = format!("the Sandbox {name} is not one of this claim; rename the claim");
            return refuse("SandboxNameConflict", message);
        }
        self.mirror(&found);
        let annotations = found.metadata.annotations.as_ref();
        let made_from = annotations.and_then(|annotations| annotations.get(CLAIM_ANNOTATION));
        let fault = if !faults.is_empty() {
            Some(("UnsupportedField", faults.to_string()))
        } else if made_from.is_some_and(|made_from| *made_from != spec.fingerprint()) {
            Some(("SpecChanged", SPEC_CHANGED.to_owned()))
        } else {
            None
        };
        if let Some((reason, message)) = fault {
            let (conditions, generation) = (&mut self.status.conditions, claim.metadata.generation);
            condition::set(conditions, READY, false, reason, &message, generation);
        }
        let wait = self.time_left(&spec).map_or(context.settings.resync, |left| {
            context.settings.resync.min(left.saturating_add(Duration::from_millis(1)))
        });
        Ok(Outcome::Action(Action::requeue(wait)))
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

    async fn check_pool(&self, spec: &ClaimSpec) -> Result<(), Failure> {
        let Some(name) = &spec.pool else { return Ok(()) };
        let pools = self.context.api::<PoolKind>(self.claim.namespace());
        let pool = pools.get_opt(name).await?;
        let template = pool.map(|pool| crate::fields::read_pool(&pool.spec).0.template);
        match template {
            Some(template) if template == spec.template => Ok(()),
            Some(template) => refuse(
                "WarmPoolNotFound",
                format!(
                    "the SandboxWarmPool {name} is for the template {template}, and not for {}",
                    spec.template
                ),
            ),
            None => refuse("WarmPoolNotFound", format!("there is no SandboxWarmPool {name}")),
        }
    }

    /// The `Sandbox` of the claim.
    fn sandbox(&self, spec: &ClaimSpec, template: &Value) -> Result<Sandbox, Failure> {
        let (plan, policy, faults) = read_template(template);
        if !faults.is_empty() {
            let name = &spec.template;
            let message = format!("the SandboxTemplate {name}: {faults}");
            return refuse("UnsupportedField", message);
        }
        check_envs(spec, &plan, policy)?;
        // The template without the fields that a Sandbox does not have.
        let mut pod = template.get("podTemplate").cloned().unwrap_or_default();
        let mut envs = plan.envs;
        envs.extend(spec.envs.clone());
        let envs = envs.into_iter().map(|(name, value)| json!({"name": name, "value": value}));
        pod["spec"]["containers"][0]["env"] = envs.collect();
        let mut labels = plan.labels;
        labels.extend(spec.labels.clone());
        pod["metadata"]["labels"] = json!(labels);
        let metadata = ObjectMeta {
            name: Some(self.claim.name().to_owned()),
            namespace: Some(self.claim.namespace().to_owned()),
            owner_references: self.claim.controller_owner_ref(&()).map(|owner| vec![owner]),
            annotations: Some([(CLAIM_ANNOTATION.to_owned(), spec.fingerprint())].into()),
            // From the beginning, which spares a request.
            finalizers: Some(vec![FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        };
        Ok(Sandbox::new(metadata, json!({"podTemplate": pod})))
    }

    async fn create(
        &self,
        api: &kube::Api<Sandbox>,
        body: &Sandbox,
        is_taken: bool,
    ) -> Result<Sandbox, Failure> {
        let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), dry_run: false };
        let create = async {
            match api.create(&parameters, body).await {
                Err(error) if code(&error) == 409 => Ok(api.get(self.claim.name()).await?),
                other => Ok(other?),
            }
        };
        let take = async {
            if is_taken {
                return Ok(());
            }
            let mut finalizers = self.claim.metadata.finalizers.clone().unwrap_or_default();
            finalizers.push(FINALIZER.to_owned());
            self.context.set_finalizers(self.claim, &finalizers).await
        };
        // At once: the owner reference protects from a leak between them.
        let (found, ()) = tokio::try_join!(create, take)?;
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
    async fn expire(self, spec: &ClaimSpec) -> Result<Action, Failure> {
        let (claim, context) = (self.claim, self.context);
        let api = context.api::<ClaimKind>(claim.namespace());
        if spec.delete_at_end {
            // The finalizer keeps it until its sandbox has ended.
            delete(&api, claim).await?;
            return Ok(Action::await_change());
        }
        let gone = remove_sandbox(claim, context).await?;
        self.status.sandbox = ClaimedSandbox::default();
        let (generation, message) = (claim.metadata.generation, "the time of the claim is over");
        let conditions = &mut self.status.conditions;
        condition::set(conditions, READY, false, "ClaimExpired", message, generation);
        Ok(if gone { Action::await_change() } else { Action::requeue(DELETION_CHECK) })
    }
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
}
