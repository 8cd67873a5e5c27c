//! Any bytes as the JSON files of a store: index, manifest and configuration are refused or open.
#![no_main]

use std::fs;

use afresh_store::{Sha256, Store};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut parts = data.split(|byte| *byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let Ok(dir) = tempfile::tempdir() else { return };
    let Ok(store) = Store::create(dir.path()) else { return };
    let (config, manifest, index) = (part(), part(), part());
    // Digests that the input can not know are filled in, in place of `C` and `M`.
    let named = |text: &[u8], mark: &str, digest: Sha256| {
        String::from_utf8_lossy(text).replace(mark, &digest.to_string()).into_bytes()
    };
    let put = |bytes: &[u8]| {
        let digest = Sha256::of(bytes);
        fs::write(store.blob_path(digest), bytes).is_ok().then_some(digest)
    };
    let Some(config) = put(config) else { return };
    let Some(id) = put(&named(manifest, "$C", config)) else { return };
    if fs::write(dir.path().join("index.json"), named(index, "$M", id)).is_err() {
        return;
    }
    let _ = store.tags();
    let _ = store.load("a");
    if let Ok(snapshot) = store.load_id(id) {
        let _ = snapshot.inspect();
        let _ = snapshot.verify();
    }
    let _ = store.gc();
});
