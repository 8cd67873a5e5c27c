//! `afresh diff`: finds the pages that differ between two snapshots.

use std::process::ExitCode;

use afresh::memory::PAGE_SIZE;
use afresh::store::GuestBuild;
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, one_line, say, spinner};
use crate::verify::DIFFERS;
use afresh::Reference;

/// Maximum number of ranges in text output without `--pages`.
const MAX_RANGES: usize = 20;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// First snapshot: PLACE[@NAME].
    a: Reference,
    /// Second snapshot: PLACE[@NAME].
    b: Reference,
    /// Show every range instead of the first twenty.
    #[arg(long)]
    pages: bool,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let a = arguments.a.load(&settings.open)?;
    let b = arguments.b.load(&settings.open)?;
    let bar = spinner("comparing");
    let found = afresh::store::diff(&a, &b)?;
    bar.finish_and_clear();
    let pages = found.page_count();
    let sizes = (a.pages(), b.pages());
    let equal = pages == 0 && !found.state && !found.guest && sizes.0 == sizes.1;
    match settings.output {
        Format::Json => {
            let ranges: Vec<_> = found.pages.iter().map(|range| [range.start, range.len]).collect();
            say!(
                "{}",
                json!({
                    "a": a.id().to_string(), "b": b.id().to_string(), "equal": equal,
                    "a_pages": sizes.0, "b_pages": sizes.1,
                    "pages_differ": pages, "bytes": pages * PAGE_SIZE, "ranges": ranges,
                    "state_differs": found.state, "guest_differs": found.guest,
                })
            )?;
        }
        Format::Text if equal => say!("equal: {} pages, state and guest", sizes.0)?,
        Format::Text => {
            if sizes.0 != sizes.1 {
                say!("sizes differ: {} pages and {}", sizes.0, sizes.1)?;
            }
            let bytes = BinaryBytes((pages * PAGE_SIZE) as u64);
            say!("{pages} pages differ ({bytes}) in {} ranges", found.pages.len())?;
            let shown = if arguments.pages { found.pages.len() } else { MAX_RANGES };
            for range in found.pages.iter().take(shown) {
                say!("  {}..{}  {} pages", range.start, range.end(), range.len)?;
            }
            if found.pages.len() > shown {
                say!("  … {} more; --pages shows them all", found.pages.len() - shown)?;
            }
            if found.state {
                say!("guest state differs: {} and {} bytes", a.state().len(), b.state().len())?;
            }
            if found.guest {
                for (what, one, other) in builds(a.guest(), b.guest()) {
                    let (one, other) = (one_line(&one), one_line(&other));
                    say!("{what} of the guest: {one} and {other}")?;
                }
            }
        }
    }
    Ok(if equal { ExitCode::SUCCESS } else { ExitCode::from(DIFFERS) })
}

/// The differences between the builds of two guests.
fn builds(a: &GuestBuild, b: &GuestBuild) -> Vec<(&'static str, String, String)> {
    let cpu = |build: &GuestBuild| match &build.cpu[..] {
        [] => "none".to_owned(),
        features => features.join(" "),
    };
    let mut parts = vec![
        ("kind", a.kind.clone(), b.kind.clone()),
        ("code", a.module.clone(), b.module.clone()),
        ("engine", a.engine.clone(), b.engine.clone()),
        ("CPU features", cpu(a), cpu(b)),
    ];
    parts.retain(|(_, one, other)| one != other);
    parts
}
