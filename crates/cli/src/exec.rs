//! `afresh exec`: a Linux program, of this host or of an OCI image, from its start to its end, with this command's streams,
//! terminal and signals.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use afresh::linux::{
    Destination, End, EndedRun, HostStreams, Program, Resource, RunControl, call_name,
};
use afresh::{Place, Reference};
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
    /// Limits that the program begins with, as those of `ulimit`: `cpu` (seconds), `fsize` (bytes), `nofile` (open descriptors) or
    /// `nproc` (threads of all processes), soft and hard.
    #[arg(long, value_name = "NAME=SOFT[:HARD]", value_parser = ulimit)]
    ulimit: Vec<(Resource, u64, u64)>,
    /// Print the system calls that failed because they are not served, to standard error.
    #[arg(long)]
    report_unserved: bool,
    /// Maximum milliseconds that the program may run; no limit if not given.
    #[arg(long, value_name = "MS")]
    timeout: Option<u64>,
    /// The program, by its path or its name in PATH, and its arguments; or an OCI image (oci://REGISTRY/REPOSITORY[:TAG], a
    /// layout's directory, or a .tar of one) and, after `--`, what replaces its command.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    command: Vec<String>,
}

impl Arguments {
    /// The variables of the program. Those of an image come from its configuration first.
    fn environment(&self, of_image: bool) -> anyhow::Result<Vec<(String, String)>> {
        let own = ENVIRONMENT.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut all: Vec<_> = own.into_iter().filter(|_| !of_image).collect();
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

    fn program(&self, settings: &Settings) -> anyhow::Result<Program> {
        let name = self.command.first().context("no program")?;
        let mut granted = self.dir.clone();
        for path in &self.write_back {
            granted.push(path.to_str().context("--write-back takes a path of UTF-8")?.to_owned());
        }
        let image = image(name);
        let environment = self.environment(image.is_some())?;
        let arguments = match &self.command[1..] {
            [dashes, rest @ ..] if image.is_some() && dashes == "--" => rest,
            rest => rest,
        };
        let shape = Shape::new(arguments, &environment, &granted, true)?;
        let mut program = match image {
            Some(reference) => afresh::image_program(&reference, &settings.open)?,
            None => {
                let absolute = std::path::absolute(find(name)?)?;
                let program = Program::new(&absolute);
                match installation(name, &absolute) {
                    Some(folder) => program.grant(folder),
                    None => program,
                }
            }
        };
        for (resource, soft, hard) in &self.ulimit {
            program = program.limit(*resource, *soft, *hard);
        }
        Ok(shape
            .reach(&self.net)
            .apply(program)
            .memory_limit(self.memory.saturating_mul(1 << 20))
            .storage_limit(self.storage.saturating_mul(1 << 20)))
    }
}

/// A limit, as it is given: `NAME=SOFT[:HARD]`.
fn ulimit(text: &str) -> Result<(Resource, u64, u64), String> {
    let (name, values) = text.split_once('=').ok_or("give it as NAME=SOFT[:HARD]")?;
    let (soft, hard) = values.split_once(':').unwrap_or((values, values));
    let number = |text: &str| match text {
        "unlimited" | "-1" => Ok(u64::MAX),
        text => text.parse().map_err(|_| format!("{text:?} is no number, and not `unlimited`")),
    };
    let (soft, hard) = (number(soft)?, number(hard)?);
    if soft > hard {
        return Err("the soft limit is above the hard one".to_owned());
    }
    Ok((name.parse()?, soft, hard))
}

/// The OCI image that a word names, if it names one and no program.
fn image(word: &str) -> Option<Reference> {
    let reference: Reference = word.parse().ok()?;
    let is_image = match reference.place() {
        Place::Remote(_) => true,
        Place::Directory(path) => path.is_dir(),
        Place::File(path) => {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            [".tar", ".tar.gz", ".tgz"].iter().any(|end| name.ends_with(end)) && path.is_file()
        }
        _ => false,
    };
    is_image.then_some(reference)
}

/// Lists the system calls that failed because they are not served.
fn report(unserved: &BTreeMap<i64, u64>) {
    for (number, count) in unserved {
        let name = call_name(*number).unwrap_or("unknown");
        eprintln!("afresh: not served: {name} (system call {number}), made {count} times");
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

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let program = arguments.program(settings)?;
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
    let EndedRun { end, files_before, files, unserved, .. } = ended?;
    if arguments.report_unserved {
        report(&unserved);
    }
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
