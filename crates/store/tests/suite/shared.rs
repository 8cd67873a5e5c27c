//! A store's directory is not ours alone: other tools keep their things in it, other processes
//! write and collect, and other users may be let in, or not.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{bytes, memory, options, store};
use afresh_store::{SaveError, Sha256, Store, archive};

/// Puts a blob of another tool into the layout; returns its descriptor.
fn put(store: &Store, media_type: &str, text: &str, more: &str) -> String {
    let digest = Sha256::of(text.as_bytes());
    fs::write(store.blob_path(digest), text).unwrap();
    format!(r#"{{"mediaType":"{media_type}","digest":"{digest}","size":{}{more}}}"#, text.len())
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const EMPTY: &str = "application/vnd.oci.empty.v1+json";

/// Adds a container image of two platforms, and an artifact that is attached to `subject`. Returns
/// the number of their blobs.
fn add_foreign(store: &Store, subject: Sha256) -> usize {
    let image = |platform: &str| {
        let layer = put(store, LAYER, &format!("layer of {platform}"), "");
        let config = put(store, CONFIG, &format!(r#"{{"os":"{platform}"}}"#), "");
        let text = format!(
            r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{config},"layers":[{layer}]}}"#
        );
        put(store, MANIFEST, &text, &format!(r#","platform":{{"os":"{platform}"}}"#))
    };
    let (one, two) = (image("linux"), image("plan9"));
    let text = format!(r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{one},{two}]}}"#);
    let name = r#","annotations":{"org.opencontainers.image.ref.name":"app:1"},"data":"e30=""#;
    let image = put(store, INDEX, &text, name);
    let config = put(store, EMPTY, "{}", "");
    let notes = put(store, "text/plain", "a bill of materials", "");
    let text = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","artifactType":"text/sbom","config":{config},"layers":[{notes}],"subject":{{"mediaType":"{MANIFEST}","digest":"{subject}","size":1}}}}"#
    );
    let artifact = put(store, MANIFEST, &text, r#","artifactType":"text/sbom","urls":["x:y"]"#);
    let path = store.root().join("index.json");
    let index = fs::read_to_string(&path).unwrap();
    let index =
        index.replacen("\"manifests\":[", &format!("\"manifests\":[{image},{artifact},"), 1);
    fs::write(path, index).unwrap();
    2 * 3 + 1 + 3
}

#[test]
fn things_of_other_tools_are_kept_to_the_last_field_and_are_no_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let id = store.save("only", &memory(&[1, 2, 3]), &options()).unwrap();
    let foreign = add_foreign(&store, id);
    let names = |store: &Store| -> Vec<String> {
        store.list().unwrap().into_iter().map(|it| it.tag.name).collect()
    };
    assert_eq!(names(&store), ["only"]);
    assert_eq!(store.gc().unwrap().files, 0, "everything is reached");
    assert_eq!(store.load("latest").unwrap().id(), id, "there is one snapshot");
    // A change of names keeps the fields that mean nothing to us.
    store.save("next", &memory(&[4]), &options()).unwrap();
    let index = fs::read_to_string(store.root().join("index.json")).unwrap();
    for field in [r#""data":"e30=""#, r#""urls":["x:y"]"#, "app:1"] {
        assert!(index.contains(field), "{field}: {index}");
    }
    store.load("latest").unwrap_err();
    // The subject of an artifact stays with it.
    store.untag("only").unwrap();
    store.untag("next").unwrap();
    assert_eq!(names(&store), Vec::<String>::new());
    let collected = store.gc().unwrap();
    assert_eq!((collected.files, collected.kept), (3, foreign + 3));
    // A name that another tool had is ours now, and its thing stays.
    store.save("app:1", &memory(&[5]), &options()).unwrap();
    assert_eq!(names(&store), ["app:1"]);
    assert_eq!(store.gc().unwrap().kept, foreign + 3 + 3);
}

#[test]
fn the_only_snapshot_is_the_latest_also_without_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let id = store.save("a", &memory(&[1]), &options()).unwrap();
    let path = store.root().join("index.json");
    let index = fs::read_to_string(&path).unwrap();
    let name = r#","annotations":{"org.opencontainers.image.ref.name":"a"}"#;
    let index = index.replace(name, "");
    // Copied by a tool that keeps neither names nor types of artifacts.
    let index = index.replace(r#","artifactType":"application/vnd.afresh.snapshot.v1""#, "");
    assert!(!index.contains("afresh"), "{index}");
    fs::write(&path, index).unwrap();
    add_foreign(&store, id);
    assert_eq!(store.load("latest").unwrap().id(), id);
    assert!(store.tags().unwrap().is_empty());
}

#[test]
fn a_damaged_manifest_of_anyone_stops_the_collection() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let id = store.save("a", &memory(&[1]), &options()).unwrap();
    add_foreign(&store, id);
    let damaged = fs::read_dir(store.root().join("blobs/sha256"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| fs::read(path).unwrap().windows(9).any(|it| it == b"text/sbom"))
        .unwrap();
    fs::write(&damaged, "{}").unwrap();
    let error = store.gc().unwrap_err().to_string();
    assert!(error.contains("digest"), "{error}");
}

#[test]
fn names_beyond_what_readers_take_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let id = store.save("a", &memory(&[1]), &options()).unwrap();
    let path = store.root().join("index.json");
    let one = fs::read_to_string(&path).unwrap();
    let (head, rest) = one.split_once("\"manifests\":[").unwrap();
    let (descriptor, tail) = rest.rsplit_once(']').unwrap();
    let filler = "x".repeat(100_000);
    let many: Vec<String> = (0..167)
        .map(|n| descriptor.replace("\"a\"", &format!("\"n{n}\",\"filler\":\"{filler}\"")))
        .collect();
    let text = format!("{head}\"manifests\":[{descriptor},{}]{tail}", many.join(","));
    assert!(text.len() < 16 << 20 && text.len() > (16 << 20) - 100_000, "{}", text.len());
    fs::write(&path, &text).unwrap();
    let mut refused = false;
    for n in 0..600 {
        match store.tag(&format!("{n}-{}", "y".repeat(120)), Some(id)) {
            Ok(()) => {}
            Err(error @ SaveError::TooLarge { .. }) => {
                assert!(error.to_string().contains("untag"), "{error}");
                refused = true;
                break;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused, "no limit was met");
    assert_eq!(store.resolve("a").unwrap(), id, "the store is as readable as before");
    let files = |dir: &Path| fs::read_dir(dir).unwrap().count();
    let blobs = store.root().join("blobs/sha256");
    let before = files(&blobs);
    let name = "y".repeat(128);
    let error = store.save(&name, &memory(&[2]), &options()).unwrap_err();
    assert!(matches!(error, SaveError::TooLarge { .. }), "{error}");
    assert_eq!(files(&blobs), before, "a save without room for its name writes no blob");
    // A name that is there needs no room.
    let next = store.save("a", &memory(&[3]), &options()).unwrap();
    assert_eq!(store.resolve("a").unwrap(), next);
    store.untag("n5").unwrap();
    store.tag("room", Some(id)).unwrap();
}

#[test]
fn a_full_stack_of_layers_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut seeds = vec![7; 40];
    store.save("a", &memory(&seeds), &options()).unwrap();
    let mut deepest = 0;
    for step in 0..140u8 {
        let mut delta = options();
        delta.options.parent = Some(store.load("a").unwrap());
        seeds[usize::from(step) % 40] = step;
        // Only this page is said to have changed: the others must come from somewhere.
        delta.options.changed = Some(vec![afresh_sys::PageRange::new(usize::from(step) % 40, 1)]);
        store.save("a", &memory(&seeds), &delta).unwrap();
        deepest = deepest.max(store.load("a").unwrap().layers().len());
    }
    assert_eq!(deepest, 128);
    let last = store.load("a").unwrap();
    assert!(last.layers().len() < 20);
    assert!(bytes(&last) == memory(&seeds).0);
}

#[test]
fn a_collection_is_not_starved_and_no_named_snapshot_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1; 20]), &options()).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..3u8 {
            let (store, stop) = (&store, &stop);
            scope.spawn(move || {
                let mut step = 0u8;
                while !stop.load(Ordering::Relaxed) {
                    step = step.wrapping_add(1);
                    store.save("a", &memory(&[step, writer, step, 9]), &options()).unwrap();
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let snapshot = store.load("a").unwrap();
                    assert!(!bytes(&snapshot).is_empty());
                }
            });
        }
        // While writers hold the lock between them all the time, each of these waits its turn.
        let collected = (0..20).try_for_each(|_| store.gc().map(drop));
        stop.store(true, Ordering::Relaxed);
        collected.unwrap();
    });
    store.gc().unwrap();
    assert_eq!(store.gc().unwrap().kept, 3);
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn saved_files_are_private_unless_the_store_is_shared() {
    let dir = tempfile::tempdir().unwrap();
    // Independent of the umask of this process, which other tests share.
    let place = dir.path().join("some/where");
    let store = store(&place);
    let id = store.save("a", &memory(&[1, 2]), &options()).unwrap();
    let blobs = place.join("blobs/sha256");
    let modes = |store: &Store| {
        [mode(&store.blob_path(id)), mode(&place.join("index.json")), mode(&blobs), mode(&place)]
    };
    assert_eq!(modes(&store), [0o400, 0o600, 0o700, 0o700]);
    let snapshot = store.load("a").unwrap();
    let (file, raw) = (dir.path().join("a.afresh"), dir.path().join("raw"));
    archive::export(&snapshot, &file, None).unwrap();
    snapshot.export_memory(&raw, &mut |_| {}).unwrap();
    assert_eq!([mode(&file), mode(&raw)], [0o400, 0o600]);
    for dir in [&place, &place.join("blobs"), &blobs] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o750)).unwrap();
    }
    let id = store.save("b", &memory(&[3]), &options()).unwrap();
    assert_eq!(mode(&store.blob_path(id)), 0o440);
    assert_eq!(mode(&place.join("index.json")), 0o640);
}
