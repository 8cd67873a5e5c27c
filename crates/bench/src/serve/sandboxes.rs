//! The cost of sandbox operations over HTTP.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::server::{Connection, Server, request};
use super::{Files, TABLE};
use crate::row::{Options, Sink, summarise};

/// The key for the benchmark's sandboxes.
pub(super) const KEY: &str = "key-of-the-benchmark";
/// A client of the sandboxes.
pub(super) struct Sandboxes {
    pub(super) connection: Connection,
    /// Its API key.
    pub(super) key: &'static str,
}

impl Sandboxes {
    /// A client of a server, with the key of the benchmark.
    pub(super) fn of(server: &Server) -> anyhow::Result<Self> {
        Ok(Self { connection: Connection::to(server.addr)?, key: KEY })
    }

    fn ask(&mut self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let headers = format!("x-api-key: {}\r\n", self.key);
        self.send(&request(method, path, &headers, body.to_string().as_bytes()))
    }

    fn send(&mut self, request: &[u8]) -> anyhow::Result<Value> {
        let (status, body) = self.connection.exchange(request)?;
        let text = String::from_utf8_lossy(&body);
        ensure!((200..300).contains(&status), "it answers {status}: {text}");
        Ok(serde_json::from_str(text.lines().next().unwrap_or("null")).unwrap_or_default())
    }

    /// Makes one of a template.
    pub(super) fn create(&mut self, template: &str) -> anyhow::Result<Value> {
        self.ask("POST", "/sandboxes", &json!({"templateID": template, "timeout": 3600}))
    }

    pub(super) fn on(
        &mut self,
        sandbox: &Value,
        rest: &str,
        body: &Value,
    ) -> anyhow::Result<Value> {
        let id = sandbox["sandboxID"].as_str().context("a sandbox's id")?;
        let method = if rest.is_empty() { "DELETE" } else { "POST" };
        self.ask(method, &format!("/sandboxes/{id}{rest}"), body)
    }

    pub(super) fn run(&mut self, sandbox: &Value, code: &str) -> anyhow::Result<()> {
        let body = json!({"code": code}).to_string();
        self.send(&request("POST", "/execute", &inside(sandbox), body.as_bytes())).map(drop)
    }

    /// Runs a shell command, which must succeed.
    pub(super) fn command(&mut self, sandbox: &Value, command: &str) -> anyhow::Result<()> {
        let body = json!({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).to_string();
        let length = u32::try_from(body.len())?.to_be_bytes();
        let body = [&[0], &length[..], body.as_bytes()].concat();
        let path = "/process.Process/Start";
        let (status, said) =
            self.connection.exchange(&request("POST", path, &inside(sandbox), &body))?;
        let said = String::from_utf8_lossy(&said);
        ensure!(status == 200 && said.contains("\"exitCode\":0"), "it answers {status}: {said}");
        Ok(())
    }
}

/// A request to a listener on a sandbox port.
pub(super) fn to_port(sandbox: &Value, port: u16, path: &str) -> Vec<u8> {
    let headers = format!("{}e2b-sandbox-port: {port}\r\n", inside(sandbox));
    request("GET", path, &headers, b"")
}

/// The token that allows a request into a sandbox.
fn inside(sandbox: &Value) -> String {
    let of = |name: &str| sandbox[name].as_str().unwrap_or_default();
    format!("e2b-sandbox-id: {}\r\nx-access-token: {}\r\n", of("sandboxID"), of("envdAccessToken"))
}

/// The cases of sandboxes.
pub(super) const CASES: [&str; 6] = [
    "sandbox/create",
    "sandbox/run",
    "sandbox/checkpoint",
    "sandbox/rollback",
    "sandbox/fork100",
    "sandbox/resume",
];

/// The costs of sandbox operations, one after another.
pub(super) fn sandboxes(
    files: &Files,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let dir = std::env::temp_dir().join(format!("afresh-bench-serve-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let result = operations(files, &dir, options, sink);
    // The remains are only in the way.
    let _ = std::fs::remove_dir_all(&dir);
    result
}

/// A server of sandboxes that run scripts, with its default settings.
pub(super) fn serve_scripts(files: &Files, dir: &Path, keys: &str) -> anyhow::Result<Server> {
    std::fs::write(dir.join("keys"), keys)?;
    let script = std::path::absolute(&files.script)?;
    let config = dir.join("serve.toml");
    let text = format!(
        "[sandboxes]\nkeys = \"keys\"\nstore = \"store\"\n[[sandboxes.template]]\nname = \"script\"\n\
         guest = {:?}\n",
        script.display().to_string()
    );
    std::fs::write(&config, text)?;
    Server::ours(&files.program, &["--config", &config.display().to_string()])
}

fn operations(
    files: &Files,
    dir: &Path,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let server = serve_scripts(files, dir, &format!("bench {KEY}\n"))?;
    let mut client = Sandboxes::of(&server)?;
    let rounds = options.rounds * 8;
    let sandbox = client.create("script")?;
    client.run(&sandbox, "var heap = Array.from({length: 1000}, (_, n) => ({ n }))")?;
    client.on(&sandbox, "/checkpoints", &json!({"name": "base"}))?;
    let wanted = CASES.into_iter().filter(|case| options.wants(case, "afresh"));
    let mut cases: Vec<(&str, Vec<f64>)> = wanted.map(|case| (case, Vec::new())).collect();
    for round in 0..rounds {
        for (case, times) in &mut cases {
            let mut clock = |begun: Instant| times.push(begun.elapsed().as_secs_f64() * 1e6);
            let begun = Instant::now();
            match *case {
                "sandbox/create" => {
                    let new = client.create("script")?;
                    clock(begun);
                    client.on(&new, "", &json!({}))?;
                }
                "sandbox/run" => {
                    client.run(&sandbox, "heap[7].n += 1")?;
                    clock(begun);
                }
                "sandbox/checkpoint" => {
                    client.run(&sandbox, "for (const one of heap) one.n += 1")?;
                    let begun = Instant::now();
                    let made = client.on(&sandbox, "/checkpoints", &json!({"name": "again"}))?;
                    clock(begun);
                    drop(made);
                }
                "sandbox/rollback" => {
                    client.run(&sandbox, "for (const one of heap) one.n += 1")?;
                    let begun = Instant::now();
                    client.on(&sandbox, "/rollback", &json!({"to": "base"}))?;
                    clock(begun);
                }
                "sandbox/fork100" => {
                    // Each is a hundred sandboxes to end again.
                    if round % 8 > 0 {
                        continue;
                    }
                    let forks = client.on(&sandbox, "/fork", &json!({"count": 100}))?;
                    clock(begun);
                    for fork in forks.as_array().into_iter().flatten() {
                        client.on(&fork["sandbox"], "", &json!({}))?;
                    }
                }
                _ => {
                    if round % 8 > 0 {
                        continue;
                    }
                    let new = client.create("script")?;
                    client.run(&new, "var n = 1")?;
                    client.on(&new, "/pause", &json!({}))?;
                    let begun = Instant::now();
                    client.on(&new, "/connect", &json!({}))?;
                    client.run(&new, "n")?;
                    clock(begun);
                    client.on(&new, "", &json!({}))?;
                }
            }
        }
    }
    for (case, times) in cases {
        sink(&summarise(TABLE, case, "afresh".to_owned(), 1, times));
    }
    Ok(())
}
