//! Programs that start programs: shells with pipelines, Python's subprocess and fork, pip. A reset
//! undoes changes of children.

use crate::common;

use std::process::Command;
use std::time::Duration;

use afresh_linux::{Frozen, Instance, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_store::Store;

/// Number of the call.
const RSEQ: i64 = libc::SYS_rseq;
const LIMIT: Duration = Duration::from_secs(200);

fn shell(script: &str) -> Program {
    let program = Program::new("/bin/sh").arg("-c").arg(script);
    program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT)
}

fn python(script: &str) -> Option<Program> {
    let program = common::python()?.arg("/app.py").file("/app.py", script);
    Some(program.env("PATH", "/usr/bin:/bin").time_limit(LIMIT).start_limit(LIMIT))
}

fn ask(instance: &mut Instance, request: &str) -> String {
    let answer = instance.call(request.as_bytes()).unwrap_or_else(|e| panic!("{request:?}: {e}"));
    String::from_utf8(answer).unwrap()
}

/// Two calls from the warm state, with a verification between them.
fn is_pristine(warm: &Warm, request: &str, expected: &str) {
    let mut instance = warm.instance();
    for round in 0..4 {
        assert_eq!(ask(&mut instance, request), expected, "round {round}");
        instance.verify().unwrap();
    }
    assert_eq!(instance.stats().processes, 1, "it was brought back within one process");
    // The C library tries `rseq`, and works without it.
    let mut unserved = instance.stats().unserved.keys().filter(|number| **number != RSEQ);
    assert_eq!(unserved.next(), None);
}

const PIPES: &str = r#"
made=no
while read line; do
    [ -e /tmp/made ] && made=yes
    echo "$line" | tr a-z A-Z | sed 's/$/!/'
    echo "$line" > /tmp/made
    (cd /usr; exit 7); echo $? $made
    sh -c 'kill -9 $$'; echo $?
    echo $(for i in 1 2 3; do echo $i; done | wc -l) done
    no-such-program 2>/dev/null; echo $?
    made=changed
done
"#;

#[test]
fn a_shell_runs_pipelines_and_children_leave_nothing() {
    let program = shell(PIPES).request("warm\n");
    let Some(warm) = common::here(program.warm()) else { return };
    // The warm-up has made the file and changed the variable: that is the state all begin from.
    is_pristine(&warm, "hello\n", "HELLO!\n7 yes\n137\n3 done\n127\n");

    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("warm").unwrap(), &Options::default()).unwrap();
    let thawed = Warm::thaw(&frozen, &program).unwrap();
    is_pristine(&thawed, "again\n", "AGAIN!\n7 yes\n137\n3 done\n127\n");
}

#[test]
fn a_program_runs_to_its_end_with_its_children() {
    let run = shell("echo one | cat; exec /bin/sh -c 'cat; echo two >&2; exit 3'").run(b"input\n");
    let Some(run) = common::here(run) else { return };
    assert_eq!(String::from_utf8_lossy(&run.output), "one\ninput\n");
    assert_eq!((run.end, run.messages.as_str()), (afresh_linux::End::Exit(3), "two\n"));
}

#[test]
fn a_script_runs_by_its_interpreter() {
    let program = shell("chmod +x /tmp/a; /tmp/a two; echo $?");
    let run = program.file("/tmp/a", "#!/bin/sh -e\necho $0 $1\nfalse\necho no\n").run(b"");
    let Some(run) = common::here(run) else { return };
    assert_eq!(String::from_utf8_lossy(&run.output), "/tmp/a two\n1\n", "{run:?}");
}

const SUBPROCESS: &str = r#"
import os, signal, subprocess, sys
calls, chld = 0, []
for line in sys.stdin:
    calls += 1
    made = os.path.exists("/tmp/made")
    upper = subprocess.run(["tr", "a-z", "A-Z"], input=line, capture_output=True, text=True).stdout.strip()
    status = subprocess.run(["sh", "-c", "echo $CANARY > /tmp/made; cat /tmp/made; exit 5"], env={**os.environ, "CANARY": line.strip()}, stdout=subprocess.PIPE, text=True)
    try: subprocess.run(["/no/such/program"])
    except FileNotFoundError: missing = "missing"
    signal.signal(signal.SIGCHLD, lambda *a: chld.append(1))
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        calls = 99
        os.write(write, b"child %d" % (os.getppid() == 2))
        os._exit(3)
    _, code = os.waitpid(pid, 0)
    shell = subprocess.check_output("echo a | sed s/a/b/; exit 0", shell=True, text=True).strip()
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    daemon.terminate(); ended = daemon.wait()
    print(calls, made, upper, status.stdout.strip(), status.returncode, missing, os.read(read, 100).decode(), os.waitstatus_to_exitcode(code), len(chld) > 0, shell, ended, flush=True)
"#;

#[test]
fn python_starts_processes_and_each_call_finds_none() {
    let Some(program) = python(SUBPROCESS) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let expected = "1 False HI hi 5 missing child 1 3 True b -15\n";
    is_pristine(&warm, "hi\n", expected);
    // Changes stay from one call to the next.
    let mut instance = warm.instance();
    assert_eq!(ask(&mut instance, "hi\n"), expected);
    assert_eq!(ask(&mut instance, "ho\n"), "2 True HO ho 5 missing child 1 3 True b -15\n");
}

const OWNERS: &str = r#"
import errno, fcntl, os, socket, struct, sys, threading
F_SETOWN_EX, FIOSETOWN, OWNER_PROCESS = 15, 0x8901, 1
def error(work):
    try: work()
    except OSError as e: return errno.errorcode[e.errno]
for line in sys.stdin:
    stream, _ = socket.socketpair()
    device, done = os.open("/dev/afresh/generation", os.O_RDONLY), threading.Event()
    thread = threading.Thread(target=done.wait)
    if (ended := os.fork()) == 0: os._exit(0)
    thread.start()
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    ways = lambda owner: [
        error(lambda: fcntl.fcntl(stream, fcntl.F_SETOWN, owner)),
        error(lambda: fcntl.ioctl(stream, FIOSETOWN, struct.pack("i", -owner))),
        error(lambda: fcntl.fcntl(device, F_SETOWN_EX, struct.pack("ii", OWNER_PROCESS, owner)))]
    told = [ways(thread.native_id), ways(ended)]
    os.waitpid(ended, 0)
    done.set(), thread.join()
    print(told, ways(ended), flush=True)
"#;

#[test]
fn threads_and_zombies_own_descriptors() {
    let Some(program) = python(OWNERS) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let all = "[[None, None, None], [None, None, None]] ['ESRCH', 'ESRCH', 'ESRCH']\n";
    is_pristine(&warm, "go\n", all);
}

const PIP: &str = r#"
import base64, hashlib, os, subprocess, sys, zipfile
def wheel(path):
    files = {"tiny.py": "answer = 42\n", "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        record += f"{name},sha256={digest},{len(text)}\n"
    files["tiny-1.0.dist-info/RECORD"] = record + "tiny-1.0.dist-info/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as z:
        for name, text in files.items(): z.writestr(name, text)
wheel("/tmp/tiny-1.0-py3-none-any.whl")
for line in sys.stdin:
    before = os.path.exists("/tmp/site/tiny.py")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", "--target", "/tmp/site", "/tmp/tiny-1.0-py3-none-any.whl"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "HOME": "/tmp"})
    out = subprocess.run([sys.executable, "-c", "import tiny; print(tiny.answer)"], env={"PYTHONPATH": "/tmp/site"}, stdout=subprocess.PIPE, text=True)
    print(before, done.returncode, out.stdout.strip() or done.stdout, flush=True)
"#;

#[test]
fn pip_installs_a_wheel_and_the_next_call_has_none() {
    let has = Command::new("python3").args(["-m", "pip", "--version"]).output();
    if !has.is_ok_and(|out| out.status.success()) {
        println!("SKIPPED: python3 has no pip");
        return;
    }
    let Some(program) = python(PIP) else { return };
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for _ in 0..2 {
        instance.reset();
        assert_eq!(ask(&mut instance, "go\n"), "False 0 42\n");
    }
    instance.verify().unwrap();
}
