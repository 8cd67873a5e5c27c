//! `afresh exec`: a Linux program from its start to its end, with this command's streams, terminal and signals.

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use afresh::linux::{Destination, End, EndedRun, HostStreams, Program, RunControl};
use afresh_sys::termination::AwaitedSignals;
use anyhow::Context;
use clap::Args;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::linux::{Shape, find, installation};
use crate::{Settings, write_back};

/// Variables that the program has unless `--env` sets them.
const ENVIRONMENT: [(&str, &str); 2] = [
    ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"),
    ("HOME", "/home/user"),
];
/// Signals that are passed on.
const PASSED: [i32; 8] = [1, 2, 3, 10, 12, 15, 18, SIGWINCH];
const SIGWINCH: i32 = 28;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Host directories that the program may read, where they are. It sees its own changes to them, which end with it.
    #[arg(long, value_name = "DIR")]
    dir: Vec<String>,
    /// Directories as with `--dir`, whose changes are written to the host when the program has ended by itself.
    #[arg(long, value_name = "DIR")]
    write_back: Vec<PathBuf>,
    /// Print the files that the program has changed, to standard error: A (added), M (changed) or D (removed), and the path.
    #[arg(long)]
    diff: bool,
    /// Environment variables of the program; by their names alone, with this command's values.
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Servers outside that the program may connect to, as NAME:PORT (`*.NAME` and `*` for any port allowed), or as
    /// NAME:PORT=HOST:PORT for one that is elsewhere; none if not given.
    #[arg(long, value_name = "NAME:PORT[=HOST:PORT]")]
    net: Vec<Destination>,
    /// Maximum MiB of memory that the program may map.
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    memory: u64,
    /// Maximum MiB of files that the program may write.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    storage: u64,
    /// Maximum milliseconds that the program may run; no limit if not given.
    #[arg(long, value_name = "MS")]
    timeout: Option<u64>,
    /// The program, by its path or its name in PATH, and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    command: Vec<String>,
}

impl Arguments {
    fn environment(&self) -> anyhow::Result<Vec<(String, String)>> {
        let mut all: Vec<_> =
            ENVIRONMENT.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        if let Some(term) = std::env::var("TERM").ok().filter(|_| stdin().is_terminal()) {
            all.push(("TERM".to_owned(), term));
        }
        for pair in &self.env {
            all.push(match pair.split_once('=') {
                Some((name, value)) => (name.to_owned(), value.to_owned()),
                None => {
                    let value = std::env::var(pair);
                    let value =
                        value.with_context(|| format!("--env {pair}: it is not set here"))?;
                    (pair.clone(), value)
                }
            });
        }
        Ok(all)
    }

    fn program(&self) -> anyhow::Result<Program> {
        let name = self.command.first().context("no program")?;
        let path = find(name)?;
        let mut granted = self.dir.clone();
        for path in &self.write_back {
            granted.push(path.to_str().context("--write-back takes a path of UTF-8")?.to_owned());
        }
        let shape = Shape::new(&self.command[1..], &self.environment()?, &granted, true)?;
        let absolute = std::path::absolute(&path)?;
        let mut program = Program::new(&absolute);
        if let Some(folder) = installation(name, &absolute) {
            program = program.grant(folder);
        }
        Ok(shape
            .reach(&self.net)
            .apply(program)
            .memory_limit(self.memory.saturating_mul(1 << 20))
            .storage_limit(self.storage.saturating_mul(1 << 20)))
    }
}

/// The host's terminal in raw mode, until this is dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    fn new() -> anyhow::Result<Self> {
        let before = tcgetattr(stdin()).context("reading the settings of the terminal")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Drain, &raw).context("setting the terminal to raw")?;
        Ok(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A terminal that has hung up has no settings to restore.
        let _ = tcsetattr(stdin(), OptionalActions::Drain, &self.0);
    }
}

/// Rows and columns of the terminal on standard input.
fn size() -> (u16, u16) {
    tcgetwinsize(stdin()).map_or((24, 80), |size| (size.ws_row, size.ws_col))
}

/// The streams of this command, those that are terminals, and its signals.
fn streams(control: RunControl) -> anyhow::Result<HostStreams> {
    let input: OwnedFd = stdin().as_fd().try_clone_to_owned().context("standard input")?;
    let streams =
        HostStreams::default().input(input).output(stdout()).messages(stderr()).control(control);
    if !stdin().is_terminal() {
        return Ok(streams);
    }
    let (rows, columns) = size();
    Ok(streams.terminal([true, stdout().is_terminal(), stderr().is_terminal()], rows, columns))
}

pub(crate) fn run(arguments: &Arguments, _: &Settings) -> anyhow::Result<ExitCode> {
    let program = arguments.program()?;
    // Before any other thread starts, so that all have them blocked.
    let signals = AwaitedSignals::block(&PASSED)?;
    let control = RunControl::new().context("making the control of the run")?;
    let passed = control.clone();
    std::thread::Builder::new().name("afresh-signals".to_owned()).spawn(move || {
        while let Some(signal) = signals.wait() {
            if signal == SIGWINCH {
                let (rows, columns) = size();
                passed.resize(rows, columns);
            } else {
                passed.signal(signal);
            }
        }
    })?;
    let mut streams = streams(control)?;
    if let Some(limit) = arguments.timeout {
        streams = streams.time_limit(Duration::from_millis(limit));
    }
    let raw = stdin().is_terminal().then(RawTerminal::new).transpose()?;
    let ended = program.run_to_end(streams);
    drop(raw);
    let EndedRun { end, files_before, files, .. } = ended?;
    if arguments.diff || !arguments.write_back.is_empty() {
        let changes = write_back::changes(&files_before, &files)?;
        if arguments.diff {
            write_back::list(&changes, &mut stderr().lock())?;
        }
        for top in arguments.write_back.iter().filter(|_| matches!(end, End::Exit(_))) {
            write_back::write_back(&top.canonicalize()?, &changes, &files)?;
        }
    }
    match end {
        // The system keeps only the low byte of a code.
        End::Exit(code) => Ok(ExitCode::from(code as u8)),
        End::Signal(signal) => Ok(ExitCode::from((128 + signal) as u8)),
        end => anyhow::bail!("the program {end}"),
    }
}
