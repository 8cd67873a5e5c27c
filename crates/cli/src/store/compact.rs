//! `afresh compact`: merges a stack of layers into one.

use std::process::ExitCode;

use afresh::store::CompactOptions;
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use super::EncodingArgument;
use crate::Settings;
use crate::output::{Format, say, spinner};
use afresh::{FoundSnapshot, Reference};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Snapshot: DIR[@NAME].
    snapshot: Reference,
    /// Name of the result [default: the snapshot's own].
    #[arg(long, value_name = "NAME")]
    to: Option<String>,
    /// Encoding of the pages.
    #[arg(long, value_enum, default_value = "raw")]
    encoding: EncodingArgument,
    /// Omit the recorded working set.
    #[arg(long)]
    drop_working_set: bool,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let reference = &arguments.snapshot;
    let store = reference.place().store()?;
    let FoundSnapshot { reference, snapshot, .. } = reference.find(&settings.open)?;
    let to = match &arguments.to {
        Some(name) => name,
        None => reference.target(reference.name())?,
    };
    let options = CompactOptions {
        encoding: arguments.encoding.into(),
        working_set: !arguments.drop_working_set,
    };
    let bar = spinner("compacting");
    let id = store.compact(to, &snapshot, &options)?;
    bar.finish_and_clear();
    let bytes = |layers: &[afresh::store::LayerInspection]| layers.iter().map(|l| l.bytes).sum();
    let (before, after) = (snapshot.inspect().layers, store.load_id(id)?.inspect().layers);
    let sizes: (u64, u64) = (bytes(&before), bytes(&after));
    match settings.output {
        Format::Json => say!(
            "{}",
            json!({
                "id": id.to_string(), "name": to, "layers_before": before.len(),
                "layers": after.len(), "bytes_before": sizes.0, "bytes": sizes.1,
            })
        )?,
        Format::Text => say!(
            "{to} is {id}: {} layers of {} became {} of {}; `afresh gc` removes unreferenced blobs",
            before.len(),
            BinaryBytes(sizes.0),
            after.len(),
            BinaryBytes(sizes.1),
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
