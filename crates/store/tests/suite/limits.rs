//! Small files that ask for much: refused when they are opened, by a limit that the error names.

use std::time::{Duration, Instant};

use crate::support::forge::{BASE, DELTA, Layer, Snapshot, WORKING_SET};
use crate::support::{memory, options, store};
use afresh_store::{
    Access, Encoding, Limits, OpenError, ReplacedName, SaveError, Store, TurnBuilder, archive,
};

/// The error of an open with these limits, which comes soon whatever the snapshot claims.
fn refusal(snapshot: &Snapshot, limits: Limits) -> Option<(String, &'static str)> {
    let dir = tempfile::tempdir().unwrap();
    snapshot.write(dir.path(), "a");
    let start = Instant::now();
    let opened =
        Store::open(dir.path()).unwrap().load_with("a", &Access::new().with_limits(limits));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    match opened {
        Ok(_) => None,
        Err(OpenError::Limit { name, what, bytes, limit }) => {
            let error = OpenError::Limit { name, what, bytes, limit };
            Some((error.to_string(), name))
        }
        Err(error) => panic!("refused for another reason: {error}"),
    }
}

/// A base layer whose many extents all point at the same stored pages.
fn duplicates(extents: u64, len: u64) -> Snapshot {
    let extents: Vec<_> = (0..extents).map(|n| (n * len, len, 0)).collect();
    let pages = extents.len() as u64 * len;
    Snapshot::new(pages, vec![Layer::new(BASE, pages, len as usize, &extents)], None)
}

#[test]
fn memory_and_work_of_a_small_file_are_limited() {
    let far = |page: u64| {
        let base = Layer::new(BASE, page + 1, 1, &[(page, 1, 0)]);
        Snapshot::new(page + 1, vec![base], None)
    };
    let cases = [
        // 16 TiB of addresses for one page.
        (far((1 << 32) - 1), "memory"),
        // 4 GiB of copies out of 50 KB of extents.
        (duplicates(2048, 512), "expansion"),
        // 32 GiB of them.
        (duplicates(16384, 512), "content"),
    ];
    for (snapshot, wanted) in cases {
        let (said, name) = refusal(&snapshot, Limits::default()).expect(wanted);
        assert_eq!(name, wanted, "{said}");
        assert!(said.contains(&format!("--limit {wanted}=SIZE")), "{said}");
        assert_eq!(refusal(&snapshot, Limits::NONE), None, "whoever trusts it may open it");
    }
    assert_eq!(refusal(&far(1 << 20), Limits::default()), None);
}

#[test]
fn the_indexes_of_all_layers_together_are_limited() {
    let scattered = |role, first: u64| {
        let extents: Vec<_> = (0..200).map(|n| (first + n * 2, 1, 0)).collect();
        Layer::new(role, 1000, 1, &extents)
    };
    let layers = vec![scattered(BASE, 0), scattered(DELTA, 400), scattered(DELTA, 1)];
    let set = Some(scattered(WORKING_SET, 0));
    let snapshot = Snapshot::new(1000, layers, set);
    let one = 200 * 24 + 32;
    let with = |index| refusal(&snapshot, Limits { index, ..Limits::default() });
    assert_eq!(with(4 * one), None);
    assert_eq!(with(4 * one - 1).unwrap().1, "index");
    assert_eq!(with(one - 1).unwrap().1, "index");
}

#[test]
fn a_snapshot_of_ones_own_stays_within_the_limits() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    store.save("a", &memory(&[1; 5000]), &options()).unwrap();
    let snapshot = store.load("a").unwrap();
    assert_eq!(*snapshot.limits(), Limits::default());
    let tight = Access::new().with_limits(Limits { memory: 4999 * 4096, ..Limits::default() });
    assert!(matches!(store.load_with("a", &tight), Err(OpenError::Limit { name: "memory", .. })));
    let file = dir.path().join("a.afresh");
    archive::export(&snapshot, &file, None).unwrap();
    assert!(matches!(archive::open_with(&file, &tight), Err(OpenError::Limit { .. })));
}

#[test]
fn single_pages_of_compressed_groups_are_limited() {
    const PAGES: usize = 70_000;
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut save = options();
    save.options.encoding = Encoding::Zstd;
    store.save("a", &memory(&[7; 64]), &save).unwrap();
    let base = store.load("a").unwrap();
    let mut journal = store.begin_turns("a", &base, ReplacedName::Any).unwrap();
    let mut turn = TurnBuilder::new(64);
    // Each page is in another group than the one before: 4 GiB are decompressed for 273 MiB.
    (0..PAGES).for_each(|n| turn.copy(n % 2 * 32, 1));
    let turn = turn.finish(base.state(), base.state(), journal.last()).unwrap();
    journal.append(&turn, None).unwrap();
    let error = store.load("a").unwrap_err();
    assert!(matches!(error, OpenError::Limit { name: "expansion", .. }), "{error}");
    let trusted = Access::new().with_limits(Limits::NONE);
    assert_eq!(store.load_with("a", &trusted).unwrap().pages(), PAGES);
}

#[test]
fn a_configuration_that_no_reader_takes_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut options = options();
    options.guest.module = "a".repeat(97 << 20);
    let error = store.save("a", &memory(&[1]), &options).unwrap_err();
    assert!(matches!(error, SaveError::TooLarge { what: "the configuration", .. }), "{error}");
    assert!(store.tags().unwrap().is_empty());
}
