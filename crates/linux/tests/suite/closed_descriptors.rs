//! Calls that wait while another thread closes or replaces their descriptor.

use crate::common;

use std::process::Command;

use afresh_linux::{End, Program};

#[test]
fn a_waiting_call_keeps_its_open_file_as_on_linux() {
    let Some(path) = common::compiled("closed.c", &["-static", "-pthread"]) else { return };
    let native = Command::new(&path).output().expect("it runs");
    let Some(run) = common::here(Program::new(&path).run(b"")) else { return };
    let output = String::from_utf8_lossy(&run.output);
    assert_eq!(output, String::from_utf8_lossy(&native.stdout), "{}", run.messages);
    assert_eq!(run.end, End::Exit(0), "{}", run.messages);
}
