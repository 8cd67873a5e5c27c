//! Mounts of a guest, and calls of Linux up to 6.12 that programs choose by the release.

use crate::common::states::assert_answers;

const MOUNTS: &str = r##"
import ctypes, errno, fcntl, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
ROOT, UNIQUE = (1 << 64) - 1, 1 << 31

def raw(number, *args):
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args])
    if value == -1: raise OSError(ctypes.get_errno(), number)
    return value

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, (e, errno.errorcode[number])
    else: assert False, "it works"

def magic(path):
    buffer = ctypes.create_string_buffer(120)
    if isinstance(path, int): assert libc.fstatfs(path, buffer) == 0
    else: assert libc.statfs(path.encode(), buffer) == 0
    return struct.unpack_from("I", buffer)[0]

def listed(mount, last=0, count=16, flags=0):
    ids = (ctypes.c_ulong * 16)(); return list(ids[:raw(458, struct.pack("IIQQ", 24, 0, mount, last), ids, count, flags)])

def described(mount, mask, room=1024):
    buffer = ctypes.create_string_buffer(room); raw(457, struct.pack("IIQQ", 24, 0, mount, mask), buffer, room, 0); return buffer.raw

def devices():
    device = lambda path: os.stat(path).st_dev
    all = ["/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm"]
    assert [device(path) for path in all] == [1, 2, 3, 4, 5, 6] == [int(l.split()[2].split(":")[1]) for l in open("/proc/self/mountinfo")]
    assert [l.split()[1] for l in open("/proc/mounts")] == all and "nodev\toverlay\n" in open("/proc/filesystems").readlines()
    assert device("/tmp") == 1 and device("/proc/self/fd") == 2 == device("/proc/cpuinfo") and device("/dev/null") == 4 and os.fstat(os.memfd_create("m")).st_dev == 6
    r, w = os.pipe(); assert os.fstat(r).st_dev == os.fstat(w).st_dev not in range(7)
    assert [magic(path) for path in all] == [0x794c7630, 0x9fa0, 0x62656572, 0x1021994, 0x1cd1, 0x1021994] and magic("/proc/self/status") == 0x9fa0 and magic(r) == 0x50495045
    assert os.statvfs("/tmp").f_bavail > 0 and os.statvfs("/sys").f_flag & 1 and not os.statvfs("/").f_flag & 1

def names():
    open("/tmp/a", "w").close(); open("/dev/shm/a", "w").close()
    for work in (os.rename, os.link):
        for source, target in (("/tmp/a", "/dev/shm/b"), ("/dev/shm/a", "/tmp/b"), ("/proc/cpuinfo", "/tmp/b")): fails(errno.EXDEV, work, source, target)
    fails(errno.EEXIST, os.link, "/tmp/a", "/dev/shm/a"); os.link("/dev/shm/a", "/dev/shm/b"); os.link("/dev/shm/b", "/dev/shm/c"); os.rename("/dev/shm/c", "/dev/shm/d")
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR); os.link(f"/proc/self/fd/{fd}", "/tmp/named", follow_symlinks=True); assert os.stat("/tmp/named").st_nlink == 1
    for path in ("/dev/shm", "/dev/pts", "/sys"): fails(errno.EBUSY, os.rmdir, path)
    os.mkdir("/tmp/shm"); os.rmdir("/tmp/shm")

def mounts():
    assert listed(ROOT) == [UNIQUE + id for id in range(1, 7)] and listed(ROOT, flags=1) == [UNIQUE + id for id in range(6, 0, -1)]
    assert listed(UNIQUE + 4) == [UNIQUE + 5, UNIQUE + 6] and listed(ROOT, UNIQUE + 5) == [UNIQUE + 6] and len(listed(ROOT, count=2)) == 2
    for number, work in ((errno.EINVAL, lambda: listed(0)), (errno.ENOENT, lambda: listed(ROOT - 1)), (errno.EINVAL, lambda: listed(ROOT, 17)), (errno.EINVAL, lambda: listed(ROOT, flags=2)), (errno.EFAULT, lambda: raw(458, 1, 0, 1, 0)), (errno.EINVAL, lambda: raw(458, struct.pack("IIQQ", 20, 0, ROOT, 0), 0, 1, 0)), (errno.E2BIG, lambda: raw(458, struct.pack("IIQQQQ", 40, 0, ROOT, 0, 0, 1), 0, 1, 0))): fails(number, work)
    text = described(UNIQUE + 6, 0x3b); assert struct.unpack_from("I", text)[0] == 512 + 17 and text[512:529] == b"tmpfs\0/\0/dev/shm\0" and struct.unpack_from("QQ", text, 40) == (UNIQUE + 6, UNIQUE + 4), text
    fails(errno.EOVERFLOW, described, UNIQUE + 6, 0x10, 515); described(UNIQUE + 6, 2, 300); fails(errno.ENOENT, described, UNIQUE + 7, 2)
    if os.uname().machine == "x86_64":
        buffer = ctypes.create_string_buffer(32); raw(136, 1, buffer); assert struct.unpack_from("I", buffer)[0] > 0; fails(errno.EINVAL, raw, 136, 77, buffer)

def newer():
    assert os.uname().release.startswith("6.12.") and open("/proc/sys/kernel/osrelease").read() == os.uname().release + "\n"
    size, ids = ctypes.c_uint(4096), (ctypes.c_ulong * 4)(); assert raw(461, ids, ctypes.byref(size), 0) == 1 and (ids[0], size.value) == (100, 8)
    size.value = 0; fails(errno.E2BIG, raw, 461, ids, ctypes.byref(size), 0); assert size.value == 8; fails(errno.EINVAL, raw, 461, ids, ctypes.byref(size), 1); fails(errno.EOPNOTSUPP, raw, 459, 100, ids, ctypes.byref(size), 0)
    attributes = ctypes.create_string_buffer(24); fails(errno.EOPNOTSUPP, raw, 468, 0, b"/tmp/a", attributes, 24, 0); fails(errno.ENOENT, raw, 468, 0, b"/tmp/none", attributes, 24, 0); fails(errno.EINVAL, raw, 469, 0, b"/tmp/a", attributes, 8, 0)
    made = os.open("/tmp/new", os.O_CREAT | os.O_RDWR); again = os.open("/tmp/new", os.O_CREAT | os.O_RDWR)
    assert [fcntl.fcntl(fd, 1028) for fd in (made, again)] == [1, 0] and fcntl.fcntl(made, fcntl.F_GETFL) & 0o100 == 0
    assert [fcntl.fcntl(made, 1027, fd) for fd in (made, os.dup(made), again)] == [1, 1, 0]; fails(errno.EBADF, fcntl.fcntl, made, 1027, 999)
    for flags, number in ((4, errno.ENODEV), (4 | 21 << 26, errno.ENODEV), (21 << 26, errno.EINVAL)): fails(number, os.memfd_create, "huge", flags)
    r, w = os.pipe(); zero = os.open("/dev/zero", os.O_RDWR); assert os.splice(zero, w, 3000) == 3000 and os.read(r, 3000) == bytes(3000); os.write(w, b"x" * 9); assert os.splice(r, zero, 9) == 9

for line in sys.stdin:
    for work in (devices, names, mounts, newer): work()
    print("done", flush=True)
"##;

#[test]
fn mounts_are_other_devices_and_calls_of_newer_kernels_answer() {
    assert_answers(MOUNTS, &[("all", "done")]);
}
