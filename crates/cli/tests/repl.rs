//! `afresh repl` as a program: lines continue from one another, and states are kept, rolled back to
//! and forked.

#![cfg(feature = "serve")]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn repl(arguments: &[&str], lines: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .arg("repl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_session_at_a_prompt_keeps_goes_back_and_forks() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/quickjs.wasm");
    if !script.is_file() {
        println!("SKIPPED: {} is not built; `cargo xtask guests` builds it", script.display());
        return;
    }
    let script = script.to_str().unwrap();
    let arguments = [script, "--language", "javascript"];
    let output = repl(
        &arguments,
        "let x = 1\nx += 1\n:checkpoint two\nx += 10\n:back two\nx\n:fork\nx = 'fork'\n:to 0\nx\n\
         console.log('said')\n:tree\n:diff two two\n:quit\nx\n",
    );
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> =
        said.lines().map(|line| line.trim_start_matches(['>', '1', ' '])).collect();
    let expected = ["2", "two is s", "12", "2", "session 1", "\"fork\"", "2", "said"];
    let mut rest = said.as_str();
    for wanted in expected {
        let at = rest.find(wanted).unwrap_or_else(|| panic!("{wanted} is not next in {lines:?}"));
        rest = &rest[at + wanted.len()..];
    }
    assert!(rest.contains("<- session 0*") && rest.contains("<- session 1"), "{rest}");
    assert!(rest.contains("0 bytes in 0 pages differ"), "{rest}");
    let output = repl(&arguments, "throw new Error('no')\n:back nowhere\n:nothing\n");
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    for wanted in ["Error: no", "nowhere", ":help"] {
        assert!(error.contains(wanted), "{wanted} is not in {error}");
    }
}

#[cfg(linux_guests)]
#[test]
fn an_interrupted_call_is_undone_and_lines_that_are_not_text_are_refused() {
    use std::io::{BufRead, BufReader, Read};
    if !Path::new("/usr/bin/python3").is_file() {
        println!("SKIPPED: the system has no python3");
        return;
    }
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["repl", "--linux", "/usr/bin/python3", "--language", "python"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut messages = String::new();
    input.write_all(b"n = 1\n:checkpoint one\nn = 2\n\xff\xfe\n").unwrap();
    let endless = "exec(\"n = 3\\nprint('begun', flush=True)\\nwhile True: pass\")\n";
    input.write_all(endless.as_bytes()).unwrap();
    let begun = output.any(|line| line.is_ok_and(|line| line.ends_with("begun")));
    if !begun {
        child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        child.wait().unwrap();
        assert!(messages.contains("this host"), "{messages}");
        println!("SKIPPED: {messages}");
        return;
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    input.write_all(b"'n is', n\n:back\n'n is', n\n:tree\n").unwrap();
    drop(input);
    let lines: Vec<String> = output.map(Result::unwrap).collect();
    child.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
    let said = lines.join("\n");
    let (two, one) = (said.find("('n is', 2)"), said.find("('n is', 1)"));
    assert!(two.is_some() && two < one, "{said}\n{messages}");
    // States before calls are not left in the tree.
    assert!(said.contains("one") && said.matches(" bytes").count() == 2, "{said}");
    assert!(said.contains("<- session 0*"), "{said}");
    assert!(messages.contains("KeyboardInterrupt"), "{messages}");
    assert!(messages.contains("the line is not UTF-8"), "{messages}");
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[cfg(linux_guests)]
#[test]
fn the_hosts_python_at_a_prompt_forks_with_its_files() {
    if !Path::new("/usr/bin/python3").is_file() {
        println!("SKIPPED: the system has no python3");
        return;
    }
    let output = repl(
        &["--linux", "/usr/bin/python3", "--language", "python"],
        "n = 1\nopen('kept', 'w').write('one')\n:checkpoint one\nn += 1\nopen('kept', 'w').write('changed')\n\
         :fork\nn, open('kept').read()\n:to 0\n:back one\nn, open('kept').read()\n\
         __import__('os').system('echo from a child')\n1 / 0\n:quit\n",
    );
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    if error.contains("this host") {
        println!("SKIPPED: {error}");
        return;
    }
    for wanted in ["(2, 'changed')", "(1, 'one')", "from a child"] {
        assert!(said.contains(wanted), "{wanted} is not in {said}{error}");
    }
    assert!(error.contains("ZeroDivisionError"), "{error}");
}
