//! Snapshots from a stranger: any index, extent and configuration, with the digests made right, so
//! that a reader gets as deep as it can.
//!
//! Shared by the tests of several crates and by the fuzz targets; it writes files and knows nothing
//! of the crates that read them but how a blob's name is made.
#![allow(dead_code, reason = "each user takes a part")]

use std::fs;
use std::path::Path;

use afresh_store::Sha256;

pub(crate) const PAGE: usize = 4096;
/// Target of an extent of zeros.
pub(crate) const ZERO: u64 = u64::MAX;
pub(crate) const BASE: u32 = 0;
pub(crate) const DELTA: u32 = 1;
pub(crate) const WORKING_SET: u32 = 2;

/// A page layer as its maker wants it to be understood.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) role: u32,
    pub(crate) group_pages: u32,
    /// Length of the index space.
    pub(crate) pages: u64,
    /// The stored pages, raw.
    pub(crate) data: Vec<u8>,
    /// First page, number of pages, first stored page or [`ZERO`].
    pub(crate) extents: Vec<(u64, u64, u64)>,
}

impl Layer {
    /// Pages `extents` of an index space of `pages` pages, over `stored` pages that are not zero.
    pub(crate) fn new(role: u32, pages: u64, stored: usize, extents: &[(u64, u64, u64)]) -> Self {
        let data = (0..stored * PAGE).map(|n| (n / PAGE) as u8 | 1).collect();
        Self { role, group_pages: 16, pages, data, extents: extents.to_vec() }
    }

    /// The blob and its root, on top of the layer with the root `parent`.
    pub(crate) fn blob(&self, parent: [u8; 32]) -> (Vec<u8>, [u8; 32]) {
        let stored = (self.data.len() / PAGE) as u64;
        let mut semantic = Vec::new();
        for (first, len, stored) in &self.extents {
            for word in [first, len, stored] {
                semantic.extend_from_slice(&word.to_le_bytes());
            }
        }
        for group in self.data.chunks(self.group_pages.max(1) as usize * PAGE) {
            semantic.extend_from_slice(blake3::hash(group).as_bytes());
        }
        let extents = self.extents.len() as u64;
        let mut hasher = blake3::Hasher::new_derive_key("afresh 2026-11 page layer version 1 root");
        hasher.update(&self.role.to_le_bytes());
        hasher.update(&self.group_pages.to_le_bytes());
        for count in [self.pages, stored, extents] {
            hasher.update(&count.to_le_bytes());
        }
        hasher.update(&parent);
        hasher.update(&semantic);
        let root: [u8; 32] = hasher.finalize().into();

        let data_len = self.data.len() as u64;
        let mut footer = [0; 192];
        footer[..8].copy_from_slice(b"AFRESHPG");
        for (at, word) in [(8, 1), (12, 0), (16, self.role), (20, self.group_pages)] {
            footer[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let words = [self.pages, stored, extents, data_len, data_len, semantic.len() as u64];
        for (n, word) in words.iter().enumerate() {
            footer[24 + n * 8..32 + n * 8].copy_from_slice(&word.to_le_bytes());
        }
        footer[128..160].copy_from_slice(&parent);
        footer[160..].copy_from_slice(&root);
        let mut blob = self.data.clone();
        blob.extend_from_slice(&semantic);
        blob.extend_from_slice(&footer);
        (blob, root)
    }
}

/// A snapshot as its maker wants it to be understood.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    /// Length of the memory in the configuration.
    pub(crate) pages: u64,
    /// Bottom first.
    pub(crate) layers: Vec<Layer>,
    pub(crate) working_set: Option<Layer>,
    /// Kind of guest, and the guest's own state in base64.
    pub(crate) guest: (String, String),
}

impl Snapshot {
    pub(crate) fn new(pages: u64, layers: Vec<Layer>, working_set: Option<Layer>) -> Self {
        Self { pages, layers, working_set, guest: ("arena".to_owned(), String::new()) }
    }

    /// Writes it under `name` as the only snapshot of an image layout at `root`, and returns its
    /// id.
    pub(crate) fn write(&self, root: &Path, name: &str) -> Sha256 {
        let blobs = root.join("blobs/sha256");
        fs::create_dir_all(&blobs).expect("the folder of the blobs is made");
        let put = |bytes: &[u8]| {
            let digest = Sha256::of(bytes);
            fs::write(blobs.join(digest.hex()), bytes).expect("a blob is written");
            (digest, bytes.len())
        };
        let described = |kind: &str, (digest, size): (Sha256, usize)| {
            format!(
                r#"{{"mediaType":"application/vnd.afresh.snapshot.{kind}","digest":"{digest}","size":{size}}}"#
            )
        };
        let named = |root: [u8; 32]| format!(r#""blake3:{}""#, blake3::Hash::from(root).to_hex());
        let (mut descriptors, mut roots) = (Vec::new(), Vec::new());
        let mut parent = [0; 32];
        for layer in &self.layers {
            let (blob, root) = layer.blob(parent);
            descriptors.push(described("pages.v1", put(&blob)));
            roots.push(named(root));
            parent = root;
        }
        let mut set = String::new();
        if let Some(layer) = &self.working_set {
            let (blob, root) = layer.blob(parent);
            descriptors.push(described("working-set.v1", put(&blob)));
            set = format!(r#","workingSet":{}"#, named(root));
        }
        let (kind, state) = &self.guest;
        let config = format!(
            r#"{{"schema":1,"guest":{{"kind":"{kind}","module":"m","engine":"e","cpu":[]}},"memory":{{"pageSize":4096,"pages":{},"layers":[{}]{set}}},"state":"{state}"}}"#,
            self.pages,
            roots.join(","),
        );
        let manifest = format!(
            r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/vnd.afresh.snapshot.v1","config":{},"layers":[{}]}}"#,
            described("config.v1+json", put(config.as_bytes())),
            descriptors.join(","),
        );
        let (id, size) = put(manifest.as_bytes());
        let index = format!(
            r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{id}","size":{size},"artifactType":"application/vnd.afresh.snapshot.v1","annotations":{{"org.opencontainers.image.ref.name":"{name}"}}}}]}}"#
        );
        fs::write(root.join("index.json"), index).expect("the index is written");
        fs::write(root.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)
            .expect("the layout file is written");
        id
    }
}
