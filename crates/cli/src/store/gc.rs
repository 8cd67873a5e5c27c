//! `afresh gc`: removes what no name reaches.

use std::process::ExitCode;

use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};
use afresh::Place;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The directory.
    place: Place,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let collected = arguments.place.store()?.gc()?;
    match settings.output {
        Format::Json => say!(
            "{}",
            json!({
                "removed": collected.files, "bytes": collected.bytes, "kept": collected.kept,
            })
        )?,
        Format::Text => say!(
            "removed {} blobs and unfinished files, {}; kept {} blobs",
            collected.files,
            BinaryBytes(collected.bytes),
            collected.kept
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
