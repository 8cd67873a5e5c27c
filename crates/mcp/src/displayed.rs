//! A result that code displays, in its formats.
//!
//! Promises: decoding takes memory in proportion to the bytes. A value as JSON is decoded while the
//! room for such values lasts; beyond it the result keeps its other formats.

use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Maximum bytes of values as JSON in one call. A decoded value can take 100 times its bytes.
const MAX_JSON: usize = 1 << 20;

/// Bytes of JSON that the results of a call may still have.
#[derive(Debug)]
pub(crate) struct JsonRoom(usize);

impl Default for JsonRoom {
    fn default() -> Self {
        Self(MAX_JSON)
    }
}

/// The formats of a result. Other formats are dropped.
#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
pub(crate) struct DisplayedResult {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) html: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) markdown: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) svg: Option<String>,
    /// An image in base64.
    #[serde(skip_serializing)]
    pub(crate) png: Option<String>,
    /// An image in base64.
    #[serde(skip_serializing)]
    pub(crate) jpeg: Option<String>,
    /// The value as JSON.
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    pub(crate) json: Option<Value>,
    /// Whether it is the value of the last expression.
    #[serde(default, rename = "is_main_result")]
    pub(crate) is_main: bool,
}

/// Whether a result has a value as JSON.
#[derive(Deserialize)]
struct Presence {
    json: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct JsonFormat {
    json: Value,
}

impl DisplayedResult {
    /// Parses a result; `None` for other bytes.
    pub(crate) fn parse(result: &[u8], room: &mut JsonRoom) -> Option<Self> {
        let mut this: Self = serde_json::from_slice(result).ok()?;
        let has_json = serde_json::from_slice(result).is_ok_and(|Presence { json }| json.is_some());
        if has_json && result.len() <= room.0 {
            room.0 -= result.len();
            this.json = serde_json::from_slice(result).ok().map(|JsonFormat { json }| json);
        }
        Some(this)
    }

    /// The text for models.
    pub(crate) fn describe(&self) -> &str {
        let formats = [&self.text, &self.markdown, &self.latex, &self.html];
        formats.into_iter().flatten().next().map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_decoded_while_there_is_room() {
        let result = br#"{"is_main_result":true,"text":"x","json":[1],"chart":{"a":[]}}"#;
        let mut room = JsonRoom(result.len());
        let first = DisplayedResult::parse(result, &mut room).unwrap();
        assert_eq!((first.json, first.is_main), (Some(serde_json::json!([1])), true));
        let second = DisplayedResult::parse(result, &mut room).unwrap();
        assert_eq!((second.json, second.text.as_deref()), (None, Some("x")));
        for wrong in [&b"[]"[..], b"{", b"{\"text\":1}"] {
            assert_eq!(DisplayedResult::parse(wrong, &mut room), None);
        }
    }
}
