//! Clocks of a guest: monotonic time and timers stand still while it is frozen, the date and the
//! time since the boot do not.

use crate::common;

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;

use common::states::ask;

const LIMIT: Duration = Duration::from_secs(100);
/// A guest is frozen for this long, which is longer than its timers.
const FROZEN: Duration = Duration::from_secs(6);

const CLOCKS: &str = r#"
import ctypes, os, select, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
MONOTONIC = [time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW, 6]

def called(clock):
    # By the system call itself, not by the vDSO.
    to = ctypes.create_string_buffer(16)
    assert libc.syscall(228, clock, to) == 0
    seconds, nanos = struct.unpack("qq", to.raw)
    return seconds * 10**9 + nanos

def agree():
    for clock in MONOTONIC + [time.CLOCK_BOOTTIME, time.CLOCK_REALTIME]:
        one = time.clock_gettime_ns(clock); two = called(clock); three = time.clock_gettime_ns(clock)
        assert one <= two <= three, (clock, one, two, three)
    uptime = float(open("/proc/uptime").read().split()[0])
    assert abs(uptime - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5

def everywhere():
    # In the process, in its threads and children, and in other programs.
    agree()
    thread = threading.Thread(target=agree); thread.start(); thread.join()
    before = time.monotonic_ns()
    r, w = os.pipe()
    if os.fork() == 0:
        agree(); os.write(w, struct.pack("q", time.monotonic_ns())); os._exit(0)
    child, = struct.unpack("q", os.read(r, 8)); assert os.wait()[1] == 0
    assert before <= child <= time.monotonic_ns()
    source = "import time; print(time.monotonic_ns())"
    out = os.popen(f"{sys.executable} -Sc '{source}'").read()
    assert child <= int(out) <= time.monotonic_ns(), out
    # The processor that it runs on is the one that it can have.
    cpu = libc.sched_getcpu(); assert os.sched_getaffinity(0) == {cpu}; os.sched_setaffinity(0, {cpu})

begun = [time.clock_gettime(clock) for clock in MONOTONIC]
real, boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
timer = libc.timerfd_create(1, 0)
for line in sys.stdin:
    match line.strip():
        case "all": everywhere(); print("done", flush=True)
        case "hold":
            signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 5)
            assert libc.timerfd_settime(timer, 0, struct.pack("4q", 0, 0, 5, 0), None) == 0
            print("held", flush=True)
        case "look":
            agree()
            spent = [time.clock_gettime(clock) - was for clock, was in zip(MONOTONIC, begun)]
            passed, suspended = time.time() - real, time.clock_gettime(time.CLOCK_BOOTTIME) - boot
            stood = [passed - time >= 5.9 for time in spent]
            rang = bool(select.select([timer], [], [], 0)[0]) or signal.getitimer(signal.ITIMER_REAL)[0] == 0
            print(stood, abs(suspended - passed) < 2, all(time >= 0 for time in spent), rang, flush=True)
"#;

const STOOD: &str = "[True, True, True] True True False";

#[test]
fn monotonic_time_stands_still_while_a_guest_is_frozen() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", CLOCKS);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "all"), "done");

    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    ask(line.guest_mut().unwrap(), "hold");
    let held = line.checkpoint().unwrap();
    let mut fork = line.fork(held).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    let frozen = line.guest_mut().unwrap().freeze().unwrap();
    frozen.save(&store, "held", &SnapshotOptions::default()).unwrap();
    line.rollback(held).unwrap();
    std::thread::sleep(FROZEN);
    assert_eq!(ask(line.guest_mut().unwrap(), "look"), STOOD);
    line.rollback(held).unwrap();
    line.guest_mut().unwrap().verify().unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), "look"), STOOD);
    assert_eq!(ask(fork.guest_mut().unwrap(), "look"), STOOD);
    let frozen = Frozen::load(store.load("held").unwrap(), &Options::default()).unwrap();
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    assert_eq!(ask(&mut thawed, "look"), STOOD);
    thawed.reset();
    assert_eq!(ask(&mut thawed, "look"), STOOD);
}
