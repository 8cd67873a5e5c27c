//! `afresh doctor`: the features of this host, their costs, and the strategy that follows.

use std::process::ExitCode;

use afresh::memory::{Choice, CostModel, Feature, Features, HostAccess, SlotError, Strategy};
use afresh_sys::host;
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Report as a host without these features: memfd, uffd, uffd-sigbus, uffd-async, uffd-kernel,
    /// pagemap-scan, mprotect, populate, kvm.
    #[arg(long, value_name = "FEATURE", value_delimiter = ',')]
    without: Vec<String>,
}

/// The reset method of micro-VMs and its reason, or the reason that micro-VMs do not run here.
#[cfg(vm_guests)]
fn micro_vm() -> Result<(String, String), String> {
    let abilities = afresh::vm::HostSupport::host().map_err(|error| error.to_string())?;
    let (method, reason) = abilities.choice();
    Ok((method.to_string(), reason.to_owned()))
}

#[cfg(not(vm_guests))]
fn micro_vm() -> Result<(String, String), String> {
    Err(afresh::Kind::Machine.missing_reason().unwrap_or_default())
}

/// The isolation layers of Linux programs: name, and the reason if it is missing.
#[cfg(linux_guests)]
fn linux_isolation() -> Result<Vec<(&'static str, Option<String>)>, String> {
    let layers = afresh::linux::isolation_layers().map_err(|error| error.to_string())?;
    Ok(layers.into_iter().map(|layer| (layer.name, layer.missing)).collect())
}

#[cfg(not(linux_guests))]
fn linux_isolation() -> Result<Vec<(&'static str, Option<String>)>, String> {
    Err(afresh::Kind::Program.missing_reason().unwrap_or_default())
}

/// Bytes of address space that each Wasm memory reserves. 0 without the feature `wasm`.
#[cfg(feature = "wasm")]
fn memory_reservation() -> u64 {
    afresh::wasm::memory_reservation()
}

#[cfg(not(feature = "wasm"))]
fn memory_reservation() -> u64 {
    0
}

/// The source of memory pressure, from which on idle instances give memory back: its name in JSON,
/// and in words.
fn memory_pressure() -> (&'static str, &'static str) {
    match host::pressure_source() {
        Some(host::PressureSource::Group) => ("group", "that of this process's control group"),
        Some(host::PressureSource::Host) => {
            ("host", "that of the whole host, since the control group of this process has no count")
        }
        None => (
            "none",
            "not reported by this kernel (PSI), so idle instances give no memory back; build it with CONFIG_PSI, or \
             boot it with psi=1",
        ),
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let mut features = Features::host().clone();
    for name in &arguments.without {
        if name == "uffd" {
            for kind in [Feature::UffdSigbus, Feature::UffdAsync, Feature::UffdKernel] {
                features = features.without(kind);
            }
        } else {
            features = features.without(name.parse()?);
        }
    }
    let cost = CostModel::host();
    let strategies: Vec<(String, Result<String, String>)> = std::iter::once(Strategy::Auto)
        .chain(Strategy::FORCED)
        .map(|strategy| {
            let choice = strategy
                .choose(&features, HostAccess::Threads)
                .map(|c| c.reason)
                .map_err(|e| e.to_string());
            (strategy.to_string(), choice)
        })
        .collect();
    let chosen = Strategy::Auto.choose(&features, HostAccess::Threads);
    let syscalls = Strategy::Auto.choose(&features, HostAccess::Syscalls);
    let choice = |choice: &Result<Choice, _>| match choice {
        Ok(c) => json!({"strategy": c.strategy.to_string(), "reason": c.reason}),
        Err(error) => json!({"missing": SlotError::to_string(error)}),
    };
    let words = |choice: &Result<Choice, _>| match choice {
        Ok(c) => format!("{} ({})", c.strategy, c.reason),
        Err(error) => format!("none: {}", SlotError::to_string(error)),
    };
    let (space, reservation) = (host::address_space(), memory_reservation());
    let (pressure, pressure_words) = memory_pressure();
    let micro_vm = micro_vm();
    let layers = linux_isolation();
    match settings.output {
        Format::Json => {
            let features: serde_json::Map<_, _> = Feature::ALL
                .into_iter()
                .map(|f| (f.name().to_owned(), json!(features.why_missing(f).unwrap_or("yes"))))
                .collect();
            let vm = match &micro_vm {
                Ok((strategy, reason)) => json!({"strategy": strategy, "reason": reason}),
                Err(error) => json!({"missing": error}),
            };
            let layers = match &layers {
                Ok(layers) => layers
                    .iter()
                    .map(|(name, missing)| {
                        ((*name).to_owned(), json!(missing.as_deref().unwrap_or("yes")))
                    })
                    .collect::<serde_json::Map<_, _>>()
                    .into(),
                Err(error) => json!({"missing": error}),
            };
            say!(
                "{}",
                json!({
                    "features": features,
                    "costs_ns": {
                        "copy_page": cost.copy_page, "fault": cost.fault, "notice": cost.notice,
                        "discard_call": cost.discard_call, "discard_page": cost.discard_page,
                    },
                    "chosen": choice(&chosen),
                    "chosen_with_system_calls": choice(&syscalls),
                    "address_space_left": space,
                    "wasm_memory_reservation": reservation,
                    "memory_pressure": pressure,
                    "micro_vm": vm,
                    "linux_isolation": layers,
                })
            )?;
        }
        Format::Text => {
            say!("Features of this host\n{features}")?;
            say!("Measured costs, in nanoseconds")?;
            for (what, ns) in [
                ("copy a cached page back", cost.copy_page),
                ("fault a page in", cost.fault),
                ("detect the first write to a page", cost.notice),
                ("call madvise", cost.discard_call),
                ("discard a page", cost.discard_page),
            ] {
                say!("  {what:<34} {ns:>8.0}")?;
            }
            // The crossover, which decides the fallback to discarding.
            let per_page = cost.fault + cost.discard_page;
            say!(
                "  Copying back {:.0} pages of a write set costs as much as discarding one page and faulting it in.\n",
                per_page / cost.copy_page
            )?;
            say!("Strategies")?;
            for (name, choice) in &strategies {
                match choice {
                    Ok(reason) => say!("  {name:<22} {reason}")?,
                    Err(reason) => say!("  {name:<22} unavailable: {reason}")?,
                }
            }
            say!("\nChosen: {}", words(&chosen))?;
            say!("Chosen if system calls write guest memory: {}", words(&syscalls))?;
            match space {
                None => say!(
                    "Wasm memories reserve {} MiB each: the address space is not limited",
                    reservation >> 20
                )?,
                Some(left) => say!(
                    "Wasm memories reserve {} MiB each and cannot grow further: {} MiB of address space are left for \
                     this process (ulimit -v){}",
                    reservation >> 20,
                    left >> 20,
                    if reservation < 4 << 30 { "; every access is checked" } else { "" }
                )?,
            }
            say!("Memory pressure: {pressure_words}")?;
            match &micro_vm {
                Ok((strategy, reason)) => say!("Micro-VMs: {strategy} ({reason})")?,
                Err(error) => say!("Micro-VMs: unavailable: {error}")?,
            }
            match &layers {
                Ok(layers) => {
                    say!(
                        "Isolation layers of Linux programs, in addition to the filter of system calls"
                    )?;
                    for (name, missing) in layers {
                        say!("  {name:<22} {}", missing.as_deref().unwrap_or("yes"))?;
                    }
                }
                Err(error) => say!("Linux programs: unavailable: {error}")?,
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
