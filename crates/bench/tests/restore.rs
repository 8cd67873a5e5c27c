//! The benchmark itself: small, whole, and honest about wrong bytes.
#![cfg(not(miri))]

use afresh_pager::bench::{BenchOptions, restore, save};

#[test]
fn a_small_run_reports_every_case_beside_mmap_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        BenchOptions { mib: 8, rounds: 2, dir: dir.path().to_owned(), ..BenchOptions::default() };
    let mut out = Vec::new();
    restore(&options, &mut out).unwrap();
    save(&options, &mut out).unwrap();
    let lines: Vec<serde_json::Value> =
        out.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    for case in ["random/read", "random/write", "seq/read", "ws5/read", "ws5-cold/read"] {
        for strategy in ["mmap", "map-detach", "copy-hybrid", "uffd-copy"] {
            let line = lines.iter().find(|l| l["case"] == case && l["strategy"] == strategy);
            let line = line.unwrap_or_else(|| panic!("{case} {strategy} is missing"));
            assert_eq!((&line["table"], &line["unit"]), (&"restore".into(), &"ms".into()));
            assert!(line["median"].as_f64().unwrap() >= line["min"].as_f64().unwrap());
        }
    }
    assert!(lines.iter().any(|l| l["table"] == "snapshot-write"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
