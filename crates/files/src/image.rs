//! OCI images in a directory of the OCI layout: which layers, in which order.
//!
//! Every blob that is used is checked against its digest first.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::archive::Archive;
use crate::error::LayerError;
use crate::layer::LayerLimits;
use crate::tar;

/// Bytes of an index or a manifest, at most.
const DOCUMENT: u64 = 4 << 20;
/// Layers of an image, at most.
const LAYERS: usize = 512;
/// Indexes that may name indexes.
const DEPTH: usize = 4;

#[derive(Deserialize)]
struct Descriptor {
    #[serde(rename = "mediaType", default)]
    media: String,
    digest: String,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// An index or a manifest, told by what it has.
#[derive(Deserialize)]
struct Document {
    manifests: Option<Vec<Descriptor>>,
    layers: Option<Vec<Descriptor>>,
}

/// How OCI calls this machine.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub(crate) fn open(path: &Path, limits: &LayerLimits) -> Result<Vec<Archive>, LayerError> {
    let bad = |why: String| LayerError::Bad { path: path.display().to_string(), why };
    let mut document = parse(&path.join("index.json"), None)?;
    for _ in 0..DEPTH {
        if let Some(layers) = document.layers {
            return read_layers(path, &layers, limits);
        }
        let manifests = document.manifests.unwrap_or_default();
        let here = |descriptor: &&Descriptor| {
            descriptor.platform.as_ref().is_some_and(|platform| {
                platform.os == "linux" && platform.architecture == architecture()
            })
        };
        let chosen = match &manifests[..] {
            [only] => Some(only),
            several => several.iter().find(here),
        };
        let chosen = chosen.ok_or_else(|| {
            bad(format!(
                "it has {} images, and not one for linux/{}",
                manifests.len(),
                architecture()
            ))
        })?;
        document = parse(&blob(path, &chosen.digest)?, Some(&chosen.digest))?;
    }
    Err(bad("its indexes name one another".to_owned()))
}

fn read_layers(
    path: &Path,
    layers: &[Descriptor],
    limits: &LayerLimits,
) -> Result<Vec<Archive>, LayerError> {
    let bad = |why: String| LayerError::Bad { path: path.display().to_string(), why };
    if layers.len() > LAYERS {
        return Err(bad(format!("it has {} layers; {LAYERS} are allowed", layers.len())));
    }
    let mut left = *limits;
    let mut archives = Vec::with_capacity(layers.len());
    for layer in layers {
        if !layer.media.contains("tar") {
            return Err(bad(format!("a layer of the type {:?} is not read here", layer.media)));
        }
        let file = blob(path, &layer.digest)?;
        check(&file, &layer.digest)?;
        let archive = tar::read(&file, &left, true)?;
        // The limits are for the whole image.
        let bytes: u64 = archive.items.iter().map(crate::layer::Item::bytes).sum();
        left.bytes = left.bytes.saturating_sub(bytes);
        left.files = left.files.saturating_sub(archive.items.len() as u64);
        archives.push(archive);
    }
    Ok(archives)
}

/// Where a blob lies.
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

/// Checks a blob of any length against its digest.
fn check(path: &Path, digest: &str) -> Result<(), LayerError> {
    let failed = |source| LayerError::Read { path: path.display().to_string(), source };
    let mut file = File::open(path).map_err(failed)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => break,
            len => hash.update(&buffer[..len]),
        }
    }
    same(path, &hash.finalize(), digest)
}

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

fn parse(path: &Path, digest: Option<&str>) -> Result<Document, LayerError> {
    let failed = |source| LayerError::Read { path: path.display().to_string(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(DOCUMENT + 1).read_to_end(&mut bytes).map_err(failed)?;
    let bad = |why: String| LayerError::Bad { path: path.display().to_string(), why };
    if bytes.len() as u64 > DOCUMENT {
        return Err(bad("it is too long for an index or a manifest".to_owned()));
    }
    if let Some(digest) = digest {
        same(path, &Sha256::digest(&bytes), digest)?;
    }
    serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))
}
