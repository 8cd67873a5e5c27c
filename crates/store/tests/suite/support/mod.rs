//! Common parts of the store's tests.
#![allow(dead_code, reason = "without features some of it is unused")]

pub(crate) mod forge;
#[cfg(feature = "remote")]
pub(crate) mod listening;
#[cfg(feature = "remote")]
pub(crate) mod objects;
pub(crate) mod small_disk;

use std::path::Path;

use afresh_store::{GuestBuild, MemoryPages, SaveRequest, Snapshot, Store};

pub(crate) const PAGE: usize = 4096;

pub(crate) fn guest() -> GuestBuild {
    GuestBuild {
        kind: "arena".into(),
        module: "blake3:feed".into(),
        engine: "afresh 0.1.0".into(),
        cpu: vec!["avx2".into()],
    }
}

pub(crate) fn options() -> SaveRequest {
    let mut options = SaveRequest::new(guest());
    options.state = b"registers".to_vec();
    options
}

/// A page whose bytes follow from `seed`; zero for zero.
pub(crate) fn page(seed: u8) -> Vec<u8> {
    (0..PAGE).map(|n| seed.wrapping_mul((n / 7 + 1) as u8)).collect()
}

pub(crate) fn memory(seeds: &[u8]) -> MemoryPages {
    MemoryPages(seeds.iter().flat_map(|seed| page(*seed)).collect())
}

pub(crate) fn bytes(snapshot: &Snapshot) -> Vec<u8> {
    let mut out = vec![0; snapshot.pages() * PAGE];
    snapshot.read(0, &mut out).unwrap();
    out
}

pub(crate) fn store(dir: &Path) -> Store {
    Store::create(dir).unwrap()
}

/// A page that does not compress.
pub(crate) fn page_of(seed: u32) -> Vec<u8> {
    let mut state = u64::from(seed) * 2 + 1;
    (0..PAGE / 8)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            (state ^ state >> 29).to_le_bytes()
        })
        .collect()
}
