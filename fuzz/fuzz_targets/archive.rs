//! Any bytes as an archive: members that make the reader allocate, read outside, or panic must not
//! exist. Checksums of headers and names of blobs, which a fuzzer cannot guess, are made right.
//!
//! The input is a sequence of blocks of 512 bytes. A byte 0xfe where a block begins stands, with
//! the next byte, for that many blocks of zeros: most of an archive is uninteresting pages.
#![no_main]

use std::fs;
use std::ops::Range;
use std::path::Path;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::{BLOCK, accepted, expand, sum_headers};
use afresh_store::{OpenError, Sha256, Store, archive};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of the archive.
const EACH: usize = 64;
/// Memory for buffers: pages of the target, and streams of compressed pages.
const ROOM: usize = 16 << 20;

const BLOBS: &[u8] = b"blobs/sha256/";

/// The blobs: where their name in the header is, and their content.
fn blobs(file: &[u8]) -> Vec<(Range<usize>, Range<usize>)> {
    let mut blobs = Vec::new();
    let mut at = 0;
    while let Some(header) = file.get(at..at + BLOCK) {
        let size = str::from_utf8(&header[124..135]).ok();
        let size = size.and_then(|text| usize::from_str_radix(text, 8).ok()).unwrap_or(0);
        let content = at + BLOCK..(at + BLOCK).saturating_add(size);
        if header.starts_with(BLOBS) && content.end <= file.len() {
            let name = at + BLOBS.len();
            blobs.push((name..name + 64, content.clone()));
        }
        at = content.start.saturating_add(size.div_ceil(BLOCK).saturating_mul(BLOCK));
    }
    blobs
}

/// Gives every blob its digest as name, in its entry and at every mention of the old name. Three
/// times, for the index names the manifest, which names the configuration.
fn rename(file: &mut [u8]) {
    for _ in 0..3 {
        for (name, content) in blobs(file) {
            let (old, new) = (file[name].to_vec(), Sha256::of(&file[content]).hex());
            if old != new.as_bytes() && old.iter().all(u8::is_ascii_hexdigit) {
                let mut at = 0;
                while at + old.len() <= file.len() {
                    if file[at] == old[0] && file[at..at + old.len()] == old[..] {
                        file[at..at + old.len()].copy_from_slice(new.as_bytes());
                    }
                    at += 1;
                }
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut file = expand(data);
    rename(&mut file);
    sum_headers(&mut file);
    file.extend_from_slice(&[0; 2 * BLOCK]);
    let Ok(dir) = tempfile::tempdir() else { return };
    let path = dir.path().join("a");
    let bytes = file.len();
    if fs::write(&path, file).is_err() {
        return;
    }
    within(EACH * bytes + ROOM, || check(dir.path(), &path));
});

fn check(dir: &Path, path: &Path) {
    if let Some(snapshot) = accepted(archive::open(path)) {
        let mut pages = vec![0; snapshot.pages().min(64) * 4096];
        let _ = snapshot.read(0, &mut pages);
        let _ = accepted(snapshot.read_working_set(|_, _| Ok::<(), OpenError>(())));
        let _ = accepted(snapshot.verify());
        let _ = accepted(archive::export(&snapshot, &dir.join("b"), None));
        if let Ok(store) = Store::create(dir.join("s")) {
            let _ = accepted(archive::import(path, &store, "a"));
        }
    }
}
