//! Guests of several processes: all of them are warm, reset, forked, rolled back and saved, with
//! pipes and shared memory between them.

use crate::common;

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;
use afresh_sys::planted::{self, Bug};

const LIMIT: Duration = Duration::from_secs(200);

/// Workers that count their requests, in private memory, and all together in memory that they
/// share.
const WORKERS: &str = r#"
import mmap, os, signal, sys
shared = mmap.mmap(-1, 4096)
workers, heap = [], bytearray(1 << 20)
def work(requests, answers):
    asked, own = 0, bytearray(1 << 20)
    for line in os.fdopen(requests):
        asked += 1
        own[asked * 4096] = asked
        shared[0] += 1
        os.write(answers, b"%d of %d, %d pages\n" % (asked, shared[0], sum(map(bool, own[::4096]))))
    os._exit(0)
def hire():
    (theirs, requests), (answers, mine) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.close(requests), os.close(answers)
        work(theirs, mine)
    os.close(theirs), os.close(mine)
    workers.append((pid, requests, os.fdopen(answers)))
hire(), hire()
for line in sys.stdin:
    match line.split():
        case ["ask", which]:
            os.write(workers[int(which)][1], b"go\n")
            print(workers[int(which)][2].readline().strip(), flush=True)
        case ["hire"]:
            hire()
            print(len(workers), flush=True)
        case ["fire", which]:
            os.kill(workers[int(which)][0], signal.SIGKILL)
            print(os.waitstatus_to_exitcode(os.waitpid(workers[int(which)][0], 0)[1]), flush=True)
        case ["replace", which]:
            # Another program replaces the worker, and continues.
            os.execv("/bin/sh", ["sh", "-c", "echo was $0; while read line; do echo sh $line; done", which])
"#;

fn program() -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", WORKERS);
    Some(program.time_limit(LIMIT).start_limit(LIMIT))
}

fn warm() -> Option<Warm> {
    common::here(program()?.warm())
}

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(format!("{request}\n").as_bytes());
    let answer = answer.unwrap_or_else(|error| panic!("{request:?}: {error}"));
    String::from_utf8(answer).unwrap().trim_end().to_owned()
}

/// Changes of a call in any of its processes are undone at the next reset.
fn is_brought_back(warm: &Warm) {
    let mut instance = warm.instance();
    for round in 0..6 {
        assert_eq!(ask(&mut instance, "ask 0"), "1 of 1, 1 pages", "round {round}");
        assert_eq!(ask(&mut instance, "ask 1"), "1 of 2, 1 pages");
        assert_eq!(ask(&mut instance, "ask 0"), "2 of 3, 2 pages");
        let compared = instance.verify().unwrap();
        assert!(compared > 30 << 20, "of three processes: {compared}");
        // One that ends, and one that comes.
        assert_eq!(ask(&mut instance, "fire 1"), "-9");
        assert_eq!(ask(&mut instance, "hire"), "3");
        assert_eq!(ask(&mut instance, "ask 2"), "1 of 1, 1 pages");
        instance.verify().unwrap();
        assert_eq!(ask(&mut instance, "ask 1"), "1 of 1, 1 pages");
        instance.verify().unwrap();
        assert_eq!(ask(&mut instance, "replace 0"), "was 0");
        assert_eq!(ask(&mut instance, "on"), "sh on");
        instance.reset();
    }
    assert_eq!(instance.stats().processes, 1, "the first was brought back, not made anew");
}

#[test]
fn state_of_calls_is_reset_in_every_process() {
    let Some(warm) = warm() else { return };
    is_brought_back(&warm);
}

/// A child whose first thread has ended, and whose other one answers.
const LEAVER: &str = r#"
import ctypes, os, sys, threading
(theirs, requests), (answers, mine) = os.pipe(), os.pipe()
def work():
    for asked, line in enumerate(os.fdopen(theirs)):
        os.write(mine, b"%d\n" % asked)
if os.fork() == 0:
    threading.Thread(target=work).start()
    SYS_exit = 60
    ctypes.CDLL(None).syscall(SYS_exit, 0)
answers = os.fdopen(answers)
for line in sys.stdin:
    os.write(requests, b"go\n")
    print(answers.readline().strip(), flush=True)
"#;

#[test]
fn a_child_whose_first_thread_has_ended_is_saved() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", LEAVER);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = Warm::thaw(&warm.freeze().unwrap(), &program).unwrap().instance();
    for _ in 0..2 {
        assert_eq!([ask(&mut instance, "ask"), ask(&mut instance, "ask")], ["0", "1"]);
        let mut later = Warm::thaw(&instance.freeze().unwrap(), &program).unwrap().instance();
        assert_eq!(ask(&mut later, "ask"), "2");
        instance.reset();
        instance.verify().unwrap();
    }
}

#[test]
fn planted_bugs_are_caught() {
    if warm().is_some() {
        planted::must_be_caught(
            &[Bug::Family],
            &["families::state_of_calls_is_reset_in_every_process"],
        );
    }
}

#[test]
fn workers_continue_from_a_snapshot() {
    let (Some(program), Some(warm)) = (program(), warm()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let open = |name: &str| {
        let frozen = Frozen::load(store.load(name).unwrap(), &Options::default()).unwrap();
        Warm::thaw(&frozen, &program).unwrap()
    };
    is_brought_back(&open("warm"));
    // In the middle, with one worker hired since and one that has ended.
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "hire"), "3");
    assert_eq!(ask(&mut instance, "ask 2"), "1 of 1, 1 pages");
    assert_eq!(ask(&mut instance, "ask 0"), "1 of 2, 1 pages");
    assert_eq!(ask(&mut instance, "fire 1"), "-9");
    instance.freeze().unwrap().save(&store, "later", &SnapshotOptions::default()).unwrap();
    let mut thawed = open("later").instance();
    for instance in [&mut instance, &mut thawed] {
        assert_eq!(ask(instance, "ask 0"), "2 of 3, 2 pages");
        assert_eq!(ask(instance, "ask 2"), "2 of 4, 2 pages");
        assert_eq!(ask(instance, "hire"), "4");
    }
    thawed.verify().unwrap();
    assert_eq!(ask(&mut thawed, "ask 2"), "2 of 3, 2 pages");
}

#[test]
fn sessions_of_several_processes_fork_and_roll_back() {
    let Some(warm) = warm() else { return };
    let tree = Tree::new();
    let mut line = Branch::<Instance>::from_state(&tree, warm.home(), warm.state());
    assert_eq!(ask(line.guest_mut().unwrap(), "ask 0"), "1 of 1, 1 pages");
    let one = line.checkpoint().unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), "hire"), "3");
    assert_eq!(ask(line.guest_mut().unwrap(), "ask 2"), "1 of 2, 1 pages");
    let two = line.checkpoint().unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), "fire 0"), "-9");
    assert_eq!(ask(line.guest_mut().unwrap(), "ask 2"), "2 of 3, 2 pages");
    let three = line.checkpoint().unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), "ask 2"), "3 of 4, 3 pages");
    for round in 0..4 {
        line.rollback(one).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "ask 0"), "2 of 2, 2 pages", "round {round}");
        // A worker of the same number as in the other states, but another one.
        assert_eq!(ask(line.guest_mut().unwrap(), "hire"), "3");
        assert_eq!(ask(line.guest_mut().unwrap(), "ask 2"), "1 of 3, 1 pages");
        line.rollback(three).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "ask 2"), "3 of 4, 3 pages");
        line.rollback(two).unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "ask 0"), "2 of 3, 2 pages");
        assert_eq!(ask(line.guest_mut().unwrap(), "ask 2"), "2 of 4, 2 pages");
        line.guest_mut().unwrap().verify().unwrap();
        let mut fork = line.fork(two).unwrap();
        assert_eq!(ask(fork.guest_mut().unwrap(), "ask 1"), "1 of 3, 1 pages");
        assert_eq!(ask(fork.guest_mut().unwrap(), "ask 2"), "2 of 4, 2 pages");
    }
}

const SERVER: &str = r#"
import os, socket
listener = socket.create_server(("127.0.0.1", 8000))
for _ in range(3):
    if os.fork() == 0:
        served = 0
        while True:
            caller, _ = listener.accept()
            caller.recv(4096)
            served += 1
            text = b"%d by %d" % (served, os.getpid())
            caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            caller.close()
os.wait()
"#;

#[test]
fn a_server_with_workers_is_warm() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", SERVER).request("GET /");
    let Some(warm) = common::here(program.time_limit(LIMIT).start_limit(LIMIT).warm()) else {
        return;
    };
    let mut instance = warm.instance();
    let get = |instance: &mut Instance| {
        let answer = instance.call(b"GET / HTTP/1.1\r\nHost: me\r\n\r\n").unwrap();
        String::from_utf8_lossy(&answer).lines().last().unwrap_or_default().to_owned()
    };
    let first = get(&mut instance);
    for _ in 0..4 {
        instance.reset();
        assert_eq!(get(&mut instance), first);
        instance.verify().unwrap();
    }
    // From one call to the next every worker has its turn.
    assert_eq!(get(&mut instance), first);
    let second = get(&mut instance);
    assert_ne!(second, first);
}

#[test]
fn background_processes_live_in_every_state() {
    let script = "while read line; do case $line in start) sleep 1000 & echo $!;; *) kill -0 $line && echo alive || echo gone;; esac; done";
    let shell = Program::new("/bin/sh").arg("-c").arg(script).env("PATH", "/usr/bin:/bin");
    let Some(warm) = common::here(shell.time_limit(LIMIT).start_limit(LIMIT).warm()) else {
        return;
    };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let before = line.checkpoint().unwrap();
    let child = ask(line.guest_mut().unwrap(), "start");
    let with = line.checkpoint().unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), &child), "alive");
    line.rollback(before).unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), &child), "gone");
    line.rollback(with).unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), &child), "alive");
}

#[test]
fn a_child_that_uses_its_parents_memory_is_frozen_in_it() {
    let Some(path) = common::compiled("borrower.c", &["-static", "-pthread"]) else { return };
    let program = Program::new(path).time_limit(LIMIT).start_limit(LIMIT).request("count\n");
    let Some(warm) = common::here(program.warm()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("warm").unwrap(), &Options::default()).unwrap();
    for warm in [&warm, &Warm::thaw(&frozen, &program).unwrap()] {
        let mut instance = warm.instance();
        for _ in 0..3 {
            assert_eq!(ask(&mut instance, "count"), "2 counted");
            assert_eq!(ask(&mut instance, "count"), "3 counted");
            instance.verify().unwrap();
            assert_eq!(ask(&mut instance, "exec"), "1 sh");
            instance.verify().unwrap();
        }
    }
}

/// The counts of the workers in a state; `None` for one that was fired.
#[derive(Clone)]
struct Model {
    asked: Vec<Option<u32>>,
    all: u32,
}

#[test]
fn any_state_is_the_one_that_it_was() {
    let Some(warm) = warm() else { return };
    let mut random = 7u64;
    let mut next = move |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % below
    };
    let base = Model { asked: vec![Some(0), Some(0)], all: 0 };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let mut states = vec![(line.checkpoint().unwrap(), base.clone())];
    let (mut model, mut done) = (base, Vec::new());
    for step in 0..300 {
        let guest = line.guest_mut().unwrap();
        let which = next(model.asked.len());
        let what = match (next(12), model.asked[which]) {
            (0..5, Some(asked)) => {
                model.asked[which] = Some(asked + 1);
                model.all += 1;
                let expected = format!("{0} of {1}, {0} pages", asked + 1, model.all);
                done.push(format!("ask {which}"));
                assert_eq!(ask(guest, &format!("ask {which}")), expected, "{step}: {done:?}");
                continue;
            }
            (5, _) if model.asked.len() < 6 => {
                model.asked.push(Some(0));
                assert_eq!(ask(guest, "hire"), model.asked.len().to_string());
                "hire".to_owned()
            }
            (6, Some(_)) => {
                model.asked[which] = None;
                assert_eq!(ask(guest, &format!("fire {which}")), "-9");
                format!("fire {which}")
            }
            (7 | 8, _) => {
                states.push((line.checkpoint().unwrap(), model.clone()));
                format!("snapshot {}", states.len() - 1)
            }
            (9, _) => {
                let (id, _) = states[next(states.len())];
                line.fork(id).unwrap().guest_mut().unwrap().verify().unwrap();
                "fork".to_owned()
            }
            (10 | 11, _) => {
                let at = next(states.len());
                line.rollback(states[at].0).unwrap();
                model = states[at].1.clone();
                if next(2) == 0 {
                    line.guest_mut().unwrap().verify().unwrap();
                }
                format!("restore {at}")
            }
            _ => continue,
        };
        done.push(what);
    }
}
