//! Calls that wait while another thread closes or replaces their descriptor.

use crate::common;

use std::process::Command;

use afresh_linux::{End, Program};

#[test]
fn a_waiting_call_keeps_its_open_file_as_on_linux() {
    let Some(path) = common::compiled("closed.c", &["-static", "-pthread"]) else { return };
    let native = Command::new(&path).output().expect("it runs");
    let Some(run) = common::here(Program::new(&path).run(b"")) else { return };
    // Two threads write the lines, each of its own.
    let lines = |output: &[u8]| {
        let text = String::from_utf8_lossy(output).into_owned();
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(lines(&run.output), lines(&native.stdout), "{}", run.messages);
    assert_eq!(run.end, End::Exit(0), "{}", run.messages);
}
