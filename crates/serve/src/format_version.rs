//! The version of the format of a record, of one server or in the ledger of a fleet.
//!
//! Promises: this version reads the records of all before. A record that is rewritten keeps the
//! number and the unknown fields of a later version, in each of its objects. Records before the
//! first number have none. The goldens in `tests/golden` hold both, and are never written again: a
//! change of the fields needs a new number and new goldens, which `AFRESH_WRITE_GOLDEN=1` writes
//! where they are missing. May break it: an earlier host does not refuse a higher number, so a
//! field with a new meaning needs a new name. The note of an owner is replaced and never rewritten:
//! it has the fields of the host that wrote it.

use serde::{Deserialize, Deserializer, Serialize};

/// The present version.
pub(crate) const FORMAT: u32 = 1;

/// The version of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct FormatVersion(u32);

impl Default for FormatVersion {
    fn default() -> Self {
        Self(FORMAT)
    }
}

impl<'de> Deserialize<'de> for FormatVersion {
    /// An earlier record is written again in the present format.
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Self(u32::deserialize(from)?.max(FORMAT)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::{Path, PathBuf};

    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn golden(name: &str, version: u32) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}-{version}.json"))
    }

    /// Whether `new` has all that `old` has, but for the version.
    fn has_all(new: &Value, old: &Value) -> bool {
        match (new, old) {
            (Value::Object(new), Value::Object(old)) => old.iter().all(|(key, value)| {
                key == "version" || new.get(key).is_some_and(|new| has_all(new, value))
            }),
            (new, old) => new == old,
        }
    }

    /// Compares a record that has every field with its goldens.
    pub(crate) fn check_goldens<T: Serialize + DeserializeOwned>(name: &str, sample: &T) {
        let present = serde_json::to_value(sample).unwrap();
        let path = golden(name, FORMAT);
        if !path.exists() && std::env::var_os("AFRESH_WRITE_GOLDEN").is_some() {
            std::fs::write(&path, format!("{present:#}\n")).unwrap();
        }
        for version in 0..=FORMAT {
            let path = golden(name, version);
            // A record can be younger than the first version.
            if version != FORMAT && !path.exists() {
                continue;
            }
            let text = std::fs::read(&path).unwrap_or_else(|_| panic!("{path:?} is missing"));
            let stored: Value = serde_json::from_slice(&text).unwrap();
            if version == FORMAT {
                let why = "the format has changed: give it a new version and new goldens";
                assert_eq!(present, stored, "{name}: {why}");
            }
            let read: T = serde_json::from_slice(&text).unwrap();
            let again = serde_json::to_value(&read).unwrap();
            assert!(has_all(&again, &stored), "{name} {version}: {stored} is read as {again}");
        }
    }

    /// Objects of records whose keys are chosen by clients or tenants, and whose values are texts.
    const TEXT_MAPS: [&str; 2] = ["metadata", "envs"];

    /// Adds a field to each object of a record, as a later version may. Rules for connections have
    /// none: a host that does not know all of a rule must not obey the rest.
    fn add_fields(record: &mut Value, added: &mut usize) {
        let Value::Object(fields) = record else { return };
        for (key, value) in fields.iter_mut() {
            if !TEXT_MAPS.contains(&key.as_str()) && key != "rules" {
                add_fields(value, added);
            }
        }
        *added += 1;
        fields.insert("added".to_owned(), json!({"by": "a later version", "more": [1.5, null]}));
    }

    /// Compares a record with its goldens, to which a later version has added fields: a rewrite
    /// keeps them.
    pub(crate) fn check_unknown_fields<T: Serialize + DeserializeOwned>(
        name: &str,
        objects: usize,
    ) {
        let text = std::fs::read(golden(name, FORMAT)).unwrap();
        let mut stored: Value = serde_json::from_slice(&text).unwrap();
        let mut added = 0;
        add_fields(&mut stored, &mut added);
        assert_eq!(added, objects, "{name}: {stored:#}");
        let read: T = serde_json::from_value(stored.clone()).unwrap();
        let again = serde_json::to_value(&read).unwrap();
        assert!(has_all(&again, &stored), "{name}: {stored:#} is rewritten as {again:#}");
    }

    #[test]
    fn a_record_keeps_the_version_of_a_later_host() {
        let read = |text: Value| serde_json::from_value::<FormatVersion>(text).unwrap();
        assert_eq!(read(json!(FORMAT + 1)), FormatVersion(FORMAT + 1));
        assert_eq!(read(json!(0)), FormatVersion::default());
    }
}
