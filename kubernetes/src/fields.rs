//! Reads specifications, and reports every field that afresh does not serve.
//!
//! Promises: a field that is not read is a fault with its path. Null and empty values count as
//! absent. Lists have limits.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// The runtime class of pod templates that afresh runs.
pub const RUNTIME_CLASS: &str = "afresh";
/// Maximum ports and variables of one sandbox.
const MAX_ENTRIES: usize = 256;
/// Faults that one message lists.
const MAX_FAULTS: usize = 8;

/// Faults of a specification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(Vec<String>);

impl Faults {
    fn add(&mut self, fault: String) {
        self.0.push(fault);
    }

    /// True without a fault.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl std::fmt::Display for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = self.0.len().min(MAX_FAULTS);
        f.write_str(&self.0[..shown].join("; "))?;
        match self.0.len() - shown {
            0 => Ok(()),
            rest => write!(f, "; and {rest} more"),
        }
    }
}

/// The fields of one object that are not read yet.
struct Section<'a> {
    path: String,
    fields: Map<String, Value>,
    faults: &'a mut Faults,
}

fn is_absent(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The way out for fields that pod templates often have.
fn advice(name: &str) -> &'static str {
    match name {
        "resources" => "`memory-mib` of the afresh template limits memory",
        "command" | "args" => "run commands in the sandbox over its URL",
        "networkPolicy" => "`net` of the afresh template lists the servers that are reached",
        "volumeClaimTemplates" | "volumes" | "volumeMounts" => {
            "a sandbox has its own files, which it keeps while suspended"
        }
        "service" => "the status has the addresses of ports",
        "initContainers" => "build the state into an afresh template",
        _ => "remove it",
    }
}

impl<'a> Section<'a> {
    fn new(path: impl Into<String>, value: Value, faults: &'a mut Faults) -> Self {
        let path = path.into();
        let fields = match value {
            Value::Object(fields) => fields,
            Value::Null => Map::new(),
            _ => {
                faults.add(format!("{path} must be an object"));
                Map::new()
            }
        };
        Self { path, fields, faults }
    }

    fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !is_absent(value))
    }

    /// A value of a type, or a fault.
    fn take_as<T>(
        &mut self,
        name: &str,
        kind: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.take(name)?;
        let found = read(&value);
        if found.is_none() {
            let path = self.path(name);
            self.faults.add(format!("{path} must be {kind}"));
        }
        found
    }

    fn take_text(&mut self, name: &str) -> Option<String> {
        self.take_as(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    fn take_time(&mut self, name: &str) -> Option<Timestamp> {
        self.take_as(name, "a time", |value| value.as_str()?.parse().ok())
    }

    fn take_list(&mut self, name: &str) -> Vec<Value> {
        let list = self.take_as(name, "a list", |value| value.as_array().cloned());
        let mut list = list.unwrap_or_default();
        if list.len() > MAX_ENTRIES {
            let path = self.path(name);
            self.faults.add(format!("{path} has more than {MAX_ENTRIES} entries"));
            list.truncate(MAX_ENTRIES);
        }
        list
    }

    fn take_texts(&mut self, name: &str) -> BTreeMap<String, String> {
        let fields = self.take_as(name, "an object of at most 256 strings", |value| {
            let fields = value.as_object().filter(|fields| fields.len() <= MAX_ENTRIES)?.iter();
            fields.map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
        });
        fields.unwrap_or_default()
    }

    /// Accepts the values that describe how afresh behaves; another one stays, and is a fault.
    fn allow(&mut self, name: &str, values: &[Value]) {
        if self.fields.get(name).is_some_and(|value| values.contains(value)) {
            self.fields.remove(name);
        }
    }

    fn section(&mut self, name: &str, work: impl FnOnce(&mut Section<'_>)) {
        let value = self.take(name).unwrap_or_default();
        let mut section = Section::new(self.path(name), value, self.faults);
        work(&mut section);
        section.finish();
    }

    /// Reports the rest.
    fn finish(self) {
        for (name, _) in self.fields.iter().filter(|(_, value)| !is_absent(value)) {
            let fault = format!("{}.{name} is not supported: {}", self.path, advice(name));
            self.faults.add(fault);
        }
    }
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Its name, or nothing.
    pub name: String,
    /// Its number.
    pub number: u16,
}

/// The sandbox that a pod template describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxPlan {
    /// The afresh template: the image of the container.
    pub template: String,
    /// The name of the container.
    pub container: String,
    /// Variables of the environment.
    pub envs: BTreeMap<String, String>,
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// Ports that the status gives addresses of.
    pub ports: Vec<Port>,
}

/// A short text that differs where the values differ, in all versions of this program: FNV-1a.
fn fingerprint(values: &Value) -> String {
    let bytes = values.to_string().into_bytes();
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

impl SandboxPlan {
    /// The fingerprint of the values that a sandbox has from its creation on.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        fingerprint(&json!([self.template, self.envs, self.labels]))
    }
}

/// The runtime class of a pod template.
#[must_use]
pub fn runtime_class(spec: &Value) -> Option<&str> {
    spec.pointer("/podTemplate/spec/runtimeClassName")?.as_str()
}

fn read_pod(pod: &mut Section<'_>, plan: &mut SandboxPlan) {
    pod.section("metadata", |metadata| plan.labels = metadata.take_texts("labels"));
    pod.section("spec", |spec| {
        if spec.take_text("runtimeClassName").as_deref() != Some(RUNTIME_CLASS) {
            let path = spec.path("runtimeClassName");
            spec.faults.add(format!("{path} must be `{RUNTIME_CLASS}`"));
        }
        spec.allow("automountServiceAccountToken", &[false.into()]);
        spec.allow("enableServiceLinks", &[false.into()]);
        spec.allow("restartPolicy", &["Never".into()]);
        let containers = spec.take_list("containers");
        let path = spec.path("containers");
        if containers.len() != 1 {
            let count = containers.len();
            spec.faults.add(format!("{path} must have one container, and has {count}"));
        }
        for (index, container) in containers.into_iter().take(1).enumerate() {
            let mut section = Section::new(format!("{path}[{index}]"), container, spec.faults);
            read_container(&mut section, plan);
            section.finish();
        }
    });
}

fn read_container(container: &mut Section<'_>, plan: &mut SandboxPlan) {
    plan.container = container.take_text("name").unwrap_or_default();
    // Nothing is pulled.
    container.take("imagePullPolicy");
    match container.take_text("image") {
        Some(image) => plan.template = image,
        None => {
            let path = container.path("image");
            container.faults.add(format!("{path} must name a template of the afresh server"));
        }
    }
    for (index, entry) in container.take_list("env").into_iter().enumerate() {
        let path = container.path(&format!("env[{index}]"));
        let mut section = Section::new(path, entry, container.faults);
        if let Some(name) = section.take_text("name") {
            plan.envs.insert(name, section.take_text("value").unwrap_or_default());
        }
        section.finish();
    }
    for (index, entry) in container.take_list("ports").into_iter().enumerate() {
        let path = container.path(&format!("ports[{index}]"));
        let mut section = Section::new(path, entry, container.faults);
        section.allow("protocol", &["TCP".into()]);
        let name = section.take_text("name").unwrap_or_default();
        let number = section.take_as("containerPort", "a port from 1 to 65535", |value| {
            u16::try_from(value.as_u64()?).ok().filter(|port| *port > 0)
        });
        plan.ports.extend(number.map(|number| Port { name, number }));
        section.finish();
    }
}

/// The specification of a `Sandbox`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxSpec {
    /// The sandbox.
    pub plan: SandboxPlan,
    /// Whether it is to be paused.
    pub suspended: bool,
    /// When it ends.
    pub shutdown_time: Option<Timestamp>,
    /// Whether the object is deleted then.
    pub delete_at_end: bool,
}

/// Reads the specification of a `Sandbox`.
#[must_use]
pub fn read_sandbox(spec: &Value) -> (SandboxSpec, Faults) {
    let (mut read, mut faults) = (SandboxSpec::default(), Faults::default());
    let mut section = Section::new("spec", spec.clone(), &mut faults);
    section.section("podTemplate", |pod| read_pod(pod, &mut read.plan));
    let replicas = section
        .take_as("replicas", "0 or 1", |value| value.as_u64().filter(|replicas| *replicas < 2));
    read.suspended = replicas == Some(0);
    read.shutdown_time = section.take_time("shutdownTime");
    let policies = |value: &Value| match value.as_str()? {
        "Retain" => Some(false),
        "Delete" => Some(true),
        _ => None,
    };
    let policy = section.take_as("shutdownPolicy", "`Retain` or `Delete`", policies);
    read.delete_at_end = policy.unwrap_or(false);
    section.allow("service", &[false.into()]);
    section.finish();
    (read, faults)
}

/// Whether claims may set variables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EnvPolicy {
    /// They may not.
    #[default]
    Disallowed,
    /// New ones.
    Allowed,
    /// New ones and those of the template.
    Overrides,
}

/// Reads the specification of a `SandboxTemplate`.
#[must_use]
pub fn read_template(spec: &Value) -> (SandboxPlan, EnvPolicy, Faults) {
    let (mut plan, mut faults) = (SandboxPlan::default(), Faults::default());
    let mut section = Section::new("spec", spec.clone(), &mut faults);
    section.section("podTemplate", |pod| read_pod(pod, &mut plan));
    let expected = "`Disallowed`, `Allowed` or `Overrides`";
    let policy =
        section.take_as("envVarsInjectionPolicy", expected, |value| match value.as_str()? {
            "Disallowed" => Some(EnvPolicy::Disallowed),
            "Allowed" => Some(EnvPolicy::Allowed),
            "Overrides" => Some(EnvPolicy::Overrides),
            _ => None,
        });
    // No NetworkPolicy is made: sandboxes are no pods.
    section.allow("networkPolicyManagement", &["Unmanaged".into()]);
    section.allow("service", &[false.into()]);
    section.finish();
    (plan, policy.unwrap_or_default(), faults)
}

/// The specification of a `SandboxClaim`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimSpec {
    /// The `SandboxTemplate`.
    pub template: String,
    /// A `SandboxWarmPool` that must exist.
    pub pool: Option<String>,
    /// When the claim ends.
    pub shutdown_time: Option<Timestamp>,
    /// Seconds between the end of the sandbox and that of the claim.
    pub ttl_after_finished: Option<u32>,
    /// Whether the claim is deleted then.
    pub delete_at_end: bool,
    /// Variables.
    pub envs: BTreeMap<String, String>,
    /// The container that variables name, if they name one.
    pub env_container: Option<String>,
    /// Further labels of the pod.
    pub labels: BTreeMap<String, String>,
}

impl ClaimSpec {
    /// The fingerprint of the values that the `Sandbox` has from its creation on.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        fingerprint(&json!([self.template, self.envs, self.labels]))
    }
}

/// Reads the specification of a `SandboxClaim`.
#[must_use]
pub fn read_claim(spec: &Value) -> (ClaimSpec, Faults) {
    let (mut read, mut faults) = (ClaimSpec::default(), Faults::default());
    let mut section = Section::new("spec", spec.clone(), &mut faults);
    section.section("sandboxTemplateRef", |reference| {
        read.template = reference.take_text("name").unwrap_or_default();
        if read.template.is_empty() {
            let path = reference.path("name");
            reference.faults.add(format!("{path} must name a SandboxTemplate"));
        }
    });
    read.pool = section.take_text("warmpool").filter(|pool| pool != "default" && pool != "none");
    section.section("lifecycle", |lifecycle| {
        read.shutdown_time = lifecycle.take_time("shutdownTime");
        let ttl = lifecycle.take_as("ttlSecondsAfterFinished", "a number of seconds", |value| {
            u32::try_from(value.as_u64()?).ok()
        });
        read.ttl_after_finished = ttl;
        let expected = "`Retain`, `Delete` or `DeleteForeground`";
        let policy =
            lifecycle.take_as("shutdownPolicy", expected, |value| match value.as_str()? {
                "Retain" => Some(false),
                // A claim is always visible until its sandbox has ended.
                "Delete" | "DeleteForeground" => Some(true),
                _ => None,
            });
        read.delete_at_end = policy.unwrap_or(false);
    });
    section.section("additionalPodMetadata", |pod| read.labels = pod.take_texts("labels"));
    for (index, entry) in section.take_list("env").into_iter().enumerate() {
        let path = section.path(&format!("env[{index}]"));
        let mut variable = Section::new(path, entry, section.faults);
        if let Some(container) = variable.take_text("containerName") {
            let other = read.env_container.replace(container.clone());
            if other.is_some_and(|other| other != container) {
                let path = variable.path("containerName");
                variable.faults.add(format!("{path} must be that of the other variables"));
            }
        }
        if let Some(name) = variable.take_text("name") {
            read.envs.insert(name, variable.take_text("value").unwrap_or_default());
        }
        variable.finish();
    }
    section.finish();
    (read, faults)
}

/// The specification of a `SandboxWarmPool`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolSpec {
    /// The `SandboxTemplate`.
    pub template: String,
    /// Wanted sandboxes.
    pub replicas: i32,
}

/// Reads the specification of a `SandboxWarmPool`.
#[must_use]
pub fn read_pool(spec: &Value) -> (PoolSpec, Faults) {
    let (mut read, mut faults) = (PoolSpec::default(), Faults::default());
    let mut section = Section::new("spec", spec.clone(), &mut faults);
    section.section("sandboxTemplateRef", |reference| {
        read.template = reference.take_text("name").unwrap_or_default();
    });
    let replicas = section.take_as("replicas", "a number", |value| {
        i32::try_from(value.as_i64()?).ok().filter(|replicas| *replicas >= 0)
    });
    read.replicas = replicas.unwrap_or(0);
    // No sandbox of a pool can be stale, since none is made before its claim.
    section.section("updateStrategy", |strategy| {
        strategy.allow("type", &["OnReplenish".into(), "Recreate".into()]);
    });
    section.finish();
    (read, faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(container: Value) -> Value {
        json!({"spec": {"runtimeClassName": "afresh", "containers": [container]}})
    }

    #[test]
    fn a_pod_template_becomes_a_plan() {
        let container = json!({
            "name": "main", "image": "script", "env": [{"name": "A", "value": "1"}],
            "ports": [{"name": "web", "containerPort": 8000, "protocol": "TCP"}],
        });
        let (plan, policy, faults) = read_template(&json!({
            "podTemplate": pod(container), "envVarsInjectionPolicy": "Allowed",
            "volumeClaimTemplates": [], "service": false,
        }));
        assert!(faults.is_empty(), "{faults}");
        assert_eq!((plan.template.as_str(), plan.envs["A"].as_str()), ("script", "1"));
        assert_eq!(plan.ports, [Port { name: "web".to_owned(), number: 8000 }]);
        assert_eq!(policy, EnvPolicy::Allowed);
    }

    #[test]
    fn each_field_that_is_not_served_is_named_with_its_path() {
        let container = json!({
            "name": "main", "image": "script", "resources": {"limits": {"cpu": "1"}},
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
            "ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 70000}],
        });
        let mut template = pod(container);
        template["spec"]["hostNetwork"] = true.into();
        template["metadata"] = json!({"annotations": {"a": "b"}});
        let (_, faults) = read_sandbox(&json!({
            "podTemplate": template, "replicas": 2, "service": true, "shutdownTime": "soon",
        }));
        let text = faults.0.join("\n");
        for path in [
            "spec.podTemplate.metadata.annotations is not",
            "spec.podTemplate.spec.hostNetwork is not",
            "spec.podTemplate.spec.containers[0].resources is not supported: `memory-mib`",
            "spec.podTemplate.spec.containers[0].env[0].valueFrom is not",
            "spec.podTemplate.spec.containers[0].ports[0].protocol is not",
            "spec.podTemplate.spec.containers[0].ports[1].containerPort must be",
            "spec.replicas must be 0 or 1",
            "spec.service is not",
            "spec.shutdownTime must be a time",
        ] {
            assert!(text.contains(path), "{path} is missing in\n{text}");
        }
        assert!(faults.to_string().ends_with("; and 1 more"), "{faults}");
    }

    #[test]
    fn specifications_of_wrong_types_are_faults() {
        for spec in [json!(null), json!([1]), json!({"podTemplate": 1}), json!({"podTemplate": {}})]
        {
            assert!(!read_sandbox(&spec).1.is_empty(), "{spec}");
            assert!(!read_template(&spec).2.is_empty(), "{spec}");
        }
        assert!(!read_claim(&json!({"sandboxTemplateRef": {}})).1.is_empty());
        assert!(!read_pool(&json!({"replicas": -1})).1.is_empty());
        let many: Vec<_> = (0..300).map(|n| json!({"name": format!("V{n}")})).collect();
        let (spec, faults) = read_claim(&json!({"sandboxTemplateRef": {"name": "t"}, "env": many}));
        assert!(spec.envs.len() == MAX_ENTRIES && faults.to_string().contains("more than 256"));
    }

    #[test]
    fn a_claim_has_its_lifecycle() {
        let (claim, faults) = read_claim(&json!({
            "sandboxTemplateRef": {"name": "t"}, "warmpool": "fast",
            "lifecycle": {
                "shutdownTime": "2027-01-01T00:00:00Z", "ttlSecondsAfterFinished": 5,
                "shutdownPolicy": "DeleteForeground",
            },
            "env": [{"name": "A", "value": "1", "containerName": "main"}],
        }));
        assert!(faults.is_empty(), "{faults}");
        assert_eq!(claim.pool.as_deref(), Some("fast"));
        assert_eq!((claim.ttl_after_finished, claim.delete_at_end), (Some(5), true));
        assert_eq!(claim.shutdown_time, "2027-01-01T00:00:00Z".parse().ok());
    }
}
