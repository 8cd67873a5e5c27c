//! `afresh exec`: programs of the system run once, as commands of a shell.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

fn start(arguments: &[impl AsRef<OsStr>]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
    command.arg("exec").args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn exec(arguments: &[impl AsRef<OsStr>], input: &[u8]) -> Output {
    let mut child = start(arguments);
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_vec());
    // Both pipes move at a time. A program that ends before it has read all leaves a broken one.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether this host runs guests, and has these programs.
fn can_run(programs: &[&str]) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| std::env::split_paths(&folders).any(|dir| dir.join(name).is_file());
    if let Some(missing) = programs.iter().find(|name| !has(name)) {
        println!("SKIPPED: no {missing}");
        return false;
    }
    !common::lacks_guests(&exec(&["--", "true"], b""))
}

fn says(arguments: &[&str], input: &str, output: &str, code: i32) {
    let ended = exec(arguments, input.as_bytes());
    let (out, err) = (text(&ended.stdout), text(&ended.stderr));
    assert_eq!((&*out, ended.status.code()), (output, Some(code)), "{arguments:?}: {err}");
}

#[test]
fn arguments_variables_and_paths_of_any_bytes_reach_the_program() {
    if !can_run(&["cat", "sh"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let odd = folder.path().join(OsStr::from_bytes(b"d\xff"));
    std::fs::create_dir(&odd).unwrap();
    std::fs::write(odd.join("file"), "content").unwrap();
    let script = "printf '%s|%s|' \"$1\" \"$NAME\"; cat \"$2/file\"";
    let ended = exec(
        &[
            OsStr::new("--dir"),
            odd.as_os_str(),
            OsStr::new("--env"),
            OsStr::from_bytes(b"NAME=\xfe"),
            OsStr::new("--"),
            OsStr::new("sh"),
            OsStr::new("-c"),
            OsStr::new(script),
            OsStr::new("sh"),
            OsStr::from_bytes(b"\xfd"),
            odd.as_os_str(),
        ],
        b"",
    );
    assert_eq!(ended.stdout, b"\xfd|\xfe|content", "{}", text(&ended.stderr));
}

#[test]
fn commands_run_to_their_end_with_input_and_status() {
    if !can_run(&["echo", "sort", "grep", "sh", "cat", "head"]) {
        return;
    }
    says(&["--", "echo", "hi", "--there"], "", "hi --there\n", 0);
    says(&["echo", "-n", "hi"], "", "hi", 0);
    says(&["--", "sort"], "b\na\nc\n", "a\nb\nc\n", 0);
    says(&["--", "grep", "-c", "a"], "a\nb\na\n", "2\n", 0);
    says(&["--", "grep", "z"], "a\n", "", 1);
    says(&["--", "sh", "-c", "exit 7"], "", "", 7);
    says(&["--", "sh", "-c", "kill -9 $$"], "", "", 137);
    // Several processes share the input, and read it in turn.
    says(&["--", "sh", "-c", "read one; cat; echo $one"], "1\n2\n3\n", "2\n3\n1\n", 0);
    says(&["--", "sh", "-c", "sort | head -n 1"], "b\na\n", "a\n", 0);
    says(
        &["--env", "COLOUR=green", "--", "sh", "-c", "echo $COLOUR $HOME"],
        "",
        if rustix::process::geteuid().is_root() { "green /root\n" } else { "green /home/user\n" },
        0,
    );
    let ended = exec(&["--", "sh", "-c", "echo out; echo err >&2"], b"");
    assert_eq!((text(&ended.stdout), text(&ended.stderr)), ("out\n".into(), "err\n".into()));
}

#[test]
fn the_program_has_the_user_of_the_command_or_that_of_its_option() {
    if !can_run(&["sh", "id", "stat"]) {
        return;
    }
    let script = "id -u; id -g; stat -c %u:%g /usr; touch /tmp/new; stat -c %u:%g /tmp/new";
    let expected = |user: u32, group: u32| {
        format!("{user}\n{group}\n{}", format!("{user}:{group}\n").repeat(2))
    };
    let (own, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    says(&["--", "sh", "-c", script], "", &expected(own, group), 0);
    says(&["--user", "7", "--", "sh", "-c", script], "", &expected(7, 7), 0);
    says(&["--user", "501:20", "--", "sh", "-c", script], "", &expected(501, 20), 0);
    for wrong in ["root", "-1", "4294967295", "1:", ":1", ""] {
        let ended = exec(&["--user", wrong, "--", "true"], b"");
        assert_eq!(ended.status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn large_input_passes_through_unchanged() {
    if !can_run(&["cat", "sh"]) {
        return;
    }
    let input: Vec<u8> =
        (0..5 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for command in [&["--", "cat"][..], &["--", "sh", "-c", "cat | cat"]] {
        let ended = exec(command, &input);
        assert!(ended.stdout == input, "{} bytes: {}", ended.stdout.len(), text(&ended.stderr));
        assert_eq!(ended.status.code(), Some(0));
    }
}

#[test]
fn programs_that_read_all_of_their_input_first_answer() {
    if !can_run(&["jq", "python3"]) {
        return;
    }
    says(&["--", "jq", "-c", ".a"], "{\"a\":[1,2]}", "[1,2]\n", 0);
    // A shim of pyenv leads to the interpreter that it stands for.
    says(
        &["--", "python3", "-c", "import sys, json; print(sum(map(int, sys.stdin)))"],
        "1\n2\n",
        "3\n",
        0,
    );
    let select = "import select, sys; select.select([sys.stdin], [], []); print(sys.stdin.read())";
    says(&["--", "python3", "-c", select], "x", "x\n", 0);
}

#[test]
fn limits_are_set_and_unserved_calls_are_listed() {
    if !can_run(&["sh", "python3"]) {
        return;
    }
    says(
        &["--ulimit", "nofile=50:60", "--", "sh", "-c", "ulimit -n; ulimit -Hn"],
        "",
        "50\n60\n",
        0,
    );
    for (limit, why) in
        [("core=1", "cpu, fsize, nofile and nproc"), ("cpu=2:1", "above"), ("cpu", "NAME=SOFT")]
    {
        let refused = exec(&["--ulimit", limit, "--", "true"], b"");
        assert!(!refused.status.success() && text(&refused.stderr).contains(why), "{refused:?}");
    }
    let script = "import ctypes; [ctypes.CDLL(None).syscall(425, 1, 0) for _ in range(2)]";
    let ended = exec(&["--report-unserved", "--", "python3", "-c", script], b"");
    let line = "afresh: not served: io_uring_setup (system call 425), made 2 times\n";
    assert!(ended.status.success() && text(&ended.stderr).contains(line), "{ended:?}");
    let ended = exec(&["--cost", "--", "sh", "-c", "exit 3"], b"");
    let line = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(3), "{ended:?}");
    assert!(line.starts_with("afresh: cost: ") && line.ends_with(" MiB peak of mapped memory\n"));
}

#[test]
fn output_comes_while_the_program_runs_and_input_when_it_asks() {
    if !can_run(&["sh"]) {
        return;
    }
    let mut child =
        start(&["--", "sh", "-c", "echo ready; read line; echo got $line; read line; echo end"]);
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut hear = |expected: &str| {
        let mut bytes = vec![0; expected.len()];
        stdout.read_exact(&mut bytes).unwrap();
        assert_eq!(text(&bytes), expected);
    };
    hear("ready\n");
    stdin.write_all(b"one\n").unwrap();
    hear("got one\n");
    drop(stdin);
    hear("end\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_reader_that_leaves_ends_the_writer_by_a_signal() {
    if !can_run(&["yes"]) {
        return;
    }
    let mut child = start(&["--", "yes"]);
    let mut some = [0; 4];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut some).unwrap();
    assert_eq!(&some, b"y\ny\n");
    drop(stdout);
    assert_eq!(child.wait().unwrap().code(), Some(128 + 13));
}

#[test]
fn an_error_of_the_output_is_that_of_the_programs_write() {
    if !can_run(&["echo"]) {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
    command.args(["exec", "--", "/bin/echo", "hi"]).stdin(Stdio::null());
    command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let ended = command.output().unwrap();
    let errors = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{errors}");
    assert!(errors.contains("No space left on device"), "{errors}");
}

/// Whether this process, and so each program that it starts, ignores SIGINT.
fn ignores_interrupts() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 << (Signal::INT.as_raw() - 1) != 0
}

#[test]
fn signals_reach_the_program() {
    if !can_run(&["sh", "sleep"]) {
        return;
    }
    if ignores_interrupts() {
        return println!("SKIPPED: SIGINT is ignored, as in a background job of a shell");
    }
    let signalled = |script: &str, signal: Signal| {
        let mut child = start(&["--", "sh", "-c", script]);
        let mut ready = [0; 3];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        child.wait_with_output().unwrap()
    };
    // One that waits, one that works, and one that has a handler.
    let waits = signalled("echo up; exec sleep 1000", Signal::TERM);
    assert_eq!(waits.status.code(), Some(143), "{}", text(&waits.stderr));
    let works = signalled("echo up; while :; do :; done", Signal::INT);
    assert_eq!(works.status.code(), Some(130), "{}", text(&works.stderr));
    let traps = "trap 'echo caught; exit 3' USR1; echo up; while :; do sleep 0.01; done";
    let handled = signalled(traps, Signal::USR1);
    assert_eq!((text(&handled.stdout), handled.status.code()), ("caught\n".into(), Some(3)));
}

#[test]
fn changes_of_files_are_kept_aside_listed_or_written_back() {
    if !can_run(&["sh", "rm", "mkdir", "ln", "cat"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let dir = top.to_str().unwrap();
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(top.join("kept"), "old\n").unwrap();
    std::fs::write(top.join("gone"), "").unwrap();
    std::fs::create_dir_all(top.join("old/deep")).unwrap();
    std::os::unix::fs::symlink(outside.path(), top.join("out")).unwrap();
    let script = "echo new > kept; rm gone; rm -r old; mkdir -p a/b; echo x > a/b/c; ln -s kept link; chmod 755 a/b/c";
    let script = format!("cd {dir}; {script}; cat kept");
    let ended = exec(&["--dir", dir, "--diff", "--", "sh", "-c", &script], b"");
    assert_eq!(text(&ended.stdout), "new\n", "{}", text(&ended.stderr));
    let listed = text(&ended.stderr);
    for line in ["M /kept", "D /gone", "A /a/b/c", "A /link", "D /old/deep"] {
        let (letter, path) = line.split_once(' ').unwrap();
        assert!(listed.contains(&format!("{letter} {dir}{path}\n")), "{line}: {listed}");
    }
    assert_eq!(std::fs::read_to_string(top.join("kept")).unwrap(), "old\n");
    assert!(top.join("gone").exists() && !top.join("a").exists());

    let ended = exec(&["--write-back", dir, "--", "sh", "-c", &script], b"");
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    assert_eq!(std::fs::read_to_string(top.join("kept")).unwrap(), "new\n");
    assert!(!top.join("gone").exists() && !top.join("old").exists());
    assert_eq!(std::fs::read_to_string(top.join("a/b/c")).unwrap(), "x\n");
    assert_eq!(std::fs::read_link(top.join("link")).unwrap(), Path::new("kept"));
    // A link out of the directory is a link, wherever it leads on the host.
    let through = format!("cd {dir}; rm out; mkdir out; echo x > out/file");
    let ended = exec(&["--write-back", dir, "--", "sh", "-c", &through], b"");
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    assert!(top.join("out").symlink_metadata().unwrap().is_dir());
    assert_eq!(outside.path().read_dir().unwrap().count(), 0);
}

#[test]
fn changes_that_are_not_written_back_are_reported() {
    if !can_run(&["sh"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let (dir, file) = (top.to_str().unwrap(), top.join("f"));
    std::fs::write(&file, "old\n").unwrap();
    let script = format!("cd {dir}; echo new > f; echo more > g; kill -9 $$");
    let ended = exec(&["--write-back", dir, "--", "sh", "-c", &script], b"");
    assert_eq!(ended.status.code(), Some(137));
    let errors = text(&ended.stderr);
    assert!(errors.contains("2 changes are not written") && errors.contains("signal"), "{errors}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "old\n");

    let missing = top.join("missing");
    for (wrong, part) in [(&file, "no directory"), (&missing, "No such file")] {
        let wrong = wrong.to_str().unwrap();
        let ended = exec(&["--write-back", wrong, "--", "sh", "-c", "echo ran"], b"");
        let errors = text(&ended.stderr);
        assert_eq!((text(&ended.stdout), ended.status.code()), (String::new(), Some(1)));
        let named = format!("--write-back {wrong}");
        assert!(errors.contains(&named) && errors.contains(part), "{errors}");
    }
}

#[test]
fn an_option_that_does_not_exist_is_no_program() {
    for wrong in [&["--memry", "100", "true"][..], &["--replace", "--", "true"], &["-x"]] {
        let ended = exec(wrong, b"");
        assert_eq!(ended.status.code(), Some(2));
        let errors = text(&ended.stderr);
        assert!(errors.contains(&format!("unexpected argument `{}`", wrong[0])), "{errors}");
        assert!(errors.contains("afresh exec --help"), "{errors}");
    }
}

#[test]
fn files_of_the_host_that_the_program_only_moved_are_written_back_whole() {
    if !can_run(&["sh", "mv", "mkdir"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let (one, other) = (top.join("one"), top.join("other"));
    std::fs::create_dir_all(one.join("src/deep")).unwrap();
    std::fs::create_dir(&other).unwrap();
    for file in ["a", "swap", "src/deep/file", "leaves"] {
        std::fs::write(one.join(file), file).unwrap();
    }
    std::os::unix::fs::symlink("target", one.join("src/link")).unwrap();
    // More than the files that a tree keeps open.
    (0..50).for_each(|n| std::fs::write(one.join(n.to_string()), format!("content {n}")).unwrap());
    let script = "mv a b; mv src lib; mv leaves ../other/came; mv b t; mv swap b; mv t swap; \
        n=49; while [ $n -ge 0 ]; do mv $n $((n+1)); n=$((n-1)); done";
    let script = format!("cd {}; {script}", one.display());
    let (one_text, other_text) = (one.to_str().unwrap(), other.to_str().unwrap());
    let tops = ["--write-back", one_text, "--write-back", other_text];
    let ended = exec(&[&tops[..], &["--", "sh", "-c", &script]].concat(), b"");
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    assert_eq!((read(&one.join("b")), read(&one.join("swap"))), ("swap".into(), "a".into()));
    assert_eq!(read(&one.join("lib/deep/file")), "src/deep/file");
    assert_eq!(std::fs::read_link(one.join("lib/link")).unwrap(), Path::new("target"));
    assert_eq!(read(&other.join("came")), "leaves");
    for n in 0..50 {
        assert_eq!(read(&one.join((n + 1).to_string())), format!("content {n}"));
    }
    // Nothing else is left: `b`, `swap`, `lib` and the numbers from 1 to 50.
    assert_eq!(one.read_dir().unwrap().count(), 53);
}

#[test]
fn run_names_exec_for_a_program_that_ends_and_ends_input_that_has_no_answer() {
    if !can_run(&["sort", "true"]) {
        return;
    }
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_afresh"));
        command.arg("run").arg("--linux").args(arguments).stdin(Stdio::null());
        command.output().unwrap()
    };
    let ended = run(&["true"]);
    assert!(text(&ended.stderr).contains("afresh exec -- PROGRAM"), "{}", text(&ended.stderr));
    let sorted = run(&["-n", "2", "--input", "b\na", "sort"]);
    assert_eq!(text(&sorted.stdout), "a\nb\na\nb\n", "{}", text(&sorted.stderr));
    let loud = run(&["--input", "x", "sh", "--", "-c", "read x; echo hm >&2; echo $x; read y"]);
    assert_eq!((text(&loud.stdout), text(&loud.stderr)), ("x\n".into(), "hm\n".into()));
}

/// Runs a guest in a terminal: types, resizes, and interrupts.
const TYPES: &str = r#"
import fcntl, os, pty, signal, struct, sys, termios
signal.alarm(300)
GUEST = """
import os, signal, sys, termios, time, tty
# Python runs no handler between its last check and a system call, so a blocked signal is waited for.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print(os.ttyname(0), *os.get_terminal_size(), sys.stdout.isatty(), os.tcgetpgrp(0) == os.getpgrp(), flush=True)
signal.sigwait([signal.SIGWINCH])
print("size", *os.get_terminal_size(), flush=True)
print("got", input(), flush=True)
before = termios.tcgetattr(0)
tty.setraw(0); print("set", end="\\r\\n", flush=True)
print("raw", os.read(0, 1), end="\\r\\n", flush=True)
termios.tcsetattr(0, termios.TCSANOW, before)
print("sleeping", flush=True)
while True: time.sleep(0.01)
"""
def resize(fd, *size): fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
pid, fd = pty.fork()
if pid == 0:
    os.read(0, 9)
    # A shell starts its background jobs with this signal ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.argv[1], [sys.argv[1], "exec", "--", "python3", "-c", GUEST])
seen = b""
def expect(text):
    global seen
    while text not in seen:
        try: piece = os.read(fd, 4096)
        except OSError: piece = b""
        assert piece, (text, seen)
        seen += piece
    seen = seen[seen.index(text) + len(text):]
resize(fd, 33, 111); os.write(fd, b"go")
os.write(fd, b"\n")
expect(b"/dev/pts/0 111 33 True True")
resize(fd, 44, 99); expect(b"size 99 44")
# The guest's terminal echoes what is typed, and erases.
os.write(fd, b"hexx\x7f\x7fllo\r"); expect(b"hexx"); expect(b"got hello\r\n")
expect(b"set"); os.write(fd, b"\x03"); expect(b"raw b'\\x03'")
expect(b"sleeping"); os.write(fd, b"\x03"); expect(b"KeyboardInterrupt")
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 130, status
"#;

#[test]
fn a_terminal_is_passed_on_with_its_size_and_keys() {
    if !can_run(&["python3"]) {
        return;
    }
    let binary = env!("CARGO_BIN_EXE_afresh");
    let ended = Command::new("python3").args(["-c", TYPES, binary]).output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
}

/// A shell that runs a job in the background of its terminal.
const RUNS_A_JOB: &str = r#"
import os, pty, sys
shell, fd = pty.fork()
if shell == 0:
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        os.execv(sys.argv[1], [sys.argv[1], "exec", "--", "sh", "-c", "cat; echo ran"])
    _, status = os.waitpid(job, os.WUNTRACED)
    os._exit(9 if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
seen = b""
try:
    while piece := os.read(fd, 4096):
        seen += piece
except OSError:
    pass
_, status = os.waitpid(shell, 0)
assert os.waitstatus_to_exitcode(status) == 0 and b"ran" in seen, (status, seen)
"#;

#[test]
fn a_job_in_the_background_of_a_terminal_runs_without_input() {
    if !can_run(&["python3", "sh", "cat"]) {
        return;
    }
    let binary = env!("CARGO_BIN_EXE_afresh");
    let ended = Command::new("python3").args(["-c", RUNS_A_JOB, binary]).output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
}
