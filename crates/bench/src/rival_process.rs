//! A rival in a separate process, which answers each line with a line.
//!
//! A rival that does not answer in time is ended with the processes of its group, and is an error
//! for the caller, so that it cannot stop a table. Errors contain the last line that it wrote to
//! standard error.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process_group, set_parent_process_death_signal, waitid,
};

/// Maximum time of an answer after the first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Time for the end of the process after the end of its input, and for the end of its messages.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);
/// Longest answer and message.
const MAX_LINE: u64 = 1 << 16;
/// Answers that wait for the reader.
const MAX_ANSWERS: usize = 16;

/// The process. Its input is closed in the end. A process that does not end then is killed with its
/// group.
pub(crate) struct RivalProcess {
    child: Child,
    input: Option<ChildStdin>,
    answers: Receiver<String>,
    messages: Messages,
}

/// The standard error of a process.
struct Messages {
    last: Arc<Mutex<String>>,
    /// Is disconnected at the end of the messages.
    end: Receiver<()>,
}

impl Messages {
    fn read(stderr: ChildStderr) -> Self {
        let last = Arc::new(Mutex::new(String::new()));
        let (sender, end) = channel::<()>();
        let kept = Arc::clone(&last);
        std::thread::spawn(move || {
            let _sender = sender;
            read_lines(stderr, |line| {
                if !line.trim().is_empty() {
                    *kept.lock().unwrap_or_else(PoisonError::into_inner) = line.trim().to_owned();
                }
                true
            });
        });
        Self { last, end }
    }

    /// The last line, once the messages have ended or [`END_TIMEOUT`] has passed.
    fn last(&self) -> String {
        // Both results mean that no more messages are waited for.
        let _ = self.end.recv_timeout(END_TIMEOUT);
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Calls `take` with each line until it returns false. A line longer than [`MAX_LINE`] is several.
fn read_lines(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match stream.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if take(String::from_utf8_lossy(&line).trim_end().to_owned()) => {}
            Ok(_) => return,
        }
    }
}

impl RivalProcess {
    /// Starts `command` and sends it `probe`, which must be answered with a time within `timeout`.
    pub(crate) fn start(
        mut command: Command,
        probe: &str,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let name = command.get_program().to_string_lossy().into_owned();
        command.process_group(0);
        // The kill of a table by the report does not reach another group.
        // SAFETY: the closure makes one system call, and allocates only for an error.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let mut child = command.spawn().with_context(|| format!("cannot run {name}"))?;
        let output = child.stdout.take().context("no standard output")?;
        let messages = Messages::read(child.stderr.take().context("no standard error")?);
        let (sender, answers) = sync_channel(MAX_ANSWERS);
        // It ends with the output of the process.
        std::thread::spawn(move || read_lines(output, |line| sender.send(line).is_ok()));
        let mut this = Self { input: child.stdin.take(), child, answers, messages };
        this.answer(probe, timeout)
            .and_then(|line| time(&line))
            .with_context(|| format!("{name} does not run here"))?;
        Ok(this)
    }

    /// Time that the process reports for `request`. An error ends the process.
    pub(crate) fn time(&mut self, request: &str) -> anyhow::Result<Duration> {
        time(&self.answer(request, ANSWER_TIMEOUT)?)
    }

    fn answer(&mut self, request: &str, timeout: Duration) -> anyhow::Result<String> {
        let Some(input) = self.input.as_mut() else { bail!("it ended before") };
        let sent = writeln!(input, "{request}").and_then(|()| input.flush());
        let error = match sent.map(|()| self.answers.recv_timeout(timeout)) {
            Ok(Ok(line)) => return Ok(line),
            Ok(Err(RecvTimeoutError::Timeout)) => {
                // A late answer must not be that of the next request.
                self.kill();
                anyhow::anyhow!("no answer within {} s", timeout.as_secs())
            }
            Ok(Err(RecvTimeoutError::Disconnected)) => {
                anyhow::anyhow!("it ended without an answer")
            }
            Err(error) => anyhow::Error::from(error).context("it ended"),
        };
        self.input = None;
        Err(match self.messages.last() {
            message if message.is_empty() => error,
            message => error.context(message),
        })
    }

    /// Ends the processes of the group.
    fn kill(&self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // An error means that the group has ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for RivalProcess {
    fn drop(&mut self) {
        self.input = None;
        let until = Instant::now() + END_TIMEOUT;
        // WNOWAIT leaves the process to be waited for, so its number belongs to no other group at
        // the kill.
        while !has_ended(&self.child) && Instant::now() < until {
            std::thread::sleep(POLL);
        }
        self.kill();
        let _ = self.child.wait();
    }
}

/// Whether the process has ended. It stays to be waited for.
fn has_ended(child: &Child) -> bool {
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else { return true };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    // The child has ended and was waited for, if this fails.
    waitid(WaitId::Pid(pid), options).map_or(true, |status| status.is_some())
}

/// An answer: nanoseconds.
pub(crate) fn time(answer: &str) -> anyhow::Result<Duration> {
    let nanos = answer.trim().parse().with_context(|| format!("no time: {answer:?}"))?;
    Ok(Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_rival_answers_each_line_with_its_time() {
        let script = "while read line; do echo $((line * 2)); done";
        let mut rival = RivalProcess::start(shell(script), "1", ANSWER_TIMEOUT).unwrap();
        assert_eq!(rival.time("21").unwrap(), Duration::from_nanos(42));
        assert_eq!(rival.time("7").unwrap(), Duration::from_nanos(14));
    }

    #[test]
    fn a_rival_that_ends_or_writes_another_answer_is_refused_with_the_reason() {
        for (script, reason) in [
            ("read line; exit 1", "without an answer"),
            ("read line; echo unknown platform", "no time"),
        ] {
            let Err(error) = RivalProcess::start(shell(script), "1", ANSWER_TIMEOUT) else {
                panic!("{script} was accepted")
            };
            assert!(format!("{error:#}").contains(reason), "{error:#}");
        }
        let absent = Command::new("/nonexistent/rival");
        assert!(RivalProcess::start(absent, "1", ANSWER_TIMEOUT).is_err());
    }

    #[test]
    fn a_silent_rival_times_out() {
        let mut rival =
            RivalProcess::start(shell("read x; echo 1; sleep 60"), "1", ANSWER_TIMEOUT).unwrap();
        let error = rival.answer("1", Duration::from_millis(20)).unwrap_err();
        assert!(error.to_string().contains("no answer within"), "{error}");
        let error = rival.time("1").unwrap_err();
        assert!(error.to_string().contains("it ended before"), "{error}");
    }

    #[test]
    fn a_rival_dies_with_the_thread_that_started_it() {
        let script = "read line; echo $$; sleep 60; true";
        // Its drop is left out, as at the kill of a table.
        let started = || {
            let rival = RivalProcess::start(shell(script), "1", ANSWER_TIMEOUT).unwrap();
            std::mem::ManuallyDrop::new(rival)
        };
        let rival = std::thread::spawn(started).join().unwrap();
        let until = Instant::now() + ANSWER_TIMEOUT;
        while !has_ended(&rival.child) {
            assert!(Instant::now() < until, "it outlives its parent");
            std::thread::sleep(POLL);
        }
        drop(std::mem::ManuallyDrop::into_inner(rival));
    }

    #[test]
    fn an_error_has_the_last_message_of_the_rival() {
        let script = "read line; echo first >&2; echo no platform kvm >&2; echo >&2";
        let Err(error) = RivalProcess::start(shell(script), "1", ANSWER_TIMEOUT) else {
            panic!("it has answered")
        };
        let error = format!("{error:#}");
        assert!(error.contains("no platform kvm: it ended") && !error.contains("first"), "{error}");
    }

    #[test]
    fn a_rival_that_ends_with_its_input_cleans_up_and_is_not_killed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("residue");
        let script = format!(
            "echo > '{0}'; while read line; do echo 1; done; sleep 0.1; rm '{0}'",
            file.display()
        );
        let rival = RivalProcess::start(shell(&script), "1", ANSWER_TIMEOUT).unwrap();
        assert!(file.exists());
        drop(rival);
        assert!(!file.exists(), "it was killed before its end");
    }
}
