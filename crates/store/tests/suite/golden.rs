//! Version 1, frozen: files written by the first release open for ever, and what is written now is
//! byte for byte what was written then.
//!
//! `tests/golden/v1` is never regenerated. A change that makes this test fail needs a new version.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{bytes, guest, memory, options, store};
use afresh_store::{Encoding, OpenError, Store, diff};
use afresh_sys::PageRange;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1")
}

/// The snapshots of the golden layout: `base`, `delta` on it with a working set, and `zstd`.
fn write(store: &Store) {
    let mut save = options();
    store.save("base", &memory(&[1, 0, 2, 1]), &save).unwrap();
    save.options.parent = Some(store.load("base").unwrap());
    save.state = b"later".to_vec();
    save.options.working_set = vec![PageRange::new(0, 2)];
    store.save("delta", &memory(&[1, 3, 0, 1, 0]), &save).unwrap();
    let mut save = options();
    save.options.encoding = Encoding::Zstd;
    store.save("zstd", &memory(&[4, 0, 4, 5]), &save).unwrap();
}

fn files(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    for name in ["oci-layout", "index.json"] {
        out.insert(name.to_owned(), fs::read(root.join(name)).unwrap());
    }
    for entry in fs::read_dir(root.join("blobs/sha256")).unwrap() {
        let entry = entry.unwrap();
        out.insert(entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    }
    out
}

#[test]
fn snapshots_of_version_1_still_open() {
    let store = Store::open(golden()).unwrap();
    let expected: [(&str, &[u8], &[u8]); 3] = [
        ("base", &[1, 0, 2, 1], b"registers"),
        ("delta", &[1, 3, 0, 1, 0], b"later"),
        ("zstd", &[4, 0, 4, 5], b"registers"),
    ];
    for (name, seeds, state) in expected {
        let snapshot = store.load(name).unwrap();
        snapshot.check_guest(&guest()).unwrap();
        snapshot.verify().unwrap();
        assert!(bytes(&snapshot) == memory(seeds).0, "{name}");
        assert_eq!(snapshot.state(), state);
    }
    let (base, delta) = (store.load("base").unwrap(), store.load("delta").unwrap());
    assert_eq!(delta.parent(), Some(base.id().to_string().as_str()));
    assert_eq!(delta.working_set(), [PageRange::new(0, 2)]);
    assert_eq!(diff(&base, &delta).unwrap().pages, [PageRange::new(1, 2)]);
    delta.read_working_set(|_, _| Ok::<(), OpenError>(())).unwrap();
}

#[test]
fn the_format_is_written_as_in_its_golden_files() {
    let dir = tempfile::tempdir().unwrap();
    write(&store(dir.path()));
    let (now, then) = (files(dir.path()), files(&golden()));
    // A later zstd may compress differently; the snapshots without it must be the same to the byte.
    let index = String::from_utf8(now["index.json"].clone()).unwrap();
    for name in ["base", "delta"] {
        let store = Store::open(dir.path()).unwrap();
        let id = store.resolve(name).unwrap();
        assert_eq!(Store::open(golden()).unwrap().resolve(name).unwrap(), id, "{index}");
        let manifest = now[&id.hex()].clone();
        assert_eq!(then[&id.hex()], manifest);
        let manifest = String::from_utf8(manifest).unwrap();
        let blobs: Vec<_> = manifest.match_indices("sha256:").map(|(at, _)| at + 7).collect();
        assert!(blobs.len() >= 2);
        for at in blobs {
            let blob = &manifest[at..at + 64];
            assert!(now[blob] == then[blob], "{blob}");
        }
    }
}
