//! `afresh exec`: the directory that a program starts in, and hints for files and servers that it
//! has no access to.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
    command.current_dir(folder).arg("exec").args(arguments).stdin(Stdio::null());
    command
}

/// Standard output, standard error and exit status.
fn ended(folder: &Path, arguments: &[&str]) -> (String, String, Option<i32>) {
    let output = command(folder, arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

/// A directory with files, if this host runs guests.
fn folder() -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let output = command(folder.path(), &["--", "true"]).output().unwrap();
    if common::lacks_guests(&output) {
        return None;
    }
    std::fs::write(folder.path().join("one"), "1\n").unwrap();
    std::fs::create_dir(folder.path().join("sub")).unwrap();
    Some(folder)
}

#[test]
fn a_program_starts_in_the_present_directory_with_what_is_granted_there() {
    let Some(folder) = folder() else { return };
    let top = folder.path().canonicalize().unwrap();
    let here = format!("{}\n", top.display());
    assert_eq!(ended(&top, &["--", "/bin/pwd"]), (here, String::new(), Some(0)));
    // The directory is empty, and the program may write there.
    let (out, err, code) = ended(&top, &["--", "sh", "-c", "ls; echo x > new; cat new"]);
    assert_eq!((&*out, code), ("x\n", Some(0)), "{err}");
    let (out, err, code) = ended(&top, &["--dir", "one", "--", "cat", "one"]);
    assert_eq!((&*out, code), ("1\n", Some(0)), "{err}");
    let script = "echo y > sub/new; echo z > beside";
    let (_, err, code) = ended(&top, &["--write-back", "sub", "--", "sh", "-c", script]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(std::fs::read_to_string(top.join("sub/new")).unwrap(), "y\n");
    assert!(!top.join("new").exists() && !top.join("beside").exists());
}

#[test]
fn a_program_starts_in_another_directory() {
    let Some(folder) = folder() else { return };
    let top = folder.path().canonicalize().unwrap();
    for option in [["--cwd", "sub"], ["-w", "sub"]] {
        let (out, err, code) = ended(&top, &[&option[..], &["--", "/bin/pwd"]].concat());
        assert_eq!((out, code), (format!("{}/sub\n", top.display()), Some(0)), "{err}");
    }
    let (out, err, code) = ended(&top, &["--dir", ".", "-w", "sub", "--", "cat", "../one"]);
    assert_eq!((&*out, code), ("1\n", Some(0)), "{err}");
    let (out, err, code) = ended(&top, &["-w", "/made/here", "--", "/bin/pwd"]);
    assert_eq!((&*out, code), ("/made/here\n", Some(0)), "{err}");
    // Of a saved state as well.
    let (_, err, code) = ended(&top, &["--save", "store", "--", "true"]);
    assert_eq!(code, Some(0), "{err}");
    let (out, err, code) = ended(&top, &["-w", "/made/there", "./store", "--", "/bin/pwd"]);
    assert_eq!((&*out, code), ("/made/there\n", Some(0)), "{err}");
    let (_, err, code) = ended(&top, &["-w", "there", "./store", "--", "/bin/pwd"]);
    assert!(code == Some(1) && err.contains("absolute"), "{err}");
}

#[test]
fn a_failed_program_has_hints_for_files_that_it_does_not_see() {
    let Some(folder) = folder() else { return };
    let top = folder.path().canonicalize().unwrap();
    let hint = "--dir . grants it";
    for (arguments, line) in [
        // An argument and lookups.
        (&["cat", "one"][..], "the program does not see this directory"),
        (&["sh", "-c", "cat o?e one"], "the program looked for one,"),
        (&["sh", "-c", "cat sub/../one"], "the program looked for sub,"),
    ] {
        let (_, err, _) = ended(&top, &[&["--"], arguments].concat());
        let found = err.lines().any(|text| text.contains(line) && text.contains(hint));
        assert!(found, "{arguments:?}: {err}");
    }
    for arguments in [
        // It looks for nothing, for files that the host lacks, and in paths that it has.
        &["--", "sh", "-c", "exit 3"][..],
        &["--", "sh", "-c", "cat none"],
        &["--", "sh", "-c", "cat ../none/x"],
        &["--", "sh", "-c", "ls; exit 3"],
        &["--", "ls", "/tmp", "/none"],
        &["--dir", ".", "--", "cat", "two"],
        &["--", "sh", "-c", "cat one || true"],
    ] {
        let (_, err, _) = ended(&top, arguments);
        assert!(!err.contains("grants it"), "{arguments:?}: {err}");
    }
}

#[test]
fn a_failed_program_has_hints_for_servers_that_are_not_granted() {
    let Some(folder) = folder() else { return };
    let top = folder.path();
    let asks = "getent hosts example.org";
    let (_, err, code) = ended(top, &["--", "sh", "-c", asks]);
    assert_ne!(code, Some(0), "{err}");
    let line = "asked for example.org, which no --net grants; --net example.org:443 does";
    assert!(err.contains(line), "{err}");
    let (_, err, code) = ended(top, &["--net", "example.org:443", "--", "sh", "-c", asks]);
    assert!(code == Some(0) && !err.contains("--net"), "{err}");
}

#[test]
fn a_program_that_takes_too_long_ends_with_the_status_of_timeout() {
    let Some(folder) = folder() else { return };
    let top = folder.path().canonicalize().unwrap();
    let limited = ["--timeout", "1500ms", "--", "sh", "-c", "while :; do :; done"];
    let (_, err, code) = ended(&top, &limited);
    assert_eq!(code, Some(124), "{err}");
    assert!(err.contains("longer than its limit of 1.5s; `--timeout MS` sets another"), "{err}");
}

#[test]
fn changes_of_a_program_that_a_signal_ends_are_counted_and_not_written() {
    let Some(folder) = folder() else { return };
    let top = folder.path().canonicalize().unwrap();
    let script = "echo x > sub/a; echo x > sub/b; kill -9 $$";
    let (_, err, code) = ended(&top, &["--write-back", "sub", "--", "sh", "-c", script]);
    assert_eq!(code, Some(128 + 9), "{err}");
    assert!(err.contains("2 changes are not written"), "{err}");
    assert_eq!(top.join("sub").read_dir().unwrap().count(), 0);
}

#[test]
fn messages_without_a_reader_do_not_change_the_status() {
    let Some(folder) = folder() else { return };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut failing = command(folder.path(), &["--cost", "--", "sh", "-c", "exit 3"]);
    let status = failing.stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(3));
}

#[test]
fn a_program_of_another_user_may_write_in_its_directory() {
    let Some(folder) = folder() else { return };
    let top = folder.path().canonicalize().unwrap();
    let script = "echo x > new && stat -c %u:%g . new && echo $HOME";
    for (user, owners, home) in [("0", "0:0", "/root"), ("1000:100", "1000:100", "/home/user")] {
        let (out, err, code) = ended(&top, &["--user", user, "--", "sh", "-c", script]);
        assert_eq!(out, format!("{owners}\n{owners}\n{home}\n"), "{user}: {err}");
        assert_eq!(code, Some(0), "{user}: {err}");
    }
}

#[test]
fn a_directory_that_its_user_may_not_read_is_not_granted() {
    let Some(folder) = folder() else { return };
    let top = folder.path().canonicalize().unwrap();
    let closed = top.join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&top, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o000)).unwrap();
    let mut limited = command(&top, &["--dir", "closed", "--", "ls", "closed"]);
    if rustix::process::geteuid().is_root() {
        limited.uid(65534).gid(65534);
    }
    let output = match limited.output() {
        Ok(output) => output,
        Err(error) => return println!("SKIPPED: another user cannot run afresh: {error}"),
    };
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("--dir closed: ") && err.contains("Permission denied"), "{err}");
}

#[test]
fn a_name_that_is_no_program_may_be_an_image() {
    let Some(folder) = folder() else { return };
    let (_, err, code) = ended(folder.path(), &["no-such-program-here"]);
    assert_eq!(code, Some(127), "{err}");
    assert!(err.contains("oci://docker.io/library/no-such-program-here"), "{err}");
}
