//! The steady state of the write set, counted: faults by `getrusage`, system calls by `strace`.
//!
//! [`run`] reads its faults right before and right after the calls. Both reads are system calls as
//! well, and the calls that `strace` saw between them, of every thread, are the cost.

use std::process::Command;

use afresh_memory::Strategy;
use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Mode, WarmUp};
use anyhow::Context;

use crate::modules::SMALL_MODULE;

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

/// The observed cost of the steady state.
#[derive(Clone, Copy, Debug)]
pub struct Steady {
    /// Calls made.
    pub calls: u64,
    /// Page faults during them.
    pub faults: i64,
    /// System calls during them, where strace could count them.
    pub system_calls: Option<usize>,
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
    let warm = Guest::with_options(&engine, &SMALL_MODULE.module(), options)?.warm(WarmUp::new())?;
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

/// Counts the system calls between the two questions for faults of this program run with
/// `arguments`.
fn strace(program: &std::path::Path, arguments: &[String]) -> anyhow::Result<usize> {
    let output = std::env::temp_dir().join(format!("afresh-strace-{}", std::process::id()));
    let status = Command::new("strace")
        .args(["-f", "-o"])
        .arg(&output)
        .arg(program)
        .args(arguments)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status();
    let text = std::fs::read_to_string(&output);
    let _ = std::fs::remove_file(&output);
    anyhow::ensure!(status.context("strace")?.success(), "the traced run failed");
    between(&text.context("strace's report")?)
}

/// Counts the lines between the first and the last `getrusage` that are system calls. A line is
/// "29267 munmap(0x7f1b3ff88000, 16384) = 0"; one that another thread interrupts is split in two,
/// and the second says "resumed".
fn between(report: &str) -> anyhow::Result<usize> {
    let lines: Vec<&str> = report.lines().collect();
    let question = |line: &&str| line.contains(" getrusage(");
    let first = lines.iter().position(question).context("the run did not begin")?;
    let last = lines.iter().rposition(question).context("the run did not end")?;
    anyhow::ensure!(first < last, "the run did not end");
    let made = |line: &&&str| {
        !line.contains(" resumed>") && !line.contains(" --- ") && !line.contains(" +++ ")
    };
    Ok(lines[first + 1..last].iter().filter(made).count())
}

/// Takes both counts. `program` is this program and `arguments` make it call [`run`] with the
/// number that follows them.
///
/// # Errors
/// When a call fails. Without strace only the faults are counted.
pub fn measure(program: &std::path::Path, arguments: &[&str]) -> anyhow::Result<Steady> {
    let faults = run(CALLS, DIRTYING)?;
    let mut all: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
    all.push(CALLS.to_string());
    let system_calls = strace(program, &all)
        .inspect_err(|error| eprintln!("system calls not counted: {error:#}"))
        .ok();
    Ok(Steady { calls: CALLS, faults, system_calls })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_calls_of_all_threads_between_the_two_questions_are_counted() {
        let report = "\
7 mmap(NULL, 4096) = 0x7f
7 getrusage(RUSAGE_SELF, {ru_utime={}}) = 0
8 futex(0x1, FUTEX_WAIT <unfinished ...>
7 --- SIGBUS {si_signo=SIGBUS} ---
7 ioctl(5, UFFDIO_WRITEPROTECT, 0x7f) = 0
8 <... futex resumed>) = 0
7 getrusage(RUSAGE_SELF, {ru_utime={}}) = 0
7 exit_group(0) = ?
";
        assert_eq!(between(report).unwrap(), 2);
        assert!(between("7 exit_group(0) = ?\n").is_err());
        assert!(between("7 getrusage(RUSAGE_SELF, {}) = 0\n").is_err());
    }
}
