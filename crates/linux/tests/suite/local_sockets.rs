//! Sockets and named queues of messages: their results are those of Linux, and they are part of
//! every state.

use crate::common;

use std::process::Command;
use std::time::Duration;

use afresh_linux::Program;
use common::states::in_every_state;

const LIMIT: Duration = Duration::from_secs(100);

#[test]
fn sockets_and_queues_do_what_they_do_on_linux() {
    let Some(path) = common::compiled("sockets.c", &["-static"]) else { return };
    let native = Command::new(&path).arg("all").output().expect("it runs");
    let expected = String::from_utf8_lossy(&native.stdout).into_owned();
    let program = Program::new(path).arg("all").start_limit(LIMIT);
    let Some(run) = common::here(program.run(b"")) else { return };
    let got = String::from_utf8_lossy(&run.output).into_owned();
    let differing = expected.lines().zip(got.lines()).enumerate().find(|(_, (a, b))| a != b);
    assert_eq!(differing, None, "in {got}");
    assert_eq!(expected.lines().count(), got.lines().count(), "{got}{}", run.messages);
}

#[test]
fn credentials_and_queues_are_in_every_state() {
    let Some(path) = common::compiled("sockets.c", &["-static"]) else { return };
    let program = Program::new(path).time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    let held = "queued 5 and: 4 sent flags 0 control 32 [2 28 own]";
    in_every_state(&program, &warm, "hold", ["look", held, "nothing 0 and: EAGAIN"]);
}
