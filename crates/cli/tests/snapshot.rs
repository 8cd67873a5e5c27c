//! Warm guests that become snapshots and run out of them: in directories, single files and remotes,
//! signed and sealed, forked and served.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use afresh_memory::{Feature, Features};

const COUNTER: &str = r#"(module
    (memory (export "memory") 20)
    (global $calls (mut i32) (i32.const 0))
    (func (export "warm") (param i32)
        (i32.store (i32.const 70000) (local.get 0))
        (i32.store (i32.const 900000) (i32.const 5)))
    (func (export "next") (param i32) (result i32)
        (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
        (i32.store (i32.const 70000)
            (i32.add (i32.load (i32.const 70000)) (i32.mul (local.get 0) (global.get $calls))))
        (i32.load (i32.const 70000)))
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1000))
    (func (export "echo") (param i32) (result i64)
        (i32.store8 (i32.const 999) (i32.add (i32.const 48) (i32.load (i32.const 900000))))
        (i64.or (i64.shl (i64.const 999) (i64.const 32))
            (i64.extend_i32_u (i32.add (local.get 0) (i32.const 1))))))"#;

/// A temporary directory with the guest in it.
struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("guest.wasm"), wat::parse_str(COUNTER).unwrap()).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }
}

fn afresh(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_afresh")).args(arguments).output().unwrap()
}

/// Standard output of a command that must succeed.
fn ok(arguments: &[&str]) -> String {
    let output = afresh(arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    text
}

/// The error of a command that must fail.
fn refused(arguments: &[&str]) -> String {
    let output = afresh(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn next(place: &str, cache: &str) -> String {
    ok(&["run", place, "--cache", cache, "--call", "next", "-n", "2", "7"])
}

#[test]
fn a_warm_guest_runs_out_of_a_directory_a_file_and_a_remote() {
    let dir = Dir::new();
    let (guest, cache) = (dir.path("guest.wasm"), dir.path("cache"));
    let expected = ok(&["run", &guest, "--warm", "warm:40", "--call", "next", "-n", "2", "7"]);
    assert_eq!(expected, "47\n47\n");
    let remote = format!("file://{}", dir.path("remote"));
    std::fs::create_dir(dir.path("remote")).unwrap();
    let places = [
        format!("{}@v1", dir.path("store")),
        dir.path("store"),
        dir.path("guest.afresh"),
        format!("{remote}@v2"),
    ];
    for place in &places {
        let said =
            ok(&["snapshot", &guest, "--warm", "warm:40", "--to", place, "--record", "next:1"]);
        assert!(said.contains("saved") && said.contains("sha256:"), "{said}");
        for _ in 0..2 {
            assert_eq!(next(place, &cache), expected, "{place}");
        }
        let verified = ok(&["verify", place, "--call", "next", "-n", "3", "7"]);
        assert!(verified.contains(" 0 bytes differ"), "{verified}");
        let found = ok(&["-o", "json", "inspect", place]);
        // A host that cannot fetch pages one by one records none, and reports that.
        let lazy = Features::host().has(Feature::UffdSigbus);
        let set = format!(r#""working_set_pages":{}"#, u8::from(lazy));
        assert!(found.contains(&set), "{found}");
    }
    // The guest itself is not needed any more, nor is the machine it was warmed on.
    std::fs::remove_file(&guest).unwrap();
    std::fs::copy(dir.path("guest.afresh"), dir.path("moved")).unwrap();
    assert_eq!(next(&dir.path("moved"), &dir.path("cold-cache")), expected);
}

#[test]
fn forks_continue_from_the_end_of_a_call_and_store_its_changes() {
    let dir = Dir::new();
    let (guest, store) = (dir.path("guest.wasm"), dir.path("store"));
    let at = |name: &str| format!("{store}@{name}");
    ok(&["snapshot", &guest, "--warm", "warm:40", "--to", &at("0")]);
    for (step, answer) in [(1, "47"), (2, "61"), (3, "82")] {
        let (from, to) = (at(&(step - 1).to_string()), at(&step.to_string()));
        let said = ok(&["fork", &from, "--to", &to, "--call", "next", "7"]);
        assert_eq!(said.lines().next(), Some(answer), "{said}");
        assert!(said.contains(&format!("in {} layers", step + 1)), "{said}");
    }
    // Every state is still there, and none has changed.
    for (name, answer) in [("0", "47"), ("1", "61"), ("2", "82"), ("3", "110")] {
        assert_eq!(next(&at(name), &dir.path("cache")), format!("{answer}\n{answer}\n"));
    }
    let grown = std::fs::read_dir(Path::new(&store).join("blobs/sha256"))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .filter(|len| (4096..40_000).contains(len))
        .count();
    assert!(grown >= 3, "each fork is a small layer");
}

#[test]
fn requests_are_served_line_by_line_each_from_the_warm_state() {
    let dir = Dir::new();
    let store = dir.path("store");
    ok(&["snapshot", &dir.path("guest.wasm"), "--warm", "warm:1", "--to", &store]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["serve", "--stdio", &store, "--call", "echo"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"one\ntwo\n\nthree\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "5one\n5two\n5\n5three\n");
    assert!(output.status.success());
}

#[test]
fn a_request_that_fails_is_answered_on_one_line() {
    let dir = Dir::new();
    let guest = dir.path("trap.wasm");
    let wat = r#"(module (memory (export "memory") 1)
        (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1000))
        (func $deep unreachable)
        (func (export "handle") (param i32) (result i64)
            (if (i32.eq (local.get 0) (i32.const 1)) (then (call $deep)))
            (i64.or (i64.shl (i64.const 1000) (i64.const 32)) (i64.extend_i32_u (local.get 0)))))"#;
    std::fs::write(&guest, wat::parse_str(wat).unwrap()).unwrap();
    for (format, failed) in [("text", "error: "), ("json", r#"{"error":"#)] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
            .args(["-o", format, "serve", "--stdio", &guest])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(b"two\n1\nthree\n").unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[1].starts_with(failed) && lines[1].contains("unreachable"), "{text}");
        assert!(!text.contains("wasm function"), "{text}");
        assert!(lines[0].contains("two") && lines[2].contains("three"), "{text}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn the_only_snapshot_of_a_directory_is_pushed_where_none_is_named() {
    let dir = Dir::new();
    let (guest, store) = (dir.path("guest.wasm"), dir.path("store"));
    let remote = format!("file://{}", dir.path("remote"));
    std::fs::create_dir(dir.path("remote")).unwrap();
    ok(&["snapshot", &guest, "--warm", "warm:40", "--to", &format!("{store}@1")]);
    ok(&["push", &store, &remote]);
    assert_eq!(next(&remote, &dir.path("cache")), "47\n47\n");
    ok(&["snapshot", &guest, "--warm", "warm:50", "--to", &format!("{store}@2")]);
    let said = refused(&["push", &store, &remote]);
    assert!(said.contains('1') && said.contains('2') && said.contains("latest"), "{said}");
}

/// A sample guest, where KVM is and `cargo xtask guests` built it.
fn micro_vm() -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/vm/hash");
    if !Path::new("/dev/kvm").exists() || !path.exists() {
        println!("SKIPPED: no KVM here, or {} is not built", path.display());
        return None;
    }
    Some(path.display().to_string())
}

#[test]
fn a_micro_vm_runs_out_of_a_snapshot() {
    let Some(elf) = micro_vm() else { return };
    let dir = Dir::new();
    let store = dir.path("store");
    let expected = ok(&["run", &elf, "--memory", "32", "--input", "some words"]);
    ok(&["snapshot", &elf, "--memory", "32", "--to", &store, "--record", "some words"]);
    for _ in 0..2 {
        assert_eq!(ok(&["run", &store, "--input", "some words"]), expected);
    }
    let fork = format!("{store}@fork");
    ok(&["fork", &store, "--to", &fork, "--input", "others"]);
    ok(&["run", &fork, "--input", "some words"]);
    let verified = ok(&["verify", &fork, "--input", "some words", "-n", "3"]);
    assert!(verified.contains(" 0 bytes differ, 0 other"), "{verified}");
}

#[test]
fn only_trusted_signatures_and_the_right_key_open_a_snapshot() {
    let dir = Dir::new();
    let (guest, store) = (dir.path("guest.wasm"), dir.path("store"));
    let (mine, sealing, other) = (dir.path("mine"), dir.path("sealing"), dir.path("other"));
    let public = ok(&["keygen", "signing", &mine]);
    std::fs::write(dir.path("trusted"), public).unwrap();
    std::fs::write(dir.path("stranger"), ok(&["keygen", "signing", &other])).unwrap();
    ok(&["keygen", "sealing", &sealing]);
    let (signed, sealed, bare) =
        (format!("{store}@signed"), format!("{store}@sealed"), format!("{store}@bare"));
    ok(&["snapshot", &guest, "--warm", "warm:40", "--to", &bare]);
    ok(&["snapshot", &guest, "--warm", "warm:40", "--to", &signed, "--sign", &mine]);
    ok(&["snapshot", &guest, "--warm", "warm:40", "--to", &sealed, "--seal", &sealing]);
    let trusted = dir.path("trusted");
    let stranger = dir.path("stranger");
    let good: [(&str, Vec<&str>); 3] =
        [(&bare, vec![]), (&signed, vec!["--trust", &trusted]), (&sealed, vec!["--key", &sealing])];
    for (place, with) in good {
        // Options of the command go before the guest's own arguments.
        let mut arguments: Vec<&str> = with;
        arguments.extend(["run", place, "--call", "next", "7"]);
        assert_eq!(ok(&arguments), "47\n");
    }
    let bad: [(&str, Vec<&str>, &str); 4] = [
        (&bare, vec!["--trust", &trusted], "sign"),
        (&signed, vec!["--trust", &stranger], "sign"),
        (&sealed, vec![], "--key FILE"),
        (&bare, vec!["--key", &sealing], "seal"),
    ];
    for (place, with, word) in bad {
        let mut arguments: Vec<&str> = with;
        arguments.extend(["run", place, "--call", "next", "7"]);
        let said = refused(&arguments);
        assert!(said.contains(word), "{arguments:?}: {said}");
    }
}

#[test]
fn failed_saves_and_opens_report_the_reason() {
    let dir = Dir::new();
    let (guest, store) = (dir.path("guest.wasm"), dir.path("store"));
    ok(&["snapshot", &guest, "--warm", "warm:40", "--to", &store]);
    let twice = refused(&["run", &store, "--warm", "warm:1", "--call", "next", "1"]);
    assert!(twice.contains("snapshot of a warm guest"), "{twice}");
    let unknown = refused(&["run", &format!("{store}@nothing"), "--call", "next", "1"]);
    assert!(unknown.contains("nothing") && unknown.contains("latest"), "{unknown}");
    let missing = refused(&["run", &dir.path("nowhere"), "--call", "next", "1"]);
    assert!(missing.contains("nowhere"), "{missing}");
    ok(&["import", &guest, &format!("{store}@raw")]);
    let raw = refused(&["run", &format!("{store}@raw"), "--call", "next", "1"]);
    assert!(raw.contains("kind `raw`"), "{raw}");
    let digest = refused(&["snapshot", &guest, "--to", &format!("{store}@sha256:00")]);
    assert!(digest.contains("digest"), "{digest}");
}

#[test]
fn a_limit_on_sizes_refuses_a_larger_snapshot() {
    let dir = Dir::new();
    let saved = dir.path("guest.afresh");
    ok(&["snapshot", &dir.path("guest.wasm"), "--warm", "warm:40", "--to", &saved]);
    let run = ["run", &saved, "--call", "next", "7"];
    let limited = |limit| [&run[..], &["--limit", limit]].concat();
    assert_eq!(ok(&limited("memory=2MiB")), "47\n");
    let error = refused(&limited("memory=64KiB"));
    assert!(error.contains("above the limit `memory` of 65536"), "{error}");
    let error = refused(&["inspect", &saved, "--limit", "memory=64KiB"]);
    assert!(error.contains("above the limit `memory` of 65536"), "{error}");
    for wrong in ["nothing=1", "memory", "memory=much"] {
        let output = afresh(&limited(wrong));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{wrong}: {error}");
        assert!(error.contains("is not a limit: NAME=SIZE, with a name among"), "{error}");
    }
}

#[test]
fn files_that_are_no_snapshots_are_not_replaced() {
    let dir = Dir::new();
    let (guest, script, file) = (dir.path("guest.wasm"), dir.path("hh.py"), dir.path("a.afresh"));
    std::fs::write(&script, "print(1)\n").unwrap();
    let wasm = std::fs::read(&guest).unwrap();
    ok(&["snapshot", &guest, "--to", &file]);
    for to in [&guest, &script] {
        for arguments in [
            vec!["snapshot", &guest, "--to", to],
            vec!["fork", &guest, "--to", to, "--call", "next", "1"],
            vec!["push", &file, to],
        ] {
            let error = refused(&arguments);
            let wanted = format!("{to} exists and cannot be read as a snapshot: ");
            assert!(error.contains(&wanted), "{arguments:?}: {error}");
        }
        let error = refused(&["export", &file, to]);
        assert!(error.contains("exists already: choose another name, or remove it"), "{error}");
        let error = refused(&["keygen", "signing", to]);
        assert!(error.contains("exists already: choose another name, or remove it"), "{error}");
        let error = refused(&["repl", &guest, "--history", to]);
        assert!(error.contains("is no history: choose another name"), "{error}");
    }
    assert_eq!(std::fs::read(&script).unwrap(), b"print(1)\n");
    assert_eq!(std::fs::read(&guest).unwrap(), wasm);
    // A snapshot is.
    ok(&["fork", &guest, "--to", &file, "--call", "next", "5"]);
    assert_eq!(ok(&["run", &file, "--call", "next", "0"]), "5\n");
}

/// A command that runs until the end of the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server of `store` on its standard input, after its first answer.
fn answering(store: &str, images: &str, errors: &str) -> Running {
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["serve", "--stdio", store, "--call", "echo"])
        .env("AFRESH_IMAGES", images)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(errors).unwrap())
        .spawn()
        .unwrap();
    child.stdin.as_mut().unwrap().write_all(b"one\n").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "5one\n", "{}", std::fs::read_to_string(errors).unwrap());
    Running(child)
}

/// The inodes of the shared images that a process maps.
fn shared_images(process: &Running) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.0.id())).unwrap();
    let shared = maps.lines().filter(|line| line.contains("memfd:afresh-shared-image"));
    shared.map(|line| line.split_whitespace().nth(4).unwrap().to_owned()).collect()
}

#[test]
fn commands_share_the_memory_of_a_snapshot_through_a_daemon() {
    let dir = Dir::new();
    let (store, socket, errors) = (dir.path("store"), dir.path("socket"), dir.path("errors"));
    ok(&["snapshot", &dir.path("guest.wasm"), "--warm", "warm:1", "--to", &store]);
    let daemon = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["images", "--socket", &socket, &store])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut daemon = Running(daemon);
    let messages = BufReader::new(daemon.0.stderr.take().unwrap()).lines();
    let ready = messages.map(Result::unwrap).find(|line| line.contains("images on"));
    assert!(ready.is_some());
    let (one, two) = (answering(&store, &socket, &errors), answering(&store, &socket, &errors));
    assert_eq!(shared_images(&one).len(), 1);
    assert_eq!(shared_images(&one), shared_images(&two));
    assert_eq!(std::fs::read_to_string(&errors).unwrap(), "");
    drop(daemon);
    // Without the daemon a process reports that once, and makes its own image.
    let three = answering(&store, &socket, &errors);
    assert_eq!(shared_images(&three), BTreeSet::new());
    let text = std::fs::read_to_string(&errors).unwrap();
    assert_eq!(text.matches("this process makes its own images").count(), 1, "{text}");
}
