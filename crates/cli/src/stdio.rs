//! `afresh serve --stdio`: one request per input line, one answer per output line, each from the
//! warm state.

use std::ffi::OsStr;
use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::time::Instant;

use afresh::{Answer, Kind};
use anyhow::Context;
use serde_json::json;

use crate::output::Format;
use crate::serve::Arguments;
use crate::{Settings, reason, request};

pub(crate) fn run(
    guest: &str,
    arguments: &Arguments,
    settings: &Settings,
) -> anyhow::Result<ExitCode> {
    let (how, guest) = (&arguments.how, OsStr::new(guest));
    let guest = how.open(guest, &how.options(guest, settings, arguments.command())?)?;
    // A missing function is an error of this command, not of every request.
    let function = guest.function(&arguments.call)?;
    let mut out = std::io::stdout().lock();
    let mut all_answered = true;
    for line in std::io::stdin().lock().split(b'\n') {
        let mut line = line.context("reading a request")?;
        let started = Instant::now();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        if guest.kind() == Kind::Program {
            line.push(b'\n');
        }
        // A failed request is answered with the error. The next one starts from the warm state.
        let answer = guest.call(&function, &line).map(Answer::Bytes);
        let us = started.elapsed().as_secs_f64() * 1e6;
        all_answered &= answer.is_ok();
        match (settings.output, answer) {
            (Format::Text, Ok(answer)) => request::print(&answer, &mut out)?,
            (Format::Text, Err(error)) => writeln!(out, "error: {}", reason(error))?,
            (Format::Json, Ok(answer)) => {
                writeln!(out, "{}", json!({"result": request::json(&answer), "us": us}))?;
            }
            (Format::Json, Err(error)) => {
                writeln!(out, "{}", json!({"error": reason(error), "us": us}))?;
            }
        }
        out.flush()?;
    }
    Ok(if all_answered { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
