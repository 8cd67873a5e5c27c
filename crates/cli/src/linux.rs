//! `afresh linux`: warm an unmodified Linux program, and answer each request from the state in which it first
//! waited for input.

use std::ffi::OsString;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use afresh::linux::{Program, Warm};
use anyhow::{Context, bail};
use clap::Args;
use serde_json::json;

use crate::output::{self, Format};
use crate::verify::DIFFERS;
use crate::{Settings, reason};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// One request, instead of a request a line from standard input. The program gets it with a line's end.
    #[arg(long, value_name = "TEXT")]
    input: Option<String>,
    /// How many times to make that request.
    #[arg(short = 'n', long, default_value_t = 1, requires = "input")]
    repeat: u64,
    /// A request that the program answers before it counts as warm; can be given several times.
    #[arg(long, value_name = "TEXT")]
    warm: Vec<String>,
    /// A directory or file of the host's that the program may read; can be given several times. It may read the
    /// system's programs and libraries anyway, and writes only to files of its own, which go with the call.
    #[arg(long, value_name = "PATH")]
    dir: Vec<PathBuf>,
    /// A variable of the program's environment, which is empty otherwise.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Most milliseconds one call may take.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    timeout: u64,
    /// Most MiB the program may map.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    memory: u64,
    /// After each call, compare every byte and everything else with the warm state; exit code 3 if anything differs.
    #[arg(long)]
    verify: bool,
    /// Print what the calls cost, to standard error.
    #[arg(long)]
    report: bool,
    /// The program, by its path or its name in PATH, and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,
}

/// The file that a shell would run for `name`.
fn find(name: &OsString) -> anyhow::Result<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return std::path::absolute(path).with_context(|| path.display().to_string());
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let mut files = std::env::split_paths(&folders).map(|folder| folder.join(path));
    let found = files.find(|file| file.is_file());
    found.with_context(|| format!("there is no program {} in PATH; give its path", path.display()))
}

impl Arguments {
    fn program(&self) -> anyhow::Result<Program> {
        let mut program = Program::new(find(&self.command[0])?)
            .time_limit(Duration::from_millis(self.timeout))
            .memory_limit(self.memory.saturating_mul(1 << 20));
        for argument in &self.command[1..] {
            program = program.arg(argument);
        }
        for variable in &self.env {
            let Some((name, value)) = variable.split_once('=') else {
                bail!("--env takes NAME=VALUE, not {variable:?}");
            };
            program = program.env(name, value);
        }
        let here = std::env::current_dir().and_then(std::fs::canonicalize).unwrap_or_default();
        for path in &self.dir {
            let granted = path.canonicalize().with_context(|| path.display().to_string())?;
            // Where the arguments' own paths lead, if the program may look there.
            if here.starts_with(&granted) {
                program = program.directory(&here);
            }
            program = program.grant(granted);
        }
        for request in &self.warm {
            program = program.request(format!("{request}\n"));
        }
        Ok(program)
    }
}

/// What the calls came to.
#[derive(Default)]
struct Calls {
    times: Vec<f64>,
    failed: bool,
    different: bool,
}

impl Calls {
    fn make(
        &mut self,
        warm: &mut Warm,
        request: &str,
        arguments: &Arguments,
        format: Format,
    ) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        let started = Instant::now();
        let answer = warm.call(format!("{request}\n").as_bytes());
        let us = started.elapsed().as_secs_f64() * 1e6;
        self.times.push(us);
        self.failed |= answer.is_err();
        match (format, answer) {
            (Format::Text, Ok(answer)) => out.write_all(&answer)?,
            (Format::Json, Ok(answer)) => {
                writeln!(out, "{}", json!({"result": String::from_utf8_lossy(&answer), "us": us}))?;
            }
            (Format::Text, Err(error)) => writeln!(out, "error: {}", reason(error))?,
            (Format::Json, Err(error)) => {
                writeln!(out, "{}", json!({"error": reason(error), "us": us}))?;
            }
        }
        out.flush()?;
        if arguments.verify
            && let Err(error) = warm.verify()
        {
            self.different = true;
            eprintln!("afresh: after this call the program is not as it was: {error}");
        }
        Ok(())
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let mut warm = arguments.program()?.warm()?;
    let took = started.elapsed();
    let mut calls = Calls::default();
    match &arguments.input {
        Some(request) => {
            for _ in 0..arguments.repeat {
                calls.make(&mut warm, request, arguments, settings.output)?;
            }
        }
        None => {
            for line in std::io::stdin().lock().lines() {
                let line = line.context("reading a request")?;
                calls.make(&mut warm, &line, arguments, settings.output)?;
            }
        }
    }
    if arguments.report {
        report(&warm, took, calls.times);
    }
    Ok(match (calls.different, calls.failed) {
        (true, _) => ExitCode::from(DIFFERS),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    })
}

fn report(warm: &Warm, took: Duration, times: Vec<f64>) {
    let stats = warm.stats();
    eprintln!(
        "warm in {took:.1?}; image of {:.1} MiB; the last reset copied {} KiB back",
        stats.resident as f64 / f64::from(1 << 20),
        stats.copied >> 10
    );
    output::times(times);
    for (number, count) in &stats.unserved {
        eprintln!("system call {number} is not served yet; it was made {count} times");
    }
}
