//! One sandbox: a session that evaluates code, and runs commands where its guest is a Linux
//! program.
//!
//! Promises: code that is cut short is undone. A command runs to its end or is killed, and is
//! undone if the guest does not report its end then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh::files::Kind as FileKind;
use afresh::snapshot::{SnapshotId, TreeError};
use afresh::{CallCost, CallError, Kind, Session, SessionError, describe_error};
use afresh_interpreter::{
    Answer, AnswerTooLong, CELL, COMMAND, Language, RUN, RenderedValue, Request, Tools, evaluate,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::arguments::{CommandArguments, Encoding};
use crate::collector::{Limits, MAX_ANSWER, OutputCollector};
use crate::results::{
    ChangedFile, CodeResult, CommandResult, DiffResult, DirectoryEntry, Exception, FileContent,
    Listing, StateInfo, StateTree,
};
use crate::state_memory::TreeCharge;

/// Maximum bytes that one call reads from a file.
const MAX_READ: u64 = 1 << 20;
/// Maximum entries of a directory, and changed files, that one call lists.
const MAX_LISTED: usize = 1000;
/// Maximum states in the tree of a sandbox.
const MAX_STATES: usize = 1000;
/// Maximum bytes of input for a command in one request.
const MAX_INPUT_PIECE: usize = 64 << 10;
/// Maximum time of a request to start or feed a command.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time of the request to kill a command, and then of the wait for its end.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a tool has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SandboxError {
    #[error("{}", describe_error(.0))]
    Session(#[from] SessionError),
    #[error("the guest's answer cannot be read: {0}")]
    Damaged(#[from] afresh_interpreter::AnswerError),
    #[error("this server's guest evaluates code only; commands need a Linux program (`--linux`)")]
    NoCommands,
    #[error("the command cannot be started: {0}")]
    NotStarted(String),
    #[error("the command did not end after it was killed, and is undone")]
    NotEnded,
    #[error("the call was cancelled")]
    Cancelled,
    #[error("the sandbox was closed during the call")]
    Closed,
    #[error("{0}")]
    Refused(String),
}

/// How a command ended.
struct CommandEnd {
    /// Its exit status, or the negative number of the signal that ended it.
    status: i32,
    killed: bool,
    /// Bytes of its input that it left.
    unread: usize,
}

/// A sandbox.
pub(crate) struct Sandbox {
    session: Session,
    language: &'static Language,
    /// Of its states and those of its forks. Freed after the session.
    charge: Arc<TreeCharge>,
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

impl Sandbox {
    pub(crate) fn new(
        session: Session,
        language: &'static Language,
        charge: Arc<TreeCharge>,
    ) -> Self {
        Self { session, language, charge }
    }

    /// Sends one request to the interpreter.
    fn request(
        &mut self,
        what: u8,
        source: &str,
        name: &str,
        collector: &mut OutputCollector,
    ) -> Result<Answer, SandboxError> {
        let form = self.language.form;
        let request = Request::new(form, what, &Tools::default(), source, name, None);
        let answer = self.session.with(|lease| {
            let done = evaluate(lease, form.function(), request, std::mem::take(collector));
            *collector = done.listener;
            collector.cost = Some(done.cost);
            Ok::<_, SessionError>(AnswerTooLong::separate(done.answer, MAX_ANSWER)?)
        })?;
        match answer {
            Ok(answer) => Ok(Answer::read(&answer)?),
            Err(AnswerTooLong { bytes, .. }) => Err(SandboxError::Refused(format!(
                "the value has {bytes} bytes, and may have {MAX_ANSWER}; write it to a file"
            ))),
        }
    }

    /// Runs code. Code that is cut short is undone.
    pub(crate) fn run_code(
        &mut self,
        code: &str,
        mut collector: OutputCollector,
    ) -> Result<CodeResult, SandboxError> {
        let start = Instant::now();
        let before = self.session.mark()?;
        let answer = match self.session.guest().kind() {
            // It displays results in several formats.
            Kind::Program => {
                let cell = json!({"code": code}).to_string();
                self.request(CELL, &cell, "<code>", &mut collector)
            }
            _ => self.request(RUN, code, "<code>", &mut collector),
        };
        let displayed = std::mem::take(&mut collector.displayed);
        let mut result = CodeResult {
            stdout: text(&collector.own.stdout),
            stderr: text(&collector.own.stderr),
            dropped_bytes: collector.own.dropped + collector.dropped,
            ..CodeResult::default()
        };
        displayed.into_iter().for_each(|displayed| result.take_displayed(displayed));
        match answer {
            Ok(Answer::Done) => {}
            Ok(Answer::Value(RenderedValue { text, json, .. })) => {
                result.text = Some(text);
                result.json = json;
            }
            Ok(Answer::Threw(thrown)) => {
                let traceback = thrown.traceback();
                let (name, message) = (thrown.name, thrown.message);
                result.error = Some(Exception { name, message, traceback });
            }
            Err(SandboxError::Session(error)) if self.session.failed().is_some() => {
                self.session.rollback(&before)?;
                result.undone = true;
                result.error = Some(cut_short(&error, &collector));
            }
            Err(error) => return Err(error),
        }
        result.milliseconds = milliseconds(start);
        if let Some(cost) = collector.cost {
            result.cpu_milliseconds = cost.cpu.as_secs_f64() * 1000.0;
            result.peak_memory_bytes = cost.peak_memory;
        }
        Ok(result)
    }

    /// Makes a request about commands, whose answer is JSON. The limits of the call do not end it,
    /// because a command that is late must still be killed.
    fn command_request(
        &mut self,
        request: &Value,
        timeout: Duration,
        collector: &mut OutputCollector,
    ) -> Result<Value, SandboxError> {
        let deadline = Instant::now().checked_add(timeout);
        collector.limits = Limits { deadline, timeout, ..Limits::default() };
        let answer = self.request(COMMAND, &request.to_string(), "<command>", collector);
        collector.limits = Limits::default();
        match answer? {
            Answer::Value(value) => Ok(value.json.unwrap_or_default()),
            Answer::Done => Ok(Value::Null),
            Answer::Threw(thrown) => Err(SandboxError::NotStarted(thrown.message)),
        }
    }

    /// Runs a command to its end, or to its limits.
    pub(crate) fn run_command(
        &mut self,
        arguments: &CommandArguments,
        mut collector: OutputCollector,
    ) -> Result<CommandResult, SandboxError> {
        if self.session.guest().kind() != Kind::Program {
            return Err(SandboxError::NoCommands);
        }
        let start = Instant::now();
        // A command is killed at its limit.
        let limits = std::mem::take(&mut collector.limits);
        collector.expect_command();
        let before = self.session.mark()?;
        let (ran, cost) = CallCost::of(|| self.run_until(arguments, &limits, &mut collector));
        // Where it failed half-way, it may still run.
        if self.session.failed().is_some() || ran.is_err() {
            self.session.rollback(&before)?;
        }
        let CommandEnd { status, killed, unread } = ran?;
        Ok(CommandResult {
            stdout: text(&collector.own.stdout),
            stderr: text(&collector.own.stderr),
            dropped_bytes: collector.own.dropped,
            unread_stdin_bytes: unread,
            exit_code: if status < 0 { 128 - status } else { status },
            killed,
            milliseconds: milliseconds(start),
            cpu_milliseconds: cost.cpu.as_secs_f64() * 1000.0,
            peak_memory_bytes: cost.peak_memory,
        })
    }

    /// Starts a command and waits for its end.
    fn run_until(
        &mut self,
        arguments: &CommandArguments,
        limits: &Limits,
        collector: &mut OutputCollector,
    ) -> Result<CommandEnd, SandboxError> {
        let request = json!({
            "op": "start",
            "cmd": "/bin/sh",
            "args": ["-c", arguments.command],
            "envs": arguments.env,
            "cwd": arguments.cwd,
            "stdin": arguments.stdin.is_some(),
        });
        let number = self.command_request(&request, REQUEST_TIMEOUT, collector)?;
        let number = number.as_u64().and_then(|number| u32::try_from(number).ok());
        let number = number.ok_or_else(|| {
            SandboxError::NotStarted("the guest named no process number".to_owned())
        })?;
        collector.begin_command(number);
        let mut unread = 0;
        if let Some(input) = &arguments.stdin {
            unread = self.feed(number, input.as_bytes(), limits, collector)?;
        }
        let mut killed: Option<Instant> = None;
        loop {
            if let Some(status) = collector.status {
                return Ok(CommandEnd { status, killed: killed.is_some(), unread });
            }
            // The guest reports the end, and may be hostile.
            if killed.is_some_and(|since| since.elapsed() > KILL_TIMEOUT) {
                return Err(SandboxError::NotEnded);
            }
            if killed.is_none() && (limits.is_cancelled() || limits.is_late()) {
                killed = Some(Instant::now());
                let kill = json!({"op": "signal", "pid": number, "signal": 9});
                self.command_request(&kill, KILL_TIMEOUT, collector)?;
                continue;
            }
            self.proceed(killed.is_some(), collector)?;
        }
    }

    /// Writes a command's input as fast as it reads, until its end or its limits, and closes it.
    /// Returns the number of bytes that are left.
    fn feed(
        &mut self,
        number: u32,
        mut input: &[u8],
        limits: &Limits,
        collector: &mut OutputCollector,
    ) -> Result<usize, SandboxError> {
        while !input.is_empty() && collector.status.is_none() {
            if limits.is_cancelled() || limits.is_late() {
                return Ok(input.len());
            }
            let piece = &input[..input.len().min(MAX_INPUT_PIECE)];
            let feed = json!({"op": "feed", "pid": number, "data": STANDARD.encode(piece)});
            // Null and false: the command has closed its input, or has ended.
            let Some(fed) = self.command_request(&feed, REQUEST_TIMEOUT, collector)?.as_u64()
            else {
                break;
            };
            let fed = usize::try_from(fed).ok().filter(|fed| *fed <= piece.len());
            let fed = fed.ok_or_else(|| {
                SandboxError::Refused("the guest took more input than it got".to_owned())
            })?;
            input = &input[fed..];
            if fed < piece.len() {
                self.proceed(false, collector)?;
            }
        }
        let close = json!({"op": "close", "pid": number});
        self.command_request(&close, REQUEST_TIMEOUT, collector)?;
        Ok(input.len())
    }

    /// Lets commands run for a slice of time, after waiting for the next event.
    #[cfg(linux_guests)]
    fn proceed(
        &mut self,
        killed: bool,
        collector: &mut OutputCollector,
    ) -> Result<(), SandboxError> {
        /// Maximum wait before cancellations and time limits are looked at again.
        const POLL_INTERVAL: Duration = Duration::from_millis(20);
        let due = self.session.due();
        if due.is_none() && killed {
            return Err(SandboxError::NotEnded);
        }
        std::thread::sleep(due.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL));
        if due.is_none_or(|due| due > POLL_INTERVAL) {
            return Ok(());
        }
        let proceeded = self.session.with(|lease| {
            let (done, listener) = afresh_interpreter::proceed(lease, std::mem::take(collector));
            *collector = listener;
            Ok::<_, SessionError>(done?)
        });
        Ok(proceeded?)
    }

    /// Without Linux programs there are no commands.
    #[cfg(not(linux_guests))]
    fn proceed(&mut self, _: bool, _: &mut OutputCollector) -> Result<(), SandboxError> {
        Err(SandboxError::NoCommands)
    }

    pub(crate) fn read_file(
        &mut self,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<FileContent, SandboxError> {
        let files = self.session.files()?;
        let stat = files.stat(path)?;
        let tree = files.tree();
        let refused =
            |source| SandboxError::Session(SessionError::Files { path: path.to_owned(), source });
        let node = tree.find(path).map_err(refused)?;
        let rest = stat.size.saturating_sub(offset);
        let length = rest.min(length.unwrap_or(MAX_READ)).min(MAX_READ);
        let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
        let mut filled = 0;
        while filled < bytes.len() {
            let read = tree.read(node, offset + filled as u64, &mut bytes[filled..]);
            match read.map_err(refused)? {
                0 => break,
                read => filled += read,
            }
        }
        bytes.truncate(filled);
        let end = offset + filled as u64;
        let (encoding, content) = match String::from_utf8(bytes) {
            Ok(content) => ("utf8", content),
            Err(other) => ("base64", STANDARD.encode(other.as_bytes())),
        };
        Ok(FileContent {
            path: path.to_owned(),
            encoding,
            content,
            size: stat.size,
            next_offset: (end < stat.size && filled > 0).then_some(end),
        })
    }

    pub(crate) fn write_file(
        &mut self,
        path: &str,
        content: String,
        encoding: Encoding,
    ) -> Result<usize, SandboxError> {
        let bytes = match encoding {
            Encoding::Utf8 => content.into_bytes(),
            Encoding::Base64 => STANDARD
                .decode(content)
                .map_err(|error| SandboxError::Refused(format!("`content`: {error}")))?,
        };
        self.session.files()?.write(path, &bytes)?;
        Ok(bytes.len())
    }

    pub(crate) fn list_files(&mut self, path: &str) -> Result<Listing, SandboxError> {
        let files = self.session.files()?;
        let tree = files.tree();
        let listed = files.list(path)?;
        let omitted = listed.len().saturating_sub(MAX_LISTED);
        let entry = |entry: &afresh::files::DirEntry| DirectoryEntry {
            name: text(&entry.name),
            kind: kind(entry.kind),
            size: tree.stat(entry.node).map_or(0, |stat| stat.size),
        };
        Ok(Listing { entries: listed.iter().take(MAX_LISTED).map(entry).collect(), omitted })
    }

    /// The state that an agent names.
    fn find(&self, text: &str) -> Result<SnapshotId, SandboxError> {
        let unknown = || {
            SandboxError::Refused(format!("no state is named {text:?}; `tree` lists all states"))
        };
        if text.is_empty() {
            return Err(unknown());
        }
        match self.session.find_state(text) {
            Err(SessionError::Tree(TreeError::NoSuchName { .. })) => Err(unknown()),
            found => Ok(found?),
        }
    }

    pub(crate) fn checkpoint(&mut self, name: &str) -> Result<SnapshotId, SandboxError> {
        if name.is_empty() {
            return Err(SandboxError::Refused("a checkpoint needs a name".to_owned()));
        }
        self.check_states()?;
        let id = self.session.checkpoint(name)?;
        if let Err(refused) = self.charge.measure(&self.session) {
            self.session.drop_checkpoint(id)?;
            // The other states were charged before.
            let _ = self.charge.measure(&self.session);
            return Err(refused);
        }
        Ok(id)
    }

    fn check_states(&self) -> Result<(), SandboxError> {
        if self.session.tree().len() >= MAX_STATES {
            return Err(SandboxError::Refused(format!(
                "a sandbox and its forks have at most {MAX_STATES} states; close some of them"
            )));
        }
        Ok(())
    }

    pub(crate) fn rollback(&mut self, to: &str) -> Result<SnapshotId, SandboxError> {
        let state = self.find(to)?;
        Ok(self.session.rollback(state)?)
    }

    pub(crate) fn fork(&mut self, count: usize) -> Result<Vec<Self>, SandboxError> {
        self.check_states()?;
        let before = self.charge.bytes();
        let forks = self.session.fork(count)?;
        if let Err(refused) = self.charge.measure(&self.session) {
            // The state that the forks would have shared is that of the running sandbox alone.
            self.charge.set(before);
            return Err(refused);
        }
        let sandbox = |fork| Self::new(fork, self.language, Arc::clone(&self.charge));
        Ok(forks.into_iter().map(sandbox).collect())
    }

    pub(crate) fn diff(
        &mut self,
        from: &str,
        to: Option<&str>,
    ) -> Result<DiffResult, SandboxError> {
        let from = self.find(from)?;
        let Some(to) = to else {
            let here = self.session.mark()?;
            return self.difference(from, here.id());
        };
        self.difference(from, self.find(to)?)
    }

    fn difference(&self, from: SnapshotId, to: SnapshotId) -> Result<DiffResult, SandboxError> {
        use afresh::files::Change;
        let files = self.session.diff_files(from, to)?;
        let pages = self.session.diff(from, to)?.pages;
        let change = |change: &afresh::files::FileChange| ChangedFile {
            path: text(&change.path),
            change: match change.change {
                Change::Added => "added",
                Change::Removed => "removed",
                _ => "changed",
            },
            bytes: change.bytes,
        };
        let omitted = files.changes.len().saturating_sub(MAX_LISTED);
        let files = files.changes.iter().take(MAX_LISTED).map(change).collect();
        Ok(DiffResult { files, omitted, pages })
    }

    pub(crate) fn tree(&self) -> StateTree {
        let state = |state: afresh::snapshot::SnapshotInfo| StateInfo {
            id: state.id.to_string(),
            name: state.name,
            parent: state.parent.map(|parent| parent.to_string()),
            own_bytes: state.own_bytes,
        };
        let states = self.session.checkpoints().into_iter().map(state).collect();
        let at = self.session.last_checkpoint().unwrap_or_else(|| self.session.at());
        StateTree { at: at.to_string(), states }
    }
}

fn kind(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Directory => "directory",
        FileKind::Link => "link",
        FileKind::Device => "device",
        _ => "file",
    }
}

/// The exception of code that was cut short.
fn cut_short(error: &SessionError, collector: &OutputCollector) -> Exception {
    let limits = &collector.limits;
    let (name, message) = match error {
        _ if limits.is_cancelled() => ("Cancelled", "the client cancelled the call".to_owned()),
        _ if limits.is_late() => {
            let message = format!(
                "the code ran longer than its time limit of {} s; `timeout` sets another one",
                limits.timeout.as_secs_f64()
            );
            ("TimeoutError", message)
        }
        SessionError::Call(CallError::Timeout { .. } | CallError::CpuTime { .. }) => {
            ("TimeoutError", describe_error(error))
        }
        SessionError::Call(CallError::Guest { source, .. }) => {
            ("GuestError", format!("the code ended the interpreter: {}", describe_error(&**source)))
        }
        _ => ("GuestError", describe_error(error)),
    };
    let traceback = format!("{name}: {message}");
    Exception { name: name.to_owned(), message, traceback }
}

#[cfg(test)]
mod tests {
    use afresh::{Call, Guest, Options};

    use super::*;
    use crate::state_memory::StateMemory;

    /// A guest that writes 1 MiB in each call.
    fn guest() -> Guest {
        let wasm = wat::parse_str(
            r#"(module (memory (export "memory") 32) (func (export "fill") (param i32)
                (memory.fill (i32.const 65536) (local.get 0) (i32.const 1048576))))"#,
        );
        Guest::from_bytes("fill", &wasm.unwrap(), &Options::new()).unwrap()
    }

    /// Fills memory with another byte.
    fn fill(sandbox: &mut Sandbox, byte: u8) {
        sandbox.session.invoke(&Call::text("fill", [byte.to_string()])).unwrap();
    }

    #[test]
    fn the_states_of_all_sandboxes_share_a_bounded_memory() {
        let guest = guest();
        let language = Language::named("javascript").unwrap();
        let memory = StateMemory::new(5 << 19);
        let start = || Sandbox::new(guest.session().unwrap(), language, memory.charge());
        let (mut one, mut other) = (start(), start());
        fill(&mut one, 1);
        let first = one.checkpoint("first").unwrap();
        // A fork shares the state.
        let fork = one.fork(1).unwrap();
        fill(&mut other, 2);
        other.checkpoint("second").unwrap();
        fill(&mut one, 3);
        for _ in 0..3 {
            let refused = one.checkpoint("third").unwrap_err().to_string();
            assert!(refused.contains(" MiB, and may take 2 MiB"), "{refused}");
            assert_eq!(one.session.tree().len(), 2, "the refused state is dropped");
        }
        fill(&mut other, 4);
        assert!(other.fork(1).is_err());
        // The memory of refused forks is not charged.
        start().checkpoint("small").unwrap();
        // States are freed with the last sandbox of their tree.
        one.rollback(&first.to_string()).unwrap();
        drop(fork);
        drop(one);
        other.checkpoint("fourth").unwrap();
    }
}
