//! `--linux`: programs of the system, as they are.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn afresh(arguments: &[&str], input: impl AsRef<[u8]>) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that fails before it reads closes its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_ref());
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Puts a line's number before it, and ends at `quit`.
const NUMBER: [&str; 5] = ["--linux", "sed", "--", "-u", "/quit/q7;="];

/// Whether this host runs guests, and has sed.
fn can_run() -> bool {
    !common::lacks_guests(&afresh(&[&["serve", "--stdio"], &NUMBER[..]].concat(), "1\n"))
}

#[test]
fn a_program_connects_to_granted_destinations_only() {
    if !can_run() || !std::path::Path::new("/bin/bash").is_file() {
        println!("SKIPPED: no bash, or no guests");
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // It ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut line = String::new();
            std::io::BufReader::new(&stream).read_line(&mut line).unwrap();
            (&stream).write_all(format!("got {line}").as_bytes()).unwrap();
        }
    });
    let script = "while read -r line; do { exec 3<>/dev/tcp/$line/80; } 2>&1 && { echo hello >&3; read -r said <&3; echo \"$said\"; }; done";
    let net = format!("server.test:80=127.0.0.1:{port}");
    let ask = |place: &str| {
        let arguments =
            ["run", "--linux", "--net", &net, "--input", place, "/bin/bash", "--", "-c", script];
        let output = afresh(&arguments, "");
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    assert_eq!(ask("server.test"), "got hello\n");
    for place in ["other.test", "127.0.0.1", "198.51.100.1"] {
        let said = ask(place);
        assert!(said.contains("/dev/tcp/") && !said.contains("got"), "{place}: {said}");
    }
    // A file of rules, and a log of connections.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (rules, log) = (folder.join("net-rules.toml"), folder.join("net-log.jsonl"));
    let _ = std::fs::remove_file(&log);
    std::fs::write(&rules, format!("net = [\"{net}\", {{ to = \"api.test:443\" }}]\n")).unwrap();
    let options = ["--net-rules", rules.to_str().unwrap(), "--net-log", log.to_str().unwrap()];
    let said = afresh(
        &[&["exec"], &options[..], &["/bin/bash", "-c", script]].concat(),
        "server.test\nother.test\n",
    );
    assert!(text(&said.stdout).starts_with("got hello\n"), "{}", text(&said.stderr));
    let lines = std::fs::read_to_string(&log).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<serde_json::Value> = lines.collect();
    assert_eq!(
        (&lines[0]["host"], &lines[0]["result"]),
        (&"server.test".into(), &"allowed".into())
    );
    assert_eq!((&lines[0]["port"], &lines[0]["reason"]), (&80.into(), &serde_json::Value::Null));
    assert!(lines.iter().any(|line| line["host"] == "other.test" && line["result"] == "refused"));
    std::fs::write(&rules, "net = [{ to = \"api.test:443\", method = \"GET\" }]\n").unwrap();
    let refused = text(&afresh(&[&["exec"], &options[..2], &["/bin/bash"]].concat(), "").stderr);
    assert!(refused.contains("net-rules.toml") && refused.contains("unknown field"), "{refused}");
    let refused = afresh(&["run", "--linux", "--net", "server", "/bin/bash"], "");
    assert!(text(&refused.stderr).contains("NAME:PORT"), "{}", text(&refused.stderr));
    // Other guests have no network.
    let module = Path::new(env!("CARGO_TARGET_TMPDIR")).join("net-of-a-module.wasm");
    let code = wat::parse_str("(module (memory 1) (func (export \"next\")))").unwrap();
    std::fs::write(&module, code).unwrap();
    let arguments = ["run", "--net", &net, "--call", "next", module.to_str().unwrap()];
    let refused = afresh(&arguments, "");
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("is no Linux program"), "{}", text(&refused.stderr));
}

#[test]
fn each_line_is_answered_from_the_state_in_which_the_program_first_waited() {
    if !can_run() {
        return;
    }
    let output =
        afresh(&[&["serve", "--stdio", "--warm", "first"], &NUMBER[..]].concat(), "a\nb\na\n");
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((&*out, output.status.code()), ("2\na\n2\nb\n2\na\n", Some(0)), "{err}");
    let arguments = ["run", "--report", "-n", "3", "--input", "x", "--warm", "first"];
    let output = afresh(&[&arguments, &NUMBER[..]].concat(), "");
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((&*out, output.status.code()), ("2\nx\n2\nx\n2\nx\n", Some(0)), "{err}");
    assert!(err.contains("3 calls, each from the warm state"), "{err}");
    assert!(err.contains("the last reset copied"), "{err}");
    // A single file may be granted, and is read as it was.
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("number.sed");
    std::fs::write(&script, "=\n").unwrap();
    let script = script.to_str().unwrap();
    let arguments =
        ["serve", "--stdio", "--linux", "--dir", script, "sed", "--", "-u", "-f", script];
    let output = afresh(&arguments, "a\nb\n");
    assert_eq!(text(&output.stdout), "1\na\n1\nb\n", "{}", text(&output.stderr));
    let output = afresh(&[&["verify", "-n", "10", "--input", "x"], &NUMBER[..]].concat(), "");
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{out}{}", text(&output.stderr));
    assert!(out.contains("10 calls (0 failed)") && out.contains("0 bytes differ"), "{out}");
}

#[test]
fn a_line_of_any_bytes_reaches_the_program() {
    if !can_run() {
        return;
    }
    let arguments = ["serve", "--stdio", "--linux", "sed", "--", "-u", "-n", "l"];
    let output = afresh(&arguments, b"\xff\na\r\n");
    assert_eq!(text(&output.stdout), "\\377$\na$\n", "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_program_that_ends_fails_its_request_and_not_the_next() {
    if !can_run() {
        return;
    }
    let output = afresh(&[&["serve", "--stdio"], &NUMBER[..]].concat(), "a\nquit\nb\n");
    let out = text(&output.stdout);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 5, "{out}");
    assert_eq!([lines[0], lines[1], lines[3], lines[4]], ["1", "a", "1", "b"]);
    assert!(lines[2].starts_with("error: ") && lines[2].contains('7'), "{out}");
    // It printed nothing, and the message does not claim otherwise.
    assert!(!lines[2].contains("said"), "{out}");
    assert_eq!(output.status.code(), Some(1));
    // Alone, it ends as it would without us.
    let output = afresh(&[&["run", "--input", "quit"], &NUMBER[..]].concat(), "");
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
}

#[test]
fn a_program_is_kept_as_a_snapshot_and_forked() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| format!("{}@{name}", folder.path().display());
    let (warm, forked) = (place("warm"), place("forked"));
    let output = afresh(&[&["snapshot", "--to", &warm], &NUMBER[..]].concat(), "");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let output = afresh(&["fork", &warm, "--to", &forked, "--input", "one"], "");
    assert_eq!(text(&output.stdout).lines().take(2).collect::<Vec<_>>(), ["1", "one"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for (from, number) in [(&warm, "1"), (&forked, "2"), (&warm, "1")] {
        let output = afresh(&["serve", "--stdio", from], "a\nb\n");
        let expected = format!("{number}\na\n{number}\nb\n");
        assert_eq!(text(&output.stdout), expected, "{}", text(&output.stderr));
    }
    let output = afresh(&["diff", &warm, &forked], "");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
}

#[test]
fn a_program_that_cannot_run_is_refused_with_the_reason() {
    let output = afresh(&["run", "--linux", "no-such-program-here"], "");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("program no-such-program-here not found in PATH"));
    if can_run() {
        // It never waits for input.
        let output = afresh(&["run", "--linux", "true"], "");
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1));
        assert!(err.contains("exited with status 0 before it waited for input"), "{err}");
    }
}

#[test]
fn input_that_run_does_not_read_is_named() {
    if !can_run() {
        return;
    }
    let note = "standard input is not read; `--input -` sends it";
    let unread = afresh(&["run", "--linux", "cat"], "hi\n");
    assert!(text(&unread.stderr).contains(note), "{}", text(&unread.stderr));
    let read = afresh(&["run", "--linux", "--input", "-", "cat"], "hi\n");
    assert_eq!((text(&read.stdout), text(&read.stderr)), ("hi\n".into(), String::new()));
    let none = afresh(&["run", "--linux", "cat"], "");
    assert_eq!(text(&none.stderr), "");
}

#[test]
fn verify_warns_of_numbers_that_clones_both_draw() {
    if !can_run() || !std::path::Path::new("/bin/bash").is_file() {
        println!("SKIPPED: no bash, or no guests");
        return;
    }
    let verify = |first: &str, each: &str| {
        let script = format!("RANDOM=5\n{first}\nwhile read -r line; do {each}; done");
        let call = ["verify", "-n", "3", "--linux", "--input", "x", "/bin/bash", "--", "-c"];
        let output = afresh(&[&call[..], &[&script]].concat(), "");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    // The generator of RANDOM is in the shell's memory, that of SRANDOM in the kernel.
    let repeats = verify("", "echo $SRANDOM $RANDOM");
    assert!(repeats.contains("/dev/afresh/generation"), "{repeats}");
    assert!(repeats.contains("equal in two clones: value 2"), "{repeats}");
    let reseed = "read -t 0 -u 3 && RANDOM=$SRANDOM; echo $SRANDOM $RANDOM";
    let differ = verify("exec 3</dev/afresh/generation", reseed);
    assert!(differ.contains("they draw their own random numbers"), "{differ}");
    assert!(!differ.contains("equal in two clones"), "{differ}");
}

#[test]
fn isolation_layers_are_listed_and_can_be_required() {
    let output = afresh(&["-o", "json", "doctor"], "");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let layers = report["linux_isolation"].as_object().unwrap();
    if layers.contains_key("missing") || !can_run() {
        println!("SKIPPED: no guests here");
        return;
    }
    let missing: Vec<_> = layers.iter().filter(|(_, found)| **found != "yes").collect();
    let strict =
        [&["--require-isolation", "run", "--replace-processes", "--input", "a"], &NUMBER[..]];
    let output = afresh(&strict.concat(), "");
    let why = text(&output.stderr);
    if missing.is_empty() {
        assert_eq!(text(&output.stdout).trim(), "1\na", "{why}");
    }
    assert_eq!(output.status.success(), missing.is_empty(), "{why}");
    assert!(missing.iter().all(|(name, _)| why.contains(name.as_str())), "{why}");
}
