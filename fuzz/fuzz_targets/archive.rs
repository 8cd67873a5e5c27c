//! Any bytes as an archive: members that make the reader allocate, read outside, or panic must not
//! exist. Checksums, which a fuzzer can not guess, are made right where there is a header.
#![no_main]

use std::fs;

use afresh_store::{Store, archive};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut file = data.to_vec();
    for block in file.chunks_exact_mut(512) {
        if block[257..262] == *b"ustar" {
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
    file.extend_from_slice(&[0; 1024]);
    let Ok(dir) = tempfile::tempdir() else { return };
    let path = dir.path().join("a");
    if fs::write(&path, file).is_err() {
        return;
    }
    if let Ok(snapshot) = archive::open(&path) {
        let _ = snapshot.verify();
        let _ = archive::export(&snapshot, &dir.path().join("b"), None);
    }
    if let Ok(store) = Store::create(dir.path().join("s")) {
        let _ = archive::import(&path, &store, "a");
    }
});
