//! Root directories of processes (`chroot`), as on Linux and in every state.

use std::process::Command;
use std::time::Duration;

use crate::common;
use common::states::in_every_state;

const LIMIT: Duration = Duration::from_secs(100);

/// Prints what the same calls return natively. The working directory is empty.
const CALLS: &str = r##"
import ctypes, errno, os, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
GETCWD = 79 if os.uname().machine == "x86_64" else 17

def cwd():
    bytes = ctypes.create_string_buffer(4096)
    found = libc.syscall(GETCWD, bytes, ctypes.c_size_t(4096))
    return bytes.value.decode().replace(TOP, "TOP") if found > 0 else errno.errorcode[ctypes.get_errno()]
def of(work, *args, **rest):
    try: found = work(*args, **rest)
    except OSError as e: return errno.errorcode[e.errno]
    return found.replace(TOP, "TOP") if isinstance(found, str) else found
def read(path, **rest):
    with os.fdopen(os.open(path, os.O_RDONLY, **rest)) as file: return file.read()
def apart(work):
    sys.stdout.flush(); child = os.fork()
    if child == 0:
        try: work()
        except BaseException as e: print("failed", repr(e))
        sys.stdout.flush(); os._exit(0)
    os.waitpid(child, 0)

def write(path, text):
    with open(path, "w") as file: file.write(text)

def calls():
    global TOP
    TOP = os.getcwd()
    for path in ("jail/in/deep", "jail/tmp", "out"): os.makedirs(path)
    write("jail/file", "inner"); write("file", "outer"); write("out/file", "away"); write("jail/in/file", "below")
    os.symlink("/file", "jail/absolute"); os.symlink("../../../file", "jail/in/up"); os.symlink("/proc/self/exe", "jail/exe"); os.symlink(TOP + "/out", "jail/leads")
    for path in ("jail/missing", "jail/file", "jail/file/x", "x" * 300, ""): print(path[:20], of(os.chroot, path))
    outside, proc, inner = os.open(TOP + "/out", os.O_RDONLY), os.open("/proc", os.O_RDONLY), os.open("jail/in", os.O_RDONLY)
    def jailed():
        os.chroot("jail")
        print("unreachable", cwd(), sorted(os.listdir("/")), of(os.readlink, "jail/absolute"), of(read, "jail/absolute"), of(read, "file"))
        os.chdir("/"); print("root", cwd(), sorted(os.listdir(".")), os.stat("..").st_ino == os.stat(".").st_ino == os.stat("/../..").st_ino)
        for path in ("file", "/file", "../file", "/../../file", "absolute", "in/up", "in/deep/../../../file", "exe", "leads/file", "/proc/self/exe", "/dev/null", "/dev/stdin", TOP + "/file"): print(path.replace(TOP, "TOP"), of(read, path), of(os.path.exists, path))
        os.chdir("in/deep"); print("deep", cwd(), of(read, "../../../../file")); os.chdir("/")
        # Open directories outside lead out.
        print("outside", of(read, "file", dir_fd=outside), of(read, "../file", dir_fd=outside), of(read, "/file", dir_fd=outside), of(read, "../jail/absolute", dir_fd=outside))
        print("proc", *(of(lambda name: os.readlink(name, dir_fd=proc), "self/" + name) for name in ("root", "cwd", f"fd/{outside}", f"fd/{inner}")), of(read, "self/root/file", dir_fd=proc), of(read, "self/cwd/file", dir_fd=proc))
        os.fchdir(outside); print("left", cwd(), of(read, "file"), of(read, "../jail/file"), of(read, "/file"))
        # Names are made below the root.
        os.chdir("/"); os.mkdir("/made"); os.symlink("/made", "/tmp/link"); write("/tmp/link/new", "x"); os.rename("/made/new", "/made/old"); os.link("/made/old", "/hard"); print("made", sorted(os.listdir("/made")), os.stat("/hard").st_nlink)
        listener = socket.socket(socket.AF_UNIX); listener.bind("/socket"); listener.listen(); client = socket.socket(socket.AF_UNIX); client.connect("/socket"); print("socket", listener.getsockname(), os.path.exists("/socket"))
        def child(): print("child", cwd(), of(read, "/file")); os.chroot("in"); os.chdir("/"); print("grandchild", cwd(), of(read, "file"), of(read, "../file"), os.readlink("self/root", dir_fd=proc).replace(TOP, "TOP"))
        apart(child); print("parent", of(read, "/file"), of(lambda: sorted(os.listdir("/in"))))
        print("namespace", of(lambda: libc.unshare(0x10000000)), errno.errorcode[ctypes.get_errno()])
        # A second call forgets the first root, as the well-known way out does.
        os.chroot("in"); print("escape", cwd()); [os.chdir("..") for _ in range(40)]; os.chroot("."); print(cwd(), of(read, TOP + "/file"))
    apart(jailed)
    print("unchanged", cwd(), of(read, "file"), os.readlink("/proc/self/root"), sorted(os.listdir("jail/made")))
    def removed(): os.mkdir("gone"); os.chroot("gone"); os.chdir("/"); print("empty", os.listdir("/"), of(os.mkdir, "/d"), of(os.chdir, "/d"), cwd())
    apart(removed)
    def user():
        os.setgid(33); os.setuid(33); print("user", of(os.chroot, "jail"), of(os.chroot, "jail/file"), of(os.chroot, "jail/missing"))
        os.chdir("/")
    os.chmod(TOP, 0o755); os.mkdir("shut", 0o700); apart(user)
    def shut(): os.setgid(33); os.setuid(33); print("shut", of(os.chroot, "shut"))
    apart(shut)
    def threads():
        import threading
        thread = threading.Thread(target=lambda: os.chroot("jail")); thread.start(); thread.join(); print("thread", of(read, "/file"))
    apart(threads)
    def runs():
        # Programs and their loaders are found below the root, also by a descriptor.
        import shutil
        shutil.copy("/bin/true", TOP + "/true"); away = os.open(TOP + "/true", os.O_RDONLY)
        fd = os.open("/bin/true", os.O_RDONLY); script = os.open("/usr/bin", os.O_RDONLY); os.chroot("/usr"); os.chdir("/")
        for path in ("/bin/true", "/usr/bin/true", "bin/../../bin/true"): print("runs", path, of(lambda: subprocess.run([path]).returncode))
        print(subprocess.run(["/bin/readlink", f"/dev/fd/{fd}"], pass_fds=[proc]).returncode)
        def by_descriptor(): os.execve(fd, ["true"], {})
        apart(by_descriptor); apart(lambda: os.execve(fd, ["true"], {}))
        # Also one that the root does not lead to.
        apart(lambda: os.execve(away, ["true"], {}))
    apart(runs)
"##;

/// A guest that does the same by request, and keeps a root.
const GUEST: &str = r##"
for line in sys.stdin:
    match line.strip():
        case "all": os.mkdir("/tmp/work"); os.chdir("/tmp/work"); calls(); os.chdir("/"); subprocess.run(["rm", "-r", "/tmp/work"]); print("done", flush=True)
        case "hold":
            os.makedirs("/tmp/jail/in"); write("/tmp/jail/file", "inner"); out, back = os.pipe(); into, put = os.pipe()
            if os.fork() == 0:
                os.chroot("/tmp/jail"); os.chdir("/in")
                while os.read(into, 1): os.write(back, f"{os.getcwd()} {read('/file')} {os.path.exists('/usr')}".encode())
            os.chroot("/tmp"); os.chdir("/jail"); print("held", flush=True)
        case "look":
            found = "None"
            if os.path.exists("/jail"): os.write(put, b"x"); found = f"{os.getcwd()} {read('/jail/file')} {os.listdir('/')} {os.read(out, 100).decode()}"
            print(found, flush=True)
"##;

fn program(script: &str) -> Option<afresh_linux::Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", script).user(0, 0);
    let program = program.env("PATH", "/usr/bin:/bin");
    Some(program.time_limit(LIMIT).start_limit(LIMIT))
}

#[test]
fn a_process_with_another_root_sees_what_it_sees_on_linux() {
    let script = [CALLS, "calls()\n"].concat();
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root may call chroot natively");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    let out = command.args(["-c", &script]).current_dir(folder.path()).output().unwrap();
    let native = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success() && native.contains("grandchild"), "{out:?}");
    let script = ["import os; os.mkdir('/tmp/work'); os.chdir('/tmp/work')\n", &script].concat();
    let Some(program) = program(&script) else { return };
    let Some(run) = common::here(program.run(b"")) else { return };
    let guest = String::from_utf8_lossy(&run.output).into_owned();
    for (guest, native) in guest.lines().zip(native.lines()) {
        assert_eq!(guest, native);
    }
    assert_eq!((guest, run.messages.as_str()), (native, ""));
}

#[test]
fn a_root_directory_is_in_every_state() {
    let Some(program) = program(&[CALLS, GUEST].concat()) else { return };
    let Some(warm) = common::here(program.clone().warm()) else { return };
    let held = "/jail inner ['jail'] /in inner False";
    in_every_state(&program, &warm, "hold", ["look", held, "None"]);
    let mut instance = warm.instance();
    let answer = instance.call(b"all\n").unwrap();
    assert!(answer.ends_with(b"done\n"), "{}", String::from_utf8_lossy(&answer));
    instance.reset();
    instance.verify().unwrap();
}

#[test]
fn chroot_takes_a_capability() {
    let Some(program) = common::python() else { return };
    let text = "import os\ntry: os.chroot('/usr')\nexcept PermissionError as e: print(e.errno)";
    let Some(run) = common::here(program.arg("-c").arg(text).run(b"")) else { return };
    assert_eq!((run.messages.as_str(), &run.output[..]), ("", &b"1\n"[..]));
}
