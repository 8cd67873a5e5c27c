//! The command as a user meets it: answers, exit codes, messages, and the real guests.

use std::path::PathBuf;
use std::process::{Command, Output};

fn afresh(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_afresh")).args(arguments).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Directory for files of a test; the name keeps tests apart.
fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{name}"))
}

/// Writes a module and returns its path.
fn module(name: &str, wat: &str) -> String {
    let path = scratch(&format!("{name}.wasm"));
    std::fs::write(&path, wat::parse_str(wat).unwrap()).unwrap();
    path.display().to_string()
}

/// A guest that `cargo xtask guests` builds, or a loud skip.
fn real_guest(name: &str) -> Option<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/guests").join(name);
    if path.exists() {
        return Some(path.display().to_string());
    }
    println!("SKIPPED: {} is not built; `cargo xtask guests` builds it", path.display());
    None
}

#[test]
fn errors_control_no_terminal() {
    let refused = err(&afresh(&["run", "./absent\u{1b}]0;title\u{7}\u{9b}2J.wasm"]));
    assert!(refused.contains("title"), "{refused:?}");
    assert!(!refused.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{refused:?}");
}

const COUNTER: &str = r#"(module
    (memory 1)
    (func (export "warm") (param i32) (i32.store (i32.const 0) (local.get 0)))
    (func (export "next") (param i32) (result i32)
        (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
        (i32.load (i32.const 0)))
    (func (export "trap") unreachable)
    (func (export "spin") (loop (br 0))))"#;

#[test]
fn run_starts_every_call_from_the_warm_state() {
    let guest = module("run", COUNTER);
    let output = afresh(&["run", &guest, "--warm", "warm:40", "--call", "next", "-n", "3", "2"]);
    assert_eq!(
        (out(&output).as_str(), output.status.code()),
        ("42\n42\n42\n", Some(0)),
        "{}",
        err(&output)
    );
    let output = afresh(&["-o", "json", "run", &guest, "--call", "next", "-1"]);
    assert!(out(&output).starts_with(r#"{"result":["-1"],"us":"#), "{}", out(&output));
}

#[test]
fn each_failure_is_named_and_has_an_exit_code() {
    let guest = module("wrong", COUNTER);
    for (arguments, code, message) in [
        (vec!["run", "/nonexistent.wasm"], 1, "cannot read /nonexistent.wasm"),
        (
            vec!["run", &guest, "--call", "nxt"],
            1,
            "exports no function \"nxt\"; it exports next, spin, trap, warm",
        ),
        (vec!["run", &guest, "--call", "next", "two"], 1, "argument 1: `two` is not of type i32"),
        (vec!["run", &guest, "--call", "next"], 1, "0 arguments given, 1 wanted"),
        (vec!["run", &guest, "--call", "trap"], 1, "the guest trapped"),
        (
            vec!["run", &guest, "--call", "spin", "--timeout", "50"],
            1,
            "stopped after its timeout of 50ms",
        ),
        (
            vec!["run", &guest, "--call", "spin", "--fuel", "1000"],
            1,
            "used up its 1000 units of fuel",
        ),
        (vec!["run", &guest, "--warm", "next:x"], 1, "`x` is not of type i32"),
        (vec!["run", &guest, "--strategy", "magic"], 2, "unknown strategy `magic`"),
        (vec!["run", &guest, "--mode", "magic"], 2, "unknown mode `magic`"),
        (vec!["frobnicate"], 2, "unrecognized subcommand"),
    ] {
        let output = afresh(&arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", err(&output));
        assert!(err(&output).contains(message), "{arguments:?}: {}", err(&output));
    }
    let text = scratch("text.txt");
    std::fs::write(&text, "(module)").unwrap();
    let output = afresh(&["run", &text.display().to_string()]);
    assert!(
        err(&output).contains("neither a Wasm binary nor an ELF executable"),
        "{}",
        err(&output)
    );
}

/// Exports a handler of bytes.
const ECHO: &str = r#"(module
    (memory (export "memory") 1)
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1000))
    (func (export "handle") (param i32) (result i64)
        (i64.or (i64.shl (i64.const 1000) (i64.const 32)) (i64.extend_i32_u (local.get 0)))))"#;

#[test]
fn an_error_names_the_command_or_the_option_that_helps() {
    let guest = module("echo", ECHO);
    let script = scratch("hello.py").display().to_string();
    std::fs::write(&script, "print(1)\n").unwrap();
    let dir = env!("CARGO_TARGET_TMPDIR");
    let elf = scratch("elf").display().to_string();
    std::fs::write(&elf, [&b"\x7fELF\x02\x01\x01"[..], &[0; 57]].concat()).unwrap();
    let spin = module("spin", COUNTER);
    let mut cases = vec![
        (vec!["run", &guest, "--call", "handle"], "`handle` takes bytes: give them with `--input`"),
        (vec!["run", &guest, "--memory", "64MB"], "as `64MiB` or `2GiB`"),
        (vec!["run", &guest, "--timeout", "1.5s"], "as `10s`, `500ms` or `2m`"),
        (
            vec!["run", &spin, "--call", "spin", "--timeout", "50ms", "--memory", "64MiB"],
            "help: `--timeout MS` sets another limit",
        ),
        (vec!["serve", "js=js.wasm"], "a route begins with `/`: `/js=js.wasm`"),
        (vec!["pager", "store"], "Usage: afresh pager "),
    ];
    let as_program = format!("`afresh exec -- {elf}` runs it as a Linux program");
    let command = format!("`afresh exec --dir {dir} -- python3 {script}` runs a script");
    if cfg!(linux_guests) {
        cases.push((vec!["run", &script], &command));
        cases.push((vec!["run", "sh"], "help: --linux runs a program of PATH"));
        cases.push((vec!["run", &elf], &as_program));
        cases.push((vec!["mcp", "sh"], "--linux runs the host's sh"));
    }
    for (arguments, message) in cases {
        let output = afresh(&arguments);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(err(&output).contains(message), "{arguments:?}: {}", err(&output));
    }
}

/// A WASI command: prints its second argument and then its standard input, eight bytes of each.
const COMMAND: &str = r#"(module
    (import "wasi_snapshot_preview1" "args_get" (func $args_get (param i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
    (memory (export "memory") 1)
    (func (export "_start")
        (drop (call $args_get (i32.const 16) (i32.const 1024)))
        (i32.store (i32.const 0) (i32.load (i32.const 20)))
        (i32.store (i32.const 4) (i32.const 8))
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
        (i32.store (i32.const 0) (i32.const 4096))
        (drop (call $read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 8)))
        (i32.store (i32.const 4) (i32.load (i32.const 8)))
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
        (call $exit (i32.const 0))))"#;

#[test]
fn a_wasi_command_gets_its_arguments_and_standard_input() {
    let guest = module("command", COMMAND);
    let output = afresh(&["run", &guest, "--input", "from text", "-n", "2", "--", "--flag!!"]);
    assert_eq!(out(&output), "--flag!!from tex--flag!!from tex", "{}", err(&output));
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["run", &guest, "argument"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"piped in").unwrap();
    assert_eq!(out(&child.wait_with_output().unwrap()), "argumentpiped in");
}

#[test]
fn a_command_that_ends_itself_gives_its_code_and_no_message() {
    let guest = module(
        "exits",
        &COMMAND.replace("(call $exit (i32.const 0))", "(call $exit (i32.const 33))"),
    );
    let output = afresh(&["run", &guest, "-n", "2", "--input", "text", "--", "--flag!!"]);
    assert_eq!(output.status.code(), Some(33), "{}", err(&output));
    // The first of two calls ended everything.
    assert_eq!((out(&output).as_str(), err(&output).as_str()), ("--flag!!text", ""));
}

#[test]
fn options_are_taken_before_and_after_the_arguments_of_a_call() {
    let guest = module("after", COUNTER);
    for arguments in [
        &["run", &guest, "--report", "--call", "next", "2"][..],
        &["run", &guest, "--call", "next", "2", "--report"],
        &["run", &guest, "2", "--call", "next", "--report"],
    ] {
        let output = afresh(arguments);
        assert_eq!(out(&output), "2\n", "{arguments:?}: {}", err(&output));
        assert!(err(&output).contains("1 call, each from the warm state"), "{arguments:?}");
    }
    let output = afresh(&["run", &guest, "--call", "next", "--repotr", "2"]);
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
}

#[test]
fn missing_imports_are_all_named_and_can_be_stubbed() {
    let wat = r#"(module (import "env" "one" (func)) (import "env" "two" (func (param i32)))
        (func (export "fine") (result i32) (i32.const 7)))"#;
    let guest = module("imports", wat);
    let output = afresh(&["run", &guest, "--call", "fine"]);
    let text = err(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("env.one") && text.contains("env.two"), "{text}");
    assert!(text.contains("--stub-imports"), "{text}");
    let output = afresh(&["run", &guest, "--call", "fine", "--stub-imports"]);
    assert_eq!(out(&output), "7\n", "{}", err(&output));
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    for shell in ["bash", "fish", "zsh"] {
        let text = out(&afresh(&["completions", shell]));
        assert!(text.contains("stub-imports") && text.contains("snapshot"), "{shell}");
    }
    let dir = scratch("man");
    let output = afresh(&["man", &dir.display().to_string()]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let page = std::fs::read_to_string(dir.join("afresh-run.1")).unwrap();
    assert!(page.contains("stub\\-imports"), "{page}");
    assert!(dir.join("afresh.1").exists());
    assert!(out(&afresh(&["man"])).starts_with(".ie"), "a page for man");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn verify_finds_nothing_left_in_every_mode_and_strategy() {
    let guest = module("verify", COUNTER);
    for extra in [
        &["--mode", "reset"][..],
        &["--mode", "fresh"],
        &["--strategy", "full-copy"],
        &["--strategy", "discard"],
    ] {
        let mut arguments = vec!["-o", "json", "verify", &guest, "-n", "20", "--call", "next"];
        arguments.extend_from_slice(extra);
        arguments.push("1");
        let output = afresh(&arguments);
        assert_eq!(output.status.code(), Some(0), "{extra:?}: {}", err(&output));
        let text = out(&output);
        assert!(text.contains(r#""bytes_differ":0,"items_differ":0,"answers_differ":0"#), "{text}");
        assert!(text.contains(r#""pristine":true"#), "{text}");
    }
}

#[test]
fn verify_warns_when_clones_draw_the_same_numbers() {
    let wat = r#"(module (memory 1) (global $s (mut i64) (i64.const 7))
        (func (export "random") (result i64)
            (global.set $s (i64.mul (global.get $s) (i64.const 6364136223846793005)))
            (global.get $s)))"#;
    let output = afresh(&["verify", &module("clones", wat), "--call", "random", "-n", "3"]);
    assert!(out(&output).contains("every clone draws the same ones"), "{}", out(&output));
}

#[test]
fn a_verification_that_proves_nothing_says_so_and_fails() {
    let trap = module("traps.wat", r#"(module (memory 1) (func (export "go") unreachable))"#);
    for mode in ["reset", "fresh"] {
        let output = afresh(&["verify", &trap, "--mode", mode, "--call", "go", "-n", "3"]);
        assert_eq!(output.status.code(), Some(3), "{}", err(&output));
        assert!(out(&output).contains("no proof: all 3 calls failed"), "{}", out(&output));
        let output =
            afresh(&["verify", &trap, "--mode", mode, "--call", "go", "-n", "3", "-o", "json"]);
        assert_eq!(output.status.code(), Some(3));
        assert!(out(&output).contains("\"pristine\":null"), "{}", out(&output));
    }
    let output = afresh(&["verify", &trap, "--call", "go", "-n", "0"]);
    assert_eq!(output.status.code(), Some(3), "{}", out(&output));
    let component = module("empty.wat", "(component)");
    let output = afresh(&["verify", &component, "--call", "mistyped", "-n", "3"]);
    assert_eq!(output.status.code(), Some(1), "{}", out(&output));
    assert!(err(&output).contains("\"mistyped\""), "{}", err(&output));
}

#[test]
fn doctor_explains_the_choice_and_plays_a_poorer_host() {
    let output = afresh(&["doctor"]);
    assert!(out(&output).contains("Chosen: "), "{}", out(&output));
    assert!(out(&output).contains("Memory pressure: "), "{}", out(&output));
    let output = afresh(&["-o", "json", "doctor", "--without", "uffd,mprotect"]);
    assert!(out(&output).contains(r#""chosen":{"strategy":"discard""#), "{}", out(&output));
    assert!(out(&output).contains(r#""memory_pressure":""#), "{}", out(&output));
    assert_eq!(afresh(&["doctor", "--without", "gravity"]).status.code(), Some(1));
}

#[test]
fn clones_of_the_javascript_engine_draw_different_random_numbers() {
    let Some(js) = real_guest("js.wasm") else { return };
    let input = r#"{"op":"random","count":3}"#;
    let output =
        afresh(&["run", &js, "--warm", "warm", "--call", "handle", "--input", input, "-n", "3"]);
    let text = out(&output);
    let lines: std::collections::HashSet<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}{}", err(&output));
}

#[test]
fn a_spinning_script_is_stopped_and_the_engine_stays_usable() {
    let Some(js) = real_guest("js.wasm") else { return };
    let output = afresh(&[
        "verify",
        &js,
        "--warm",
        "warm",
        "--call",
        "handle",
        "--input",
        r#"{"op":"spin"}"#,
        "--timeout",
        "500",
        "-n",
        "2",
        "-o",
        "json",
    ]);
    let text = out(&output);
    // Both calls were ended, and left no trace; as no call succeeded, nothing is claimed.
    assert_eq!(output.status.code(), Some(3), "{text}{}", err(&output));
    for part in
        [r#""failed_calls":2,"bytes_differ":0,"items_differ":0"#, "timeout", r#""pristine":null"#]
    {
        assert!(text.contains(part), "{part}: {text}{}", err(&output));
    }
}

#[test]
#[cfg(feature = "serve")]
fn a_component_that_answers_http_is_asked_and_verified_as_it_is() {
    let Some(handler) = real_guest("http.wasm") else { return };
    let output = afresh(&["run", &handler, "-n", "2", "/visit?canary"]);
    let expected = "served 1 traces []\n".repeat(2);
    assert_eq!((out(&output), output.status.code()), (expected, Some(0)), "{}", err(&output));
    let output = afresh(&["-o", "json", "run", &handler, "/echo", "--input", "a body"]);
    assert!(out(&output).starts_with(r#"{"status":200,"result":"a body","#), "{}", out(&output));
    let output = afresh(&["verify", &handler, "-n", "5", "/visit?canary"]);
    assert!(out(&output).contains("0 bytes differ"), "{}{}", out(&output), err(&output));
    assert_eq!(output.status.code(), Some(0));
    for (path, said) in [("/nothing", "status 404"), ("/trap", "trap"), ("/a b", "/a b")] {
        let error = err(&afresh(&["run", &handler, path]));
        assert!(error.contains(said), "{path}: {error}");
    }
    // A verification of nothing but traps has proved nothing.
    let output = afresh(&["verify", &handler, "-n", "2", "/trap"]);
    assert_eq!(output.status.code(), Some(3), "{}", out(&output));
}

#[test]
fn a_component_runs_fresh_each_time() {
    let Some(component) = real_guest("component.wasm") else { return };
    let output = afresh(&["run", &component, "--call", "digest", "-n", "3"]);
    let text = out(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() == 3 && lines.iter().all(|l| *l == lines[0]), "{text}{}", err(&output));
    let output = afresh(&["run", &component, "--call", "deposit", "all"]);
    assert!(err(&output).contains("`all` cannot be read as"), "{}", err(&output));
    let output = afresh(&["run", &component, "--call", "withdraw"]);
    assert!(err(&output).contains("it exports calls, deposit, digest"), "{}", err(&output));
    let output = afresh(&["verify", &component, "--call", "fill", "-n", "5", "100", "7"]);
    assert_eq!(output.status.code(), Some(0), "{}{}", out(&output), err(&output));
}

#[test]
#[cfg(target_arch = "aarch64")]
fn micro_vms_are_refused_with_the_name_of_the_processor() {
    let directory = tempfile::tempdir().unwrap();
    let machine = directory.path().join("machine");
    // An executable without a dynamic loader.
    std::fs::write(&machine, [b"\x7fELF".as_slice(), &[0; 60]].concat()).unwrap();
    let output = afresh(&["run", machine.to_str().unwrap()]);
    let reason = "afresh runs micro-VMs on x86_64 Linux only, and this is aarch64";
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains(reason), "{}", err(&output));
    let doctor = afresh(&["doctor"]);
    assert!(out(&doctor).contains(reason), "{}", out(&doctor));
}

#[test]
fn a_micro_vm_guest_runs_and_verifies() {
    let Some(hash) = real_guest("vm/hash") else { return };
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        println!("SKIPPED: /dev/kvm: {error}");
        return;
    }
    let output = afresh(&["run", &hash, "--input", "abc", "-n", "2"]);
    let text = out(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() == 2 && lines[0] == lines[1], "{text}{}", err(&output));
    let output = afresh(&["verify", &hash, "--input", "abc", "-n", "5"]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
}
