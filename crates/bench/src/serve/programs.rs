//! The cost over HTTP of sandboxes with a Linux program, the host's Python, compared with new
//! processes of the same.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::sandboxes::{KEY, Sandboxes, to_port};
use super::server::{Connection, Server, request};
use super::{Files, TABLE};
use crate::row::{Options, Sink, summarise};

/// What is measured: `new-process` is a process that is started for it, and `host` the same server
/// outside of any sandbox.
pub(super) const CASES: [&str; 5] = [
    "sandbox/linux-run",
    "sandbox/linux-command",
    "sandbox/linux-port",
    "sandbox/linux-fork",
    "sandbox/linux-resume",
];
const STRATEGIES: [&str; 3] = ["afresh", "new-process", "host"];
/// The port of a sandbox that its own server listens on.
const PORT: u16 = 8000;
const PYTHON: &str = "/usr/bin/python3";
/// The initial code of every sandbox and of every process.
const SETUP: &str = "import json, re, urllib.parse";
const CODE: &str = "json.loads(json.dumps({'n': [1, 2, 3]}))['n']";
const COMMAND: &str = "echo 3 > n && read n < n && exit $((n - 3))";

pub(super) fn programs(
    files: &Files,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    if !Path::new(PYTHON).is_file() {
        eprintln!("SKIPPED: {} want {PYTHON}", CASES.join(", "));
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("keys"), format!("bench {KEY}\n"))?;
    let config = dir.path().join("serve.toml");
    let text = format!(
        "[sandboxes]\nkeys = \"keys\"\nstore = \"store\"\n[[sandboxes.template]]\nname = \"linux\"\n\
         linux = {PYTHON:?}\nlanguage = \"python\"\nsetup = {SETUP:?}\n"
    );
    std::fs::write(&config, text)?;
    let config = config.display().to_string();
    let server = match Server::ours(&files.program, &["--config", &config]) {
        Ok(server) => server,
        Err(error) => {
            eprintln!("SKIPPED: {}: {error:#}", CASES.join(", "));
            return Ok(());
        }
    };
    let mut client = Sandboxes::of(&server)?;
    let sandbox = client.create("linux")?;
    client.run(&sandbox, CODE)?;
    let pairs = CASES.into_iter().flat_map(|case| STRATEGIES.map(|strategy| (case, strategy)));
    let is_played = |case: &str, strategy: &str| match strategy {
        "host" => case == "sandbox/linux-port",
        "new-process" => ["sandbox/linux-run", "sandbox/linux-command"].contains(&case),
        _ => true,
    };
    let wanted = pairs.filter(|(case, strategy)| is_played(case, strategy));
    let wanted = wanted.filter(|(case, strategy)| options.wants(case, strategy));
    let mut all: Vec<(&str, &str, Vec<f64>)> =
        wanted.map(|(case, strategy)| (case, strategy, Vec::new())).collect();
    let is_asked = all.iter().any(|(case, ..)| *case == "sandbox/linux-port");
    let served = is_asked.then(|| served(&mut client, server.addr, &dir)).transpose()?;
    for round in 0..options.rounds * 4 {
        for (case, strategy, times) in &mut all {
            let begun = Instant::now();
            match (*case, *strategy) {
                ("sandbox/linux-run", "afresh") => client.run(&sandbox, CODE)?,
                ("sandbox/linux-run", _) => process(PYTHON, &format!("{SETUP}\n{CODE}"), &dir)?,
                ("sandbox/linux-command", "afresh") => client.command(&sandbox, COMMAND)?,
                ("sandbox/linux-command", _) => process("/bin/sh", COMMAND, &dir)?,
                ("sandbox/linux-port", _) => {
                    let served = served.as_ref().context("the server that is asked")?;
                    match *strategy {
                        "afresh" => page(server.addr, &to_port(&served.sandbox, PORT, "/page"))?,
                        _ => page(served.addr, &request("GET", "/page", "", b""))?,
                    }
                }
                ("sandbox/linux-fork", _) => {
                    let forks = client.on(&sandbox, "/fork", &json!({"count": 1}))?;
                    let fork = &forks[0]["sandbox"];
                    client.run(fork, CODE)?;
                    times.push(begun.elapsed().as_secs_f64() * 1e6);
                    client.on(fork, "", &json!({}))?;
                    continue;
                }
                _ => {
                    if round % 4 > 0 {
                        continue;
                    }
                    let new = client.create("linux")?;
                    client.run(&new, "n = 1")?;
                    client.on(&new, "/pause", &json!({}))?;
                    let begun = Instant::now();
                    client.on(&new, "/connect", &json!({}))?;
                    client.run(&new, "n")?;
                    times.push(begun.elapsed().as_secs_f64() * 1e6);
                    client.on(&new, "", &json!({}))?;
                    continue;
                }
            }
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        }
    }
    for (case, strategy, times) in all.into_iter().filter(|(.., times)| !times.is_empty()) {
        sink(&summarise(TABLE, case, strategy.to_owned(), 1, times));
    }
    Ok(())
}

/// The same server of files in a sandbox and on the host, where it ends with this.
struct ServedFiles {
    sandbox: Value,
    addr: SocketAddr,
    host: Child,
}

impl Drop for ServedFiles {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.host.kill();
        let _ = self.host.wait();
    }
}

fn served(
    client: &mut Sandboxes,
    to: SocketAddr,
    dir: &tempfile::TempDir,
) -> anyhow::Result<ServedFiles> {
    let sandbox = client.create("linux")?;
    let code = format!(
        "import subprocess\nopen('page', 'w').write('served')\n\
         server = subprocess.Popen(['python3', '-m', 'http.server', '{PORT}'])"
    );
    client.run(&sandbox, &code)?;
    std::fs::write(dir.path().join("page"), "served")?;
    let addr = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let mut host = Command::new(PYTHON);
    host.args(["-m", "http.server", "--bind", "127.0.0.1"]).arg(addr.port().to_string());
    host.current_dir(dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
    let host = host.stderr(Stdio::null()).spawn()?;
    let served = ServedFiles { sandbox, addr, host };
    let listens = |ask: &dyn Fn() -> anyhow::Result<()>| {
        let until = Instant::now() + Duration::from_secs(20);
        while let Err(error) = ask() {
            ensure!(Instant::now() < until, "no server comes up: {error:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    };
    let inside = to_port(&served.sandbox, PORT, "/page");
    listens(&|| page(to, &inside))?;
    listens(&|| page(addr, &request("GET", "/page", "", b"")))?;
    Ok(served)
}

/// Requests a page over a new connection.
fn page(addr: SocketAddr, request: &[u8]) -> anyhow::Result<()> {
    let (status, body) = Connection::to(addr)?.exchange(request)?;
    ensure!(status == 200 && body == b"served", "it answers {status}");
    Ok(())
}

/// Runs a host process to its end.
fn process(program: &str, code: &str, dir: &tempfile::TempDir) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.arg("-c").arg(code).current_dir(dir.path());
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}
