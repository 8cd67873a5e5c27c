//! `afresh import`: converts a raw memory image to a snapshot.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use afresh::memory::{PAGE_SIZE, PageRange};
use afresh::store::{DiffPages, FilePages, GuestBuild, Pages, SaveRequest};
use anyhow::Context;
use clap::Args;
use indicatif::{BinaryBytes, ProgressBar};
use serde_json::json;

use super::EncodingArgument;
use crate::Settings;
use crate::output::{Format, bytes, say};
use afresh::{LATEST, Reference};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Raw memory image: byte N of the file is byte N of the memory. Holes are zeros.
    file: PathBuf,
    /// Destination: DIR[@NAME]. A missing directory is created.
    to: Reference,
    /// Store only the difference from this snapshot in the same directory.
    #[arg(long, value_name = "NAME")]
    parent: Option<String>,
    /// Take holes of the file as pages that are as in the parent, as in Firecracker's diff
    /// snapshots.
    #[arg(long, requires = "parent")]
    diff: bool,
    /// File with the guest state (registers, devices), stored with the memory.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Kind of the guest [default: the parent's, or `raw`].
    #[arg(long)]
    kind: Option<String>,
    /// Identity of the code, such as the hash of a kernel [default: the parent's, or `none`].
    #[arg(long)]
    module: Option<String>,
    /// Name and version of the program that runs the guest [default: the parent's, or `none`].
    #[arg(long)]
    engine: Option<String>,
    /// Encoding of the pages.
    #[arg(long, value_enum, default_value = "raw")]
    encoding: EncodingArgument,
}

/// Advances a progress bar as bytes are read.
struct ProgressPages<'a> {
    pages: Box<dyn Pages + 'a>,
    bar: &'a ProgressBar,
}

impl Pages for ProgressPages<'_> {
    fn pages(&self) -> usize {
        self.pages.pages()
    }

    fn occupied(&self) -> Vec<PageRange> {
        self.pages.occupied()
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        self.pages.read(first, out)?;
        // Duplicates are read again; the bar does not go back for them.
        let at = (first * PAGE_SIZE + out.len()) as u64;
        self.bar.set_position(self.bar.position().max(at));
        Ok(())
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let name = arguments.to.target(LATEST)?;
    let pages = FilePages::open(&arguments.file)?;
    let store = arguments.to.place().create()?;
    let parent = match &arguments.parent {
        Some(name) => Some(store.load(name).with_context(|| format!("the parent {name}"))?),
        None => None,
    };
    let mut guest = parent.as_ref().map_or_else(
        || GuestBuild {
            kind: "raw".to_owned(),
            module: "none".to_owned(),
            engine: "none".to_owned(),
            cpu: Vec::new(),
        },
        |parent| parent.guest().clone(),
    );
    let overrides = [
        (&mut guest.kind, &arguments.kind),
        (&mut guest.module, &arguments.module),
        (&mut guest.engine, &arguments.engine),
    ];
    for (field, given) in overrides {
        if let Some(given) = given {
            field.clone_from(given);
        }
    }
    let mut request = SaveRequest::new(guest);
    request.options.encoding = arguments.encoding.into();
    let (pages, changed): (Box<dyn Pages + '_>, _) = match (&parent, arguments.diff) {
        (Some(parent), true) => {
            let diff = DiffPages::new(pages, parent)
                .with_context(|| format!("{} as a diff", arguments.file.display()))?;
            let changed = diff.changed().to_vec();
            (Box::new(diff), Some(changed))
        }
        _ => (Box::new(pages), None),
    };
    request.options.changed = changed;
    request.options.parent.clone_from(&parent);
    if let Some(path) = &arguments.state {
        request.state =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    }
    let memory = (pages.pages() * PAGE_SIZE) as u64;
    let bar = bytes("importing", memory);
    let started = Instant::now();
    let id = store.save(name, &ProgressPages { pages, bar: &bar }, &request)?;
    let seconds = started.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let snapshot = store.load_id(id)?;
    // The top layer was written.
    let written = snapshot.layers().last().map_or(0, |layer| layer.size());
    let rate = memory as f64 / seconds / f64::from(1 << 20);
    match settings.output {
        Format::Json => say!(
            "{}",
            json!({
                "id": id.to_string(), "name": name, "memory_bytes": memory,
                "written_bytes": written, "seconds": seconds, "mib_per_s": rate,
            })
        )?,
        Format::Text => say!(
            "imported {} as {}@{name}: {} of memory, {} written, in {seconds:.2} s, {rate:.1} MiB/s\n{id}",
            arguments.file.display(),
            arguments.to.place(),
            BinaryBytes(memory),
            BinaryBytes(written),
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
