//! The custom resources of agent-sandbox, as far as afresh serves them.
//!
//! Promises: an object with any content decodes, so one malformed object cannot stop a watch. Specs
//! stay JSON here, and [`crate::fields`] reads them and reports each field that it does not know.

use std::borrow::Cow;
use std::fmt::Debug;
use std::marker::PhantomData;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of all kinds.
pub const VERSION: &str = "v1alpha1";

/// A kind of custom resource.
pub trait Kind: Clone + Debug + Send + Sync + 'static {
    /// The API group.
    const GROUP: &'static str;
    /// The name of the kind.
    const KIND: &'static str;
    /// The name in URLs.
    const PLURAL: &'static str;
    /// The status that the controller writes.
    type Status: Clone + Debug + Default + PartialEq + Serialize + DeserializeOwned + Send + Sync;
}

macro_rules! kind {
    ($(#[$doc:meta])* $name:ident, $alias:ident, $group:literal, $plural:literal, $status:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name;

        impl Kind for $name {
            const GROUP: &'static str = $group;
            const KIND: &'static str = stringify!($alias);
            const PLURAL: &'static str = $plural;
            type Status = $status;
        }

        $(#[$doc])*
        pub type $alias = CustomObject<$name>;
    };
}

kind!(
    /// One sandbox.
    SandboxKind,
    Sandbox,
    "agents.x-k8s.io",
    "sandboxes",
    SandboxStatus
);
kind!(
    /// A template that claims name.
    TemplateKind,
    SandboxTemplate,
    "extensions.agents.x-k8s.io",
    "sandboxtemplates",
    Value
);
kind!(
    /// A claim for one sandbox of a template.
    ClaimKind,
    SandboxClaim,
    "extensions.agents.x-k8s.io",
    "sandboxclaims",
    ClaimStatus
);
kind!(
    /// A number of sandboxes that start at once.
    PoolKind,
    SandboxWarmPool,
    "extensions.agents.x-k8s.io",
    "sandboxwarmpools",
    PoolStatus
);

/// An object of one of these kinds.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", bound = "")]
pub struct CustomObject<K: Kind> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    /// The metadata of every object.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// The specification, as its author wrote it.
    #[serde(default)]
    pub spec: Value,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    status: Value,
    #[serde(skip)]
    of: PhantomData<K>,
}

impl<K: Kind> CustomObject<K> {
    /// A new object without a status.
    #[must_use]
    pub fn new(metadata: ObjectMeta, spec: Value) -> Self {
        Self {
            api_version: format!("{}/{VERSION}", K::GROUP),
            kind: K::KIND.to_owned(),
            metadata,
            spec,
            status: Value::Null,
            of: PhantomData,
        }
    }

    /// Its status; the default one if another program wrote something else.
    #[must_use]
    pub fn status(&self) -> K::Status {
        serde_json::from_value(self.status.clone()).unwrap_or_default()
    }

    /// Its name; empty for an object that no server has named.
    #[must_use]
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Its namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// Its identifier, which no later object has.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Whether another object controls it.
    #[must_use]
    pub fn is_controlled_by(&self, uid: &str) -> bool {
        let mut owners = self.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.controller == Some(true) && owner.uid == uid)
    }
}

impl<K: Kind> kube::Resource for CustomObject<K> {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        K::KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        K::GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// The address of a program in a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortAddress {
    /// The name of the port, if the template has one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The port inside of the sandbox.
    pub port: u16,
    /// Where it is reached.
    pub url: String,
}

/// Data that a client needs to reach a sandbox. Absent values are written as null, so that a merge
/// patch removes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Access {
    /// The identifier of the sandbox on the server.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: Option<String>,
    /// The URL of the server.
    pub url: Option<String>,
    /// The Secret with the token.
    #[serde(rename = "secretName")]
    pub secret_name: Option<String>,
    /// Addresses of ports.
    pub ports: Option<Vec<PortAddress>>,
}

/// The status of a `Sandbox`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxStatus {
    /// `Ready`, `Suspended` and `Finished`.
    pub conditions: Vec<Condition>,
    /// 1 while the sandbox runs.
    pub replicas: i32,
    /// How to reach it.
    #[serde(flatten)]
    pub access: Access,
}

/// The sandbox of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimedSandbox {
    /// The name of the `Sandbox`.
    pub name: Option<String>,
    /// How to reach it.
    #[serde(flatten)]
    pub access: Access,
}

/// The status of a `SandboxClaim`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimStatus {
    /// `Ready` and `Finished`.
    pub conditions: Vec<Condition>,
    /// The sandbox.
    pub sandbox: ClaimedSandbox,
}

/// The status of a `SandboxWarmPool`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// `Ready`.
    pub conditions: Vec<Condition>,
    /// Sandboxes that start at once.
    pub replicas: i32,
    /// The same number.
    pub ready_replicas: i32,
}
