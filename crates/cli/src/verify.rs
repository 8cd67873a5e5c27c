//! `afresh verify`: many calls, and before each a check that the last one left no trace.
//!
//! A verification without a successful call proves nothing and fails.

use std::process::ExitCode;

use afresh::Verification;
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::guest::GuestArguments;
use crate::output::{Format, say, steps};
use crate::request::CallArguments;

/// Exit code of a verification that found a difference, or proved nothing.
pub(crate) const DIFFERS: u8 = 3;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of calls.
    #[arg(short = 'n', long, default_value_t = 100)]
    calls: u64,
    #[command(flatten)]
    call: CallArguments,
    #[command(flatten)]
    guest: GuestArguments,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let request = arguments.call.read()?;
    #[cfg(feature = "serve")]
    if let Some(asked) = crate::handler::HandlerRequest::open(&arguments.guest, &request, settings)?
    {
        let bar = steps("verifying", arguments.calls);
        let found = asked.verify(arguments.calls, &mut |done| bar.set_position(done))?;
        bar.finish_and_clear();
        return show(&found, settings.output);
    }
    let options = arguments.guest.options(settings, request.command(false, false))?;
    let guest = arguments.guest.open(&options)?;
    let call = request.call(&guest)?;
    let bar = steps("verifying", arguments.calls);
    let found = guest.verify(&call, arguments.calls, &mut |done| bar.set_position(done))?;
    bar.finish_and_clear();
    show(&found, settings.output)
}

/// Prints the findings. The exit code is 0 if every call started from the warm state.
fn show(found: &Verification, format: Format) -> anyhow::Result<ExitCode> {
    let clean = found.is_pristine();
    let nothing = found.proves_nothing();
    // Neither true nor false without a proof.
    let pristine = (!clean || nothing.is_none()).then_some(clean);
    let clones = found.clones.map(|clones| clones.to_string());
    match format {
        Format::Json => say!(
            "{}",
            json!({
                "calls": found.calls, "failed_calls": found.failed_calls,
                "bytes_differ": found.bytes_differ, "items_differ": found.items_differ,
                "answers_differ": found.answers_differ,
                "most_bytes_changed": found.most_bytes_changed,
                "clones": clones, "repeating": found.repeating, "items": found.items, "unseen": found.unseen,
                "proves_nothing": nothing, "pristine": pristine,
            })
        )?,
        Format::Text => {
            let changed = found.most_bytes_changed;
            let changed = changed.map(|bytes| format!(", each changing up to {bytes} bytes"));
            say!(
                "{} calls ({} failed){}: {} bytes differ, {} other items differ",
                found.calls,
                found.failed_calls,
                changed.unwrap_or_default(),
                found.bytes_differ,
                found.items_differ,
            )?;
            say!("{} answers differ from those of a new instance", found.answers_differ)?;
            for item in &found.items {
                say!("differs: {item}")?;
            }
            for unseen in &found.unseen {
                say!("not compared: {unseen}")?;
            }
            if let Some(clones) = clones {
                say!("{clones}")?;
            }
            for value in &found.repeating {
                say!("equal in two clones: {value}")?;
            }
            if let Some(nothing) = &nothing {
                say!("no proof: {nothing}")?;
            }
        }
    }
    Ok(if pristine == Some(true) { ExitCode::SUCCESS } else { ExitCode::from(DIFFERS) })
}
