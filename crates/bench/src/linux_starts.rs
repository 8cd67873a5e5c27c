//! `linux`, its starts: `python3 -c 1`, `node -e 0` and `java -version`, each from its start to its
//! end. Some calls are answered inside the guest's process, or all of them by the sentry. The
//! rivals are the same program without afresh, and under Sandlock where python3 has its module.

use std::path::Path;
use std::process::{Command, Stdio};

use afresh_linux::{End, Program};
use anyhow::ensure;

use crate::linux::{NODE, NODE_MEMORY, Python, Server};
use crate::row::{Contestant, Options, Sink, contest};

/// Name of the table.
const TABLE: &str = "linux";
/// The launcher of Java.
const JAVA: &str = "/usr/bin/java";
/// Name of the rival in the rows, and of its module.
const SANDLOCK: &str = "sandlock";
/// Runs the command in its arguments under Sandlock for each line, and writes whether it succeeded.
const SANDLOCK_SCRIPT: &str = "import sys, sandlock
readable = ['/usr', '/lib', '/lib64', '/etc', '/proc', '/dev', sys.prefix, sys.base_prefix]
box = sandlock.Sandbox(fs_readable=readable)
for line in sys.stdin: print(box.run(sys.argv[1:]).success, flush=True)
";

/// A program that is started.
struct Start {
    case: &'static str,
    guest: Program,
    command: Vec<String>,
}

impl Start {
    fn new(case: &'static str, guest: Program, command: &[&str]) -> Self {
        let guest = command[1..].iter().fold(guest, |guest, argument| guest.arg(argument));
        let command = command.iter().map(|part| (*part).to_owned()).collect();
        Self { case, guest, command }
    }

    fn run_guest(&self, inside: bool) -> impl FnMut() -> anyhow::Result<()> + use<> {
        let program = self.guest.clone().answer_inside(inside);
        move || {
            let end = program.run(b"")?.end;
            ensure!(matches!(end, End::Exit(0)), "the guest ended with {end:?}");
            Ok(())
        }
    }

    fn run_natively(&self) -> anyhow::Result<()> {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null());
        let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        ensure!(status.success(), "{} ended with {status}", self.command[0]);
        Ok(())
    }
}

fn run_under(sandlock: &mut Server) -> anyhow::Result<()> {
    let answer = sandlock.answer("\n")?;
    ensure!(answer == "True\n", "Sandlock answered {answer:?}");
    Ok(())
}

/// The contest. `omitted` receives the cases and rivals that the host does not have.
///
/// # Errors
/// The first that any contestant meets.
pub(crate) fn all(
    python: &Python,
    options: &Options,
    sink: &mut Sink<'_>,
    omitted: &mut dyn FnMut(&str),
) -> anyhow::Result<()> {
    let node = Program::new(NODE).memory_limit(NODE_MEMORY);
    let starts = [
        Start::new("starts/python", python.bare(), &[python.path(), "-c", "1"]),
        Start::new("starts/node", node, &[NODE, "-e", "0"]),
        Start::new("starts/java", Program::new(JAVA), &[JAVA, "-version"]),
    ];
    let has_sandlock = python.has("import sandlock");
    if !has_sandlock && options.wants_any(&starts.each_ref().map(|start| start.case), &[SANDLOCK]) {
        omitted(SANDLOCK);
    }
    for start in starts {
        const NAMES: [&str; 4] = ["afresh", "afresh/sentry-only", "native", SANDLOCK];
        if !options.wants_any(&[start.case], &NAMES) {
            continue;
        }
        if !Path::new(&start.command[0]).exists() {
            omitted(start.case);
            continue;
        }
        let mut sandlock = None;
        if has_sandlock && options.wants(start.case, SANDLOCK) {
            let arguments = start.command.iter().map(String::as_str);
            sandlock = Some(python.server_with(SANDLOCK_SCRIPT, arguments)?);
        }
        let mut field = vec![
            Contestant::new(NAMES[0], start.run_guest(true)),
            Contestant::new(NAMES[1], start.run_guest(false)),
            Contestant::new(NAMES[2], || start.run_natively()),
        ];
        if let Some(sandlock) = &mut sandlock {
            field.push(Contestant::new(NAMES[3], || run_under(sandlock)));
        }
        contest(TABLE, start.case, options, field, sink)?;
    }
    Ok(())
}
