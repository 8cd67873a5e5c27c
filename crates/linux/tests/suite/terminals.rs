//! Terminals: lines and signals, jobs, sizes and hanging up, as shells and screen programs use
//! them; and all of it in every state.

use crate::common;

use std::time::Duration;

use afresh_linux::Program;

use common::states::{ask, in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const TERMINALS: &str = r#"
import array, errno, fcntl, os, pty, re, select, signal, stat, struct, subprocess, sys, termios, time, tty

def fails(number, work, *args):
    try: work(*args)
    except (OSError, termios.error) as e: assert e.args[0] == number, e
    else: assert False, "it works"

def pts(): return sorted(set(os.listdir("/dev/pts")) - {"ptmx"})

def events(fd, asked=select.POLLIN | select.POLLOUT):
    p = select.poll(); p.register(fd, asked)
    return dict(p.poll(0)).get(fd, 0)

def until(fd, what):
    seen = b""
    while not re.search(what, seen):
        seen += os.read(fd, 4096)
    return seen

def ends():
    m, s = pty.openpty()
    name = os.ttyname(s)
    assert name == "/dev/pts/0" and os.isatty(s) and os.isatty(m) and pts() == ["0"], name
    st = os.fstat(s)
    assert stat.S_ISCHR(st.st_mode) and os.major(st.st_rdev) == 136 and st.st_ino == os.stat(name).st_ino
    # Lines are edited, echoed and ended; nothing is read before.
    os.write(m, b"helo\x7flo"); assert events(s) == select.POLLOUT and until(m, b"lo$") == b"helo\x08 \x08lo"
    os.write(m, b"\r"); assert os.read(s, 3) == b"hel" and os.read(s, 99) == b"lo\n" and os.read(m, 9) == b"\r\n"
    os.write(m, b"one\ntwo\n\x04"); assert array.array("i", fcntl.ioctl(s, termios.FIONREAD, b"\0" * 4))[0] == 8
    assert [os.read(s, 99) for _ in range(3)] == [b"one\n", b"two\n", b""]
    os.write(s, b"a\nb"); assert until(m, b"b$").endswith(b"a\r\nb")
    # Byte by byte, with all that a read may wait for.
    old = termios.tcgetattr(s); tty.setraw(s); new = termios.tcgetattr(s)
    assert old != new and new[6][termios.VMIN] == 1
    os.write(m, b"\x03x\r"); assert os.read(s, 99) == b"\x03x\r" and not events(m) & select.POLLIN
    os.set_blocking(s, False); fails(errno.EAGAIN, os.read, s, 1); os.set_blocking(s, True)
    def patience(least, time): new[6][termios.VMIN], new[6][termios.VTIME] = least, time; termios.tcsetattr(s, termios.TCSANOW, new)
    patience(0, 0); assert os.read(s, 9) == b""
    patience(0, 1); assert os.read(s, 9) == b""
    patience(3, 0); os.write(m, b"ab"); assert not events(s) & select.POLLIN
    os.write(m, b"c"); assert os.read(s, 9) == b"abc"
    patience(3, 1); os.write(m, b"ab"); assert events(s) & select.POLLIN and os.read(s, 9) == b"ab"
    if (pid := os.fork()) == 0: os.write(m, b"later"); os._exit(0)
    patience(5, 0); assert os.read(s, 9) == b"later"; os.waitpid(pid, 0)
    termios.tcsetattr(s, termios.TCSAFLUSH, old)
    # Typed input survives a change of mode; flushed input does not.
    os.write(m, b"raw"); tty.setraw(s, termios.TCSANOW); assert os.read(s, 9) == b"raw"
    os.write(m, b"gone"); termios.tcflush(s, termios.TCIFLUSH); os.write(m, b"x"); assert os.read(s, 9) == b"x"
    # Writing to a full one waits.
    for end in (m, s):
        os.set_blocking(end, False)
        wrote = 0
        try:
            while True: wrote += os.write(end, b"y" * 1000)
        except BlockingIOError: pass
        assert 3000 < wrote < 100_000 and not events(end) & select.POLLOUT, wrote
    os.set_blocking(m, True); os.set_blocking(s, True); termios.tcflush(s, termios.TCIOFLUSH)
    # The other end goes, comes back, and the master goes.
    os.close(s); fails(errno.EIO, until, m, b"no more"); assert events(m) & select.POLLHUP
    s = os.open(name, os.O_RDWR | os.O_NOCTTY); assert not events(m) & select.POLLHUP
    fails(errno.ENXIO, os.open, "/dev/tty", os.O_RDWR)
    os.close(m); assert os.read(s, 1) == b"" and events(s) & select.POLLHUP; fails(errno.EIO, os.write, s, b"x")
    fails(errno.EIO, termios.tcgetattr, s); assert pts() == []
    fails(errno.ENOTTY, termios.tcgetattr, 0); os.close(s)
    many = []
    try:
        while True: many.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    except OSError as e: assert e.errno == errno.ENOSPC, e
    assert len(many) == len(pts()) == 64
    fails(errno.EIO, os.open, "/dev/pts/7", os.O_RDWR | os.O_NOCTTY)
    for fd in many: os.close(fd)
    # In packets.
    m, s = pty.openpty(); fcntl.ioctl(m, termios.TIOCPKT, struct.pack("i", 1)); os.write(s, b"x")
    assert os.read(m, 9) == b"\0x"; termios.tcflush(s, termios.TCIFLUSH); assert events(m) & select.POLLIN and os.read(m, 9) == b"\1"
    os.close(m); os.close(s)

def session():
    pid, m = pty.fork()
    if pid == 0:
        # It leads a session that the terminal controls.
        def told(*words): os.write(1, " ".join(map(str, words)).encode() + b"\n")
        assert os.tcgetpgrp(0) == os.getpgrp() == os.getsid(0) == os.getpid() and os.ttyname(0) == os.ttyname(1)
        with open("/dev/tty", "w") as file: assert os.isatty(file.fileno())
        number, group = open("/proc/self/stat").read().split(")")[1].split()[4:6]
        assert int(number) == 136 << 8 and int(group) == os.getpgrp()
        signal.signal(signal.SIGWINCH, lambda *_: told("size", *os.get_terminal_size()))
        signal.signal(signal.SIGINT, lambda *_: told("int"))
        told("ready"); assert os.read(0, 99) == b"go\n"
        # In the background it may not read, and is stopped; nor write, if it is not to.
        job = os.fork()
        if job == 0:
            os.setpgid(0, 0); line = os.read(0, 99); told("job", line)
            signal.signal(signal.SIGTTIN, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGSTOP)
            fails(errno.EIO, os.read, 0, 9)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN); os.tcsetpgrp(0, os.getpgrp()); os._exit(5)
        seen = os.waitpid(job, os.WUNTRACED)[1]
        assert os.WIFSTOPPED(seen) and os.WSTOPSIG(seen) == signal.SIGTTIN, seen
        os.kill(job, signal.SIGCONT); seen = os.waitpid(job, os.WUNTRACED)[1]
        assert os.WSTOPSIG(seen) == signal.SIGTTIN, "it asks again"
        told("stopped"); os.tcsetpgrp(0, job); os.kill(job, signal.SIGCONT)
        assert os.WSTOPSIG(os.waitpid(job, os.WUNTRACED)[1]) == signal.SIGSTOP
        signal.signal(signal.SIGTTOU, signal.SIG_IGN); os.tcsetpgrp(0, os.getpgrp()); os.kill(job, signal.SIGCONT)
        assert os.waitpid(job, 0)[1] == 5 << 8 and os.tcgetpgrp(0) == job; os.tcsetpgrp(0, os.getpgrp())
        fails(errno.EPERM, os.tcsetpgrp, 0, os.getppid()); fails(errno.ESRCH, os.tcsetpgrp, 0, 9999)
        # An orphaned group gets an error instead of a stop.
        if os.fork() == 0:
            parent = os.getpid()
            if os.fork() == 0:
                os.setpgid(0, 0); signal.signal(signal.SIGTTIN, signal.SIG_DFL)
                while os.getppid() == parent: os.sched_yield()
                fails(errno.EIO, os.read, 0, 9); told("orphan"); os._exit(0)
            os._exit(0)
        signal.pause()
        signal.signal(signal.SIGHUP, lambda *_: (open("/tmp/hup", "w").close(), os._exit(9)))
        told("waits")
        while True: signal.pause()
    until(m, b"ready\r\n"); assert os.tcgetpgrp(m) == pid; fcntl.ioctl(m, termios.TIOCSWINSZ, struct.pack("4H", 33, 44, 0, 0))
    until(m, b"size 44 33\r\n"); os.write(m, b"\x03"); until(m, rb"\^Cint\r\n")
    os.write(m, b"go\n"); until(m, b"stopped\r\n")
    os.write(m, b"typed\n"); until(m, rb"job b'typed\\n'\r\n"); until(m, b"orphan\r\n")
    # Nothing would continue the group of the leader, so Ctrl-Z has no effect on it.
    os.write(m, b"\x1a"); until(m, rb"\^Z")
    os.kill(pid, signal.SIGWINCH); until(m, b"waits\r\n")
    os.close(m); assert os.waitpid(pid, 0)[1] == 9 << 8 and os.path.exists("/tmp/hup"), "hung up"
    os.unlink("/tmp/hup")
    # A session ends with its leader: the foreground group gets a signal, and reads end of file.
    pid, m = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent: os.sched_yield()
            open("/tmp/left", "w").write(repr(os.read(0, 9))); os._exit(0)
        os._exit(0)
    os.waitpid(pid, 0)
    while not os.path.exists("/tmp/left") or not os.path.getsize("/tmp/left"): time.sleep(0.001)
    assert open("/tmp/left").read() == "b''"; os.unlink("/tmp/left"); os.close(m)

for line in sys.stdin:
    match line.split():
        case ["all"]: ends(); session(); print("done", flush=True)
        case ["hold"]:
            # A line that is half typed, one that was echoed, who reads it, and how large it is.
            pid, m = pty.fork()
            if pid == 0: os.write(1, b"got " + os.read(0, 99)); os.write(1, b"%d" % os.get_terminal_size().columns); os._exit(3)
            fcntl.ioctl(m, termios.TIOCSWINSZ, struct.pack("4H", 5, 123, 0, 0)); os.write(m, b"ha")
            while open(f"/proc/{pid}/stat").read().split()[2] != "S": os.sched_yield()
            print("held", flush=True)
        case ["look"]:
            if not pts(): print("nothing", flush=True); continue
            os.write(m, b"lf\n"); print(until(m, b"3$"), os.waitpid(pid, 0)[1] >> 8, flush=True)
"#;

fn program(code: &str) -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", code);
    let program = program.env("PATH", "/usr/bin:/bin").env("TERM", "xterm");
    Some(program.time_limit(LIMIT).start_limit(LIMIT))
}

#[test]
fn terminals_edit_lines_and_control_jobs_in_every_state() {
    let Some(program) = program(TERMINALS) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    pristine(&warm, "all", "done");
    let held = r"b'half\r\ngot half\r\n123' 3";
    in_every_state(&program, &warm, "hold", ["look", held, "nothing"]);
}

/// Ordinary programs, driven as a person would.
const SCREENS: &str = r#"
import os, pty, re, select, shutil, signal, subprocess, sys, time

def begins(pid):
    with open(f"/proc/{pid}/cmdline") as f: return f.read(5)

def drive(argv, steps, **more):
    pid, m = pty.fork()
    if pid == 0: os.environ.update(more); os.execvp(argv[0], argv)
    seen, end = b"", time.monotonic() + 80
    def more_of(expected):
        # The limit is of the whole drive: a status line that is drawn every minute does not extend it.
        assert select.select([m], [], [], max(0, end - time.monotonic()))[0], (argv, expected, seen)
        return os.read(m, 4096)
    for send, expected in steps:
        # The job must have begun: before that the signal has no receiver, or the shell ignores it.
        while send in (b"\x1a", b"\x03") and ((job := os.tcgetpgrp(m)) == pid or begins(job) == argv[0] + "\0"): os.sched_yield()
        os.write(m, send)
        while not re.search(expected, seen, re.S): seen += more_of(expected)
        seen = b""
    try:
        while more := more_of("its end"): seen += more
    except OSError: pass
    os.close(m)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def bash():
    return drive(["bash", "--norc", "--noprofile", "-i"], [
        (b"", rb"\$ "), (b"echo $((20+22))\n", rb"42\r\n.*\$ "), (b"tty; stty -a | head -1\n", rb"/dev/pts/0.*speed 38400 baud.*\$ "),
        (b"echo edi\x01\x1b[C\x05ted\n", rb"edited\r\n.*\$ "), (b"sleep 1000\n", rb"sleep 1000"), (b"\x1a", rb"Stopped.*\$ "),
        (b"bg\n", rb"sleep 1000 &.*\$ "), (b"fg\n", rb"sleep 1000\r\n"), (b"\x03", rb"\^C.*\$ "), (b"cat\n", rb"cat"), (b"x\n", rb"x\r\nx\r\n"),
        (b"\x04", rb"\$ "), (b"cat & wait\n", rb"Stopped|\[1\]"), (b"\x03\n", rb"\$ "), (b"kill -9 %1; exit 7\n", rb"exit"), (b"exit 7\n", rb"")], PS1="$ ")

def script():
    out = subprocess.run(["script", "-qec", "test -t 0 && stty size && exit 6", "/tmp/typescript"], stdin=subprocess.DEVNULL, capture_output=True)
    return out.returncode, out.stdout

def less():
    open("/tmp/long", "w").write("".join(f"line {n}\n" for n in range(500)))
    return drive(["less", "/tmp/long"], [(b"", rb"line 0"), (b"G", rb"line 499"), (b"?line 25\n", rb"line 25"), (b"q", rb"")])

def tmux():
    # By default tmux takes keys less than 1 ms apart for pasted text, in which its prefix means nothing.
    # Old output is drawn anew, so each step awaits a number that only it prints. Keys are handled in their
    # order: after "o" the first pane has them, whether or not the second one has ended.
    open("/tmp/tmux.conf", "w").write("set -g assume-paste-time 0\nset -g default-command 'bash --norc --noprofile'\n")
    return drive(["tmux", "-f", "/tmp/tmux.conf", "-L", "t", "new"], [
        (b"", rb"[$#] "), (b"echo $((1234*4321))\n", rb"5332114"), (b"\x02%echo $((2345*5432))\n", rb"12738040"),
        (b"exit\n\x02oecho $((3456*6543))\n", rb"22612608"), (b"exit\n", rb"\[exited\]")],
        LC_ALL="C.UTF-8", SHELL="/bin/bash")

for line in sys.stdin:
    name = line.strip()
    if not shutil.which(name): print("SKIPPED", flush=True)
    else: print(globals()[name](), flush=True)
"#;

#[test]
fn shells_pagers_and_multiplexers_run_in_terminals() {
    let Some(program) = program(SCREENS) else { return };
    let Some(warm) = common::here(program.grant("/etc/terminfo").grant("/usr").warm()) else {
        return;
    };
    let mut instance = warm.instance();
    for (name, expected) in
        [("bash", "7"), ("script", r"(6, b'0 0\r\n')"), ("less", "0"), ("tmux", "0")]
    {
        match ask(&mut instance, name).as_str() {
            "SKIPPED" => println!("SKIPPED: no {name}"),
            answer => assert_eq!(answer, expected, "{name}"),
        }
        instance.reset();
        instance.verify().unwrap();
    }
}
