//! `gvisor`: CPython makes system calls of one kind, and runs from its start to its end. The rival
//! is gVisor's `runsc` with its defaults, on each of its platforms that this host runs. The row
//! `native` is CPython without a sandbox. The row `afresh` has the defaults of afresh. In the row
//! `afresh/answer-inside` some calls are answered inside the guest's process.
//!
//! The programs time themselves, so the way to them is not measured. `runsc do` has no network, and
//! an overlay above the host's files that is dropped at the end.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use afresh_linux::Instance;
use anyhow::{Context, ensure};

use crate::linux::Python;
use crate::rival_process::{RivalProcess, time};
use crate::row::{Contestant, Options, Sink, contest};

/// Name of the table.
const TABLE: &str = "gvisor";
/// Makes calls of a kind, and answers their time in nanoseconds.
const SCRIPT: &str = "import os, sys, tempfile, time
scratch = tempfile.TemporaryFile(buffering=0)
file = scratch.fileno()
os.write(file, bytes(4096))
reader, writer = os.pipe()
def pipe():
    os.write(writer, b'x')
    os.read(reader, 1)
kinds = {
    'null': os.getppid,
    'read': lambda: os.pread(file, 64, 0),
    'write': lambda: os.pwrite(file, b'x' * 64, 0),
    'stat': lambda: os.stat(sys.executable),
    'open': lambda: os.close(os.open(sys.executable, os.O_RDONLY)),
    'pipe': pipe,
}
for line in sys.stdin:
    kind, count = line.split()
    call, count = kinds[kind], range(int(count))
    start = time.perf_counter_ns()
    for _ in count: call()
    print(time.perf_counter_ns() - start, flush=True)
";
/// Cases of calls. `open` is with its `close`, and `pipe` writes and reads a byte.
const CALLS: [&str; 6] =
    ["calls/null", "calls/read", "calls/write", "calls/stat", "calls/open", "calls/pipe"];
/// The case of a start to the end.
const START: &str = "start/import";
const PROBE: &str = "null 1";
/// Maximum time from a start to the first answer. On some virtual machines the KVM platform of
/// gVisor never answers.
const START_TIMEOUT: Duration = Duration::from_secs(8);
/// The platforms of gVisor, its default first.
const PLATFORMS: [&str; 3] = ["systrap", "ptrace", "kvm"];
/// Of so many rounds, the case that starts programs has one. A start in gVisor takes half a second.
const START_STRIDE: usize = 3;

/// Where `cargo xtask rivals` installs `runsc`, below its folder.
const PLACE: &str = "debian/usr/bin/runsc";

/// `runsc` with one platform.
struct Sandbox<'a> {
    runsc: &'a Path,
    platform: &'static str,
}

impl Sandbox<'_> {
    fn strategy(&self) -> String {
        format!("gvisor/{}", self.platform)
    }

    fn python(&self, python: &Python, script: &str) -> Command {
        let mut command = bare(Command::new(self.runsc));
        command.args(["--network=none", "--ignore-cgroups"]);
        command.arg(format!("--platform={}", self.platform)).args(["do", "--"]);
        command.arg(python.interpreter().get_program()).args(["-c", script]);
        command
    }
}

/// A command with PATH alone in its environment. A guest has no environment. So CPython does nearly
/// the same work at its start.
fn bare(mut command: Command) -> Command {
    command.env_clear().env("PATH", "/usr/bin:/bin");
    command
}

/// `runsc` of the folder `rivals`, else the one in `PATH`, with its version.
///
/// # Errors
/// When neither runs.
pub fn find(rivals: &Path) -> anyhow::Result<(PathBuf, String)> {
    let installed = rivals.join(PLACE);
    let runsc = if installed.is_file() { installed } else { PathBuf::from("runsc") };
    let output = Command::new(&runsc).arg("--version").stderr(Stdio::null()).output();
    let output = output.context("there is no runsc; `cargo xtask rivals --only gvisor`")?;
    ensure!(output.status.success(), "{} --version: {}", runsc.display(), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    Ok((runsc, version(&text).context("runsc reports no version")?.to_owned()))
}

/// The version in the output of `runsc --version`.
fn version(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("runsc version ")).map(str::trim)
}

/// All cases. `runsc` is gVisor's program, or `None` for afresh and CPython alone; `omitted`
/// receives the platforms that this host does not run, with the reason.
///
/// # Errors
/// When python3 is missing, the host runs no guests, or afresh or CPython fails. A platform of
/// gVisor that fails after its start loses its row.
pub fn all(
    runsc: Option<&Path>,
    options: &Options,
    sink: &mut Sink<'_>,
    omitted: &mut dyn FnMut(&str, &anyhow::Error),
) -> anyhow::Result<()> {
    let python = Python::find()?;
    let mut sandboxes = Vec::new();
    for platform in PLATFORMS {
        let Some(runsc) = runsc else { break };
        let sandbox = Sandbox { runsc, platform };
        if !options.wants_any(&[&CALLS[..], &[START]].concat(), &[&sandbox.strategy()]) {
            continue;
        }
        match RivalProcess::start(sandbox.python(&python, SCRIPT), PROBE, START_TIMEOUT) {
            Ok(process) => sandboxes.push((sandbox, process)),
            Err(error) => omitted(&sandbox.strategy(), &error),
        }
    }
    calls(&python, &mut sandboxes, options, sink)?;
    let sandboxes: Vec<_> = sandboxes.into_iter().map(|(sandbox, _)| sandbox).collect();
    starts(&python, &sandboxes, options, sink)
}

fn instance(python: &Python, is_inside: bool) -> anyhow::Result<Instance> {
    Ok(python.guest(SCRIPT).answer_inside(is_inside).warm()?.instance())
}

fn calls(
    python: &Python,
    sandboxes: &mut [(Sandbox<'_>, RivalProcess)],
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    let mut ours = instance(python, false)?;
    let mut inside = instance(python, true)?;
    let mut command = bare(python.interpreter());
    command.args(["-c", SCRIPT]);
    let mut native = RivalProcess::start(command, PROBE, START_TIMEOUT)?;
    for case in CALLS {
        let kind = case.trim_start_matches("calls/");
        let guest = |guest: &mut Instance, n| -> anyhow::Result<Duration> {
            let answer = guest.call(format!("{kind} {n}\n").as_bytes())?;
            time(std::str::from_utf8(&answer)?)
        };
        let mut field = vec![
            Contestant::timed("afresh", |n| guest(&mut ours, n)),
            Contestant::timed("afresh/answer-inside", |n| guest(&mut inside, n)),
            Contestant::timed("native", |n| native.time(&format!("{kind} {n}"))),
        ];
        for (sandbox, process) in &mut *sandboxes {
            let strategy = sandbox.strategy();
            let rival = Contestant::timed(strategy, |n| process.time(&format!("{kind} {n}")));
            field.push(rival.optional());
        }
        contest(TABLE, case, options, field, sink)?;
    }
    Ok(())
}

/// `import json`, from the start of CPython to its end.
fn starts(
    python: &Python,
    sandboxes: &[Sandbox<'_>],
    options: &Options,
    sink: &mut Sink<'_>,
) -> anyhow::Result<()> {
    const PROGRAM: &str = "import json";
    let run = |mut command: Command| {
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        ensure!(status.success(), "{} ended with {status}", command.get_program().display());
        Ok(())
    };
    let program = python.guest(PROGRAM);
    let mut field = vec![
        Contestant::new("afresh", || {
            let end = program.clone().run(b"")?;
            ensure!(end.messages.is_empty(), "CPython wrote {:?}", end.messages);
            Ok(())
        }),
        Contestant::new("native", || {
            let mut command = bare(python.interpreter());
            command.args(["-c", PROGRAM]);
            run(command)
        }),
    ];
    for sandbox in sandboxes {
        let start = || run(sandbox.python(python, PROGRAM));
        field.push(Contestant::new(sandbox.strategy(), start).optional());
    }
    let few = Options { rounds: options.rounds.div_ceil(START_STRIDE), ..options.clone() };
    contest(TABLE, START, &few, field, sink)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_runsc_is_read() {
        let text = "runsc version 0.0~20240729.0\nspec: 1.2.0\n";
        assert_eq!(version(text), Some("0.0~20240729.0"));
        assert_eq!(version("unknown"), None);
    }

    #[test]
    fn a_sandbox_that_does_not_run_is_left_out_with_the_reason() {
        if let Err(error) = Python::find() {
            eprintln!("SKIPPED: {error:#}");
            return;
        }
        let rivals = tempfile::tempdir().unwrap();
        let fake = rivals.path().join(PLACE);
        std::fs::create_dir_all(fake.parent().unwrap()).unwrap();
        std::fs::copy("/bin/false", &fake).unwrap();
        assert!(find(rivals.path()).unwrap_err().to_string().contains("--version"));
        let options = Options { filter: Some("gvisor/systrap".to_owned()), ..Options::quick() };
        let (mut rows, mut reasons) = (0, Vec::new());
        let mut omitted = |name: &str, error: &anyhow::Error| {
            reasons.push(format!("{name}: {error:#}"));
        };
        all(Some(&fake), &options, &mut |_| rows += 1, &mut omitted).unwrap();
        assert_eq!((rows, reasons.len()), (0, 1));
        assert!(reasons[0].starts_with("gvisor/systrap: ") && reasons[0].contains("ended"));
    }
}
