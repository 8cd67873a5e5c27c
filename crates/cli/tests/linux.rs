//! `afresh linux`: programs of the system, as they are.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn linux(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .arg("linux")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Puts a line's number before it, and ends at `quit`.
const NUMBER: &[&str] = &["sed", "-u", "/quit/q7;="];

/// Whether this host runs guests, and has sed.
fn can_run() -> bool {
    let output = linux(&[&["--verify"], NUMBER].concat(), "1\n");
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    // What the host lacks is named; anything else is for the tests to find.
    let lacks = ["no program", "seccomp", "userfaultfd", "denied", "not permitted"];
    if !output.status.success() && lacks.iter().any(|word| why.contains(word)) {
        println!("SKIPPED: {}", why.trim());
        return false;
    }
    true
}

#[test]
fn each_line_is_answered_from_the_state_in_which_the_program_first_waited() {
    if !can_run() {
        return;
    }
    let arguments = [&["--verify", "--report", "--warm", "first"], NUMBER].concat();
    let output = linux(&arguments, "a\nb\na\n");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!((&*out, output.status.code()), ("2\na\n2\nb\n2\na\n", Some(0)), "{err}");
    assert!(err.contains("3 calls, each from the warm state"), "{err}");
}

#[test]
fn a_program_that_ends_fails_its_request_and_not_the_next() {
    if !can_run() {
        return;
    }
    let output = linux(NUMBER, "a\nquit\nb\n");
    let out = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 5, "{out}");
    assert_eq!([lines[0], lines[1], lines[3], lines[4]], ["1", "a", "1", "b"]);
    assert!(lines[2].starts_with("error: ") && lines[2].contains('7'), "{out}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_goes_wrong_before_is_named() {
    let output = linux(&["no-such-program-here"], "");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("no program no-such-program-here in PATH"), "{err}");
    assert_eq!(output.status.code(), Some(1));
    if can_run() {
        let output = linux(&["--", "true"], "");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(err.contains("before it waited for input"), "{err}");
    }
}
