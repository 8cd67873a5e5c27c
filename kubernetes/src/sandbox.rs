//! The reconciler of `Sandbox`: one object is one sandbox of the afresh server.
//!
//! Promises: the sandbox has the identifier of its object as a label, and is looked up by that
//! before one is made, so a controller that ended between creation and the write of the status
//! makes no second one. An object is removed after its sandbox has ended. The status is written
//! after the Secret with the token.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use json_patch::Patch as JsonPatch;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::controller::Action;
use kube::{Api, Resource};
use serde_json::json;

use crate::condition::{self, FINISHED, READY, SUSPENDED};
use crate::context::{Context, Failure, MANAGER, code};
use crate::fields::{RUNTIME_CLASS, SandboxSpec, read_sandbox, runtime_class};
use crate::resource::{Access, PortAddress, Sandbox, SandboxKind, SandboxStatus};
use crate::server::{
    CLUSTER_LABEL, NAME_LABEL, NAMESPACE_LABEL, NewSandbox, PLAN_LABEL, RemoteSandbox, UID_LABEL,
};

/// The finalizer of objects with a sandbox.
pub const FINALIZER: &str = "agents.x-k8s.io/afresh";
/// The server pauses a sandbox this long after its shutdown time, if no controller ends it.
const SHUTDOWN_MARGIN: Duration = Duration::from_secs(60);

/// The message for a template, variables or labels that differ from those of the sandbox.
const SPEC_CHANGED: &str = "the image, variables or labels of spec.podTemplate were changed after \
    the sandbox was made, which has no effect on it; restore them, or delete this object and make \
    another";

/// Time from now to `when`.
#[must_use]
pub fn until(when: Timestamp) -> Duration {
    Duration::try_from(when.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO)
}

/// Reconciles one object.
///
/// # Errors
/// If the Kubernetes API or the server fails; the condition `Ready` has the cause.
pub async fn reconcile(sandbox: Arc<Sandbox>, context: Arc<Context>) -> Result<Action, Failure> {
    if let Some(pause) = context.pause(&sandbox) {
        return Ok(pause);
    }
    if sandbox.metadata.deletion_timestamp.is_some() {
        let ended = end(&sandbox, &context).await;
        return match ended {
            Ok(action) => Ok(action),
            Err(failure) => report(&sandbox, &context, sandbox.status(), failure).await,
        };
    }
    let other = runtime_class(&sandbox.spec).is_none_or(|class| class != RUNTIME_CLASS);
    if other && context.settings.ignore_other_runtimes {
        return Ok(Action::await_change());
    }
    let mut status = sandbox.status();
    let result = Reconciliation { sandbox: &sandbox, context: &context, status: &mut status };
    match result.run().await {
        Ok(action) => {
            context.write_status(&sandbox, &status).await?;
            context.succeed(sandbox.uid());
            Ok(action)
        }
        Err(failure) => report(&sandbox, &context, status, failure).await,
    }
}

/// Writes a failure into the condition `Ready`.
async fn report(
    sandbox: &Sandbox,
    context: &Context,
    mut status: SandboxStatus,
    failure: Failure,
) -> Result<Action, Failure> {
    if let Some(action) = failure.conflict() {
        return Ok(action);
    }
    let (generation, message) = (sandbox.metadata.generation, failure.to_string());
    let conditions = &mut status.conditions;
    condition::set(conditions, READY, false, failure.reason(), &message, generation);
    context.write_status(sandbox, &status).await?;
    Err(failure)
}

/// Ends the sandbox of an object, and then lets the object go.
async fn end(sandbox: &Sandbox, context: &Context) -> Result<Action, Failure> {
    let mut finalizers = sandbox.metadata.finalizers.clone().unwrap_or_default();
    if finalizers.iter().any(|name| name == FINALIZER) {
        kill_all(sandbox, context).await?;
        finalizers.retain(|name| name != FINALIZER);
        context.set_finalizers(sandbox, &finalizers).await?;
    }
    context.succeed(sandbox.uid());
    Ok(Action::await_change())
}

/// Ends every sandbox of an object: that of its status, and one whose creation was never noted.
async fn kill_all(sandbox: &Sandbox, context: &Context) -> Result<(), Failure> {
    let known = sandbox.status().access.sandbox_id;
    for remote in context.server.list(UID_LABEL, sandbox.uid()).await? {
        context.server.kill(&remote.id).await?;
    }
    if let Some(id) = known {
        context.server.kill(&id).await?;
    }
    Ok(())
}

struct Reconciliation<'a> {
    sandbox: &'a Sandbox,
    context: &'a Context,
    status: &'a mut SandboxStatus,
}

impl Reconciliation<'_> {
    fn set(&mut self, kind: &str, is_true: bool, reason: &str, message: &str) {
        let generation = self.sandbox.metadata.generation;
        condition::set(&mut self.status.conditions, kind, is_true, reason, message, generation);
    }

    async fn run(mut self) -> Result<Action, Failure> {
        let (spec, faults) = read_sandbox(&self.sandbox.spec);
        if spec.shutdown_time.is_some_and(|time| time <= Timestamp::now()) {
            return self.expire(&spec).await;
        }
        if condition::is_true(&self.status.conditions, FINISHED) {
            return Ok(self.wait(&spec));
        }
        if !faults.is_empty() {
            // The sandbox stays as it is.
            self.set(READY, false, "UnsupportedField", &faults.to_string());
            return Ok(self.wait(&spec));
        }
        let remote = match &self.status.access.sandbox_id {
            Some(id) => match self.context.server.get(id).await? {
                Some(remote) => remote,
                None => return Ok(self.finish(&spec)),
            },
            None => match self.find_or_create(&spec).await? {
                Some(remote) => remote,
                None => {
                    self.suspend(false);
                    return Ok(self.wait(&spec));
                }
            },
        };
        let plan = remote.metadata.get(PLAN_LABEL);
        if plan.is_some_and(|plan| *plan != spec.plan.fingerprint()) {
            self.set(READY, false, "SpecChanged", SPEC_CHANGED);
            return Ok(self.wait(&spec));
        }
        if spec.suspended {
            if !remote.is_paused() {
                self.context.server.pause(&remote.id).await?;
            }
            self.note(&spec, &remote).await?;
            self.suspend(true);
        } else {
            self.keep_running(&spec, &remote).await?;
            self.note(&spec, &remote).await?;
            self.status.replicas = 1;
            condition::remove(&mut self.status.conditions, SUSPENDED);
            self.set(READY, true, "DependenciesReady", "the sandbox serves requests");
        }
        Ok(self.wait(&spec))
    }

    /// When to look again without a change.
    fn wait(&self, spec: &SandboxSpec) -> Action {
        let end = spec.shutdown_time.map_or(Duration::MAX, until);
        Action::requeue(
            self.context.settings.resync.min(end.saturating_add(Duration::from_millis(1))),
        )
    }

    fn suspend(&mut self, exists: bool) {
        let message = if exists { "the sandbox is paused, with its memory" } else { "no sandbox" };
        self.status.replicas = 0;
        self.set(SUSPENDED, true, "PodTerminated", message);
        self.set(READY, false, "SandboxSuspended", "spec.replicas is 0");
    }

    /// The time that the server is asked for.
    fn time(&self, spec: &SandboxSpec) -> Duration {
        let left = spec.shutdown_time.map_or(Duration::MAX, until);
        self.context.settings.keep.min(left.saturating_add(SHUTDOWN_MARGIN))
    }

    /// The sandbox that a controller has made for this object before, or a new one. A suspended
    /// object gets no new one.
    async fn find_or_create(
        &mut self,
        spec: &SandboxSpec,
    ) -> Result<Option<RemoteSandbox>, Failure> {
        let (sandbox, context) = (self.sandbox, self.context);
        let mut finalizers = sandbox.metadata.finalizers.clone().unwrap_or_default();
        if !finalizers.iter().any(|name| name == FINALIZER) {
            finalizers.push(FINALIZER.to_owned());
            context.set_finalizers(sandbox, &finalizers).await?;
        }
        // The oldest, if two controllers were at work; the sweep ends the other one.
        let found = context.server.list(UID_LABEL, sandbox.uid()).await?.into_iter().next();
        if let Some(found) = found {
            return Ok(context.server.get(&found.id).await?);
        }
        if spec.suspended {
            return Ok(None);
        }
        let mut metadata: BTreeMap<String, String> = spec.plan.labels.clone();
        let own = [
            (CLUSTER_LABEL, context.cluster.as_str()),
            (UID_LABEL, sandbox.uid()),
            (NAMESPACE_LABEL, sandbox.namespace()),
            (NAME_LABEL, sandbox.name()),
            (PLAN_LABEL, &spec.plan.fingerprint()),
        ];
        metadata.extend(own.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let new = NewSandbox {
            template: &spec.plan.template,
            envs: &spec.plan.envs,
            metadata: &metadata,
            time: self.time(spec),
        };
        Ok(Some(context.server.create(&new).await?))
    }

    /// Resumes a paused sandbox, and prolongs one whose time is short or too long.
    async fn keep_running(
        &self,
        spec: &SandboxSpec,
        remote: &RemoteSandbox,
    ) -> Result<(), Failure> {
        let time = self.time(spec);
        if remote.is_paused() {
            return Ok(self.context.server.connect(&remote.id, time).await?);
        }
        let Some(left) = remote.end_at.map(until) else { return Ok(()) };
        if left < time * 2 / 3 || left > time + SHUTDOWN_MARGIN {
            self.context.server.set_timeout(&remote.id, time).await?;
        }
        Ok(())
    }

    /// Writes the Secret with the token, and the data to reach the sandbox.
    async fn note(&mut self, spec: &SandboxSpec, remote: &RemoteSandbox) -> Result<(), Failure> {
        let settings = &self.context.settings;
        let id = &remote.id;
        let ports = settings.domain.iter().flat_map(|domain| {
            spec.plan.ports.iter().map(move |port| PortAddress {
                name: port.name.clone(),
                port: port.number,
                url: format!("{}://{}-{id}.{domain}", settings.public_url.scheme(), port.number),
            })
        });
        let ports: Vec<_> = ports.collect();
        let access = Access {
            sandbox_id: Some(id.clone()),
            url: Some(settings.public_url.to_string()),
            secret_name: Some(format!("{}-access", self.sandbox.name())),
            ports: Some(ports).filter(|ports| !ports.is_empty()),
        };
        if access.sandbox_id != self.status.access.sandbox_id
            || access.secret_name != self.status.access.secret_name
            || access.url != self.status.access.url
        {
            let name = access.secret_name.as_deref().unwrap_or_default();
            self.write_secret(name, remote).await?;
        }
        self.status.access = access;
        Ok(())
    }

    async fn write_secret(&self, name: &str, remote: &RemoteSandbox) -> Result<(), Failure> {
        let sandbox = self.sandbox;
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        let data = BTreeMap::from([
            ("id".to_owned(), bytes(&remote.id)),
            ("token".to_owned(), bytes(remote.token.as_deref().unwrap_or_default())),
            ("url".to_owned(), bytes(self.context.settings.public_url.as_str())),
        ]);
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                owner_references: sandbox.controller_owner_ref(&()).map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
            data: Some(data),
            ..Secret::default()
        };
        let api: Api<Secret> = Api::namespaced(self.context.client.clone(), sandbox.namespace());
        let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), dry_run: false };
        match api.create(&parameters, &secret).await {
            Err(error) if code(&error) == 409 => {}
            other => return Ok(other.map(drop)?),
        }
        // Only a Secret of this object is changed, which needs no right to read Secrets.
        let patch: JsonPatch = serde_json::from_value(json!([
            {"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": sandbox.uid()},
            {"op": "replace", "path": "/data", "value": secret.data},
        ]))
        .map_err(kube::Error::SerdeError)?;
        let patched = api.patch(name, &PatchParams::default(), &Patch::Json::<()>(patch)).await;
        if let Err(error) = patched {
            let message = format!(
                "the Secret {name} is not one of this Sandbox ({error}); remove or rename it"
            );
            return Err(Failure::Cluster { reason: "SecretConflict", message });
        }
        Ok(())
    }

    /// The sandbox has ended without the controller: its memory is lost, so it is not made anew.
    fn finish(&mut self, spec: &SandboxSpec) -> Action {
        let id = self.status.access.sandbox_id.take().unwrap_or_default();
        let message = format!(
            "the sandbox {id} was ended on the afresh server; delete this object and make another"
        );
        self.status.access = Access::default();
        self.status.replicas = 0;
        self.set(FINISHED, true, "PodFailed", &message);
        self.set(READY, false, "PodFailed", &message);
        self.wait(spec)
    }

    /// The time of the object is over.
    async fn expire(mut self, spec: &SandboxSpec) -> Result<Action, Failure> {
        kill_all(self.sandbox, self.context).await?;
        self.status.access = Access::default();
        self.status.replicas = 0;
        condition::remove(&mut self.status.conditions, SUSPENDED);
        self.set(READY, false, "SandboxExpired", "spec.shutdownTime is over");
        if spec.delete_at_end {
            let api = self.context.api::<SandboxKind>(self.sandbox.namespace());
            delete(&api, self.sandbox).await?;
        }
        Ok(Action::await_change())
    }
}

/// Deletes exactly this object.
///
/// # Errors
/// If the API refuses it. An object that does not exist any more is no error.
pub async fn delete<K: crate::resource::Kind>(
    api: &Api<crate::resource::CustomObject<K>>,
    object: &crate::resource::CustomObject<K>,
) -> Result<(), Failure> {
    let parameters = DeleteParams::default().preconditions(kube::api::Preconditions {
        uid: object.metadata.uid.clone(),
        resource_version: None,
    });
    match api.delete(object.name(), &parameters).await {
        Err(error) if matches!(code(&error), 404 | 409) => Ok(()),
        other => Ok(other.map(drop)?),
    }
}
