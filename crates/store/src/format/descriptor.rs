//! Descriptors: the references of an image layout's JSON files to a blob, with its type and name.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::digest::from_hex;
use crate::{OpenError, Sha256};

pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const ARTIFACT_TYPE: &str = "application/vnd.afresh.snapshot.v1";
pub(crate) const CONFIG_TYPE: &str = "application/vnd.afresh.snapshot.config.v1+json";
/// Configuration of a snapshot that turns follow on. A reader that knows of no turns refuses it by
/// this name.
pub(crate) const SESSION_TYPE: &str = "application/vnd.afresh.session.config.v1+json";
/// Annotation that names the file of the turns.
pub(crate) const JOURNAL: &str = "vnd.afresh.session.journal";
/// The directory of the journals, in a store or below a remote's prefix.
pub(crate) const JOURNALS: &str = "journals";
/// The directory in which programs note that they name blobs elsewhere.
pub(crate) const KEEPERS: &str = "keepers";
/// Annotation that holds a snapshot's name.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// An OCI content descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) artifact_type: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
    /// Fields of other tools.
    #[serde(flatten)]
    pub(crate) others: BTreeMap<String, Value>,
}

impl Descriptor {
    pub(crate) fn new(media_type: &str, digest: Sha256, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest: digest.to_string(),
            size,
            artifact_type: None,
            annotations: BTreeMap::new(),
            others: BTreeMap::new(),
        }
    }

    /// A snapshot under a name.
    pub(crate) fn named(id: Sha256, size: u64, name: &str) -> Self {
        let mut descriptor = Self::snapshot(id, size);
        descriptor.annotations.insert(REF_NAME.to_owned(), name.to_owned());
        descriptor
    }

    /// A snapshot without a name.
    pub(crate) fn snapshot(id: Sha256, size: u64) -> Self {
        let artifact_type = Some(ARTIFACT_TYPE.to_owned());
        Self { artifact_type, ..Self::new(MANIFEST_TYPE, id, size) }
    }

    pub(crate) fn digest(&self, what: &'static str) -> Result<Sha256, OpenError> {
        self.digest.parse().map_err(|e: crate::format::digest::BadDigest| OpenError::Json {
            what,
            why: e.to_string(),
        })
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.annotations.get(REF_NAME).map(String::as_str)
    }

    /// Whether it means a snapshot; `None` where only the manifest shows it.
    pub(crate) fn is_snapshot(&self) -> Option<bool> {
        if self.media_type != MANIFEST_TYPE {
            return Some(false);
        }
        // Some tools write the type of the configuration there, as image specifications before 1.1
        // had it.
        self.artifact_type
            .as_ref()
            .map(|kind| kind == ARTIFACT_TYPE || kind.starts_with(CONFIG_TYPE))
    }
}

/// A journal's name is a number of chance.
pub(crate) fn is_journal(id: &str) -> bool {
    from_hex(id).is_some()
}
