//! `serve`: requests over HTTP at a fixed number of connections, beside `wasmtime serve` on the same component; and what
//! a sandbox's operations take over HTTP.
//!
//! Each server is a process of its own. The contestants take turns, so that what else the host does meets all of
//! them. The client is as simple as can be: a thread for each connection, which waits for each answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::row::{Options, Sink, spread, summarise};

/// Name of the table.
const TABLE: &str = "serve";
/// Connections that ask at the same time.
const CONNECTIONS: usize = 16;
/// The key that the benchmark's sandboxes are asked for with.
const KEY: &str = "key-of-the-benchmark";
/// Longest that anything may take.
const LONG: Duration = Duration::from_secs(60);

/// What is measured, and with what.
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
    /// The interpreter that sandboxes run.
    pub script: PathBuf,
}

/// A server in a process of its own.
struct Server {
    child: Child,
    addr: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended or not, it is of no use any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// `afresh serve`, which says where it listens.
    fn ours(program: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut child = Command::new(program)
            .args(["-o", "json", "serve", "--addr", "127.0.0.1:0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("starting the server")?;
        let mut line = String::new();
        let out = child.stdout.take().context("the server's output")?;
        BufReader::new(out).read_line(&mut line)?;
        let said: Value = serde_json::from_str(&line).context("the server did not start")?;
        let addr = said["addr"].as_str().context("the server's address")?.parse()?;
        Ok(Self { child, addr })
    }

    /// `wasmtime serve` at an address that was free a moment ago.
    fn theirs(program: &Path, component: &Path) -> anyhow::Result<Self> {
        let addr = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let child = Command::new(program)
            .args(["serve", "--addr", &addr.to_string()])
            .arg(component)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting wasmtime serve")?;
        let mut this = Self { child, addr };
        let begun = Instant::now();
        while TcpStream::connect(addr).is_err() {
            ensure!(this.child.try_wait()?.is_none(), "wasmtime serve ended");
            ensure!(begun.elapsed() < LONG, "wasmtime serve takes no connections");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(this)
    }
}

/// One connection of a client.
struct Connection {
    stream: BufReader<TcpStream>,
}

/// A request as it is sent.
fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: bench\r\n{headers}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

impl Connection {
    fn to(addr: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LONG))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends a request and reads its answer: the status and the body.
    fn exchange(&mut self, request: &[u8]) -> anyhow::Result<(u16, Vec<u8>)> {
        self.stream.get_mut().write_all(request)?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status: u16 = status.with_context(|| format!("no answer but {line:?}"))?;
        let (mut length, mut chunked) = (0, false);
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let header = line.trim().to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            chunked |= header == "transfer-encoding: chunked";
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        while chunked {
            line.clear();
            self.stream.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim(), 16).context("the size of a chunk")?;
            let begin = body.len();
            body.resize(begin + length + 2, 0);
            self.stream.read_exact(&mut body[begin..])?;
            body.truncate(begin + length);
            chunked = length > 0;
        }
        Ok((status, body))
    }
}

/// Times of requests in microseconds that `CONNECTIONS` clients make for `time`, and how many a second.
fn load(server: &Server, request: &[u8], time: Duration) -> anyhow::Result<(Vec<f64>, f64)> {
    let begun = Instant::now();
    let times = std::thread::scope(|scope| {
        let client = || {
            let mut connection = Connection::to(server.addr)?;
            let mut times = Vec::new();
            while begun.elapsed() < time {
                let sent = Instant::now();
                let (status, _) = connection.exchange(request)?;
                ensure!(status == 200, "it answers {status}");
                times.push(sent.elapsed().as_secs_f64() * 1e6);
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

/// A client of the sandboxes.
struct Sandboxes {
    connection: Connection,
}

impl Sandboxes {
    fn ask(&mut self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let headers = format!("x-api-key: {KEY}\r\n");
        self.send(&request(method, path, &headers, body.to_string().as_bytes()))
    }

    fn send(&mut self, request: &[u8]) -> anyhow::Result<Value> {
        let (status, body) = self.connection.exchange(request)?;
        let text = String::from_utf8_lossy(&body);
        ensure!((200..300).contains(&status), "it answers {status}: {text}");
        Ok(serde_json::from_str(text.lines().next().unwrap_or("null")).unwrap_or_default())
    }

    fn create(&mut self) -> anyhow::Result<Value> {
        self.ask("POST", "/sandboxes", &json!({"templateID": "script", "timeout": 3600}))
    }

    fn on(&mut self, sandbox: &Value, rest: &str, body: &Value) -> anyhow::Result<Value> {
        let id = sandbox["sandboxID"].as_str().context("a sandbox's id")?;
        let method = if rest.is_empty() { "DELETE" } else { "POST" };
        self.ask(method, &format!("/sandboxes/{id}{rest}"), body)
    }

    fn run(&mut self, sandbox: &Value, code: &str) -> anyhow::Result<()> {
        let of = |name: &str| sandbox[name].as_str().unwrap_or_default().to_owned();
        let headers = format!(
            "e2b-sandbox-id: {}\r\nx-access-token: {}\r\n",
            of("sandboxID"),
            of("envdAccessToken")
        );
        let body = json!({"code": code}).to_string();
        self.send(&request("POST", "/execute", &headers, body.as_bytes())).map(drop)
    }
}

/// What sandboxes' operations take, one after another.
fn sandboxes(files: &Files, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let dir = std::env::temp_dir().join(format!("afresh-bench-serve-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let result = operations(files, &dir, options, sink);
    // What is left of it is only in the way.
    let _ = std::fs::remove_dir_all(&dir);
    result
}

fn operations(
    files: &Files,
    dir: &Path,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    std::fs::write(dir.join("keys"), format!("bench {KEY}\n"))?;
    let script = std::path::absolute(&files.script)?;
    let config = dir.join("serve.toml");
    let text = format!(
        "[sandboxes]\nkeys = \"keys\"\nstore = \"store\"\n[[sandboxes.template]]\nname = \"script\"\n\
         guest = {:?}\nwarm = [\"warm\"]\n",
        script.display().to_string()
    );
    std::fs::write(&config, text)?;
    let config = config.display().to_string();
    let server = Server::ours(&files.program, &["--config", &config])?;
    let mut client = Sandboxes { connection: Connection::to(server.addr)? };
    let rounds = options.rounds * 8;
    let sandbox = client.create()?;
    client.run(&sandbox, "var heap = Array.from({length: 1000}, (_, n) => ({ n }))")?;
    client.on(&sandbox, "/checkpoints", &json!({"name": "base"}))?;
    let mut cases: Vec<(&str, Vec<f64>)> =
        ["create", "run", "checkpoint", "rollback", "fork100", "resume"]
            .map(|case| (case, Vec::new()))
            .into();
    for round in 0..rounds {
        for (case, times) in &mut cases {
            let mut clock = |begun: Instant| times.push(begun.elapsed().as_secs_f64() * 1e6);
            let begun = Instant::now();
            match *case {
                "create" => {
                    let new = client.create()?;
                    clock(begun);
                    client.on(&new, "", &json!({}))?;
                }
                "run" => {
                    client.run(&sandbox, "heap[7].n += 1")?;
                    clock(begun);
                }
                "checkpoint" => {
                    client.run(&sandbox, "for (const one of heap) one.n += 1")?;
                    let begun = Instant::now();
                    let made = client.on(&sandbox, "/checkpoints", &json!({"name": "again"}))?;
                    clock(begun);
                    drop(made);
                }
                "rollback" => {
                    client.run(&sandbox, "for (const one of heap) one.n += 1")?;
                    let begun = Instant::now();
                    client.on(&sandbox, "/rollback", &json!({"to": "base"}))?;
                    clock(begun);
                }
                "fork100" => {
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
                    let new = client.create()?;
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
        let case = format!("sandbox/{case}");
        if options.wants(&case, "afresh") {
            sink(&summarise(TABLE, &case, "afresh".to_owned(), 1, times));
        }
    }
    Ok(())
}

/// Connections that are held open and say nothing.
const IDLE: usize = 10_000;

/// Lets this process, and those that it starts, have as many files open as the host allows.
fn raise_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    // Where it may not be raised, fewer connections are opened.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
}

/// KiB of a process's memory that are resident.
fn resident(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    number.context("the server's resident memory")
}

/// What ten thousand connections cost that say nothing, while one is answered among them.
fn idle(program: &Path, http: &str, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    raise_files();
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
    let (status, _) = client.exchange(&hello)?;
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
    if options.wants("hello", "") {
        let mut field = vec![("afresh", ours(&[&http])?)];
        if let Some(program) = &files.wasmtime {
            field.push(("wasmtime", Server::theirs(program, &files.http)?));
        }
        requests("hello", field, &request("GET", "/hello", "", b""), options, sink)?;
    }
    if options.wants("js", "") {
        let js = files.js.display().to_string();
        let field = vec![
            ("afresh reset", ours(&[&js, "--warm", "warm", "--mode", "reset"])?),
            ("afresh fresh", ours(&[&js, "--warm", "warm", "--mode", "fresh"])?),
        ];
        let query = request("POST", "/", "", crate::js::REQUEST);
        requests("js", field, &query, options, sink)?;
    }
    if options.wants("idle", "afresh") {
        idle(&files.program, &http, sink)?;
    }
    if options.wants("sandbox", "") {
        sandboxes(files, options, sink)?;
    }
    Ok(())
}
