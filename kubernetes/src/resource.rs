//! The custom resources of agent-sandbox, as far as afresh serves them.
//!
//! Promises: an object with any content decodes, so one malformed object cannot stop a watch. A
//! specification that is beyond the limits of [`crate::json`] is an error of its object alone.
//! Specs stay JSON here, and [`crate::fields`] reads them and reports each field that it does not
//! know.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::marker::PhantomData;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use kube::api::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::json;

/// The version of all kinds that the controller reads and writes. The definitions serve `v1alpha1`
/// too, with the same fields.
pub const VERSION: &str = "v1beta1";
/// The annotation of an object with the identifier of the controller that serves it.
pub const CONTROLLER_ANNOTATION: &str = "agents.x-k8s.io/afresh-controller";

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

/// The metadata that the controller needs. Fields of managers are as deep as a specification, and
/// are skipped.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    deletion_timestamp: Option<Time>,
    finalizers: Option<Vec<String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

impl From<Metadata> for ObjectMeta {
    fn from(metadata: Metadata) -> Self {
        Self {
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
            generation: metadata.generation,
            deletion_timestamp: metadata.deletion_timestamp,
            finalizers: metadata.finalizers,
            annotations: metadata.annotations,
            owner_references: metadata.owner_references,
            ..Self::default()
        }
    }
}

/// An object as the API sends it: the parts of strangers are decoded later.
#[derive(Deserialize)]
struct WireObject {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: Option<Box<RawValue>>,
    #[serde(default)]
    status: Option<Box<RawValue>>,
}

/// An object of one of these kinds.
#[derive(Clone, Debug)]
pub struct CustomObject<K: Kind> {
    /// The metadata that the controller needs.
    pub metadata: ObjectMeta,
    spec: Result<Value, String>,
    status: Value,
    kind: PhantomData<K>,
}

impl<K: Kind> CustomObject<K> {
    /// A new object without a status.
    #[must_use]
    pub fn new(metadata: ObjectMeta, spec: Value) -> Self {
        Self { metadata, spec: Ok(spec), status: Value::Null, kind: PhantomData }
    }

    /// The specification, as its author wrote it.
    ///
    /// # Errors
    /// If it is beyond the limits of [`crate::json`]; the text names the limit.
    pub fn spec(&self) -> Result<&Value, &str> {
        self.spec.as_ref().map_err(String::as_str)
    }

    /// Its status; the default one if another program wrote something else.
    #[must_use]
    pub fn status(&self) -> K::Status {
        K::Status::deserialize(&self.status).unwrap_or_default()
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

    /// The value of an annotation.
    #[must_use]
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(name).map(String::as_str)
    }

    /// Whether it has a finalizer.
    #[must_use]
    pub fn has_finalizer(&self, name: &str) -> bool {
        self.metadata.finalizers.iter().flatten().any(|found| found == name)
    }

    /// Whether another object controls it.
    #[must_use]
    pub fn is_controlled_by(&self, uid: &str) -> bool {
        let mut owners = self.metadata.owner_references.iter().flatten();
        owners.any(|owner| owner.controller == Some(true) && owner.uid == uid)
    }

    /// The reference of an object that it controls.
    #[must_use]
    pub fn owner_reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: format!("{}/{VERSION}", K::GROUP),
            kind: K::KIND.to_owned(),
            name: self.name().to_owned(),
            uid: self.uid().to_owned(),
            controller: Some(true),
            block_owner_deletion: None,
        }
    }
}

impl<'de, K: Kind> Deserialize<'de> for CustomObject<K> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let object = WireObject::deserialize(from)?;
        let decode = |part: Option<Box<RawValue>>| match part {
            Some(text) => json::decode(text.get()),
            None => Ok(Value::Null),
        };
        Ok(Self {
            metadata: object.metadata.into(),
            spec: decode(object.spec).map_err(|why| format!("the specification {why}")),
            // Another program wrote something else.
            status: decode(object.status).unwrap_or_default(),
            kind: PhantomData,
        })
    }
}

impl<K: Kind> Serialize for CustomObject<K> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let object = serde_json::json!({
            "apiVersion": format!("{}/{VERSION}", K::GROUP),
            "kind": K::KIND,
            "metadata": self.metadata,
            "spec": self.spec.as_ref().unwrap_or(&Value::Null),
        });
        object.serialize(to)
    }
}

/// The part of an object that a watch and the sweep read.
#[derive(Clone, Debug)]
pub struct ObjectHeader<K: Kind> {
    metadata: ObjectMeta,
    /// The identifier of its sandbox in its status.
    pub sandbox_id: Option<String>,
    /// Whether it has no status yet.
    pub is_new: bool,
    kind: PhantomData<K>,
}

impl<K: Kind> ObjectHeader<K> {
    /// Its namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Its identifier.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// The identifier of the controller that serves it.
    #[must_use]
    pub fn controller(&self) -> Option<&str> {
        let annotations = self.metadata.annotations.as_ref()?;
        annotations.get(CONTROLLER_ANNOTATION).map(String::as_str)
    }

    /// The name of the object of a kind that controls it.
    #[must_use]
    pub fn owner<O: Kind>(&self) -> Option<&str> {
        let mut owners = self.metadata.owner_references.iter().flatten();
        let is_owner = |owner: &&OwnerReference| {
            let group = owner.api_version.split('/').next();
            owner.controller == Some(true) && owner.kind == O::KIND && group == Some(O::GROUP)
        };
        owners.find(is_owner).map(|owner| owner.name.as_str())
    }
}

impl<'de, K: Kind> Deserialize<'de> for ObjectHeader<K> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Header {
            #[serde(default)]
            metadata: Metadata,
            #[serde(default)]
            status: Option<Box<RawValue>>,
        }
        #[derive(Deserialize)]
        struct Status {
            #[serde(rename = "sandboxID")]
            sandbox_id: Option<String>,
        }
        let mut header = Header::deserialize(from)?;
        if let Some(annotations) = &mut header.metadata.annotations {
            annotations.retain(|name, _| name == CONTROLLER_ANNOTATION);
        }
        let is_new = header.status.is_none();
        let status = header.status.and_then(|text| serde_json::from_str::<Status>(text.get()).ok());
        Ok(Self {
            metadata: header.metadata.into(),
            sandbox_id: status.and_then(|status| status.sandbox_id),
            is_new,
            kind: PhantomData,
        })
    }
}

macro_rules! resource {
    ($name:ident) => {
        impl<K: Kind> kube::Resource for $name<K> {
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
    };
}

resource!(CustomObject);
resource!(ObjectHeader);

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
    /// The version of the specification that the status is for.
    pub observed_generation: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deep() -> String {
        let levels = 5000;
        format!("{}1{}", r#"{"f:a":"#.repeat(levels), "}".repeat(levels))
    }

    #[test]
    fn objects_with_any_specification_status_and_managers_decode() {
        let deep = deep();
        for (spec, is_read) in [("[]", true), ("5", true), ("null", true), (&*deep, false)] {
            for status in ["[]", "{}", r#"{"sandboxID": 5}"#, &deep] {
                let text = format!(
                    r#"{{"type": "ADDED", "object": {{"apiVersion": "a/b", "kind": "c", "metadata":
                    {{"name": "n", "managedFields": [{{"fieldsV1": {deep}}}]}}, "spec": {spec},
                    "status": {status}}}}}"#
                );
                use kube::core::WatchEvent;
                let header: WatchEvent<ObjectHeader<SandboxKind>> =
                    serde_json::from_str(&text).expect("a header decodes");
                assert!(matches!(header, WatchEvent::Added(header) if header.name() == "n"));
                let object: WatchEvent<Sandbox> =
                    serde_json::from_str(&text).expect("an object decodes");
                let WatchEvent::Added(object) = object else { panic!("{text}") };
                assert_eq!(object.spec().is_ok(), is_read, "{spec}");
                assert_eq!(object.status(), SandboxStatus::default());
            }
        }
    }

    #[test]
    fn a_header_has_its_owner_and_its_controller_and_no_other_annotation() {
        let text = r#"{"metadata": {"name": "n", "namespace": "s", "uid": "u",
            "annotations": {"agents.x-k8s.io/afresh-controller": "one", "a": "b"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "SandboxClaim", "name": "x", "uid": "1",
                    "controller": true},
                {"apiVersion": "extensions.agents.x-k8s.io/v1alpha1", "kind": "SandboxClaim",
                    "name": "c", "uid": "2", "controller": true}]},
            "status": {"sandboxID": "id"}}"#;
        let header: ObjectHeader<SandboxKind> = serde_json::from_str(text).expect("it decodes");
        assert_eq!((header.controller(), header.uid()), (Some("one"), "u"));
        assert_eq!(header.owner::<ClaimKind>(), Some("c"));
        assert_eq!(header.sandbox_id.as_deref(), Some("id"));
        assert_eq!(header.metadata.annotations.as_ref().map(BTreeMap::len), Some(1));
    }
}
