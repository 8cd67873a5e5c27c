//! An append that fails, and dies at each of its steps.

use std::path::Path;

use afresh_store::{Snapshot, Store};
use afresh_sys::crash;

use super::{Matrix, Operation};
use crate::support::small_disk::SmallDisk;
use crate::support::store;
use crate::turns::{append, is_round, next_turn, session};

/// Turns of the session before the disk is full.
const TURNS: usize = 3;
/// An append cannot succeed more often on a full disk.
const MAX_TURNS: usize = 100;

/// An append that is refused.
const REFUSED: Operation = ("append to a full disk", refused, 0);

fn refused(_: &Store, open: &Snapshot) {
    let mut journal = open.resume_turns().unwrap().unwrap();
    let turn = next_turn(&journal, journal.turns() + 1);
    journal.append(&turn, None).unwrap_err();
}

fn child(dir: &Path, operation: Operation, at: usize) -> ! {
    let store = Store::open(dir).unwrap();
    let open = store.load("a").unwrap();
    crash::arm(at);
    operation.1(&store, &open);
    crash::disarm();
    std::process::exit(77);
}

#[test]
fn acknowledged_turns_open_after_a_crash_at_any_step_of_a_failed_append() {
    let matrix = Matrix {
        operations: vec![REFUSED],
        test: "crashes::full_disk::acknowledged_turns_open_after_a_crash_at_any_step_of_a_failed_append",
        child,
    };
    matrix.be_child();
    let mut steps = 0;
    loop {
        let dir = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::mount(dir.path(), 16) else { return };
        let store = store(dir.path());
        let mut journal = session(&store, "a", TURNS);
        disk.fill(0);
        // The last block of the journal has room for some.
        let mut turns = TURNS;
        while journal.append(&next_turn(&journal, turns + 1), None).is_ok() {
            turns += 1;
            assert!(turns < MAX_TURNS, "a full disk takes {turns} turns");
        }
        drop(journal);
        let done = matrix.run_child(dir.path(), 0, steps);
        assert!(is_round(&store.load("a").unwrap(), turns), "step {steps}");
        disk.empty();
        let mut journal = store.load("a").unwrap().resume_turns().unwrap().unwrap();
        append(&mut journal, turns + 1);
        let found = store.load("a").unwrap();
        found.verify().unwrap();
        assert!(is_round(&found, turns + 1), "step {steps}");
        if done {
            break;
        }
        steps += 1;
    }
    println!("{}: {steps} steps", REFUSED.0);
    // One of them is between the failed write and the cut of its remains.
    assert!(steps > 2, "a failed append passes {steps} points");
}
