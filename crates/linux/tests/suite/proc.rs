//! The contents of `/proc` and `/dev/fd` for a guest's processes, which no other process sees.

use crate::common;

use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_snapshot::{Branch, Tree};
use afresh_store::Store;

const LIMIT: Duration = Duration::from_secs(100);

fn python(script: &str) -> Option<Program> {
    let program = common::python()?.arg("/app.py").arg("one two").file("/app.py", script);
    let program = program.env("COLOUR", "blue").env("PATH", "/usr/bin:/bin");
    Some(program.time_limit(LIMIT).start_limit(LIMIT))
}

fn shell(script: &str) -> Program {
    let program = Program::new("/bin/sh").arg("-c").arg(script);
    program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT)
}

const DESCRIPTORS: &str = r#"
import errno, os, re, signal, stat, sys, time

def fails(number, work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == number, e
    else: assert False, "it works"

def look():
    base = "/proc/self/fd"
    before = set(os.listdir(base))
    with open("/tmp/told", "w+") as file:
        file.write("hello"); file.flush()
        name = str(file.fileno())
        # Its own descriptor is in the list, and the one that lists.
        assert name in before and set(os.listdir(base)) == before | {str(file.fileno() + 1)}
        assert os.listdir("/dev/fd") == os.listdir(base)
        assert os.readlink(f"{base}/{name}") == "/tmp/told"
        assert os.readlink(f"/proc/{os.getpid()}/fd/{name}") == "/tmp/told"
        assert stat.S_ISLNK(os.lstat(f"{base}/{name}").st_mode)
        assert os.stat(f"{base}/{name}").st_ino == os.fstat(file.fileno()).st_ino
        # A second open starts at the beginning, also after an unlink.
        os.unlink("/tmp/told")
        assert os.readlink(f"/dev/fd/{name}") == "/tmp/told (deleted)"
        with open(f"/dev/fd/{name}") as again: assert again.read() == "hello"
    fails(errno.ENOENT, os.readlink, f"{base}/{name}")
    fails(errno.ENOENT, open, f"{base}/999")
    r, w = os.pipe()
    assert os.readlink(f"{base}/{r}") == os.readlink(f"{base}/{w}") == f"pipe:[{os.fstat(r).st_ino}]"
    more = os.open(f"/dev/fd/{w}", os.O_WRONLY)
    os.close(w); os.write(more, b"through"); os.close(more)
    assert os.read(r, 99) == b"through" and os.read(r, 99) == b""
    os.close(r)
    # Relative to a directory outside every tree, and through a link that the program made.
    here = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    assert os.readlink("1", dir_fd=here) == os.readlink(f"{base}/1")
    assert os.stat("../status", dir_fd=here).st_size == 0
    fails(errno.EISDIR, os.read, here, 1)
    os.close(here)
    if not os.path.lexists("/tmp/out"): os.symlink("/dev/stdout", "/tmp/out")
    with open("/tmp/out", "w") as out: out.write("linked ")
    with open("/dev/stderr", "w") as err: err.write("message")
    tmp = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    assert os.listdir(f"{base}/{tmp}") == os.listdir("/tmp")
    with open(f"{base}/{tmp}/below", "w"): pass
    assert os.path.exists("/tmp/below")
    os.close(tmp)
    assert os.readlink(f"{base}/0").startswith("pipe:[")
    fails(errno.EACCES, open, "/dev/stdin", "w")
    fails(errno.EPERM, os.unlink, f"{base}/0")
    fails(errno.ENOENT, os.listdir, "/proc/9999")
    # Closed while they are listed, none is left out.
    many = {str(os.open("/dev/null", os.O_RDONLY)) for _ in range(50)}
    with os.scandir(base) as entries:
        for entry in entries:
            if entry.name in many: os.close(int(entry.name)); many.remove(entry.name)
    assert not many, many

def own():
    own = "/proc/self"
    assert os.readlink(own) == str(os.getpid()) and str(os.getpid()) in os.listdir("/proc")
    assert "meminfo" in os.listdir("/proc") and {"fd", "status", "exe"} <= set(os.listdir(own))
    assert os.path.realpath(f"{own}/exe") == os.path.realpath(sys.executable), os.readlink(f"{own}/exe")
    os.chdir("/tmp")
    assert os.readlink(f"{own}/cwd") == "/tmp" and os.path.samefile(f"{own}/cwd", "/tmp")
    assert os.path.exists(f"{own}/root/tmp") and os.listdir(f"{own}/root/tmp") == os.listdir("/tmp")
    with open(f"{own}/cmdline", "rb") as f: args = f.read().split(b"\0")
    assert args[1:] == [b"/app.py", b"one two", b""], args
    with open(f"{own}/environ", "rb") as f: env = f.read().split(b"\0")
    assert set(env) == {b"COLOUR=blue", b"PATH=/usr/bin:/bin", b"PYTHONDONTWRITEBYTECODE=1", b""}, env
    with open("/proc/cpuinfo") as f: assert f.read().count("processor") == 1
    assert os.getloadavg() == (0, 0, 0) and {"loadavg", "stat"} <= set(os.listdir("/proc"))
    with open("/proc/stat") as f: begun = int(re.search("btime ([0-9]+)", f.read())[1])
    assert abs(begun + time.monotonic() - time.time()) < 2, begun
    with open("/proc/version") as f: assert f.read().startswith(f"Linux version {os.uname().release} ")
    for name, value in ("kernel/osrelease", os.uname().release), ("net/core/somaxconn", "128"):
        with open(f"/proc/sys/{name}") as f: assert f.read() == value + "\n"
    with open(f"{own}/limits") as f: assert "Max open files            1024" in f.read()
    with open(f"{own}/fdinfo/0") as f: assert f.read().startswith("pos:\t0\n")
    with open("/proc/thread-self/comm") as f: assert f.read().strip()
    assert os.listdir(f"{own}/task") == [str(os.getpid())]
    with open(f"{own}/auxv", "rb") as f: words = memoryview(f.read()).cast("Q").tolist()
    assert dict(zip(words[::2], words[1::2]))[6] == 4096 and words[-2:] == [0, 0]
    maps = open(f"{own}/maps").read(); assert "[heap]\n" in maps and "[stack]\n" in maps
    smaps = open(f"{own}/smaps").read(); assert smaps.count("\nRss:") == maps.count("\n") and "VmFlags: rd wr" in smaps
    import mmap
    with open("/tmp/a mapped file", "wb+") as f:
        f.truncate(8192); held = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE, offset=4096), mmap.mmap(f.fileno(), 4096)
        lines = [line.split(None, 5) for line in open(f"{own}/maps").read().splitlines()]
        named = {(line[1][3], line[2], int(line[4])) for line in lines if line[5:] == ["/tmp/a mapped file"]}
        assert named == {("p", "00001000", os.fstat(f.fileno()).st_ino), ("s", "00000000", os.fstat(f.fileno()).st_ino)}, named
        program = os.path.realpath(sys.executable); assert any(line[5:] == [program] and "x" in line[1] for line in lines), program
        os.unlink("/tmp/a mapped file"); assert " (deleted)\n" in open(f"{own}/maps").read(); del held
    assert re.search("Rss: +[1-9]", open(f"{own}/smaps_rollup").read()) and " /proc " in open(f"{own}/mountinfo").read()
    assert "lo:" in open("/proc/net/dev").read() and open("/proc/net/tcp").read() == open(f"{own}/net/tcp").read()
    fields = open(f"{own}/stat").read().rsplit(") ", 1)[1].split(); assert len(fields) == 50 and int(fields[21]) * 4096 == int(fields[20]) > 1 << 20
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); assert re.search("SigBlk:\t0+800\n", open(f"{own}/status").read()); signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    uuid = "/proc/sys/kernel/random/uuid"; assert len({open(uuid).read() for _ in range(3)}) == 3 and len(open(uuid).read()) == 37
    assert open("/sys/devices/system/cpu/online").read() == "0\n" and os.path.isdir("/var/tmp") and os.path.exists("/etc/resolv.conf")
    full = os.open("/dev/full", os.O_RDWR); assert os.read(full, 3) == bytes(3); fails(errno.ENOSPC, os.write, full, b"x"); os.close(full)
    # A child is listed by its PID, with its own program.
    if (pid := os.fork()) == 0:
        os.execv("/bin/sh", ["a shell", "-c", "read line"])
    while os.readlink(f"/proc/{pid}/exe") != os.path.realpath("/bin/sh"): os.sched_yield()
    with open(f"/proc/{pid}/cmdline", "rb") as f: assert f.read() == b"a shell\0-c\0read line\0"
    assert {"0", "1", "2"} <= set(os.listdir(f"/proc/{pid}/fd"))
    os.kill(pid, 9)
    while open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] != "Z": os.sched_yield()
    os.waitpid(pid, 0)
    fails(errno.ENOENT, os.stat, f"/proc/{pid}")

held = None
for line in sys.stdin:
    if line == "hold\n":
        # A half listed directory, and a descriptor of an unlinked one.
        held = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
        with open("/tmp/held", "w"): kept = os.open("/tmp/held", os.O_RDONLY)
        os.unlink("/tmp/held")
    elif line == "held\n":
        print(held and (os.readlink(f"/dev/fd/{kept}"), sorted(os.listdir(held), key=int)), flush=True)
        continue
    else:
        look(); own()
    print("done", flush=True)
"#;

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(request.as_bytes()).unwrap_or_else(|e| panic!("{request:?}: {e}"));
    String::from_utf8(answer).unwrap()
}

#[test]
fn descriptors_are_listed_and_opened_by_name_without_a_leak() {
    let Some(program) = python(DESCRIPTORS) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..3 {
        instance.reset();
        assert_eq!(ask(&mut instance, "look\n"), "linked done\n");
        instance.verify().unwrap();
        assert_eq!(ask(&mut instance, "held\n"), "None\n");
    }
    assert_eq!(instance.stats().processes, 1);
}

#[test]
fn a_directory_of_proc_that_is_open_is_part_of_every_state() {
    let Some(program) = python(DESCRIPTORS) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    const HELD: &str = "('/tmp/held (deleted)', ['0', '1', '2', '3', '4', '5'])\n";
    let mut line = Branch::<Instance>::from_state(&Tree::new(), warm.home(), warm.state());
    let root = line.at();
    assert_eq!(ask(line.guest_mut().unwrap(), "hold\n"), "done\n");
    let held = line.checkpoint().unwrap();
    let mut fork = line.fork(held).unwrap();
    line.rollback(root).unwrap();
    assert_eq!(ask(line.guest_mut().unwrap(), "held\n"), "None\n");
    line.rollback(held).unwrap();
    line.guest_mut().unwrap().verify().unwrap();
    for line in [&mut line, &mut fork] {
        assert_eq!(ask(line.guest_mut().unwrap(), "held\n"), HELD);
    }
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    let frozen = fork.guest_mut().unwrap().freeze().unwrap();
    frozen.save(&store, "held", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("held").unwrap(), &Options::default()).unwrap();
    let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
    assert_eq!(ask(&mut thawed, "held\n"), HELD);
    thawed.verify().unwrap();
}

const FAR: &str = r#"
import errno, os, sys

def fails(work, *args):
    try: work(*args)
    except OSError as e: assert e.errno == errno.EINVAL, e
    else: assert False, "it works"

for line in sys.stdin:
    name, last = os.open("/proc/self/comm", os.O_RDWR), (1 << 63) - 1
    assert os.lseek(name, last, os.SEEK_SET) == last
    r, w = os.pipe()
    os.write(w, b"x")
    fails(os.write, name, b"x")
    fails(os.writev, name, [b"x", b"y"])
    fails(os.pwritev, name, [b"x"], last)
    fails(os.splice, r, name, 1)
    assert os.lseek(name, 0, os.SEEK_CUR) == last
    assert open("/proc/self/comm").read().startswith("python")
    print("done", flush=True)
"#;

#[test]
fn no_write_moves_behind_the_last_position() {
    let Some(program) = python(FAR) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "write\n"), "done\n");
    instance.freeze().unwrap();
}

#[test]
fn a_shell_names_its_descriptors() {
    let script = "echo out > /dev/stdout; echo in | cat /dev/stdin; echo three 3>&1 >/dev/fd/3; ls /dev/fd/ >/dev/null; \
                  readlink /proc/self/exe; head -n 1 /proc/mounts; exec /proc/self/fd/4 'by name' 4</bin/echo";
    let Some(run) = common::here(shell(script).run(b"")) else { return };
    let output = String::from_utf8_lossy(&run.output);
    let (first, rest) = output.split_at(output.find("/usr").unwrap_or(output.len()));
    assert_eq!(first, "out\nin\nthree\n", "{run:?}");
    assert!(rest.ends_with("afresh / overlay rw 0 0\nby name\n"), "{run:?}");
}

#[test]
fn proc_reveals_nothing_of_the_host() {
    let own = std::process::id();
    let script = format!(
        "cat /proc/{own}/environ /proc/1/environ 2>/dev/null; ls /proc; cat /proc/self/environ /proc/cpuinfo | tr '\\0' '\\n'"
    );
    let Some(run) = common::here(shell(&script).grant("/proc").grant("/").run(b"")) else { return };
    let output = String::from_utf8_lossy(&run.output);
    let names: Vec<&str> = output.lines().take_while(|line| !line.contains('=')).collect();
    let numbers: Vec<&str> = names.iter().filter(|n| n.parse::<u32>().is_ok()).copied().collect();
    assert!(numbers.len() == 2 && numbers[0] == "2", "the shell and its child: {names:?}");
    let rest: Vec<&str> = output.lines().skip(names.len()).collect();
    assert_eq!(rest[..3], ["PATH=/usr/bin:/bin", "PWD=/", "processor\t: 0"], "{rest:?}");
    if let Ok(host) = std::fs::read_to_string("/proc/cpuinfo")
        && let Some(model) = host.lines().find(|line| line.starts_with("model name"))
    {
        assert!(!output.contains(model), "{model}");
    }
}

#[test]
fn a_program_is_known_without_links_and_called_as_it_was_named() {
    let script = "cd /tmp; ln -s /bin/readlink where; ./where /proc/self/exe; ln -s /tmp /tmp/way; way/./where /proc/self/exe; \
                  ln -s /bin/cat telling; ./telling /proc/self/comm; cat /proc/$$/comm; \
                  printf '#!/bin/sh\\nread name < /proc/$$/comm; echo $name\\n' > said; chmod +x said; ./said";
    let Some(run) = common::here(shell(script).run(b"")) else { return };
    let readlink = std::fs::canonicalize("/bin/readlink").unwrap();
    let readlink = readlink.display();
    let expected = format!("{readlink}\n{readlink}\ntelling\nsh\nsaid\n");
    assert_eq!(String::from_utf8_lossy(&run.output), expected, "{run:?}");
}

#[test]
fn status_shows_the_umask_of_its_process() {
    let script = "umask 027; (umask 077; grep Umask /proc/$$/status /proc/self/status)";
    let Some(run) = common::here(shell(script).run(b"")) else { return };
    let output = String::from_utf8_lossy(&run.output);
    let masks: Vec<_> = output.lines().filter_map(|line| line.split('\t').nth(1)).collect();
    assert_eq!(masks, ["0027", "0077"], "{run:?}");
}

/// Adjusts the score of processes, and shows the score of each and the filter of a core dump.
const ADJUSTED: &str = r#"
import errno, os, sys
path = "/proc/self/oom_score_adj"
def show(of="self", name="oom_score_adj"):
    with open(f"/proc/{of}/{name}") as file:
        return file.read()
def put(text, of="self", name="oom_score_adj"):
    file = os.open(f"/proc/{of}/{name}", os.O_WRONLY)
    try:
        assert os.write(file, text) == len(text)
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        os.close(file)
assert show() == "0\n" and put(b"500\n") is None and show() == "500\n"
assert put(b"0x10\0") is None and show() == "16\n"
assert (put(b"-1"), put(b"1001"), put(b"-1001"), put(b"x"), put(b"")) == ("EACCES", *["EINVAL"] * 4)
assert show() == "16\n" and os.stat(path).st_mode & 0o777 == 0o644
filter = "coredump_filter"
assert show(name=filter) == "00000033\n" and put(b"0x3ff\n", name=filter) is None
assert put(b"-1", name=filter) == "EINVAL" and show(name=filter) == "000001ff\n"
(theirs, requests), (answers, mine) = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    assert put(b"7", name=filter) is None
    assert show() == show(os.getppid()) == "16\n"
    os.write(mine, b"ready\n")
    os.dup2(theirs, 0), os.dup2(mine, 1)
    os.execv("/bin/sh", ["sh", "-c", f"while read line; do cat {path} /proc/self/{filter}; done"])
answers = os.fdopen(answers)
assert answers.readline() == "ready\n"
for line in sys.stdin:
    assert put(line.strip().encode(), child) is None
    os.write(requests, b"go\n")
    print(show().strip(), show(child).strip(), answers.readline().strip(), end=" ")
    print(show(name=filter).strip(), answers.readline().strip(), flush=True)
"#;

#[test]
fn scores_and_filters_of_core_dumps_are_inherited_reset_and_saved() {
    let Some(program) = python(ADJUSTED) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for adjusted in ["16 700 700 000001ff 00000007\n", "16 0 0 000001ff 00000007\n"] {
        let request = adjusted.split(' ').nth(1).unwrap();
        let answer = instance.call(format!("{request}\n").as_bytes()).unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), adjusted);
        let saved = instance.freeze().unwrap();
        let mut later = Warm::thaw(&saved, &program).unwrap().instance();
        assert_eq!(later.call(b"9\n").unwrap(), b"16 9 9 000001ff 00000007\n");
        later.verify().unwrap();
        instance.verify().unwrap();
    }
}
