//! Hosts of a fleet, in separate processes, and a client that connects to any of them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::apart::Namespace;
use crate::nats_server::{NatsServer, with_us};
use crate::servers::{FleetStore, Proxy, TEST_TIMEOUT};

/// The lease of a fleet. A host of a busy machine may stand still for seconds, and must not lose
/// its lease by that: few tests are about such a loss.
const LEASE: &str = "10s";
const KEY: &str = "key-of-acme";

/// A guest whose answers count its calls: the number is in its memory, so a second run of a call is
/// detected. Code that begins with `!` takes a while before it is counted.
pub(crate) const COUNTER: &str = r#"(module
    (memory (export "memory") 3)
    (data (i32.const 1024) "\83\00\f6\6a0000000000")
    (func (export "warm"))
    (func (export "afresh_buffer") (param i32) (result i32)
        (if (result i32) (i32.gt_u (local.get 0) (i32.const 60000))
            (then (i32.const 0)) (else (i32.const 65536))))
    (func (export "evaluate") (param i32) (result i64)
        (local $digit i32) (local $rounds i64)
        ;; An array of five: what, no tools, and a short text.
        (if (i32.eq (i32.load8_u (i32.const 65540)) (i32.const 33))
            (then
                (local.set $rounds (i64.const 30000000000))
                (loop $wait
                    (local.set $rounds (i64.sub (local.get $rounds) (i64.const 1)))
                    (br_if $wait (i64.ne (local.get $rounds) (i64.const 0))))))
        (local.set $digit (i32.const 1037))
        (loop $carry
            (if (i32.eq (i32.load8_u (local.get $digit)) (i32.const 57))
                (then
                    (i32.store8 (local.get $digit) (i32.const 48))
                    (local.set $digit (i32.sub (local.get $digit) (i32.const 1)))
                    (br $carry)))
            (i32.store8 (local.get $digit) (i32.add (i32.load8_u (local.get $digit)) (i32.const 1))))
        (i64.or (i64.shl (i64.const 1024) (i64.const 32)) (i64.const 14))))"#;

/// A guest that echoes its input.
const ECHO: &str = r#"(module
    (memory (export "memory") 200)
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 65536))
    (func (export "handle") (param $n i32) (result i64)
        (i64.or (i64.shl (i64.const 65536) (i64.const 32)) (i64.extend_i32_u (local.get $n)))))"#;

/// The configuration of a host: its keys, its store, and the template `counter`.
pub(crate) fn template(dir: &Path, name: &str) -> String {
    format!(
        "[sandboxes]\nkeys = '{}'\nstore = '{}'\ncall-timeout = 60\n\
         [[sandboxes.template]]\nname = 'counter'\nguest = '{}'\n",
        dir.join("keys").display(),
        dir.join(name).join("sandboxes").display(),
        dir.join("counter.wasm").display(),
    )
}

/// Writes the keys of the clients.
pub(crate) fn write_keys(dir: &Path) {
    fs::write(dir.join("keys"), format!("acme {KEY}\nother key-of-other\n")).unwrap();
}

/// A host.
pub(crate) struct Host {
    pub(crate) name: String,
    child: Child,
    pub(crate) addr: SocketAddr,
    log: std::path::PathBuf,
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            println!("--- {}\n{log}", self.log.display());
        }
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Host {
    /// Starts a host whose folder below `dir` has its name, with this configuration; `s3` is its
    /// way to the S3 server.
    pub(crate) fn start(
        dir: &Path,
        name: &str,
        config: &str,
        command: &mut Command,
        place: &FleetStore,
        s3: Option<SocketAddr>,
    ) -> Self {
        let own = dir.join(name);
        fs::create_dir_all(&own).unwrap();
        let file = own.join("serve.toml");
        fs::write(&file, config).unwrap();
        let log = own.join("log");
        command
            .args(["--log", "info", "--host-name", name, "--config"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::options().create(true).append(true).open(&log).unwrap());
        place.tell(command);
        command.envs(s3.map(|s3| ("AWS_ENDPOINT", format!("http://{s3}"))));
        let mut child = with_us(command).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("{}", fs::read_to_string(&log).unwrap_or_default()));
        let addr = said["addr"].as_str().unwrap().parse().unwrap();
        Self { name: name.to_owned(), child, addr, log }
    }

    /// The file of its log, which also keeps the logs of earlier hosts of its name.
    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// The hosts that the host knows, itself included.
    pub(crate) fn known_hosts(&self) -> Option<u64> {
        self.counts("hosts")
    }

    /// A count in the host's view of the fleet.
    pub(crate) fn counts(&self, what: &str) -> Option<u64> {
        let (_, text) = self.ask("GET", "/status.json", "", b"")?;
        serde_json::from_str::<Value>(&text).ok()?["fleet"][what].as_u64()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Waits for the end of a host that is drained. It fails if a sandbox was not saved.
    pub(crate) fn wait(&mut self) {
        assert!(self.has_ended_well(), "{}: a sandbox was not saved", self.name);
    }

    /// Waits for the end of a host that is drained. False if it could not save a sandbox.
    pub(crate) fn has_ended_well(&mut self) -> bool {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < deadline, "the host does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &[u8],
    ) -> Option<(u16, String)> {
        exchange(self.addr, method, path, headers, body)
    }

    /// KiB of its memory that are resident.
    pub(crate) fn resident(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap()
    }

    /// A value from the host's metrics.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.ask("GET", "/metrics", "", b"").unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
    }
}

/// Everything a test needs.
pub(crate) struct Fleet {
    /// Settings of sandboxes in the file of every host.
    settings: String,
    /// Further lines of that file.
    more: String,
    pub(crate) hosts: Vec<Host>,
    pub(crate) proxy: Proxy,
    pub(crate) nats: NatsServer,
    pub(crate) place: FleetStore,
    pub(crate) dir: TempDir,
}

impl Fleet {
    /// Three hosts; the first reaches NATS through a proxy, and the last alone has the guest
    /// `/echo`.
    pub(crate) fn start() -> Option<Self> {
        Self::with("", &[])
    }

    /// As [`Fleet::start`], with further guests in files of these names, and `more` in the
    /// configuration of every host.
    pub(crate) fn with(more: &str, guests: &[(&str, &str)]) -> Option<Self> {
        let mut fleet = Self::prepare("", more, guests)?;
        fleet.begin();
        Some(fleet)
    }

    /// All but the hosts, which [`Fleet::begin`] starts with these settings of sandboxes.
    pub(crate) fn prepare(settings: &str, more: &str, guests: &[(&str, &str)]) -> Option<Self> {
        Some(Self::prepare_on(NatsServer::start()?, settings, more, guests))
    }

    /// As [`Fleet::prepare`], on this server.
    pub(crate) fn prepare_on(
        nats: NatsServer,
        settings: &str,
        more: &str,
        guests: &[(&str, &str)],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [("counter", COUNTER), ("echo", ECHO)].iter().chain(guests) {
            fs::write(dir.path().join(name).with_extension("wasm"), wat::parse_str(text).unwrap())
                .unwrap();
        }
        write_keys(dir.path());
        let proxy = Proxy::before(nats.address);
        let more = more.replace("DIR", &dir.path().display().to_string());
        let (settings, place) = (settings.to_owned(), FleetStore::start());
        Self { settings, more, hosts: Vec::new(), proxy, nats, place, dir }
    }

    /// Starts three hosts.
    pub(crate) fn begin(&mut self) {
        for name in ["one", "two", "three"] {
            self.add(name);
        }
        self.settle(3);
    }

    /// Adds a host.
    pub(crate) fn add(&mut self, name: &str) {
        let nats = if name == "one" { self.proxy.address } else { self.nats.address };
        let program = Command::new(env!("CARGO_BIN_EXE_afresh"));
        self.add_by(name, program, "127.0.0.1:0", nats, None);
    }

    /// Adds a host within a namespace, which reaches NATS and the S3 server by way of these.
    pub(crate) fn add_apart(
        &mut self,
        name: &str,
        namespace: &Namespace,
        nats: SocketAddr,
        s3: Option<SocketAddr>,
    ) {
        let program = namespace.command(env!("CARGO_BIN_EXE_afresh"));
        self.add_by(name, program, &format!("{}:0", namespace.theirs), nats, s3);
    }

    fn add_by(
        &mut self,
        name: &str,
        mut command: Command,
        listens: &str,
        nats: SocketAddr,
        s3: Option<SocketAddr>,
    ) {
        let dir = self.dir.path();
        let settings = format!("[sandboxes]\n{}", self.settings);
        let mut text = template(dir, name).replacen("[sandboxes]\n", &settings, 1);
        if name == "three" {
            let echo = dir.join("echo.wasm");
            text += &format!(
                "[[guest]]\nguest = '{}'\nroute = '/echo'\nmax-body-kib = 16384\ntimeout = 60\n",
                echo.display()
            );
        }
        text += &self.more;
        command.args(["-o", "json", "serve", "--addr", listens, "--lease", LEASE, "--nats"]);
        command.arg(format!("nats://{nats}"));
        let host = Host::start(dir, name, &text, &mut command, &self.place, s3);
        self.hosts.push(host);
    }

    /// Waits until every living host knows `hosts` hosts.
    pub(crate) fn settle(&self, hosts: u64) {
        until("every host knows the others", || {
            self.hosts.iter().all(|host| host.known_hosts().is_some_and(|known| known >= hosts))
        });
    }

    /// Collects the fleet's store, with or without the ledger; the reason, if it is refused.
    pub(crate) fn collect(&self, with_ledger: bool) -> Result<String, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        self.place.name(command.args(["-o", "json", "gc"]));
        if with_ledger {
            command.args(["--nats", &format!("nats://{}", self.nats.address)]);
        }
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// Runs `afresh` with arguments about this fleet: its output, or its error.
    pub(crate) fn try_command(&self, arguments: &[&str], store: bool) -> Result<String, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        command.args(["-o", "json"]).args(arguments);
        command.args(["--nats", &format!("nats://{}", self.nats.address)]);
        if store {
            self.place.tell(&mut command);
        }
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// Runs `afresh` with arguments about this fleet.
    pub(crate) fn command(&self, arguments: &[&str]) -> String {
        self.try_command(arguments, false).unwrap()
    }
}

/// Waits, with a limit.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// One request, on a new connection; `None` without an answer.
pub(crate) fn exchange(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &[u8],
) -> Option<(u16, String)> {
    exchange_with_head(addr, method, path, headers, body).map(|(status, _, body)| (status, body))
}

/// As [`exchange`], with the head of the answer, which is in lower case.
fn exchange_with_head(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &[u8],
) -> Option<(u16, String, String)> {
    let mut stream = TcpStream::connect_timeout(&addr, TEST_TIMEOUT).ok()?;
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: test\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    // A server that refuses may close before it has read all.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let text = String::from_utf8_lossy(&answer).into_owned();
    let status = text.split(' ').nth(1)?.parse().ok()?;
    let (head, rest) = text.split_once("\r\n\r\n")?;
    let head = head.to_ascii_lowercase();
    if !head.contains("transfer-encoding: chunked") {
        return Some((status, head, rest.to_owned()));
    }
    let (mut whole, mut left) = (String::new(), rest);
    while let Some((length, more)) = left.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).ok()?;
        if length == 0 {
            return Some((status, head, whole));
        }
        whole += more.get(..length)?;
        left = more.get(length + 2..)?;
    }
    None
}

/// The generation of the sandbox, in the head of an answer.
fn generation(head: &str) -> Option<u64> {
    head.lines().find_map(|line| line.strip_prefix("afresh-generation: ")?.parse().ok())
}

/// A sandbox, as its client knows it.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    token: String,
}

/// The result of a piece of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunResult {
    /// The calls that the sandbox has seen.
    Count(u64),
    /// The status of a refusal; 0 without an answer.
    Refused(u16),
}

/// The refusal of a request for a sandbox.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refusal {
    /// The status; 0 is a connection without an answer.
    pub(crate) status: u16,
    /// Whether the call may be made at any later time: the connection broke, or the host that
    /// forwarded the request knows no outcome.
    pub(crate) may_come_later: bool,
}

/// Whether a refusal has an unknown outcome: another host may have executed the request.
pub(crate) fn is_unknown(text: &str) -> bool {
    text.contains("its outcome is unknown")
}

impl Refusal {
    const BROKEN: Self = Self { status: 0, may_come_later: true };

    fn new(status: u16, text: &str) -> Self {
        Self { status, may_come_later: is_unknown(text) }
    }
}

impl Sandbox {
    /// Makes one, by way of this host.
    pub(crate) fn new(host: &Host) -> Self {
        let mut made = None;
        until("a sandbox is made", || {
            made = Self::make_at(host.addr);
            made.is_some()
        });
        made.unwrap()
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Makes one through the host at this address; `None` if that is refused for now.
    pub(crate) fn make_at(addr: SocketAddr) -> Option<Self> {
        let body = json!({"templateID": "counter", "timeout": 3600}).to_string();
        let key = format!("X-API-Key: {KEY}\r\n");
        let (status, text) = exchange(addr, "POST", "/v2/sandboxes", &key, body.as_bytes())?;
        if matches!(status, 503 | 504) {
            return None;
        }
        assert_eq!(status, 201, "{text}");
        let said: Value = serde_json::from_str(&text).unwrap();
        let of = |name: &str| said[name].as_str().unwrap().to_owned();
        Some(Self { id: of("sandboxID"), token: of("envdAccessToken") })
    }

    /// Runs code, by way of this host.
    pub(crate) fn run(&self, host: &Host) -> RunResult {
        self.run_at(host.addr)
    }

    /// Runs code through the host at this address.
    pub(crate) fn run_at(&self, addr: SocketAddr) -> RunResult {
        self.evaluate_at(addr, "1")
    }

    /// Runs code that takes some seconds, through the host at this address.
    pub(crate) fn run_slowly_at(&self, addr: SocketAddr) -> RunResult {
        self.evaluate_at(addr, "!")
    }

    fn evaluate_at(&self, addr: SocketAddr, code: &str) -> RunResult {
        match self.answer_at(addr, code) {
            Ok((text, _)) => RunResult::Count(text.parse().unwrap()),
            Err(refusal) => RunResult::Refused(refusal.status),
        }
    }

    /// Writes the file `/log`, or reads it, by way of this address. The result is its content and
    /// the generation; a missing file counts as empty.
    pub(crate) fn file_at(
        &self,
        addr: SocketAddr,
        write: Option<&str>,
    ) -> Result<(String, u64), Refusal> {
        let headers = format!("E2b-Sandbox-Id: {}\r\nX-Access-Token: {}\r\n", self.id, self.token);
        let (method, content) = write.map_or(("GET", ""), |content| ("POST", content));
        match exchange_with_head(addr, method, "/files?path=/log", &headers, content.as_bytes()) {
            None => Err(Refusal::BROKEN),
            Some((200, head, text)) => {
                Ok((write.map_or(text, str::to_owned), generation(&head).unwrap()))
            }
            Some((404, head, text)) if write.is_none() => generation(&head)
                .map(|generation| (String::new(), generation))
                .ok_or_else(|| Refusal::new(404, &text)),
            Some((status, _, text)) => Err(Refusal::new(status, &text)),
        }
    }

    /// The answer to code that was sent to this address and the generation with it.
    pub(crate) fn answer_at(&self, addr: SocketAddr, code: &str) -> Result<(String, u64), Refusal> {
        let body = json!({ "code": code }).to_string();
        let headers = format!("E2b-Sandbox-Id: {}\r\nX-Access-Token: {}\r\n", self.id, self.token);
        match exchange_with_head(addr, "POST", "/execute", &headers, body.as_bytes()) {
            None => Err(Refusal::BROKEN),
            Some((200, head, text)) => {
                let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
                let result = lines.into_iter().find(|line| line["type"] == "result");
                // The limit of a call ended it: the machine is busy.
                if result.is_none() && text.contains("TimeoutError") {
                    return Err(Refusal::new(504, &text));
                }
                let result = result.unwrap_or_else(|| panic!("{text}"));
                Ok((result["text"].as_str().unwrap().to_owned(), generation(&head).unwrap()))
            }
            Some((status, _, text)) => Err(Refusal::new(status, &text)),
        }
    }

    /// Runs code until it is not refused for now.
    pub(crate) fn run_soon(&self, host: &Host) -> RunResult {
        let mut ran = RunResult::Refused(0);
        until("a host answers for the sandbox", || {
            ran = self.run(host);
            !matches!(ran, RunResult::Refused(0 | 503 | 504))
        });
        ran
    }

    /// Asks the control plane about it; the status.
    pub(crate) fn ask(&self, host: &Host, method: &str, rest: &str) -> u16 {
        self.ask_at(host.addr, method, rest)
    }

    /// As [`Sandbox::ask`], through the host at this address.
    pub(crate) fn ask_at(&self, addr: SocketAddr, method: &str, rest: &str) -> u16 {
        let path = format!("/sandboxes/{}{rest}", self.id);
        let key = format!("X-API-Key: {KEY}\r\n");
        exchange(addr, method, &path, &key, b"{}").map_or(0, |(status, _)| status)
    }

    /// As [`Sandbox::ask`], until it is not refused for now.
    pub(crate) fn ask_soon(&self, host: &Host, method: &str, rest: &str) -> u16 {
        let mut status = 0;
        until("the control plane answers", || {
            status = self.ask(host, method, rest);
            !matches!(status, 0 | 503 | 504)
        });
        status
    }

    /// Saves it, and continues: paused and connected.
    pub(crate) fn save(&self, host: &Host) {
        assert_eq!(self.ask_soon(host, "POST", "/pause"), 204);
        assert!(matches!(self.ask_soon(host, "POST", "/connect"), 200 | 201));
    }
}

/// The status that another client's key gets for a sandbox.
pub(crate) fn others_ask(host: &Host, sandbox: &Sandbox) -> u16 {
    let path = format!("/sandboxes/{}", sandbox.id);
    host.ask("GET", &path, "X-API-Key: key-of-other\r\n", b"").map_or(0, |(status, _)| status)
}
