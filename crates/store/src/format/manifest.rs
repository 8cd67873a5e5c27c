//! Manifests and configurations, and what all JSON files of a layout share.
//!
//! Fields that the OCI specification allows and this crate does not need are ignored when read; in
//! the configuration, which is ours alone, an unknown field is an error.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::format::descriptor::{
    ARTIFACT_TYPE, CONFIG_TYPE, Descriptor, JOURNAL, MANIFEST_TYPE, SESSION_TYPE, is_journal,
};
use crate::format::digest::{from_hex, to_hex};
use crate::format::index::{Encoding, MAX_PAGES, Role};
pub(crate) use crate::format::json::parse;
use crate::{GuestBuild, OpenError, SaveError};

pub(crate) const LAYOUT_FILE: &str = "oci-layout";
pub(crate) const INDEX_FILE: &str = "index.json";
pub(crate) const LAYOUT_TEXT: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;
const PAGES_RAW: &str = "application/vnd.afresh.snapshot.pages.v1";
const PAGES_ZSTD: &str = "application/vnd.afresh.snapshot.pages.v1+zstd";
const WORKING_SET_RAW: &str = "application/vnd.afresh.snapshot.working-set.v1";
const WORKING_SET_ZSTD: &str = "application/vnd.afresh.snapshot.working-set.v1+zstd";
/// Configurations of containers' images.
const IMAGE_TYPES: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];
/// The suffix of a sealed blob's type.
const SEALED: &str = "+sealed";

/// Limits on what is read: far above what is written, far below what hurts.
pub(crate) const MAX_INDEX_JSON: u64 = 16 << 20;
pub(crate) const MAX_MANIFEST: u64 = 1 << 20;
pub(crate) const MAX_CONFIG: u64 = 96 << 20;
/// Maximum bytes of a guest state. Its base64 fits in the limit of configurations.
pub const MAX_STATE: u64 = 64 << 20;
/// Maximum layers of a stack.
pub(crate) const MAX_LAYERS: usize = 128;

/// A manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) schema_version: u32,
    pub(crate) media_type: String,
    pub(crate) artifact_type: String,
    pub(crate) config: Descriptor,
    /// Bottom first; a working set comes last.
    pub(crate) layers: Vec<Descriptor>,
    /// Signatures, and whatever else was noted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

/// The type fields of any document.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ForeignManifest {
    manifests: Option<serde::de::IgnoredAny>,
    config: Option<ForeignConfig>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ForeignConfig {
    media_type: String,
}

impl ForeignManifest {
    fn is_image(&self) -> bool {
        let image = |config: &ForeignConfig| IMAGE_TYPES.contains(&&*config.media_type);
        self.manifests.is_some() || self.config.as_ref().is_some_and(image)
    }
}

impl Manifest {
    /// The manifest of a snapshot, checked.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, OpenError> {
        let parsed = parse::<Self>("the manifest", bytes);
        let checked = parsed.and_then(|manifest| manifest.check().map(|()| manifest));
        checked.map_err(|error| match serde_json::from_slice::<ForeignManifest>(bytes) {
            Ok(foreign) if foreign.is_image() => OpenError::ContainerImage,
            _ => error,
        })
    }

    pub(crate) fn new(config: Descriptor, layers: Vec<Descriptor>) -> Self {
        Self {
            schema_version: 2,
            media_type: MANIFEST_TYPE.to_owned(),
            artifact_type: ARTIFACT_TYPE.to_owned(),
            config,
            layers,
            annotations: BTreeMap::new(),
        }
    }

    /// Whether configuration and layers are sealed.
    pub(crate) fn is_sealed(&self) -> bool {
        self.config.media_type.ends_with(SEALED)
    }

    /// The file of the turns that follow on the snapshot, if there are such.
    pub(crate) fn journal(&self) -> Result<Option<&str>, OpenError> {
        if !self.config.media_type.starts_with(SESSION_TYPE) {
            return Ok(None);
        }
        match self.annotations.get(JOURNAL) {
            Some(id) if is_journal(id) => Ok(Some(id)),
            _ => Err(OpenError::Json {
                what: "the manifest",
                why: "it is a session's, and names no file of turns".to_owned(),
            }),
        }
    }

    /// The same snapshot, with turns to follow in this file, or without any.
    pub(crate) fn with_journal(&self, id: Option<&str>) -> Self {
        let mut this = self.clone();
        let plain = if id.is_some() { SESSION_TYPE } else { CONFIG_TYPE };
        this.config.media_type = sealed_type(plain, self.is_sealed());
        this.annotations.remove(JOURNAL);
        this.annotations.extend(id.map(|id| (JOURNAL.to_owned(), id.to_owned())));
        this
    }

    fn check(&self) -> Result<(), OpenError> {
        let types = [
            ("the manifest", &self.media_type, MANIFEST_TYPE),
            ("the snapshot", &self.artifact_type, ARTIFACT_TYPE),
            ("the configuration", &self.config.media_type, CONFIG_TYPE),
        ];
        for (what, found, wanted) in types {
            let config = what == "the configuration"
                && [CONFIG_TYPE, SESSION_TYPE]
                    .iter()
                    .any(|kind| [false, true].map(|it| sealed_type(kind, it)).contains(found));
            if found != wanted && !config {
                return Err(OpenError::MediaType { what, found: found.clone() });
            }
        }
        if self.layers.len() > MAX_LAYERS + 1 {
            return Err(OpenError::TooLarge {
                what: "the stack of layers",
                size: self.layers.len() as u64,
                limit: MAX_LAYERS as u64,
            });
        }
        Ok(())
    }
}

/// The media type of a layer.
pub(crate) fn layer_type(role: Role, encoding: Encoding) -> &'static str {
    match (role, encoding) {
        (Role::Base | Role::Delta, Encoding::Raw) => PAGES_RAW,
        (Role::Base | Role::Delta, Encoding::Zstd) => PAGES_ZSTD,
        (Role::WorkingSet, Encoding::Raw) => WORKING_SET_RAW,
        (Role::WorkingSet, Encoding::Zstd) => WORKING_SET_ZSTD,
    }
}

/// The media type of a blob of type `plain` that may be sealed.
pub(crate) fn sealed_type(plain: &str, sealed: bool) -> String {
    format!("{plain}{}", if sealed { SEALED } else { "" })
}

/// The configuration: what the memory belongs to, and the guest's own state.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) schema: u32,
    pub(crate) guest: GuestBuild,
    pub(crate) memory: Memory,
    /// Manifest digest of the snapshot this one was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parent: Option<String>,
    /// Guest state, in base64.
    pub(crate) state: String,
}

/// The memory's part of the configuration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Memory {
    pub(crate) page_size: u64,
    pub(crate) pages: u64,
    /// Root of each layer, bottom first.
    pub(crate) layers: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) working_set: Option<String>,
}

const ROOT_PREFIX: &str = "blake3:";

pub(crate) fn root_text(root: &[u8; 32]) -> String {
    format!("{ROOT_PREFIX}{}", to_hex(root))
}

pub(crate) fn parse_root(text: &str) -> Result<[u8; 32], OpenError> {
    text.strip_prefix(ROOT_PREFIX).and_then(from_hex).ok_or_else(|| OpenError::Json {
        what: "the configuration",
        why: format!("`{}` is not a blake3 root", text.chars().take(80).collect::<String>()),
    })
}

impl Config {
    pub(crate) const SCHEMA: u32 = 1;

    pub(crate) fn check(&self) -> Result<(), OpenError> {
        let wrong = |why: String| OpenError::Json { what: "the configuration", why };
        if self.schema != Self::SCHEMA {
            return Err(OpenError::MediaType {
                what: "the configuration",
                found: format!("schema {}", self.schema),
            });
        }
        if self.memory.page_size != afresh_sys::PAGE_SIZE as u64 {
            return Err(wrong(format!(
                "pages of {} bytes; this host's have {}",
                self.memory.page_size,
                afresh_sys::PAGE_SIZE
            )));
        }
        if self.memory.pages > MAX_PAGES {
            return Err(wrong(format!("{} pages are more than {MAX_PAGES}", self.memory.pages)));
        }
        if self.memory.layers.is_empty() {
            return Err(wrong("it names no layer".to_owned()));
        }
        Ok(())
    }

    pub(crate) fn state(&self) -> Result<Vec<u8>, OpenError> {
        STANDARD
            .decode(&self.state)
            .map_err(|e| OpenError::Json { what: "the guest state", why: e.to_string() })
    }
}

pub(crate) fn encode_state(state: &[u8]) -> String {
    STANDARD.encode(state)
}

/// A JSON document with a maximum length, which readers and writers keep.
pub(crate) trait Document: Serialize {
    /// Its name in errors.
    const NAME: &'static str;
    /// Maximum bytes.
    const MAX: u64;
}

impl Document for Manifest {
    const NAME: &'static str = "the manifest";
    const MAX: u64 = MAX_MANIFEST;
}

impl Document for Config {
    const NAME: &'static str = "the configuration";
    const MAX: u64 = MAX_CONFIG;
}

/// Writes JSON without white space, so that equal values have equal digests.
pub(crate) fn print<T: Document>(value: &T) -> Result<Vec<u8>, SaveError> {
    let what = T::NAME;
    let bytes = serde_json::to_vec(value);
    let bytes = bytes.map_err(|e| SaveError::Json { what, why: e.to_string() })?;
    let (size, limit) = (bytes.len() as u64, T::MAX);
    if size > limit { Err(SaveError::TooLarge { what, size, limit }) } else { Ok(bytes) }
}
