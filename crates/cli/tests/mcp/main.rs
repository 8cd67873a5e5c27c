//! `afresh mcp` as a program, with messages of the Model Context Protocol as its clients write
//! them.

#![cfg(feature = "mcp")]

mod client;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

use client::Client;
use serde_json::{Value, json};

fn quickjs() -> Option<String> {
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests/quickjs.wasm");
    if !guest.is_file() {
        println!("SKIPPED: {} is not built; `cargo xtask guests` builds it", guest.display());
        return None;
    }
    Some(guest.to_str().unwrap().to_owned())
}

/// The host's Python, as a Linux program.
#[cfg(linux_guests)]
fn python() -> Option<&'static str> {
    const PYTHON: &str = "/usr/bin/python3";
    let found = Path::new(PYTHON).is_file().then_some(PYTHON);
    if found.is_none() {
        println!("SKIPPED: {PYTHON} is not installed");
    }
    found
}

#[test]
fn an_agent_runs_code_and_returns_to_a_checkpoint() {
    let Some(guest) = quickjs() else { return };
    let mut client =
        Client::start(&[&guest, "--language", "javascript", "--setup", "var warm = 40"]);
    let listed = client.ask("tools/list", json!({}));
    let tools = listed["tools"].as_array().unwrap();
    assert!(tools.iter().all(|tool| tool["inputSchema"]["type"] == "object"), "{listed}");
    // A Wasm guest has no commands.
    assert!(!tools.iter().any(|tool| tool["name"] == "run_command"), "{listed}");

    let ran =
        client.call_ok("run_code", json!({"code": "console.log('héllo'); var x = warm + 2; x"}));
    assert_eq!((&ran["stdout"], &ran["json"]), (&json!("héllo\n"), &json!(42)), "{ran}");
    client.call_ok("checkpoint", json!({"name": "two"}));
    client.call_ok("run_code", json!({"code": "x = 0"}));
    let forks = client.call_ok("fork", json!({"count": 2}));
    let fork = forks["sandboxes"][1].as_str().unwrap().to_owned();
    // A name means the nearest state that has it, whatever forks name later.
    client.call_ok("checkpoint", json!({"name": "two", "sandbox": fork}));
    client.call_ok("rollback", json!({"to": "two"}));
    assert_eq!(client.call_ok("run_code", json!({"code": "x"}))["json"], 42);
    assert_eq!(client.call_ok("run_code", json!({"code": "x", "sandbox": fork}))["json"], 0);
    let tree = client.call_ok("tree", json!({}));
    let start = tree["states"][0]["id"].as_str().unwrap().to_owned();
    client.call_ok("rollback", json!({"to": start}));
    assert_eq!(client.call_ok("run_code", json!({"code": "typeof x"}))["json"], "undefined");

    let new = client.call_ok("create_sandbox", json!({}))["sandboxes"][0].clone();
    assert_eq!(client.call_ok("run_code", json!({"code": "warm", "sandbox": new}))["json"], 40);
    client.call_ok("close_sandbox", json!({"sandbox": new}));
    let gone = client.refused("run_code", json!({"code": "1", "sandbox": new}));
    assert!(gone.contains("list_sandboxes"), "{gone}");
}

#[test]
fn scripts_may_declare_names_again() {
    let Some(guest) = quickjs() else { return };
    let setup = "const x = 0; let y = 0; class Z {}";
    let mut client = Client::start(&[&guest, "--language", "javascript", "--setup", setup]);
    for value in [1, 2] {
        let code = format!("const x = {value}; let y; class Z {{}}\n[x, y === undefined]");
        assert_eq!(client.call_ok("run_code", json!({"code": code}))["json"], json!([value, true]));
        client.call_ok("run_code", json!({"code": "y = 5"}));
    }
    let lost = client.call_ok("run_code", json!({"code": "Promise.reject(new Error('lost')); 1"}));
    let errors = lost["stderr"].as_str().unwrap();
    assert!(errors.starts_with("Uncaught (in promise) Error: lost"), "{lost}");
    let nul = client.refused("run_code", json!({"code": "'\0'"}));
    assert!(nul.contains("SyntaxError") && nul.contains("U+0000"), "{nul}");
}

#[test]
fn a_setup_that_fails_shows_its_exception() {
    let Some(guest) = quickjs() else { return };
    let setup = "throw new Error('not today')";
    let ended = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["mcp", &guest, "--language", "javascript", "--setup", setup])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success());
    assert!(errors.contains("the setup fails") && errors.contains("not today"), "{errors}");
}

#[cfg(linux_guests)]
#[test]
fn a_program_that_is_no_interpreter_is_named() {
    let ended = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["mcp", "/bin/bash", "--linux"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success());
    let wanted = "`--language python` needs an interpreter of it, and /bin/bash may be none: ";
    assert!(errors.contains(wanted), "{errors}");
}

#[test]
fn an_agent_reads_why_a_call_failed() {
    let Some(guest) = quickjs() else { return };
    let mut client = Client::start(&[&guest, "--language", "javascript", "--max-sandboxes", "2"]);
    let thrown = client.refused("run_code", json!({"code": "null.x"}));
    assert!(thrown.contains("TypeError"), "{thrown}");
    client.call_ok("run_code", json!({"code": "var kept = 1"}));
    let late = client.call("run_code", json!({"code": "kept = 2; for (;;);", "timeout": 0.5}));
    let result = &late["structuredContent"];
    assert_eq!(
        (&result["undone"], &result["error"]["name"]),
        (&json!(true), &json!("TimeoutError"))
    );
    assert_eq!(client.call_ok("run_code", json!({"code": "kept"}))["json"], 1);

    for (tool, arguments, wanted) in [
        ("run_code", json!({}), "missing field `code`"),
        ("run_code", json!({"code": "1", "colour": 1}), "unknown field `colour`"),
        ("run_code", json!({"code": "1", "timeout": -1.0}), "`timeout`"),
        ("rollback", json!({"to": "nowhere"}), "no state is named"),
        ("rollback", json!({"to": ""}), "no state is named"),
        ("checkpoint", json!({"name": ""}), "needs a name"),
        ("fork", json!({"count": 1_000_000_000_u64}), "at most 2"),
        ("run_command", json!({"command": "ls"}), "Linux program"),
        ("close_sandbox", json!({"sandbox": "main"}), "cannot be closed"),
        ("read_file", json!({"path": "/absent"}), "/absent"),
    ] {
        let why = client.refused(tool, arguments);
        assert!(why.contains(wanted), "{tool}: {why}");
    }
    let id = client.send("tools/call", json!({"name": "no_tool", "arguments": {}}));
    let unknown = client.answer(id);
    assert_eq!(unknown["error"]["code"], -32602, "{unknown}");
    // Garbage between two messages ends nothing.
    writeln!(client.input.as_mut().unwrap(), "}}{{ garbage").unwrap();
    client.write(&json!([1, 2, {"jsonrpc": "9"}]));
    assert_eq!(client.call_ok("run_code", json!({"code": "kept"}))["json"], 1);
}

#[test]
fn a_cancelled_call_is_undone() {
    let Some(guest) = quickjs() else { return };
    let mut client = Client::start(&[&guest, "--language", "javascript"]);
    client.call_ok("run_code", json!({"code": "var kept = 1"}));
    let arguments = json!({"code": "kept = 2; console.log('begun'); for (;;);", "timeout": 600});
    let id = client.send(
        "tools/call",
        json!({"name": "run_code", "arguments": arguments, "_meta": {"progressToken": "p"}}),
    );
    // The output arrives while the code runs.
    let progress = client.next();
    assert_eq!(progress["method"], "notifications/progress", "{progress}");
    assert_eq!(progress["params"]["message"], "begun\n", "{progress}");
    let cancel = json!({"requestId": id, "reason": "test"});
    client.write(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancel}));
    assert_eq!(client.call_ok("run_code", json!({"code": "kept"}))["json"], 1);
}

#[cfg(linux_guests)]
#[test]
fn bad_messages_are_refused_beside_a_call_that_runs() {
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux"]);
    client.call_ok("run_code", json!({"code": "import time; kept = 1"}));
    let arguments = json!({"code": "kept = 2; print('begun'); time.sleep(600)", "timeout": 600});
    let id = client.send(
        "tools/call",
        json!({"name": "run_code", "arguments": arguments, "_meta": {"progressToken": "p"}}),
    );
    assert_eq!(client.next()["params"]["message"], "begun\n");
    let (no_message, no_json) = (json!(-32600), json!(-32700));
    for (line, code, id) in [
        ("42", &no_message, json!(null)),
        ("[]", &no_message, json!(null)),
        (r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#, &no_message, json!(null)),
        (r#"{"jsonrpc":"2.0","id":700}"#, &no_message, json!(700)),
        (r#"{"id":"one","methods":"ping"}"#, &no_message, json!("one")),
        (r#"{"jsonrpc":"1.0","id":701,"method":"ping"}"#, &no_message, json!(701)),
        (r#"{"jsonrpc":"2.0","id":{},"method":"ping"}"#, &no_message, json!(null)),
        ("}{", &no_json, json!(null)),
    ] {
        // The same line twice, at once, and an empty one.
        let lines = format!("{line}\n\n{line}\n");
        client.input.as_mut().unwrap().write_all(lines.as_bytes()).unwrap();
        for _ in 0..2 {
            let answer = client.next();
            assert_eq!((&answer["error"]["code"], &answer["id"]), (code, &id), "{line}: {answer}");
        }
    }
    // Notifications have no answer, and other calls have one.
    client.write(&json!({"jsonrpc": "2.0", "method": "notifications/unknown"}));
    client.write(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": 1}));
    assert_eq!(client.ask("ping", json!({})), json!({}));
    client.write(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
                         "params": {"requestId": id, "reason": "test"}}));
    assert_eq!(client.call_ok("run_code", json!({"code": "kept"}))["text"], "1");
}

#[cfg(linux_guests)]
#[test]
fn calls_beyond_the_limit_are_refused_beside_those_that_wait() {
    const LIMIT: usize = 256;
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux"]);
    client.call_ok("run_code", json!({"code": "import time; n = 0"}));
    let call =
        |code: &str| json!({"name": "run_code", "arguments": {"code": code, "timeout": 600}});
    let first = client.send("tools/call", call("time.sleep(600)"));
    let waiting: Vec<u64> =
        (1..LIMIT).map(|_| client.send("tools/call", call("n += 1; n"))).collect();
    let refused: Vec<u64> = (0..40).map(|_| client.send("tools/call", call("n = -1"))).collect();
    for id in refused {
        let answer = client.answer(id);
        assert_eq!(answer["result"]["isError"], true, "{answer}");
        let text = answer["result"]["content"][0]["text"].as_str().unwrap();
        assert!(text.contains("256 calls"), "{answer}");
    }
    assert_eq!(client.ask("ping", json!({})), json!({}));
    let names = client.call_ok("list_sandboxes", json!({}));
    assert_eq!(names["sandboxes"], json!(["main"]));
    client.write(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
                         "params": {"requestId": first, "reason": "test"}}));
    // All others run, in any order.
    let mut numbers: Vec<u64> = Vec::new();
    for id in waiting {
        let answer = client.answer(id);
        let text = answer["result"]["structuredContent"]["text"].as_str();
        numbers.push(text.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{answer}")));
    }
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(1..LIMIT as u64), "{numbers:?}");
    assert_eq!(client.call_ok("run_code", json!({"code": "n"}))["text"], "255");
}

/// The output of a server without `initialize` for a whole input.
fn answers_to(guest: &str, input: &[u8]) -> Vec<Value> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["mcp", guest, "--language", "javascript"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_client_that_never_begins_the_protocol_is_answered() {
    let Some(guest) = quickjs() else { return };
    // The end of the server races the writer of its answers.
    for _ in 0..5 {
        let refusals = answers_to(&guest, b"42\n");
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert_eq!(
            (&refusals[0]["error"]["code"], &refusals[0]["id"]),
            (&json!(-32600), &json!(null))
        );
    }
    let ping = json!({"jsonrpc": "2.0", "id": 7, "method": "ping"});
    // Before the protocol begins, a notification ends the server.
    let note = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    for input in [format!("{ping}\n"), format!("{ping}\n{note}\n")] {
        let answers = answers_to(&guest, input.as_bytes());
        assert_eq!(answers, [json!({"jsonrpc": "2.0", "id": 7, "result": {}})], "{input}");
    }
}

/// Waits until a server has ended.
#[cfg(linux_guests)]
fn wait(client: &mut Client) -> std::process::ExitStatus {
    for _ in 0..6000 {
        if let Some(status) = client.child.try_wait().unwrap() {
            return status;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the server continues without a client");
}

#[cfg(linux_guests)]
#[test]
fn a_call_is_answered_after_the_end_of_the_input() {
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux"]);
    let code = json!({"code": "import time; time.sleep(7); 'late'"});
    let late = client.send("tools/call", json!({"name": "run_code", "arguments": code}));
    client.input.as_mut().unwrap().write_all(b"{\"id\":5}\n7").unwrap();
    drop(client.input.take());
    assert_eq!(client.next()["id"], 5);
    assert_eq!(client.next()["error"]["code"], -32600);
    let answer = client.answer(late);
    assert_eq!(answer["result"]["structuredContent"]["text"], "late", "{answer}");
    assert!(wait(&mut client).success());
    let mut rest = String::new();
    client.output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
}

#[cfg(linux_guests)]
#[test]
fn a_server_whose_client_has_left_ends() {
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux"]);
    let arguments = json!({"code": "import time; print('begun'); time.sleep(600)", "timeout": 600});
    client.send(
        "tools/call",
        json!({"name": "run_code", "arguments": arguments, "_meta": {"progressToken": "p"}}),
    );
    assert_eq!(client.next()["params"]["message"], "begun\n");
    drop(client.input.take());
    let (reader, _writer) = std::io::pipe().unwrap();
    let closed: ChildStdout = std::os::fd::OwnedFd::from(reader).into();
    client.output = BufReader::new(closed);
    wait(&mut client);
}

#[cfg(linux_guests)]
#[test]
fn an_agent_runs_commands_beside_code() {
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux", "--setup", "import json; warm = 40"]);
    let ran = client.call_ok("run_code", json!({"code": "print('one')\nx = warm + 2\n{'x': x}"}));
    assert_eq!((&ran["stdout"], &ran["json"]), (&json!("one\n"), &json!({"x": 42})), "{ran}");
    // A line in a string is no command.
    let code = "s = '''\n!no\n%pip no\n'''\nif s:\n  !echo shell\nlen(s)";
    let ran = client.call_ok("run_code", json!({"code": code}));
    assert_eq!((&ran["stdout"], &ran["text"]), (&json!("shell\n"), &json!("13")), "{ran}");
    client.call_ok("checkpoint", json!({"name": "clean"}));
    client.call_ok("write_file", json!({"path": "/data/in.txt", "content": "3\n1\n2\n"}));
    let arguments = json!({
        "command": "sort in.txt && cat && echo $WHO >&2 && exit 3",
        "cwd": "/data", "env": {"WHO": "agent"}, "stdin": "typed\n",
    });
    let ran = client.call_ok("run_command", arguments);
    assert_eq!(ran["stdout"], "1\n2\n3\ntyped\n", "{ran}");
    assert_eq!((&ran["stderr"], &ran["exit_code"]), (&json!("agent\n"), &json!(3)), "{ran}");
    let code = json!({"code": "open('/data/out.bin', 'wb').write(bytes([0, 255]))"});
    client.call_ok("run_code", code);
    let read = client.call_ok("read_file", json!({"path": "/data/out.bin"}));
    assert_eq!((&read["encoding"], &read["content"]), (&json!("base64"), &json!("AP8=")), "{read}");
    let resource = client.ask("resources/read", json!({"uri": "afresh://main/data/in.txt"}));
    assert_eq!(resource["contents"][0]["text"], "3\n1\n2\n", "{resource}");
    client.call_ok("write_file", json!({"path": "/data/\u{e4} 1", "content": "escaped"}));
    let resource = client.ask("resources/read", json!({"uri": "afresh://main/data/%C3%A4%201"}));
    assert_eq!(resource["contents"][0]["text"], "escaped", "{resource}");
    let changed = client.call_ok("diff", json!({"from": "clean"}));
    let paths: Vec<&str> =
        changed["files"].as_array().unwrap().iter().filter_map(|f| f["path"].as_str()).collect();
    assert!(paths.contains(&"/data/in.txt") && paths.contains(&"/data/out.bin"), "{changed}");

    let killed =
        client.call("run_command", json!({"command": "echo begun; sleep 600", "timeout": 1}));
    let result = &killed["structuredContent"];
    assert_eq!(
        (&result["killed"], &result["exit_code"], &result["stdout"]),
        (&json!(true), &json!(137), &json!("begun\n")),
        "{killed}"
    );
    client.call_ok("rollback", json!({"to": "clean"}));
    assert!(client.refused("list_files", json!({"path": "/data"})).contains("/data"));
    assert_eq!(client.call_ok("run_code", json!({"code": "x"}))["text"], "42");
}

#[cfg(linux_guests)]
#[test]
fn calls_of_linux_programs_have_the_limits_of_the_server() {
    let Some(python) = python() else { return };
    let sleep = "import time; time.sleep(10.5)";
    // Longer than other calls of Linux programs may last.
    let mut client = Client::start(&[python, "--linux"]);
    client.call_ok("run_code", json!({"code": sleep, "timeout": 3600}));
    let crashed = client.call("run_code", json!({"code": "import ctypes; ctypes.string_at(0)"}));
    let result = &crashed["structuredContent"];
    assert_eq!(result["undone"], true, "{crashed}");
    let why = result["error"]["message"].as_str().unwrap();
    assert!(why.starts_with("the code ended the interpreter: "), "{why}");
    assert!(why.contains("signal 11"), "{why}");
    // `--timeout` lowers both limits.
    let mut client = Client::start(&[python, "--linux", "--timeout", "400"]);
    for arguments in [json!({"code": sleep}), json!({"code": sleep, "timeout": 3600})] {
        let late = client.call("run_code", arguments);
        let why = late["structuredContent"]["error"]["message"].as_str().unwrap().to_owned();
        assert!(why.contains("longer than its time limit of 0.4 s"), "{why}");
    }
}

#[cfg(linux_guests)]
#[test]
fn errors_name_their_cause_and_the_tree_shows_only_known_states() {
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux"]);
    client.call_ok("checkpoint", json!({"name": "clean"}));
    let late = client.call("run_code", json!({"code": "while True: pass", "timeout": 0.5}));
    let error = &late["structuredContent"]["error"];
    assert_eq!(error["name"], "TimeoutError", "{late}");
    let why = error["message"].as_str().unwrap();
    assert!(why.contains("longer than its time limit of 0.5 s"), "{why}");
    client.call_ok("run_code", json!({"code": "x = 1"}));
    let tree = client.call_ok("tree", json!({}));
    let states = tree["states"].as_array().unwrap();
    let here = states.iter().find(|state| state["id"] == tree["at"]);
    assert_eq!(here.map(|state| &state["name"]), Some(&json!("clean")), "{tree}");
    let why = client.refused("fork", json!({"count": 0}));
    assert!(why.contains("at least 1"), "{why}");
    for line in [&b"}{ garbage\n"[..], b"{\"a\": \"\xff\"}\n"] {
        client.input.as_mut().unwrap().write_all(line).unwrap();
        let answer = client.next();
        assert_eq!((&answer["error"]["code"], &answer["id"]), (&json!(-32700), &Value::Null));
    }
    assert_eq!(client.call_ok("run_code", json!({"code": "x"}))["text"], "1");
}

/// A call with a progress token: its result, and all its progress as one text.
#[cfg(linux_guests)]
fn call_with_progress(client: &mut Client, tool: &str, arguments: &Value) -> (Value, String) {
    let id = client.send(
        "tools/call",
        json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": "p"}}),
    );
    let mut text = String::new();
    loop {
        let mut message = client.next();
        if message["id"] == id {
            return (message["result"]["structuredContent"].take(), text);
        }
        text += message["params"]["message"].as_str().unwrap_or_default();
    }
}

#[cfg(linux_guests)]
#[test]
fn output_and_input_of_calls_are_whole() {
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux"]);
    // A character arrives in two writes.
    let code = "import os, time\nfor byte in b'\\xc3\\xa9\\n':\n os.write(1, bytes([byte])); time.sleep(.2)";
    let (ran, progress) = call_with_progress(&mut client, "run_code", &json!({"code": code}));
    assert_eq!((&ran["stdout"], &*progress), (&json!("\u{e9}\n"), "\u{e9}\n"), "{ran}");

    // A command may read its input late, and is killed at its limit where it reads none.
    let input = "x".repeat(300_000);
    let counted = client.call_ok(
        "run_command",
        json!({"command": "sleep 6; wc -c", "stdin": input, "timeout": 60}),
    );
    assert_eq!(
        (&counted["stdout"], &counted["unread_stdin_bytes"]),
        (&json!("300000\n"), &json!(0)),
        "{counted}"
    );
    let arguments = json!({"command": "sleep 600", "stdin": input, "timeout": 1});
    let killed = client.call("run_command", arguments);
    let result = &killed["structuredContent"];
    let unread = result["unread_stdin_bytes"].as_u64().unwrap();
    assert!(result["killed"] == true && unread > 100_000, "{killed}");
    let short = client.call_ok("run_command", json!({"command": "head -c 1", "stdin": input}));
    assert_eq!(short["stdout"], "x", "{short}");

    // A command that an earlier call left running spends nothing of this call's budget.
    client.call_ok("run_command", json!({"command": "yes noise & echo $! >/tmp/pid"}));
    let own = "sleep 1; echo own; kill $(cat /tmp/pid)";
    let (ran, progress) = call_with_progress(&mut client, "run_command", &json!({"command": own}));
    assert_eq!(
        (&ran["stdout"], &ran["dropped_bytes"], &*progress),
        (&json!("own\n"), &json!(0), "own\n"),
        "{ran}"
    );
}

#[cfg(linux_guests)]
#[test]
fn a_command_whose_end_is_not_reported_is_undone_after_its_kill() {
    let Some(python) = python() else { return };
    let mut client = Client::start(&[python, "--linux"]);
    let code = "import subprocess, threading, time\n\
        subprocess.Popen.poll = lambda process: None\n\
        def work():\n    while True: time.sleep(.01)\n\
        threading.Thread(target=work, daemon=True).start()";
    client.call_ok("run_code", json!({"code": code}));
    let why = client.refused("run_command", json!({"command": "true", "timeout": 1}));
    assert!(why.contains("did not end"), "{why}");
    assert_eq!(client.call_ok("run_code", json!({"code": "1 + 1"}))["text"], "2");
}

/// The Python SDK, with the newest protocol and with the handshake of earlier ones.
#[cfg(linux_guests)]
#[test]
fn the_python_sdk_uses_every_kind_of_tool() {
    let Some(client) = std::env::var_os("AFRESH_TEST_MCP") else {
        println!("SKIPPED: AFRESH_TEST_MCP names no Python with the package mcp");
        return;
    };
    let Some(python) = python() else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mcp/sdk_client.py");
    for mode in ["auto", "legacy"] {
        let ran = Command::new(&client)
            .arg(&script)
            .args([env!("CARGO_BIN_EXE_afresh"), python, mode])
            .output()
            .unwrap();
        assert!(ran.status.success(), "{mode}: {}", String::from_utf8_lossy(&ran.stderr));
    }
}

/// Sends a request over HTTP: its status line and everything after it.
fn post(addr: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    let length = body.len();
    let request = format!(
        "POST /mcp HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Accept: application/json, text/event-stream\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    // A stream of events may stay open: the status decides.
    let mut reader = BufReader::new(stream);
    reader.read_line(&mut answer).unwrap();
    answer
}

#[test]
fn http_clients_need_the_token_and_a_local_host_name() {
    let Some(guest) = quickjs() else { return };
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let refused = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["mcp", &guest, "--language", "javascript", "--http", "0.0.0.0:0"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--token-file"), "{refused:?}");
    let mut child = Command::new(env!("CARGO_BIN_EXE_afresh"))
        .args(["--output", "json", "mcp", &guest, "--language", "javascript"])
        .args(["--http", "127.0.0.1:0", "--token-file"])
        .arg(&token)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let line: Value = serde_json::from_str(&line).unwrap();
    let addr = line["addr"].as_str().unwrap();
    let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"}}})
    .to_string();
    let shown = "Authorization: Bearer secret\r\n";
    let answers = [
        post(addr, &format!("Host: {addr}\r\n{shown}"), &hello),
        post(addr, &format!("Host: {addr}\r\n"), &hello),
        post(addr, &format!("Host: {addr}\r\nAuthorization: Bearer secre\r\n"), &hello),
        post(addr, &format!("Host: evil.example\r\n{shown}"), &hello),
        post(addr, &format!("Host: {addr}\r\nOrigin: https://evil.example\r\n{shown}"), &hello),
    ];
    child.kill().unwrap();
    child.wait().unwrap();
    let statuses = answers.each_ref().map(|answer| answer.split(' ').nth(1).unwrap_or_default());
    assert_eq!(statuses, ["200", "401", "401", "403", "403"], "{answers:?}");
}
