//! CPU time: by process, thread and child, and timers that expire on it; it continues within a
//! state, and goes back with it.

use crate::common;

use std::time::Duration;

use common::states::{ask, in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const SPENT: &str = r#"
import ctypes, os, resource, signal, struct, sys, threading, time

def burn(until): 
    while not until(): sum(range(1000))

def clocks():
    before = time.process_time_ns(), time.thread_time_ns()
    time.sleep(0.02)
    burn(lambda: time.process_time_ns() - before[0] > 30_000_000)
    # A sleep uses no CPU time; each thread has a separate count.
    assert time.thread_time_ns() - before[1] > 20_000_000
    spent = []
    thread = threading.Thread(target=lambda: (burn(lambda: time.thread_time_ns() > 20_000_000), spent.append(time.thread_time_ns())))
    own = time.thread_time_ns(); thread.start(); thread.join()
    assert spent[0] > 20_000_000 and time.process_time_ns() > before[0] + 50_000_000
    # CPU time of a thread without calls does not count for another.
    before = time.process_time_ns(), time.thread_time_ns()
    thread = threading.Thread(target=lambda: [sum(range(100_000)) for _ in range(30)]); thread.start(); thread.join()
    assert (time.thread_time_ns() - before[1]) * 2 < time.process_time_ns() - before[0]
    usage, ticks = resource.getrusage(resource.RUSAGE_SELF), os.times()
    assert usage.ru_utime > 0.05 and ticks.user > 0.04 and usage.ru_maxrss > 1000
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_utime < usage.ru_utime
    assert time.clock_gettime(~os.getpid() << 3 | 2) > 0.05
    try: time.clock_gettime(~9999 << 3 | 2)
    except OSError: pass
    else: assert False

def children():
    def child(spend):
        if (pid := os.fork()) == 0: start = time.process_time(); burn(lambda: time.process_time() - start > spend); os._exit(0)
        return pid
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime < 0.02
    pid = child(0.03)
    _, status, usage = os.wait4(pid, 0)
    assert usage.ru_utime > 0.03, usage
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime >= usage.ru_utime and os.times().children_user > 0.02
    # A child counts its own children after it has waited for them, and its parent counts both.
    if (pid := os.fork()) == 0:
        assert time.process_time() < 0.03 and os.times().children_user == 0
        os.waitpid(child(0.03), 0); os._exit(0)
    assert os.wait4(pid, 0)[2].ru_utime > 0.03

def rings():
    for which, number in ((signal.ITIMER_VIRTUAL, signal.SIGVTALRM), (signal.ITIMER_PROF, signal.SIGPROF)):
        rung = []
        signal.signal(number, lambda *_: rung.append(time.process_time()))
        start = time.process_time(); signal.setitimer(which, 0.02, 0.01)
        assert 0 < signal.getitimer(which)[0] <= 0.03 and 0.01 <= signal.getitimer(which)[1] < 0.02
        time.sleep(0.04); assert not rung, "asleep it spends nothing"
        while len(rung) < 3: pass
        assert rung[0] - start >= 0.02 and rung[2] - start >= 0.04, (start, rung)
        signal.setitimer(which, 0); assert signal.getitimer(which) == (0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    for clock in (2, 3):
        rung = []
        signal.signal(signal.SIGUSR1, lambda *_: rung.append(time.process_time()))
        timer, event = ctypes.c_void_p(), struct.pack("QiiQQ", 7, signal.SIGUSR1, 0, 0, 0) + b"\0" * 32
        assert libc.timer_create(clock, event, ctypes.byref(timer)) == 0
        start = time.process_time(); assert libc.timer_settime(timer, 0, struct.pack("4q", 0, 0, 0, 20_000_000), None) == 0
        left = ctypes.create_string_buffer(32); assert libc.timer_gettime(timer, left) == 0
        assert 0 < struct.unpack("4q", left.raw)[3] <= 20_000_000
        while not rung: pass
        assert rung[0] - start >= 0.019 and libc.timer_delete(timer) == 0
def limit():
    # A process over its limit of CPU time gets a signal, and is then ended.
    if (pid := os.fork()) == 0:
        said = []
        signal.signal(signal.SIGXCPU, lambda *_: said.append(time.process_time()))
        resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
        while not said: pass
        os.write(2, b"told"); assert said[0] >= 1
        while True: pass
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL

for line in sys.stdin:
    match line.strip():
        case "all": clocks(); children(); rings(); print("done", flush=True)
        case "hold":
            start = time.process_time(); signal.signal(signal.SIGPROF, lambda *_: None)
            signal.setitimer(signal.ITIMER_PROF, 1000, 7); print("held", flush=True)
        case "look":
            left, every = signal.getitimer(signal.ITIMER_PROF)
            print(900 < left <= 1000, every, flush=True)
        case "limit": limit(); print("done", flush=True)
        case "burn": start = time.perf_counter(); burn(lambda: time.perf_counter() - start > 0.3); print("burnt", flush=True)
        case "spent": print(time.process_time() < 0.1, flush=True)
"#;

#[test]
fn cpu_time_is_reported_and_its_timers_expire_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", SPENT);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    in_every_state(&program, &warm, "hold", ["look", "True 7.0", "False 0.0"]);
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "limit"), "done");
    // A call's CPU time does not count for the next one.
    for _ in 0..2 {
        instance.reset();
        assert_eq!(ask(&mut instance, "burn"), "burnt");
        instance.reset();
        assert_eq!(ask(&mut instance, "spent"), "True");
    }
}
