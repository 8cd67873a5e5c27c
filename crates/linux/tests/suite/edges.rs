//! Edges of system calls that test suites check: their results are those of Linux.

use crate::common;

use std::process::Command;
use std::time::Duration;

use afresh_linux::Program;

const LIMIT: Duration = Duration::from_secs(100);

/// Runs a program natively and as a guest: the output is the same.
fn compare(source: &str) {
    let Some(path) = common::compiled(source, &["-static", "-pthread"]) else { return };
    let native = Command::new(&path).output().expect("it runs");
    let expected = String::from_utf8_lossy(&native.stdout).into_owned();
    assert!(native.status.success() && !expected.is_empty(), "{native:?}");
    let Some(run) = common::here(Program::new(path).start_limit(LIMIT).run(b"")) else { return };
    let got = String::from_utf8_lossy(&run.output).into_owned();
    let differing = expected.lines().zip(got.lines()).enumerate().find(|(_, (a, b))| a != b);
    assert_eq!(differing, None, "in {got}");
    assert_eq!(expected.lines().count(), got.lines().count(), "{got}{}", run.messages);
}

#[test]
fn edges_of_calls_are_those_of_linux() {
    compare("edges.c");
}

#[test]
fn arguments_are_refused_as_on_linux() {
    compare("refusals.c");
}

#[test]
fn asynchronous_operations_are_done_as_on_linux() {
    compare("async_io.c");
}

#[test]
fn leases_of_files_are_broken_as_on_linux() {
    compare("leases.c");
}

#[test]
fn owners_of_open_files_get_signals_and_processes_share_parts_as_on_linux() {
    compare("owners.c");
}

#[test]
fn each_of_many_files_that_send_signals_sends_them_for_its_own_events_as_on_linux() {
    compare("async_files.c");
}
