//! A flipped bit is noticed where it does harm. In data of the open, the open fails. In a group of
//! pages, the first use of a page fails. Everything else stays usable.
//!
//! The bits are drawn at random, some in each region of a store and of an archive. A failure names
//! the bit.

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::support::{PAGE, options, page_of, store};
use afresh_store::{Encoding, OpenError, Origin, Sha256, Snapshot, archive};
use afresh_sys::PageRange;

const PAGES: usize = 300;
/// Bytes of the footer.
const FOOTER: usize = 192;
/// Bits flipped in each region.
const FLIPS_PER_REGION: usize = 12;

/// Where the first one is noticed.
#[derive(Clone, Debug)]
enum NoticePoint {
    /// When the snapshot is opened.
    Open,
    /// When one of these pages of the memory is read.
    Read(Vec<usize>),
    /// When the working set is read.
    WorkingSet,
    /// Not for certain: the bytes mean nothing, or another name.
    Perhaps,
}

struct Region {
    what: String,
    bytes: Range<usize>,
    noticed: NoticePoint,
}

/// The memory of the snapshots; every page is another.
fn content() -> Vec<u8> {
    (0..PAGES as u32).flat_map(page_of).collect()
}

/// A base that differs in two runs of pages, and a delta with a working set on it.
fn saved(mut save: impl FnMut(&[u8], afresh_store::SaveRequest) -> Snapshot, encoding: Encoding) {
    let mut base = content();
    for page in (40..90).chain(200..230) {
        base[page * PAGE..][..PAGE].copy_from_slice(&page_of(9000 + page as u32));
    }
    let mut first = options();
    first.options.encoding = encoding;
    let parent = save(&base, first);
    let mut second = options();
    second.options.encoding = encoding;
    second.options.parent = Some(parent);
    second.options.working_set = vec![PageRange::new(3, 30), PageRange::new(150, 10)];
    save(&content(), second);
}

/// The regions of the blobs of a snapshot; `at` says where a blob begins.
fn regions(snapshot: &Snapshot, file_of: &dyn Fn(Sha256) -> Vec<u8>) -> Vec<(Sha256, Region)> {
    let mut out = Vec::new();
    let mut add =
        |blob, what: String, bytes, noticed| out.push((blob, Region { what, bytes, noticed }));
    let manifest = String::from_utf8(file_of(snapshot.id())).unwrap();
    add(snapshot.id(), "manifest".into(), 0..manifest.len(), NoticePoint::Open);
    let blobs: Vec<Sha256> = manifest
        .match_indices("sha256:")
        .map(|(at, _)| manifest[at..at + 71].parse().unwrap())
        .collect();
    add(blobs[0], "configuration".into(), 0..file_of(blobs[0]).len(), NoticePoint::Open);
    let layers = snapshot.layers();
    for (number, digest) in blobs[1..].iter().enumerate() {
        let bytes = file_of(*digest);
        let word = |at: usize| {
            u64::from_le_bytes(bytes[bytes.len() - FOOTER + at..][..8].try_into().unwrap()) as usize
        };
        let (stored, extents, data, index) = (word(32), word(40), word(48), word(56));
        let digests = index + extents * 24;
        add(
            *digest,
            format!("footer {number}"),
            bytes.len() - FOOTER..bytes.len(),
            NoticePoint::Open,
        );
        add(*digest, format!("extents {number}"), index..digests, NoticePoint::Open);
        let groups = stored.div_ceil(16);
        add(
            *digest,
            format!("group digests {number}"),
            digests..digests + groups * 32,
            NoticePoint::Open,
        );
        let Some(layer) = layers.get(number) else {
            add(*digest, "working set".into(), 0..data, NoticePoint::WorkingSet);
            continue;
        };
        // Where the frames of a compressed group are is in the table behind the digests.
        let mut at = 0;
        for group in 0..groups {
            let pages = group * 16..stored.min((group + 1) * 16);
            let len = match layer.encoding() {
                Encoding::Raw => pages.len() * PAGE,
                Encoding::Zstd => {
                    let table = digests + groups * 32 + group * 4;
                    u32::from_le_bytes(bytes[table..table + 4].try_into().unwrap()) as usize
                }
            };
            let mut used = Vec::new();
            for run in snapshot.map().runs() {
                if let Origin::Layer { layer, stored } = run.origin
                    && layer == number
                {
                    let of = |n: usize| pages.contains(&(stored as usize + n));
                    used.extend((0..run.pages.len).filter(|n| of(*n)).map(|n| run.pages.start + n));
                }
            }
            add(
                *digest,
                format!("layer {number} group {group}"),
                at..at + len,
                NoticePoint::Read(used),
            );
            at += len;
        }
        assert_eq!(at, data);
    }
    out
}

/// Replaces the file; what was open before keeps the old one.
fn replace(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

/// Reads the page, which is right or refused.
fn read(snapshot: &Snapshot, page: usize, content: &[u8], what: &str) -> bool {
    let mut out = vec![0; PAGE];
    let read = snapshot.read(page, &mut out).is_ok();
    assert!(!read || out == content[page * PAGE..][..PAGE], "{what}: page {page} is wrong");
    read
}

fn flip(
    open: &dyn Fn() -> Result<Snapshot, OpenError>,
    path: &Path,
    region: &Region,
    random: &mut impl FnMut(usize) -> usize,
) {
    let content = content();
    let original = fs::read(path).unwrap();
    for _ in 0..FLIPS_PER_REGION.min(region.bytes.len()) {
        let (at, bit) = (region.bytes.start + random(region.bytes.len()), random(8));
        let mut damaged = original.clone();
        damaged[at] ^= 1 << bit;
        replace(path, &damaged);
        let what = format!("{}, {}, byte {at} bit {bit}", path.display(), region.what);
        let snapshot = match (open(), &region.noticed) {
            (
                Ok(snapshot),
                NoticePoint::Read(_) | NoticePoint::WorkingSet | NoticePoint::Perhaps,
            ) => snapshot,
            (Err(_), NoticePoint::Open | NoticePoint::Perhaps) => continue,
            (Ok(_), NoticePoint::Open) => panic!("{what}: opened"),
            (Err(error), _) => panic!("{what}: refused too early: {error}"),
        };
        assert_eq!(snapshot.state(), b"registers", "{what}");
        let set = snapshot.read_working_set(|run, bytes| {
            assert!(content[run.byte_start()..][..bytes.len()] == *bytes, "{what}: {run:?}");
            Ok::<(), OpenError>(())
        });
        let refused: Vec<usize> =
            (0..PAGES).filter(|page| !read(&snapshot, *page, &content, &what)).collect();
        match &region.noticed {
            NoticePoint::Read(used) => {
                assert_eq!(refused, *used, "{what}");
                // Pages that the delta hides are unused, and still part of the layer.
                assert!(snapshot.layers().iter().any(|l| l.check(&mut |_| {}).is_err()), "{what}");
                set.unwrap();
            }
            NoticePoint::WorkingSet => {
                assert!(set.is_err() && refused.is_empty(), "{what}");
                assert!(snapshot.verify().is_err(), "{what}");
            }
            NoticePoint::Open | NoticePoint::Perhaps => {
                assert!(refused.is_empty() && set.is_ok(), "{what}")
            }
        }
    }
    replace(path, &original);
    let snapshot = open().unwrap();
    snapshot.verify().unwrap();
}

/// A generator of numbers below what it is given, different in every run.
fn random() -> impl FnMut(usize) -> usize {
    let mut state = RandomState::new().hash_one(1);
    move |below| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    }
}

#[test]
fn a_bit_flip_in_any_region_of_a_store_is_noticed_before_use_and_only_there() {
    let mut random = random();
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let save = |bytes: &[u8], options| {
            store.save("a", &afresh_store::MemoryPages(bytes.to_vec()), &options).unwrap();
            store.load("a").unwrap()
        };
        saved(save, encoding);
        store.gc().unwrap();
        let open = || store.load("a");
        let snapshot = open().unwrap();
        let regions = regions(&snapshot, &|blob| fs::read(store.blob_path(blob)).unwrap());
        assert!(regions.len() > 20, "{}", regions.len());
        for (blob, region) in &regions {
            flip(&open, &store.blob_path(*blob), region, &mut random);
        }
        let index = dir.path().join("index.json");
        let bytes = 0..fs::read(&index).unwrap().len();
        let region = Region { what: "index".into(), bytes, noticed: NoticePoint::Perhaps };
        flip(&open, &index, &region, &mut random);
        // A reader with the digest needs no index.
        let by_digest = || store.load_id(snapshot.id());
        flip(&by_digest, &index, &region, &mut random);
    }
}

#[test]
fn a_bit_flip_in_any_region_of_an_archive_is_noticed_before_use_and_only_there() {
    let mut random = random();
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let path: PathBuf = dir.path().join("a.afresh");
        let save = |bytes: &[u8], options| {
            archive::save(&path, None, &afresh_store::MemoryPages(bytes.to_vec()), &options)
                .unwrap();
            archive::open(&path).unwrap()
        };
        saved(save, encoding);
        let whole = fs::read(&path).unwrap();
        // A member begins a block after its header, which begins with its name and says its length.
        let member = |blob: Sha256| {
            let name = format!("blobs/sha256/{}", blob.hex()).into_bytes();
            let header =
                whole.chunks(512).position(|block| block.starts_with(&name)).unwrap() * 512;
            let size = str::from_utf8(&whole[header + 124..header + 135]).unwrap();
            let start = header + 512;
            start..start + usize::from_str_radix(size, 8).unwrap()
        };
        let open = || archive::open(&path);
        let regions = regions(&open().unwrap(), &|blob| whole[member(blob)].to_vec());
        for (blob, region) in regions {
            let start = member(blob).start;
            let bytes = start + region.bytes.start..start + region.bytes.end;
            flip(&open, &path, &Region { bytes, ..region }, &mut random);
        }
        let headers = whole.chunks(512).enumerate().filter(|(_, b)| b[257..262] == *b"ustar");
        for (number, _) in headers {
            let bytes = number * 512..(number + 1) * 512;
            let region = Region { what: "header".into(), bytes, noticed: NoticePoint::Perhaps };
            flip(&open, &path, &region, &mut random);
        }
    }
}
