//! User namespaces: numbers and capabilities inside, no rights outside, and that they are part of
//! every state.

use crate::common;

use std::time::Duration;

use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const NAMESPACES: &str = r##"
import ctypes, errno, os, signal, socket, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWNET, NEWNS, FS, THREAD = 0x10000000, 0x40000000, 0x20000, 0x200, 0x10000
ALL = "000001ffffffffff"

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value == -1: raise OSError(ctypes.get_errno(), name)
    return value

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, (e, errno.errorcode[number])
    else: assert False, "it works"

def write(path, text):
    with open(path, "w") as file: file.write(text)

def read(path):
    with open(path) as file: return file.read()

def status(name): return next(line.split()[1:] for line in open("/proc/self/status") if line.startswith(name + ":"))

def apart(work):
    sys.stdout.flush(); child = os.fork()
    if child == 0:
        code = 1
        try: work(); code = 0
        finally: os._exit(code)
    assert os.waitpid(child, 0)[1] == 0

def ids(): return (os.getuid(), os.geteuid(), os.getgid(), *os.getresuid(), *os.getresgid(), os.stat("/").st_uid, os.stat("/").st_gid)

def files():
    # `root` passes permission bits. The number 1000 stands for another user; files keep their owner.
    os.mkdir("/tmp/shut"); write("/tmp/shut/file", "text"); write("/tmp/of-others", "#!/bin/sh\necho ran\n"); write("/tmp/no-program", "#!/bin/sh\n")
    os.chmod("/tmp/shut/file", 0); os.chmod("/tmp/shut", 0); os.chmod("/tmp/of-others", 0o001); os.chmod("/tmp/no-program", 0o666)
    assert read("/tmp/shut/file") == "text" and os.listdir("/tmp/shut") == ["file"] and os.access("/tmp/shut/file", os.R_OK | os.W_OK) and os.access("/tmp/shut", os.X_OK)
    write("/tmp/shut/file", "other"); os.truncate("/tmp/shut/file", 1); write("/tmp/shut/new", ""); os.rename("/tmp/shut/new", "/tmp/shut/renamed"); os.unlink("/tmp/shut/renamed"); os.chdir("/tmp/shut"); assert read("file") == "o"; os.chdir("/")
    assert subprocess.run(["/tmp/of-others"], capture_output=True).stdout == b"ran\n" and not os.access("/tmp/no-program", os.X_OK) and not os.access("/tmp/shut/file", os.X_OK); fails(errno.EACCES, subprocess.run, ["/tmp/no-program"])
    os.chown("/tmp/shut/file", 1000, 1000); os.chown("/tmp/shut", 1000, -1); os.lchown("/tmp/shut", -1, 1000); found = os.stat("/tmp/shut/file"); assert (found.st_uid, found.st_gid) == (0, 7)
    with open("/tmp/of-others") as file: os.fchown(file.fileno(), 1000, 7)

def inside():
    first = os.stat("/proc/self/ns/user").st_ino; outer = os.open("/proc/self/ns/user", os.O_RDONLY)
    call("unshare", NEWUSER); assert set(ids()) == {65534} and status("CapEff") == [ALL] == status("CapBnd")
    assert os.stat("/proc/self/ns/user").st_ino != first and os.readlink("/proc/self/ns/user").startswith("user:[")
    fails(errno.EPERM, call, "setns", outer, NEWUSER); fails(errno.EPERM, call, "unshare", NEWUSER)
    # Groups first: they are not mapped while they can be set.
    assert read("/proc/self/uid_map") == "" and read("/proc/self/setgroups") == "allow\n"
    fails(errno.EPERM, write, "/proc/self/gid_map", "0 1000 1"); write("/proc/self/setgroups", "deny"); fails(errno.EPERM, write, "/proc/self/setgroups", "allow")
    for text, number in (("0 0 1", errno.EPERM), ("0 1000 2", errno.EPERM), ("0 1000 1\n1 1001 1", errno.EPERM), ("0 1000", errno.EINVAL), ("x", errno.EINVAL)): fails(number, write, "/proc/self/uid_map", text)
    write("/proc/self/uid_map", "0 1000 1\n"); write("/proc/self/gid_map", "7 1000 1"); fails(errno.EPERM, write, "/proc/self/uid_map", "0 1000 1")
    assert read("/proc/self/uid_map").split() == ["0", "1000", "1"] and (os.getuid(), os.getgid(), os.stat("/").st_uid, os.stat("/").st_gid) == (0, 7, 0, 7)
    os.setuid(0); fails(errno.EINVAL, os.setuid, 1000); fails(errno.EPERM, os.setgroups, []); fails(errno.EINVAL, os.chown, "/tmp", 5, 5); os.chown("/tmp", 0, 7)
    files()
    # Resources of the first namespace stay out of reach.
    with socket.socket(socket.AF_UNIX) as s: fails(errno.EPERM, s.setsockopt, socket.SOL_SOCKET, 33, 1 << 20)
    fails(errno.EPERM, call, "sethostname", b"x", 1); fails(errno.EPERM, os.nice, -5); fails(errno.EPERM, call, "mount", b"x", b"/tmp", b"tmpfs", 0, None); fails(errno.EPERM, os.setxattr, "/tmp", "trusted.a", b"")
    fails(errno.EINVAL, call, "unshare", NEWNS)
    # `root` keeps its capabilities in another program, and gives them up for good otherwise.
    out = subprocess.run(["/bin/grep", "CapEff", "/proc/self/status"], capture_output=True).stdout; assert out.split()[1].decode() == ALL, out
    head, none = struct.pack("<II", 0x20080522, 0), bytes(24); call("capset", head, none); assert status("CapPrm") == ["0" * 16]
    os.chown("/tmp", 0, 7); fails(errno.EINVAL, os.chown, "/tmp", 1000, -1); fails(errno.EACCES, open, "/tmp/shut/file"); fails(errno.EACCES, os.listdir, "/tmp/shut"); fails(errno.EACCES, subprocess.run, ["/tmp/of-others"]); assert not os.access("/tmp/of-others", os.X_OK)
    fails(errno.EPERM, call, "capset", head, b"\1" + bytes(11) + b"\0" * 12)
    # One within another.
    call("unshare", NEWUSER); assert read("/proc/self/setgroups") == "deny\n"; write("/proc/self/uid_map", "5 0 1"); write("/proc/self/gid_map", "5 7 1"); assert (os.getuid(), os.getgid()) == (5, 5) and read("/proc/self/uid_map").split() == ["5", "0", "1"]

def parent():
    # A process that does not leave its namespace maps numbers of one that does, and enters it.
    r, w = os.pipe(); child = os.fork()
    if child == 0: call("unshare", NEWUSER); os.write(w, b"x"); signal.pause()
    os.read(r, 1); fd = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    write(f"/proc/{child}/setgroups", "deny"); write(f"/proc/{child}/uid_map", "0 1000 1"); assert read(f"/proc/{child}/uid_map").split() == ["0", "1000", "1"] and os.getuid() == 1000
    os.kill(child, signal.SIGKILL); os.waitpid(child, 0)
    def enter(): call("setns", fd, NEWUSER); assert os.getuid() == 0 and status("CapEff") == [ALL]; fails(errno.EINVAL, call, "setns", fd, NEWUSER)
    apart(enter); fails(errno.EINVAL, call, "setns", r, 0); [os.close(one) for one in (r, w, fd)]
    fails(errno.EINVAL, call, "setns", os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC), NEWUSER)

def loses():
    call("unshare", NEWUSER); out = subprocess.run(["/bin/grep", "CapEff", "/proc/self/status"], capture_output=True).stdout; assert out.split()[1] == b"0" * 16, out

def many():
    # Namespaces without processes are dropped, and nesting ends.
    for _ in range(1100): apart(lambda: call("unshare", NEWUSER))
    def deep():
        for level in range(40):
            try: call("unshare", NEWUSER)
            except OSError as e: assert (e.errno, level) == (errno.ENOSPC, 33), (e, level); return
            write("/proc/self/setgroups", "deny"); number = 1000 if level == 0 else 0; write("/proc/self/uid_map", f"0 {number} 1"); write("/proc/self/gid_map", f"0 {number} 1")
        assert False
    apart(deep)

for line in sys.stdin:
    match line.strip():
        case "all":
            assert read("/proc/self/uid_map").split() == ["0", "0", "4294967295"] and status("CapEff") == ["0" * 16]; fails(errno.EACCES, open, "/proc/self/setgroups", "w"); fails(errno.EPERM, write, "/proc/self/uid_map", "0 1000 1")
            fails(errno.EPERM, call, "unshare", NEWNET); fails(errno.EINVAL, call, "unshare", 1); call("unshare", FS | THREAD); fails(errno.EINVAL, call, "unshare", NEWUSER | NEWNET)
            apart(inside); apart(loses); parent(); many(); print("done", flush=True)
        case "hold":
            call("unshare", NEWUSER); write("/proc/self/setgroups", "deny"); write("/proc/self/uid_map", "3 1000 1"); kept = open("/proc/self/gid_map", "r+"); print("held", flush=True)
        case "look": print(os.getuid(), status("CapEff")[0], read("/proc/self/setgroups").strip(), flush=True)
"##;

#[test]
fn a_namespace_gives_rights_inside_it_alone_and_is_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", NAMESPACES).env("PATH", "/usr/bin:/bin");
    let program = program.time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    let (held, none) = ("3 000001ffffffffff deny", "1000 0000000000000000 allow");
    in_every_state(&program, &warm, "hold", ["look", held, none]);
}
