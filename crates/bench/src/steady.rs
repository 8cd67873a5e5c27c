//! The steady state of the write set, counted: faults by `getrusage`, system calls by `strace -c`.
//!
//! Both are taken as the difference between a run of N calls and one of 2 N, so that start-up cancels out.

use std::process::Command;

use afresh_memory::Strategy;
use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Mode, WarmUp};
use anyhow::Context;

use crate::modules::SMALL;

/// The function whose steady state is counted: it dirties 64 pages.
pub const DIRTYING: &str = "scatter64";
/// Calls of the shorter run.
pub const CALLS: u64 = 100_000;

fn minor_faults() -> i64 {
    // SAFETY: all-zero is a valid `rusage`, which the call overwrites.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage.ru_minflt
    }
}

/// What the steady state was seen to cost.
#[derive(Clone, Copy, Debug)]
pub struct Steady {
    /// Calls made.
    pub calls: u64,
    /// Page faults during them.
    pub faults: i64,
    /// System calls during them, where strace could count them.
    pub system_calls: Option<i64>,
}

/// Makes `calls` calls of the small module's `function`, after a warm-up; returns the faults taken.
///
/// # Errors
/// When a call fails.
pub fn run(calls: u64, function: &str) -> anyhow::Result<i64> {
    let engine = Engine::new(EngineConfig { timeouts: false, ..EngineConfig::default() })?;
    let options = GuestOptions {
        mode: Mode::Reset,
        strategy: Strategy::WriteSet(None),
        ..GuestOptions::default()
    };
    let warm = Guest::with_options(&engine, &SMALL.module(), options)?.warm(WarmUp::new())?;
    let entry = warm.entry::<(), ()>(function)?;
    let call = || -> anyhow::Result<()> { Ok(warm.lease()?.invoke(&entry, ())?) };
    for _ in 0..2000 {
        call()?;
    }
    let before = minor_faults();
    for _ in 0..calls {
        call()?;
    }
    Ok(minor_faults() - before)
}

/// Counts the system calls of this program run with `arguments`.
fn strace(program: &std::path::Path, arguments: &[String]) -> anyhow::Result<i64> {
    let output = std::env::temp_dir().join(format!("afresh-strace-{}", std::process::id()));
    let status = Command::new("strace")
        .args(["-f", "-c", "-o"])
        .arg(&output)
        .arg(program)
        .args(arguments)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status();
    let text = std::fs::read_to_string(&output);
    let _ = std::fs::remove_file(&output);
    anyhow::ensure!(status.context("strace")?.success(), "the traced run failed");
    // The last line: "100.00    0.012345           7      1234        56 total".
    let text = text.context("strace's report")?;
    let total = text.lines().rev().find(|l| l.trim_end().ends_with("total")).context("no total")?;
    let numbers: Vec<&str> = total.split_whitespace().collect();
    numbers.get(3).context("no count")?.parse().context("count")
}

/// Takes both counts. `program` is this program and `arguments` make it call [`run`] with the number
/// that follows them.
///
/// # Errors
/// When a call fails. Without strace only the faults are counted.
pub fn measure(program: &std::path::Path, arguments: &[&str]) -> anyhow::Result<Steady> {
    let faults = run(CALLS, DIRTYING)?;
    let count = |calls: u64| {
        let mut all: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
        all.push(calls.to_string());
        strace(program, &all)
    };
    let system_calls = match (count(CALLS), count(2 * CALLS)) {
        (Ok(once), Ok(twice)) => Some(twice - once),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("system calls not counted: {error:#}");
            None
        }
    };
    Ok(Steady { calls: CALLS, faults, system_calls })
}
