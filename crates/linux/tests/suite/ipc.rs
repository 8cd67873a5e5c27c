//! Semaphores and messages of System V, `mremap`, `clone3`, and limits.

use crate::common;

use std::time::Duration;

use afresh_linux::Resource;

use common::states::{ask, in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const IPC: &str = r#"
import ctypes, errno, mmap, os, resource, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = libc.mmap.restype = libc.mremap.restype = ctypes.c_long
libc.mmap.argtypes = [ctypes.c_long] * 6; libc.mremap.argtypes = [ctypes.c_long] * 5
IPC_CREAT, IPC_EXCL, NOWAIT, UNDO, RMID, STAT = 0o1000, 0o2000, 0o4000, 0x1000, 0, 2
GETVAL, GETALL, GETNCNT, SETVAL, SETALL = 12, 13, 14, 16, 17

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value == -1: raise OSError(ctypes.get_errno(), name)
    return value
def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, (e, errno.errorcode[number])
    else: assert False, "it works"
def ops(*list): return b"".join(struct.pack("hhh", n & 0x7fff, change, flags) for n, change, flags in list)
def semop(id, *list, limit=None): return call("semtimedop", id, ops(*list), len(list), limit)
def child(work):
    pid = os.fork()
    if pid == 0:
        try: work(); os._exit(0)
        except BaseException as e: print(repr(e), file=sys.stderr); os._exit(1)
    return pid
def ended(pid): assert os.waitpid(pid, 0)[1] == 0

def semaphores():
    id = call("semget", 77, 3, IPC_CREAT | 0o600); assert call("semget", 77, 0, 0) == id
    fails(errno.EEXIST, call, "semget", 77, 3, IPC_CREAT | IPC_EXCL | 0o600); fails(errno.EINVAL, call, "semget", 77, 4, 0); fails(errno.ENOENT, call, "semget", 78, 1, 0)
    call("semctl", id, 0, SETALL, struct.pack("HHH", 1, 2, 3)); values = ctypes.create_string_buffer(6)
    fails(errno.EAGAIN, semop, id, (0, -1, 0), (1, -3, NOWAIT)); fails(errno.EFBIG, semop, id, (3, 1, 0)); fails(errno.ERANGE, call, "semctl", id, 0, SETVAL, 40000)
    call("semctl", id, 0, GETALL, values); assert values.raw == struct.pack("HHH", 1, 2, 3)
    fails(errno.EAGAIN, lambda: semop(id, (2, -4, 0), limit=struct.pack("qq", 0, 1000000)))
    # Waits for two changes of its parent, and gives both back at its end.
    pid = child(lambda: semop(id, (0, -2, UNDO), (1, 0, 0)))
    while call("semctl", id, 0, GETNCNT) == 0: os.sched_yield()
    semop(id, (0, 1, 0)); assert call("semctl", id, 0, GETVAL) == 2
    semop(id, (1, -2, 0)); ended(pid)
    assert call("semctl", id, 0, GETVAL) == 2
    about = ctypes.create_string_buffer(104); call("semctl", id, 0, STAT, about); assert struct.unpack_from("i", about, 0)[0] == 77 and struct.unpack_from("q", about, 80)[0] == 3
    pid = child(lambda: fails(errno.EIDRM, semop, id, (0, -9, 0)))
    while call("semctl", id, 0, GETNCNT) == 0: os.sched_yield()
    call("semctl", id, 0, RMID); ended(pid); fails(errno.EINVAL, semop, id, (0, 1, 0))

def message(kind, text): return struct.pack("q", kind) + text
def receive(id, kind=0, flags=NOWAIT, room=100):
    got = ctypes.create_string_buffer(8 + room); n = call("msgrcv", id, got, room, kind, flags); return struct.unpack_from("q", got)[0], got.raw[8:8 + n]
def messages():
    id = call("msgget", 0, 0o600)
    for kind, text in (5, b"five"), (3, b"three"), (7, b""): call("msgsnd", id, message(kind, text), len(text), 0)
    about = ctypes.create_string_buffer(120); call("msgctl", id, STAT, about); assert struct.unpack_from("qqq", about, 72) == (9, 3, 16384)
    assert receive(id, 7) == (7, b"") and receive(id, -4) == (3, b"three")
    fails(errno.ENOMSG, receive, id, 4); fails(errno.E2BIG, receive, id, 0, NOWAIT, 2); assert receive(id, 0, NOWAIT | 0o10000, 2) == (5, b"fi")
    big = message(1, b"x" * 8192); fails(errno.EINVAL, call, "msgsnd", id, message(0, b""), 0, 0); fails(errno.EINVAL, call, "msgsnd", id, big, 8193, 0)
    call("msgsnd", id, big, 8192, 0); call("msgsnd", id, big, 8192, 0); fails(errno.EAGAIN, call, "msgsnd", id, big, 8192, NOWAIT)
    # One waits for room, then one waits for a message.
    pid = child(lambda: call("msgsnd", id, message(2, b"late"), 4, 0)); assert receive(id, 1, 0, 9000)[0] == 1 and receive(id, 2, 0) == (2, b"late"); ended(pid)
    def echo(): kind, text = receive(id, 4, 0); call("msgsnd", id, message(6, text * 2), 2 * len(text), 0)
    pid = child(echo); call("msgsnd", id, message(4, b"ab"), 2, 0); assert receive(id, 6, 0) == (6, b"abab"); ended(pid)
    call("msgctl", id, RMID, None); fails(errno.EINVAL, receive, id)

P, RW, SHARED, PRIVATE, ANON = 4096, 3, 1, 2, 32
def memory():
    def new(flags=PRIVATE): at = call("mmap", 0, 4 * P, RW, flags | ANON, -1, 0); ctypes.memset(at, 97, 4 * P); return at
    byte = lambda at: ctypes.string_at(at, 1)
    at, to = new(), new(); ctypes.memset(at, 98, 4 * P)
    assert call("mremap", at, 4 * P, 4 * P, 3, to) == to and byte(to) == byte(to + 4 * P - 1) == b"b"
    at = new(); moved = call("mremap", at, 4 * P, 4 * P, 5, 0); assert byte(moved) == b"a" and byte(at) == b"\0"
    fails(errno.EINVAL, call, "mremap", at, 4 * P, 4 * P, 3, at + P); fails(errno.EINVAL, call, "mremap", at, 4 * P, 8 * P, 5, 0); fails(errno.EINVAL, call, "mremap", at, 4 * P, 4 * P, 2, to)
    at = new(SHARED); assert call("mremap", at, 4 * P, 4 * P, 3, to) == to and byte(to) == b"a"
    fd = os.open("/tmp/mapped", os.O_RDWR | os.O_CREAT | os.O_TRUNC); os.ftruncate(fd, 100 * P); os.pwrite(fd, b"x", 50 * P)
    at = call("mmap", 0, 4 * P, RW, SHARED, fd, 0); ctypes.memset(at, 99, 1); at = call("mremap", at, 4 * P, 100 * P, 1, 0)
    assert byte(at) == b"c" and byte(at + 50 * P) == b"x"; ctypes.memset(at + 60 * P, 100, 1); assert os.pread(fd, 1, 60 * P) == b"d" and os.pread(fd, 1, 0) == b"c"
    call("munmap", ctypes.c_void_p(at), ctypes.c_long(100 * P)); os.close(fd); os.unlink("/tmp/mapped")
    # Its own memory, up to the first unmapped page.
    hole = new(); call("munmap", ctypes.c_void_p(hole + P), ctypes.c_long(3 * P)); got = ctypes.create_string_buffer(2 * P)
    vector = lambda at, len: struct.pack("QQ", at, len)
    assert call("process_vm_readv", os.getpid(), vector(ctypes.addressof(got), 2 * P), 1, vector(hole, 2 * P), 1, 0) == P and got.raw[:P] == b"a" * P
    fails(errno.EFAULT, call, "process_vm_writev", os.getpid(), vector(ctypes.addressof(got), 8), 1, vector(hole + P, 8), 1, 0); fails(errno.ESRCH, call, "process_vm_readv", 9999, vector(0, 8), 1, vector(0, 8), 1, 0)
    assert call("syscall", 239, None, None, 0, None, 0) == 0

def clone3():
    # The child has the default handlers, and an ignored signal stays ignored.
    signal.signal(signal.SIGUSR1, lambda *_: None); signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    args = struct.pack("11Q", 1 << 32, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    pid = call("syscall", 435, args, len(args))
    if pid == 0: os.kill(os.getpid(), signal.SIGUSR2); os.kill(os.getpid(), signal.SIGUSR1); os._exit(3)
    assert os.waitpid(pid, 0)[1] == signal.SIGUSR1
    fails(errno.EINVAL, call, "syscall", 435, args, 32); fails(errno.E2BIG, call, "syscall", 435, args + b"\1" * 8, 96); fails(errno.EINVAL, call, "syscall", 435, struct.pack("11Q", 9, *[0] * 10), 88)

def limits():
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 3000), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000)); many = [os.dup(0) for _ in range(2900)]
    for fd in many: os.close(fd)
    go = threading.Event(); threads = [threading.Thread(target=go.wait) for _ in range(300)]
    threading.stack_size(65536)
    for thread in threads: thread.start()
    fails(errno.EAGAIN, os.fork); go.set()
    for thread in threads: thread.join()
    ended(child(lambda: None))
    assert os.spawnv(os.P_WAIT, "/bin/true", ["true", "x" * 100000] + ["y"] * 100000) == 0; fails(errno.E2BIG, os.execv, "/bin/true", ["true", "x" * 140000])
    assert os.spawnv(os.P_WAIT, "/bin/true", ["true", "x" * 131071]) == 0
    fails(errno.E2BIG, os.execv, "/bin/true", ["true", "x" * 131072])

for line in sys.stdin:
    match line.strip():
        case "all": semaphores(); messages(); memory(); clone3(); limits(); print("done", flush=True)
        case "hold":
            set = call("semget", 5, 1, IPC_CREAT | 0o600); semop(set, (0, 9, UNDO))
            queue = call("msgget", 5, IPC_CREAT | 0o600); call("msgsnd", queue, message(8, b"kept"), 4, 0); print("held", flush=True)
        case "look":
            set, queue = libc.semget(5, 1, 0), libc.msgget(5, 0)
            print(-1 if set == -1 else call("semctl", set, 0, GETVAL), "none" if queue == -1 else receive(queue)[1].decode(), flush=True)
"#;

#[test]
fn semaphores_messages_mappings_and_limits_are_those_of_linux_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", IPC).time_limit(LIMIT).start_limit(LIMIT);
    let program = program.limit(Resource::OpenFiles, 100, 3000).limit(Resource::Tasks, 301, 400);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "all"), "done");
    pristine(&warm, "look", "-1 none");
    in_every_state(&program, &warm, "hold", ["look", "9 kept", "-1 none"]);
}
