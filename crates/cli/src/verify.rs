//! `afresh verify`: many calls, and after each the proof that nothing of it is left.
//!
//! Before every call the pooled instance is compared with the warm state, byte by byte and global by
//! global; the call's answer is compared with that of an instance that has never run anything. Two clones
//! are watched for drawing the same random numbers.

use std::process::ExitCode;

use afresh_wasm::{CallError, Lease, Output, Val, Warm, parse_arguments, show_value};
use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::guest::{GuestArguments, Kind};
use crate::output::{Format, steps};
use crate::run::read_input;

/// Exit code of a verification that found a difference.
pub(crate) const DIFFERS: u8 = 3;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    guest: GuestArguments,
    /// The exported function to call.
    #[arg(long, value_name = "F", default_value = "_start")]
    call: String,
    /// Bytes for a guest that handles bytes: text, `@FILE`, or `-`.
    #[arg(long, value_name = "TEXT|@FILE|-")]
    input: Option<String>,
    /// How many calls.
    #[arg(short = 'n', long, default_value_t = 100)]
    calls: u64,
    /// Arguments of the function.
    #[arg(allow_hyphen_values = true, trailing_var_arg = true)]
    arguments: Vec<String>,
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

/// A call that can be repeated.
struct Probe<'a> {
    arguments: &'a Arguments,
    values: Vec<Val>,
    bytes: Option<(afresh_wasm::BytesEntry, Vec<u8>)>,
}

impl Probe<'_> {
    /// The answer as text; a trap is an answer too.
    fn ask(&self, lease: &mut Lease<'_>) -> Result<String, String> {
        let shown = |result: Result<String, CallError>| match result {
            Err(CallError::Trap { trap, .. }) => Err(format!("trap: {trap}")),
            Err(error) => Err(error.to_string()),
            Ok(text) => Ok(text),
        };
        shown(match &self.bytes {
            Some((entry, input)) => lease
                .call_bytes(entry, input)
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
            None => lease
                .call(&self.arguments.call, &self.values)
                .map(|values| values.iter().map(show_value).collect::<Vec<_>>().join(" ")),
        })
    }
}

/// How clones stand to randomness: the same call twice in one clone, and once in another.
fn clones(warm: &Warm, probe: &Probe<'_>) -> anyhow::Result<&'static str> {
    let (mut one, mut other) = (warm.lease()?, warm.lease()?);
    let first = probe.ask(&mut one);
    let second = probe.ask(&mut one);
    let cloned = probe.ask(&mut other);
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

fn verify_module(arguments: &Arguments, wasm: &[u8]) -> anyhow::Result<Findings> {
    let warm = arguments.guest.warm(wasm, Output::Discard)?;
    let input = arguments.input.as_deref().map(read_input).transpose()?;
    let probe = match input {
        Some(input) => Probe {
            arguments,
            values: Vec::new(),
            bytes: Some((warm.bytes_entry(&arguments.call)?, input)),
        },
        None => {
            let ty = warm.function_type(&arguments.call)?;
            let values = parse_arguments(&ty, &arguments.arguments)
                .with_context(|| format!("calling {}", arguments.call))?;
            Probe { arguments, values, bytes: None }
        }
    };
    let mut findings = Findings::default();
    let bar = steps("verifying", arguments.calls);
    // Fresh entropy is a difference on purpose; it is drawn after the comparison.
    for _ in 0..arguments.calls {
        let (bytes, items) = warm.differences()?;
        findings.bytes_differ += bytes;
        findings.items_differ += items;
        let mut pooled = warm.lease()?;
        let answer = probe.ask(&mut pooled);
        findings.changed_bytes = findings.changed_bytes.max(pooled.differences()?.0);
        // Held while the pooled one is out, so that it is another instance; discarded, so that the next
        // comparison is again with one that has never run anything.
        let mut untouched = warm.lease_new()?;
        let expected = probe.ask(&mut untouched);
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
    findings.clones = Some(clones(&warm, &probe)?);
    Ok(findings)
}

fn verify_component(arguments: &Arguments, wasm: &[u8]) -> anyhow::Result<Findings> {
    let warm = arguments.guest.component(wasm, Output::Discard)?;
    let mut findings = Findings::default();
    let mut first = None;
    for _ in 0..arguments.calls {
        let mut lease = warm.lease()?;
        findings.bytes_differ += lease.differences()?;
        let answer = lease.call_text(&arguments.call, &arguments.arguments);
        findings.failed_calls += u64::from(answer.is_err());
        findings.changed_bytes = findings.changed_bytes.max(lease.differences()?);
        let answer = answer.map_err(|e| e.to_string());
        findings.answers_differ += u64::from(*first.get_or_insert(answer.clone()) != answer);
        findings.calls += 1;
    }
    Ok(findings)
}

fn verify_elf(arguments: &Arguments, elf: &[u8]) -> anyhow::Result<Findings> {
    let input = match &arguments.input {
        Some(input) => read_input(input)?,
        None => arguments.arguments.join(" ").into_bytes(),
    };
    let mut sandbox = arguments.guest.sandbox(elf)?;
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
    let findings = match arguments.guest.read()? {
        Kind::Module(wasm) => verify_module(arguments, &wasm)?,
        Kind::Component(wasm) => verify_component(arguments, &wasm)?,
        Kind::Elf(elf) => verify_elf(arguments, &elf)?,
    };
    let clean = findings.bytes_differ == 0 && findings.items_differ == 0;
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "calls": findings.calls, "failed_calls": findings.failed_calls,
                "bytes_differ": findings.bytes_differ, "items_differ": findings.items_differ,
                "answers_differ": findings.answers_differ, "most_bytes_changed": findings.changed_bytes,
                "clones": findings.clones, "pristine": clean,
            })
        ),
        Format::Text => {
            println!(
                "{} calls ({} failed), each changing up to {} bytes: {} bytes differ, {} globals, tables or \
                 registers differ",
                findings.calls,
                findings.failed_calls,
                findings.changed_bytes,
                findings.bytes_differ,
                findings.items_differ,
            );
            println!(
                "{} answers differ from those of an instance that had never run anything",
                findings.answers_differ
            );
            if let Some(clones) = findings.clones {
                println!("{clones}");
            }
        }
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::from(DIFFERS) })
}
