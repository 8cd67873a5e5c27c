//! What sandboxes of a Linux program, the host's Python, take over HTTP, beside new processes of the same.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::ensure;
use serde_json::json;

use super::sandboxes::{KEY, Sandboxes};
use super::server::{Connection, Server};
use super::{Files, TABLE};
use crate::row::{Options, Sink, summarise};

/// What is measured: the second strategy is a process that is started for it.
pub(super) const CASES: [&str; 4] =
    ["sandbox/linux-run", "sandbox/linux-command", "sandbox/linux-fork", "sandbox/linux-resume"];
const STRATEGIES: [&str; 2] = ["afresh", "new-process"];
const PYTHON: &str = "/usr/bin/python3";
/// What every sandbox starts from, and every process starts with.
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
    let mut client = Sandboxes { connection: Connection::to(server.addr)? };
    let sandbox = client.create()?;
    client.run(&sandbox, CODE)?;
    let pairs = CASES.into_iter().flat_map(|case| STRATEGIES.map(|strategy| (case, strategy)));
    let wanted = pairs.filter(|(case, strategy)| options.wants(case, strategy));
    let mut all: Vec<(&str, &str, Vec<f64>)> =
        wanted.map(|(case, strategy)| (case, strategy, Vec::new())).collect();
    for round in 0..options.rounds * 4 {
        for (case, strategy, times) in &mut all {
            let begun = Instant::now();
            match (*case, *strategy) {
                ("sandbox/linux-run", "afresh") => client.run(&sandbox, CODE)?,
                ("sandbox/linux-run", _) => process(PYTHON, &format!("{SETUP}\n{CODE}"), &dir)?,
                ("sandbox/linux-command", "afresh") => client.command(&sandbox, COMMAND)?,
                ("sandbox/linux-command", _) => process("/bin/sh", COMMAND, &dir)?,
                // Forks and resumptions have no such rival.
                (_, "new-process") => continue,
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
                    let new = client.create()?;
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

/// Runs a process of the host's to its end.
fn process(program: &str, code: &str, dir: &tempfile::TempDir) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.arg("-c").arg(code).current_dir(dir.path());
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
    ensure!(status.success(), "{program}: {status}");
    Ok(())
}
