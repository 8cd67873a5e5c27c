//! `cargo xtask conformance`: the Linux Test Project's cases for system calls, each run as a guest
//! and on this kernel.
//!
//! A separate command: it fetches and builds the project's sources, which takes a quarter of an
//! hour, and nothing of them enters the repository. [`ltp`] has the cases; with `--gvisor` they are
//! those of gVisor, see [`gvisor`]. On this kernel they run as the user `nobody`: as root, some of
//! them set the clock and the kernel's limits of the host.

mod gvisor;
mod gvisor_build;
mod ltp;
mod reasons;

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, run, succeeds};
use crate::host;

const USAGE: &str = "usage: cargo xtask conformance [--source REPOSITORY] [CALL…], or --gvisor [--source REPOSITORY] [BINARY…]";
/// The user for cases if this is root: a guest is not root, either.
const NOBODY: u32 = 65534;
/// Characters of a reason that are kept.
const REASON: usize = 90;
/// The line before the table, which is replaced.
const MARK: &str = "<!-- written by `cargo xtask conformance` -->\n";

/// `cargo xtask conformance`
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let (mut source, mut names, mut is_gvisor) = (None, Vec::new(), false);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--gvisor" => is_gvisor = true,
            "--source" => {
                let value = arguments.next().with_context(|| format!("--source: {USAGE}"))?;
                source = Some(value.as_str());
            }
            option if option.starts_with('-') => bail!("unknown option {option}; {USAGE}"),
            name => names.push(name),
        }
    }
    if is_gvisor { gvisor::main(source, &names) } else { ltp::main(source, &names) }
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

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The answers of `work` for each item, from `threads` threads. It gets the number of
/// its thread.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(usize, &T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
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

/// The message in a line of output from a case, without its position.
fn reason(line: &str) -> String {
    let said = ["TFAIL", "TBROK", "TWARN", "TCONF"].iter().find_map(|word| line.split_once(word));
    let said = said.map_or(line, |(_, rest)| rest).trim_start_matches([':', ' ']);
    said.chars().filter(|c| !c.is_control() && *c != '|').take(REASON).collect()
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
}
