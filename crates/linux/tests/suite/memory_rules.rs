//! Rules of single mappings: seals, rights of opened files, lists of mappings, and stacks that
//! grow.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const RULES: &str = r##"
import ctypes, errno, fcntl, mmap, os, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = libc.shmat.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.shmdt.argtypes = [ctypes.c_void_p]; libc.shmctl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
for name in ("mprotect", "munmap", "madvise", "mlock"): getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int][:2 if name in ("munmap", "mlock") else 3]
PAGE, R, W, X, SHARED, PRIVATE, FIXED, ANON, GROWS = 4096, 1, 2, 4, 1, 2, 16, 32, 256
FAILED, MSEAL, REMAP = ctypes.c_void_p(-1).value, 462, 234 if os.uname().machine == "aarch64" else 216

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value in (-1, FAILED): raise OSError(ctypes.get_errno(), name)
    return value

def raw(number, *args):
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(arg) for arg in args])
    if value == -1: raise OSError(ctypes.get_errno(), number)
    return value

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, (e, errno.errorcode[number])
    else: assert False, "it works"

def new(pages, rights=R | W, flags=PRIVATE | ANON, fd=-1, at=0): return call("mmap", at, pages * PAGE, rights, flags, fd, 0)
def byte(at): return ctypes.string_at(at, 1)[0]
def line(at): return next(l for l in open("/proc/self/maps") if l.startswith(f"{at:08x}-"))

def apart(work):
    sys.stdout.flush(); child = os.fork()
    if child == 0:
        code = 1
        try: work(); code = 0
        finally: os._exit(code)
    return os.waitpid(child, 0)[1]

def seals():
    at = new(8); ctypes.memset(at, 7, 8 * PAGE); raw(MSEAL, at + 2 * PAGE, PAGE, 0)
    fails(errno.EPERM, call, "mprotect", at, 8 * PAGE, R); fails(errno.EPERM, call, "munmap", at, 8 * PAGE); fails(errno.EPERM, call, "mremap", at, 8 * PAGE, 16 * PAGE, 1, None)
    fails(errno.EPERM, call, "mmap", at, 8 * PAGE, R, PRIVATE | ANON | FIXED, -1, 0); call("madvise", at + 2 * PAGE, PAGE, 4); assert byte(at + 2 * PAGE) == 0
    call("mprotect", at, 2 * PAGE, R); call("munmap", at + 3 * PAGE, 5 * PAGE); call("mlock", at + 2 * PAGE, PAGE)
    closed = new(1, R); raw(MSEAL, closed, PAGE, 0); fails(errno.EPERM, call, "madvise", closed, PAGE, 4)
    fails(errno.EINVAL, raw, MSEAL, at, PAGE, 1); fails(errno.EINVAL, raw, MSEAL, at + 1, PAGE, 0); fails(errno.ENOMEM, raw, MSEAL, at + 2 * PAGE, 2 * PAGE, 0); raw(MSEAL, at, 0, 0)
    assert apart(lambda: fails(errno.EPERM, call, "munmap", at + 2 * PAGE, PAGE)) == 0, "a child has the seal"

def rights():
    with open("/tmp/file", "w+b") as file: file.write(bytes(4 * PAGE))
    closed, opened = os.open("/tmp/file", os.O_RDONLY), os.open("/tmp/file", os.O_RDWR); zero = os.open("/dev/zero", os.O_RDONLY)
    for at in (new(1, R, SHARED, closed), new(1, R, SHARED, zero)): fails(errno.EACCES, call, "mprotect", at, PAGE, R | W); call("mprotect", at, PAGE, R | X)
    moved = call("mremap", new(1, R, SHARED, closed), PAGE, 2 * PAGE, 1, None); fails(errno.EACCES, call, "mprotect", moved, PAGE, W)
    for at in (new(1, R, SHARED, opened), new(1, R, PRIVATE, closed), new(1, R, SHARED | ANON)): call("mprotect", at, PAGE, R | W)
    segment = call("shmget", 0, PAGE, 0o1600); at = call("shmat", segment, None, 0o10000); fails(errno.EACCES, call, "mprotect", at, PAGE, W); call("shmdt", at)
    status = ctypes.create_string_buffer(112); mode = lambda: (call("shmctl", segment, 2, ctypes.addressof(status)), struct.unpack_from("I", status, 20)[0])[1]
    call("shmctl", segment, 11, None); assert mode() == 0o2600; listed = open("/proc/sysvipc/shm").read().split("\n"); assert listed[1].split()[1:4] == [str(segment), "2600", "4096"], listed
    call("shmctl", segment, 12, None); assert mode() == 0o600; call("shmctl", segment, 0, None); assert len(open("/proc/sysvipc/shm").readlines()) == 1 and sorted(os.listdir("/proc/sysvipc")) == ["msg", "sem", "shm"]

def lists():
    around = new(3, 0, SHARED | ANON)
    for asked, shown in ((W, "-w-p"), (R, "r--p"), (W | X, "-wxp"), (R | W, "rw-p"), (0, "---p")):
        new(1, asked, PRIVATE | ANON | FIXED, at=around + PAGE); assert line(around + PAGE).split()[1] == shown
    call("mprotect", around + PAGE, PAGE, W); assert line(around + PAGE).split()[1] == "-w-p" and byte(around + PAGE) == 0
    # A query of the open list, and the map of pages.
    at = new(1, R | W, PRIVATE, os.open("/tmp/file", os.O_RDONLY)); name = ctypes.create_string_buffer(64); maps = open("/proc/self/maps")
    def ask(address, flags, room=64):
        buffer = bytearray(struct.pack("9Q4I2Q", 104, flags, address, 0, 0, 0, 0, 0, 0, 0, 0, room, 0, ctypes.addressof(name) if room else 0, 0)); fcntl.ioctl(maps, 0xc0686611, buffer); return struct.unpack("9Q4I2Q", buffer)
    got = ask(at + 5, 0); place, device = os.stat("/tmp/file").st_ino, os.stat("/tmp/file").st_dev
    assert got[3:9] == (at, at + PAGE, 3, PAGE, 0, place) and (got[9], got[10], got[11]) == (0, device, 10) and name.value == b"/tmp/file", got
    assert line(at).split()[3:5] == [f"00:{device:02x}", str(place)]
    fails(errno.ENOENT, ask, 1, 0); assert ask(1, 0x10)[3] > 1 and ask(1, 0x30, 0)[8] > 0; fails(errno.ENOENT, ask, at, 4); fails(errno.EINVAL, ask, at, 64); fails(errno.ENAMETOOLONG, ask, at, 0, 3)
    fails(errno.ENOTTY, fcntl.ioctl, open("/tmp/file"), 0xc0686611, bytes(104))
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(at // PAGE * 8); assert struct.unpack("Q", pages.read(8))[0] == 1 << 63 | 1 << 61; fails(errno.EINVAL, pages.read, 3)

def remaps():
    fd = os.open("/tmp/parts", os.O_RDWR | os.O_CREAT); os.write(fd, b"".join(bytes([page]) * PAGE for page in range(8)))
    at = new(4, R | W, SHARED, fd); raw(REMAP, at + PAGE, 2 * PAGE, 0, 5, 0); assert [byte(at + page * PAGE) for page in range(4)] == [0, 5, 6, 3]
    ctypes.memset(at + PAGE, 99, 1); assert os.pread(fd, 1, 5 * PAGE) == b"c"; raw(REMAP, at, 4 * PAGE, 0, 1, 0); assert [byte(at + page * PAGE) for page in range(4)] == [1, 2, 3, 4]
    for bad in ((new(1), PAGE, 0, 0, 0), (at, 5 * PAGE, 0, 0, 0), (at, PAGE, 1, 0, 0), (at, 0, 0, 0, 0), (at, PAGE, 0, 1 << 60, 0)): fails(errno.EINVAL, raw, REMAP, *bad)

def grows():
    top = 0x2000000000; new(4, R | W, PRIVATE | ANON | FIXED | GROWS, at=top - 4 * PAGE)
    ctypes.memset(top - 200 * PAGE, 1, 1); assert line(top - 200 * PAGE).startswith(f"{top - 200 * PAGE:08x}-{top:08x}")
    limit = lambda: (__import__("resource").setrlimit(3, (300 * PAGE, -1)), ctypes.memset(top - 299 * PAGE, 1, 1), ctypes.memset(top - 310 * PAGE, 1, 1))
    assert apart(limit) & 127 == 11, "beyond the limit of stacks"
    def near(): new(1, at=top - 500 * PAGE, flags=PRIVATE | ANON | FIXED); ctypes.memset(top - 300 * PAGE, 1, 1)
    assert apart(near) & 127 == 11, "near another mapping"

kept = None
for line_in in sys.stdin:
    match line_in.strip():
        case "all":
            for work in (seals, rights, lists, remaps, grows): work()
            print("done", flush=True)
        case "hold": kept = new(1, W); raw(MSEAL, kept, PAGE, 0); maps = open("/proc/self/maps"); print("held", flush=True)
        case "look":
            if kept is None: print("none", flush=True); continue
            fails(errno.EPERM, call, "munmap", kept, PAGE); asked = bytearray(struct.pack("9Q4I2Q", 104, 0, kept, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)); fcntl.ioctl(maps, 0xc0686611, asked)
            print(line(kept).split()[1], struct.unpack_from("Q", asked, 40)[0], flush=True)
"##;

#[test]
fn a_mapping_keeps_its_rules_and_they_are_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", RULES);
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    in_every_state(&program, &warm, "hold", ["look", "-w-p 2", "none"]);
}
