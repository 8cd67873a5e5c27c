//! The reconciler of `Sandbox`: one object is one sandbox of the afresh server.
//!
//! Promises: only a sandbox that carries the identifier of its object, its namespace, its cluster
//! and its controller is used or ended; the status, which users may write, is a hint. The sandbox
//! is looked up by that identifier before and after one is made. Cluster, controller and identifier
//! are the key of its creation: the server makes one sandbox of it, also of requests whose answers
//! were lost and of two hosts with one controller. Of two that a server without keys has made, the
//! older one stays. An object is removed after its sandbox has ended. The sandbox of an object that
//! is removed without its finalizer is ended by the process that has seen it. An object whose
//! sandbox is found again is not finished any more. The status is written after the Secret with the
//! token.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use serde_json::json;

use crate::condition::{self, FINISHED, READY, SUSPENDED};
use crate::context::{Context, FINALIZER, Failure, MANAGER, Wait, code, key_of};
use crate::fields::{SandboxSpec, fingerprint, is_afresh, read_sandbox};
use crate::metrics::SandboxEvent;
use crate::resource::{Access, PortAddress, Sandbox, SandboxStatus};
use crate::server::{
    CLUSTER_LABEL, CONTROLLER_LABEL, NAME_LABEL, NAMESPACE_LABEL, NewSandbox, PLAN_LABEL,
    RemoteList, RemoteSandbox, ServerError, UID_LABEL,
};

/// The server pauses a sandbox this long after its shutdown time, if no controller ends it.
const SHUTDOWN_MARGIN: Duration = Duration::from_secs(60);
/// Intervals of checks between two looks whether the Secret exists.
const SECRET_INTERVALS: u32 = 10;
/// Minimum number of expected sandboxes from which on the server must know half.
const MIN_EXPECTED: usize = 2;
/// Maximum bytes of the name of an object.
const MAX_NAME_BYTES: usize = 253;
/// Maximum bytes of an identifier that a status may have.
const MAX_ID_BYTES: usize = 128;

/// The message for a template, variables or labels that differ from those of the sandbox.
const SPEC_CHANGED: &str = "the image, variables or labels of spec.podTemplate were changed after \
    the sandbox was made, which has no effect on it; restore them, or delete this object and make \
    another";

/// Time from now to `when`.
#[must_use]
pub fn until(when: Timestamp) -> Duration {
    Duration::try_from(when.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO)
}

/// The name of the Secret of a sandbox. It differs wherever the content does, so a Secret of this
/// name has the right content, and none is ever read or changed.
#[must_use]
pub fn secret_name(sandbox: &Sandbox, id: &str, url: &str) -> String {
    let content = serde_json::json!([sandbox.uid(), id, url]);
    let end = format!("-access-{}", crate::fields::fingerprint(&content));
    let name = sandbox.name();
    let name = &name[..name.floor_char_boundary(MAX_NAME_BYTES - end.len())];
    format!("{}{end}", name.trim_end_matches(['.', '-']))
}

/// The identifier of an object, and its namespace.
type Identity<'a> = (&'a str, &'a str);

fn identity(sandbox: &Sandbox) -> Identity<'_> {
    (sandbox.uid(), sandbox.namespace())
}

/// Whether a sandbox of the server was made for an object, by this controller.
fn is_of(remote: &RemoteSandbox, (uid, namespace): Identity<'_>, context: &Context) -> bool {
    let wanted = [
        (UID_LABEL, uid),
        (NAMESPACE_LABEL, namespace),
        (CLUSTER_LABEL, &context.cluster),
        (CONTROLLER_LABEL, &context.settings.controller),
    ];
    wanted.iter().all(|(label, value)| {
        !value.is_empty() && remote.metadata.get(*label).is_some_and(|found| found == value)
    })
}

/// The key that creates the sandbox of an object. Kubernetes gives no other object of the cluster
/// this identifier. Another controller has other labels, and so another key: the server refuses a
/// key with another request.
pub(crate) fn creation_key(sandbox: &Sandbox, context: &Context) -> String {
    let parts = json!([context.cluster, context.settings.controller, sandbox.uid()]);
    format!("kubernetes/{}", fingerprint(&parts))
}

/// The sandboxes of an object, the oldest first.
async fn list(of: Identity<'_>, context: &Context) -> Result<RemoteList, Failure> {
    let mut all = context.server.list(UID_LABEL, of.0).await?;
    all.sandboxes.retain(|remote| is_of(remote, of, context));
    all.sandboxes.sort_by(|one, two| (one.started_at, &one.id).cmp(&(two.started_at, &two.id)));
    Ok(all)
}

/// Ends every sandbox of an object that does not exist any more.
///
/// # Errors
/// If the server does not answer, or cannot name every one.
pub async fn end_all_of(of: (&str, &str), context: &Context) -> Result<(), Failure> {
    let all = list(of, context).await?;
    for remote in &all.sandboxes {
        context.lease.check().await?;
        context.kill(&remote.id).await?;
        tracing::warn!(id = remote.id, "a sandbox without an object is ended");
    }
    all.into_whole()?;
    Ok(())
}

/// A sandbox that a list has.
async fn get_listed(context: &Context, id: &str) -> Result<RemoteSandbox, Failure> {
    context.server.get(id).await?.ok_or_else(|| Failure::Cluster {
        reason: "SandboxNotFound",
        message: format!("the afresh server lists the sandbox {id}, and does not know it"),
    })
}

/// The identifier in a status, if it can be one.
fn known_id(status: &SandboxStatus) -> Option<&str> {
    let fits = |id: &&str| {
        let letter = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        !id.is_empty() && id.len() <= MAX_ID_BYTES && id.chars().all(letter)
    };
    status.access.sandbox_id.as_deref().filter(fits)
}

/// Reconciles one object.
///
/// # Errors
/// If the Kubernetes API or the server fails; the condition `Ready` has the cause.
pub async fn reconcile(sandbox: &mut Sandbox, context: &Context) -> Result<Wait, Failure> {
    if sandbox.metadata.deletion_timestamp.is_some() {
        return match end(sandbox, context).await {
            Ok(()) => Ok(None),
            Err(failure) => report(sandbox, context, sandbox.status(), failure).await,
        };
    }
    let is_taken = sandbox.has_finalizer(FINALIZER);
    if !is_taken && context.settings.ignore_other_runtimes && !is_afresh(sandbox.spec()) {
        return Ok(None);
    }
    let mut status = sandbox.status();
    let work = Reconciliation { sandbox, context, status: &mut status };
    match work.run().await {
        Ok(wait) => {
            context.write_status(sandbox, &status).await?;
            Ok(wait)
        }
        Err(failure) => report(sandbox, context, status, failure).await,
    }
}

/// Writes a failure into the condition `Ready`.
async fn report(
    sandbox: &Sandbox,
    context: &Context,
    mut status: SandboxStatus,
    failure: Failure,
) -> Result<Wait, Failure> {
    if failure.is_reported() {
        let (generation, message) = (sandbox.metadata.generation, failure.to_string());
        let conditions = &mut status.conditions;
        condition::set(conditions, READY, false, failure.reason(), &message, generation);
        context.write_status(sandbox, &status).await?;
    }
    Err(failure)
}

/// Ends the sandbox of an object, and then lets the object go.
async fn end(sandbox: &mut Sandbox, context: &Context) -> Result<(), Failure> {
    if sandbox.has_finalizer(FINALIZER) {
        kill_all(sandbox, context).await?;
        context.release(sandbox).await?;
    }
    context.forget(&key_of(sandbox));
    Ok(())
}

/// Ends every sandbox of an object: also one whose creation was never noted, and that of the status
/// if a list does not have it yet.
async fn kill_all(sandbox: &Sandbox, context: &Context) -> Result<(), Failure> {
    let all = list(identity(sandbox), context).await?;
    for remote in &all.sandboxes {
        context.kill(&remote.id).await?;
    }
    let status = sandbox.status();
    let Some(id) = known_id(&status) else {
        // Without an identifier a partial list proves nothing.
        if all.sandboxes.is_empty() {
            all.into_whole()?;
        }
        return Ok(());
    };
    let known = context.server.get(id).await?;
    if known.is_some_and(|remote| is_of(&remote, identity(sandbox), context)) {
        context.kill(id).await?;
    }
    Ok(())
}

struct Reconciliation<'a> {
    sandbox: &'a mut Sandbox,
    context: &'a Context,
    status: &'a mut SandboxStatus,
}

/// The state of an object on the server.
enum Finding {
    Exists(RemoteSandbox),
    /// There was none yet.
    New,
    /// The status names one that the server does not know.
    Missing,
}

impl Reconciliation<'_> {
    fn set(&mut self, kind: &str, is_true: bool, reason: &str, message: &str) {
        let generation = self.sandbox.metadata.generation;
        condition::set(&mut self.status.conditions, kind, is_true, reason, message, generation);
    }

    async fn run(mut self) -> Result<Wait, Failure> {
        let (spec, faults) = read_sandbox(self.sandbox.spec());
        if spec.shutdown_time.is_some_and(|time| time <= Timestamp::now()) {
            return self.expire(&spec).await;
        }
        let finding = if condition::is_true(&self.status.conditions, FINISHED) {
            // The server that knew nothing of it may have been another one.
            match self.find_listed().await? {
                None => return Ok(self.wait(&spec)),
                Some(remote) => {
                    let (namespace, name) = (self.sandbox.namespace(), self.sandbox.name());
                    tracing::warn!(namespace, name, remote.id, "its sandbox is found again");
                    condition::remove(&mut self.status.conditions, FINISHED);
                    Finding::Exists(remote)
                }
            }
        } else {
            self.find().await?
        };
        if !matches!(finding, Finding::Missing) {
            self.observe_missing(None);
        }
        if !faults.is_empty() {
            // The sandbox stays as it is, and lives on.
            if let Finding::Exists(remote) = &finding {
                self.prolong(&spec, remote).await?;
            }
            self.set(READY, false, "UnsupportedField", &faults.to_string());
            return Ok(self.wait(&spec));
        }
        let remote = match finding {
            Finding::Exists(remote) => {
                self.context.note_tenant().await;
                remote
            }
            Finding::Missing => return self.miss(&spec).await,
            Finding::New if spec.suspended => {
                self.context.take(self.sandbox).await?;
                self.suspend(false);
                return Ok(self.wait(&spec));
            }
            Finding::New => self.create(&spec).await?,
        };
        let plan = remote.metadata.get(PLAN_LABEL);
        if plan.is_some_and(|plan| *plan != spec.plan.fingerprint()) {
            self.prolong(&spec, &remote).await?;
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
    fn wait(&self, spec: &SandboxSpec) -> Wait {
        let end = spec.shutdown_time.map_or(Duration::MAX, until);
        Some(self.context.settings.resync.min(end.saturating_add(Duration::from_millis(1))))
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

    /// The sandbox that a controller has made for this object before.
    async fn find(&self) -> Result<Finding, Failure> {
        let (sandbox, context) = (&*self.sandbox, self.context);
        if let Some(id) = known_id(self.status) {
            match context.server.get(id).await? {
                Some(remote) if is_of(&remote, identity(sandbox), context) => {
                    return Ok(Finding::Exists(remote));
                }
                Some(_) => {
                    let (namespace, name) = (sandbox.namespace(), sandbox.name());
                    tracing::warn!(namespace, name, id, "the status names a sandbox of others");
                }
                // Either it has ended, or the status is wrong.
                None => {
                    let all = list(identity(sandbox), context).await?;
                    if let Some(first) = all.sandboxes.first() {
                        return get_listed(context, &first.id).await.map(Finding::Exists);
                    }
                    all.into_whole()?;
                    return Ok(Finding::Missing);
                }
            }
        }
        let Some(found) = self.find_listed().await? else { return Ok(Finding::New) };
        context.monitor.metrics.count_sandbox(SandboxEvent::Adopted);
        Ok(Finding::Exists(found))
    }

    /// The oldest sandbox of the object, if two controllers were at work; the sweep ends the other
    /// one. One that the list lacks is found by the key of its creation.
    async fn find_listed(&self) -> Result<Option<RemoteSandbox>, Failure> {
        let all = list(identity(self.sandbox), self.context).await?;
        let Some(first) = all.sandboxes.into_iter().next() else { return Ok(None) };
        // A server need not list tokens.
        get_listed(self.context, &first.id).await.map(Some)
    }

    /// Makes a sandbox.
    async fn create(&mut self, spec: &SandboxSpec) -> Result<RemoteSandbox, Failure> {
        let context = self.context;
        self.check_image(&spec.plan.template)?;
        context.take(self.sandbox).await?;
        // Its sandbox is ended also if the object is removed during the creation.
        context.observe(self.sandbox, context.observation(self.sandbox));
        let sandbox = &*self.sandbox;
        let mut metadata: BTreeMap<String, String> = spec.plan.labels.clone();
        let own = [
            (CLUSTER_LABEL, context.cluster.as_str()),
            (CONTROLLER_LABEL, &context.settings.controller),
            (UID_LABEL, sandbox.uid()),
            (NAMESPACE_LABEL, sandbox.namespace()),
            (NAME_LABEL, sandbox.name()),
            (PLAN_LABEL, &spec.plan.fingerprint()),
        ];
        metadata.extend(own.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let new = NewSandbox {
            key: &creation_key(sandbox, context),
            template: &spec.plan.template,
            template_only: context.settings.images.is_empty(),
            envs: &spec.plan.envs,
            metadata: &metadata,
            time: self.time(spec),
        };
        // As late as possible: a host that stops here for longer than its lease is the rest.
        context.lease.check().await?;
        let made = match context.server.create(&new).await {
            Err(error) if new.template_only && error.is_missing(new.template) => {
                let message = format!(
                    "the afresh server has no template `{}`; a snapshot needs the option --image \
                     of the controller",
                    new.template
                );
                return Err(Failure::Cluster { reason: "TemplateNotFound", message });
            }
            made => made?,
        };
        context.monitor.metrics.count_sandbox(SandboxEvent::Made);
        // The finalizer may have been removed by force.
        if !context.is_wanted(sandbox).await? {
            context.kill(&made.id).await?;
            return Err(Failure::Gone);
        }
        let all = list(identity(sandbox), context).await?.sandboxes;
        let Some(first) = all.first().filter(|first| first.id != made.id) else { return Ok(made) };
        // Another controller was faster. It looks at the same list, and decides alike.
        context.kill(&made.id).await?;
        get_listed(context, &first.id).await
    }

    /// Whether objects may name an image. A snapshot has the memory of a sandbox, which may be one
    /// of another namespace.
    fn check_image(&self, image: &str) -> Result<(), Failure> {
        let images = &self.context.settings.images;
        // Without a list the creation is one of templates alone.
        let is_allowed = images.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(start) => image.starts_with(start),
            None => image == allowed,
        });
        if images.is_empty() || is_allowed {
            return Ok(());
        }
        let message = format!("the option --image of the controller does not allow `{image}`");
        Err(Failure::Cluster { reason: "ImageNotAllowed", message })
    }

    /// Resumes a paused sandbox, and prolongs a running one.
    async fn keep_running(
        &self,
        spec: &SandboxSpec,
        remote: &RemoteSandbox,
    ) -> Result<(), Failure> {
        let time = self.time(spec);
        if remote.is_paused() {
            return Ok(self.context.server.connect(&remote.id, time).await?);
        }
        self.prolong(spec, remote).await
    }

    /// Prolongs a running sandbox whose time is short or too long.
    async fn prolong(&self, spec: &SandboxSpec, remote: &RemoteSandbox) -> Result<(), Failure> {
        if remote.is_paused() {
            return Ok(());
        }
        let time = self.time(spec);
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
        let url = settings.public_url.as_str();
        let name = secret_name(self.sandbox, id, url);
        let access = Access {
            sandbox_id: Some(id.clone()),
            url: Some(url.to_owned()),
            secret_name: Some(name.clone()),
            ports: Some(ports).filter(|ports| !ports.is_empty()),
        };
        let mut observation = self.context.observation(self.sandbox);
        let interval = settings.resync.saturating_mul(SECRET_INTERVALS);
        let is_seen = observation.secret.is_some_and(|seen| seen.elapsed() < interval);
        if !is_seen || self.status.access.secret_name != access.secret_name {
            self.write_secret(&name, remote).await?;
            observation.secret = Some(Instant::now());
            self.context.observe(self.sandbox, observation);
        }
        self.status.access = access;
        Ok(())
    }

    /// Makes the Secret, if it does not exist.
    async fn write_secret(&self, name: &str, remote: &RemoteSandbox) -> Result<(), Failure> {
        let sandbox = &*self.sandbox;
        let url = self.context.settings.public_url.as_str();
        let token = remote.token.as_deref().ok_or_else(|| ServerError::Answer {
            why: format!("the sandbox {} has no token", remote.id),
        })?;
        let data = [("id", remote.id.as_str()), ("token", token), ("url", url)]
            .map(|(key, text)| (key.to_owned(), ByteString(text.as_bytes().to_vec())));
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                owner_references: Some(vec![sandbox.owner_reference()]),
                ..ObjectMeta::default()
            },
            data: Some(data.into()),
            immutable: Some(true),
            ..Secret::default()
        };
        let api: Api<Secret> = Api::namespaced(self.context.client.clone(), sandbox.namespace());
        let parameters = PostParams { field_manager: Some(MANAGER.to_owned()), dry_run: false };
        match api.create(&parameters, &secret).await {
            // Its name says that it is this one.
            Err(error) if code(&error) == 409 => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }

    fn observe_missing(&self, missing: Option<Instant>) {
        let mut observation = self.context.observation(self.sandbox);
        if observation.missing.is_some() || missing.is_some() {
            observation.missing = missing;
            self.context.observe(self.sandbox, observation);
        }
    }

    /// The server does not know the sandbox. It counts as ended if a later look finds the same: a
    /// server that starts again, or another one at the address, may answer so for a while.
    async fn miss(&mut self, spec: &SandboxSpec) -> Result<Wait, Failure> {
        let confirmation = self.context.settings.confirmation;
        let since = self.context.observation(self.sandbox).missing;
        if since.is_some_and(|since| since.elapsed() >= confirmation) {
            self.check_tenant().await?;
            self.context.forget(&key_of(self.sandbox));
            self.context.monitor.metrics.count_sandbox(SandboxEvent::Lost);
            return Ok(self.finish(spec));
        }
        let since = since.unwrap_or_else(Instant::now);
        self.observe_missing(Some(since));
        let id = self.status.access.sandbox_id.clone().unwrap_or_default();
        let message =
            format!("the afresh server does not know the sandbox {id}; it is asked again");
        self.set(READY, false, "SandboxNotFound", &message);
        let wait = confirmation.saturating_sub(since.elapsed());
        Ok(Some(wait.max(Duration::from_millis(1))))
    }

    /// Refuses to finish an object where the key is of another tenant than the lease notes, and
    /// where the server knows few of the sandboxes of this controller. That is the answer of
    /// another server.
    async fn check_tenant(&self) -> Result<(), Failure> {
        let context = self.context;
        context.check_tenant().await?;
        let mut all = context.server.list(CLUSTER_LABEL, &context.cluster).await?.sandboxes;
        let own = &context.settings.controller;
        all.retain(|remote| remote.metadata.get(CONTROLLER_LABEL) == Some(own));
        let (expected, listed) = (context.count_observed(), all.len());
        if expected < MIN_EXPECTED || listed >= expected.div_ceil(2) {
            return Ok(());
        }
        let message = format!(
            "the afresh server knows {listed} sandboxes of this controller, which expects \
             {expected}, so this one is not counted as ended; check --server and the tenant of the \
             API key, or delete this object and make another"
        );
        Err(Failure::Cluster { reason: "SandboxNotFound", message })
    }

    /// The sandbox has ended without the controller: its memory is lost, so it is not made anew.
    fn finish(&mut self, spec: &SandboxSpec) -> Wait {
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
    async fn expire(mut self, spec: &SandboxSpec) -> Result<Wait, Failure> {
        kill_all(self.sandbox, self.context).await?;
        self.context.forget(&key_of(self.sandbox));
        self.status.access = Access::default();
        self.status.replicas = 0;
        condition::remove(&mut self.status.conditions, SUSPENDED);
        self.set(READY, false, "SandboxExpired", "spec.shutdownTime is over");
        if spec.delete_at_end {
            self.context.delete(self.sandbox).await?;
        }
        Ok(None)
    }
}
