//! `linux`: CPython, unmodified, answering a line of JSON or multiplying matrices, and Node as an
//! HTTP server: a pristine call, a clone, a thaw and a start. The rivals do not use afresh: no
//! reset at all, a process that is restored from outside, a server that forks for each request, and
//! a new process for each.
//!
//! All processes share one processor, because a guest and its sentry also take turns.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use afresh_linux::{Frozen, Program, Warm};
use afresh_memory::Strategy;
use afresh_pager::SnapshotOptions;
use afresh_store::Store;
use anyhow::{Context, bail, ensure};

use crate::groundhog::Groundhog;
use crate::row::{Contestant, Options, Sink, contest};

/// Name of the table.
const TABLE: &str = "linux";
/// Requests that a guest answers before it counts as warm.
pub(crate) const WARMING: usize = 5;

/// A program that answers lines.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) imports: &'static str,
    /// The body of the loop: `line` goes in, `answer` comes out.
    pub(crate) body: &'static str,
    pub(crate) request: &'static str,
    pub(crate) answer: &'static str,
    /// Threads that OpenBLAS may use.
    pub(crate) threads: &'static str,
}

pub(crate) const CASES: [Case; 3] = [
    Case {
        name: "json",
        threads: "1",
        imports: "import json",
        body: "d = json.loads(line); answer = json.dumps({'n': len(d), 's': sum(d)})",
        request: "[1, 2, 3, 4, 5]\n",
        answer: "{\"n\": 5, \"s\": 15}\n",
    },
    Case {
        name: "numpy",
        threads: "1",
        imports: "import json, numpy\nm = numpy.arange(10000.0).reshape(100, 100) % 7",
        body: "v = numpy.array(json.loads(line)); answer = json.dumps(float((m @ numpy.resize(v, 100)).sum()))",
        request: "[1, 2, 3, 4, 5]\n",
        answer: "89983.0\n",
    },
    // Larger, so that the work is shared out: four threads take turns on one processor.
    Case {
        name: "numpy-threads",
        threads: "4",
        imports: "import json, numpy\nm = numpy.arange(40000.0).reshape(200, 200) % 7",
        body: "v = numpy.array(json.loads(line)); answer = json.dumps(float((m @ m).trace() + v.sum()))",
        request: "[1, 2, 3, 4, 5]\n",
        answer: "359188.0\n",
    },
];

/// An HTTP server in JavaScript, and its request.
pub(crate) const NODE: &str = "/usr/bin/node";
const SERVER: &str = "let served = 0; require('http').createServer((request, response) => { \
    response.setHeader('Served', ++served); response.end('hello ' + request.url) }).listen(PORT, '127.0.0.1');";
const GET: &str = "GET /there HTTP/1.1\r\nHost: localhost\r\n\r\n";
/// Requests before it is warm: until V8 has compiled their code, each call would interpret it
/// again.
const NODE_WARMING: usize = 400;
/// Where the guest listens, within itself.
const PORT: u16 = 3000;
/// Memory that it may map: it reserves much and uses little.
pub(crate) const NODE_MEMORY: u64 = 64 << 30;

impl Case {
    /// Answers each line, in this process or in a fork.
    fn script(&self, forks: bool) -> String {
        let Self { imports, body, .. } = self;
        let reply = "sys.stdout.write(answer + '\\n'); sys.stdout.flush()";
        match forks {
            false => {
                format!("import sys\n{imports}\nfor line in sys.stdin:\n    {body}\n    {reply}\n")
            }
            true => format!(
                "import sys, os\n{imports}\nfor line in sys.stdin:\n    p = os.fork()\n    if p == 0:\n        {body}\n        \
                 {reply}; os._exit(0)\n    os.waitpid(p, 0)\n"
            ),
        }
    }
}

/// The interpreter, and directories of it that are not the system's.
pub(crate) struct Python {
    path: String,
    prefixes: Vec<String>,
}

impl Python {
    pub(crate) fn find() -> anyhow::Result<Self> {
        let ask = "import sys; print(sys.executable); print(sys.base_prefix); print(sys.prefix)";
        let out =
            Command::new("python3").args(["-c", ask]).output().context("no python3 in PATH")?;
        ensure!(out.status.success(), "python3: {}", out.status);
        let said = String::from_utf8(out.stdout)?;
        let mut lines = said.lines().map(str::to_owned);
        let path = lines.next().context("python3 does not report its path")?;
        Ok(Self { path, prefixes: lines.filter(|prefix| prefix != "/usr").collect() })
    }

    pub(crate) fn command(&self, case: &Case, script: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.args(["-c", script]).env("OPENBLAS_NUM_THREADS", case.threads);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// The interpreter, without arguments.
    pub(crate) fn interpreter(&self) -> Command {
        Command::new(&self.path)
    }

    /// A plain process that runs a script, which answers lines.
    pub(crate) fn server(&self, script: &str) -> anyhow::Result<Server> {
        self.server_with(script, std::iter::empty())
    }

    /// As [`Python::server`], with arguments of the script.
    pub(crate) fn server_with<'a>(
        &self,
        script: &str,
        arguments: impl Iterator<Item = &'a str>,
    ) -> anyhow::Result<Server> {
        let mut command = self.interpreter();
        command.args(["-c", script]).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Server::start(command)
    }

    pub(crate) fn has(&self, imports: &str) -> bool {
        let out = Command::new(&self.path).args(["-c", imports]).stderr(Stdio::null()).status();
        out.is_ok_and(|status| status.success())
    }

    /// The path of the interpreter.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// The interpreter as a guest, without arguments.
    pub(crate) fn bare(&self) -> Program {
        let program = Program::new(&self.path);
        self.prefixes.iter().fold(program, |program, prefix| program.grant(prefix))
    }

    /// The interpreter with a script, as a guest.
    pub(crate) fn guest(&self, script: &str) -> Program {
        self.bare().arg("-c").arg(script)
    }

    pub(crate) fn program(&self, case: &Case) -> Program {
        let program = self.guest(&case.script(false)).env("OPENBLAS_NUM_THREADS", case.threads);
        (0..WARMING).fold(program, |program, _| program.request(case.request))
    }
}

/// A plain process that answers lines.
pub(crate) struct Server {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Server {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command.spawn()?;
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().context("no pipe")?);
        Ok(Self { child, to, from })
    }

    fn ask(&mut self, case: &Case) -> anyhow::Result<()> {
        check(case, self.answer(case.request)?.as_bytes())
    }

    /// The line that it writes after `request`.
    pub(crate) fn answer(&mut self, request: &str) -> anyhow::Result<String> {
        self.to.as_mut().context("no pipe")?.write_all(request.as_bytes())?;
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        Ok(line)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The end of its input ends it.
        self.to = None;
        let _ = self.child.wait();
    }
}

pub(crate) fn check(case: &Case, answer: &[u8]) -> anyhow::Result<()> {
    if answer == case.answer.as_bytes() {
        return Ok(());
    }
    bail!("the answer is {:?}, not {:?}", String::from_utf8_lossy(answer), case.answer)
}

/// Starts the program anew for one request.
fn new_process(python: &Python, case: &Case) -> anyhow::Result<()> {
    Server::start(python.command(case, &case.script(false)))?.ask(case)
}

/// Keeps this thread, and all that it starts, on its present processor.
pub(crate) fn stay() -> anyhow::Result<()> {
    let mut one = rustix::thread::CpuSet::new();
    one.set(rustix::thread::sched_getcpu());
    Ok(rustix::thread::sched_setaffinity(None, &one)?)
}

pub(crate) fn calls(
    python: &Python,
    case: &Case,
    warm: &Warm,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let mut ours = warm.instance();
    let mut discarding = warm.clone().strategy(Strategy::Discard).instance();
    let mut plain = Server::start(python.command(case, &case.script(false)))?;
    let mut forking = Server::start(python.command(case, &case.script(true)))?;
    let request = case.request.as_bytes();
    let mut stopped = Server::start(python.command(case, &case.script(false)))?;
    let mut groundhog = None;
    // Its process has one thread.
    if case.threads == "1" {
        (0..WARMING).try_for_each(|_| stopped.ask(case))?;
        groundhog = Some(Groundhog::new(stopped.child.id())?);
    }
    let mut contestants = vec![
        Contestant::new("afresh", || check(case, &ours.call_pristine(request)?)),
        Contestant::new("afresh/discard", || check(case, &discarding.call_pristine(request)?)),
        Contestant::new("none", || plain.ask(case)),
        Contestant::new("fork-server", || forking.ask(case)),
        Contestant::new("new-process", || new_process(python, case)),
    ];
    if let Some(groundhog) = &mut groundhog {
        contestants.push(Contestant::new("groundhog", || {
            groundhog.restore()?;
            stopped.ask(case)
        }));
    }
    contest(TABLE, &format!("python/{}", case.name), options, contestants, sink)?;
    // Figures of an incomplete reset would be worthless.
    ours.verify()?;
    discarding.verify()?;
    if let Some(groundhog) = &mut groundhog {
        groundhog.verify()?;
    }
    Ok(())
}

/// Snapshots of a warm program: with its pages alone, and with the working set of one request.
struct WarmSnapshots {
    store: Store,
}

const WARM_NAME: &str = "warm";
const RECORDED_NAME: &str = "known";

impl WarmSnapshots {
    fn new(dir: &Path, warm: &Warm, program: &Program, request: &[u8]) -> anyhow::Result<Self> {
        let store = Store::create(dir)?;
        let frozen = warm.freeze()?;
        frozen.save(&store, WARM_NAME, &SnapshotOptions::default())?;
        let recorded = Frozen::record(store.load(WARM_NAME)?)?;
        Warm::thaw(&recorded, program)?.instance().call(request)?;
        let working_set = recorded.memory().touched();
        frozen.save(
            &store,
            RECORDED_NAME,
            &SnapshotOptions { working_set, ..Default::default() },
        )?;
        Ok(Self { store })
    }

    /// The answer of the program in the snapshot `name`.
    fn thaw(&self, name: &str, program: &Program, request: &[u8]) -> anyhow::Result<Vec<u8>> {
        let frozen = Frozen::load(self.store.load(name)?, &afresh_pager::Options::default())?;
        Ok(Warm::thaw(&frozen, program)?.instance().call(request)?)
    }
}

pub(crate) fn beginnings(
    python: &Python,
    case: &Case,
    warm: &Warm,
    dir: &Path,
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let request = case.request.as_bytes();
    let native = || Contestant::new("new-process", || new_process(python, case));
    // To its first answer, and with its end.
    let clone = |n| {
        let mut took = Duration::ZERO;
        for _ in 0..n {
            let started = Instant::now();
            let mut instance = warm.instance();
            check(case, &instance.call(request)?)?;
            took += started.elapsed();
        }
        Ok(took)
    };
    let ended = || check(case, &warm.instance().call(request)?);
    let clone =
        vec![Contestant::timed("afresh", clone), Contestant::new("afresh-ended", ended), native()];
    contest(TABLE, &format!("clone/{}", case.name), options, clone, sink)?;

    let program = python.program(case);
    let kept = WarmSnapshots::new(&dir.join(case.name), warm, &program, request)?;
    let thaw = |name: &'static str| {
        let (kept, program) = (&kept, &program);
        move || check(case, &kept.thaw(name, program, request)?)
    };
    let thaw = vec![
        Contestant::new("afresh", thaw(WARM_NAME)),
        Contestant::new("afresh/working-set", thaw(RECORDED_NAME)),
        native(),
    ];
    contest(TABLE, &format!("thaw/{}", case.name), options, thaw, sink)?;

    let start = || check(case, &program.warm()?.instance().call(request)?);
    let start = vec![Contestant::new("afresh", start), native()];
    contest(TABLE, &format!("start/{}", case.name), options, start, sink)
}

/// A server that listens on a host port.
struct ListeningServer {
    child: Child,
    port: u16,
    kept: Option<TcpStream>,
}

impl ListeningServer {
    fn start() -> anyhow::Result<Self> {
        // A port that is free now; if another process takes it in between, the case fails.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let script = SERVER.replace("PORT", &port.to_string());
        let child = Command::new(NODE).args(["-e", &script]).spawn()?;
        let mut server = Self { child, port, kept: None };
        let deadline = Instant::now() + Duration::from_secs(60);
        while server.ask().is_err() {
            ensure!(Instant::now() < deadline, "node does not listen");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(server)
    }

    /// One request, over the connection that is kept.
    fn ask(&mut self) -> anyhow::Result<()> {
        let mut stream = match self.kept.take() {
            Some(stream) => stream,
            None => TcpStream::connect(("127.0.0.1", self.port))?,
        };
        stream.write_all(GET.as_bytes())?;
        let mut answer = Vec::new();
        let mut piece = [0; 4096];
        while !answer.ends_with(b"hello /there") {
            match stream.read(&mut piece)? {
                0 => bail!("the connection ended"),
                read => answer.extend(&piece[..read]),
            }
        }
        self.kept = Some(stream);
        check_http(&answer, None)
    }
}

impl Drop for ListeningServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks the answer and, if `nth` is given, that the server has answered exactly that many.
fn check_http(answer: &[u8], nth: Option<usize>) -> anyhow::Result<()> {
    let text = String::from_utf8_lossy(answer);
    let served: Option<usize> =
        text.lines().find_map(|line| line.strip_prefix("Served: ")?.trim().parse().ok());
    ensure!(
        text.starts_with("HTTP/1.1 200")
            && text.ends_with("hello /there")
            && served.is_some()
            && (nth.is_none() || served == nth),
        "the answer is {text:?}, which should be the {nth:?}th"
    );
    Ok(())
}

pub(crate) fn node(dir: &Path, options: &Options, sink: &mut Sink<'_>) -> anyhow::Result<()> {
    let program = Program::new(NODE).arg("-e").arg(SERVER.replace("PORT", &PORT.to_string()));
    let program = program.memory_limit(NODE_MEMORY);
    let program = (0..NODE_WARMING).fold(program, |program, _| program.request(GET));
    let warm = program.warm()?;
    let mut ours = warm.instance();
    let mut plain = ListeningServer::start()?;
    // As warm as ours.
    (0..NODE_WARMING).try_for_each(|_| plain.ask())?;
    // Each call finds the server in its warm state, after that many answers.
    let nth = Some(NODE_WARMING + 1);
    let calls = vec![
        Contestant::new("afresh", || check_http(&ours.call_pristine(GET.as_bytes())?, nth)),
        Contestant::new("none", || plain.ask()),
        Contestant::new("new-process", || ListeningServer::start().map(drop)),
    ];
    contest(TABLE, "node/http", options, calls, sink)?;
    ours.verify()?;
    let native = || Contestant::new("new-process", || ListeningServer::start().map(drop));
    let clone = || check_http(&warm.instance().call(GET.as_bytes())?, nth);
    contest(TABLE, "clone/node", options, vec![Contestant::new("afresh", clone), native()], sink)?;
    let kept = WarmSnapshots::new(&dir.join("node"), &warm, &program, GET.as_bytes())?;
    let thaw = |name: &'static str| {
        let (kept, program) = (&kept, &program);
        move || check_http(&kept.thaw(name, program, GET.as_bytes())?, Some(NODE_WARMING + 1))
    };
    let thaw = vec![
        Contestant::new("afresh", thaw(WARM_NAME)),
        Contestant::new("afresh/working-set", thaw(RECORDED_NAME)),
        native(),
    ];
    contest(TABLE, "thaw/node", options, thaw, sink)
}
