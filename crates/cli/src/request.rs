//! Requests to a guest and its answers, shared by every command that calls a guest.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;

use afresh::{Answer, Call, Guest, Kind};
use anyhow::Context;
use clap::Args;
use serde_json::Value;

use crate::guest::{Command, text, text_call};
use crate::output::message;

/// The export that starts a WASI command.
const START: &str = "_start";

/// A call.
#[derive(Debug, Args)]
pub(crate) struct CallArguments {
    /// Exported function to call.
    ///
    /// `_start` runs a WASI command, with the arguments and the standard input of this command.
    #[arg(long, value_name = "F", default_value = START)]
    call: String,
    /// Input of the call, as text, `@FILE`, or `-` for standard input: the bytes for a byte guest,
    /// the standard input of a command or program, or the body of an HTTP request.
    #[arg(long, value_name = "TEXT|@FILE|-")]
    input: Option<OsString>,
    /// Arguments of the function, command or program, or the path of an HTTP request.
    ///
    /// Arguments that begin with a dash follow `--`.
    #[arg(index = 2, allow_negative_numbers = true)]
    arguments: Vec<OsString>,
}

/// A call, once its input has been read.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    arguments: &'a CallArguments,
    input: Option<Vec<u8>>,
}

impl CallArguments {
    /// Reads the input.
    pub(crate) fn read(&self) -> anyhow::Result<Request<'_>> {
        let input = self.input.as_deref().map(read_input).transpose()?;
        Ok(Request { arguments: self, input })
    }
}

impl Request<'_> {
    fn is_command(&self) -> bool {
        self.arguments.call == START
    }

    /// The path and body for an HTTP guest: the argument and the input. None if a function is
    /// named.
    #[cfg(feature = "serve")]
    pub(crate) fn of_http(&self) -> Option<(String, Option<Vec<u8>>)> {
        let path = match &self.arguments.arguments[..] {
            [] => "/".to_owned(),
            [path] => path.to_str().filter(|path| path.starts_with('/'))?.to_owned(),
            _ => return None,
        };
        self.is_command().then(|| (path, self.input.clone()))
    }

    /// The arguments and the input of a WASI command.
    pub(crate) fn command(&self, interactive: bool, shown: bool) -> Command<'_> {
        let mut command = Command { shown, ..Command::default() };
        if self.is_command() {
            command.arguments = &self.arguments.arguments;
            command.input.clone_from(&self.input);
            command.interactive = interactive;
        }
        command
    }

    /// Notes that standard input has bytes which were not read, as no `--input` is given.
    #[cfg(linux_guests)]
    pub(crate) fn note_unread_input(&self) {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileTypeExt;
        let stdin = std::io::stdin();
        let is_pipe_or_file = rustix::io::dup(stdin.as_fd())
            .ok()
            .and_then(|stdin| std::fs::File::from(stdin).metadata().ok())
            .is_some_and(|meta| meta.is_file() || meta.file_type().is_fifo());
        let has_bytes = || rustix::io::ioctl_fionread(stdin.as_fd()).is_ok_and(|bytes| bytes > 0);
        if self.input.is_none() && is_pipe_or_file && has_bytes() {
            message!("afresh: standard input is not read; `--input -` sends it");
        }
    }

    /// The input of a Linux program.
    pub(crate) fn program_input(&self) -> Vec<u8> {
        line(self.input.clone().unwrap_or_default())
    }

    /// The call, as `guest` takes it. One to a server that sends it nothing is said to standard
    /// error: it asks nothing.
    ///
    /// # Errors
    /// For arguments of a function that are no text.
    pub(crate) fn call(&self, guest: &Guest) -> anyhow::Result<Call> {
        let CallArguments { call, arguments, .. } = self.arguments;
        if guest.listens() && self.input.as_ref().is_none_or(Vec::is_empty) {
            message!(
                "The program listens on a port, and the request is empty; give one with --input, as in \
                 --input $'GET / HTTP/1.0\\r\\n\\r\\n'"
            );
        }
        Ok(match (guest.kind(), &self.input) {
            (Kind::Machine, None) => Call::bytes(call, arguments.join(OsStr::new(" ")).as_bytes()),
            (Kind::Program, _) => Call::bytes(call, self.program_input()),
            (Kind::Module | Kind::Component, _) if self.is_command() => {
                Call::text(call, [] as [&str; 0])
            }
            (_, Some(input)) => Call::bytes(call, input.clone()),
            (Kind::Module, None) if arguments.is_empty() && guest.function(call).is_ok() => {
                anyhow::bail!("`{call}` takes bytes: give them with `--input`")
            }
            (_, None) => {
                let texts = arguments.iter().map(|argument| text(argument, "the argument"));
                Call::text(call, texts.collect::<anyhow::Result<Vec<_>>>()?)
            }
        })
    }
}

/// Ends the input of a Linux program with a newline, as most read lines. Empty input stays empty:
/// it is the end of the input.
pub(crate) fn line(mut input: Vec<u8>) -> Vec<u8> {
    if input.last().is_some_and(|&last| last != b'\n') {
        input.push(b'\n');
    }
    input
}

/// Parses a call of `--record`.
pub(crate) fn recorded(text: &str, kind: Kind) -> Call {
    if kind == Kind::Machine {
        return Call::bytes(START, text);
    }
    match (text.find('='), text.find(':')) {
        (Some(at), colon) if colon.is_none_or(|colon| at < colon) => {
            Call::bytes(&text[..at], &text[at + 1..])
        }
        _ => text_call(text),
    }
}

/// Reads the bytes of `--input`.
fn read_input(input: &OsStr) -> anyhow::Result<Vec<u8>> {
    if input == "-" {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).context("reading standard input")?;
        return Ok(bytes);
    }
    match input.as_bytes().strip_prefix(b"@").map(OsStr::from_bytes) {
        Some(path) => {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        }
        None => Ok(input.as_bytes().to_vec()),
    }
}

/// An answer as JSON: an array of results, or a string of bytes.
pub(crate) fn json(answer: &Answer) -> Value {
    match answer {
        Answer::Values(values) => values.iter().map(String::as_str).collect(),
        other => Value::String(other.text()),
    }
}

/// Prints an answer: one result per line, or bytes unchanged.
pub(crate) fn print(answer: &Answer, out: &mut dyn Write) -> std::io::Result<()> {
    match answer {
        Answer::Bytes(bytes) => {
            out.write_all(bytes)?;
            if bytes.last() == Some(&b'\n') { Ok(()) } else { writeln!(out) }
        }
        Answer::Values(values) => values.iter().try_for_each(|value| writeln!(out, "{value}")),
        other => writeln!(out, "{}", other.text()),
    }
}
