//! `afresh list`: the snapshots in a place.

use std::fmt::Display;
use std::process::ExitCode;

use afresh::store::ListEntry;
use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, message, one_line, say};
use afresh::Place;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory or URL.
    place: Place,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let place = &arguments.place;
    let whole = match place {
        #[cfg(feature = "remote")]
        Place::Remote(_) => print(place, &place.remote()?.list()?, settings.output)?,
        _ => print(place, &place.store()?.list()?, settings.output)?,
    };
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints every entry; returns whether all could be read.
fn print<E: Display>(place: &Place, list: &[ListEntry<E>], format: Format) -> anyhow::Result<bool> {
    if list.is_empty() {
        message!("afresh: no snapshots in {place}");
    }
    let width = list.iter().map(|entry| entry.tag.name.len()).max().unwrap_or(0);
    for ListEntry { tag, extent } in list {
        let (name, id) = (&tag.name, tag.id.to_string());
        match (extent, format) {
            (Ok(extent), Format::Json) => say!(
                "{}",
                json!({"name": name, "id": id, "layers": extent.layers, "bytes": extent.bytes})
            )?,
            (Ok(extent), Format::Text) => say!(
                "{:<width$}  {id}  {:>3} layers  {:>11}",
                one_line(name),
                extent.layers,
                BinaryBytes(extent.bytes).to_string()
            )?,
            (Err(error), Format::Json) => {
                say!("{}", json!({"name": name, "id": id, "error": error.to_string()}))?;
            }
            (Err(error), Format::Text) => {
                message!("afresh: {}: {}", one_line(name), one_line(&error.to_string()));
            }
        }
    }
    Ok(list.iter().all(|entry| entry.extent.is_ok()))
}
