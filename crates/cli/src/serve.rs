//! `afresh serve`: a line in is a request, a line out is its answer, each from the warm state.

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::time::Instant;

use afresh_wasm::Output;
use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::guest::{GuestArguments, Ready};
use crate::output::Format;
use crate::request::{Answer, Request};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// The exported function that handles bytes.
    #[arg(long, value_name = "F", default_value = "handle")]
    call: String,
}

pub(crate) fn run(arguments: &Arguments, format: Format) -> anyhow::Result<ExitCode> {
    let mut ready = arguments.guest.open(Output::Discard)?.ready;
    let mut handle = |line: &str| -> anyhow::Result<Answer> {
        match &mut ready {
            Ready::Module(warm) => {
                let request = Request::bytes(warm, &arguments.call, line.as_bytes().to_vec())?;
                Ok(request.ask(&mut warm.lease()?)?)
            }
            Ready::Component(warm) => {
                let texts = [line.to_owned()];
                let answer = warm.lease()?.call_text(&arguments.call, &texts)?;
                Ok(Answer::Bytes(answer.into_bytes()))
            }
            Ready::Sandbox(sandbox) => Ok(Answer::Bytes(sandbox.run(line.as_bytes())?)),
        }
    };
    let mut out = std::io::stdout().lock();
    let mut all_answered = true;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading a request")?;
        let started = Instant::now();
        // A request that fails is answered with the error: the next one starts from the warm state.
        let answer = handle(&line);
        let us = started.elapsed().as_secs_f64() * 1e6;
        all_answered &= answer.is_ok();
        match (format, &answer) {
            (Format::Text, Ok(answer)) => answer.print(&mut out)?,
            (Format::Text, Err(error)) => writeln!(out, "error: {error:#}")?,
            (Format::Json, Ok(answer)) => {
                writeln!(out, "{}", json!({"result": answer.json(), "us": us}))?;
            }
            (Format::Json, Err(error)) => {
                writeln!(out, "{}", json!({"error": format!("{error:#}"), "us": us}))?;
            }
        }
        out.flush()?;
    }
    Ok(if all_answered { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
