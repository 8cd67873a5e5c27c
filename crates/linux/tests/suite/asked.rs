//! Less frequent requests: sizes of pipes, seals, settings of a process, and its signal at the
//! parent's end.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const ASKED: &str = r#"
import ctypes, errno, fcntl, mmap, os, select, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, e
    else: assert False, "it works"

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value == -1: raise OSError(ctypes.get_errno(), name)
    return value

def pipes():
    r, w = os.pipe()
    assert fcntl.fcntl(r, fcntl.F_GETPIPE_SZ) == 65536 and fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 100_000) == 131072 == fcntl.fcntl(r, fcntl.F_GETPIPE_SZ)
    os.set_blocking(w, False); assert os.write(w, b"x" * 200_000) == 131072; fails(errno.EAGAIN, os.write, w, b"x")
    fails(errno.EBUSY, fcntl.fcntl, w, fcntl.F_SETPIPE_SZ, 65536); assert len(os.read(r, 200_000)) == 131072
    assert fcntl.fcntl(r, fcntl.F_SETPIPE_SZ, 1) == 4096 and os.write(w, b"x" * 9000) == 4096 and not select.select([], [w], [], 0)[1]
    fails(errno.EPERM, fcntl.fcntl, w, fcntl.F_SETPIPE_SZ, 2 << 20)
    assert open("/proc/sys/fs/pipe-max-size").read() == "1048576\n"
    os.close(r); os.close(w)
    # Together they hold no more than so much.
    many = [os.pipe() for _ in range(80)]; larger = 0
    try:
        for r, _ in many: fcntl.fcntl(r, fcntl.F_SETPIPE_SZ, 1 << 20); larger += 1
    except OSError as e: assert e.errno == errno.EPERM
    assert 60 < larger < 80, larger
    for ends in many: [os.close(fd) for fd in ends]

def seals():
    from fcntl import F_ADD_SEALS as ADD, F_GET_SEALS as GET, F_SEAL_GROW as GROW, F_SEAL_SEAL as SEAL, F_SEAL_SHRINK as SHRINK, F_SEAL_WRITE as WRITE
    plain = os.memfd_create("plain"); assert fcntl.fcntl(plain, GET) == SEAL; fails(errno.EPERM, fcntl.fcntl, plain, ADD, WRITE); os.close(plain)
    fd = os.memfd_create("m", os.MFD_ALLOW_SEALING); os.ftruncate(fd, 5000); assert fcntl.fcntl(fd, GET) == 0
    fcntl.fcntl(fd, ADD, SHRINK); fails(errno.EPERM, os.ftruncate, fd, 4999); os.ftruncate(fd, 6000)
    fcntl.fcntl(fd, ADD, GROW); fails(errno.EPERM, os.ftruncate, fd, 6001); fails(errno.EPERM, os.pwrite, fd, b"xx", 5999); fails(errno.EPERM, os.posix_fallocate, fd, 0, 7000)
    assert os.pwrite(fd, b"xx", 5998) == 2
    m = mmap.mmap(fd, 4096); fails(errno.EBUSY, fcntl.fcntl, fd, ADD, WRITE); m[:2] = b"ab"; m.close()
    fcntl.fcntl(fd, ADD, WRITE); fails(errno.EPERM, os.pwrite, fd, b"x", 0); fails(errno.EPERM, mmap.mmap, fd, 4096)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR); fails(errno.EPERM, os.write, again, b"x")
    with mmap.mmap(fd, 4096, prot=mmap.PROT_READ) as m:
        assert m[:2] == b"ab"
    with mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE) as m: m[0] = 7
    fcntl.fcntl(fd, ADD, SEAL); fails(errno.EPERM, fcntl.fcntl, fd, ADD, SEAL); assert fcntl.fcntl(again, GET) == 15
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY); fails(errno.EPERM, fcntl.fcntl, reader, ADD, SEAL)
    for one in (fd, again, reader): os.close(one)
    with open("/tmp/file", "w") as file: fails(errno.EINVAL, fcntl.fcntl, file, GET)

def prctl():
    p = lambda *args: call("prctl", *map(ctypes.c_ulong, (*args, *[0] * (5 - len(args)))))
    word = ctypes.c_int()
    assert p(3) == 1 and p(4, 0) == 0 and p(3) == 0 and p(4, 1) == 0; fails(errno.EINVAL, p, 4, 2)
    assert p(39) == 0 and p(23, 0) == 1 and p(30) == 50_000 and p(27) == 0 and p(7) == 0
    assert call("personality", 8) == 0 and os.uname().machine == "i686" and open("/proc/self/personality").read() == "00000008\n" and call("personality", 0) == 8 and os.uname().machine == "x86_64"
    fails(errno.EINVAL, p, 23, 99); fails(errno.EPERM, p, 24, 0); fails(errno.EINVAL, p, 12345)
    if (pid := os.fork()) == 0: assert p(38, 1) == 0 and p(39) == 1; os._exit(0 if os.fork() or p(39) == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    # A child gets its signal at the parent's end, and lives on with its new parent.
    r, w = os.pipe()
    assert p(36, 1) == 0 and p(37, ctypes.addressof(word)) == 0 and word.value == 1
    if (pid := os.fork()) == 0:
        p(37, ctypes.addressof(word)); assert word.value == 0, "not inherited"
        if os.fork() == 0:
            signal.signal(signal.SIGUSR1, lambda *_: os.write(w, b"told"))
            p(1, signal.SIGUSR1); p(2, ctypes.addressof(word)); assert word.value == signal.SIGUSR1
            os.write(w, b"ready ")
            while os.getppid() != me: signal.pause()
            os._exit(5)
        if os.fork() == 0: os._exit(6)
        assert os.read(r, 6) == b"ready "; os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT); os._exit(4)
    ends = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3))
    assert ends == [4, 5, 6] and os.read(r, 9) == b"told", ends
    fails(errno.ECHILD, os.wait); assert p(36, 0) == 0; os.close(r); os.close(w)

def users():
    me = os.getuid(); os.setuid(me); os.setgid(me); os.setresuid(-1, me, -1); os.setregid(me, -1)
    for work, *args in ((os.setuid, 0), (os.setgid, 0), (os.setreuid, 0, -1), (os.setresgid, -1, -1, 0), (os.setgroups, [])): fails(errno.EPERM, work, *args)
    head, data = (ctypes.c_uint * 2)(0x20080522, 0), (ctypes.c_uint * 6)(*[7] * 6)
    assert call("capget", head, data) == 0 and list(data) == [0] * 6 and call("capset", head, data) == 0
    data[0] = 1; fails(errno.EPERM, call, "capset", head, data)
    head[0] = 0; fails(errno.EINVAL, call, "capget", head, data); assert head[0] == 0x20080522

me = os.getpid()
for line in sys.stdin:
    match line.strip():
        case "all": pipes(); seals(); prctl(); users(); print("done", flush=True)
        case "hold":
            # Sealed, a pipe of another size, and a grandchild that waits for its parent's end.
            fd = os.memfd_create("m", os.MFD_ALLOW_SEALING); os.write(fd, b"sealed"); fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            gone = os.memfd_create("gone", os.MFD_ALLOW_SEALING); os.close(gone)
            r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETPIPE_SZ, 1 << 18); libc.prctl(36, 1, 0, 0, 0)
            child = os.fork()
            if child == 0:
                if os.fork() == 0: libc.prctl(1, signal.SIGKILL, 0, 0, 0); os.write(w, b"x"); signal.pause()
                signal.pause()
            os.read(r, 1); print("held", flush=True)
        case "look":
            if not any(name.startswith("/memfd") for name in (os.readlink(f"/proc/self/fd/{n}") if os.path.lexists(f"/proc/self/fd/{n}") else "" for n in range(20))): print("nothing", flush=True); continue
            fails(errno.EPERM, os.write, fd, b"x"); os.kill(child, signal.SIGTERM)
            print(fcntl.fcntl(fd, fcntl.F_GET_SEALS), fcntl.fcntl(w, fcntl.F_GETPIPE_SZ), sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)), flush=True)
"#;

#[test]
fn sizes_seals_and_traits_are_as_in_linux_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", ASKED);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    in_every_state(&program, &warm, "hold", ["look", "8 262144 [-15, -9]", "nothing"]);
}
