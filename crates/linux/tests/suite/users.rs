//! The user of a guest: its numbers, files of several users, processes that change to others, and
//! that all of it is part of every state and grants nothing on the host.

use crate::common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use afresh_linux::Program;
use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

/// Functions that the programs below begin with.
const HELPERS: &str = r##"
import ctypes, errno, os, signal, socket, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *args):
    value = getattr(libc, name)(*args)
    if value == -1: raise OSError(ctypes.get_errno(), name)
    return value

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, (e, errno.errorcode[number])
    else: assert False, "it works"

def write(path, text=""):
    with open(path, "w") as file: file.write(text)

def status(name, process="self"): return next(line.split()[1:] for line in open(f"/proc/{process}/status") if line.startswith(name + ":"))
def owner(path): found = os.lstat(path); return (found.st_uid, found.st_gid)

def apart(work):
    sys.stdout.flush(); child = os.fork()
    if child == 0:
        code = 1
        try: work(); code = 0
        finally: os._exit(code)
    assert os.waitpid(child, 0)[1] == 0

def become(user, group, groups=()): os.setgroups(groups); os.setgid(group); os.setuid(user)
"##;

const USERS: &str = r##"
def files():
    # `root` gives files away; its new files are its own; a changed owner drops set-user bits.
    write("/tmp/f", "text"); os.chmod("/tmp/f", 0o6755); os.chown("/tmp/f", 33, -1); assert owner("/tmp/f") == (33, 0) and os.stat("/tmp/f").st_mode & 0o7777 == 0o755
    os.chown("/tmp/f", -1, 44); assert owner("/tmp/f") == (33, 44); os.symlink("f", "/tmp/l"); os.lchown("/tmp/l", 5, 6); assert owner("/tmp/l") == (5, 6) and owner("/tmp/f") == (33, 44)
    with open("/tmp/f") as file: os.fchown(file.fileno(), 34, 44); assert os.fstat(file.fileno()).st_uid == 34
    os.chmod("/tmp/f", 0); assert open("/tmp/f").read() == "text"
    os.mkdir("/tmp/home"); os.chown("/tmp/home", 33, 44); os.chmod("/tmp", 0o1777); write("/tmp/root's", "secret"); os.chmod("/tmp/root's", 0o600); write("/tmp/group's", "shared"); os.chown("/tmp/group's", 0, 5); os.chmod("/tmp/group's", 0o640)
    def other():
        become(33, 44, [5, 6]); assert os.getresuid() == (33, 33, 33) and os.getresgid() == (44, 44, 44) and os.getgroups() == [5, 6] and status("Uid") == ["33"] * 4 and status("Groups") == ["5", "6"]
        assert status("CapEff") == ["0" * 16] == status("CapPrm"); fails(errno.EPERM, os.setuid, 0); fails(errno.EPERM, os.setgroups, []); fails(errno.EPERM, os.setresuid, -1, 0, -1); os.setuid(33)
        # The bits of the owner, of its groups, or of others.
        fails(errno.EACCES, open, "/tmp/root's"); fails(errno.EACCES, open, "/tmp/group's", "r+"); assert open("/tmp/group's").read() == "shared"; fails(errno.EACCES, write, "/etc/passwd"); fails(errno.EACCES, os.mkdir, "/new"); fails(errno.EACCES, open, "/tmp/f")
        # Attributes are the owner's to change, and in a sticky directory names are.
        for work, *args in ((os.chmod, "/tmp/root's", 0o666), (os.chown, "/tmp/root's", 33, -1), (os.utime, "/tmp/root's", (1, 1)), (os.unlink, "/tmp/root's"), (os.rename, "/tmp/root's", "/tmp/mine"), (os.chown, "/tmp/home", 0, -1), (os.chown, "/tmp/home", -1, 9), (os.setxattr, "/tmp/root's", "system.posix_acl_access", struct.pack("<I", 2))): fails(errno.EPERM, work, *args)
        write("/tmp/home/own"); assert owner("/tmp/home/own") == (33, 44); os.mkdir("/tmp/home/d"); os.symlink("x", "/tmp/home/l"); assert owner("/tmp/home/d") == owner("/tmp/home/l") == (33, 44); os.chown("/tmp/home/own", -1, 5); os.chmod("/tmp/home/own", 0o600); os.unlink("/tmp/home/own")
        fd = os.open("/tmp/home", os.O_TMPFILE | os.O_RDWR); assert os.fstat(fd).st_uid == 33
        # Signals and namespaces of others are out of reach.
        fails(errno.EPERM, os.kill, os.getppid(), 0); fails(errno.EPERM, call, "unshare", 0x10000000)
        out = subprocess.run(["/bin/sh", "-c", "id -u; id -G; grep CapEff /proc/self/status"], capture_output=True).stdout.split(); assert out == [b"33", b"44", b"5", b"6", b"CapEff:", b"0" * 16], out
    apart(other); os.kill(os.getpid(), 0)
    assert owner("/tmp/home/d") == (33, 44); subprocess.run(["rm", "-r", "/tmp/home", "/tmp/f", "/tmp/l", "/tmp/root's", "/tmp/group's"], check=True)

def switches():
    # A saved user brings capabilities back; a switch of all for good.
    def back(): os.setresuid(33, 33, 0); assert status("CapEff") == ["0" * 16] != status("CapPrm"); fails(errno.EACCES, write, "/etc/new"); os.seteuid(0); assert status("CapEff") == status("CapPrm") == [ROOT]; write("/etc/new"); os.unlink("/etc/new")
    apart(back)
    def real(): os.setreuid(33, 0); assert os.getresuid() == (33, 0, 0) and status("CapEff") == [ROOT]; os.setreuid(-1, 33); assert os.getresuid() == (33, 33, 0); os.seteuid(0); os.setreuid(33, 33); assert os.getresuid() == (33, 33, 33); fails(errno.EPERM, os.seteuid, 0)
    apart(real)
    def keeps(): libc.prctl(8, 1, 0, 0, 0); os.setuid(33); assert status("CapPrm") == [ROOT] and status("CapEff") == ["0" * 16]
    apart(keeps)
    def for_files(): assert libc.setfsuid(33) == 0 and libc.setfsuid(-1) == 33 and os.getuid() == 0; write("/tmp/fs"); assert owner("/tmp/fs") == (33, 0); os.unlink("/tmp/fs")
    apart(for_files)
    def within(): write("/tmp/inner"); os.chown("/tmp/inner", 33, 44); call("unshare", 0x10000000); write("/proc/self/setgroups", "deny"); write("/proc/self/uid_map", "0 0 1"); write("/proc/self/gid_map", "0 0 1"); assert owner("/tmp/inner") == (65534, 65534) and os.getuid() == 0; fails(errno.EINVAL, os.setuid, 33); os.chmod("/tmp", 0o1777); fails(errno.EPERM, os.chmod, "/tmp/inner", 0)
    apart(within); os.unlink("/tmp/inner")
    # Others see who sends; `root` signals everyone.
    a, b = socket.socketpair(); b.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    child = os.fork()
    if child == 0: become(33, 44); a.send(b"x"); signal.pause()
    _, ((_, _, bytes),), _, _ = b.recvmsg(1, 100); assert struct.unpack("3i", bytes) == (child, 33, 44); assert status("Uid", child) == ["33"] * 4
    os.kill(child, signal.SIGTERM); assert os.waitpid(child, 0)[1] == signal.SIGTERM; a.close(); b.close()

def ended_peer():
    # It sends and ends before its connection is accepted.
    listener = socket.socket(socket.AF_UNIX); listener.bind("/tmp/socket"); os.chmod("/tmp/socket", 0o777); listener.listen()
    def client(): become(33, 44); c = socket.socket(socket.AF_UNIX); c.connect("/tmp/socket"); c.send(b"xy")
    apart(client); peer, _ = listener.accept(); peer.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1); os.unlink("/tmp/socket"); return peer
def peer_ids(peer): _, ((_, _, sent),), _, _ = peer.recvmsg(1, 100, socket.MSG_PEEK); return [struct.unpack("3i", bytes)[1:] for bytes in (peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12), sent)]

ROOT = "00000000000404ff"
held = None
for line in sys.stdin:
    match line.strip():
        case "all":
            import pwd
            assert os.getresuid() == (0, 0, 0) == os.getresgid() and owner("/") == (0, 0) == owner("/usr/bin/env") and pwd.getpwuid(0).pw_name == "root" and pwd.getpwnam("user").pw_uid == 1000
            assert status("CapEff") == [ROOT] == status("CapBnd") and libc.prctl(23, 0, 0, 0, 0) == 1 and libc.prctl(23, 21, 0, 0, 0) == 0
            files(); switches(); print("done", flush=True)
        case "hold": write("/tmp/kept"); os.chown("/tmp/kept", 7, 8); held = ended_peer(); os.setgroups([9]); os.setresuid(33, 33, 0); print("held", flush=True)
        case "look": print(os.getresuid(), os.getgroups(), status("CapEff")[0], owner("/tmp/kept") if os.path.exists("/tmp/kept") else None, held and peer_ids(held), flush=True)
"##;

/// Checks the rights of processes of different users over each other and over files.
const RIGHTS: &str = r##"
import resource, shutil
os.chdir("/")
CREDENTIALS = (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)

def peers():
    def pair(): become(33, 44); a, _ = socket.socketpair(); assert struct.unpack("3i", a.getsockopt(*CREDENTIALS)) == (os.getpid(), 33, 44)
    apart(pair)
    # A listener that drops root later began as root.
    ready, go = os.pipe(); child = os.fork()
    if child == 0: s = socket.socket(socket.AF_UNIX); s.bind("/tmp/s"); s.listen(); become(33, 44); os.write(go, b"x"); signal.pause()
    os.read(ready, 1); c = socket.socket(socket.AF_UNIX); c.connect("/tmp/s"); assert struct.unpack("3i", c.getsockopt(*CREDENTIALS)) == (child, 0, 0)
    os.kill(child, signal.SIGKILL); os.waitpid(child, 0); assert struct.unpack("3i", c.getsockopt(*CREDENTIALS)) == (child, 0, 0)
    # A message has the real user.
    a, b = socket.socketpair(); b.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    def send(): os.setresuid(33, 34, 34); a.send(b"x")
    apart(send); _, ((_, _, sent),), _, _ = b.recvmsg(1, 100); assert struct.unpack("3i", sent)[1:] == (33, 0)

def signals():
    def ended():
        become(33, 44); child = os.fork()
        if child == 0: os._exit(7)
        fd = os.pidfd_open(child); info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT); assert (info.si_uid, info.si_status) == (33, 7)
        for number in (0, signal.SIGTERM): os.kill(child, number); signal.pidfd_send_signal(fd, number)
        assert status("Uid", child) == ["33"] * 4; os.waitpid(child, 0); fails(errno.ESRCH, os.kill, child, 0); fails(errno.ESRCH, signal.pidfd_send_signal, fd, 0)
    apart(ended)
    fd = os.open("/dev/null", os.O_RDONLY); child = os.fork()
    if child == 0: os._exit(0)
    gone = os.pidfd_open(child); os.waitpid(child, 0)
    def continues(): parent = os.getppid(); become(33, 44); os.kill(parent, signal.SIGCONT); fails(errno.EPERM, os.kill, parent, 0); fails(errno.ESRCH, signal.pidfd_send_signal, gone, 0); os.setsid(); fails(errno.EPERM, os.kill, parent, signal.SIGCONT)
    apart(continues); os.close(fd); os.close(gone)

def programs():
    write("/tmp/script", "#!/bin/sh\n"); shutil.copy("/bin/true", "/tmp/program")
    for name in ("/tmp/script", "/tmp/program"):
        def run(): become(33, 44); subprocess.run([name], check=True)
        def refused(): become(33, 44); fails(errno.EACCES, os.execv, name, [name])
        os.chmod(name, 0o755); apart(run); os.chmod(name, 0o700); apart(refused); subprocess.run([name], check=True); os.chmod(name, 0o600); fails(errno.EACCES, os.execv, name, [name]); os.chmod(name, 0o770); apart(refused)
    os.chmod("/tmp/program", 0o055); apart(run); os.chown("/tmp/program", 33, 0); apart(refused); os.chown("/tmp/program", 0, 44); os.chmod("/tmp/program", 0o705); apart(refused); os.chmod("/tmp/program", 0o710); apart(run)

PARTS = ("environ", "auxv", "maps", "smaps", "smaps_rollup", "fd", "fdinfo", "fd/0", "exe", "cwd", "cwd/tmp")
def processes():
    parent = os.getpid(); iov = ctypes.create_string_buffer(8)
    def read(process): vector = struct.pack("QQ", ctypes.addressof(iov), 8); call("process_vm_readv", process, vector, 1, vector, 1, 0)
    def other():
        become(33, 44)
        for name in PARTS: fails(errno.EACCES, os.open, f"/proc/{parent}/{name}", os.O_RDONLY); os.close(os.open(f"/proc/self/{name}", os.O_RDONLY))
        for name in ("exe", "cwd", "fd/0"): fails(errno.EACCES, os.readlink, f"/proc/{parent}/{name}"); os.readlink(f"/proc/self/{name}")
        assert status("Uid", parent) == ["0"] * 4; assert os.stat(f"/proc/{parent}").st_uid == 0 and owner("/proc/self/exe") == owner(f"/proc/{os.getpid()}") == (33, 44) == owner("/proc/self/comm"); fails(errno.EPERM, read, parent)
        for name in ("oom_score_adj", "comm", "coredump_filter"): fails(errno.EACCES, write, f"/proc/{parent}/{name}", "9"); write(f"/proc/self/{name}", "9")
        fails(errno.EPERM, resource.prlimit, parent, resource.RLIMIT_CORE); fails(errno.EPERM, resource.prlimit, parent, resource.RLIMIT_CORE, (0, 0)); resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 0))
        for work, *args in ((os.setpriority, os.PRIO_PROCESS, parent, 5), (os.sched_setaffinity, parent, [0]), (os.sched_setscheduler, parent, os.SCHED_BATCH, os.sched_param(0)), (call, "syscall", 251, 1, parent, 2 << 13)): fails(errno.EPERM, work, *args)
        os.setpriority(os.PRIO_USER, 0, 5); assert os.getpriority(os.PRIO_PROCESS, parent) == 0 and os.getpriority(os.PRIO_USER, 33) == 5 and os.getpriority(os.PRIO_USER, 0) == 5; fails(errno.ESRCH, os.getpriority, os.PRIO_USER, 77)
    apart(other)
    # Both the users and the groups must be equal.
    ready, go = os.pipe(); child = os.fork()
    if child == 0: become(33, 44); os.write(go, b"x"); signal.pause()
    os.read(ready, 1)
    def same(): become(33, 44); assert open(f"/proc/{child}/environ", "rb").read(); os.readlink(f"/proc/{child}/exe"); read(child); resource.prlimit(child, resource.RLIMIT_CORE)
    apart(same)
    def group(): become(33, 45); fails(errno.EACCES, open, f"/proc/{child}/environ"); fails(errno.EPERM, read, child); fails(errno.EPERM, resource.prlimit, child, resource.RLIMIT_CORE); os.setpriority(os.PRIO_PROCESS, child, 5)
    apart(group); os.kill(child, signal.SIGTERM); os.waitpid(child, 0)

def objects():
    def other():
        become(33, 44); fd = os.memfd_create("m"); assert (os.fstat(fd).st_uid, os.fstat(fd).st_gid) == (33, 44); os.fchmod(fd, 0o600)
        master, end = os.openpty(); name = os.ttyname(end); assert owner(name)[0] == 33; os.close(os.open(name, os.O_RDWR | os.O_NOCTTY))
    apart(other)

def files():
    write("/tmp/own"); os.chmod("/tmp/own", 0o600)
    def execs(): libc.setfsuid(33); os.execv("/bin/sh", ["sh", "-c", "grep -q '^Uid:.0.0.0.0$' /proc/self/status"])
    apart(execs)
    def real(): os.setresuid(33, 0, 0); assert not os.access("/tmp/own", os.R_OK) and os.access("/tmp/own", os.R_OK, effective_ids=True)
    apart(real)
    def root(): os.setresuid(0, 33, 0); assert os.access("/tmp/own", os.R_OK) and not os.access("/tmp/own", os.R_OK, effective_ids=True)
    apart(root)
    def stranger(): become(33, 44); fails(errno.EPERM, os.chown, "/tmp/own", 0, 0); fails(errno.EPERM, os.chown, "/tmp/own", -1, 0); os.chown("/tmp/own", -1, -1)
    apart(stranger); os.chown("/tmp/own", 33, 5)
    def keeps(): become(33, 44); os.chown("/tmp/own", 33, 5); os.chown("/tmp/own", -1, 44); fails(errno.EPERM, os.chown, "/tmp/own", -1, 5)
    apart(keeps)
    def within(): call("unshare", 0x10000000); write("/proc/self/setgroups", "deny"); write("/proc/self/uid_map", "0 0 1"); write("/proc/self/gid_map", "0 0 1"); fails(errno.EPERM, os.chown, "/tmp/own", 0, 0); os.chown("/tmp/own", -1, -1)
    apart(within)

for work in (peers, signals, programs, processes, objects, files): work()
print("done")
"##;

/// Checks the numbers and names of a guest of another user.
const OTHER: &str = r##"
import os, pwd, grp
assert os.getresuid() == (1234,) * 3 and os.getresgid() == (77,) * 3 and pwd.getpwuid(1234).pw_name == "user" == grp.getgrgid(77).gr_name
assert (os.stat("/usr").st_uid, os.stat("/usr").st_gid) == (1234, 77)
for work, *args in ((os.setuid, 0), (os.setgid, 0), (os.setgroups, []), (os.chown, "/tmp", 0, -1), (os.chown, "/tmp", -1, 5)):
    try: work(*args)
    except PermissionError: pass
    else: assert False, work
os.chown("/tmp", 1234, 77)
print("other")
"##;

#[test]
fn root_has_users_in_its_guest_and_they_are_in_every_state() {
    let Some(program) = common::python() else { return };
    let program = program
        .arg("/app.py")
        .file("/app.py", [HELPERS, USERS].concat())
        .env("PATH", "/usr/bin:/bin");
    let program = program.time_limit(LIMIT).start_limit(LIMIT).user(0, 0);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    let none = format!("(0, 0, 0) [] {:016x} None None", 0x404ff);
    let held = format!("(33, 33, 0) [9] {:016x} (7, 8) [(33, 44), (33, 44)]", 0);
    in_every_state(&program, &warm, "hold", ["look", &held, &none]);
}

#[test]
fn a_guest_of_another_user_has_its_numbers_and_no_rights_over_others() {
    let Some(program) = common::python() else { return };
    let program = program.arg("-c").arg(OTHER).user(1234, 77);
    let Some(run) = common::here(program.run(b"")) else { return };
    assert_eq!((run.messages.as_str(), &run.output[..]), ("", &b"other\n"[..]));
}

#[test]
fn processes_of_different_users_have_the_rights_of_linux_over_each_other() {
    let Some(program) = common::python() else { return };
    let program = program.arg("/app.py").file("/app.py", [HELPERS, RIGHTS].concat()).user(0, 0);
    let program = program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT);
    let Some(run) = common::here(program.run(b"")) else { return };
    assert_eq!((run.messages.as_str(), &run.output[..]), ("", &b"done\n"[..]));
}

#[test]
fn a_user_of_group_0_is_listed_with_it() {
    let Some(program) = common::python() else { return };
    let text = "import grp, os, pwd; print(pwd.getpwuid(os.getuid())[:4], grp.getgrgid(0)[0])";
    let program = program.arg("-c").arg(text).user(1234, 0);
    let Some(run) = common::here(program.run(b"")) else { return };
    let expected = &b"('user', 'x', 1234, 0) root\n"[..];
    assert_eq!((run.messages.as_str(), &run.output[..]), ("", expected));
}

/// Attempts of user 0 to reach the host: each prints its number if it succeeds.
const ATTEMPTS: &str = r#"
    try() { number=$1; shift; "$@" >/tmp/out 2>&1 && echo "$number: $(cat /tmp/out)"; }
    try 1 cat "$SECRET/file"
    try 2 cat "$GRANTED/link/file"
    try 3 cat "$GRANTED/../secret/file"
    try 4 ls "/proc/1/root$SECRET"
    try 5 mknod /tmp/disk b 8 0
    try 6 mount -t tmpfs none /tmp
    try 7 chroot "$GRANTED" cat /file
    try 8 cat /etc/shadow
    try 9 cat /proc/kcore
    try 10 unshare -m true
    mkdir -p "$SECRET" && echo mine >"$SECRET/file"
    echo changed >"$GRANTED/file"; chown 33:44 "$GRANTED/file" "$GRANTED"; chmod 6777 "$GRANTED/file" "$GRANTED"
    echo new >"$GRANTED/new"; chmod 4755 "$GRANTED/new"; ln "$GRANTED/file" "$GRANTED/hard"; rm -r "$GRANTED/below"
    setpriv --reuid 33 --regid 44 --clear-groups sh -c 'echo other >"$GRANTED/others"'
    stat -c %u:%g "$GRANTED/file" "$GRANTED/others"; cat "$GRANTED/file"
"#;

/// User 0 of a guest has the rights that its caller granted, and no other: its calls change the
/// guest's own tree, and host files are opened with the caller's rights below granted directories.
#[test]
fn user_0_of_a_guest_reads_and_writes_nothing_beyond_its_grants() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let (granted, secret) = (top.join("granted"), top.join("secret"));
    for path in [&granted.join("below"), &secret] {
        std::fs::create_dir_all(path).unwrap();
    }
    std::fs::write(granted.join("file"), "host\n").unwrap();
    std::fs::write(secret.join("file"), "secret\n").unwrap();
    symlink(&secret, granted.join("link")).unwrap();
    let attributes = |path: &Path| {
        let meta = std::fs::symlink_metadata(path).unwrap();
        (meta.permissions().mode(), meta.uid(), meta.gid(), meta.mtime_nsec(), meta.nlink())
    };
    let all = [granted.clone(), granted.join("file"), secret.clone(), secret.join("file")];
    let before = all.each_ref().map(|path| attributes(path));
    let program = Program::new("/bin/sh").arg("-c").arg(ATTEMPTS).grant(&granted).user(0, 0);
    let program = program.env("GRANTED", &granted).env("SECRET", &secret);
    let program = program.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").time_limit(LIMIT);
    let Some(run) = common::here(program.run(b"")) else { return };
    assert_eq!(String::from_utf8_lossy(&run.output), "33:44\n33:44\nchanged\n", "{}", run.messages);
    assert_eq!(all.each_ref().map(|path| attributes(path)), before);
    assert_eq!(std::fs::read_to_string(granted.join("file")).unwrap(), "host\n");
    assert_eq!(std::fs::read_to_string(secret.join("file")).unwrap(), "secret\n");
    let names = |path: &Path| std::fs::read_dir(path).unwrap().count();
    assert_eq!((names(&granted), names(&secret)), (3, 1));
}

/// The kernel checks the caller's rights, whatever user the guest is.
#[test]
fn user_0_of_a_guest_reads_no_file_that_its_caller_may_not_read() {
    if rustix::process::geteuid().is_root() {
        println!("SKIPPED: root may read every file");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "shut").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o000)).unwrap();
    let program = Program::new("/bin/cat").arg(&file).grant(folder.path()).user(0, 0);
    let Some(run) = common::here(program.run(b"")) else { return };
    assert!(run.output.is_empty(), "{run:?}");
}
