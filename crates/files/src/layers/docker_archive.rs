//! Archives of images as `docker save` before version 25, `podman save` and bazel write them: a
//! `manifest.json` that names a configuration and layers, and no index.
//!
//! Promises: every layer that is not compressed has the digest that the configuration gives for it,
//! and a configuration that is named by its digest has that digest. Each file of the archive is
//! copied once, however often it is named.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::error::LayerError;
use crate::layers::archive::Archive;
use crate::layers::item::EntryKind;
use crate::layers::oci_document::{LAYERS, NAMES, OciDocument};

/// Images of an archive, at most.
const IMAGES: usize = 64;
/// Names of an image, at most.
const TAGS: usize = 128;
/// Links that name one another.
const LINKS: usize = 8;
/// Bytes that are copied at a time.
const PIECE: usize = 1 << 16;
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 2] = [0x28, 0xb5];

/// An image of `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// The fields of the configuration of an image that are used.
#[derive(Deserialize)]
struct ImageConfig {
    rootfs: Option<RootFs>,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Option<Vec<String>>,
}

/// A copied file.
#[derive(Clone)]
struct Blob {
    hex: String,
    size: u64,
    /// The first bytes, which show a compression.
    head: [u8; 2],
}

impl Blob {
    fn descriptor(&self, media: &str) -> Value {
        let media = format!("application/vnd.oci.image.{media}");
        json!({"mediaType": media, "digest": format!("sha256:{}", self.hex), "size": self.size})
    }
}

/// The files of an archive by their names, and the layout that they are copied to.
struct Conversion<'a> {
    archive: &'a Archive,
    names: BTreeMap<&'a str, &'a EntryKind>,
    layout: &'a Path,
    copied: BTreeMap<u32, Blob>,
}

/// Makes the layout of the images of an archive in the directory `layout`, which has an empty
/// `blobs/sha256`. Does nothing without a `manifest.json`.
pub(crate) fn convert(archive: &Archive, layout: &Path) -> Result<(), LayerError> {
    let mut names = BTreeMap::new();
    for item in &archive.items {
        if let Ok(path) = std::str::from_utf8(&item.path) {
            names.insert(path.strip_prefix("./").unwrap_or(path), &item.what);
        }
    }
    let mut conversion = Conversion { archive, names, layout, copied: BTreeMap::new() };
    if !conversion.names.contains_key("manifest.json") {
        return Ok(());
    }
    let bytes = conversion.document("manifest.json")?;
    let entries: Vec<Entry> =
        serde_json::from_slice(&bytes).map_err(|error| conversion.bad(error.to_string()))?;
    if entries.len() > IMAGES {
        let why = format!("it has {} images; {IMAGES} are allowed", entries.len());
        return Err(conversion.bad(why));
    }
    let mut manifests = Vec::new();
    for entry in &entries {
        let manifest = conversion.image(entry)?;
        let tags = entry.repo_tags.as_deref().unwrap_or_default();
        if tags.len() > TAGS {
            let why = format!("an image has {} names; {TAGS} are allowed", tags.len());
            return Err(conversion.bad(why));
        }
        let named = tags.iter().map(|tag| {
            let mut named = manifest.clone();
            named["annotations"] = json!({ NAMES[0]: tag });
            named
        });
        manifests.extend(named);
        if tags.is_empty() {
            manifests.push(manifest);
        }
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
    std::fs::write(layout.join("index.json"), index).map_err(|source| conversion.failed(source))
}

impl Conversion<'_> {
    fn bad(&self, why: String) -> LayerError {
        LayerError::Bad { path: self.archive.name.clone(), why }
    }

    fn failed(&self, source: std::io::Error) -> LayerError {
        LayerError::Read { path: self.archive.name.clone(), source }
    }

    /// The number and length of a file, through links as old layers of several images are.
    fn find(&self, name: &str) -> Result<(u32, u64), LayerError> {
        let missing = || self.bad(format!("it names {name:?}, and has no such file"));
        let mut at = name.strip_prefix("./").unwrap_or(name).to_owned();
        for _ in 0..LINKS {
            match self.names.get(&*at) {
                Some(EntryKind::File(file, len)) => return Ok((*file, *len)),
                Some(EntryKind::Same(target)) => {
                    at = String::from_utf8(target.clone()).map_err(|_| missing())?;
                }
                Some(EntryKind::Link(target)) => {
                    let target = std::str::from_utf8(target).map_err(|_| missing())?;
                    at = joined(&at, target).ok_or_else(missing)?;
                }
                _ => return Err(missing()),
            }
        }
        Err(missing())
    }

    fn read(&self, file: u32, at: u64, piece: &mut [u8]) -> Result<usize, LayerError> {
        let read = self.archive.read(file, None, at, piece);
        read.map_err(|error| self.failed(std::io::Error::other(error.to_string())))?;
        Ok(piece.len())
    }

    /// A small file, whole.
    fn document(&self, name: &str) -> Result<Vec<u8>, LayerError> {
        let (file, len) = self.find(name)?;
        if len > OciDocument::MAX_DOCUMENT {
            return Err(self.bad(format!("{name:?} is too long for a document")));
        }
        let mut bytes = vec![0; len as usize];
        self.read(file, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies a file to the blobs of the layout.
    fn copy(&mut self, name: &str) -> Result<Blob, LayerError> {
        let (file, len) = self.find(name)?;
        if let Some(known) = self.copied.get(&file) {
            return Ok(known.clone());
        }
        let partial = self.layout.join("blobs/partial");
        let mut out = File::create(&partial).map_err(|source| self.failed(source))?;
        let (mut hash, mut head, mut at) = (Sha256::new(), [0; 2], 0);
        let mut buffer = vec![0; PIECE];
        while at < len {
            let piece = (len - at).min(PIECE as u64) as usize;
            self.read(file, at, &mut buffer[..piece])?;
            if at == 0 && piece >= head.len() {
                head = [buffer[0], buffer[1]];
            }
            hash.update(&buffer[..piece]);
            out.write_all(&buffer[..piece]).map_err(|source| self.failed(source))?;
            at += piece as u64;
        }
        let blob = Blob { hex: hex(&hash.finalize()), size: len, head };
        let target = self.layout.join("blobs/sha256").join(&blob.hex);
        std::fs::rename(&partial, target).map_err(|source| self.failed(source))?;
        self.copied.insert(file, blob.clone());
        Ok(blob)
    }

    /// Copies an image, and returns the descriptor of its manifest.
    fn image(&mut self, entry: &Entry) -> Result<Value, LayerError> {
        if entry.layers.len() > LAYERS {
            let why = format!("it has {} layers; {LAYERS} are allowed", entry.layers.len());
            return Err(self.bad(why));
        }
        let config: ImageConfig = serde_json::from_slice(&self.document(&entry.config)?)
            .map_err(|error| self.bad(format!("{:?}: {error}", entry.config)))?;
        let copied = self.copy(&entry.config)?;
        let given = entry.config.rsplit('/').next().unwrap_or_default().trim_end_matches(".json");
        let is_digest = given.len() == 64 && given.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_digest && given != copied.hex {
            return Err(
                self.bad(format!("{:?} is damaged: its digest is {}", entry.config, copied.hex))
            );
        }
        let expected = config.rootfs.and_then(|files| files.diff_ids).unwrap_or_default();
        if !expected.is_empty() && expected.len() != entry.layers.len() {
            return Err(self.bad("its configuration has another number of layers".to_owned()));
        }
        let mut layers = Vec::new();
        for (number, name) in entry.layers.iter().enumerate() {
            let layer = self.copy(name)?;
            let wanted = expected.get(number);
            let is_plain = layer.head != GZIP && layer.head != ZSTD;
            if is_plain && wanted.is_some_and(|digest| *digest != format!("sha256:{}", layer.hex)) {
                return Err(
                    self.bad(format!("{name:?} is damaged: its digest is sha256:{}", layer.hex))
                );
            }
            layers.push(layer.descriptor("layer.v1.tar"));
        }
        let config = copied.descriptor("config.v1+json");
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers}).to_string();
        let blob = Blob {
            hex: hex(&Sha256::digest(manifest.as_bytes())),
            size: manifest.len() as u64,
            head: [0; 2],
        };
        let target = self.layout.join("blobs/sha256").join(&blob.hex);
        std::fs::write(target, manifest).map_err(|source| self.failed(source))?;
        Ok(blob.descriptor("manifest.v1+json"))
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name that `target`, in a link called `link`, means within the archive.
fn joined(link: &str, target: &str) -> Option<String> {
    let folder = link.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_an_archive_are_not_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.tar");
        let mut tar = tar::Builder::new(File::create(&path).unwrap());
        let mut add = |name: &str, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, content).unwrap();
        };
        add("manifest.json", b"[]");
        let long = "a-long-name/".repeat(250);
        (0..1000).for_each(|number| add(&format!("{long}{number}"), b""));
        tar.finish().unwrap();
        let archive = crate::layers::tar::open(&path, &crate::LayerLimits::default()).unwrap();
        let (converted, peak) = afresh_budget::meter::peak(|| convert(&archive, dir.path()));
        converted.unwrap();
        assert!(dir.path().join("index.json").is_file());
        // They have 3 MB.
        assert!(peak < 1 << 20, "{peak}");
    }

    #[test]
    fn links_stay_in_the_archive() {
        assert_eq!(joined("a/layer.tar", "../b/layer.tar").as_deref(), Some("b/layer.tar"));
        assert_eq!(joined("a/layer.tar", "../../etc/passwd"), None);
    }
}
