//! Watching files (`inotify`): changes are reported in order, and unread events are part of every
//! state.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const WATCHES: &str = r#"
import array, asyncio, ctypes, errno, fcntl, os, select, shutil, struct, sys, termios
libc = ctypes.CDLL(None, use_errno=True)
NAMES = "ACCESS MODIFY ATTRIB CLOSE_WRITE CLOSE_NOWRITE OPEN MOVED_FROM MOVED_TO CREATE DELETE DELETE_SELF MOVE_SELF".split()
BITS = {name: 1 << bit for bit, name in enumerate(NAMES)} | {"Q_OVERFLOW": 1 << 14, "IGNORED": 1 << 15, "ISDIR": 1 << 30}
ALL, ONLYDIR, ADD, CREATE, ONESHOT = 0xfff, 1 << 24, 1 << 29, 1 << 28, 1 << 31

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, e
    else: assert False, "it works"

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value == -1: raise OSError(ctypes.get_errno(), name)
    return value

def watch(fd, path, mask): return call("inotify_add_watch", fd, path.encode(), ctypes.c_uint(mask))

def events(fd, most=65536):
    out = []
    try: bytes = os.read(fd, most)
    except BlockingIOError: return out
    while bytes:
        number, mask, cookie, length = struct.unpack_from("iIII", bytes)
        name = bytes[16:16 + length].rstrip(b"\0").decode(); bytes = bytes[16 + length:]
        out.append((number, "|".join(n for n, bit in BITS.items() if mask & bit), name) + ((cookie,) if cookie else ()))
    return out

def told(fd, mask, *lines):
    seen = [" ".join(map(str, e[:3])).strip() for e in events(fd)]
    assert seen == list(lines), (seen, lines)

def all():
    os.mkdir("/tmp/d"); os.chdir("/tmp/d")
    fd = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    d = watch(fd, ".", ALL & ~BITS["ACCESS"]); assert d == 1 and events(fd) == [] and not select.select([fd], [], [], 0)[0]
    with open("f", "w") as file: file.write("text"); file.flush(); os.fchmod(file.fileno(), 0o600)
    assert select.select([fd], [], [], 0)[0] and array.array("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0] == 5 * 32
    told(fd, ALL, "1 CREATE f", "1 OPEN f", "1 MODIFY f", "1 ATTRIB f", "1 CLOSE_WRITE f")
    os.mkdir("e"); os.symlink("f", "l"); os.mkfifo("p"); os.link("f", "g"); told(fd, ALL, "1 CREATE|ISDIR e", "1 CREATE l", "1 CREATE p", "1 CREATE g")
    os.unlink("g"); os.truncate("f", 2); os.utime("f"); os.rmdir("e"); os.unlink("l"); os.unlink("p")
    # A file with two names is reported by neither, except by the one that it was opened with.
    told(fd, ALL, "1 DELETE g", "1 DELETE|ISDIR e", "1 DELETE l", "1 DELETE p")
    with open("f", "a") as file: file.write("x")
    told(fd, ALL, "1 OPEN f", "1 MODIFY f", "1 CLOSE_WRITE f")
    open("new", "w").close(); f = watch(fd, "new", ALL); assert f == 2; events(fd)
    with open("new", "r+") as file: file.write("x"); file.flush(); file.seek(0); file.read()
    told(fd, ALL, "1 OPEN new", "2 OPEN", "1 MODIFY new", "2 MODIFY", "2 ACCESS", "1 CLOSE_WRITE new", "2 CLOSE_WRITE")
    # Both events of a rename have the same cookie.
    os.mkdir("/tmp/other"); other = watch(fd, "/tmp/other", BITS["MOVED_TO"] | ONLYDIR); os.rename("new", "/tmp/other/moved")
    seen = events(fd); assert [e[:3] for e in seen] == [(1, "MOVED_FROM", "new"), (3, "MOVED_TO", "moved"), (2, "MOVE_SELF", "")] and seen[0][3] == seen[1][3] > 0, seen
    open("a", "w").close(); events(fd); os.rename("/tmp/other/moved", "a"); told(fd, ALL, "1 MOVED_TO a", "2 MOVE_SELF")
    os.unlink("a"); told(fd, ALL, "2 ATTRIB", "2 DELETE_SELF", "2 IGNORED", "1 DELETE a")
    # Less and more of it, once, and no more.
    assert watch(fd, "f", BITS["MODIFY"]) == 4 == watch(fd, "f", BITS["ATTRIB"] | ADD); fails(errno.EEXIST, watch, fd, "f", ALL | CREATE)
    call("inotify_rm_watch", fd, d); told(fd, ALL, "1 IGNORED"); fails(errno.EINVAL, call, "inotify_rm_watch", fd, d)
    os.truncate("f", 1); os.chmod("f", 0o640); open("f").close(); told(fd, ALL, "4 MODIFY", "4 ATTRIB")
    assert watch(fd, "/tmp/other", BITS["CREATE"] | ONESHOT) == 3; os.mkdir("/tmp/other/x"); os.mkdir("/tmp/other/y"); told(fd, ALL, "3 CREATE|ISDIR x", "3 IGNORED")
    fails(errno.ENOTDIR, watch, fd, "f", ALL | ONLYDIR); fails(errno.ENOENT, watch, fd, "none", ALL); fails(errno.EINVAL, watch, fd, "f", 0); fails(errno.EINVAL, watch, 0, "f", ALL)
    os.chmod("f", 0); events(fd); fails(errno.EACCES, watch, fd, "f", ALL); os.chmod("f", 0o600)
    # A watched directory that is removed; repeated events are merged; events that do not fit wait, and overflow in the end.
    d = watch(fd, ".", BITS["DELETE_SELF"]); events(fd); os.unlink("f"); events(fd); os.chdir("/"); shutil.rmtree("/tmp/d"); told(fd, ALL, f"{d} DELETE_SELF", f"{d} IGNORED")
    w = watch(fd, "/tmp", BITS["CREATE"] | BITS["MODIFY"])
    with open("/tmp/x", "w") as file:
        for _ in range(5): file.write("y"); file.flush()
    fails(errno.EINVAL, os.read, fd, 16); assert events(fd, 40) == [(w, "CREATE", "x")] and events(fd) == [(w, "MODIFY", "x")]
    limit = int(open("/proc/sys/fs/inotify/max_queued_events").read())
    for n in range(limit):
        for name in "xz": fd2 = os.open("/tmp/" + name, os.O_WRONLY | os.O_CREAT); os.write(fd2, b"."); os.close(fd2)
    seen = []
    while more := events(fd): seen += more
    assert len(seen) == limit + 1 and seen[-1] == (-1, "Q_OVERFLOW", ""), (len(seen), seen[-1])
    os.unlink("/tmp/x"); os.unlink("/tmp/z"); shutil.rmtree("/tmp/other"); os.close(fd)

async def waits():
    # Another process changes a file, and a waiter continues.
    fd = call("inotify_init1", os.O_NONBLOCK); watch(fd, "/tmp", BITS["CREATE"])
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, seen.set)
    child = await asyncio.create_subprocess_shell("exec touch /tmp/touched")
    await seen.wait(); assert events(fd) == [(1, "CREATE", "touched")]
    await child.wait(); loop.remove_reader(fd); os.close(fd); os.unlink("/tmp/touched")

held = None
for line in sys.stdin:
    match line.strip():
        case "all": all(); asyncio.run(waits()); print("done", flush=True)
        case "hold":
            held = call("inotify_init1", os.O_NONBLOCK); watch(held, "/tmp", BITS["CREATE"] | BITS["MOVED_FROM"])
            open("/tmp/a", "w").close(); os.rename("/tmp/a", "/tmp/b"); print("held", flush=True)
        case "look":
            if held is None: print("nothing", flush=True); continue
            open("/tmp/c", "w").close(); print(*events(held), flush=True)
"#;

#[test]
fn watches_report_events_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", WATCHES).env("PATH", "/usr/bin:/bin");
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    let held = "(1, 'CREATE', 'a') (1, 'MOVED_FROM', 'a', 1) (1, 'CREATE', 'c')";
    in_every_state(&program, &warm, "hold", ["look", held, "nothing"]);
}
