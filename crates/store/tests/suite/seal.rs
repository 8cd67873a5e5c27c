//! Promises of signatures and sealing.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::support::{PAGE, bytes, guest, memory, options, page, store};
use afresh_pager::{PageSource, SnapshotSource};
use afresh_store::seal::{Access, PublicKey, SealKey, SigningKey};
use afresh_store::{
    CompactOptions, Encoding, LayerError, MemoryPages, OpenError, SaveError, SaveRequest,
    SealError, Snapshot, Store, archive,
};
use afresh_sys::PageRange;
use proptest::prelude::*;

/// Bytes of the trailer, and of a chunk with its tag.
const TRAILER: usize = 128;
const CHUNK: usize = (64 << 10) + 16;

fn seal_error<T: std::fmt::Debug>(result: Result<T, OpenError>) -> SealError {
    match result.unwrap_err() {
        OpenError::Seal(error) => error,
        other => panic!("{other}"),
    }
}

fn trust(key: &SigningKey) -> Access {
    Access::new().trusting([key.public()])
}

fn sealed(key: &SealKey) -> SaveRequest {
    let mut save = options();
    save.options.seal = Some(key.clone());
    save
}

/// Pages that resemble no others.
fn random_pages(count: usize, mut seed: u64) -> MemoryPages {
    let words = (0..count * PAGE / 8).flat_map(|_| {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (seed ^ seed >> 29).to_le_bytes()
    });
    MemoryPages(words.collect())
}

/// Replaces a read-only file.
fn replace(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_snapshot_without_a_trusted_signature_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let (alice, mallory) = (SigningKey::generate().unwrap(), SigningKey::generate().unwrap());
    store.save("a", &memory(&[1, 2]), &options()).unwrap();
    assert_eq!(seal_error(store.load_with("a", &trust(&alice))), SealError::Unsigned);
    assert_eq!(seal_error(store.load_with("a", &Access::new().trusting([]))), SealError::Unsigned);

    store.sign("a", &mallory).unwrap();
    let error = seal_error(store.load_with("a", &trust(&alice)));
    assert_eq!(error, SealError::Untrusted(vec![mallory.public().to_string()]));

    // A second signature; the first stays good, and so does the snapshot for those who demand none.
    let id = store.sign("a", &alice).unwrap();
    for access in [trust(&alice), trust(&mallory), Access::new()] {
        let snapshot = store.load_with("a", &access).unwrap();
        assert_eq!(snapshot.id(), id);
        assert!(bytes(&snapshot) == memory(&[1, 2]).0);
        assert_eq!(snapshot.claimed_signers().len(), 2);
    }
    let both = Access::new().trusting([SigningKey::generate().unwrap().public(), alice.public()]);
    store.load_with("a", &both).unwrap();
    // A new save is unsigned until it is signed.
    let snapshot = store.load("a").unwrap();
    store.compact("b", &snapshot, &CompactOptions::default()).unwrap();
    assert_eq!(seal_error(store.load_with("b", &trust(&alice))), SealError::Unsigned);
    // One layer, one configuration, and a manifest with and one without signatures.
    assert_eq!(store.gc().unwrap().kept, 4);
}

#[test]
fn a_signature_of_another_snapshot_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let alice = SigningKey::generate().unwrap();
    let mut save = options();
    save.options.sign = Some(alice.clone());
    let good = store.save("good", &memory(&[1]), &save).unwrap();
    let bad = store.save("bad", &memory(&[2]), &options()).unwrap();
    let read = |id| fs::read_to_string(store.blob_path(id)).unwrap();
    let at = |text: &str| text.find(",\"annotations\"").unwrap();
    let (good, bad) = (read(good), read(bad));
    let forged = format!("{}{}", &bad[..bad.len() - 1], &good[at(&good)..]);
    let id = afresh_store::Sha256::of(forged.as_bytes());
    fs::write(store.blob_path(id), forged).unwrap();
    store.tag("forged", Some(id)).unwrap();
    let error = seal_error(store.load_with("forged", &trust(&alice)));
    assert_eq!(error, SealError::Signature(alice.public().to_string()));
    // A reader without demands gets the snapshot as it is.
    assert!(bytes(&store.load("forged").unwrap()) == memory(&[2]).0);
}

#[test]
fn a_signature_is_verified_before_anything_else_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let id = store.save("a", &memory(&[1]), &options()).unwrap();
    for entry in fs::read_dir(dir.path().join("blobs/sha256")).unwrap() {
        let path = entry.unwrap().path();
        if path != store.blob_path(id) {
            replace(&path, b"hostile");
        }
    }
    let alice = SigningKey::generate().unwrap();
    assert_eq!(seal_error(store.load_with("a", &trust(&alice))), SealError::Unsigned);
}

#[test]
fn a_signature_travels_with_the_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let alice = SigningKey::generate().unwrap();
    let path = dir.path().join("a.afresh");
    archive::save(&path, None, &memory(&[1]), &options()).unwrap();
    assert_eq!(seal_error(archive::open_with(&path, &trust(&alice))), SealError::Unsigned);
    let signed = archive::open(&path).unwrap().signed(&alice).unwrap();
    archive::export(&signed, &path, None).unwrap();
    assert_eq!(archive::open_with(&path, &trust(&alice)).unwrap().id(), signed.id());
    let store = store(&dir.path().join("s"));
    archive::import(&path, &store, "x").unwrap();
    assert!(bytes(&store.load_with("x", &trust(&alice)).unwrap()) == memory(&[1]).0);
}

#[test]
fn keys_are_kept_in_files_that_only_their_owner_reads() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (sign, seal) = (SigningKey::generate().unwrap(), SealKey::generate().unwrap());
    sign.create_file(&at("sign")).unwrap();
    seal.create_file(&at("seal")).unwrap();
    assert_eq!(fs::metadata(at("seal")).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(SigningKey::from_file(&at("sign")).unwrap().public(), sign.public());
    assert!(SealKey::from_file(&at("seal")).unwrap() == seal);
    assert!(
        SigningKey::from_file(&at("seal")).is_err() && SealKey::from_file(&at("sign")).is_err()
    );
    assert!(
        matches!(seal.create_file(&at("seal")), Err(SaveError::Io { .. })),
        "never overwritten"
    );
    fs::set_permissions(at("seal"), PermissionsExt::from_mode(0o640)).unwrap();
    assert_eq!(seal_error(SealKey::from_file(&at("seal"))), SealError::KeyMode);

    let other = SigningKey::generate().unwrap().public();
    fs::write(at("public"), format!("# of two people\n{}\n\n  {other}\n", sign.public())).unwrap();
    assert_eq!(PublicKey::from_file(&at("public")).unwrap(), [sign.public(), other]);
    for bad in ["", "# none\n", "afresh-public-key-v1:12", "afresh-seal-key-v1:00"] {
        fs::write(at("public"), bad).unwrap();
        assert!(matches!(seal_error(PublicKey::from_file(&at("public"))), SealError::Key(_)));
    }
    // Secrets are not printed.
    let secret = fs::read_to_string(at("sign")).unwrap();
    let digits = secret.trim().rsplit(':').next().unwrap();
    assert!(!format!("{sign:?} {seal:?}").contains(digits));
}

/// Base, delta with a working set, and a compacted copy, in a store and in archives.
fn sealed_files(dir: &Path, key: &SealKey, content: &MemoryPages, encoding: Encoding) -> Store {
    let store = store(&dir.join("store"));
    let mut save = sealed(key);
    save.options.encoding = encoding;
    let mut base = content.clone();
    base.0[5 * PAGE..6 * PAGE].fill(0);
    store.save("base", &base, &save).unwrap();
    let access = Access::new().with_key(key.clone());
    save.options.parent = Some(store.load_with("base", &access).unwrap());
    // The key of the parent is taken.
    save.options.seal = None;
    store.save("delta", content, &save).unwrap();
    let set = [PageRange::new(3, 4)];
    store.set_working_set("delta", &store.load_with("delta", &access).unwrap(), &set).unwrap();
    let delta = store.load_with("delta", &access).unwrap();
    store.compact("flat", &delta, &CompactOptions { encoding, working_set: true }).unwrap();
    archive::export(&delta, &dir.join("export.afresh"), Some("delta")).unwrap();
    save.options.parent = None;
    save.options.seal = Some(key.clone());
    archive::save(&dir.join("save.afresh"), None, content, &save).unwrap();
    store
}

fn all_files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { all_files(&path, out) } else { out.push(path) }
    }
}

#[test]
fn nothing_of_a_sealed_snapshot_is_found_in_its_files() {
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let key = SealKey::generate().unwrap();
        let mut content = random_pages(40, 7);
        // Something that compresses, too.
        content.0[..2 * PAGE].fill(b'c');
        let access = Access::new().with_key(key.clone());
        let store = sealed_files(dir.path(), &key, &content, encoding);
        for name in ["delta", "flat"] {
            let snapshot = store.load_with(name, &access).unwrap();
            assert!(bytes(&snapshot) == content.0);
            assert_eq!(snapshot.working_set(), [PageRange::new(3, 4)]);
            assert_eq!((snapshot.state(), snapshot.guest()), (b"registers".as_slice(), &guest()));
            snapshot.verify().unwrap();
            let mut last = (0, 1);
            snapshot.check(&mut |done, all| last = (done, all)).unwrap();
            assert_eq!(last.0, last.1);
        }
        for name in ["export.afresh", "save.afresh"] {
            let snapshot = archive::open_with(&dir.path().join(name), &access).unwrap();
            assert!(bytes(&snapshot) == content.0);
        }
        // 16 bytes anywhere in a page, the guest, the state as it would be in the configuration.
        let mut canaries: HashSet<[u8; 16]> =
            content.0.chunks_exact(16).map(|part| part.try_into().unwrap()).collect();
        for word in ["\"module\":\"blake3:feed\"", "\"state\":\"cmVnaXN0ZXJz\""] {
            canaries.insert(word.as_bytes()[..16].try_into().unwrap());
        }
        assert!(canaries.len() > 9000);
        let mut files = Vec::new();
        all_files(dir.path(), &mut files);
        assert!(files.len() > 12);
        for path in files {
            let stored = fs::read(&path).unwrap();
            let found = stored.windows(16).position(|part| canaries.contains(part));
            assert_eq!(found, None, "{}", path.display());
        }
    }
}

#[test]
fn a_sealed_snapshot_opens_with_its_key_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (key, other) = (SealKey::generate().unwrap(), SealKey::generate().unwrap());
    let path = dir.path().join("a.afresh");
    archive::save(&path, None, &memory(&[1]), &sealed(&key)).unwrap();
    assert_eq!(seal_error(archive::open(&path)), SealError::Locked);
    let wrong = Access::new().with_key(other.clone());
    let error = seal_error(archive::open_with(&path, &wrong));
    assert!(matches!(error, SealError::WrongKey { .. }), "{error}");
    // It can be carried about without the key.
    let store = store(&dir.path().join("s"));
    archive::import(&path, &store, "a").unwrap();
    assert_eq!(seal_error(store.load("a")), SealError::Locked);
    let access = Access::new().with_key(key.clone());
    let snapshot = store.load_with("a", &access).unwrap();
    assert!(bytes(&snapshot) == memory(&[1]).0);
    assert_eq!(store.gc().unwrap().files, 0);

    // Signed and sealed: each is demanded by itself.
    let alice = SigningKey::generate().unwrap();
    store.sign("a", &alice).unwrap();
    assert_eq!(seal_error(store.load_with("a", &trust(&alice))), SealError::Locked);
    store.load_with("a", &trust(&alice).with_key(key.clone())).unwrap();

    // A stack has one key.
    let mut save = sealed(&other);
    save.options.parent = Some(snapshot);
    let error = store.save("b", &memory(&[2]), &save).unwrap_err();
    assert!(matches!(error, SaveError::Seal(SealError::Mixed)), "{error}");
    store.save("plain", &memory(&[3]), &options()).unwrap();
    save.options.parent = Some(store.load("plain").unwrap());
    // A snapshot made without the key is not accepted.
    let access = Access::new().with_key(key);
    assert_eq!(seal_error(store.load_with("plain", &access)), SealError::NotSealed);
    let error = store.save("b", &memory(&[2]), &save).unwrap_err();
    assert!(matches!(error, SaveError::Seal(SealError::Mixed)), "{error}");
}

#[test]
fn sealed_pages_are_read_and_never_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let key = SealKey::generate().unwrap();
    let content = random_pages(100, 3);
    let path = dir.path().join("a.afresh");
    archive::save(&path, None, &content, &sealed(&key)).unwrap();
    let snapshot = archive::open_with(&path, &Access::new().with_key(key)).unwrap();
    let source = SnapshotSource::checked(snapshot).unwrap();
    assert!(source.pieces().is_none());
    let mut out = vec![0; 37 * PAGE];
    // SAFETY: the vector is as long as the pages, and has no other user.
    unsafe { source.read(29, out.as_mut_ptr(), 37) }.unwrap();
    assert!(out == content.0[29 * PAGE..66 * PAGE]);
}

#[test]
fn the_same_pages_sealed_twice_share_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let key = SealKey::generate().unwrap();
    let mut seen = HashSet::new();
    for name in ["a", "b"] {
        store.save(name, &random_pages(3, 1), &sealed(&key)).unwrap();
        let access = Access::new().with_key(key.clone());
        let digest = store.load_with(name, &access).unwrap().layers()[0].digest();
        let stored = fs::read(store.blob_path(digest)).unwrap();
        for part in stored[..stored.len() - TRAILER].chunks_exact(16) {
            assert!(seen.insert(part.to_vec()));
        }
    }
}

/// Contents of a snapshot: pages, working set and state, or the first error.
fn read_all(snapshot: Result<Snapshot, OpenError>) -> Result<(Vec<u8>, Vec<u8>), OpenError> {
    let snapshot = snapshot?;
    let mut out = vec![0; snapshot.pages() * PAGE];
    snapshot.read(0, &mut out)?;
    snapshot.read_working_set(|_, _| Ok::<(), OpenError>(()))?;
    Ok((out, snapshot.state().to_vec()))
}

#[test]
fn a_bit_flip_anywhere_in_a_sealed_snapshot_is_noticed_before_use() {
    let dir = tempfile::tempdir().unwrap();
    let key = SealKey::generate().unwrap();
    let access = Access::new().with_key(key.clone());
    let path = dir.path().join("a.afresh");
    let mut save = sealed(&key);
    save.options.working_set = vec![PageRange::new(1, 1)];
    let content = memory(&[1, 2, 0, 3]);
    archive::save(&path, None, &content, &save).unwrap();
    let original = fs::read(&path).unwrap();
    let mut refused = 0;
    for at in (0..original.len()).step_by(11) {
        let mut damaged = original.clone();
        damaged[at] ^= 1 << (at % 8);
        replace(&path, &damaged);
        match read_all(archive::open_with(&path, &access)) {
            Err(_) => refused += 1,
            Ok(found) => assert!(found == (content.0.clone(), b"registers".to_vec()), "{at}"),
        }
    }
    assert!(refused > 1500, "only {refused} flips were refused");
}

#[test]
fn chunks_that_were_swapped_replayed_or_cut_off_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let key = SealKey::generate().unwrap();
    let access = Access::new().with_key(key.clone());
    // Two layers of the same shape, each of three whole groups.
    let contents = [random_pages(48, 1), random_pages(48, 2)];
    let paths = [0, 1].map(|n| {
        let name = format!("s{n}");
        store.save(&name, &contents[n], &sealed(&key)).unwrap();
        store.blob_path(store.load_with(&name, &access).unwrap().layers()[0].digest())
    });
    let [first, second] = [0, 1].map(|n| fs::read(&paths[n]).unwrap());
    assert_eq!(first.len(), second.len());
    let chunk = |n: usize| n * CHUNK..(n + 1) * CHUNK;
    let refused = |stored: &[u8]| {
        replace(&paths[0], stored);
        read_all(store.load_with("s0", &access)).unwrap_err()
    };

    let mut swapped = first.clone();
    swapped[chunk(0)].copy_from_slice(&first[chunk(1)]);
    swapped[chunk(1)].copy_from_slice(&first[chunk(0)]);
    let error = refused(&swapped).to_string();
    assert!(error.contains("chunk 0"), "{error}");
    assert!(store.load_with("s0", &access).unwrap().check(&mut |_, _| {}).is_err());

    let mut replayed = first.clone();
    replayed[chunk(1)].copy_from_slice(&second[chunk(1)]);
    let error = refused(&replayed).to_string();
    assert!(error.contains("chunk 1"), "{error}");

    // The whole of another layer, of the same key: authentic, but not what the configuration names.
    let error = refused(&second);
    assert!(matches!(error, OpenError::Layer { source: LayerError::Root, .. }), "{error}");
    // The trailer of another layer, whose key is another.
    let mut mixed = first.clone();
    let trailer = first.len() - TRAILER;
    mixed[trailer..].copy_from_slice(&second[trailer..]);
    refused(&mixed);
    for len in [0, TRAILER - 1, TRAILER, TRAILER + 15, TRAILER + CHUNK, first.len() - 1] {
        refused(&first[..len]);
    }
    replace(&paths[0], &first);
    assert!(read_all(store.load_with("s0", &access)).unwrap().0 == contents[0].0);
}

#[test]
fn a_blob_cut_at_a_chunk_is_refused_even_if_everything_else_fits() {
    // As above, but the manifest is made to agree: the last chunk says that it is the last.
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let key = SealKey::generate().unwrap();
    let access = Access::new().with_key(key.clone());
    let id = store.save("a", &random_pages(48, 1), &sealed(&key)).unwrap();
    let digest = store.load_with("a", &access).unwrap().layers()[0].digest();
    let stored = fs::read(store.blob_path(digest)).unwrap();
    let cut = [&stored[..3 * CHUNK], &stored[stored.len() - TRAILER..]].concat();
    let cut_digest = afresh_store::Sha256::of(&cut);
    fs::write(store.blob_path(cut_digest), &cut).unwrap();
    let manifest = fs::read_to_string(store.blob_path(id)).unwrap();
    let manifest = manifest
        .replace(&digest.to_string(), &cut_digest.to_string())
        .replace(&format!("\"size\":{}", stored.len()), &format!("\"size\":{}", cut.len()));
    let id = afresh_store::Sha256::of(manifest.as_bytes());
    fs::write(store.blob_path(id), manifest).unwrap();
    store.tag("cut", Some(id)).unwrap();
    let error = store.load_with("cut", &access).unwrap_err().to_string();
    assert!(error.contains("chunk 2"), "{error}");
}

/// `v1-sealed.afresh` is never regenerated. A change that makes this test fail needs a new version.
#[test]
fn a_sealed_and_signed_archive_of_version_1_still_opens() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1-sealed.afresh");
    let public = include_str!("../golden/v1-sealed.public").trim().parse::<PublicKey>().unwrap();
    let key = SealKey::from_bytes([7; 32]).unwrap();
    let access = Access::new().trusting([public]).with_key(key);
    let snapshot = archive::open_with(&path, &access).unwrap();
    assert!(bytes(&snapshot) == memory(&[1, 0, 2]).0);
    assert_eq!(snapshot.state(), b"registers");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Sealed contents, in any stack and encoding, read back whole and in parts.
    #[test]
    fn sealed_contents_are_read_back(
        steps in prop::collection::vec(
            (prop::collection::vec(prop_oneof![2 => Just(0u8), 3 => any::<u8>()], 1..70), any::<bool>()),
            1..4,
        ),
        probe in (0..70usize, 1..20usize),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let key = SealKey::generate().unwrap();
        let access = Access::new().with_key(key.clone());
        let mut parent = None;
        let mut content: Vec<u8> = Vec::new();
        for (seeds, compress) in &steps {
            content.resize(content.len().max(seeds.len() * PAGE), 0);
            for (n, seed) in seeds.iter().enumerate() {
                content[n * PAGE..(n + 1) * PAGE].copy_from_slice(&page(*seed));
            }
            let mut save = sealed(&key);
            save.options.encoding = if *compress { Encoding::Zstd } else { Encoding::Raw };
            save.options.parent = parent.take();
            store.save("x", &MemoryPages(content.clone()), &save).unwrap();
            parent = Some(store.load_with("x", &access).unwrap());
        }
        let snapshot = store.load_with("x", &access).unwrap();
        let pages = snapshot.pages();
        let (first, len) = (probe.0 % pages, probe.1.min(pages - probe.0 % pages));
        let mut part = vec![0; len * PAGE];
        snapshot.read(first, &mut part).unwrap();
        prop_assert!(part == content[first * PAGE..(first + len) * PAGE]);
        prop_assert!(bytes(&snapshot) == content);
        let path = dir.path().join("x.afresh");
        archive::export(&snapshot, &path, None).unwrap();
        prop_assert!(bytes(&archive::open_with(&path, &access).unwrap()) == content);
    }
}

#[test]
fn checking_a_sealed_snapshot_covers_the_bytes_as_they_are_stored() {
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let key = SealKey::generate().unwrap();
        let mut save = sealed(&key);
        save.options.encoding = encoding;
        store.save("a", &random_pages(300, 7), &save).unwrap();
        let snapshot = store.load_with("a", &Access::new().with_key(key.clone())).unwrap();
        let mut last = (0, 0);
        snapshot.check(&mut |done, total| last = (done, total)).unwrap();
        assert_eq!(last.0, last.1);
    }
}
