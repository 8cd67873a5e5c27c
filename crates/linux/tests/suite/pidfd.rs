//! Descriptors of processes (pidfd): they become readable when the process ends, take signals and
//! waits, and are part of every state.

use crate::common;

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;

const LIMIT: Duration = Duration::from_secs(100);

const PROCESSES: &str = r#"
import asyncio, ctypes, errno, os, select, signal, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
P_PIDFD = 3

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, e
    else: assert False, "it works"

def child(status=0, sleeps=False):
    if (pid := os.fork()) == 0:
        if sleeps: signal.pause()
        os._exit(status)
    return pid

def ready(fd, millis=0):
    poll = select.poll(); poll.register(fd, select.POLLIN)
    return bool(poll.poll(millis))

def look():
    pid = child(sleeps=True)
    fd = os.pidfd_open(pid)
    assert not os.get_inheritable(fd) and os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[pidfd]"
    assert f"Pid:\t{pid}\n" in open(f"/proc/self/fdinfo/{fd}").read()
    assert not ready(fd) and not select.select([fd], [], [], 0.01)[0]
    assert os.waitid(P_PIDFD, fd, os.WEXITED | os.WNOHANG) is None
    fails(errno.EINVAL, os.read, fd, 8)
    fails(errno.EINVAL, os.write, fd, b"x")
    with select.epoll() as poll:
        poll.register(fd, select.EPOLLIN)
        signal.pidfd_send_signal(fd, 0)
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        assert poll.poll(10) == [(fd, select.EPOLLIN)]
    signal.pidfd_send_signal(fd, signal.SIGTERM)
    told = os.waitid(P_PIDFD, fd, os.WEXITED)
    assert (told.si_pid, told.si_code, told.si_status) == (pid, os.CLD_KILLED, signal.SIGTERM), told
    # It refers to no other process, and stays readable.
    assert ready(fd)
    fails(errno.ESRCH, signal.pidfd_send_signal, fd, 0)
    fails(errno.ECHILD, os.waitid, P_PIDFD, fd, os.WEXITED)
    assert "Pid:\t-1\n" in open(f"/proc/self/fdinfo/{fd}").read()
    os.close(fd)
    fails(errno.ESRCH, os.pidfd_open, pid)
    fails(errno.ESRCH, os.pidfd_open, 30000)
    fails(errno.EINVAL, os.pidfd_open, -1)
    fails(errno.EBADF, os.waitid, P_PIDFD, 0, os.WEXITED)
    # One that does not wait says so.
    pid = child(sleeps=True)
    fd = os.pidfd_open(pid, os.O_NONBLOCK)
    fails(errno.EAGAIN, os.waitid, P_PIDFD, fd, os.WEXITED)
    os.kill(pid, 9)
    assert ready(fd, 10000) and os.waitid(P_PIDFD, fd, os.WEXITED).si_pid == pid
    os.close(fd)
    # The details of a signal arrive; its sender cannot be forged.
    seen = []
    signal.signal(signal.SIGUSR1, lambda *a: seen.append(a[0]))
    own = os.pidfd_open(os.getpid())
    info = struct.pack("iiiiiiQ", signal.SIGUSR1, 0, -1, 0, 7, 7, 99).ljust(128, b"\0")
    assert libc.syscall(424, own, signal.SIGUSR1, info, 0) == 0 and seen == [signal.SIGUSR1]
    assert libc.syscall(424, own, signal.SIGUSR2, info, 0) == -1 and ctypes.get_errno() == errno.EINVAL
    os.close(own)
    # Made together with the process.
    CLONE_PIDFD, place = 0x1000, ctypes.c_int(-1)
    pid = libc.syscall(56, CLONE_PIDFD | signal.SIGCHLD, 0, ctypes.byref(place), 0, 0)
    if pid == 0: libc._exit(5)
    assert ready(place.value, 10000) and os.waitid(P_PIDFD, place.value, os.WEXITED).si_status == 5
    os.close(place.value)
    assert subprocess.run(["sh", "-c", "exit 4"]).returncode == 4

async def watched():
    made = [await asyncio.create_subprocess_exec("sh", "-c", f"exit {n}") for n in range(5)]
    return [await one.wait() for one in made]

held, child_held = None, None
for line in sys.stdin:
    if line == "hold\n":
        child_held = child(sleeps=True)
        held = os.pidfd_open(child_held)
        print(ready(held), flush=True)
    elif line == "end\n":
        signal.pidfd_send_signal(held, signal.SIGKILL)
        print(ready(held, 10000), os.waitid(P_PIDFD, held, os.WEXITED).si_status, flush=True)
    elif line == "held\n":
        print(held and ready(held), flush=True)
    else:
        look()
        if hasattr(asyncio, "PidfdChildWatcher") and sys.version_info < (3, 12):
            asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
            async def attached():
                asyncio.get_child_watcher().attach_loop(asyncio.get_running_loop())
                return await watched()
            assert asyncio.run(attached()) == [0, 1, 2, 3, 4]
        else:
            assert asyncio.run(watched()) == [0, 1, 2, 3, 4]
        print("done", flush=True)
"#;

fn program() -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", PROCESSES);
    Some(program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT))
}

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(request.as_bytes()).unwrap_or_else(|e| panic!("{request:?}: {e}"));
    String::from_utf8(answer).unwrap()
}

#[test]
fn descriptors_of_processes_work_and_nothing_is_left() {
    let Some(program) = program() else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..3 {
        instance.reset();
        assert_eq!(ask(&mut instance, "look\n"), "done\n");
        instance.verify().unwrap();
        assert_eq!(ask(&mut instance, "held\n"), "None\n");
        assert_eq!(ask(&mut instance, "hold\n"), "False\n");
    }
    assert_eq!(instance.stats().processes, 1);
}

#[test]
fn a_pidfd_reports_the_process_of_the_current_state() {
    let Some(program) = program() else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    assert_eq!(ask(line.guest_mut().unwrap(), "hold\n"), "False\n");
    let alive = line.checkpoint().unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), "end\n"), "True 9\n");
    let ended = line.checkpoint().unwrap();
    for _ in 0..3 {
        line.rollback(alive).unwrap();
        line.guest_mut().unwrap().verify().unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "held\n"), "False\n");
        let mut fork = line.fork(alive).unwrap();
        assert_eq!(ask(fork.guest_mut().unwrap(), "end\n"), "True 9\n");
        line.rollback(ended).unwrap();
        assert_eq!(ask(line.guest_mut().unwrap(), "held\n"), "True\n");
    }
    line.rollback(alive).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    let frozen = line.guest_mut().unwrap().freeze().unwrap();
    frozen.save(&store, "alive", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("alive").unwrap(), &Options::default()).unwrap();
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    assert_eq!(ask(&mut thawed, "held\n"), "False\n");
    assert_eq!(ask(&mut thawed, "end\n"), "True 9\n");
    thawed.verify().unwrap();
}
