//! `afresh exec`: a Linux program, of this host or of an OCI image, from its start to its end, with
//! this command's streams, terminal and signals.

mod access_hints;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, IsTerminal, stderr, stdin, stdout};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use afresh::linux::{
    CallerSettings, End, EndedRun, HostProgram, HostStreams, Program, Resource, RunControl, Warm,
    WarmError, call_name, find_in_path,
};
use afresh::{CallCost, Guest, Place, Reference, SaveOptions};
use afresh_sys::termination::AwaitedSignals;
use anyhow::{Context, anyhow};
use clap::Args;
use rustix::process::{getegid, geteuid, getpgrp};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr};

use access_hints::AccessHints;

use crate::guest::variable;
#[cfg(feature = "seal")]
use crate::keys::ProtectArguments;
use crate::linux::Shape;
use crate::net::NetArguments;
use crate::output::{counted, message};
use crate::{Settings, snapshot, units, write_back};

/// The search path of the program, unless `--env` sets it.
const SEARCH_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";
/// The home directories of user 0 and of others.
const HOMES: [&str; 2] = ["/root", "/home/user"];
/// Signals that are passed on.
const PASSED: [i32; 8] = [1, 2, 3, 10, 12, 15, 18, SIGWINCH];
const SIGWINCH: i32 = 28;
/// Stops a program whose state is saved.
const SIGTSTP: i32 = 20;
/// Exit statuses for a program that did not start, as those of shells.
const NOT_FOUND: u8 = 127;
const NOT_LOADED: u8 = 126;
/// Exit status for a program that did not end in time, as that of `timeout`.
const TIMED_OUT: u8 = 124;
/// As for every other error of the command line.
const WRONG_USAGE: u8 = 2;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Grant a host directory, read-only, at the same path.
    ///
    /// The program sees its own changes to it, which end with the program. May be repeated.
    #[arg(long, value_name = "DIR")]
    dir: Vec<OsString>,
    /// Grant a host directory as with `--dir`, and write its changes to the host when the program
    /// has exited.
    ///
    /// May be repeated.
    #[arg(long, value_name = "DIR")]
    write_back: Vec<PathBuf>,
    /// Directory that the program starts in [default: this one, or that of an image].
    ///
    /// A directory that the program does not have is made: it is empty, except for what is granted
    /// below it.
    #[arg(short = 'w', long, value_name = "DIR")]
    cwd: Option<PathBuf>,
    /// Print each changed file to standard error: A (added), M (modified) or D (deleted), and its
    /// path.
    #[arg(long)]
    diff: bool,
    /// Set an environment variable of the program; NAME alone takes the value of this command's.
    ///
    /// May be repeated.
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,
    #[command(flatten)]
    net: NetArguments,
    /// Pass connections to a port of this host on to a port of the program, on loopback
    /// (127.0.0.1) alone.
    ///
    /// HOST-PORT 0 takes a free port, which is printed on standard error. Connections are reset
    /// while the program does not listen on its port. May be repeated.
    #[arg(short = 'p', long, value_name = "HOST-PORT:PORT", value_parser = published)]
    publish: Vec<(u16, u16)>,
    /// Maximum memory that the program maps, in MiB, or with a unit, as `2GiB`.
    #[arg(long, value_name = "MIB", default_value_t = 4096, value_parser = units::mebibytes)]
    memory: u64,
    /// Maximum data that the program writes to files, in MiB, or with a unit, as `2GiB`.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = units::mebibytes)]
    storage: u64,
    /// Set a limit that the program begins with: `cpu` (seconds), `fsize` (bytes), `nofile` (open
    /// descriptors) or `nproc` (threads of all processes).
    ///
    /// The soft and the hard limit, as those of `ulimit`. May be repeated.
    #[arg(long, value_name = "NAME=SOFT[:HARD]", value_parser = ulimit)]
    ulimit: Vec<(Resource, u64, u64)>,
    /// User and group of the program, as numbers [default: those of this command, or those of a
    /// saved state].
    ///
    /// All granted files belong to them. User 0 passes permission bits, gives files to others and
    /// changes to other users, in the guest alone. A UID alone is the GID as well.
    #[arg(long, value_name = "UID[:GID]", value_parser = user)]
    user: Option<[u32; 2]>,
    /// Save the state in which the program ends or stops: PLACE[@NAME].
    ///
    /// The program stops when it has read all of its standard input and waits for more. A server
    /// stops at the end of `--timeout`, or when this command gets SIGTSTP. `afresh run PLACE@NAME`
    /// continues it. The state of a program that has exited has its files:
    /// `afresh exec PLACE@NAME -- COMMAND` runs a command with them.
    #[arg(long, value_name = "PLACE[@NAME]")]
    save: Option<Reference>,
    #[cfg(feature = "seal")]
    #[command(flatten)]
    protect: ProtectArguments,
    /// List the system calls that failed because they are not served, on standard error.
    #[arg(long)]
    report_unserved: bool,
    /// Print the cost of the run in one line on standard error: wall-clock time, CPU time and the
    /// peak of the memory that the processes mapped together.
    #[arg(long)]
    cost: bool,
    /// Maximum run time, in milliseconds, or with a unit, as `30s` [default: no limit].
    ///
    /// The exit status is 124 if the program does not end in time.
    #[arg(long, value_name = "MS", value_parser = units::milliseconds)]
    timeout: Option<u64>,
    /// A program, by its path or its name in PATH, and its arguments; or an OCI image or the state
    /// of `--save`, and a command.
    ///
    /// An image is oci://REGISTRY/REPOSITORY[:TAG], the directory of a layout, or a .tar of one. In
    /// this directory it is written as ./NAME: a name alone is looked up in PATH only. A command
    /// after `--` replaces that of the image. The state of a program that has exited needs a
    /// command, which gets its files.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,
}

impl Arguments {
    /// Saves the state of a program that has ended.
    fn save_state(
        &self,
        to: &Reference,
        state: Option<Warm>,
        end: &End,
        settings: &Settings,
    ) -> anyhow::Result<()> {
        let state = state.with_context(|| format!("{to} is not saved: the program {end}"))?;
        let options = SaveOptions::new();
        #[cfg(feature = "seal")]
        let options = self.protect.apply(options)?;
        let started = Instant::now();
        let saved = Guest::from_program(state, &settings.open)?.save(to, &options)?;
        snapshot::note(to, &saved, started);
        Ok(())
    }

    /// The variables that `--env` sets, and `TERM` on a terminal.
    fn environment(&self) -> anyhow::Result<Vec<(OsString, OsString)>> {
        let mut all = Vec::new();
        if let Some(term) = std::env::var_os("TERM").filter(|_| stdin().is_terminal()) {
            all.push(("TERM".into(), term));
        }
        for pair in &self.env {
            all.push(match variable(pair) {
                Some(pair) => pair,
                None => {
                    let value = std::env::var_os(pair);
                    let value = value
                        .with_context(|| format!("--env {}: it is not set here", pair.display()))?;
                    (pair.clone(), value)
                }
            });
        }
        Ok(all)
    }

    /// The directory that a program starts in; that of its image, or the root, if `None`.
    fn start_directory(&self, is_of_host: bool) -> anyhow::Result<Option<PathBuf>> {
        // The program has its own files there.
        let is_served = |path: &Path| ["/proc", "/dev", "/sys"].iter().any(|t| path.starts_with(t));
        match &self.cwd {
            None if is_of_host => {
                let here = Path::new(".").canonicalize().ok();
                Ok(here.filter(|here| here.is_absolute() && !is_served(here)))
            }
            None => Ok(None),
            Some(dir) if is_of_host => {
                let path = dir.canonicalize().or_else(|_| std::path::absolute(dir));
                path.map(Some).with_context(|| format!("--cwd {}", dir.display()))
            }
            Some(dir) => {
                anyhow::ensure!(
                    dir.is_absolute(),
                    "--cwd {}: a directory of an image is an absolute path",
                    dir.display()
                );
                Ok(Some(dir.clone()))
            }
        }
    }

    /// The program, and hints if it fails.
    fn program(&self, settings: &Settings) -> anyhow::Result<(Program, AccessHints)> {
        let name = self.command.first().context("no program")?;
        let mut granted = self.dir.clone();
        granted.extend(self.write_back.iter().map(|path| path.clone().into_os_string()));
        let stored = name.to_str().and_then(stored);
        let host = match stored {
            Some(_) => None,
            None => Some(HostProgram::find(name).context(NotFound)?),
        };
        let environment = self.environment()?;
        let arguments = match &self.command[1..] {
            [dashes, rest @ ..] if host.is_none() && dashes == "--" => rest,
            rest => rest,
        };
        let shape = Shape::new(arguments, &environment, &granted, true)?.reach(&self.net)?;
        let (memory, storage) =
            (self.memory.saturating_mul(1 << 20), self.storage.saturating_mul(1 << 20));
        let limited = move |program: Program| program.memory_limit(memory).storage_limit(storage);
        let mut program = match (&host, stored) {
            (Some(host), _) => host.program(name),
            (None, Some(reference)) => {
                let grants = shape.clone();
                let options = settings.open.clone();
                let options = options.linux(move |program| limited(grants.apply(program)));
                afresh::stored_program(&reference, &options)?
            }
            (None, None) => unreachable!("a program is of this host, or stored"),
        };
        // A state keeps its own.
        let caller = || [geteuid().as_raw(), getegid().as_raw()];
        let [user, group] = self.user.or(program.user_of_state()).unwrap_or_else(caller);
        program = program.user(user, group);
        if host.is_some() {
            program = program.inherit(CallerSettings::of_this_process());
        }
        // An image has its own.
        if program.variable("PATH").is_none() {
            let search_path = host
                .as_ref()
                .map_or_else(|| SEARCH_PATH.to_owned(), |host| host.search_path(SEARCH_PATH));
            let [of_root, of_others] = HOMES;
            let home = if user == 0 { of_root } else { of_others };
            program = program.env("PATH", search_path).env("HOME", home);
        }
        for (resource, soft, hard) in &self.ulimit {
            program = program.limit(*resource, *soft, *hard);
        }
        let start = self.start_directory(host.is_some())?;
        let hints = match host {
            Some(_) => AccessHints::new(arguments, &shape, start.as_deref()),
            None => AccessHints::default(),
        };
        let program = limited(shape.apply(program));
        let program = match start {
            Some(start) if self.cwd.is_some() => program.make_directory(start),
            Some(start) => program.prefer_directory(start),
            None => program,
        };
        Ok((program, hints))
    }
}

/// A program of the host was not found.
#[derive(Debug)]
struct NotFound;

impl std::fmt::Display for NotFound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cannot run the program")
    }
}

/// Whether a word begins as options do.
fn is_option(word: &OsStr) -> bool {
    word.as_encoded_bytes().starts_with(b"-")
}

/// A user and a group, as they are given: `UID[:GID]`.
fn user(text: &str) -> Result<[u32; 2], String> {
    let (user, group) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| match text.parse() {
        Ok(u32::MAX) | Err(_) => Err(format!("{text:?} is no number of a user or group")),
        Ok(number) => Ok(number),
    };
    Ok([number(user)?, number(group)?])
}

/// A port of this host and one of the program, as they are given: `HOST-PORT:PORT`.
fn published(text: &str) -> Result<(u16, u16), String> {
    let (host, own) = text.split_once(':').ok_or("give it as HOST-PORT:PORT, as in 8080:8000")?;
    let number =
        |text: &str| text.parse::<u16>().map_err(|_| format!("{text:?} is no number of a port"));
    match (number(host)?, number(own)?) {
        (_, 0) => Err("a program listens on no port 0".to_owned()),
        ports => Ok(ports),
    }
}

/// The way out of a host port that cannot be taken.
fn publish_advice(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::AddrInUse => "; give another HOST-PORT, or 0 for a free one",
        ErrorKind::PermissionDenied => "; give a HOST-PORT above 1023, or 0 for a free one",
        _ => "",
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

/// The OCI image or the saved state that a word names, if it names one and no program. The name of
/// a program alone, as `make`, names none: the present directory may be a stranger's, and have an
/// image of that name.
fn stored(word: &str) -> Option<Reference> {
    let reference: Reference = word.parse().ok()?;
    let is_path = word.contains('/') || [".", ".."].contains(&word);
    let is_state = || reference.explicit_name().is_some() && find_in_path(word).is_none();
    let is_stored = match reference.place() {
        Place::Directory(_) | Place::File(_) if !is_path && !is_state() => false,
        Place::Remote(_) => true,
        Place::Directory(path) => path.is_dir(),
        Place::File(path) => is_archive(path) && path.is_file(),
        _ => false,
    };
    is_stored.then_some(reference)
}

/// Whether the name of a file is that of an archive.
fn is_archive(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    [".tar", ".tar.gz", ".tgz", ".afresh"].iter().any(|end| name.ends_with(end))
}

/// Lists the system calls that failed because they are not served.
fn report(unserved: &BTreeMap<i64, u64>) {
    for (number, count) in unserved {
        let name = call_name(*number).unwrap_or("unknown");
        let times = counted(*count, "time");
        message!("afresh: not served: {name} (system call {number}), made {times}");
    }
}

/// Prints the cost of the run.
fn report_cost(cost: &CallCost) {
    let (wall, cpu) = (cost.wall.as_secs_f64(), cost.cpu.as_secs_f64());
    let peak = cost.peak_memory.map_or_else(
        || "unknown".to_owned(),
        |bytes| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    );
    message!("afresh: cost: {wall:.3} s wall-clock, {cpu:.3} s CPU, {peak} peak of mapped memory");
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

/// Whether this process may read its terminal and change the settings. A job in the background that
/// does either is stopped.
fn is_in_foreground() -> bool {
    tcgetpgrp(stdin()).is_ok_and(|group| group == getpgrp())
}

/// The streams of this command, those that are terminals, and its signals. A job in the background
/// has no input.
fn streams(control: RunControl) -> anyhow::Result<HostStreams> {
    let streams = HostStreams::default().output(stdout()).messages(stderr()).control(control);
    if stdin().is_terminal() && !is_in_foreground() {
        return Ok(streams);
    }
    let input: OwnedFd = stdin().as_fd().try_clone_to_owned().context("standard input")?;
    let streams = streams.input(input);
    if !stdin().is_terminal() {
        return Ok(streams);
    }
    let (rows, columns) = size();
    Ok(streams.terminal([true, stdout().is_terminal(), stderr().is_terminal()], rows, columns))
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    if let Some(option) = arguments.command.first().filter(|word| is_option(word)) {
        let option = option.display();
        message!(
            "error: unexpected argument `{option}` in place of a program\n\n\
             `afresh exec --help` lists the options. A program of this name needs its path, as in \
             `./{option}`"
        );
        return Ok(ExitCode::from(WRONG_USAGE));
    }
    if let Some(to) = &arguments.save {
        Guest::check_target(to)?;
    }
    for top in &arguments.write_back {
        let about = std::fs::metadata(top);
        let about = about.with_context(|| format!("--write-back {}", top.display()))?;
        anyhow::ensure!(
            about.is_dir(),
            "--write-back {}: it is no directory; give the one that contains it",
            top.display()
        );
    }
    let (program, hints) = match arguments.program(settings) {
        Ok(program) => program,
        Err(error) if error.is::<NotFound>() => {
            let status = refuse(&error, NOT_FOUND);
            arguments.command.first().into_iter().for_each(|word| suggest_image(word));
            return Ok(status);
        }
        Err(error) => return Err(error),
    };
    // Before any other thread starts, so that all have them blocked.
    let stops = arguments.save.iter().map(|_| SIGTSTP);
    let signals = AwaitedSignals::block(&PASSED.into_iter().chain(stops).collect::<Vec<_>>())?;
    let control = RunControl::new().context("making the control of the run")?;
    let passed = control.clone();
    std::thread::Builder::new().name("afresh-signals".to_owned()).spawn(move || {
        while let Some(signal) = signals.wait() {
            match signal {
                SIGWINCH => {
                    let (rows, columns) = size();
                    passed.resize(rows, columns);
                }
                SIGTSTP => passed.stop(),
                signal => passed.signal(signal),
            }
        }
    })?;
    let mut streams = streams(control)?;
    if let Some(limit) = arguments.timeout {
        streams = streams.time_limit(Duration::from_millis(limit));
    }
    if arguments.save.is_some() {
        streams = streams.keep_state();
    }
    for (at, (host_port, port)) in arguments.publish.iter().enumerate() {
        let mut before = arguments.publish[..at].iter();
        if *host_port != 0 && before.any(|(other, _)| other == host_port) {
            return Err(anyhow!("--publish {host_port}:{port}: {host_port} is already published"));
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, *host_port));
        let address = streams.publish(address, *port).map_err(|error| {
            let what = format!("--publish {host_port}:{port}: cannot take {address}");
            let advice = publish_advice(error.kind());
            anyhow!(error).context(format!("{what}{advice}"))
        })?;
        if *host_port == 0 {
            message!("afresh: {address} leads to port {port} of the program");
        }
    }
    let raw = (stdin().is_terminal() && is_in_foreground()).then(RawTerminal::new).transpose()?;
    let (ended, cost) = CallCost::of(|| program.run_to_end(streams));
    drop(raw);
    let EndedRun { end, files_before, files, unserved, failed_lookups, state, .. } = match ended {
        Ok(ended) => ended,
        Err(error) => {
            let status = match &error {
                WarmError::NotFound(_) => NOT_FOUND,
                WarmError::Unloadable { .. } | WarmError::Script { .. } => NOT_LOADED,
                _ => return Err(error.into()),
            };
            return Ok(refuse(&error.into(), status));
        }
    };
    if arguments.report_unserved {
        report(&unserved);
    }
    if arguments.cost {
        report_cost(&cost);
    }
    let tops = arguments.write_back.iter().map(|top| top.canonicalize());
    let tops = tops.collect::<Result<Vec<_>, _>>()?;
    let changes = match arguments.diff || !tops.is_empty() {
        true => write_back::changes(&files_before, &files)?,
        false => Vec::new(),
    };
    // Saved before the host's files change, to which the state refers.
    let saved = match (&arguments.save, write_back::first_moved(&tops, &changes, &files)) {
        (None, _) => Ok(()),
        // The state has no content of its own for it.
        (Some(to), Some(path)) => Err(anyhow!(
            "{to} is not saved: the program has moved a file of the host to {path}, and \
             `--write-back` moves it there; save the state of another run"
        )),
        (Some(to), None) => arguments.save_state(to, state, &end, settings),
    };
    if arguments.diff {
        // The changes are written also where the list has no reader.
        let _ = write_back::list(&changes, &mut stderr().lock());
    }
    let mut written = Ok(());
    match end {
        _ if tops.is_empty() => {}
        End::Exit(_) => {
            written = write_back::write_back(&tops, &changes, (&files_before, &files));
        }
        _ => match write_back::count(&tops, &changes) {
            0 => {}
            lost => {
                let verb = if lost == 1 { "is" } else { "are" };
                let lost = counted(lost as u64, "change");
                message!("afresh: --write-back: {lost} {verb} not written: the program {end}");
            }
        },
    }
    // Each is done also where the other has failed.
    if let (Err(_), Err(error)) = (&written, &saved) {
        message!("error: {error:#}");
    }
    written?;
    saved?;
    if !matches!(end, End::Exit(0) | End::Stopped) {
        hints.print(&files_before, &failed_lookups);
    }
    match end {
        // The system keeps only the low byte of a code.
        End::Exit(code) => Ok(ExitCode::from(code as u8)),
        End::Signal(signal) => Ok(ExitCode::from((128 + signal) as u8)),
        End::Stopped => Ok(ExitCode::SUCCESS),
        End::Late => {
            let limit = Duration::from_millis(arguments.timeout.unwrap_or_default());
            message!(
                "afresh: the program took longer than its limit of {limit:?}; `--timeout MS` sets \
                 another one"
            );
            Ok(ExitCode::from(TIMED_OUT))
        }
        end => anyhow::bail!("the program {end}"),
    }
}

/// Prints the error of a program that did not start.
fn refuse(error: &anyhow::Error, status: u8) -> ExitCode {
    message!("afresh: {}", crate::describe(error));
    ExitCode::from(status)
}

/// Prints how an image is written, for the name of one that is no program.
fn suggest_image(word: &OsStr) {
    let is_name =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-:".contains(&byte);
    if let Some(name) = word.to_str().filter(|name| name.bytes().all(is_name)) {
        message!("help: an image is written as `oci://docker.io/library/{name}`");
    }
}
