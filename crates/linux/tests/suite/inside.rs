//! Calls that are answered inside the process: their results are those of the sentry, and neither
//! their code nor their data lets a guest do more than it may.

use std::time::Duration;

use afresh_linux::{CallError, Instance, PlatformError, Program};
use afresh_sys::planted::{self, Bug};

use crate::common;

/// An instance of the guest, which has an unwinding table of its functions.
fn warm(shape: impl Fn(Program) -> Program) -> Option<Instance> {
    let path = common::compiled("inside.c", &["-static", "-Wl,--eh-frame-hdr"])?;
    let program = Program::new(path).answer_inside(true).start_limit(Duration::from_secs(20));
    let mut instance = common::here(shape(program).warm())?.instance();
    instance.prepare().unwrap();
    Some(instance)
}

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(request.as_bytes()).unwrap_or_else(|e| panic!("{request}: {e}"));
    String::from_utf8(answer).unwrap().trim_end().to_owned()
}

#[test]
fn numbers_of_a_process_are_answered_inside() {
    let Some(mut instance) = warm(|program| program) else { return };
    assert_eq!(ask(&mut instance, "ids\n"), "inside 1 wrong 0 child 0");
    let Some(mut without) = warm(|program| program.answer_inside(false)) else { return };
    assert_eq!(ask(&mut without, "ids\n"), "inside 0 wrong 0 child 256");
}

#[test]
fn calls_on_files_have_the_results_of_the_sentry() {
    let Some(mut instance) = warm(|program| program) else { return };
    for round in 0..10 {
        assert_eq!(ask(&mut instance, &format!("model {}\n", 300 + round)), "model holds");
        instance.reset();
        assert_eq!(ask(&mut instance, "at\n"), "at 3");
    }
    instance.reset();
    instance.verify().unwrap();
}

#[test]
fn an_offset_that_was_set_inside_is_taken_over() {
    let Some(mut instance) = warm(|program| program) else { return };
    assert_eq!(ask(&mut instance, "move 50\n"), "moved");
    assert_eq!(ask(&mut instance, "look\n"), "left 0 at 53");
    instance.reset();
    assert_eq!(ask(&mut instance, "look\n"), "left 0 at 3");
}

/// A directory of the host with files that changed long ago, and one of these.
const HOST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
const HOST_FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/state-11.bin.gz");

#[test]
fn contents_of_a_host_file_are_read_inside() {
    let Some(mut instance) = warm(|program| program.grant(HOST)) else { return };
    assert_eq!(ask(&mut instance, "window\n"), "window 0");
    for _ in 0..3 {
        let answer = ask(&mut instance, &format!("contents 30 {HOST_FILE}\n"));
        assert_eq!(answer, "contents wrong 0 inside 1");
        instance.reset();
        assert_eq!(ask(&mut instance, "window\n"), "window 0", "bytes of an earlier call");
    }
    let answer = ask(&mut instance, &format!("interrupted 100 {HOST_FILE}\n"));
    assert_eq!(answer, "interrupted wrong 0");
    instance.reset();
    instance.verify().unwrap();
}

#[test]
fn a_host_file_that_changes_is_read_anew() {
    let directory = tempfile::tempdir().unwrap();
    let (path, polled) = (directory.path().join("changing"), directory.path().join("polled"));
    let old = std::time::SystemTime::now() - Duration::from_secs(100);
    for path in [&path, &polled] {
        std::fs::write(path, b"first").unwrap();
        std::fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    // Its time of change is now, and a file counts as unchanged after two seconds.
    std::thread::sleep(Duration::from_millis(3500));
    let shape = |program: Program| program.grant(directory.path());
    let Some(mut instance) = warm(shape) else { return };
    let path = path.display();
    assert_eq!(ask(&mut instance, &format!("hold 0 {path}\n")), "held first");
    std::fs::write(path.to_string(), b"other").unwrap();
    assert_eq!(ask(&mut instance, "held\n"), "held other");
    // A process that makes no other calls sees the change, too.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            std::fs::write(&polled, b"other").unwrap();
        });
        assert_eq!(ask(&mut instance, &format!("poll 0 {}\n", polled.display())), "polled other");
    });
}

#[test]
fn closes_have_the_effects_of_the_sentry() {
    let Some(mut instance) = warm(|program| program) else { return };
    for _ in 0..3 {
        assert_eq!(ask(&mut instance, "closes\n"), "closes wrong 0");
        instance.reset();
        assert_eq!(ask(&mut instance, "look\n"), "left 0 at 3");
    }
    instance.verify().unwrap();
}

#[test]
fn closes_are_carried_out_in_their_order() {
    let Some(mut instance) = warm(|program| program) else { return };
    assert_eq!(ask(&mut instance, "order\n"), "order wrong 0");
}

#[test]
fn actions_and_the_mask_of_signals_are_those_of_the_sentry() {
    let Some(mut instance) = warm(|program| program) else { return };
    for round in 0..5 {
        assert_eq!(
            ask(&mut instance, &format!("actions {}\n", 40 + round)),
            "actions wrong 0 inside 1"
        );
        instance.reset();
        assert_eq!(ask(&mut instance, "model 1\n"), "model holds", "actions of an earlier call");
        instance.reset();
    }
    instance.verify().unwrap();
}

#[test]
fn planted_bugs_are_caught() {
    if warm(|program| program).is_some() {
        planted::must_be_caught(
            &[Bug::InsideOffset],
            &[
                "inside::an_offset_that_was_set_inside_is_taken_over",
                "inside::closes_have_the_effects_of_the_sentry",
            ],
        );
    }
}

#[test]
fn single_steps_see_the_addresses_of_the_program() {
    let Some(mut instance) = warm(|program| program) else { return };
    // At the trampoline, within it, and in the code inside: about to make the call.
    let expected = "5 39 1; ".repeat(5);
    assert_eq!(ask(&mut instance, "step\n"), expected.trim_end());
}

#[test]
fn single_steps_pass_through_calls() {
    let Some(mut instance) = warm(|program| program) else { return };
    assert_eq!(ask(&mut instance, "walk\n"), "walked 1 wrong 0");
}

#[test]
fn handlers_interrupt_calls_at_their_own_addresses() {
    let Some(mut instance) = warm(|program| program) else { return };
    assert_eq!(ask(&mut instance, "race 300\n"), "race exact, lost 0, elsewhere 0");
}

#[test]
fn text_that_becomes_writable_is_the_original() {
    let Some(mut instance) = warm(|program| program) else { return };
    assert_eq!(ask(&mut instance, "text\n"), "text 21 b8 1");
    instance.reset();
    instance.verify().unwrap();
    assert_eq!(ask(&mut instance, "inside\n"), "inside 1");
}

#[test]
fn forged_offsets_are_those_that_calls_could_have_set() {
    let Some(mut instance) = warm(|program| program) else { return };
    for (word, expected) in [(7, 6), (1, 0), (0, 3), (-1, 3), (i64::MIN, i64::MAX)] {
        let answer = ask(&mut instance, &format!("forge {word}\n"));
        assert_eq!(answer, format!("forged {expected} wrote 0"));
        instance.reset();
        assert_eq!(ask(&mut instance, "look\n"), "left 0 at 3");
    }
}

#[test]
fn nothing_of_the_answers_reaches_the_next_call() {
    let Some(mut instance) = warm(|program| program) else { return };
    assert_eq!(ask(&mut instance, "secret\n"), "kept 1");
    instance.reset();
    assert_eq!(ask(&mut instance, "find\n"), "found 0");
}

/// Every fifth offset of the code inside, with registers of each kind, and single steps.
#[test]
fn no_jump_into_the_code_inside_reaches_the_next_call() {
    let Some(mut instance) = warm(|program| program.time_limit(Duration::from_secs(2))) else {
        return;
    };
    for offset in (0..1600).step_by(5) {
        let (kind, steps) = (offset / 5 % 16, offset / 5 % 2);
        let answer = instance.call_pristine(format!("jump {offset} {kind} {steps}\n").as_bytes());
        if let Err(CallError::Platform { source: PlatformError::Panicked(panic), .. }) = &answer {
            panic!("{offset}: {panic}");
        }
        match instance.call_pristine(b"look\n") {
            Ok(next) => assert_eq!(next, b"left 0 at 3\n", "{offset}"),
            Err(CallError::Late { .. }) => println!("late after {offset}"),
            Err(error) => panic!("{offset} made the next call fail: {error}"),
        }
    }
    instance.verify().unwrap();
}
