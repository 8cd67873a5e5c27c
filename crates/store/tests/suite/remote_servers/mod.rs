//! Remotes against real servers: an S3 gateway and an OCI registry, on loopback.

mod clients;
mod collect;
mod encryption;
mod faults;
mod hostile;
mod hostile_objects;
mod kill;
mod latency;
mod login;
mod proxy;
mod retry_budget;
pub(crate) mod servers;
mod stub;
mod tagging;
mod transfer;
mod writers;

use crate::support::{options, page_of, store};
use afresh_store::{MemoryPages, Snapshot, Store};
use afresh_sys::PageRange;

/// Pages that do not compress, from `seed` on.
fn content(seed: u32, pages: u32) -> Vec<u8> {
    (0..pages).flat_map(|page| page_of(seed.wrapping_mul(100_000).wrapping_add(page))).collect()
}

/// A store with a snapshot `a` of a base, a delta, and a working set in pieces.
fn local(dir: &std::path::Path, seed: u32, pages: u32) -> (Store, Snapshot, Vec<u8>) {
    let store = store(dir);
    let mut bytes = content(seed, pages);
    store.save("a", &MemoryPages(bytes.clone()), &options()).unwrap();
    let changed = pages as usize / 3;
    bytes[changed * 4096..][..4096].copy_from_slice(&page_of(seed + 77));
    let mut save = options();
    save.state = seed.to_le_bytes().to_vec();
    save.options.parent = Some(store.load("a").unwrap());
    save.options.working_set =
        (0..pages as usize / 20).map(|n| PageRange::new(n * 20, 3)).collect();
    store.save("a", &MemoryPages(bytes.clone()), &save).unwrap();
    let snapshot = store.load("a").unwrap();
    (store, snapshot, bytes)
}
