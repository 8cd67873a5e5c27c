//! OCI images: which layers one has, in which order, and how its program is started.
//!
//! Promises: every used blob was checked against its digest; the size of a document is limited
//! before it is parsed; a layout that changes while it is opened fails a digest, and later changes
//! are not visible. May break it: nothing outside.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::error::LayerError;
use crate::layers::archive::Archive;
use crate::layers::docker_archive;
use crate::layers::item::{EntryKind, Item, LayerLimits};
use crate::layers::layer::Layer;
use crate::layers::oci_document::{self, Descriptor, OciDocument, Platform};
use crate::layers::regular_file::open_regular;
use crate::layers::stack::Part;
use crate::layers::tar::{self, ImageRoom};

/// Indexes that may name indexes.
const DEPTH: usize = 4;
/// The start configuration of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OciConfig {
    /// The beginning of every command line.
    pub entrypoint: Vec<String>,
    /// The default arguments.
    pub command: Vec<String>,
    /// Variables of the environment.
    pub env: Vec<(String, String)>,
    /// The directory to start in; empty for the root.
    pub directory: String,
}

#[derive(Deserialize)]
struct ConfigFile {
    architecture: Option<String>,
    os: Option<String>,
    config: Option<ConfigFields>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ConfigFields {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
}

impl OciConfig {
    fn parse(path: &Path, bytes: &[u8]) -> Result<Self, LayerError> {
        let bad = |why: String| LayerError::Bad { path: path.display().to_string(), why };
        let file: ConfigFile = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        if let (Some(architecture), Some(os)) = (file.architecture, file.os) {
            let platform = Platform { architecture, os };
            if !platform.is_here() {
                let Platform { architecture, os } = platform;
                return Err(bad(format!(
                    "the image is for {os}/{architecture}, and this is linux/{}",
                    oci_document::architecture()
                )));
            }
        }
        let fields = file.config.unwrap_or_default();
        let variable = |text: String| {
            let (name, value) = text.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        Ok(Self {
            entrypoint: fields.entrypoint.unwrap_or_default(),
            command: fields.cmd.unwrap_or_default(),
            env: fields.env.unwrap_or_default().into_iter().filter_map(variable).collect(),
            directory: fields.working_dir.unwrap_or_default(),
        })
    }
}

/// An OCI image: its file tree, and the configuration of its program.
#[derive(Debug)]
pub struct OciImage {
    pub(crate) layer: Layer,
    config: OciConfig,
}

impl OciImage {
    /// The image in a directory of the OCI layout, in a tar of one, or in an archive of
    /// `docker save`, that `name` means there: a name that the layout's index gives, the tag of an
    /// archive, or the digest of a manifest or an index. Without a name it is the only image, or
    /// the one for this machine.
    ///
    /// # Errors
    /// [`LayerError`]. Bytes and files beyond the limits are refused before they are unpacked.
    pub fn open(
        path: impl AsRef<Path>,
        name: Option<&str>,
        limits: &LayerLimits,
    ) -> Result<Self, LayerError> {
        let path = path.as_ref();
        if path.is_file() {
            let layout = unpacked(path, limits)?;
            return Self::open(layout.path(), name, limits);
        }
        let digest = name.filter(|name| name.starts_with("sha256:"));
        let mut document = match digest {
            Some(digest) => document(&blob(path, digest)?, Some(digest))?,
            None => document(&path.join("index.json"), None)?,
        };
        let mut name = name.filter(|_| digest.is_none());
        for _ in 0..DEPTH {
            let Some(next) = document.leads_to(name.take())? else {
                return Self::of_manifest(path, &document, limits);
            };
            document = self::document(&blob(path, &next.digest)?, Some(&next.digest))?;
        }
        let why = "its indexes name one another".to_owned();
        Err(LayerError::Bad { path: path.display().to_string(), why })
    }

    fn of_manifest(
        path: &Path,
        manifest: &OciDocument,
        limits: &LayerLimits,
    ) -> Result<Self, LayerError> {
        let config = match &manifest.fields.config {
            Some(descriptor) => {
                let file = blob(path, &descriptor.digest)?;
                OciConfig::parse(&file, &read(&file, Some(&descriptor.digest))?)?
            }
            None => OciConfig::default(),
        };
        let layers = manifest.fields.layers.as_deref().unwrap_or_default();
        let archives = read_layers(path, layers, limits)?;
        let parts = archives.into_iter().map(|a| Part::Archive(Arc::new(a))).collect();
        Ok(Self { layer: Layer { parts }, config })
    }

    /// Its file tree.
    #[must_use]
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// The start configuration of its program.
    #[must_use]
    pub fn config(&self) -> &OciConfig {
        &self.config
    }
}

fn read_layers(
    path: &Path,
    layers: &[Descriptor],
    limits: &LayerLimits,
) -> Result<Vec<Archive>, LayerError> {
    let bad = |why: String| LayerError::Bad { path: path.display().to_string(), why };
    let mut left = *limits;
    let mut room = ImageRoom::new(limits, layers.len());
    let mut archives = Vec::with_capacity(layers.len());
    for layer in layers {
        if !layer.media.contains("tar") {
            return Err(bad(format!("a layer of the type {:?} is not read here", layer.media)));
        }
        let file = blob(path, &layer.digest)?;
        let archive =
            tar::read_blob(&file, &left, &mut room, |found| same(&file, found, &layer.digest))?;
        // The limits are for the whole image.
        let bytes: u64 = archive.items.iter().map(Item::bytes).sum();
        left.bytes = left.bytes.saturating_sub(bytes);
        left.files = left.files.saturating_sub(archive.items.len() as u64);
        archives.push(archive);
    }
    Ok(archives)
}

/// Unpacks a layout from a tar into a temporary directory, which is removed on drop. Other entries
/// are skipped.
fn unpacked(path: &Path, limits: &LayerLimits) -> Result<TempDir, LayerError> {
    let failed = |source| LayerError::Read { path: path.display().to_string(), source };
    let archive = tar::read(path, limits, false)?;
    let layout = tempfile::tempdir().map_err(failed)?;
    std::fs::create_dir_all(layout.path().join("blobs/sha256")).map_err(failed)?;
    for item in &archive.items {
        let name = std::str::from_utf8(&item.path).unwrap_or_default();
        let name = name.strip_prefix("./").unwrap_or(name);
        let hex = name.strip_prefix("blobs/sha256/").map(|hex| format!("sha256:{hex}"));
        let target = match hex {
            Some(digest) => blob(layout.path(), &digest).ok(),
            None => (name == "index.json").then(|| layout.path().join(name)),
        };
        let (Some(target), EntryKind::File(file, len)) = (target, &item.what) else { continue };
        let mut out = File::create(target).map_err(failed)?;
        let (mut at, mut buffer) = (0, vec![0; 1 << 16]);
        while at < *len {
            let piece = (len - at).min(buffer.len() as u64) as usize;
            let read = archive.read(*file, None, at, &mut buffer[..piece]);
            read.map_err(|error| failed(std::io::Error::other(error.to_string())))?;
            out.write_all(&buffer[..piece]).map_err(failed)?;
            at += piece as u64;
        }
    }
    if !layout.path().join("index.json").is_file() {
        docker_archive::convert(&archive, layout.path())?;
    }
    Ok(layout)
}

/// The path of a blob.
fn blob(path: &Path, digest: &str) -> Result<PathBuf, LayerError> {
    let hex = digest.strip_prefix("sha256:").filter(|hex| {
        hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    });
    let hex = hex.ok_or_else(|| LayerError::Bad {
        path: path.display().to_string(),
        why: format!("{digest:?} is not a SHA-256 digest"),
    })?;
    Ok(path.join("blobs/sha256").join(hex))
}

/// Compares the digest of a file with that of its name.
fn same(path: &Path, found: &[u8], digest: &str) -> Result<(), LayerError> {
    let hex: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
    match digest.strip_prefix("sha256:") == Some(&hex) {
        true => Ok(()),
        false => Err(LayerError::Bad {
            path: path.display().to_string(),
            why: format!("it is damaged: its digest is sha256:{hex}"),
        }),
    }
}

/// A small file, whole and checked.
fn read(path: &Path, digest: Option<&str>) -> Result<Vec<u8>, LayerError> {
    let failed = |source| LayerError::Read { path: path.display().to_string(), source };
    let mut bytes = Vec::new();
    let file = open_regular(path).map_err(failed)?;
    file.take(OciDocument::MAX_DOCUMENT + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > OciDocument::MAX_DOCUMENT {
        return Err(LayerError::Bad {
            path: path.display().to_string(),
            why: "it is too long for an index or a manifest".to_owned(),
        });
    }
    if let Some(digest) = digest {
        same(path, &Sha256::digest(&bytes), digest)?;
    }
    Ok(bytes)
}

fn document(path: &Path, digest: Option<&str>) -> Result<OciDocument, LayerError> {
    OciDocument::parse(&path.display().to_string(), &read(path, digest)?)
}
