//! Reads the fields of an object one by one, and reports the rest.
//!
//! Promises: a field that is not read is a fault with its path. Null and empty values count as
//! absent. Lists have limits.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::{Map, Value};

/// Maximum ports and variables of one sandbox.
pub(crate) const MAX_ENTRIES: usize = 256;
/// Faults that one message lists.
const MAX_FAULTS: usize = 8;

/// Faults of a specification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(pub(crate) Vec<String>);

impl Faults {
    pub(crate) fn add(&mut self, fault: String) {
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

/// A specification, or why it is beyond the limits of [`crate::json`].
pub type Specification<'a> = Result<&'a Value, &'a str>;

/// The fields of one object that are not read yet.
pub(crate) struct Section<'a> {
    path: String,
    fields: Map<String, Value>,
    pub(crate) faults: &'a mut Faults,
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
    /// The whole specification.
    pub(crate) fn of(spec: Specification<'_>, faults: &'a mut Faults) -> Self {
        let value = spec.cloned().unwrap_or_else(|why| {
            faults.add(why.to_owned());
            Value::Null
        });
        Self::new("spec", value, faults)
    }

    pub(crate) fn new(path: impl Into<String>, value: Value, faults: &'a mut Faults) -> Self {
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

    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !is_absent(value))
    }

    /// A value of a type, or a fault.
    pub(crate) fn take_as<T>(
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

    pub(crate) fn take_text(&mut self, name: &str) -> Option<String> {
        self.take_as(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    pub(crate) fn take_time(&mut self, name: &str) -> Option<Timestamp> {
        self.take_as(name, "a time", |value| value.as_str()?.parse().ok())
    }

    pub(crate) fn take_list(&mut self, name: &str) -> Vec<Value> {
        let list = self.take_as(name, "a list", |value| value.as_array().cloned());
        let mut list = list.unwrap_or_default();
        if list.len() > MAX_ENTRIES {
            let path = self.path(name);
            self.faults.add(format!("{path} has more than {MAX_ENTRIES} entries"));
            list.truncate(MAX_ENTRIES);
        }
        list
    }

    pub(crate) fn take_texts(&mut self, name: &str) -> BTreeMap<String, String> {
        let fields = self.take_as(name, "an object of at most 256 strings", |value| {
            let fields = value.as_object().filter(|fields| fields.len() <= MAX_ENTRIES)?.iter();
            fields.map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
        });
        fields.unwrap_or_default()
    }

    /// Accepts the values that describe how afresh behaves; another one stays, and is a fault.
    pub(crate) fn allow(&mut self, name: &str, values: &[Value]) {
        if self.fields.get(name).is_some_and(|value| values.contains(value)) {
            self.fields.remove(name);
        }
    }

    pub(crate) fn section(&mut self, name: &str, work: impl FnOnce(&mut Section<'_>)) {
        let value = self.take(name).unwrap_or_default();
        let mut section = Section::new(self.path(name), value, self.faults);
        work(&mut section);
        section.finish();
    }

    /// Reports the rest.
    pub(crate) fn finish(self) {
        for (name, _) in self.fields.iter().filter(|(_, value)| !is_absent(value)) {
            let fault = format!("{}.{name} is not supported: {}", self.path, advice(name));
            self.faults.add(fault);
        }
    }
}
