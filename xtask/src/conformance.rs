//! `cargo xtask conformance`: the Linux Test Project's cases for the served system calls, each run
//! as a guest and on this kernel.
//!
//! A separate command: it fetches and builds the project's sources, which takes a quarter of an
//! hour, and nothing of them enters the repository. Every case that passes on this kernel counts;
//! `docs/linux-calls.md` lists those that pass as guests. On this kernel they run as the user
//! `nobody`: as root, some of them set the clock and the kernel's limits of the host. With
//! `--gvisor` the cases are those of gVisor, see [`gvisor`].

mod gvisor;
mod gvisor_build;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, run, succeeds};
use crate::host;

const USAGE: &str = "usage: cargo xtask conformance [--source REPOSITORY] [CALL…], or --gvisor [--source REPOSITORY] [BINARY…]";
const REPOSITORY: &str = "https://github.com/linux-test-project/ltp";
const GVISOR_REPOSITORY: &str = "https://github.com/google/gvisor";
const TAG: &str = "20260529";
/// The user for cases if this is root: a guest is not root, either.
const NOBODY: u32 = 65534;
/// Seconds that a case may take.
const SECONDS: u64 = 60;
/// Words of a reason that are kept.
const REASON: usize = 90;
/// The line before the table, which is replaced.
const MARK: &str = "<!-- written by `cargo xtask conformance` -->\n";

/// The calls whose cases are run, as the project's folders name them.
const CALLS: &str = "accept accept4 access alarm arch_prctl bind brk chdir chmod chown clock_getres clock_gettime \
    clock_nanosleep clone close close_range connect creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait \
    epoll_wait eventfd eventfd2 execl execle execlp execv execve execveat execvp exit exit_group faccessat faccessat2 fadvise \
    fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync flock fork fstat fstatat fstatfs fsync ftruncate futex \
    futimesat getcpu getcwd getdents getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid \
    getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid ioctl kill \
    lchown link linkat listen llseek lseek lstat madvise memfd_create mkdir mkdirat mknod mknodat mmap mprotect mremap msync \
    munmap nanosleep newuname open openat pause pipe pipe2 poll ppoll prctl pread preadv pselect pwrite pwritev read readlink \
    readlinkat readv recv recvfrom recvmsg rename renameat renameat2 rmdir rt_sigaction rt_sigprocmask rt_sigqueueinfo \
    rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sbrk sched_getaffinity sched_yield select send sendmsg sendto \
    set_robust_list set_tid_address setitimer setpgid setpgrp setsid setsockopt shutdown sigaction sigaltstack sighold signal \
    sigpending sigprocmask sigrelse sigsuspend sigtimedwait sigwait sigwaitinfo socket socketpair stat statfs statx symlink \
    symlinkat sysinfo tgkill time timerfd times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork wait \
    wait4 waitid waitpid write writev \
    capget copy_file_range inotify pidfd_open pidfd_send_signal recvmmsg sendfile sendmmsg setrlimit signalfd signalfd4 \
    timer_create timer_delete timer_getoverrun timer_gettime timer_settime ipc/shmat ipc/shmctl ipc/shmdt ipc/shmget";

/// The result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    /// It checked something, and all of that held.
    Passed,
    /// It checked nothing, for want of a call, a file, or rights.
    Skipped,
    Failed,
    /// It did not end.
    Hung,
    /// The runner failed, not the case.
    Crashed,
}

impl Verdict {
    fn of(name: &str) -> Option<Self> {
        [Self::Passed, Self::Skipped, Self::Failed, Self::Hung, Self::Crashed]
            .into_iter()
            .find(|verdict| format!("{verdict:?}") == name)
    }
}

/// A case: its name, and the command that it is, without a path.
struct Case {
    call: String,
    name: String,
    words: Vec<String>,
}

/// The result of a case as a guest; only for those that pass on this kernel.
struct Row {
    call: String,
    name: String,
    verdict: Verdict,
    why: String,
}

/// `cargo xtask conformance`
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let mut source = None;
    let mut calls = Vec::new();
    let is_gvisor = arguments.iter().any(|argument| argument == "--gvisor");
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if argument == "--source" {
            source = Some(arguments.next().with_context(|| format!("--source: {USAGE}"))?.as_str());
        } else if is_gvisor {
            calls.extend((argument != "--gvisor").then_some(argument.as_str()));
        } else if CALLS.split_whitespace().any(|call| call == argument) {
            calls.push(argument.as_str());
        } else {
            bail!("no cases are run for {argument:?}; {USAGE}");
        }
    }
    if is_gvisor {
        return gvisor::main(source.unwrap_or(GVISOR_REPOSITORY), &calls);
    }
    let all = calls.is_empty();
    if all {
        calls.extend(CALLS.split_whitespace());
    }
    let folder = host::target_folder().join("conformance").join(TAG);
    fetch(source.unwrap_or(REPOSITORY), &folder)?;
    build(&folder, &calls)?;
    build_runner()?;
    let cases = cases(&folder, &calls)?;
    let rows = run_all(&folder, &cases)?;
    let table = table(&rows);
    print!("{table}");
    for row in rows.iter().filter(|row| row.verdict != Verdict::Passed) {
        println!("{} {}: {:?}: {}", row.call, row.name, row.verdict, row.why);
    }
    if all { write("docs/linux-calls.md", &table) } else { Ok(()) }
}

/// Builds the program that runs a case as a guest.
fn build_runner() -> Result<()> {
    let arguments = ["build", "--locked", "-p", "afresh-linux", "--example", "once"];
    run(cargo().current_dir(host::repository()).args(arguments))
}

fn runner() -> Command {
    Command::new(host::target_folder().join("debug/examples/once"))
}

fn is_root() -> Result<bool> {
    Ok(output(Command::new("id").arg("-u"))? == "0")
}

/// Puts the sources in `folder`, unless they are there.
fn fetch(source: &str, folder: &Path) -> Result<()> {
    if folder.join("configure.ac").is_file() {
        return Ok(());
    }
    let mut clone = Command::new("git");
    clone.args(["-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1"]);
    run(clone.args(["--branch", TAG, source]).arg(folder))
}

/// Builds the project's library and the cases. Cases that this host cannot build are left out.
fn build(folder: &Path, calls: &[&str]) -> Result<()> {
    let make = |arguments: &[&str]| {
        let mut make = Command::new("make");
        make.current_dir(folder).args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        make
    };
    if !folder.join("lib/libltp.a").is_file() {
        let missing = ["autoconf", "automake", "m4", "make", "pkg-config"];
        let missing: Vec<_> =
            missing.into_iter().filter(|name| crate::command::find(name).is_none()).collect();
        if !missing.is_empty() {
            host::apt_install(&missing)?;
        }
        host::c_compiler()?;
        run(&mut make(&["autotools"]))?;
        run(Command::new("./configure").current_dir(folder).stdout(Stdio::null()))?;
        run(&mut make(&["-C", "lib"]))?;
        run(&mut make(&["-C", "libs"]))?;
    }
    println!("building the cases of {} calls", calls.len());
    for call in calls {
        let cases = format!("testcases/kernel/syscalls/{call}");
        // With `-k` make continues after errors; cases that were not built are not run.
        succeeds(&mut make(&["-k", "-j2", "-C", &cases]));
    }
    Ok(())
}

/// The cases that were built, of those that the project itself runs.
fn cases(folder: &Path, calls: &[&str]) -> Result<Vec<Case>> {
    let mut homes = BTreeMap::new();
    for call in calls {
        let home = folder.join("testcases/kernel/syscalls").join(call);
        for entry in fs::read_dir(&home).with_context(|| format!("{}", home.display()))? {
            homes.insert(entry?.file_name().to_string_lossy().into_owned(), *call);
        }
    }
    let list = ["runtest/syscalls", "runtest/syscalls-ipc"]
        .map(|list| fs::read_to_string(folder.join(list)));
    let list = list.into_iter().collect::<Result<String, _>>()?;
    let case = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        let (name, words): (_, Vec<_>) = (words.next()?, words.collect());
        let call = (*homes.get(words.first()?)?).to_owned();
        Some(Case { call, name, words })
    };
    Ok(list.lines().filter(|line| !line.starts_with('#')).filter_map(case).collect())
}

/// The answers of `work` for each item, as many at a time as there are processors. It gets the
/// number of its thread.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(usize, &T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (next, done, work) = (&next, &done, &work);
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { return };
                    let outcome = work(thread, item);
                    let failed = outcome.is_err();
                    done.lock().unwrap_or_else(|e| e.into_inner()).push((at, outcome));
                    if failed {
                        return;
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Runs the cases.
fn run_all(folder: &Path, cases: &[Case]) -> Result<Vec<Row>> {
    let is_root = is_root()?;
    let rows = in_parallel(cases, |thread, case| one(folder, case, thread, is_root))?;
    let mut rows: Vec<Row> = rows.into_iter().flatten().collect();
    rows.sort_by(|a, b| (&a.call, &a.name).cmp(&(&b.call, &b.name)));
    Ok(rows)
}

/// Runs a case without us and, if it passes so, as a guest.
fn one(folder: &Path, case: &Case, thread: usize, is_root: bool) -> Result<Option<Row>> {
    let home = folder.join("testcases/kernel/syscalls").join(&case.call);
    let program = home.join(&case.words[0]);
    if !program.is_file() {
        return Ok(None);
    }
    let scratch = host::target_folder().join("conformance").join(format!("scratch-{thread}"));
    fs::create_dir_all(&scratch)?;
    fs::set_permissions(&scratch, fs::Permissions::from_mode(0o777))?;
    let path = format!("{}:/usr/bin:/bin", home.display());
    let vars = [("PATH", path.as_str()), ("KCONFIG_SKIP_CHECK", "1"), ("LTP_COLORIZE_OUTPUT", "n")];
    // The same every time, and some of them take long.
    let known = folder.join("native").join(&case.name);
    let native = match fs::read_to_string(&known).ok().as_deref().and_then(Verdict::of) {
        Some(verdict) => verdict,
        None => {
            let mut command = Command::new(&program);
            command.args(&case.words[1..]).env_clear().envs(vars).env("TMPDIR", &scratch);
            if is_root {
                command.uid(NOBODY).gid(NOBODY);
            }
            let (verdict, _) =
                judge(command.current_dir(&scratch), &folder.join(format!("native-{thread}.log")))?;
            fs::create_dir_all(folder.join("native"))?;
            fs::write(known, format!("{verdict:?}"))?;
            verdict
        }
    };
    if native != Verdict::Passed {
        return Ok(None);
    }
    let mut guest = runner();
    guest.arg("--dir").arg(folder).args(["--seconds", &SECONDS.to_string()]);
    for (name, value) in vars.into_iter().chain([("TMPDIR", "/tmp")]) {
        guest.arg("--env").arg(format!("{name}={value}"));
    }
    guest.arg(&program).args(&case.words[1..]);
    let log = folder.join("guest").join(&case.name);
    fs::create_dir_all(folder.join("guest"))?;
    let (verdict, why) = judge(&mut guest, &log)?;
    Ok(Some(Row { call: case.call.clone(), name: case.name.clone(), verdict, why }))
}

/// Runs a command for some seconds at most, its output in `log`; its status, if it ended by itself.
fn run_limited(command: &mut Command, log: &Path, seconds: u64) -> Result<Option<ExitStatus>> {
    let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
    let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() > Duration::from_secs(seconds) {
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // All its child processes.
    succeeds(Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]));
    let _ = child.wait();
    Ok(status)
}

/// Runs a case, whose output is kept in `log`; returns the result, and the reason.
fn judge(command: &mut Command, log: &Path) -> Result<(Verdict, String)> {
    let status = run_limited(command, log, SECONDS + 10)?;
    let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    let line = |words: &[&str]| {
        text.lines().find(|line| words.iter().any(|word| line.contains(word))).map(reason)
    };
    let bad = line(&["TFAIL", "TBROK", "TWARN"]);
    let last = || text.lines().last().map(reason).unwrap_or_default();
    Ok(match status {
        None => (Verdict::Hung, last()),
        Some(status) if status.code() == Some(125) => {
            let late = text.contains("once:") && text.contains("start limit");
            (if late { Verdict::Hung } else { Verdict::Crashed }, last())
        }
        Some(_) if bad.is_some() => (Verdict::Failed, bad.unwrap_or_default()),
        Some(status) if status.signal().is_some() || status.code() > Some(127) => {
            (Verdict::Failed, last())
        }
        Some(_) if text.contains("TPASS") => (Verdict::Passed, String::new()),
        Some(_) => match line(&["TCONF"]) {
            Some(why) => (Verdict::Skipped, why),
            None => (Verdict::Failed, last()),
        },
    })
}

/// The message in a line of output from a case, without its position.
fn reason(line: &str) -> String {
    let said = ["TFAIL", "TBROK", "TWARN", "TCONF"].iter().find_map(|word| line.split_once(word));
    let said = said.map_or(line, |(_, rest)| rest).trim_start_matches([':', ' ']);
    said.chars().filter(|c| !c.is_control() && *c != '|').take(REASON).collect()
}

/// A table by call: how many of the cases pass, and which do not.
fn table(rows: &[Row]) -> String {
    let mut by_call: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|row| by_call.entry(&row.call).or_default().push(row));
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let mut text = format!(
        "Of {} cases that pass on the kernel itself {} pass as guests, {} fail, {} check nothing there, {} do not end in time, and \
         {} end the guest by an engine error.\n\n| call | passed | not passed |\n|---|---|---|\n",
        rows.len(),
        count(Verdict::Passed),
        count(Verdict::Failed),
        count(Verdict::Skipped),
        count(Verdict::Hung),
        count(Verdict::Crashed),
    );
    for (call, rows) in by_call {
        let passed = rows.iter().filter(|row| row.verdict == Verdict::Passed).count();
        let rest = rows.iter().filter(|row| row.verdict != Verdict::Passed);
        let rest: Vec<_> = rest
            .map(|row| match row.verdict {
                Verdict::Skipped => format!("{} (skipped)", row.name),
                Verdict::Hung => format!("{} (not in time)", row.name),
                Verdict::Crashed => format!("{} (error)", row.name),
                _ => row.name.clone(),
            })
            .collect();
        let _ = writeln!(text, "| {call} | {passed} of {} | {} |", rows.len(), rest.join(", "));
    }
    text
}

/// Puts the table into a page, behind the manual text there.
fn write(page: &str, table: &str) -> Result<()> {
    let path: PathBuf = host::repository().join(page);
    let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    let Some((before, _)) = text.split_once(MARK) else {
        bail!("{} has no line {MARK:?}", path.display());
    };
    fs::write(&path, format!("{before}{MARK}\n{table}"))?;
    println!("written to {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_what_was_said_in_either_form() {
        assert_eq!(reason("dup01.c:3: TFAIL: dup() failed: EBADF (9)"), "dup() failed: EBADF (9)");
        assert_eq!(reason("dup01  1  TBROK  :  no file"), "no file");
        assert_eq!(reason("plain"), "plain");
    }

    #[test]
    fn a_case_is_judged_by_what_it_says_and_how_it_ends() {
        let folder = std::env::temp_dir().join(format!("afresh-judge-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let judged = |script: &str| {
            let mut command = Command::new("sh");
            judge(command.args(["-c", script]), &folder.join("log")).expect("it runs").0
        };
        assert_eq!(judged("echo 'a: TPASS: x'"), Verdict::Passed);
        assert_eq!(judged("echo 'a: TPASS: x'; echo 'a: TFAIL: y'; exit 1"), Verdict::Failed);
        assert_eq!(judged("echo 'a: TCONF: no such call'; exit 32"), Verdict::Skipped);
        assert_eq!(judged("echo 'a: TPASS: x'; kill -9 $$"), Verdict::Failed);
        assert_eq!(judged("exit 0"), Verdict::Failed);
        assert_eq!(judged("echo 'once: broken' >&2; exit 125"), Verdict::Crashed);
        let _ = fs::remove_dir_all(&folder);
    }
}
