//! Limits of the texts that clients store with sandboxes and snapshots.
//!
//! Promises: the length of a text is that in JSON, with its escapes, as a record stores it. So each
//! record fits into an entry of the ledger of a fleet ([`MAX_ENTRY`]), also in the sandboxes of
//! snapshots of sandboxes, which inherit variables. A text that is too long is refused before
//! there is a sandbox or a snapshot.

use std::collections::BTreeMap;

use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::sandbox::records::record::SandboxSettings;
use crate::sandbox::records::store::MAX_ENTRY;

/// Maximum bytes of the texts of one request together.
const MAX_LABEL_BYTES: usize = 16 << 10;
/// Maximum bytes of the settings of a sandbox or a snapshot. The rest of an entry has the names of
/// a snapshot, up to [`MAX_LABEL_BYTES`], and what the server adds.
const MAX_SETTINGS_BYTES: usize = 40 << 10;
const _: () = assert!(MAX_SETTINGS_BYTES + MAX_LABEL_BYTES + (4 << 10) < MAX_ENTRY);

/// The length of a text in JSON, without its quotes.
pub(crate) fn encoded_length(text: &str) -> usize {
    let escapes = text.bytes().map(|byte| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 1,
        0..0x20 => 5,
        _ => 0,
    });
    text.len() + escapes.sum::<usize>()
}

/// Refuses texts of a request that have more bytes in JSON together than may be stored.
pub(crate) fn check_label_bytes(bytes: usize) -> Result<(), ErrorResponse> {
    if bytes <= MAX_LABEL_BYTES {
        return Ok(());
    }
    let message = format!(
        "names, labels and rules have {bytes} bytes as JSON, with their escapes; they may have {MAX_LABEL_BYTES}: send fewer or shorter ones"
    );
    Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
}

fn check_settings_bytes(bytes: usize) -> Result<(), ErrorResponse> {
    if bytes <= MAX_SETTINGS_BYTES {
        return Ok(());
    }
    let message = format!(
        "labels, variables and rules have {bytes} bytes as JSON, those of a snapshot included; they may have {MAX_SETTINGS_BYTES}: send fewer or shorter ones"
    );
    Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
}

impl SandboxSettings {
    /// Refuses settings that are too long for an entry.
    pub(crate) fn check_size(&self) -> Result<(), ErrorResponse> {
        // Texts and flags.
        check_settings_bytes(serde_json::to_vec(self).map_or(usize::MAX, |json| json.len()))
    }
}

/// Refuses variables and a directory that are too long for the entry of a snapshot.
pub(crate) fn check_inherited(
    envs: &BTreeMap<String, String>,
    directory: Option<&str>,
) -> Result<(), ErrorResponse> {
    let envs = serde_json::to_vec(envs).map_or(usize::MAX, |json| json.len());
    check_settings_bytes(envs.saturating_add(directory.map_or(0, encoded_length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_of_json() {
        let all: String = (0..0x300).filter_map(char::from_u32).collect();
        for text in ["", "plain", &all] {
            let json = serde_json::to_string(text).unwrap();
            assert_eq!(encoded_length(text) + 2, json.len(), "{text:?}");
        }
    }

    #[test]
    fn settings_that_exceed_an_entry_with_their_escapes_are_refused() {
        let of = |text: String| SandboxSettings {
            envs: BTreeMap::from([("A".to_owned(), text)]),
            ..SandboxSettings::default()
        };
        assert!(of("a".repeat(MAX_SETTINGS_BYTES - 1000)).check_size().is_ok());
        let refused = of("\u{1}".repeat(MAX_SETTINGS_BYTES / 5)).check_size().unwrap_err();
        assert_eq!(refused.status, StatusCode::BAD_REQUEST);
        assert!(refused.message.contains(&MAX_SETTINGS_BYTES.to_string()), "{}", refused.message);
        let refused = check_label_bytes(encoded_length(&"\"".repeat(MAX_LABEL_BYTES)));
        let refused = refused.unwrap_err();
        assert!(refused.message.contains(&MAX_LABEL_BYTES.to_string()), "{}", refused.message);
        let envs = of("\0".repeat(MAX_SETTINGS_BYTES / 6)).envs;
        assert!(check_inherited(&envs, None).is_err());
        assert!(check_inherited(&BTreeMap::new(), Some("/home")).is_ok());
    }
}
