//! `afresh mcp` through the command line of the reference inspector of the Model Context Protocol,
//! on standard input and output, and over HTTP.
//!
//! The inspector validates messages and schemas by the reference SDK. A warning of it is a failure.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::command::{OwnedChild, cargo, run};
use crate::{host, node};

const INSPECTOR: &[&str] = &["@modelcontextprotocol/inspector@2.12.0"];
const GUEST: [&str; 3] = ["mcp", "python3", "--linux"];

/// An MCP server for the inspector.
struct Target<'a> {
    inspector: &'a Path,
    /// A command with its arguments, or an address.
    server: Vec<String>,
}

impl Target<'_> {
    /// The answer to a request; an error if the inspector reports anything.
    fn ask(&self, method: &str, arguments: &[&str]) -> Result<Value> {
        let mut command = Command::new("node");
        command.arg(self.inspector).arg("--cli").args(&self.server);
        command.args(["--method", method]).args(arguments).stdin(Stdio::null());
        let output = command.output().context("cannot run node")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{method} {arguments:?}: {}: {said}", output.status);
        ensure!(said.trim().is_empty(), "{method} {arguments:?}: the inspector warns: {said}");
        serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The structured result of a tool.
    fn call(&self, name: &str, arguments: &[&str]) -> Result<Value> {
        let mut all = vec!["--tool-name", name];
        for argument in arguments {
            all.extend(["--tool-arg", argument]);
        }
        let result = self.ask("tools/call", &all)?;
        ensure!(result["isError"] == json!(false), "{name} {arguments:?}: {result}");
        Ok(result["structuredContent"].clone())
    }
}

/// Starts a server over HTTP, and waits for its address.
fn start(afresh: &Path) -> Result<(OwnedChild, String)> {
    let mut command = Command::new(afresh);
    command.args(GUEST).args(["--http", "127.0.0.1:0", "--output", "json"]);
    command.stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
    let mut server = OwnedChild(child.context("cannot run afresh")?);
    let stdout = server.0.stdout.take().context("the server has no output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("cannot read from the server")?;
    let shown: Value =
        serde_json::from_str(&line).context("the server ended before it showed its address")?;
    let address = shown["addr"].as_str().context("the server shows no address")?;
    Ok((server, format!("http://{address}/mcp")))
}

/// Builds the command and runs the checks; returns how many requests succeeded.
pub(crate) fn test() -> Result<u64> {
    let modules = node::installed(INSPECTOR)?;
    let build = ["build", "--workspace", "--all-features", "--locked", "--bin", "afresh"];
    run(cargo().current_dir(host::repository()).args(build))?;
    let afresh = host::target_folder().join("debug/afresh");
    check(&modules.join(".bin/mcp-inspector"), &afresh)
}

fn check(inspector: &Path, afresh: &Path) -> Result<u64> {
    let command = std::iter::once(afresh.display().to_string());
    let server = command.chain(GUEST.map(str::to_owned)).collect();
    let stdio = Target { inspector, server };
    let (_server, address) = start(afresh)?;
    let http = Target { inspector, server: vec![address] };
    let mut count = 0;
    for target in [&stdio, &http] {
        println!("$ inspect {}", target.server.join(" "));
        let listed = target.ask("tools/list", &[])?;
        let tools = listed["tools"].as_array().context("there is no list of tools")?;
        let has = |name: &str| tools.iter().any(|tool| tool["name"] == name);
        let wanted = ["run_code", "run_command", "read_file", "checkpoint", "rollback", "fork"];
        ensure!(wanted.into_iter().all(has), "a tool is missing: {listed}");
        ensure!(tools.iter().all(|tool| tool["outputSchema"].is_object()), "{listed}");
        let templates = target.ask("resources/templates/list", &[])?;
        ensure!(templates["resourceTemplates"][0]["uriTemplate"].is_string(), "{templates}");
        ensure!(target.ask("resources/list", &[])?["resources"].is_array(), "no list");
        ensure!(target.call("run_code", &["code=6*7"])?["text"] == "42", "6 * 7");
        let ran = target.call("run_command", &["command=echo out; exit 3"])?;
        ensure!(ran["stdout"] == "out\n" && ran["exit_code"] == 3, "{ran}");
        count += 5;
    }
    // Clients of one HTTP server share its sandboxes.
    http.call("write_file", &["path=/tmp/note", "content=kept"])?;
    http.call("checkpoint", &["name=clean"])?;
    let read = http.ask("resources/read", &["--uri", "afresh://main/tmp/note"])?;
    ensure!(read["contents"][0]["text"] == "kept", "{read}");
    http.call("write_file", &["path=/tmp/note", "content=other"])?;
    let forks = http.call("fork", &["count=2"])?;
    ensure!(forks["sandboxes"].as_array().is_some_and(|forks| forks.len() == 2), "{forks}");
    http.call("rollback", &["to=clean"])?;
    let read = http.call("read_file", &["path=/tmp/note"])?;
    ensure!(read.to_string().contains("kept"), "{read}");
    http.call("diff", &["from=clean"])?;
    http.call("tree", &[])?;
    let listed = http.call("list_sandboxes", &[])?;
    ensure!(listed.to_string().contains("main"), "{listed}");
    Ok(count + 10)
}
