//! A rival in a separate process, which answers each line with a line.
//!
//! A rival that does not answer in time is ended with the processes of its group, and is an error
//! for the caller, so that it cannot stop a table.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process_group};

/// Maximum time of an answer after the first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The process. The end of its input ends it.
pub(crate) struct RivalProcess {
    child: Child,
    input: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl RivalProcess {
    /// Starts `command` and sends it `probe`, which must be answered with a time within `timeout`.
    pub(crate) fn start(
        mut command: Command,
        probe: &str,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child =
            command.process_group(0).spawn().with_context(|| format!("cannot run {name}"))?;
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        let (sender, answers) = channel();
        // It ends with the output of the process.
        std::thread::spawn(move || {
            for line in output.lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut this = Self { input: child.stdin.take(), child, answers };
        this.answer(probe, timeout)
            .and_then(|line| time(&line))
            .with_context(|| format!("{name} does not run here"))?;
        Ok(this)
    }

    /// Time that the process reports for `request`.
    pub(crate) fn time(&mut self, request: &str) -> anyhow::Result<Duration> {
        time(&self.answer(request, ANSWER_TIMEOUT)?)
    }

    fn answer(&mut self, request: &str, timeout: Duration) -> anyhow::Result<String> {
        let input = self.input.as_mut().context("the input is closed")?;
        writeln!(input, "{request}").and_then(|()| input.flush()).context("it ended")?;
        match self.answers.recv_timeout(timeout) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Disconnected) => bail!("it ended without an answer"),
            Err(RecvTimeoutError::Timeout) => bail!("no answer within {} s", timeout.as_secs()),
        }
    }
}

impl Drop for RivalProcess {
    fn drop(&mut self) {
        self.input = None;
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // An error means that the group has ended. Its leader is not waited for yet, so the
            // number belongs to no other group.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
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
    }
}
