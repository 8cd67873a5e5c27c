//! A save that is killed leaves the old snapshot or the new one.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{bytes, memory, options, store};
use afresh_store::{Store, diff};

const CHILD: &str = "AFRESH_TEST_SAVE_INTO";

fn content(round: u8) -> Vec<u8> {
    (0..200).map(|n: u8| n.wrapping_mul(round | 1) % 40 + round % 2).collect()
}

#[test]
fn kill_during_save_leaves_old_or_new() {
    if let Some(dir) = std::env::var_os(CHILD) {
        let store = Store::open(dir).unwrap();
        for round in (0..u8::MAX).cycle() {
            let mut save = options();
            save.state = vec![round];
            if round % 3 == 1 {
                save.options.parent = Some(store.load("a").unwrap());
            }
            store.save("a", &memory(&content(round)), &save).unwrap();
            println!("saved");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut save = options();
    save.state = vec![0];
    store.save("a", &memory(&content(0)), &save).unwrap();
    let mut left_behind = 0;
    for attempt in 0..15 {
        let mut child = afresh_sys::test_command("kill::kill_during_save_leaves_old_or_new")
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Killed at another moment of a save each time, after at least one is done.
        assert!(lines.any(|line| line.unwrap().contains("saved")));
        let begun = Instant::now();
        let writes = || {
            let entries = std::fs::read_dir(store.root().join("blobs/sha256")).unwrap().flatten();
            entries.into_iter().any(|it| it.file_name().as_encoded_bytes().starts_with(b".tmp-"))
        };
        // The next save is under way, however busy the machine is.
        while !writes() && begun.elapsed() < Duration::from_secs(20) {}
        std::thread::sleep(Duration::from_micros(attempt * 731));
        child.kill().unwrap();
        child.wait().unwrap();

        let snapshot = store.load("a").unwrap();
        snapshot.verify().unwrap();
        let round = snapshot.state()[0];
        assert!(bytes(&snapshot) == memory(&content(round)).0, "round {round}");
        left_behind += store.gc().unwrap().files;
        let kept = store.load("a").unwrap();
        assert_eq!(diff(&snapshot, &kept).unwrap().page_count(), 0);
    }
    assert!(left_behind > 0, "no kill left anything for gc: nothing was interrupted");
}
