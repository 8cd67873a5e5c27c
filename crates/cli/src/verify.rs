//! `afresh verify`: many calls, and after each the proof that nothing of it is left.
//!
//! Before every call the pooled instance is compared with the warm state, byte by byte and global by
//! global; the call's answer is compared with that of an instance that has never run anything. Two clones
//! are watched for drawing the same random numbers.

use std::process::ExitCode;

use afresh_vm::Sandbox;
use afresh_wasm::{CallError, Lease, Output, Warm, WarmComponent};
use clap::Args;
use serde_json::json;

use crate::guest::{GuestArguments, Ready};
use crate::output::{Format, say, steps};
use crate::request::{CallArguments, Request};

/// Exit code of a verification that found a difference.
pub(crate) const DIFFERS: u8 = 3;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// How many calls.
    #[arg(short = 'n', long, default_value_t = 100)]
    calls: u64,
    #[command(flatten)]
    call: CallArguments,
}

/// What was found.
#[derive(Debug, Default)]
struct Findings {
    calls: u64,
    failed_calls: u64,
    bytes_differ: usize,
    items_differ: usize,
    answers_differ: u64,
    changed_bytes: usize,
    clones: Option<&'static str>,
}

/// The answer as text; a trap is an answer too.
fn ask(request: &Request, lease: &mut Lease<'_>) -> Result<String, String> {
    match request.ask(lease) {
        Err(CallError::Trap { trap, .. }) => Err(format!("trap: {trap}")),
        Err(error) => Err(error.to_string()),
        Ok(answer) => Ok(answer.text()),
    }
}

/// How clones stand to randomness: the same call twice in one clone, and once in another.
fn clones(warm: &Warm, request: &Request) -> anyhow::Result<&'static str> {
    let (mut one, mut other) = (warm.lease()?, warm.lease()?);
    let first = ask(request, &mut one);
    let second = ask(request, &mut one);
    let cloned = ask(request, &mut other);
    Ok(if first != cloned {
        "clones answer differently: they draw their own random numbers"
    } else if first == second {
        "the answer never changes: nothing random in it"
    } else if warm.report().reseeds {
        "clones answer alike though they take fresh entropy: the answer depends on state, not on chance"
    } else {
        "clones answer alike while one clone's answers change: if these are random numbers, every clone \
         draws the same ones; export afresh_reseed to give each its own"
    })
}

fn verify_module(arguments: &Arguments, warm: &Warm) -> anyhow::Result<Findings> {
    let request = &arguments.call.request(warm)?;
    let mut findings = Findings::default();
    let bar = steps("verifying", arguments.calls);
    // Fresh entropy is a difference on purpose; it is drawn after the comparison.
    for _ in 0..arguments.calls {
        let (bytes, items) = warm.differences()?;
        findings.bytes_differ += bytes;
        findings.items_differ += items;
        let mut pooled = warm.lease()?;
        let answer = ask(request, &mut pooled);
        findings.changed_bytes = findings.changed_bytes.max(pooled.differences()?.0);
        // Held while the pooled one is out, so that it is another instance; discarded, so that the next
        // comparison is again with one that has never run anything.
        let mut untouched = warm.lease_new()?;
        let expected = ask(request, &mut untouched);
        untouched.discard();
        findings.failed_calls += u64::from(answer.is_err());
        findings.answers_differ += u64::from(answer != expected);
        findings.calls += 1;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (bytes, items) = warm.differences()?;
    findings.bytes_differ += bytes;
    findings.items_differ += items;
    findings.clones = Some(clones(warm, request)?);
    Ok(findings)
}

fn verify_component(arguments: &Arguments, warm: &WarmComponent) -> anyhow::Result<Findings> {
    let mut findings = Findings::default();
    let mut first = None;
    for _ in 0..arguments.calls {
        let mut lease = warm.lease()?;
        findings.bytes_differ += lease.differences()?;
        let answer = lease.call_text(&arguments.call.call, &arguments.call.arguments);
        findings.failed_calls += u64::from(answer.is_err());
        findings.changed_bytes = findings.changed_bytes.max(lease.differences()?);
        let answer = answer.map_err(|e| e.to_string());
        findings.answers_differ += u64::from(*first.get_or_insert(answer.clone()) != answer);
        findings.calls += 1;
    }
    Ok(findings)
}

fn verify_sandbox(arguments: &Arguments, sandbox: &mut Sandbox) -> anyhow::Result<Findings> {
    let input = arguments.call.bytes()?;
    let mut findings = Findings::default();
    let mut first = None;
    for _ in 0..arguments.calls {
        let answer = sandbox.run(&input).map_err(|e| e.to_string());
        if let Err(error) = sandbox.verify() {
            eprintln!("afresh: {error}");
            findings.items_differ += 1;
        }
        findings.failed_calls += u64::from(answer.is_err());
        findings.answers_differ += u64::from(*first.get_or_insert(answer.clone()) != answer);
        findings.calls += 1;
    }
    Ok(findings)
}

pub(crate) fn run(arguments: &Arguments, format: Format) -> anyhow::Result<ExitCode> {
    let findings = match arguments.guest.open(Output::Discard)?.ready {
        Ready::Module(warm) => verify_module(arguments, &warm)?,
        Ready::Component(warm) => verify_component(arguments, &warm)?,
        Ready::Sandbox(mut sandbox) => verify_sandbox(arguments, &mut sandbox)?,
    };
    let clean = findings.bytes_differ == 0 && findings.items_differ == 0;
    match format {
        Format::Json => say!(
            "{}",
            json!({
                "calls": findings.calls, "failed_calls": findings.failed_calls,
                "bytes_differ": findings.bytes_differ, "items_differ": findings.items_differ,
                "answers_differ": findings.answers_differ, "most_bytes_changed": findings.changed_bytes,
                "clones": findings.clones, "pristine": clean,
            })
        )?,
        Format::Text => {
            say!(
                "{} calls ({} failed), each changing up to {} bytes: {} bytes differ, {} globals, tables or \
                 registers differ",
                findings.calls,
                findings.failed_calls,
                findings.changed_bytes,
                findings.bytes_differ,
                findings.items_differ,
            )?;
            say!(
                "{} answers differ from those of an instance that had never run anything",
                findings.answers_differ
            )?;
            if let Some(clones) = findings.clones {
                say!("{clones}")?;
            }
        }
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(DIFFERS) })
}
