//! Any bytes as the JSON files of a store: index, manifest and configuration are refused or open.
//! The page layers that they can name are those of the golden snapshots.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_store::{OpenError, Sha256, Store};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of JSON, and for the layers that it can name.
const EACH: usize = 256;
/// Memory for buffers: pages of the target, and streams of compressed pages.
const ROOM: usize = 16 << 20;

/// The layers: digest and content.
static LAYERS: LazyLock<Vec<(Sha256, Vec<u8>)>> = LazyLock::new(|| {
    let golden =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/store/tests/golden/v1"));
    let store = Store::open(&golden).expect("the golden layout opens");
    let mut layers = Vec::new();
    for name in ["delta", "zstd"] {
        let snapshot = store.load(name).expect("a golden snapshot opens");
        for layer in snapshot.layers() {
            let path = store.blob_path(layer.digest());
            layers.push((layer.digest(), fs::read(path).expect("a golden layer is there")));
        }
        // The working set is not a layer of the memory.
        for entry in fs::read_dir(golden.join("blobs/sha256")).expect("the blobs are there") {
            let bytes = fs::read(entry.expect("a blob is there").path()).expect("it is read");
            if !bytes.starts_with(b"{") {
                layers.push((Sha256::of(&bytes), bytes));
            }
        }
    }
    layers
});

fuzz_target!(|data: &[u8]| {
    let mut parts = data.split(|byte| *byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let Ok(dir) = tempfile::tempdir() else { return };
    let Ok(store) = Store::create(dir.path()) else { return };
    for (digest, bytes) in &*LAYERS {
        if fs::write(store.blob_path(*digest), bytes).is_err() {
            return;
        }
    }
    let (config, manifest, index) = (part(), part(), part());
    // Digests and lengths that the input cannot know are filled in.
    let named = |text: &[u8], mark: char, of: (Sha256, usize)| {
        let text = String::from_utf8_lossy(text).replace(&format!("${mark}"), &of.0.to_string());
        text.replace(&format!("${}", mark.to_ascii_lowercase()), &of.1.to_string()).into_bytes()
    };
    let put = |bytes: &[u8]| {
        let digest = Sha256::of(bytes);
        fs::write(store.blob_path(digest), bytes).is_ok().then_some((digest, bytes.len()))
    };
    let Some(config) = put(config) else { return };
    let Some(id) = put(&named(manifest, 'C', config)) else { return };
    if fs::write(dir.path().join("index.json"), named(index, 'M', id)).is_err() {
        return;
    }
    within(EACH * data.len() + ROOM, || check(&store, id.0));
});

fn check(store: &Store, id: Sha256) {
    let _ = store.load("a");
    let _ = accepted(store.tags());
    if let Some(snapshot) = accepted(store.load_id(id)) {
        let _ = snapshot.inspect();
        let _ = accepted(snapshot.verify());
        let mut pages = vec![0; snapshot.pages().min(64) * 4096];
        let _ = snapshot.read(0, &mut pages);
        let _ = accepted(snapshot.read_working_set(|_, _| Ok::<(), OpenError>(())));
    }
    let _ = store.gc();
}
