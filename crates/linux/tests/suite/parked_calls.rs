//! Calls of child processes that wait in the kernel while other processes of the guest run: with
//! signals, timeouts, threads, `vfork`, shared memory, saves, resets, and calls cut short.

use crate::common;

use std::time::{Duration, Instant};

use afresh_linux::{CallError, End, Instance, PlatformError, Program, Warm};
use afresh_sys::planted::{self, Bug};

const LIMIT: Duration = Duration::from_secs(200);

fn python(script: &str) -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", script);
    Some(program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT))
}

/// Runs a script, whose output is `expected`.
fn prints(script: &str, expected: &str) {
    let Some(program) = python(script) else { return };
    let Some(run) = common::here(program.run(b"")) else { return };
    assert_eq!(String::from_utf8_lossy(&run.output), expected, "{}", run.messages);
    assert_eq!(run.end, End::Exit(0), "{}", run.messages);
}

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(format!("{request}\n").as_bytes());
    let answer = answer.unwrap_or_else(|error| panic!("{request:?}: {error}"));
    String::from_utf8(answer).unwrap().trim_end().to_owned()
}

/// A child whose reads and writes wait while its parent runs, and which takes signals there.
const WAITING: &str = r#"
import os, select, signal, time
(theirs, to), (back, mine) = os.pipe(), os.pipe()
if (pid := os.fork()) == 0:
    signal.signal(signal.SIGUSR1, lambda *_: os.write(mine, b"signal\n"))
    os.write(mine, b"ready\n")
    while True:
        os.write(mine, os.read(theirs, 1) * 200_000 + b"\n")
lines = os.fdopen(back)
def next_line():
    line = lines.readline().strip()
    print(line if len(line) < 9 else (line[0], len(line), len(set(line))))
    time.sleep(0.02)
next_line()
os.kill(pid, signal.SIGUSR1)
next_line()
os.write(to, b"a")
next_line()
os.kill(pid, signal.SIGSTOP)
os.write(to, b"b")
time.sleep(0.02)
print(select.select([back], [], [], 0)[0])
os.kill(pid, signal.SIGCONT)
next_line()
os.kill(pid, signal.SIGKILL)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

#[test]
fn a_process_that_waits_in_a_call_takes_signals() {
    let Some(program) = python(WAITING) else { return };
    let Some(run) = common::here(program.run(b"")) else { return };
    let expected = "ready\nsignal\n('a', 200000, 1)\n[]\n('b', 200000, 1)\n-9\n";
    assert_eq!(String::from_utf8_lossy(&run.output), expected, "{}", run.messages);
}

/// A child whose calls time out, or are interrupted by a handler that raises.
const TIMED: &str = r#"
import os, signal, socket, struct
one, other = socket.socketpair()
(theirs, to), (back, mine) = os.pipe(), os.pipe()
if os.fork() == 0:
    def rings(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, rings)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 20_000))
    while True:
        try:
            os.read(one.fileno(), 1)
        except BlockingIOError:
            os.write(mine, b"timed out\n")
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            os.read(theirs, 1)
        except TimeoutError:
            os.write(mine, b"interrupted\n")
answers = os.fdopen(back)
for _ in range(4):
    print(answers.readline().strip())
os.write(other.fileno(), b"!")
print(answers.readline().strip())
"#;

#[test]
fn a_call_that_waits_ends_at_its_time_and_by_an_alarm() {
    let rounds = "timed out\ninterrupted\n".repeat(2);
    prints(TIMED, &format!("{rounds}interrupted\n"));
}

/// A child that waits, then has threads that wait, then lends its memory to a child that waits to
/// open a pipe, and becomes another program, which waits when the first process ends.
const CHANGES: &str = r#"
import os, threading
os.mkfifo("/tmp/fifo")
(theirs, to), (back, mine) = os.pipe(), os.pipe()
os.set_inheritable(theirs, True)
if os.fork() == 0:
    def step(word):
        os.write(mine, word + b" " + os.read(theirs, 1) + b"\n")
    step(b"alone")
    threads = [threading.Thread(target=step, args=[b"thread"]) for _ in range(3)]
    for thread in threads:
        thread.start()
    step(b"thread")
    for thread in threads:
        thread.join()
    step(b"alone")
    files = [(os.POSIX_SPAWN_OPEN, 0, "/tmp/fifo", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, mine, 1)]
    os.waitpid(os.posix_spawn("/bin/cat", ["cat"], os.environ, file_actions=files), 0)
    step(b"alone")
    os.dup2(mine, 1)
    os.execv("/bin/cat", ["cat", "/dev/fd/%d" % theirs])
answers = os.fdopen(back)
def ask(word):
    os.write(to, word)
    print(answers.readline().strip())
for word in b"1", b"2", b"3", b"4", b"5", b"6":
    ask(word)
with open("/tmp/fifo", "w") as fifo:
    print("to the spawned", file=fifo)
print(answers.readline().strip())
ask(b"7")
ask(b"to the executed\n")
ask(b"once more\n")
"#;

#[test]
fn a_process_that_has_waited_has_threads_lends_its_memory_and_executes() {
    let threads = "thread 2\nthread 3\nthread 4\nthread 5\n";
    let after = "alone 6\nto the spawned\nalone 7\nto the executed\nonce more\n";
    prints(CHANGES, &format!("alone 1\n{threads}{after}"));
}

/// A child that waits while its mapping of a file becomes one of shared memory.
const SHARED: &str = r#"
import mmap, os
file = os.open("/tmp/file", os.O_RDWR | os.O_CREAT)
os.write(file, b"a" * 8192)
(theirs, to), (back, mine) = os.pipe(), os.pipe()
if os.fork() == 0:
    view = mmap.mmap(file, 8192, mmap.MAP_SHARED, mmap.PROT_READ)
    while os.read(theirs, 1):
        os.write(mine, view[4094:4098] + b"\n")
    os._exit(0)
answers = os.fdopen(back)
def look():
    os.write(to, b"?")
    print(answers.readline().strip())
look()
os.pwrite(file, b"b", 4095)
look()
view = mmap.mmap(file, 8192)
view[4096] = ord("c")
look()
view.close()
os.pwrite(file, b"d", 4094)
look()
"#;

#[test]
fn a_process_that_waits_gets_new_shared_mappings() {
    prints(SHARED, "aaaa\nabaa\nabca\ndbca\n");
}

/// A child that waits in the middle of a write, and one that waits for a request.
const STATES: &str = r#"
import os, sys
(theirs, to), (back, mine), (stream, sink) = os.pipe(), os.pipe(), os.pipe()
if os.fork() == 0:
    for n in range(1000):
        os.write(sink, b"%d" % (n % 10) * 200_000)
if os.fork() == 0:
    asked = 0
    while os.read(theirs, 1):
        asked += 1
        os.write(mine, b"%d\n" % asked)
answers = os.fdopen(back)
for line in sys.stdin:
    match line.strip():
        case "next":
            data = b""
            while len(data) < 200_000:
                data += os.read(stream, 200_000 - len(data))
            print(set(data.decode()), flush=True)
        case "ask":
            os.write(to, b"?")
            print(answers.readline().strip(), flush=True)
        case "spin":
            os.write(to, b"?")
            answers.readline()
            while True:
                pass
"#;

fn warm(limit: Duration) -> Option<(Program, Warm)> {
    let program = python(STATES)?.time_limit(limit);
    let warm = common::here(program.warm())?;
    Some((program, warm))
}

#[test]
fn calls_that_wait_are_saved_reset_and_forked() {
    let Some((program, warm)) = warm(LIMIT) else { return };
    let mut instance = Warm::thaw(&warm.freeze().unwrap(), &program).unwrap().instance();
    for _ in 0..3 {
        assert_eq!(ask(&mut instance, "next"), "{'0'}");
        assert_eq!(ask(&mut instance, "ask"), "1");
        let saved = instance.freeze().unwrap();
        let mut later = Warm::thaw(&saved, &program).unwrap().instance();
        for instance in [&mut instance, &mut later] {
            assert_eq!(ask(instance, "next"), "{'1'}");
            assert_eq!(ask(instance, "ask"), "2");
        }
        later.verify().unwrap();
        assert_eq!(ask(&mut later, "next"), "{'1'}");
        instance.verify().unwrap();
    }
    assert_eq!(instance.stats().processes, 1, "it was brought back within one process");
}

#[test]
fn a_call_that_is_cut_short_while_others_wait_is_reset() {
    let Some((_, warm)) = warm(Duration::from_secs(1)) else { return };
    let mut instance = warm.instance();
    for _ in 0..2 {
        let error = instance.call_pristine(b"spin\n").unwrap_err();
        assert!(matches!(error, CallError::Late { .. }), "{error}");
        instance.reset();
        instance.verify().unwrap();
    }
}

/// Each of 40 children would take 5 seconds.
#[test]
fn children_that_block_the_interrupt_do_not_hold_up_the_end_of_a_call() {
    let Some(mut instance) = common::warm("blocker.c", |program| program.time_limit(LIMIT)) else {
        return;
    };
    for _ in 0..2 {
        let begin = Instant::now();
        let error = instance.call_pristine(b"block\n").unwrap_err();
        let forged = matches!(error, CallError::Platform { source: PlatformError::Forged(_), .. });
        assert!(forged, "{error}");
        assert!(begin.elapsed() < Duration::from_secs(100), "{:?}", begin.elapsed());
        assert_eq!(instance.call_pristine(b"look\n").unwrap(), b"ready\n");
    }
}

#[test]
fn planted_bugs_are_caught() {
    if warm(LIMIT).is_some() {
        planted::must_be_caught(
            &[Bug::ParkedCall],
            &["parked_calls::calls_that_wait_are_saved_reset_and_forked"],
        );
    }
}
