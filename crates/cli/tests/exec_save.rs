//! `afresh exec --save`: states of programs that end or stop, and what runs from them; and how
//! programs are found.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

fn start(folder: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
    command.current_dir(folder).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn afresh(folder: &Path, arguments: &[&str], input: &str) -> Output {
    let mut child = start(folder, arguments);
    // A program that ends before it has read all leaves a broken pipe.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// Standard output, standard error and exit status.
fn ended(folder: &Path, arguments: &[&str], input: &str) -> (String, String, Option<i32>) {
    let output = afresh(folder, arguments, input);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

/// Whether this host runs guests.
fn can_run(folder: &Path) -> bool {
    !common::lacks_guests(&afresh(folder, &["exec", "--", "true"], ""))
}

#[test]
fn a_program_that_has_read_its_input_continues_from_its_saved_state() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path();
    if !can_run(top) {
        return;
    }
    let script = "sum=0; while read n; do sum=$((sum + n)); echo $sum; done; echo end";
    let (out, err, code) =
        ended(top, &["exec", "--save", "store@sum", "--", "sh", "-c", script], "1\n2\n");
    assert_eq!((&*out, code), ("1\n3\n", Some(0)), "{err}");
    assert!(err.contains("saved store@sum"), "{err}");
    for _ in 0..2 {
        let (out, err, code) = ended(top, &["run", "store@sum", "--input", "4\n"], "");
        assert_eq!((&*out, code), ("7\n", Some(0)), "{err}");
    }
}

#[test]
fn a_saved_state_replaces_no_other_file() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path();
    if !can_run(top) {
        return;
    }
    std::fs::write(top.join("script"), "text").unwrap();
    let (out, err, code) = ended(top, &["exec", "--save", "script", "--", "echo", "run"], "");
    assert_eq!((&*out, code), ("", Some(1)), "{err}");
    assert!(err.contains("script exists and cannot be read as a snapshot: "), "{err}");
    assert_eq!(std::fs::read(top.join("script")).unwrap(), b"text");
}

#[test]
fn the_state_of_an_exit_has_the_files_and_exits_again() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path();
    if !can_run(top) {
        return;
    }
    let script = "mkdir /tmp/made; echo text > /tmp/made/file; echo done; exit 3";
    let (out, err, code) =
        ended(top, &["exec", "--save", "store@made", "--", "sh", "-c", script], "");
    assert_eq!((&*out, code), ("done\n", Some(3)), "{err}");
    let (out, err, code) = ended(top, &["exec", "store@made", "--", "cat", "/tmp/made/file"], "");
    assert_eq!((&*out, code), ("text\n", Some(0)), "{err}");
    let (out, err, code) = ended(top, &["run", "store@made"], "");
    assert_eq!((&*out, code), ("", Some(3)), "{err}");
    // From state to state.
    let more = [
        "exec",
        "--save",
        "store@more",
        "store@made",
        "--",
        "sh",
        "-c",
        "echo more >> /tmp/made/file",
    ];
    assert_eq!(ended(top, &more, "").2, Some(0));
    let (out, err, code) = ended(top, &["exec", "store@more", "--", "cat", "/tmp/made/file"], "");
    assert_eq!((&*out, code), ("text\nmore\n", Some(0)), "{err}");
    // A name alone is that of a program, also where the directory has such a state.
    std::fs::rename(top.join("store"), top.join("echo")).unwrap();
    assert_eq!(ended(top, &["exec", "echo", "text"], "").0, "text\n");
    let (_, err, code) = ended(top, &["exec", "echo@made", "--", "cat", "/tmp/made/file"], "");
    assert_eq!(code, Some(0), "{err}");
    std::fs::rename(top.join("echo"), top.join("store")).unwrap();
    let (_, err, code) = ended(top, &["exec", "store@made", "--", "nosuch"], "");
    assert!(code == Some(127) && err.contains("nosuch"), "{err}");
    let (_, err, code) =
        ended(top, &["exec", "--save", "store@x", "--", "sh", "-c", "kill -9 $$"], "");
    assert!(code == Some(1) && err.contains("ended by signal 9"), "{err}");
}

#[test]
fn a_command_with_the_files_of_a_state_has_the_home_of_its_user() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path();
    if !can_run(top) {
        return;
    }
    for (user, home) in [("0", "/root\n"), ("1000", "/home/user\n")] {
        let save = ["exec", "--user", user, "--save", "store@own", "--", "true"];
        assert_eq!(ended(top, &save, "").2, Some(0));
        let show = ["exec", "store@own", "--", "sh", "-c", "echo $HOME"];
        let (out, err, code) = ended(top, &show, "");
        assert_eq!((&*out, code), (home, Some(0)), "{err}");
    }
}

#[test]
fn a_state_that_refers_to_moved_files_of_the_host_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    if !can_run(&top) {
        return;
    }
    let dir = top.join("dir");
    std::fs::create_dir_all(dir.join("src/deep")).unwrap();
    for file in ["a", "src/deep/file", "swap"] {
        std::fs::write(dir.join(file), format!("content of {file}\n")).unwrap();
    }
    let at = dir.to_str().unwrap();
    let script = format!("cd {at}; mv a b; mv src lib; mv swap a");
    let save = ["exec", "--write-back", at, "--save", "store@moved", "--", "sh", "-c", &script];
    let (_, err, code) = ended(&top, &save, "");
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("store@moved is not saved: the program has moved a file"), "{err}");
    let expected = "content of a\ncontent of src/deep/file\ncontent of swap\n";
    let names = ["b", "lib/deep/file", "a"].map(|name| dir.join(name));
    let on_host: String = names.iter().map(|name| std::fs::read_to_string(name).unwrap()).collect();
    assert_eq!(on_host, expected, "the changes are written all the same");
    // Content that the program wrote itself is in the state.
    let script = format!("cd {at}; cp b c; rm b; echo more >> a");
    let save = ["exec", "--write-back", at, "--save", "store@own", "--", "sh", "-c", &script];
    let (_, err, code) = ended(&top, &save, "");
    assert_eq!(code, Some(0), "{err}");
    let names = ["c", "lib/deep/file", "a"].map(|name| format!("{at}/{name}"));
    let cat = ["exec", "--dir", at, "store@own", "--", "cat", &names[0], &names[1], &names[2]];
    let (out, err, code) = ended(&top, &cat, "");
    assert_eq!((&*out, code), (&*format!("{expected}more\n"), Some(0)), "{err}");
}

#[test]
fn a_server_is_stopped_and_answers_from_its_saved_state() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path();
    if !can_run(top) || !Path::new("/usr/bin/python3").is_file() {
        return;
    }
    let server = "import socket\ns = socket.create_server(('127.0.0.1', 8000)); print('up', flush=True)\n\
                  while True:\n c, _ = s.accept(); c.sendall(c.recv(99).upper()); c.close()";
    // It computes between its line and its wait, and a state is kept of the wait only.
    let stopped = (0..6).any(|attempt| {
        let mut child =
            start(top, &["exec", "--save", "store@up", "--", "/usr/bin/python3", "-c", server]);
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 3]).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(500 << attempt));
        kill_process(Pid::from_child(&child), Signal::TSTP).unwrap();
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() || err.contains("while it computed"), "{output:?}");
        output.status.success()
    });
    assert!(stopped);
    let (out, err, code) = ended(top, &["run", "store@up", "--input", "hello"], "");
    assert_eq!((&*out, code), ("HELLO\n", Some(0)), "{err}");
}

#[test]
fn programs_are_found_and_named_as_by_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    if !can_run(&top) {
        return;
    }
    assert_eq!(ended(&top, &["exec", "--", "sh", "-c", "echo $0"], "").0, "sh\n");
    let (_, err, code) = ended(&top, &["exec", "--", "no-such-program"], "");
    assert!(code == Some(127) && err.contains("not found in PATH"), "{err}");
    let script = |name: &str, text: &str| {
        std::fs::write(top.join(name), text).unwrap();
        std::fs::set_permissions(top.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    script("plain", "echo plain $1\n");
    assert_eq!(ended(&top, &["exec", "--", "./plain", "one"], "").0, "plain one\n");
    // Files of the present directory replace no program: it may be a stranger's.
    script("sed", "echo replaced\n");
    script("only-here", "echo here\n");
    for call in [&["exec", "--"][..], &["run", "--linux"]] {
        let (out, err, _) = ended(&top, &[call, &["sed", "--version"][..]].concat(), "");
        assert!(!out.contains("replaced"), "{call:?}: {out}{err}");
        let (_, err, code) = ended(&top, &[call, &["only-here"][..]].concat(), "");
        assert!(code != Some(0) && err.contains("./only-here is the path"), "{call:?}: {err}");
    }
    script("binary", "\0\0");
    assert_eq!(ended(&top, &["exec", "--", "./binary"], "").2, Some(126));
    std::fs::write(top.join("data"), "data\n").unwrap();
    let (_, err, code) = ended(&top, &["exec", "--", "cat", "data"], "");
    assert!(code == Some(1) && err.contains("--dir . grants it"), "{err}");
    let inner = top.join("env");
    std::fs::create_dir(&inner).unwrap();
    let (_, err, code) = ended(&inner, &["exec", "--", "cat", "../data"], "");
    let path = top.join("data").display().to_string();
    assert!(code == Some(1) && err.contains(&format!("--dir {path} grants it")), "{err}");
    assert_eq!(ended(&top, &["exec", "--dir", ".", "--", "cat", "data"], "").0, "data\n");
    // A program outside of the usual directories, in a virtual environment: its neighbours are
    // there.
    std::fs::create_dir_all(top.join("env/bin")).unwrap();
    std::fs::write(top.join("env/pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    script("env/bin/tool", "#!/bin/sh\nneighbour\n");
    script("env/bin/neighbour", "#!/bin/sh\necho neighbour\n");
    let tool = ended(&top, &["exec", "--", "env/bin/tool"], "");
    assert_eq!(tool.0, "neighbour\n", "{}", tool.1);
}
