//! The benchmark itself: small, whole, and honest about wrong bytes.

use afresh_bench::restore::{Options, restore, save};

#[test]
fn a_small_run_reports_every_case_beside_mmap_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { mib: 8, rounds: 2, dir: dir.path().to_owned(), ..Options::default() };
    let mut rows = Vec::new();
    restore(&options, &mut |row| rows.push(row.clone())).unwrap();
    save(&options, &mut |row| rows.push(row.clone())).unwrap();
    for case in ["random/read", "random/write", "seq/read", "ws5/read", "ws5-cold/read"] {
        for strategy in ["mmap", "map-detach", "stream", "uffd-copy"] {
            let row = rows.iter().find(|row| row.case == case && row.strategy == strategy);
            let row = row.unwrap_or_else(|| panic!("{case} {strategy} is missing"));
            assert_eq!((row.table, row.unit), ("restore", "ms"));
            assert!(row.median >= row.min && row.json().contains("\"first_1000\":"));
        }
    }
    assert!(rows.iter().any(|row| row.table == "snapshot-write"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
