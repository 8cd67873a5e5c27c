//! Any bytes as an OCI image in a layout: refused, or a tree of files. It takes memory in
//! proportion to its bytes and to the limit on files. Digests, which a fuzzer cannot guess, are
//! filled in.
#![no_main]

use std::fs;
use std::path::Path;

use afresh_budget::meter::{Meter, within};
use afresh_files::{Budget, OciImage, Tree};
use afresh_fuzz::layers::{LIMITS, memory, read_files};
use afresh_fuzz::{BLOCK, accepted, expand, sum_headers};
use afresh_store::Sha256;
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Writes a blob; returns its digest.
fn put(layout: &Path, bytes: &[u8]) -> Option<String> {
    let digest = Sha256::of(bytes);
    let path = layout.join("blobs/sha256").join(digest.hex());
    fs::write(path, bytes).ok().map(|()| digest.to_string())
}

fn read(layout: &Path) -> Result<Tree, afresh_files::LayerError> {
    let image = OciImage::open(layout, None, &LIMITS)?;
    Tree::new(Budget::default()).with_layer("/", image.layer())
}

fuzz_target!(|data: &[u8]| {
    let mut parts = data.splitn(4, |byte| *byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let (index, manifest, config) = (part(), part(), part());
    let mut layer = expand(part());
    sum_headers(&mut layer);
    layer.extend_from_slice(&[0; 2 * BLOCK]);
    let Ok(dir) = tempfile::tempdir() else { return };
    let layout = dir.path();
    if fs::create_dir_all(layout.join("blobs/sha256")).is_err() {
        return;
    }
    let named = |text: &[u8], names: &[(&str, &str)]| {
        let text = String::from_utf8_lossy(text).into_owned();
        names.iter().fold(text, |text, (mark, digest)| text.replace(mark, digest)).into_bytes()
    };
    let (Some(config), Some(layer_digest)) = (put(layout, config), put(layout, &layer)) else {
        return;
    };
    let manifest = named(manifest, &[("$C", &config), ("$L", &layer_digest)]);
    let Some(manifest_digest) = put(layout, &manifest) else { return };
    let index = named(index, &[("$M", &manifest_digest)]);
    if fs::write(layout.join("index.json"), &index).is_err() {
        return;
    }
    // A manifest may name the layer often.
    let layers = manifest.windows(2).filter(|part| *part == b"sh").count().max(1);
    let bytes = data.len() + index.len() + manifest.len() + layers * layer.len();
    let (tree, _) = within(memory(bytes), || read(layout));
    if let Some(tree) = accepted(tree) {
        read_files(&tree);
    }
});
