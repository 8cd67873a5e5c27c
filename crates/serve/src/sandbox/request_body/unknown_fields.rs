//! Fields of a record that this version does not know.
//!
//! Promises: a host that changes a record keeps the fields that a later version has added, so hosts
//! of two versions can share a fleet. A record with more than [`MAX_UNKNOWN_BYTES`] of them in one
//! object is refused, and never cut.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, de};
use serde_json::Value;

/// Maximum bytes of unknown fields of one object as JSON.
const MAX_UNKNOWN_BYTES: usize = 16 << 10;

/// Unknown fields of one object, which is flattened into it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct UnknownFields(BTreeMap<String, Value>);

impl<'de> Deserialize<'de> for UnknownFields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let fields = BTreeMap::deserialize(from)?;
        let bytes = match fields.is_empty() {
            true => 0,
            false => serde_json::to_vec(&fields).map_err(de::Error::custom)?.len(),
        };
        if bytes > MAX_UNKNOWN_BYTES {
            return Err(de::Error::custom(format!(
                "a later version has added fields of {bytes} bytes, and this one keeps \
                 {MAX_UNKNOWN_BYTES}: update this host"
            )));
        }
        Ok(Self(fields))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Record {
        known: u64,
        #[serde(flatten)]
        unknown: UnknownFields,
    }

    #[test]
    fn unknown_fields_are_kept_up_to_a_limit() {
        let text = r#"{"known":1,"later":{"a":[1,2]},"more":null}"#;
        let record: Record = serde_json::from_str(text).unwrap();
        assert_eq!((record.known, record.unknown.0.len()), (1, 2));
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        let with = |length: usize| {
            let text = json!({"known": 1, "later": "x".repeat(length)}).to_string();
            serde_json::from_str::<Record>(&text).map(drop).map_err(|error| error.to_string())
        };
        with(MAX_UNKNOWN_BYTES - r#"{"later":""}"#.len()).unwrap();
        let refused = with(MAX_UNKNOWN_BYTES).unwrap_err();
        assert!(refused.contains("update this host"), "{refused}");
    }
}
