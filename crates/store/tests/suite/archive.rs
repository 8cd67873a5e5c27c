//! Promises of single-file snapshots.

use crate::support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{PAGE, bytes, guest, memory, options, page, store};
use afresh_pager::{PageSource, SnapshotSource};
use afresh_store::archive::{self, ArchiveError};
use afresh_store::{
    Encoding, MemoryPages, OpenError, SaveError, SaveRequest, Snapshot, Store, diff,
};
use afresh_sys::PageRange;
use proptest::prelude::*;

const BLOCK: usize = 512;

/// A tar header, written without code of the crate.
fn header(name: &[u8], size: &str, kind: u8) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    block[..name.len()].copy_from_slice(name);
    block[100..107].copy_from_slice(b"0000644");
    block[124..124 + size.len()].copy_from_slice(size.as_bytes());
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    sum(&mut block);
    block
}

/// Makes the checksum of a header right.
fn sum(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block[..BLOCK].iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn member(name: &str, kind: u8, content: &[u8]) -> Vec<u8> {
    let mut out = header(name.as_bytes(), &format!("{:011o}", content.len()), kind);
    out.extend_from_slice(content);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    out
}

fn archive_error(path: &Path) -> ArchiveError {
    match archive::open(path).unwrap_err() {
        OpenError::Archive { source, .. } => source,
        other => panic!("{other}"),
    }
}

/// A base and a delta with a working set, in one file.
fn stack(dir: &Path, encoding: Encoding) -> (PathBuf, MemoryPages) {
    let path = dir.join("guest.afresh");
    let mut save = options();
    save.options.encoding = encoding;
    archive::save(&path, None, &memory(&[1, 0, 2]), &save).unwrap();
    save.options.parent = Some(archive::open(&path).unwrap());
    save.options.working_set = vec![PageRange::new(1, 1)];
    let content = memory(&[1, 7, 2, 3]);
    archive::save(&path, Some("warm"), &content, &save).unwrap();
    (path, content)
}

#[test]
fn a_snapshot_in_one_file_opens_as_it_was_saved() {
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let (path, content) = stack(dir.path(), encoding);
        let snapshot = archive::open(&path).unwrap();
        snapshot.check_guest(&guest()).unwrap();
        snapshot.verify().unwrap();
        snapshot.check(&mut |_, _| {}).unwrap();
        assert!(bytes(&snapshot) == content.0);
        assert_eq!((snapshot.layers().len(), snapshot.state()), (2, b"registers".as_slice()));
        assert_eq!(snapshot.working_set(), [PageRange::new(1, 1)]);
        // Nothing but the archive is left.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn save_export_and_import_agree_to_the_byte() {
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let (path, content) = stack(dir.path(), encoding);
        let store = store(&dir.path().join("store"));
        let id = archive::import(&path, &store, "b").unwrap();
        assert_eq!(id, archive::open(&path).unwrap().id());
        assert!(bytes(&store.load("b").unwrap()) == content.0);
        let again = dir.path().join("again.afresh");
        archive::export(&store.load("b").unwrap(), &again, Some("warm")).unwrap();
        assert!(fs::read(&path).unwrap() == fs::read(&again).unwrap());
        // Over itself, while it is open.
        let open = archive::open(&again).unwrap();
        archive::export(&open, &again, None).unwrap();
        assert!(bytes(&open) == content.0 && bytes(&archive::open(&again).unwrap()) == content.0);
        // A delta in the store on a snapshot that came from elsewhere.
        let mut save = options();
        save.options.parent = Some(open);
        let other = support::store(&dir.path().join("other"));
        other.save("c", &memory(&[1, 7, 9, 3]), &save).unwrap();
        assert!(bytes(&other.load("c").unwrap()) == memory(&[1, 7, 9, 3]).0);
    }
}

#[test]
fn tar_reads_the_archive_and_what_it_extracts_is_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let (path, content) = stack(dir.path(), Encoding::Raw);
    let tar = |args: &[&str]| {
        let out = Command::new("tar").args(args).arg("-f").arg(&path).output().unwrap();
        assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    };
    let list = tar(&["-t"]);
    assert!(list.starts_with("oci-layout\n") && list.ends_with("index.json\n"), "{list}");
    assert_eq!(list.lines().filter(|name| name.starts_with("blobs/sha256/")).count(), 5);
    let to = dir.path().join("out");
    fs::create_dir(&to).unwrap();
    tar(&["-x", "-C", to.to_str().unwrap()]);
    let store = Store::open(&to).unwrap();
    assert!(bytes(&store.load("warm").unwrap()) == content.0);

    // And the other way: what tar packs opens, be it with directories and `./`, or extended
    // headers.
    for format in ["ustar", "gnu", "pax"] {
        let packed = dir.path().join(format);
        let status = Command::new("tar")
            .args(["-c", "--format", format, "-C", to.to_str().unwrap(), "-f"])
            .args([packed.as_os_str(), ".".as_ref()])
            .status()
            .unwrap();
        assert!(status.success());
        assert!(bytes(&archive::open(&packed).unwrap()) == content.0, "{format}");
        // Unaligned pages are read, not mapped.
        let source = SnapshotSource::checked(archive::open(&packed).unwrap()).unwrap();
        let aligned = archive::open(&packed).unwrap().layers().iter().all(|l| l.file().is_some());
        assert_eq!(source.pieces().is_some(), aligned);
    }
}

/// The memory as mappings of the pieces would show it.
fn mapped(snapshot: &Snapshot) -> Vec<u8> {
    let mut out = vec![0; snapshot.pages() * PAGE];
    let source = SnapshotSource::checked(snapshot.clone()).unwrap();
    for piece in source.pieces().unwrap() {
        let part = &mut out[piece.pages.byte_start()..][..piece.pages.byte_len()];
        if let Some((file, first)) = piece.file {
            let file = fs::File::from(file.try_clone_to_owned().unwrap());
            file.read_exact_at(part, (first * PAGE) as u64).unwrap();
        }
    }
    out
}

#[test]
fn raw_pages_are_aligned_so_that_the_archive_can_be_mapped() {
    let dir = tempfile::tempdir().unwrap();
    let (path, content) = stack(dir.path(), Encoding::Raw);
    assert!(mapped(&archive::open(&path).unwrap()) == content.0);

    // Large layers are aligned to huge pages, without taking space for it.
    let large: Vec<u8> = (0..5000u32).flat_map(|n| page((n % 251) as u8)).collect();
    archive::save(&path, None, &MemoryPages(large.clone()), &options()).unwrap();
    let snapshot = archive::open(&path).unwrap();
    let (_, first) = snapshot.layers()[0].file().unwrap();
    assert_eq!((first % 512, first > 0), (0, true));
    assert!(mapped(&snapshot) == large);
    let meta = fs::metadata(&path).unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&meta) * 512;
    assert!(blocks < 1_500_000, "250 different pages take {blocks} bytes");
}

#[test]
fn opening_reads_no_page() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let mut random = 1u64;
    let content: Vec<u8> = (0..(64 << 20) / 8)
        .flat_map(|_| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            random.to_le_bytes()
        })
        .collect();
    archive::save(&path, None, &MemoryPages(content), &options()).unwrap();
    // Every page is wrong now, which is noticed on first use.
    let snapshot = archive::open(&path).unwrap();
    let (_, first) = snapshot.layers()[0].file().unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&vec![0xee; 64 << 20], first * PAGE as u64).unwrap();
    let snapshot = archive::open(&path).unwrap();
    let error = snapshot.read(9, &mut [0; PAGE]).unwrap_err();
    assert!(matches!(error, OpenError::Layer { .. }), "{error}");
    assert!(archive::export(&snapshot, &dir.path().join("b"), None).is_err());
    let error = archive::import(&path, &store(&dir.path().join("s")), "x").unwrap_err();
    assert!(matches!(error, SaveError::Open(OpenError::Digest { .. })), "{error}");
}

/// Flips every bit of one byte in turn, everywhere: either an error comes, or what is read is what
/// was saved.
#[test]
fn a_bit_flip_anywhere_is_noticed_before_use() {
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let (path, content) = stack(dir.path(), encoding);
        let id = archive::open(&path).unwrap().id();
        let original = fs::read(&path).unwrap();
        let damaged_path = dir.path().join("damaged");
        let mut refused = 0;
        for at in (0..original.len()).step_by(7) {
            let mut damaged = original.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(&damaged_path, &damaged).unwrap();
            let outcome = archive::open(&damaged_path).and_then(|snapshot| {
                let mut out = vec![0; snapshot.pages() * PAGE];
                snapshot.read(0, &mut out)?;
                snapshot.read_working_set(|range, page| {
                    assert_eq!(page, &content.0[range.byte_start()..][..range.byte_len()]);
                    Ok::<(), OpenError>(())
                })?;
                Ok((out, snapshot.state().to_vec(), snapshot.id()))
            });
            match outcome {
                Err(_) => refused += 1,
                Ok(found) => assert!(found == (content.0.clone(), b"registers".into(), id), "{at}"),
            }
        }
        assert!(refused > 500, "only {refused} flips were refused");
    }
}

#[test]
fn an_archive_cut_short_anywhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = stack(dir.path(), Encoding::Zstd);
    let whole = fs::read(&path).unwrap();
    let cut = dir.path().join("cut");
    for len in (0..whole.len() - 1024).step_by(37).chain((0..whole.len() - 1024).step_by(512)) {
        fs::write(&cut, &whole[..len]).unwrap();
        assert!(matches!(archive_error(&cut), ArchiveError::Truncated(_)), "cut to {len}");
    }
}

#[test]
fn hostile_members_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hostile");
    let open = |members: &[Vec<u8>]| {
        let mut all = members.concat();
        all.resize(all.len() + 2 * BLOCK, 0);
        fs::write(&path, all).unwrap();
        archive_error(&path)
    };
    let layout = member("oci-layout", b'0', br#"{"imageLayoutVersion":"1.0.0"}"#);
    let index = member("index.json", b'0', br#"{"schemaVersion":2,"manifests":[]}"#);

    for name in ["/etc/passwd", "../../x", "a/../../x", "blobs//x", "./../x", "a/./b"] {
        let error = open(&[layout.clone(), member(name, b'0', b"")]);
        assert_eq!(error, ArchiveError::Name { at: 1024, name: name.to_owned() });
    }
    assert!(matches!(open(&[member("\u{fffd}x", b'0', b"")]), ArchiveError::Missing(_)));
    let bad_utf8 = header(b"\xff\xfe", "00000000000", b'0');
    assert!(matches!(open(&[bad_utf8]), ArchiveError::Name { .. }));
    // Hard and symbolic links, devices, fifos, sparse files, long names.
    for kind in *b"12346SLKDVM7" {
        let error = open(&[layout.clone(), member("index.json", kind, b"")]);
        assert_eq!(error, ArchiveError::Kind { at: 1024, kind: char::from(kind) });
    }
    let error = open(&[layout.clone(), index.clone(), member("./index.json", b'0', b"{}")]);
    assert_eq!(error, ArchiveError::Duplicate("index.json".into()));
    let error = open(&[layout.clone(), member("index.json", b'5', b""), index.clone()]);
    assert_eq!(error, ArchiveError::Duplicate("index.json".into()));
    for (above, below) in [("blobs", "blobs/sha256/x"), ("a/b", "a/b/c")] {
        let error = open(&[member(below, b'0', b""), member(above, b'0', b"")]);
        assert_eq!(error, ArchiveError::Overlap(above.into()));
    }
    let error = open(std::slice::from_ref(&index));
    assert_eq!(error, ArchiveError::Missing("oci-layout".into()));
    let error = open(std::slice::from_ref(&layout));
    assert_eq!(error, ArchiveError::Missing("index.json".into()));
    assert_eq!(open(&[layout.clone(), index.clone()]), ArchiveError::Snapshots(0));
    // Lengths that the file does not have, up to ones that overflow.
    for size in ["77777777777", "00000010000", "\u{0}7777777777"] {
        let error = open(&[layout.clone(), header(b"x", size, b'0')]);
        let named = matches!(error, ArchiveError::Truncated(1024) | ArchiveError::Number(1024));
        assert!(named, "{error}");
    }
    for word in [u64::MAX, u64::MAX - 511, u64::MAX - 2048, 1 << 62] {
        let mut block = header(b"x", "", b'0');
        block[124] = 0x80;
        block[128..136].copy_from_slice(&word.to_be_bytes());
        sum(&mut block);
        assert_eq!(open(&[layout.clone(), block]), ArchiveError::Truncated(1024));
    }
    for size in ["0000000000x", "-0000000001", "99999999999"] {
        let error = open(&[layout.clone(), header(b"x", size, b'0')]);
        assert_eq!(error, ArchiveError::Number(1024));
    }
    // Extended headers that change where the next member ends, or what it is.
    let next = header(b"x", "00000000000", b'0');
    let error = open(&[member("x", b'x', b"29 size=18446744073709551615\n"), next.clone()]);
    assert_eq!(error, ArchiveError::Truncated(1024));
    let error = open(&[member("x", b'x', b"17 path=../../xx\n"), next.clone()]);
    assert_eq!(error, ArchiveError::Name { at: 1024, name: "../../xx".into() });
    for bad in [b"22 GNU.sparse.major=1\n".as_slice(), b"13 size=4096", b"9999 path=x\n"] {
        assert_eq!(open(&[member("x", b'x', bad), next.clone()]), ArchiveError::Extended(0));
    }
    assert_eq!(open(&[member("x", b'g', b"12 path=a/b\n")]), ArchiveError::Extended(0));
    assert_eq!(open(&[member("x", b'x', &vec![b'1'; 70_000])]), ArchiveError::Extended(0));
    let many: Vec<_> = (0..5000).map(|n| member(&format!("f{n}"), b'0', b"")).collect();
    assert_eq!(open(&many), ArchiveError::TooMany(4096));
    assert_eq!(open(&[b"not a tar ".repeat(200)]), ArchiveError::Header(0));
    fs::write(&path, b"").unwrap();
    assert_eq!(archive_error(&path), ArchiveError::Truncated(0));
    assert!(matches!(archive::open(dir.path()), Err(OpenError::Io { .. })));
    std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
    assert!(matches!(archive::open(&dir.path().join("link")), Err(OpenError::Io { .. })));
}

#[test]
fn an_archive_with_two_snapshots_or_with_a_missing_blob_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir.path().join("s"));
    let id = store.save("a", &memory(&[1]), &options()).unwrap();
    store.save("b", &memory(&[2]), &options()).unwrap();
    let path = dir.path().join("two");
    let pack = || {
        let mut tar = Command::new("tar");
        tar.args(["-c", "-C", store.root().to_str().unwrap(), "-f"]).arg(&path);
        assert!(tar.args(["oci-layout", "index.json", "blobs"]).status().unwrap().success());
    };
    pack();
    assert_eq!(archive_error(&path), ArchiveError::Snapshots(2));
    store.tag("b", None).unwrap();
    pack();
    let snapshot = archive::open(&path).unwrap();
    assert_eq!(snapshot.id(), id);
    let layer = snapshot.layers()[0].digest();
    fs::remove_file(store.blob_path(layer)).unwrap();
    pack();
    assert_eq!(
        archive_error(&path),
        ArchiveError::Missing(format!("blobs/sha256/{}", layer.hex()))
    );
}

const CHILD: &str = "AFRESH_TEST_ARCHIVE_INTO";

fn content(round: u8) -> MemoryPages {
    memory(&(0..200).map(|n: u8| n.wrapping_mul(round | 1) % 40 + round % 2).collect::<Vec<_>>())
}

#[test]
fn kill_during_save_leaves_the_old_archive_or_the_new_one() {
    if let Some(path) = std::env::var_os(CHILD) {
        for round in (0..u8::MAX).cycle() {
            let mut save = options();
            save.state = vec![round];
            archive::save(Path::new(&path), None, &content(round), &save).unwrap();
            println!("saved");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("guest.afresh");
    let mut left_behind = 0;
    for attempt in 0..15 {
        let mut child = afresh_sys::test_command(
            "archive::kill_during_save_leaves_the_old_archive_or_the_new_one",
        )
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Killed at another moment of a save each time, after at least one is done.
        assert!(lines.any(|line| line.unwrap().contains("saved")));
        // The next save is under way, however busy the machine is.
        let begun = Instant::now();
        let files = || fs::read_dir(dir.path()).unwrap().count();
        while files() <= 1 && begun.elapsed() < Duration::from_secs(60) {}
        std::thread::sleep(Duration::from_micros(attempt * 731));
        child.kill().unwrap();
        child.wait().unwrap();
        let snapshot = archive::open(&path).unwrap();
        assert!(bytes(&snapshot) == content(snapshot.state()[0]).0);
        left_behind += fs::read_dir(dir.path()).unwrap().count() - 1;
    }
    assert!(left_behind > 0, "no kill left anything: nothing was interrupted");
    archive::save(&path, None, &memory(&[1]), &options()).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the next save sweeps");
}

#[test]
fn writers_of_one_path_do_not_harm_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("guest.afresh");
    std::thread::scope(|scope| {
        for seed in 1..5u8 {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..20 {
                    archive::save(path, None, &memory(&[seed, seed]), &options()).unwrap();
                    let found = bytes(&archive::open(path).unwrap());
                    assert!((1..5).any(|seed| found == memory(&[seed, seed]).0));
                }
            });
        }
    });
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1.afresh")
}

/// `v1.afresh` is never regenerated. A change that makes this test fail needs a new version.
#[test]
fn an_archive_of_version_1_still_opens_and_is_written_the_same() {
    let snapshot = archive::open(&golden()).unwrap();
    snapshot.check_guest(&guest()).unwrap();
    assert!(bytes(&snapshot) == memory(&[1, 3, 0, 1, 0]).0);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("now");
    let mut save: SaveRequest = options();
    archive::save(&path, None, &memory(&[1, 0, 2, 1]), &save).unwrap();
    save.options.parent = Some(archive::open(&path).unwrap());
    save.state = b"later".to_vec();
    save.options.working_set = vec![PageRange::new(0, 2)];
    archive::save(&path, Some("delta"), &memory(&[1, 3, 0, 1, 0]), &save).unwrap();
    assert!(fs::read(&path).unwrap() == fs::read(golden()).unwrap());
    // The same snapshot as in the golden layout.
    let layout = Store::open(golden().with_file_name("v1")).unwrap();
    assert_eq!(layout.load("delta").unwrap().id(), snapshot.id());
    assert_eq!(diff(&layout.load("delta").unwrap(), &snapshot).unwrap().page_count(), 0);
}

fn seeds() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop_oneof![3 => Just(0u8), 2 => 1..4u8, 2 => any::<u8>()], 1..70)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Any contents, in any stack and encoding, survive file, store and file again.
    #[test]
    fn saved_contents_are_read_back(
        steps in prop::collection::vec((seeds(), any::<bool>()), 1..4),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut parent = None;
        let mut content: Vec<u8> = Vec::new();
        for (seeds, compress) in &steps {
            content.resize(content.len().max(seeds.len() * PAGE), 0);
            for (n, seed) in seeds.iter().enumerate() {
                content[n * PAGE..(n + 1) * PAGE].copy_from_slice(&page(*seed));
            }
            let mut save = options();
            save.options.encoding = if *compress { Encoding::Zstd } else { Encoding::Raw };
            save.options.parent = parent.take();
            archive::save(&path, None, &MemoryPages(content.clone()), &save).unwrap();
            parent = Some(archive::open(&path).unwrap());
        }
        let snapshot = archive::open(&path).unwrap();
        prop_assert!(bytes(&snapshot) == content);
        if steps.iter().all(|(_, compress)| !compress) {
            prop_assert!(mapped(&snapshot) == content);
        }
        let store = store(&dir.path().join("s"));
        archive::import(&path, &store, "x").unwrap();
        let again = dir.path().join("y");
        archive::export(&store.load("x").unwrap(), &again, None).unwrap();
        prop_assert!(fs::read(&again).unwrap() == fs::read(&path).unwrap());
    }

    /// Headers with any field changed, checksum made right again: refused, or without effect.
    #[test]
    fn a_hostile_header_is_refused_or_harmless(
        edits in prop::collection::vec(
            (0..40usize, 0..500usize, prop_oneof![Just(0u8), Just(b'7'), Just(0x80), any::<u8>()]),
            1..6,
        ),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (path, content) = stack(dir.path(), Encoding::Zstd);
        let mut whole = fs::read(&path).unwrap();
        let headers: Vec<usize> = (0..whole.len())
            .step_by(BLOCK)
            .filter(|at| &whole[at + 257..at + 262] == b"ustar")
            .collect();
        for (number, at, value) in edits {
            let block = &mut whole[headers[number % headers.len()]..][..BLOCK];
            block[at] = value;
            sum(block);
        }
        fs::remove_file(&path).unwrap();
        fs::write(&path, whole).unwrap();
        if let Ok(snapshot) = archive::open(&path) {
            let mut out = vec![0; snapshot.pages() * PAGE];
            if snapshot.read(0, &mut out).is_ok() {
                prop_assert!(out == content.0);
            }
        }
    }
}

#[test]
fn an_archive_replaces_archives_and_no_other_file() {
    let dir = tempfile::tempdir().unwrap();
    let (archive, content) = stack(dir.path(), Encoding::Raw);
    let open = archive::open(&archive).unwrap();
    let script = dir.path().join("script.py");
    fs::write(&script, "print(1)\n").unwrap();
    let empty = dir.path().join("empty");
    fs::write(&empty, "").unwrap();
    let tar = dir.path().join("other.tar");
    fs::write(&tar, [member("notes", b'0', b"text"), vec![0; 2 * BLOCK]].concat()).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&archive, &link).unwrap();
    let files = fs::read_dir(dir.path()).unwrap().count();
    let damaged = dir.path().join("damaged");
    let whole = fs::read(&archive).unwrap();
    fs::write(&damaged, &whole[..whole.len() / 2]).unwrap();
    let files = files + 1;
    for path in [&script, &empty, &tar, &damaged, &link, &dir.path().to_owned()] {
        let before = fs::read(path).ok();
        let saved = archive::save(path, None, &memory(&[3]), &options()).map(drop);
        for error in [saved, archive::export(&open, path, None), archive::check_target(path)] {
            let error = error.unwrap_err();
            let text = error.to_string();
            let fits = match &error {
                SaveError::Link(_) => *path == link && text.contains("is a link"),
                SaveError::ForeignFile(_) => path.is_dir(),
                SaveError::UnreadableTarget { source, .. } => {
                    *path != link && path.is_file() && text.contains(&source.to_string())
                }
                _ => false,
            };
            assert!(fits, "{}: {error}", path.display());
        }
        assert_eq!(fs::read(path).ok(), before, "{}", path.display());
    }
    // No temporary file is left.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), files);
    assert!(bytes(&archive::open(&archive).unwrap()) == content.0);
}

#[test]
fn a_file_that_appears_while_an_archive_is_written_stays() {
    struct Appearing(MemoryPages, PathBuf);
    impl afresh_store::Pages for Appearing {
        fn pages(&self) -> usize {
            self.0.pages()
        }

        fn occupied(&self) -> Vec<PageRange> {
            fs::write(&self.1, "text").unwrap();
            self.0.occupied()
        }

        fn read(&self, first: usize, out: &mut [u8]) -> std::io::Result<()> {
            self.0.read(first, out)
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("guest.afresh");
    let content = Appearing(memory(&[1, 2]), path.clone());
    let error = archive::save(&path, None, &content, &options()).unwrap_err();
    assert!(matches!(error, SaveError::UnreadableTarget { .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"text");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
