//! A digest of JSON that does not depend on the order of fields or on white space.
//!
//! Promises: equal values have equal digests, and nothing but digests of fields is kept while a
//! value is read: 32 bytes for each field of the objects that are open.

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use sha2::{Digest, Sha256};

/// The digest of a value without the field `left_out` of the outermost object. Text that is no JSON
/// has the digest of `null`.
pub(super) fn json_digest(text: &[u8], left_out: &str) -> [u8; 32] {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let outer = DigestVisitor { left_out: Some(left_out) };
    let read = reader.deserialize_any(outer).and_then(|digest| reader.end().map(|()| digest));
    read.unwrap_or_else(|_| scalar(b'n', b""))
}

/// The digest of a value within another.
struct ValueDigest([u8; 32]);

impl<'de> Deserialize<'de> for ValueDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DigestVisitor { left_out: None }).map(Self)
    }
}

/// The digest of a scalar of some type.
fn scalar(kind: u8, bytes: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update([kind]).chain_update(bytes).finalize().into()
}

struct DigestVisitor<'a> {
    left_out: Option<&'a str>,
}

impl<'de> Visitor<'de> for DigestVisitor<'_> {
    type Value = [u8; 32];

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(scalar(b'n', b""))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(scalar(b'b', &[value.into()]))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(scalar(b'i', value.to_string().as_bytes()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(scalar(b'i', value.to_string().as_bytes()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(scalar(b'f', &value.to_bits().to_le_bytes()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(scalar(b's', value.as_bytes()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut digest = Sha256::new().chain_update(b"a");
        while let Some(item) = items.next_element::<ValueDigest>()? {
            digest.update(item.0);
        }
        Ok(digest.finalize().into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut digests = Vec::new();
        while let Some(name) = fields.next_key::<String>()? {
            let value = fields.next_value::<ValueDigest>()?;
            if self.left_out != Some(name.as_str()) {
                let name = scalar(b's', name.as_bytes());
                digests.push(scalar(b'o', &[name, value.0].concat()));
            }
        }
        // By digest: the order of fields has no meaning.
        digests.sort_unstable();
        Ok(scalar(b'm', &digests.concat()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_different_shapes_have_different_digests() {
        let texts = [
            "null",
            "true",
            "false",
            "1",
            "-1",
            "1.0",
            r#""1""#,
            r#""""#,
            "[]",
            "[1]",
            "[[1]]",
            "[1,1]",
            "{}",
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
            r#"{"b":1}"#,
            r#"{"a":{"b":1}}"#,
            r#"{"a":1,"b":1}"#,
            r#"[{"a":1}]"#,
        ];
        let digests = texts.map(|text| json_digest(text.as_bytes(), "none"));
        let distinct: std::collections::BTreeSet<_> = digests.iter().collect();
        assert_eq!(distinct.len(), texts.len());
        for (one, two) in [(r#"{"a":1,"b":[2]}"#, r#" {"b": [2], "\u0061": 1}"#), ("", "{")] {
            assert_eq!(json_digest(one.as_bytes(), "x"), json_digest(two.as_bytes(), "x"));
        }
    }
}
