//! The blobs and journals that a collection keeps: those that descriptors name, in any field.

use std::collections::HashSet;

use serde_json::Value;

use crate::Sha256;
use crate::format::descriptor::JOURNAL;

/// Largest manifest of another tool that is read. The specification advises 4 MiB.
pub(crate) const MAX_FOREIGN: u64 = 16 << 20;

/// What is reached.
#[derive(Default)]
pub(crate) struct LiveSet {
    pub(crate) blobs: HashSet<Sha256>,
    /// Files of turns.
    pub(crate) journals: HashSet<String>,
}

/// Notes every descriptor anywhere in `json`, and which of them are manifests themselves.
pub(crate) fn reach(json: &Value, live: &mut LiveSet, manifests: &mut Vec<Sha256>) {
    match json {
        Value::Array(values) => values.iter().for_each(|value| reach(value, live, manifests)),
        Value::Object(fields) => {
            let text = |name: &str| fields.get(name).and_then(Value::as_str);
            if let Some(id) = text("digest").and_then(|digest| digest.parse::<Sha256>().ok()) {
                live.blobs.insert(id);
                if text("mediaType").is_some_and(names_blobs) {
                    manifests.push(id);
                }
            }
            live.journals.extend(text(JOURNAL).map(str::to_owned));
            fields.values().for_each(|value| reach(value, live, manifests));
        }
        _ => {}
    }
}

/// Whether blobs of this type name others, in the words of OCI and of Docker.
fn names_blobs(media_type: &str) -> bool {
    media_type.contains(".manifest.") || media_type.contains(".image.index.")
}
