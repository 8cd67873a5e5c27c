//! Named pipes: an open waits for its peer, bytes pass through, and a waiting open is part of every
//! state.

use crate::common;

use std::time::Duration;

use afresh_linux::Program;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const FIFOS: &str = r#"
import errno, os, select, signal, stat, subprocess, sys, threading

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, e
    else: assert False, "it works"

READ, WRITE, NOW = os.O_RDONLY, os.O_WRONLY, os.O_NONBLOCK

def events(fd):
    p = select.poll(); p.register(fd, select.POLLIN | select.POLLOUT)
    return dict(p.poll(0)).get(fd, 0)

def names():
    os.umask(0o22); os.mkfifo("/tmp/a", 0o666)
    st = os.stat("/tmp/a")
    assert stat.S_ISFIFO(st.st_mode) and stat.S_IMODE(st.st_mode) == 0o644 and st.st_rdev == 0, oct(st.st_mode)
    assert [e.name for e in os.scandir("/tmp") if stat.S_ISFIFO(e.stat(follow_symlinks=False).st_mode)] == ["a"]
    fails(errno.EEXIST, os.mkfifo, "/tmp/a"); fails(errno.EPERM, os.mknod, "/tmp/b", stat.S_IFCHR | 0o600, 0x103)
    os.mknod("/tmp/plain", 0o600); assert stat.S_ISREG(os.stat("/tmp/plain").st_mode); os.unlink("/tmp/plain")
    # No reader: an open for writing fails. No writer: a read finds no end of file.
    fails(errno.ENXIO, os.open, "/tmp/a", WRITE | NOW)
    r = os.open("/tmp/a", READ | NOW)
    assert stat.S_ISFIFO(os.fstat(r).st_mode) and os.fstat(r).st_ino == st.st_ino
    assert events(r) == 0 and os.read(r, 9) == b""
    w = os.open("/tmp/a", WRITE | NOW)
    fails(errno.EAGAIN, os.read, r, 9); fails(errno.ESPIPE, os.lseek, r, 0, 0)
    assert os.readlink(f"/proc/self/fd/{w}") == "/tmp/a"
    # Open, it outlives its names.
    os.rename("/tmp/a", "/tmp/b"); os.write(w, b"through"); assert os.read(r, 99) == b"through"
    again = os.open("/tmp/b", READ | NOW); os.unlink("/tmp/b"); os.close(again)
    os.write(w, b"still"); os.close(w)
    assert events(r) == select.POLLIN | select.POLLHUP and os.read(r, 99) == b"still" and events(r) == select.POLLHUP
    w = os.open(f"/proc/self/fd/{r}", WRITE | NOW); os.close(r)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN); fails(errno.EPIPE, os.write, w, b"x"); assert events(w) & select.POLLERR
    os.close(w)
    # Both ends at once, which does not wait.
    os.mkfifo("/tmp/both"); fd = os.open("/tmp/both", os.O_RDWR); os.write(fd, b"self"); assert os.read(fd, 9) == b"self"
    os.close(fd); fd = os.open("/tmp/both", READ | NOW); assert os.read(fd, 9) == b"", "what nobody has open is empty"
    os.close(fd); os.unlink("/tmp/both")

def meeting():
    os.mkfifo("/tmp/m")
    # An open waits, in threads and in processes; bytes written before it continues are kept.
    if (pid := os.fork()) == 0:
        fd = os.open("/tmp/m", WRITE); os.unlink("/tmp/m"); os.write(fd, b"from a child"); os._exit(0)
    with open("/tmp/m", "rb", 0) as file: assert file.read() == b"from a child"
    os.waitpid(pid, 0); os.mkfifo("/tmp/m")
    got = []
    reader = threading.Thread(target=lambda: got.append(open("/tmp/m").read())); reader.start()
    with open("/tmp/m", "w") as file: file.write("from a thread")
    reader.join(); assert got == ["from a thread"]
    # A signal breaks it off, and leaves no end behind.
    class Alarm(Exception): pass
    def ring(*_): raise Alarm
    signal.signal(signal.SIGALRM, ring)
    for flags in (READ, WRITE):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try: os.open("/tmp/m", flags)
        except Alarm: pass
    fails(errno.ENXIO, os.open, "/tmp/m", WRITE | NOW)
    # One that is killed while it waits does not either, nor one that becomes another program in the middle.
    pid = os.fork()
    if pid == 0: os.open("/tmp/m", READ)
    while open(f"/proc/{pid}/stat").read().split()[2] != "S": os.sched_yield()
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
    fails(errno.ENXIO, os.open, "/tmp/m", WRITE | NOW)
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=os.open, args=("/tmp/m", READ)).start()
        os.execv("/bin/sh", ["sh", "-c", "exit 3"])
    assert os.waitpid(pid, 0)[1] == 3 << 8
    fails(errno.ENXIO, os.open, "/tmp/m", WRITE | NOW)
    os.unlink("/tmp/m")
    out = subprocess.run(["sh", "-c", "cd /tmp; mkfifo p; (echo one; echo two) >p & while read l; do echo got $l; done <p; wait; rm p"], capture_output=True)
    assert out.stdout == b"got one\ngot two\n" and not out.stderr, out

for line in sys.stdin:
    match line.split():
        case ["all"]:
            names(); meeting(); print("done", flush=True)
        case ["hold"]:
            # After interrupted waits: a waiting reader, and an unlinked pipe with bytes in it.
            meeting(); os.mkfifo("/tmp/wait"); pid = os.fork()
            if pid == 0: os.write(2, open("/tmp/wait", "rb", 0).read(9)); os._exit(7)
            os.mkfifo("/tmp/full"); held = os.open("/tmp/full", os.O_RDWR); os.write(held, b"bytes"); os.unlink("/tmp/full")
            while open(f"/proc/{pid}/stat").read().split()[2] != "S": os.sched_yield()
            print("held", flush=True)
        case ["look"]:
            if not os.path.exists("/tmp/wait"): print("nothing", flush=True); continue
            w = os.open("/tmp/wait", WRITE | NOW); os.write(w, b"met\n")
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.read(held, 9), flush=True)
"#;

fn program() -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", FIFOS);
    Some(program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT))
}

#[test]
fn openers_of_a_named_pipe_meet_in_every_state() {
    let Some(program) = program() else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    pristine(&warm, "all", "done");
    in_every_state(&program, &warm, "hold", ["look", "7 b'bytes'", "nothing"]);
}
