//! `serve`: requests over HTTP at a fixed number of connections, compared with `wasmtime serve` on
//! the same component; and the operations of a sandbox over HTTP.
//!
//! Each server is a separate process. The contestants take turns, so that other load of the host
//! meets all of them. The client is as simple as can be: a thread for each connection, which waits
//! for each answer.

mod fairness;
mod far;
mod programs;
mod sandboxes;
mod server;

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use afresh_sys::own_process;
use anyhow::{Context, bail, ensure};
use serde_json::json;

use crate::row::{Options, Sink, spread, summarise};
use server::{Connection, Server, request, resident};

/// Name of the table.
const TABLE: &str = "serve";
/// Concurrent connections.
const CONNECTIONS: usize = 16;

/// The programs and guests of the measurement.
#[derive(Clone, Debug)]
pub struct Files {
    /// This program, which serves.
    pub program: PathBuf,
    /// `wasmtime`, of the same version as the library.
    pub wasmtime: Option<PathBuf>,
    /// The component of the world `wasi:http/proxy`.
    pub http: PathBuf,
    /// The JavaScript guest with its heap.
    pub js: PathBuf,
    /// The same as a component that answers HTTP.
    pub jshttp: PathBuf,
    /// The interpreter that sandboxes run.
    pub script: PathBuf,
    /// `nats-server` and `versitygw`, for restores from a remote store.
    pub far: Option<(PathBuf, PathBuf)>,
}

/// The component with its memory as `warm` leaves it, as `wasmtime wizer` makes it.
fn wizened(wasmtime: &Path, component: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    let made = dir.join("wizened.wasm");
    let output = Command::new(wasmtime)
        .args(["wizer", "-S", "cli,http", "--init-func", "warm", "--keep-init-func=true"])
        .arg(component)
        .arg("-o")
        .arg(&made)
        .output()
        .context("starting wasmtime wizer")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "wasmtime wizer: {said}");
    Ok(made)
}

/// The JavaScript guest with its heap, as a component, by servers that start each request from the
/// heap.
fn javascript(files: &Files, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let component = files.jshttp.display().to_string();
    let mut field =
        vec![("afresh", Server::ours(&files.program, &[&component, "--warm", "warm"])?)];
    let dir = tempfile::tempdir()?;
    if let Some(wasmtime) = &files.wasmtime {
        let component = wizened(wasmtime, &files.jshttp, dir.path())?;
        field.push(("wasmtime (wizer)", Server::theirs(wasmtime, &component)?));
    }
    requests("js/component", field, &request("POST", "/", "", crate::js::REQUEST), options, sink)
}

/// Times of requests in microseconds that `CONNECTIONS` clients make for `time`, and how many a
/// second.
fn load(server: &Server, request: &[u8], time: Duration) -> anyhow::Result<(Vec<f64>, f64)> {
    let begun = Instant::now();
    let times = std::thread::scope(|scope| {
        let client = || {
            let mut connection = Connection::to(server.addr)?;
            let mut times = Vec::new();
            while begun.elapsed() < time {
                let sent = Instant::now();
                let (status, answer) = connection.exchange(request)?;
                times.push(sent.elapsed().as_secs_f64() * 1e6);
                ensure!(status == 200, "it answers {status}");
                crate::js::answered(&answer)?;
            }
            Ok(times)
        };
        let clients: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(client)).collect();
        let mut all = Vec::new();
        for client in clients {
            match client.join() {
                Ok(times) => all.extend(times?),
                Err(_) => bail!("a client panicked"),
            }
        }
        Ok(all)
    })?;
    let each_second = times.len() as f64 / begun.elapsed().as_secs_f64();
    Ok((times, each_second))
}

/// Lets servers take turns at the same request.
fn requests(
    case: &str,
    servers: Vec<(&str, Server)>,
    request: &[u8],
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let rounds = options.rounds.min(9);
    let time = options.batch * 50;
    let mut field: Vec<_> = servers.into_iter().map(|s| (s, Vec::new(), Vec::new())).collect();
    for ((_, server), _, _) in &field {
        load(server, request, time)?;
    }
    for _ in 0..rounds {
        for ((_, server), times, rates) in &mut field {
            let (taken, each_second) = load(server, request, time)?;
            times.extend(taken);
            rates.push(each_second);
        }
    }
    for ((strategy, _), times, rates) in field {
        let [rate, _, _] = spread(rates);
        let mut row = summarise(TABLE, case, strategy.to_owned(), CONNECTIONS, times);
        row.more.push(("requests_per_second", json!(rate.round())));
        sink(&row);
    }
    Ok(())
}

/// Connections that are held open and idle.
const IDLE: usize = 10_000;

/// The cost of ten thousand idle connections, while one is answered among them.
fn idle(program: &Path, http: &str, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    // Where it may not be raised, fewer connections are opened.
    own_process::raise_descriptor_limit(usize::MAX);
    let server = Server::ours(program, &[http])?;
    let mut client = Connection::to(server.addr)?;
    let hello = request("GET", "/hello", "", b"");
    for _ in 0..100 {
        client.exchange(&hello)?;
    }
    let before = resident(server.child.id())?;
    let mut held = Vec::with_capacity(IDLE);
    while held.len() < IDLE {
        match TcpStream::connect(server.addr) {
            Ok(stream) => held.push(stream),
            Err(error) => {
                ensure!(held.len() >= 100, "no connections can be held: {error}");
                break;
            }
        }
    }
    // The first connection was idle meanwhile, and the server may have closed it.
    let (status, _) = Connection::to(server.addr)?.exchange(&hello)?;
    ensure!(status == 200, "a request among idle connections was answered with {status}");
    let after = resident(server.child.id())?;
    let each = after.saturating_sub(before) as f64 / held.len() as f64;
    let mut row = summarise(TABLE, "idle", "afresh".to_owned(), 1, vec![each]);
    row.unit = "KiB/connection";
    row.more.push(("connections", json!(held.len())));
    row.more.push(("resident_kib_before", json!(before)));
    row.more.push(("resident_kib_after", json!(after)));
    sink(&row);
    Ok(())
}

/// The whole table.
///
/// # Errors
/// When a server does not start, or answers otherwise than it should.
pub fn all(files: &Files, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let ours = |arguments: &[&str]| Server::ours(&files.program, arguments);
    let http = files.http.display().to_string();
    if options.wants_any(&["hello"], &["afresh", "wasmtime"]) {
        let mut field = vec![("afresh", ours(&[&http])?)];
        if let Some(program) = &files.wasmtime {
            field.push(("wasmtime", Server::theirs(program, &files.http)?));
        }
        requests("hello", field, &request("GET", "/hello", "", b""), options, sink)?;
    }
    if options.wants_any(&["js"], &["afresh reset", "afresh fresh"]) {
        let js = files.js.display().to_string();
        let field = vec![
            ("afresh reset", ours(&[&js, "--warm", "warm", "--mode", "reset"])?),
            ("afresh fresh", ours(&[&js, "--warm", "warm", "--mode", "fresh"])?),
        ];
        let query = request("POST", "/", "", crate::js::REQUEST);
        requests("js", field, &query, options, sink)?;
    }
    let strategies = ["afresh", "wasmtime (wizer)"];
    if options.wants_any(&["js/component"], &strategies) && files.jshttp.is_file() {
        javascript(files, options, sink)?;
    }
    if options.wants("idle", "afresh") {
        idle(&files.program, &http, sink)?;
    }
    if options.wants_any(&programs::CASES, &["afresh", "new-process"]) {
        programs::programs(files, options, sink)?;
    }
    if options.wants_any(&sandboxes::CASES, &["afresh"]) {
        sandboxes::sandboxes(files, options, sink)?;
    }
    if options.wants_any(&[fairness::CASE], &fairness::PHASES) {
        fairness::fairness(files, options, sink)?;
    }
    if let Some((nats, s3)) = &files.far
        && options.wants("sandbox/resume_s3", "afresh")
    {
        far::resume(files, nats, s3, options, sink)?;
    }
    Ok(())
}
