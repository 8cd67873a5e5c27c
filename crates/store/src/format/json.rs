//! JSON documents of strangers: what their values take in memory is charged before they are parsed.
//!
//! Promises: the parser allocates no more than [`weight`] says, for any type that this crate
//! parses. A document that weighs more than [`MAX_WEIGHT`] is refused, and not written. May break
//! it: a type with larger values than [`VALUE`]. A test below measures them.

use afresh_budget::Budget;
use serde::de::DeserializeOwned;

use crate::OpenError;

/// The memory that the values of a document may take. An `index.json` of the maximum length fits.
const MAX_WEIGHT: usize = 384 << 20;
/// A value in a list: 72 bytes in a list that doubles its room, and 32 bytes in the parser's own
/// list.
const VALUE: usize = 288;
/// A key of a map, in addition to its value.
const KEY: usize = 96;
/// The room of a list with one value.
const LIST: usize = 448;
/// The first node of a map, which has room for eleven keys and values.
const MAP: usize = 1376;
/// Bytes for each byte of a string with escapes, which is decoded in a buffer that doubles its
/// room.
const ESCAPED: usize = 4;

/// An upper bound of the memory that the values of `text` take while they are parsed.
pub(crate) fn weight(text: &[u8]) -> usize {
    let mut weight = VALUE;
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        weight += match byte {
            b'{' => MAP,
            b'[' => LIST,
            b',' => VALUE,
            b':' => KEY,
            b'"' => string_weight(&mut bytes),
            _ => 0,
        };
    }
    weight
}

/// The weight of a string, whose bytes are taken.
fn string_weight<'a>(bytes: &mut impl Iterator<Item = &'a u8>) -> usize {
    let (mut length, mut times) = (0, 1);
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => break,
            b'\\' => {
                times = ESCAPED;
                bytes.next();
                length += 2;
            }
            _ => length += 1,
        }
    }
    length * times
}

/// Refuses a document whose values take too much memory.
pub(crate) fn check_weight(what: &'static str, text: &[u8]) -> Result<(), OpenError> {
    let size = weight(text);
    let budget = Budget::new("JSON document", MAX_WEIGHT);
    // The values live on; what a host keeps of documents is bounded by their number.
    budget.charge(size).map(drop).map_err(|_| OpenError::TooLarge {
        what,
        size: size as u64,
        limit: MAX_WEIGHT as u64,
    })
}

/// Parses JSON; the nesting depth is bounded by the parser.
pub(crate) fn parse<T: DeserializeOwned>(what: &'static str, text: &[u8]) -> Result<T, OpenError> {
    check_weight(what, text)?;
    serde_json::from_slice(text).map_err(|e| OpenError::Json { what, why: e.to_string() })
}

#[cfg(test)]
mod tests {
    use afresh_budget::meter::peak;
    use serde_json::Value;

    use super::*;
    use crate::format::layout::IndexJson;
    use crate::format::manifest::{Config, MAX_INDEX_JSON, Manifest};

    /// `part` as often as it takes to fill `bytes` bytes, in a document.
    fn filled(before: &str, part: &str, after: &str, bytes: usize) -> Vec<u8> {
        let parts = vec![part; bytes / (part.len() + 1)].join(",");
        format!("{before}{parts}{after}").into_bytes()
    }

    #[test]
    fn a_document_takes_no_more_memory_than_its_weight() {
        let places = [
            ("[", "]"),
            (r#"{"schemaVersion":2,"manifests":["#, "]}"),
            (r#"{"schemaVersion":2,"manifests":[],"x":["#, "]}"),
            (
                r#"{"schemaVersion":2,"manifests":[{"mediaType":"","digest":"","size":1,"x":["#,
                "]}]}",
            ),
        ];
        let parts = [
            "0",
            "\"\"",
            "[]",
            "{}",
            r#"{"":0}"#,
            r#"{"":""}"#,
            r#"{"a":{"b":[{}]}}"#,
            r#"{"mediaType":"","digest":"","size":0}"#,
            r#"{"mediaType":"","digest":"","size":0,"annotations":{"":""}}"#,
            r#"{"mediaType":"","digest":"","size":0,"x":{"":[0]}}"#,
        ];
        for (before, after) in places {
            for part in parts {
                let text = filled(before, part, after, 300_000);
                let allowed = weight(&text);
                let (_, index) = peak(|| serde_json::from_slice::<IndexJson>(&text).is_ok());
                let (_, value) = peak(|| serde_json::from_slice::<Value>(&text).is_ok());
                let (_, manifest) = peak(|| serde_json::from_slice::<Manifest>(&text).is_ok());
                let most = index.max(value).max(manifest);
                assert!(most <= allowed, "{before}{part}: {most} of {allowed}");
            }
        }
        let fields = (0..20_000).map(|n| format!("\"{n}\":{n}")).collect::<Vec<_>>().join(",");
        let escaped = format!("[\"{}\"]", "\\n".repeat(1 << 20));
        let state = format!("{{\"schema\":1,\"state\":\"{}\"}}", "A".repeat(1 << 20));
        for text in [format!("{{{fields}}}"), escaped, state] {
            let text = text.into_bytes();
            let (_, value) = peak(|| serde_json::from_slice::<Value>(&text).is_ok());
            let (_, config) = peak(|| serde_json::from_slice::<Config>(&text).is_ok());
            assert!(value.max(config) <= weight(&text), "{value} {config} of {}", weight(&text));
        }
    }

    #[test]
    fn a_heavy_index_is_refused_before_it_is_parsed() {
        let most = MAX_INDEX_JSON as usize - 100;
        for part in ["{}", r#"{"":0}"#, "[[],[]]"] {
            let text = filled(r#"{"schemaVersion":2,"manifests":[],"x":["#, part, "]}", most);
            let (refused, peak) = peak(|| parse::<IndexJson>("`index.json`", &text));
            assert!(matches!(refused, Err(OpenError::TooLarge { .. })), "{part}");
            assert!(peak < 64 << 10, "{part}: {peak}");
        }
    }

    #[test]
    fn an_index_of_names_may_have_the_maximum_length() {
        let named = r#"{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:0000000000000000000000000000000000000000000000000000000000000000","size":9,"artifactType":"application/vnd.afresh.snapshot.v1","annotations":{"org.opencontainers.image.ref.name":"a"}}"#;
        let most = MAX_INDEX_JSON as usize - 100;
        let text = filled(r#"{"schemaVersion":2,"manifests":["#, named, "]}", most);
        check_weight("`index.json`", &text).unwrap();
    }
}
