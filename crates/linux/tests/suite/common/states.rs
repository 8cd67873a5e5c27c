//! Changes of a call are in every state taken since, and in no state that a reset, a rollback or a
//! fork goes back to.

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;

/// Sends one line to a program that reads lines, and returns its answer without the line's end.
pub(crate) fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(format!("{request}\n").as_bytes());
    let answer = answer.unwrap_or_else(|error| panic!("{request:?}: {error}"));
    String::from_utf8_lossy(&answer).trim_end().to_owned()
}

/// Sends each request to a Python script that reads lines, compares its answers, and does so again
/// after a reset, which is verified.
pub(crate) fn assert_answers(script: &str, cases: &[(&str, &str)]) {
    const LIMIT: Duration = Duration::from_secs(100);
    let Some(program) = super::python() else { return };
    let program = program.arg("/app.py").file("/app.py", script);
    let Some(warm) = super::here(program.time_limit(LIMIT).start_limit(LIMIT).warm()) else {
        return;
    };
    let mut instance = warm.instance();
    for _ in 0..2 {
        for (request, answer) in cases {
            assert_eq!(&ask(&mut instance, request), answer, "{request}");
        }
        instance.reset();
        instance.verify().unwrap();
    }
}

/// Does `work` twice from the warm state, with the same answer, and compares the remaining state
/// with the warm one.
pub(crate) fn pristine(warm: &Warm, work: &str, done: &str) {
    let mut instance = warm.instance();
    for _ in 0..2 {
        instance.reset();
        assert_eq!(ask(&mut instance, work), done);
        instance.verify().unwrap();
    }
    assert_eq!(instance.stats().processes, 1);
}

/// Makes the program `hold` something: `look` then returns `held`, and otherwise `none`.
pub(crate) fn in_every_state(program: &Program, warm: &Warm, hold: &str, look: [&str; 3]) {
    let [look, held, none] = look;
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let root = line.at();
    assert_eq!(ask(line.guest_mut().unwrap(), look), none);
    ask(line.guest_mut().unwrap(), hold);
    let with = line.checkpoint().unwrap();
    let mut fork = line.fork(with).unwrap();
    for _ in 0..2 {
        line.rollback(with).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), look), held);
        line.rollback(root).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), look), none);
    }
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    let frozen = fork.guest_mut().unwrap().freeze().unwrap();
    frozen.save(&store, "with", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("with").unwrap(), &Options::default()).unwrap();
    let mut thawed = Warm::thaw(&frozen, program).unwrap().instance();
    assert_eq!(ask(&mut thawed, look), held);
    thawed.verify().unwrap();
    assert_eq!(ask(fork.guest_mut().unwrap(), look), held);
}
