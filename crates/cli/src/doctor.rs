//! `afresh doctor`: what this host offers, what it costs here, and which strategy that chooses.

use std::process::ExitCode;

use afresh_memory::{CostModel, Feature, Features, HostAccess, Strategy};
use clap::Args;
use serde_json::json;

use crate::output::{Format, say};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Answer as a host without these features would (uffd, uffd-sigbus, uffd-async, uffd-kernel, pagemap-scan,
    /// mprotect, populate, kvm).
    #[arg(long, value_name = "FEATURE", value_delimiter = ',')]
    without: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments, format: Format) -> anyhow::Result<ExitCode> {
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
    let chosen = Strategy::Auto.choose(&features, HostAccess::Threads)?;
    let syscalls = Strategy::Auto.choose(&features, HostAccess::Syscalls)?;
    let micro_vm = afresh_vm::Abilities::host().map(|a| a.choice());
    match format {
        Format::Json => {
            let features: serde_json::Map<_, _> = Feature::ALL
                .into_iter()
                .map(|f| (f.name().to_owned(), json!(features.why_missing(f).unwrap_or("yes"))))
                .collect();
            let vm = match &micro_vm {
                Ok((strategy, reason)) => {
                    json!({"strategy": strategy.name(), "reason": reason.to_string()})
                }
                Err(error) => json!({"missing": error.to_string()}),
            };
            say!(
                "{}",
                json!({
                    "features": features,
                    "costs_ns": {
                        "copy_page": cost.copy_page, "fault": cost.fault, "notice": cost.notice,
                        "discard_call": cost.discard_call, "discard_page": cost.discard_page,
                    },
                    "chosen": {"strategy": chosen.strategy.to_string(), "reason": chosen.reason},
                    "chosen_with_system_calls":
                        {"strategy": syscalls.strategy.to_string(), "reason": syscalls.reason},
                    "micro_vm": vm,
                })
            )?;
        }
        Format::Text => {
            say!("Features of this host\n{features}")?;
            say!("Costs measured here, in nanoseconds")?;
            for (what, ns) in [
                ("copy back a page in the cache", cost.copy_page),
                ("fault a page in", cost.fault),
                ("notice the first write to a page", cost.notice),
                ("call madvise", cost.discard_call),
                ("discard a page", cost.discard_page),
            ] {
                say!("  {what:<34} {ns:>8.0}")?;
            }
            // Where the two lines cross: what the fallback to discarding is decided by.
            let per_page = cost.fault + cost.discard_page;
            say!(
                "  Copying {:.0} pages of a write set costs as much as discarding and faulting one page in.\n",
                per_page / cost.copy_page
            )?;
            say!("Strategies")?;
            for (name, choice) in &strategies {
                match choice {
                    Ok(reason) => say!("  {name:<22} {reason}")?,
                    Err(reason) => say!("  {name:<22} no: {reason}")?,
                }
            }
            say!("\nChosen: {} because {}", chosen.strategy, chosen.reason)?;
            say!(
                "Where system calls write guest memory: {} because {}",
                syscalls.strategy,
                syscalls.reason
            )?;
            match &micro_vm {
                Ok((strategy, reason)) => say!("Micro-VMs: {} because {reason}", strategy.name())?,
                Err(error) => say!("Micro-VMs: not here: {error}")?,
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
