//! Programs with threads, signals, timers and pipes: they work, and leave nothing behind.

use crate::common;

use std::time::Duration;

use afresh_linux::{CallError, End, Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;
use afresh_sys::run_isolated;

fn program() -> Option<Program> {
    let path = common::compiled("threads.c", &["-static", "-pthread"])?;
    let limit = common::limit(100);
    Some(Program::new(path).time_limit(limit).start_limit(limit))
}

fn warm() -> Option<Warm> {
    common::here(program()?.warm())
}

fn ask(warm: &mut Instance, request: &str) -> String {
    match warm.call_pristine(request.as_bytes()) {
        Ok(answer) => String::from_utf8(answer).unwrap(),
        Err(error) => panic!("{request}: {error}"),
    }
}

const CLEAN: &str = "shared 0 worker 42 local 7 rang 0 alarm 0 timer 0 mask 0 stack 2 ready 0 pipe -1  count 0 next fd 8 thread 2\n";

#[test]
fn threads_signals_and_pipes_are_those_of_linux() {
    let Some(warm) = warm() else { return };
    let mut warm = warm.instance();
    assert_eq!(ask(&mut warm, "look\n"), CLEAN);
    for _ in 0..3 {
        for (request, expected) in [
            ("count\n", "16000 8\n"),
            ("spin\n", "4\n"),
            ("signals\n", "10\n"),
            ("faults\n", "33015 4711 4711 1\n"),
            ("pipe\n", "200000 200000 200000 1 1\n"),
            ("every\n", "1\n"),
            ("many\n", "1 1\n"),
        ] {
            assert_eq!(ask(&mut warm, request), expected, "{request}");
            warm.verify().unwrap_or_else(|error| panic!("{request}: {error}"));
        }
    }
    assert_eq!(ask(&mut warm, "look\n"), CLEAN);
    assert_eq!(warm.stats().processes, 1, "all of it was brought back within one process");
    let id = warm.process_id().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    assert!(status.contains("Threads:\t1\n"), "the kernel knows of one thread");
}

#[test]
fn threads_of_a_call_are_removed_by_the_reset() {
    let Some(warm) = warm() else { return };
    let mut warm = warm.instance();
    for _ in 0..20 {
        assert_eq!(ask(&mut warm, "dirty\n"), "done\n");
        let dirty = String::from_utf8(warm.call(b"look\n").unwrap()).unwrap();
        let expected = "shared 1000 worker 42 local 99 rang 5 alarm 1 timer 1 mask 1 stack 0 ready 2 pipe 5 dirty count 6 next fd 12 thread 2\n";
        assert_eq!(dirty, expected);
        warm.verify().unwrap();
        assert_eq!(ask(&mut warm, "look\n"), CLEAN);
    }
    assert_eq!(warm.stats().processes, 1);
}

#[test]
fn states_with_threads_are_checkpointed_rolled_back_and_saved() {
    let (Some(program), Some(warm)) = (program(), warm()) else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let root = line.at();
    let call = |line: &mut Branch<Instance>, request: &str| {
        let answer = line.guest_mut().unwrap().call(request.as_bytes()).unwrap();
        String::from_utf8(answer).unwrap()
    };
    assert_eq!(call(&mut line, "dirty\n"), "done\n");
    let dirtied = line.checkpoint().unwrap();
    let mut fork = line.fork(dirtied).unwrap();
    let dirty = call(&mut line, "look\n");
    assert!(
        dirty.starts_with("shared 1000 worker 42 local 99 rang 5 alarm 1 timer 1 mask 1"),
        "{dirty}"
    );
    line.rollback(root).unwrap();
    assert_eq!(call(&mut line, "look\n"), CLEAN);
    assert_eq!(call(&mut fork, "look\n"), dirty);
    line.rollback(dirtied).unwrap();
    assert_eq!(call(&mut line, "look\n"), dirty);
    line.guest_mut().unwrap().verify().unwrap();

    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    let mut instance = warm.instance();
    instance.call(b"dirty\n").unwrap();
    instance.freeze().unwrap().save(&store, "dirty", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("dirty").unwrap(), &Options::default()).unwrap();
    let thawed = Warm::thaw(&frozen, &program).unwrap();
    let mut thawed = thawed.instance();
    for _ in 0..3 {
        assert_eq!(ask(&mut thawed, "look\n"), dirty);
        thawed.verify().unwrap();
    }
    assert_eq!(ask(&mut thawed, "count\n"), "17000 8\n");
}

#[test]
fn a_guest_whose_threads_misbehave_ends_alone() {
    let Some(program) = program() else { return };
    let program = program.time_limit(Duration::from_secs(1));
    let Some(warm) = common::here(program.warm()) else { return };
    let mut warm = warm.instance();
    let mut ends = |request: &str, expected: &dyn Fn(&CallError) -> bool| {
        let error = warm.call_pristine(request.as_bytes()).expect_err(request);
        assert!(expected(&error), "{request}: {error}");
        assert_eq!(ask(&mut warm, "look\n"), CLEAN, "after {request}");
        warm.verify().unwrap();
    };
    let ended =
        |end: End| move |e: &CallError| matches!(e, CallError::Ended { end: is, .. } if *is == end);
    ends("forever\n", &|e| matches!(e, CallError::Late { .. }));
    ends("asleep\n", &|e| matches!(e, CallError::Late { .. }));
    ends("stuck\n", &ended(End::Deadlock));
    ends("die 11\n", &ended(End::Signal(11)));
    ends("die 9\n", &ended(End::Signal(9)));
    ends("die 15\n", &ended(End::Signal(15)));
    // The first thread has ended; the worker waits without a waker.
    ends("thread ends\n", &ended(End::Deadlock));
}

#[test]
fn forged_frames_hurt_only_who_forges_them() {
    run_isolated("threads::forged_frames_hurt_only_who_forges_them", || {
        let Some(program) = program() else { return };
        let program = program.time_limit(Duration::from_secs(1));
        let Some(warm) = common::here(program.warm()) else { return };
        let mut warm = warm.instance();
        for seed in 0..30 {
            // It may end in any way, but for one that is the host's fault.
            if let Err(CallError::Platform { source, .. }) =
                warm.call_pristine(format!("forge {seed}\n").as_bytes())
            {
                use afresh_linux::PlatformError::{Ended, Forged};
                assert!(matches!(source, Ended(_) | Forged(_)), "{seed}: {source}");
            }
            warm.verify().unwrap_or_else(|error| panic!("{seed}: {error}"));
            assert_eq!(ask(&mut warm, "look\n"), CLEAN, "{seed}");
        }
    });
}

const THREADED: &str = r#"
import sys, threading, queue, concurrent.futures, time, signal, os, select, socket, asyncio, socketserver, http.server, urllib.request
jobs, answers = queue.Queue(), queue.Queue()
def work():
    while True: answers.put(jobs.get() * 2)
for _ in range(3): threading.Thread(target=work, daemon=True).start()
pool = concurrent.futures.ThreadPoolExecutor(4)
caught, seen = [], []
signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
signal.signal(signal.SIGALRM, lambda number, frame: caught.append(number))
async def tasks():
    async def answer(reader, writer):
        writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    async def slow(n): await asyncio.sleep(0.005); return n
    writer.write(b"hello\n")
    line = await reader.read()
    server.close()
    return line, await asyncio.gather(*(slow(n) for n in range(5))), await asyncio.get_running_loop().run_in_executor(None, lambda: 9)
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"hi " + self.path.encode())
    def log_message(self, *a): pass
for line in sys.stdin:
    out = []
    for n in range(10): jobs.put(n)
    out.append(sorted(answers.get() for _ in range(10)))
    out.append(sum(pool.map(lambda n: n * n, range(50))))
    spun = []
    def spin():
        end = time.monotonic() + 0.05
        while time.monotonic() < end: pass
        spun.append(1)
    threads = [threading.Thread(target=spin) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    out.append(len(spun))
    os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)
    signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
    out.append([int(c) for c in caught])
    r, w = os.pipe(); threading.Timer(0.01, lambda: os.write(w, b"late")).start()
    out.append((select.select([r], [], [], 10)[0] == [r], os.read(r, 10)))
    a, b = socket.socketpair(); a.sendall(b"x" * 300000 if False else b"x" * 3000); out.append(len(b.recv(9000)))
    event = threading.Event(); out.append(event.wait(0.01))
    out.append(asyncio.run(tasks()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out.append(urllib.request.urlopen("http://127.0.0.1:%d/there" % server.server_port, timeout=10).read())
    server.shutdown(); server.server_close()
    seen.append(1); out.append((len(seen), threading.active_count()))
    print(repr(out), flush=True)
"#;

#[test]
fn a_threaded_python_program_works_and_leaves_nothing() {
    let Some(program) = common::python() else { return };
    let limit = Duration::from_secs(200);
    let program =
        program.arg("/app.py").file("/app.py", THREADED).time_limit(limit).start_limit(limit);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut warm = warm.instance();
    let expected = "[[0, 2, 4, 6, 8, 10, 12, 14, 16, 18], 40425, 3, [10, 10, 14], (True, b'late'), 3000, False, (b'HELLO\\n', [0, 1, 2, 3, 4], 9), b'hi /there', (1, ";
    for _ in 0..3 {
        let answer = ask(&mut warm, "go\n");
        assert!(answer.starts_with(expected), "{answer}");
        warm.verify().unwrap();
    }
    assert_eq!(warm.stats().processes, 1);
}

const BLAS: &str = r#"
import sys, numpy, threading
m = numpy.arange(160000.0).reshape(400, 400) % 7
for line in sys.stdin:
    v = (m @ m).sum() + (m @ m.T).trace()
    print(v, flush=True)
"#;

#[test]
fn numpy_with_threads_gives_the_same_as_without() {
    let Some(program) = common::python() else { return };
    let have = std::process::Command::new("python3").args(["-c", "import numpy"]).output();
    if !have.is_ok_and(|out| out.status.success()) {
        println!("SKIPPED: python3 has no numpy");
        return;
    }
    let limit = Duration::from_secs(200);
    let program = program
        .env("OPENBLAS_NUM_THREADS", "4")
        .arg("-c")
        .arg(BLAS)
        .request("go\n")
        .time_limit(limit)
        .start_limit(limit);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut warm = warm.instance();
    let first = ask(&mut warm, "go\n");
    for _ in 0..5 {
        assert_eq!(ask(&mut warm, "go\n"), first);
        warm.verify().unwrap();
    }
}
