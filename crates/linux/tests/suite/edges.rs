//! Edges of system calls that test suites check: their results are those of Linux.

use crate::common;

use std::process::Command;
use std::time::Duration;

use afresh_linux::Program;

const LIMIT: Duration = Duration::from_secs(100);

#[test]
fn edges_of_calls_are_those_of_linux() {
    let Some(path) = common::compiled("edges.c", &["-static", "-pthread"]) else { return };
    let native = Command::new(&path).output().expect("it runs");
    let expected = String::from_utf8_lossy(&native.stdout).into_owned();
    let Some(run) = common::here(Program::new(path).start_limit(LIMIT).run(b"")) else { return };
    let got = String::from_utf8_lossy(&run.output).into_owned();
    let differing = expected.lines().zip(got.lines()).enumerate().find(|(_, (a, b))| a != b);
    assert_eq!(differing, None, "in {got}");
    assert_eq!(expected.lines().count(), got.lines().count(), "{got}{}", run.messages);
}
