//! Code in sandboxes, in every language: its output, values and exceptions, also while it still
//! runs; and clients of E2B, unmodified.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use afresh_serve::{SandboxConfig, Template};
use serde_json::{Value, json};

use crate::common::{TEST_TIMEOUT, built, run, scratch, serve};
use crate::sandbox::{Client, KEY, sandboxes, with};

#[test]
fn code_continues_from_earlier_code_and_outcomes_are_distinguished() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(with(sandboxes(dir.path(), &script))).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        let code = "let x = 20; console.log('out', [1, 'a']); console.error({e: 1}); x * 2";
        let lines = client.execute(&sandbox, code).await.unwrap();
        let kinds: Vec<_> = lines.iter().map(|line| line["type"].as_str().unwrap()).collect();
        assert_eq!(
            kinds,
            ["number_of_executions", "stdout", "stderr", "result", "end_of_execution"]
        );
        assert_eq!(lines[1]["text"], "out [ 1, \"a\" ]\n");
        assert_eq!(lines[2]["text"], "{ e: 1 }\n");
        assert_eq!((&lines[3]["text"], &lines[3]["is_main_result"]), (&json!("40"), &json!(true)));
        let cost = &lines[4]["cost"];
        assert!(cost["cpu_ms"].as_f64().unwrap() > 0.0 && cost["wall_ms"].as_f64().unwrap() > 0.0);
        assert!(cost["peak_memory"].as_u64().unwrap() >= 65536, "{cost}");
        assert!(cost["output_bytes"].as_u64().unwrap() > "out [ 1, \"a\" ]\n".len() as u64);
        assert_eq!(client.value(&sandbox, "x + 2").await, "22");
        assert_eq!(client.value(&sandbox, "Promise.resolve({a: [x]})").await, "{ a: [ 20 ] }");
        let lines = client.execute(&sandbox, "throw new RangeError('no')").await.unwrap();
        assert_eq!((&lines[1]["name"], &lines[1]["value"]), (&json!("RangeError"), &json!("no")));
        let lines = client.execute(&sandbox, "let y = ;").await.unwrap();
        assert_eq!(lines[1]["name"], "SyntaxError");
        // An error of the language does not undo earlier changes.
        client.execute(&sandbox, "x = 50; throw 1").await.unwrap();
        assert_eq!(client.value(&sandbox, "x").await, "50");
        // It is invisible to others.
        let another = client.create().await;
        assert_eq!(client.value(&another, "typeof x").await, "\"undefined\"");
        server.end().await;
    });
}

#[test]
fn code_that_is_cut_short_is_undone() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.call_timeout = Duration::from_secs(8);
        sandboxes.templates[0].memory = 64 << 20;
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        client.execute(&sandbox, "var kept = 1").await.unwrap();
        for (code, name) in [
            ("kept = 2; for (;;) {}", "TimeoutError"),
            ("kept = 3; const a = []; for (;;) a.push(new Array(1000).fill(kept))", ""),
        ] {
            let lines = client.execute(&sandbox, code).await.unwrap();
            let error = lines.iter().find(|line| line["type"] == "error").expect("it fails");
            assert!(name.is_empty() || error["name"] == name, "{error}");
        }
        let kept = client.value(&sandbox, "kept").await;
        // Without memory the engine may throw, which undoes nothing; a time limit always does.
        assert!(kept == "1" || kept == "3", "{kept}");
        server.end().await;
    });
}

#[test]
fn output_of_code_arrives_while_it_runs() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.call_timeout = Duration::from_secs(15);
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        // It never ends by itself, and its output still arrives.
        let mut answer = client
            .begin(&sandbox, "var n = 1; console.log('begun'); console.error('so'); for (;;) {}")
            .await;
        assert_eq!(answer.status(), 200);
        let mut first = String::new();
        while !first.contains("stdout") {
            let more = answer.chunk().await.unwrap().expect("it is told before the end");
            first += std::str::from_utf8(&more).unwrap();
        }
        let kinds = |text: &str| -> Vec<String> {
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            lines.map(|line| line["type"].as_str().unwrap().to_owned()).collect()
        };
        let begun = kinds(&first);
        assert_eq!(begun[..2], ["number_of_executions", "stdout"]);
        assert!(!begun.contains(&"end_of_execution".to_owned()), "{first}");
        let rest = answer.text().await.unwrap();
        let mut all = begun;
        all.extend(kinds(&rest));
        let wanted = ["number_of_executions", "stdout", "stderr", "error", "end_of_execution"];
        assert_eq!(all, wanted);
        assert!(rest.contains("TimeoutError"), "{rest}");
        assert_eq!(client.value(&sandbox, "typeof n").await, "\"undefined\"");
        // However soon it ends after that.
        for round in 0..300 {
            let lines = client.execute(&sandbox, &format!("console.log({round}); {round}")).await;
            let kinds: Vec<_> = lines
                .unwrap()
                .iter()
                .map(|line| line["type"].as_str().unwrap().to_owned())
                .collect();
            let wanted = ["number_of_executions", "stdout", "result", "end_of_execution"];
            assert_eq!(kinds, wanted, "{round}");
        }
        // More than a client takes at once, in order.
        let code = "for (let i = 0; i < 20000; i++) console.log(i, 'x'.repeat(50)); console.log('ä'.repeat(100000))";
        let lines = client.execute(&sandbox, code).await.unwrap();
        let printed = lines.iter().filter(|line| line["type"] == "stdout");
        let printed: String = printed.map(|line| line["text"].as_str().unwrap()).collect();
        let wanted: String = (0..20000).map(|i| format!("{i} {}\n", "x".repeat(50))).collect();
        assert!(printed == wanted + &"ä".repeat(100_000) + "\n");
        // The code of a client that disconnects ends, and is undone.
        client.execute(&sandbox, "var after = 7").await.unwrap();
        let code = "after = 8; console.log('first'); for (;;) {}";
        let mut answer = client.begin(&sandbox, code).await;
        answer.chunk().await.unwrap().unwrap();
        drop(answer);
        assert_eq!(client.value(&sandbox, "after").await, "7");
        // A client that stays connected but reads nothing is awaited until the time limit of the
        // call.
        let code = "for (;;) console.log('x'.repeat(100000))";
        let answer = client.begin(&sandbox, code).await;
        assert_eq!(client.value(&sandbox, "after").await, "7");
        let rest = answer.text().await.unwrap();
        let end: serde_json::Value = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
        assert_eq!(end["type"], "end_of_execution");
        assert!(rest.contains("TimeoutError"));
        server.end().await;
    });
}

/// Sandboxes of one template in Python.
fn python(dir: &Path, guest: &str) -> SandboxConfig {
    let mut sandboxes = sandboxes(dir, guest);
    sandboxes.templates[0].language = "python".to_owned();
    sandboxes
}

#[test]
fn a_template_is_warmed_set_up_and_asked_as_its_language_wants() {
    let (Some(turns), Some(script)) = (built("turns.wasm"), built("quickjs.wasm")) else { return };
    let dir = scratch();
    let library = dir.path().join("library.zip");
    std::fs::write(&library, b"what the guest would import from").unwrap();
    run(async {
        let store = dir.path().join("store");
        let mut sandboxes = python(&store, &turns);
        let missing = match afresh_serve::Server::bind(with(sandboxes.clone())).await {
            Err(error) => format!("{:#}", anyhow(&error)),
            Ok(_) => panic!("it starts without its library"),
        };
        assert!(missing.contains("python-stdlib.zip") && missing.contains("python"), "{missing}");
        sandboxes.templates[0].library = Some(library);
        sandboxes.templates[0].setup = Some("add 40".to_owned());
        let mut other = Template::new("js", script, afresh::Options::new());
        other.setup = Some("var base = [40]; console.log('nobody hears it')".to_owned());
        sandboxes.templates.push(other);
        let server = serve(with(sandboxes.clone())).await;
        let client = Client::of(&server);
        let one = client.create().await;
        let lines =
            client.execute(&one, "add 2\nprint said\ncomplain loudly\nadd 0").await.unwrap();
        let of = |kind: &str| lines.iter().filter(|line| line["type"] == kind).collect::<Vec<_>>();
        assert_eq!(
            (&of("stdout")[0]["text"], &of("stderr")[0]["text"]),
            (&json!("said\n"), &json!("loudly\n"))
        );
        assert_eq!(of("result")[0]["text"], "shown");
        let lines = client.execute(&one, "fail badly").await.unwrap();
        assert_eq!(lines[1]["value"], "badly");
        assert!(lines[1]["traceback"].as_str().unwrap().starts_with("Traceback"), "{lines:?}");
        // Each clone has separate entropy, and files are where it looks for them.
        assert_eq!(
            client.execute(&one, "write /home/user/a x").await.unwrap()[1]["type"],
            "result"
        );
        let two = client.post("/sandboxes", json!({"templateID": "js"})).await;
        assert_eq!(client.value(&two, "base").await, "[ 40 ]");
        server.end().await;
        // It comes back with its state, over the same library.
        let server = serve(with(sandboxes.clone())).await;
        let client = Client::of(&server);
        assert_eq!(client.execute(&one, "read /home/user/a").await.unwrap()[1]["type"], "result");
        assert_eq!(client.value(&two, "base").await, "[ 40 ]");
        server.end().await;
        // A setup that fails is an error, and so is one for a warm snapshot.
        let why = async |change: &dyn Fn(&mut SandboxConfig)| {
            let mut changed = sandboxes.clone();
            change(&mut changed);
            match afresh_serve::Server::bind(with(changed)).await {
                Err(error) => format!("{:#}", anyhow(&error)),
                Ok(_) => panic!("it starts"),
            }
        };
        let failing = why(&|config| config.templates[1].setup = Some("let x = y".to_owned())).await;
        assert!(failing.contains("the setup of the template `js`"), "{failing}");
        assert!(failing.contains("ReferenceError") && failing.contains("y"), "{failing}");
        let warm = format!("{}@template-js", store.join("snapshots").display());
        let warm = why(&|config| config.templates[1].reference = warm.clone()).await;
        assert!(warm.contains("a snapshot is warm"), "{warm}");
        let unknown = why(&|config| config.templates[1].language = "cobol".to_owned()).await;
        assert!(unknown.contains("cobol") && unknown.contains("`python`"), "{unknown}");
    });
}

/// An error with all its causes.
fn anyhow(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Runs an E2B client, in a separate program, through all operations on such sandboxes.
fn client_of_e2b(sandboxes: SandboxConfig, mut command: Command) {
    run(async {
        let server = serve(with(sandboxes)).await;
        let url = server.url("");
        let client = command
            .env("E2B_API_URL", &url)
            .env("E2B_SANDBOX_URL", &url)
            .env("E2B_API_KEY", KEY)
            .env("NO_PROXY", "127.0.0.1")
            // Python prints its position when it is ended.
            .env("PYTHONFAULTHANDLER", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let id = rustix::process::Pid::from_child(&client);
        let mut asking = tokio::task::spawn_blocking(move || client.wait_with_output().unwrap());
        let output = match tokio::time::timeout(TEST_TIMEOUT, &mut asking).await {
            Ok(output) => output,
            Err(_) => {
                rustix::process::kill_process(id, rustix::process::Signal::ABORT).unwrap();
                asking.await
            }
        };
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}\n{error}");
        assert!(said.ends_with("all done\n"), "{said}\n{error}");
        server.end().await;
    });
}

/// The path in a variable, or the reason why the test for it is left out.
fn named(variable: &str, by: &str) -> Option<PathBuf> {
    let place = std::env::var_os(variable).map(PathBuf::from);
    if place.is_none() {
        println!("SKIPPED: {variable} names nothing; `{by}` says what");
    }
    place
}

fn ours(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(file)
}

#[test]
fn an_unmodified_e2b_client_uses_every_operation() {
    let Some(script) = built("quickjs.wasm") else { return };
    let Some(python) = named("AFRESH_TEST_E2B", "cargo xtask test") else { return };
    let dir = scratch();
    let mut command = Command::new(python);
    command.arg(ours("e2b_client.py"));
    client_of_e2b(sandboxes(dir.path(), &script), command);
}

#[test]
fn so_does_the_one_in_javascript() {
    let Some(script) = built("quickjs.wasm") else { return };
    if named("AFRESH_TEST_E2B_JS", "cargo xtask test").is_none() {
        return;
    }
    let dir = scratch();
    let mut command = Command::new("node");
    command.arg(ours("e2b_client.mjs"));
    client_of_e2b(sandboxes(dir.path(), &script), command);
}

#[test]
fn an_unmodified_client_of_e2b_runs_python_with_pandas() {
    let Some(artifacts) = named("AFRESH_TEST_CPYTHON", "cargo xtask cpython") else { return };
    let Some(client) = named("AFRESH_TEST_E2B", "cargo xtask cpython") else { return };
    // The compiled module stays from one run to the next.
    let dir = std::env::var_os("AFRESH_CACHE").map(PathBuf::from);
    let scratch = scratch();
    let dir = dir.unwrap_or_else(|| scratch.path().to_owned()).join("sandboxes");
    let mut sandboxes = python(&dir, artifacts.join("python.wasm").to_str().unwrap());
    sandboxes.templates[0].memory = 1 << 30;
    sandboxes.templates[0].setup = Some("import numpy, pandas, random, uuid".to_owned());
    let mut command = Command::new(client);
    command.arg(ours("e2b_python.py"));
    client_of_e2b(sandboxes, command);
}

/// An HTTP server that checks for a polite request; returns its port. It ends with the test's
/// process.
#[cfg(linux_guests)]
fn outside() -> u16 {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // A client may connect and send nothing.
            std::thread::spawn(move || {
                let mut asked = [0; 4096];
                let len = stream.read(&mut asked).unwrap_or_default();
                let polite = asked[..len].ends_with(b"\r\n\r\n");
                let head = String::from_utf8_lossy(&asked[..len]);
                let told = head.lines().find_map(|line| line.strip_prefix("x-told: "));
                let told = told.unwrap_or_default();
                let answer = format!("HTTP/1.0 200 OK\r\n\r\nfrom outside, {polite}{told}");
                let _ = stream.write_all(answer.as_bytes());
            });
        }
    });
    port
}

/// Sandboxes in which the Python of this host is a Linux program.
#[cfg(linux_guests)]
fn linux_sandboxes(dir: &Path) -> Option<SandboxConfig> {
    let Some(guest) =
        ["/usr/bin/python3", "/bin/python3"].into_iter().find(|p| Path::new(p).is_file())
    else {
        println!("SKIPPED: the system has no python3");
        return None;
    };
    if let Err(why) = afresh::linux::Program::new("/bin/true").run(b"") {
        println!("SKIPPED: {why}");
        return None;
    }
    let mut sandboxes = python(dir, guest);
    sandboxes.call_timeout = Duration::from_secs(20);
    sandboxes.templates[0].linux = true;
    Some(sandboxes)
}

#[cfg(linux_guests)]
#[test]
fn an_unmodified_client_of_e2b_runs_code_and_commands_in_a_linux_program() {
    let Some(client) = named("AFRESH_TEST_E2B", "cargo xtask test") else { return };
    let dir = scratch();
    let Some(mut sandboxes) = linux_sandboxes(dir.path()) else { return };
    sandboxes.templates[0].setup = Some("import json, random".to_owned());
    let port = outside();
    let server = format!("server.test:80=127.0.0.1:{port}");
    let rule = format!(r#"{{"to": "rule.test:80=127.0.0.1:{port}"}}"#);
    sandboxes.templates[0].net = vec![server.parse().unwrap(), rule.parse().unwrap()];
    let mut command = Command::new(client);
    command.arg(ours("e2b_linux.py"));
    client_of_e2b(sandboxes, command);
}

#[cfg(linux_guests)]
#[test]
fn an_unmodified_client_of_e2b_runs_r() {
    let Some(client) = named("AFRESH_TEST_E2B", "cargo xtask test") else { return };
    // Its configuration on Debian.
    let settings = Path::new("/etc/R");
    if !Path::new("/usr/bin/R").is_file() || !settings.is_dir() {
        println!("SKIPPED: the system has no R: apt-get install r-base-core");
        return;
    }
    let dir = scratch();
    let Some(mut sandboxes) = linux_sandboxes(dir.path()) else { return };
    let mut plain = sandboxes.templates[0].clone();
    plain.name = "plain".to_owned();
    sandboxes.templates.push(plain);
    sandboxes.templates[0].dirs = vec![settings.to_owned()];
    let mut command = Command::new(client);
    command.arg(ours("e2b_r.py"));
    client_of_e2b(sandboxes, command);
}
