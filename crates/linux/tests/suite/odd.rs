//! Rare cases, found by the Linux Test Project. `docs/linux-calls.md` lists the cases that pass.

use crate::common;

use std::time::Duration;

#[test]
fn odd_calls_do_what_they_do_on_linux() {
    let limit = Duration::from_secs(60);
    let Some(mut odd) = common::warm("odd.c", |p| p.time_limit(limit).start_limit(limit)) else {
        return;
    };
    for request in
        ["stacks\n", "steps\n", "written\n", "errors\n", "orphans\n", "halts\n", "much\n"]
    {
        let answer = odd.call_pristine(request.as_bytes()).unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), "ok\n", "{request}");
        odd.verify().unwrap();
    }
}

const LOCKS: &str = r#"
import errno, fcntl, os, struct, sys

def fails(code, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == code, error
    else:
        assert False, call

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return pid

def until_it_waits(pid):
    while True:
        os.sched_yield()
        with open("/proc/%d/stat" % pid) as stat:
            if stat.read().split()[2] == "S":
                return

def ends(pid):
    assert os.waitpid(pid, 0) == (pid, 0)

def holder(file):
    told = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    kind, _, start, length, pid = struct.unpack("hhqqi4x", told)
    return kind, start, length, pid

EX, SH, NB, UN = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB, fcntl.LOCK_UN

def round():
    file = os.open("/tmp/locked", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 100)
    fcntl.lockf(file, EX, 10, 20)

    def others():
        fails(errno.EAGAIN, fcntl.lockf, file, EX | NB, 1, 25)
        fails(errno.EAGAIN, fcntl.lockf, file, SH | NB)
        fcntl.lockf(file, EX | NB, 20, 0)
        fcntl.lockf(file, EX | NB, 0, 30)
        assert holder(file) == (fcntl.F_WRLCK, 20, 10, os.getppid()), holder(file)
    ends(child(others))
    assert holder(file)[0] == fcntl.F_UNLCK, "what the child held went with it"

    # A waiter continues when the middle of the range is unlocked; closing a second descriptor unlocks the rest.
    waiting = child(lambda: fcntl.lockf(file, EX, 2, 24))
    until_it_waits(waiting)
    assert os.waitpid(waiting, os.WNOHANG) == (0, 0)
    fcntl.lockf(file, UN, 4, 23)
    ends(waiting)
    ends(child(lambda: fails(errno.EAGAIN, fcntl.lockf, file, EX | NB, 1, 22)))
    os.close(os.open("/tmp/locked", os.O_RDONLY))
    ends(child(lambda: fcntl.lockf(file, EX | NB)))

    # flock is of the open file: a fork shares it, another open file does not.
    fcntl.flock(file, EX)
    other = os.open("/tmp/locked", os.O_RDWR)
    fails(errno.EAGAIN, fcntl.flock, other, SH | NB)
    ends(child(lambda: fcntl.flock(file, EX | NB)))
    os.close(file)
    fcntl.flock(other, EX | NB)

    # Two that wait for each other are refused.
    one, two = os.pipe(), os.pipe()
    fcntl.lockf(other, EX, 1, 0)
    def crosses():
        mine = os.open("/tmp/locked", os.O_RDWR)
        fcntl.lockf(mine, EX, 1, 1)
        os.write(one[1], b"x")
        fcntl.lockf(mine, EX, 1, 0)
    crossing = child(crosses)
    os.read(one[0], 1)
    until_it_waits(crossing)
    fails(errno.EDEADLK, fcntl.lockf, other, EX, 1, 1)
    fcntl.lockf(other, UN, 1, 0)
    ends(crossing)
    os.close(other)
    for end in one + two:
        os.close(end)
    with open("/proc/self/status") as status, open("/proc/self/maps") as maps:
        assert "Uid:\t1000" in status.read() and "rwxp" not in maps.readline()

kept = os.open("/tmp/kept", os.O_RDWR | os.O_CREAT)
for line in sys.stdin:
    if line == "keep\n":
        fcntl.lockf(kept, EX)
    else:
        ends(child(lambda: fcntl.lockf(kept, EX | NB)))
        round()
    print("done", flush=True)
"#;

#[test]
fn locks_keep_processes_apart_and_a_reset_gives_them_back() {
    let Some(program) = common::python() else { return };
    let limit = Duration::from_secs(100);
    let program = program.arg("/app.py").file("/app.py", LOCKS).request("round\n");
    let Some(warm) = common::here(program.time_limit(limit).start_limit(limit).warm()) else {
        return;
    };
    let mut instance = warm.instance();
    for request in ["round\n", "keep\n", "round\n"] {
        let answer = instance.call_pristine(request.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(String::from_utf8_lossy(&answer), "done\n", "{request}");
        instance.verify().unwrap();
    }
}

const CLOSES: &str = r#"
import ctypes, errno, fcntl, os, sys
libc = ctypes.CDLL(None, use_errno=True)
EX, NB, CLOEXEC = fcntl.LOCK_EX, fcntl.LOCK_NB, 4
locked = [os.open("/tmp/%d" % n, os.O_RDWR | os.O_CREAT) for n in range(4)]
for file in locked:
    for at in range(0, 3000, 2):
        fcntl.lockf(file, EX, 1, at)
# flock is of the open file, which has a descriptor left.
kept = os.dup(locked[0])
fcntl.flock(locked[0], EX)

def free():
    read, write = os.pipe()
    if os.fork() == 0:
        for n in range(4):
            try:
                fcntl.lockf(other := os.open("/tmp/%d" % n, os.O_RDWR), EX | NB)
                os.write(write, b"%d" % n)
                os.close(other)
            except BlockingIOError:
                pass
        os._exit(0)
    os.close(write)
    os.wait()
    names = os.read(read, 99).decode()
    os.close(read)
    return names

def closes(first, last, flags):
    return libc.syscall(ctypes.c_long(436), ctypes.c_ulong(first), ctypes.c_ulong(last), ctypes.c_ulong(flags))

said = [free()]
# Neither a descriptor that stays open, nor a call that fails, nor a descriptor that only names a file.
os.close(os.open("/tmp/1", os.O_PATH))
said += [closes(locked[0], locked[3], CLOEXEC), closes(9, 8, 0), closes(locked[0], locked[3], 8), free()]
# The last of many descriptors of two files, in one range.
many = [os.dup(locked[1 + n % 2]) for n in range(900)]
said += [closes(many[0], many[-1] | 1 << 32, 0), free()]
try:
    fcntl.flock(os.open("/tmp/0", os.O_RDWR), EX | NB)
except BlockingIOError:
    said.append("kept")
os.set_inheritable(kept, True)
# A program that runs next has the locks of files whose descriptors stay open.
(theirs, to), (back, mine) = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(locked[2])
    for n, stays in (2, True), (3, False):
        fcntl.lockf(file := os.open("/tmp/%d" % n, os.O_RDWR), EX)
        os.set_inheritable(file, stays)
    os.dup2(theirs, 0)
    os.dup2(mine, 1)
    os.execv("/bin/cat", ["cat"])
os.close(locked[2]), os.close(locked[3])
os.write(to, b"runs")
said += [os.read(back, 9).decode(), free()]
print(*said, flush=True)
"#;

#[test]
fn a_closed_descriptor_releases_the_locks_of_its_process_on_its_file() {
    let Some(program) = common::python() else { return };
    let limit = Duration::from_secs(100);
    let program = program.arg("/app.py").file("/app.py", CLOSES).start_limit(limit);
    let Some(run) = common::here(program.run(b"")) else { return };
    let output = String::from_utf8_lossy(&run.output);
    assert_eq!(output, " 0 -1 -1  0 12 kept runs 13\n", "{}", run.messages);
}
