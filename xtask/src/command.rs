//! External commands: echoed before they run, named when they fail.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::host;

/// Prints the command, runs it with this process's output, and fails unless it succeeds. It reads
/// nothing: a command with a question fails instead of waiting.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    println!("$ {line}");
    let status =
        command.stdin(Stdio::null()).status().with_context(|| format!("cannot run `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// A child process that is killed when this is dropped.
pub(crate) struct OwnedChild(pub(crate) Child);

impl Drop for OwnedChild {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Like [`run`], and passes each line of standard output to `look`, which decides whether to print
/// it.
///
/// If the command prints nothing for the time `silence`, its child processes are ended, and it
/// continues with the next ones: a test that hangs fails its program, not the whole run.
pub(crate) fn run_watched(
    command: &mut Command,
    silence: Duration,
    look: impl FnMut(&str) -> bool,
) -> Result<()> {
    watch(command.stderr(Stdio::inherit()), silence, look)
}

/// Like [`run_watched`] for `cargo test`, and returns also the reports of test programs that a
/// signal ended.
pub(crate) fn run_tests(
    command: &mut Command,
    silence: Duration,
    look: impl FnMut(&str) -> bool,
) -> (Result<()>, Vec<String>) {
    let (errors, stderr) = match std::io::pipe() {
        Ok(pipe) => pipe,
        Err(error) => return (Err(error).context("cannot make a pipe"), Vec::new()),
    };
    let reader = std::thread::spawn(move || {
        let mut signalled = Vec::new();
        let mut errors = BufReader::new(errors);
        let mut bytes = Vec::new();
        while errors.read_until(b'\n', &mut bytes).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&bytes);
            eprint!("{text}");
            signalled.extend(is_signal_report(&text).then(|| text.trim().to_owned()));
            bytes.clear();
        }
        signalled
    });
    let result = watch(command.stderr(stderr), silence, look);
    // The command has the last writing end of the pipe.
    command.stderr(Stdio::inherit());
    (result, reader.join().unwrap_or_default())
}

/// Whether cargo reports with this line that a signal ended a program.
fn is_signal_report(line: &str) -> bool {
    line.trim_start().starts_with("process didn't exit successfully: ")
        && line.contains(" (signal: ")
}

fn watch(
    command: &mut Command,
    silence: Duration,
    mut look: impl FnMut(&str) -> bool,
) -> Result<()> {
    let line = describe(command);
    println!("$ {line}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{line}`"))?;
    let (said, says) = mpsc::channel();
    let reader = child.stdout.take().map(|stdout| {
        std::thread::spawn(move || -> std::io::Result<()> {
            let mut reader = BufReader::new(stdout);
            loop {
                let mut bytes = Vec::new();
                // The receiver reads to the end.
                if reader.read_until(b'\n', &mut bytes)? == 0 || said.send(bytes).is_err() {
                    return Ok(());
                }
            }
        })
    });
    let mut ended = Vec::new();
    loop {
        match says.recv_timeout(silence) {
            Ok(bytes) => {
                // Output of a test need not be UTF-8.
                let text = String::from_utf8_lossy(&bytes);
                if look(text.trim_end_matches(['\n', '\r'])) {
                    print!("{text}");
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                let programs = end_children(child.id());
                let what = programs.join(", ");
                println!("nothing was printed for {} s: ended {what}", silence.as_secs());
                ended.extend(programs);
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.wait().with_context(|| format!("cannot wait for `{line}`"))?;
    if let Some(reader) = reader {
        reader
            .join()
            .unwrap_or_else(|_| Err(std::io::Error::other("the reader panicked")))
            .with_context(|| format!("cannot read what `{line}` prints"))?;
    }
    if !ended.is_empty() {
        bail!("`{line}`: {} said nothing for {} s", ended.join(", "), silence.as_secs());
    }
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// Kills the children of process `parent`, and theirs; returns the names of the former.
fn end_children(parent: u32) -> Vec<String> {
    let mut names = Vec::new();
    for (child, name) in children(parent) {
        end_children(child);
        // It may have ended by itself in the meantime.
        succeeds(Command::new("kill").args(["-KILL", &child.to_string()]));
        names.push(name);
    }
    names
}

/// The processes that `parent` has started, with their names.
fn children(parent: u32) -> Vec<(u32, String)> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let told = |pid: u32| {
        // "pid (name) state parent ..."; a name may contain anything.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        let of: u32 = rest.split_whitespace().nth(1)?.parse().ok()?;
        (of == parent).then(|| (pid, name.to_owned()))
    };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(told).collect()
}

/// Whether the command runs and succeeds; prints nothing. For questions to the host.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The command's standard output, without surrounding white space.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{line}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{line}` failed: {}: {}", output.status, said.trim());
    }
    let text = String::from_utf8(output.stdout)
        .with_context(|| format!("`{line}` printed something that is not UTF-8"))?;
    Ok(text.trim().to_owned())
}

/// The command's standard output; `None` if it did not end before the deadline, in which case it is
/// ended with its child processes.
pub(crate) fn output_until(
    command: &mut Command,
    deadline: Option<Instant>,
) -> Result<Option<String>> {
    let line = describe(command);
    println!("$ {line}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{line}`"))?;
    let mut stdout = child.stdout.take().context("its output is a pipe")?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // The receiver may have stopped at the deadline.
        let _ = sender.send(stdout.read_to_end(&mut bytes).map(|_| bytes));
    });
    let read = match deadline {
        None => receiver.recv().ok(),
        Some(deadline) => {
            receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
        }
    };
    let Some(read) = read else {
        end_children(child.id());
        drop(OwnedChild(child));
        return Ok(None);
    };
    let bytes = read.with_context(|| format!("cannot read what `{line}` prints"))?;
    let status = child.wait().with_context(|| format!("cannot wait for `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The output of `cargo metadata` for the workspace, with further `arguments`.
pub(crate) fn metadata(arguments: &[&str]) -> Result<Value> {
    let mut command = cargo();
    command.current_dir(host::repository()).args(["metadata", "--format-version=1", "--locked"]);
    serde_json::from_str(&output(command.args(arguments))?).context("cargo's metadata is JSON")
}

/// The file that a command of this name would run, from `PATH`.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// The command as a person would type it: variables set for it, program, arguments.
pub(crate) fn describe(command: &Command) -> String {
    let variables = command
        .get_envs()
        .filter_map(|(name, value)| Some(format!("{}={}", name.to_string_lossy(), quote(value?))));
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args()).map(quote);
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

fn quote(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_command_is_named_with_its_arguments_and_variables() {
        let mut command = Command::new("sh");
        command.args(["-c", "exit 3"]).env("WHY", "two words");
        let error = run(&mut command).expect_err("exit 3 is a failure").to_string();
        assert!(error.contains("WHY='two words' sh -c 'exit 3'"), "{error}");
        assert!(error.contains('3'), "{error}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(&mut Command::new("no-such-program-here")).expect_err("it is missing");
        assert!(format!("{error:#}").contains("cannot run `no-such-program-here`"), "{error:#}");
    }

    #[test]
    fn a_watched_command_hands_over_every_line_also_the_last_and_broken_ones_and_still_fails() {
        let mut seen = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", r"printf 'one\n\377two\nend'; exit 4"]);
        let error = run_watched(&mut command, Duration::from_secs(60), |line| {
            seen.push(line.to_owned());
            false
        });
        assert_eq!(seen, ["one", "\u{fffd}two", "end"]);
        assert!(error.expect_err("exit 4").to_string().contains('4'));
    }

    #[test]
    fn a_program_that_a_signal_ended_is_reported_and_a_failed_one_is_not() {
        let mut command = Command::new("sh");
        let report = "process didn't exit successfully: `target/suite` (signal: 9, SIGKILL: kill)";
        command.args(["-c", r#"echo one; echo "  $0" >&2; echo "  $1" >&2; exit 101"#, report]);
        command.arg("process didn't exit successfully: `target/suite` (exit status: 101)");
        let (result, signalled) = run_tests(&mut command, Duration::from_secs(60), |_| false);
        assert!(result.is_err());
        assert_eq!(signalled, [report]);
    }

    #[test]
    fn a_command_that_hangs_is_ended_with_its_children_and_the_next_runs() {
        let mut seen = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; sh -c 'sleep 600; true'; echo two"]);
        let error = run_watched(&mut command, Duration::from_millis(300), |line| {
            seen.push(line.to_owned());
            false
        });
        assert_eq!(seen, ["one", "two"]);
        assert!(error.expect_err("it hung").to_string().contains("said nothing"));
    }

    #[test]
    fn a_command_past_its_deadline_is_ended_with_its_children_and_has_no_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; sh -c 'sleep 600; true'; echo two"]);
        let soon = Instant::now() + Duration::from_millis(200);
        assert!(output_until(&mut command, Some(soon)).expect("it is no failure").is_none());
        let mut command = Command::new("sh");
        command.args(["-c", "echo one"]);
        let later = Instant::now() + Duration::from_secs(600);
        let output = output_until(&mut command, Some(later)).expect("it succeeds");
        assert_eq!(output.as_deref(), Some("one\n"));
        assert!(output_until(Command::new("sh").args(["-c", "exit 3"]), None).is_err());
    }

    #[test]
    fn output_is_trimmed_and_failures_carry_what_was_said() {
        assert_eq!(
            output(Command::new("sh").args(["-c", "echo ' a b '"])).ok().as_deref(),
            Some("a b")
        );
        let error = output(Command::new("sh").args(["-c", "echo lost >&2; exit 1"]));
        assert!(error.expect_err("exit 1").to_string().contains("lost"));
    }
}
