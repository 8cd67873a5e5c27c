//! Indexes and manifests of OCI images.

use serde::Deserialize;

use crate::error::LayerError;

/// Layers of an image, at most.
pub(crate) const LAYERS: usize = 512;
/// Annotations with the name of an image: that of the specification, and that of Docker.
pub(crate) const NAMES: [&str; 2] =
    ["org.opencontainers.image.ref.name", "io.containerd.image.name"];

/// A blob of an image, as a document names it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OciBlob {
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Bytes that it has.
    pub size: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Descriptor {
    #[serde(rename = "mediaType", default)]
    pub(super) media: String,
    pub(super) digest: String,
    #[serde(default)]
    pub(super) size: u64,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Platform {
    pub(super) architecture: String,
    pub(super) os: String,
}

impl Platform {
    pub(super) fn is_here(&self) -> bool {
        self.os == "linux" && self.architecture == architecture()
    }
}

impl Descriptor {
    fn blob(&self) -> OciBlob {
        OciBlob { digest: self.digest.clone(), size: self.size }
    }

    fn is_called(&self, name: &str) -> bool {
        NAMES.iter().any(|key| self.annotations.get(*key).is_some_and(|called| called == name))
    }
}

/// An index or a manifest, distinguished by its fields.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct OciFields {
    manifests: Option<Vec<Descriptor>>,
    pub(super) layers: Option<Vec<Descriptor>>,
    pub(super) config: Option<Descriptor>,
}

/// A document that leads to an image's layers: an index of several images, or the manifest of one.
#[derive(Clone, Debug)]
pub struct OciDocument {
    what: String,
    pub(super) fields: OciFields,
}

impl OciDocument {
    /// Bytes of a document, at most.
    pub const MAX_DOCUMENT: u64 = 4 << 20;

    /// Parses one; `what` is its name in errors.
    ///
    /// # Errors
    /// [`LayerError::Bad`] for any other document.
    pub fn parse(what: &str, bytes: &[u8]) -> Result<Self, LayerError> {
        let what = what.to_owned();
        let bad = |why: String| LayerError::Bad { path: what.clone(), why };
        if bytes.len() as u64 > Self::MAX_DOCUMENT {
            return Err(bad("it is too long for an index or a manifest".to_owned()));
        }
        let fields: OciFields = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        let layers = fields.layers.as_ref().map_or(0, Vec::len);
        if layers > LAYERS {
            return Err(bad(format!("it has {layers} layers; {LAYERS} are allowed")));
        }
        Ok(Self { what, fields })
    }

    /// The next document of an index: that of the image called `name`, of the only one, or of the
    /// one for this machine. `None` for a manifest.
    ///
    /// # Errors
    /// [`LayerError::Bad`] if the index has no such image.
    pub fn leads_to(&self, name: Option<&str>) -> Result<Option<OciBlob>, LayerError> {
        let bad = |why: String| LayerError::Bad { path: self.what.clone(), why };
        if self.fields.layers.is_some() {
            return Ok(None);
        }
        let manifests = self.fields.manifests.as_deref().unwrap_or_default();
        let named: Vec<&Descriptor> = match name {
            Some(name) => manifests.iter().filter(|one| one.is_called(name)).collect(),
            None => manifests.iter().collect(),
        };
        let here = |one: &&&Descriptor| one.platform.as_ref().is_some_and(Platform::is_here);
        let chosen = match (&named[..], name) {
            ([only], _) => Some(*only),
            ([], Some(name)) => {
                let known = manifests.iter().filter_map(|one| one.annotations.get(NAMES[0]));
                let known = known.map(String::as_str).collect::<Vec<_>>().join(", ");
                return Err(bad(format!("it has no image {name:?}, only these names: {known}")));
            }
            (several, _) => several.iter().find(here).copied(),
        };
        match chosen {
            Some(chosen) => Ok(Some(chosen.blob())),
            None => Err(bad(format!(
                "it has {} images, and not one for linux/{}",
                named.len(),
                architecture()
            ))),
        }
    }

    /// The blobs that a manifest names: the configuration, and then the layers.
    #[must_use]
    pub fn blobs(&self) -> Vec<OciBlob> {
        let layers = self.fields.layers.iter().flatten();
        self.fields.config.iter().chain(layers).map(Descriptor::blob).collect()
    }
}

/// How OCI calls this machine.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
