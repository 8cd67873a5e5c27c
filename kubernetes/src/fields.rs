//! Reads specifications, and reports every field that afresh does not serve.
//!
//! Promises: a field that is not read is a fault with its path, as [`crate::section`] says.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::section::Section;
pub use crate::section::{Faults, Specification};

/// The runtime class of pod templates that afresh runs.
pub const RUNTIME_CLASS: &str = "afresh";
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
pub(crate) fn fingerprint(values: &Value) -> String {
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

/// Whether the pod template of a specification is one of afresh.
#[must_use]
pub fn is_afresh(spec: Specification<'_>) -> bool {
    let class = |spec: &Value| {
        let class = spec.pointer("/podTemplate/spec/runtimeClassName")?;
        Some(class.as_str()? == RUNTIME_CLASS)
    };
    spec.ok().and_then(class).unwrap_or(false)
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
pub fn read_sandbox(spec: Specification<'_>) -> (SandboxSpec, Faults) {
    let (mut read, mut faults) = (SandboxSpec::default(), Faults::default());
    let mut section = Section::of(spec, &mut faults);
    section.section("podTemplate", |pod| read_pod(pod, &mut read.plan));
    let replicas = section
        .take_as("replicas", "0 or 1", |value| value.as_u64().filter(|replicas| *replicas < 2));
    let mode = section.take_as("operatingMode", "`Running` or `Suspended`", |value| {
        match value.as_str()? {
            "Running" => Some(false),
            "Suspended" => Some(true),
            _ => None,
        }
    });
    read.suspended = mode == Some(true) || replicas == Some(0);
    if (mode, replicas) == (Some(false), Some(0)) {
        let fault = "spec.replicas is 0 and spec.operatingMode is Running; change one";
        section.faults.add(fault.to_owned());
    }
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
pub fn read_template(spec: Specification<'_>) -> (SandboxPlan, EnvPolicy, Faults) {
    let (mut plan, mut faults) = (SandboxPlan::default(), Faults::default());
    let mut section = Section::of(spec, &mut faults);
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
    section.allow("volumeClaimTemplatesPolicy", &["Disallowed".into()]);
    section.allow("service", &[false.into()]);
    section.finish();
    (plan, policy.unwrap_or_default(), faults)
}

/// The specification of a `SandboxClaim`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimSpec {
    /// The `SandboxTemplate`; that of the pool if absent.
    pub template: Option<String>,
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
        let source = match &self.template {
            Some(template) => json!(template),
            None => json!({"pool": self.pool}),
        };
        fingerprint(&json!([source, self.envs, self.labels]))
    }
}

/// Reads the specification of a `SandboxClaim`.
#[must_use]
pub fn read_claim(spec: Specification<'_>) -> (ClaimSpec, Faults) {
    let (mut read, mut faults) = (ClaimSpec::default(), Faults::default());
    let mut section = Section::of(spec, &mut faults);
    section.section("sandboxTemplateRef", |reference| read.template = reference.take_text("name"));
    let pool = section.take_text("warmpool").filter(|pool| pool != "default" && pool != "none");
    section.section("warmPoolRef", |reference| read.pool = reference.take_text("name"));
    match (&read.pool, pool) {
        (Some(one), Some(other)) if *one != other => {
            let fault = "spec.warmPoolRef and spec.warmpool name two pools; remove one";
            section.faults.add(fault.to_owned());
        }
        (None, Some(pool)) => read.pool = Some(pool),
        _ => {}
    }
    if read.template.is_none() && read.pool.is_none() {
        let fault = "spec.warmPoolRef.name must name a SandboxWarmPool, or \
                     spec.sandboxTemplateRef.name a SandboxTemplate";
        section.faults.add(fault.to_owned());
    }
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
pub fn read_pool(spec: Specification<'_>) -> (PoolSpec, Faults) {
    let (mut read, mut faults) = (PoolSpec::default(), Faults::default());
    let mut section = Section::of(spec, &mut faults);
    section.section("sandboxTemplateRef", |reference| {
        read.template = reference.take_text("name").unwrap_or_default();
    });
    let replicas = section.take_as("replicas", "a number", |value| {
        i32::try_from(value.as_i64()?).ok().filter(|replicas| *replicas >= 0)
    });
    read.replicas = replicas.unwrap_or(1);
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
    use crate::section::MAX_ENTRIES;

    fn pod(container: Value) -> Value {
        json!({"spec": {"runtimeClassName": "afresh", "containers": [container]}})
    }

    #[test]
    fn a_pod_template_becomes_a_plan() {
        let container = json!({
            "name": "main", "image": "script", "env": [{"name": "A", "value": "1"}],
            "ports": [{"name": "web", "containerPort": 8000, "protocol": "TCP"}],
        });
        let (plan, policy, faults) = read_template(Ok(&json!({
            "podTemplate": pod(container), "envVarsInjectionPolicy": "Allowed",
            "volumeClaimTemplates": [], "service": false,
        })));
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
        let (_, faults) = read_sandbox(Ok(&json!({
            "podTemplate": template, "replicas": 2, "service": true, "shutdownTime": "soon",
        })));
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
            assert!(!read_sandbox(Ok(&spec)).1.is_empty(), "{spec}");
            assert!(!read_template(Ok(&spec)).2.is_empty(), "{spec}");
        }
        assert!(!read_claim(Ok(&json!({"sandboxTemplateRef": {}}))).1.is_empty());
        assert!(!read_pool(Ok(&json!({"replicas": -1}))).1.is_empty());
        let many: Vec<_> = (0..300).map(|n| json!({"name": format!("V{n}")})).collect();
        let spec = json!({"sandboxTemplateRef": {"name": "t"}, "env": many});
        let (spec, faults) = read_claim(Ok(&spec));
        assert!(spec.envs.len() == MAX_ENTRIES && faults.to_string().contains("more than 256"));
    }

    #[test]
    fn a_claim_has_its_lifecycle() {
        let (claim, faults) = read_claim(Ok(&json!({
            "sandboxTemplateRef": {"name": "t"}, "warmpool": "fast",
            "lifecycle": {
                "shutdownTime": "2027-01-01T00:00:00Z", "ttlSecondsAfterFinished": 5,
                "shutdownPolicy": "DeleteForeground",
            },
            "env": [{"name": "A", "value": "1", "containerName": "main"}],
        })));
        assert!(faults.is_empty(), "{faults}");
        assert_eq!(claim.pool.as_deref(), Some("fast"));
        assert_eq!((claim.ttl_after_finished, claim.delete_at_end), (Some(5), true));
        assert_eq!(claim.shutdown_time, "2027-01-01T00:00:00Z".parse().ok());
    }

    #[test]
    fn a_specification_beyond_the_limits_is_a_fault() {
        let why = Err("the specification has over 32 levels");
        let faults =
            [read_sandbox(why).1, read_template(why).2, read_claim(why).1, read_pool(why).1];
        for faults in faults {
            assert!(faults.to_string().starts_with("the specification has over"), "{faults}");
        }
        assert!(!is_afresh(why));
    }

    #[test]
    fn both_versions_say_whether_a_sandbox_runs() {
        let pod = pod(json!({"name": "main", "image": "script"}));
        let read = |mut spec: Value| {
            spec["podTemplate"] = pod.clone();
            let (spec, faults) = read_sandbox(Ok(&spec));
            (spec.suspended, faults.is_empty())
        };
        assert_eq!(read(json!({})), (false, true));
        assert_eq!(read(json!({"replicas": 0})), (true, true));
        assert_eq!(read(json!({"operatingMode": "Suspended"})), (true, true));
        assert_eq!(read(json!({"operatingMode": "Suspended", "replicas": 1})), (true, true));
        assert_eq!(read(json!({"operatingMode": "Running", "replicas": 1})), (false, true));
        assert!(!read(json!({"operatingMode": "Running", "replicas": 0})).1);
        assert!(!read(json!({"operatingMode": "Off"})).1);
    }

    #[test]
    fn a_claim_names_a_template_or_a_pool() {
        let (claim, faults) = read_claim(Ok(&json!({"warmPoolRef": {"name": "fast"}})));
        assert!(faults.is_empty(), "{faults}");
        assert_eq!((claim.template.as_deref(), claim.pool.as_deref()), (None, Some("fast")));
        let two = json!({"warmPoolRef": {"name": "fast"}, "warmpool": "slow"});
        assert!(!read_claim(Ok(&two)).1.is_empty());
        let same = json!({"warmPoolRef": {"name": "fast"}, "warmpool": "fast"});
        assert!(read_claim(Ok(&same)).1.is_empty());
    }
}
