//! The user of a guest: its numbers, files of several users, processes that change to others, and
//! that all of it is part of every state and grants nothing on the host.

use crate::common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use afresh_linux::Program;
use common::states::{in_every_state, pristine};

const LIMIT: Duration = Duration::from_secs(100);

const USERS: &str = r##"
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

ROOT = "00000000000004ff"
for line in sys.stdin:
    match line.strip():
        case "all":
            import pwd
            assert os.getresuid() == (0, 0, 0) == os.getresgid() and owner("/") == (0, 0) == owner("/usr/bin/env") and pwd.getpwuid(0).pw_name == "root" and pwd.getpwnam("user").pw_uid == 1000
            assert status("CapEff") == [ROOT] == status("CapBnd") and libc.prctl(23, 0, 0, 0, 0) == 1 and libc.prctl(23, 21, 0, 0, 0) == 0
            files(); switches(); print("done", flush=True)
        case "hold": write("/tmp/kept"); os.chown("/tmp/kept", 7, 8); os.setgroups([9]); os.setresuid(33, 33, 0); print("held", flush=True)
        case "look": print(os.getresuid(), os.getgroups(), status("CapEff")[0], owner("/tmp/kept") if os.path.exists("/tmp/kept") else None, flush=True)
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
    let program = program.arg("/app.py").file("/app.py", USERS).env("PATH", "/usr/bin:/bin");
    let program = program.time_limit(LIMIT).start_limit(LIMIT).user(0, 0);
    let Some(warm) = common::here(program.clone().warm()) else { return };
    pristine(&warm, "all", "done");
    let none = format!("(0, 0, 0) [] {:016x} None", 0x4ff);
    let held = format!("(33, 33, 0) [9] {:016x} (7, 8)", 0);
    in_every_state(&program, &warm, "hold", ["look", &held, &none]);
}

#[test]
fn a_guest_of_another_user_has_its_numbers_and_no_rights_over_others() {
    let Some(program) = common::python() else { return };
    let program = program.arg("-c").arg(OTHER).user(1234, 77);
    let Some(run) = common::here(program.run(b"")) else { return };
    assert_eq!((run.messages.as_str(), &run.output[..]), ("", &b"other\n"[..]));
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
