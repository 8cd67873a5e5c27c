//! `afresh inspect`: the contents of a snapshot.

use std::collections::BTreeMap;
use std::process::ExitCode;

use afresh::memory::{PAGE_SIZE, PageRange};
use afresh::store::{Inspection, Layer, Origin, Role, Snapshot};
use afresh_sys::folios::{self, Folios};
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::{Value, json};

use super::{encoding_name, page_map};
use crate::Settings;
use crate::output::{Format, bytes, one_line, say};
use afresh::Reference;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Snapshot: PLACE[@NAME].
    snapshot: Reference,
    /// List every run of pages.
    #[arg(long)]
    pages: bool,
    /// Check every byte of every layer against its digest.
    #[arg(long)]
    verify: bool,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let snapshot = arguments.snapshot.load(&settings.open)?;
    if arguments.verify {
        let bar = bytes("checking", 0);
        snapshot.check(&mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })?;
        bar.finish_and_clear();
    }
    let found = snapshot.inspect();
    // Only files on this host are in this host's page cache.
    let cached: Vec<Option<Folios>> = snapshot
        .layers()
        .iter()
        .chain(snapshot.working_set_layer())
        .map(|layer| {
            let (file, start) = layer.file()?;
            folios::of(file, pages_of(layer, start))
        })
        .collect();
    match settings.output {
        Format::Json => {
            say!("{}", describe(arguments, &snapshot, &found, &cached))?;
        }
        Format::Text => print(arguments, &snapshot, &found, &cached)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The pages of the file that hold a layer, its index among them; `start` is the first.
fn pages_of(layer: &Layer, start: u64) -> PageRange {
    PageRange::new(start as usize, layer.size().div_ceil(PAGE_SIZE as u64) as usize)
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Base => "base",
        Role::Delta => "delta",
        Role::WorkingSet => "working-set",
    }
}

fn describe(
    arguments: &Arguments,
    snapshot: &Snapshot,
    found: &Inspection,
    cached: &[Option<Folios>],
) -> Value {
    let layers: Vec<Value> = found
        .layers
        .iter()
        .zip(cached)
        .map(|(layer, cached)| {
            json!({
                "digest": layer.digest.to_string(), "root": layer.root,
                "role": role_name(layer.role), "encoding": encoding_name(layer.encoding),
                "bytes": layer.bytes, "stored_pages": layer.stored, "used_pages": layer.used,
                "cached_pages_by_folio_kib": cached,
            })
        })
        .collect();
    let mut object = json!({
        "id": found.id.to_string(), "parent": found.parent,
        "guest": {
            "kind": found.guest.kind, "module": found.guest.module,
            "engine": found.guest.engine, "cpu": found.guest.cpu,
        },
        "state_bytes": found.state_bytes,
        "pages": found.pages, "zero_pages": found.zero_pages,
        "stored_pages": found.pages - found.zero_pages, "shared_pages": found.shared_pages,
        "working_set_pages": found.working_set_pages, "runs": found.runs,
        "layers": layers,
    });
    if let Some(turns) = found.turns {
        object["turns"] = json!({
            "count": turns.count, "bytes": turns.bytes, "pages": found.turned_pages,
        });
    }
    if arguments.verify {
        object["verified"] = json!(true);
    }
    if arguments.pages {
        object["page_runs"] = snapshot
            .map()
            .runs()
            .iter()
            .map(|run| match run.origin {
                Origin::Zero => json!({"first": run.pages.start, "pages": run.pages.len}),
                Origin::Layer { layer, stored } => json!({
                    "first": run.pages.start, "pages": run.pages.len,
                    "layer": layer, "stored": stored,
                }),
                Origin::Turn { .. } => json!({
                    "first": run.pages.start, "pages": run.pages.len, "turned": true,
                }),
            })
            .collect();
    }
    object
}

fn size(pages: usize) -> BinaryBytes {
    BinaryBytes(pages as u64 * PAGE_SIZE as u64)
}

/// Pages of a count as a share of all.
fn share(pages: usize, all: usize) -> String {
    let percent = if all == 0 { 0.0 } else { pages as f64 * 100.0 / all as f64 };
    format!("{pages:>10} {:>11} {percent:>6.1} %", size(pages).to_string())
}

fn print(
    arguments: &Arguments,
    snapshot: &Snapshot,
    found: &Inspection,
    cached: &[Option<Folios>],
) -> anyhow::Result<()> {
    say!("snapshot     {}", found.id)?;
    say!("parent       {}", one_line(found.parent.as_deref().unwrap_or("none")))?;
    let guest = &found.guest;
    let [kind, module, engine] = [&guest.kind, &guest.module, &guest.engine].map(|t| one_line(t));
    say!("guest        {kind}, module {module}, engine {engine}")?;
    let cpu = if guest.cpu.is_empty() { "none".to_owned() } else { guest.cpu.join(" ") };
    say!("cpu          {}", one_line(&cpu))?;
    say!("state        {}", BinaryBytes(found.state_bytes))?;
    say!("memory       {} pages, {}, in {} runs", found.pages, size(found.pages), found.runs)?;
    say!("  zero       {}", share(found.zero_pages, found.pages))?;
    say!("  stored     {}", share(found.pages - found.zero_pages, found.pages))?;
    say!("  duplicates {}, stored once", share(found.shared_pages, found.pages))?;
    say!("  hot        {}, in the working set", share(found.working_set_pages, found.pages))?;
    if let Some(turns) = found.turns {
        let (pages, bytes) = (share(found.turned_pages, found.pages), BinaryBytes(turns.bytes));
        say!("  turned     {pages}, by {} turns of a session in {bytes}", turns.count)?;
    }
    say!("\nlayer  role         enc.       bytes     stored       used  blob")?;
    for (number, layer) in found.layers.iter().enumerate() {
        say!(
            "{number:>5}  {:<12} {:<4} {:>11} {:>10} {:>10}  {}",
            role_name(layer.role),
            encoding_name(layer.encoding),
            BinaryBytes(layer.bytes).to_string(),
            layer.stored,
            layer.used,
            layer.digest
        )?;
    }
    if snapshot.layers().iter().any(|layer| layer.file().is_some()) {
        say!("\npage cache, by size of the folios: large ones are mapped faster")?;
        for (number, cached) in cached.iter().enumerate() {
            let text = match cached {
                Some(cached) => histogram(cached),
                None => "not visible (compressed, or without CAP_SYS_ADMIN)".to_owned(),
            };
            say!("{number:>5}  {text}")?;
        }
    }
    let (palette, columns) = page_map::screen();
    say!("\n{}", page_map::draw(snapshot, palette, columns))?;
    if arguments.pages {
        say!("\n     pages                  count  where")?;
        for run in snapshot.map().runs() {
            let place = match run.origin {
                Origin::Zero => "zero".to_owned(),
                Origin::Layer { layer, stored } => format!("layer {layer}, stored page {stored}"),
                Origin::Turn { .. } => "changed by turns".to_owned(),
            };
            let range = format!("{}..{}", run.pages.start, run.pages.end());
            say!("{range:>22} {:>10}  {place}", run.pages.len)?;
        }
    }
    if arguments.verify {
        say!("\nverified: every byte of {} layers has its digest", found.layers.len())?;
    }
    Ok(())
}

/// Shares of a file by folio size, the largest first.
fn histogram(folios: &BTreeMap<usize, usize>) -> String {
    let all: usize = folios.values().sum();
    let parts: Vec<String> = folios
        .iter()
        .rev()
        .map(|(kib, pages)| {
            let percent = *pages as f64 * 100.0 / all.max(1) as f64;
            match kib {
                0 => format!("not cached {percent:.1} %"),
                _ => format!("{kib} KiB {percent:.1} %"),
            }
        })
        .collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_names_what_is_not_cached_last() {
        let folios = BTreeMap::from([(0, 25), (4, 25), (2048, 50)]);
        assert_eq!(histogram(&folios), "2048 KiB 50.0 %, 4 KiB 25.0 %, not cached 25.0 %");
    }
}
