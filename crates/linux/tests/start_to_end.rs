//! A program runs from its start to its end, its system calls served by us.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use afresh_linux::{End, Program, WarmError};

fn runs(flags: &[&str]) {
    let Some(path) = common::compiled("hello.c", flags) else { return };
    let program = Program::new(&path).arg("one").arg("two words").env("COLOUR", "green");
    let Some(run) = common::here(program.run(b"what goes in\n")) else { return };
    assert_eq!(run.end, End::Exit(13), "{}", run.messages);
    assert_eq!(run.output, b"3 two words green\nwhat goes in\n");
    assert_eq!(run.messages, "");
    assert!(
        !std::path::Path::new("/usr/new").exists() && !std::path::Path::new("/tmp/other").exists()
    );
}

#[test]
fn a_static_program_runs() {
    runs(&["-static"]);
}

#[test]
fn a_static_program_that_may_lie_anywhere_runs() {
    runs(&["-static-pie"]);
}

#[test]
fn a_dynamic_program_runs() {
    runs(&[]);
}

#[test]
fn what_is_no_program_is_refused_by_name() {
    let refused = |program: Program| program.run(b"").expect_err("it cannot run");
    assert!(matches!(refused(Program::new("/nowhere/at/all")), WarmError::NotFound(_)));
    let script = refused(Program::new("/usr/bin/ldd")).to_string();
    if std::path::Path::new("/usr/bin/ldd").exists() && !script.contains("cannot run Linux guests")
    {
        assert!(script.contains("is a script"), "{script}");
    }
}
