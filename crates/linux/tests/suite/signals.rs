//! Signals that are read, waited for and sent by timers, and limits that a process sets itself:
//! part of every state, undone by a reset.

use crate::common;

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;

const LIMIT: Duration = Duration::from_secs(100);

fn program() -> Option<Program> {
    let path = common::compiled("signals.c", &["-static", "-pthread"])?;
    Some(Program::new(path).time_limit(LIMIT).start_limit(LIMIT))
}

fn warm() -> Option<Warm> {
    common::here(program()?.warm())
}

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(request.as_bytes()).unwrap_or_else(|e| panic!("{request:?}: {e}"));
    String::from_utf8(answer).unwrap()
}

const CLEAN: &str = "timer -1 left 0 pending 0 ready 0 files 1024 child 0\n";
const HELD: &str = "timer 0 left 1 pending 1 ready 1 files 64 child 64\n";

#[test]
fn timers_and_descriptors_of_signals_are_those_of_linux() {
    let Some(warm) = warm() else { return };
    let mut instance = warm.instance();
    for _ in 0..3 {
        for (request, expected) in [
            ("look\n", CLEAN),
            ("once\n", "once\n"),
            ("read\n", "read\n"),
            ("timers\n", "timers\n"),
            ("threads\n", "threads\n"),
            ("limits\n", "limits\n"),
            ("others\n", "others\n"),
            ("maps\n", "maps\n"),
        ] {
            instance.reset();
            assert_eq!(ask(&mut instance, request), expected);
            instance.verify().unwrap_or_else(|error| panic!("{request}: {error}"));
        }
    }
    assert_eq!(instance.stats().processes, 1);
}

#[test]
fn signal_state_of_a_call_is_reset_and_kept_in_checkpoints() {
    let (Some(program), Some(warm)) = (program(), warm()) else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let root = line.at();
    assert_eq!(ask(line.guest_mut().unwrap(), "hold\n"), "held\n");
    let held = line.checkpoint().unwrap();
    let mut fork = line.fork(held).unwrap();
    for _ in 0..3 {
        line.rollback(root).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "look\n"), CLEAN);
        line.rollback(held).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "look\n"), HELD);
    }
    assert_eq!(ask(fork.guest_mut().unwrap(), "look\n"), HELD);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    line.rollback(held).unwrap();
    let frozen = line.guest_mut().unwrap().freeze().unwrap();
    frozen.save(&store, "held", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("held").unwrap(), &Options::default()).unwrap();
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    assert_eq!(ask(&mut thawed, "look\n"), HELD);
    thawed.verify().unwrap();
}
