//! `afresh tag` and `afresh untag`: names of snapshots.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};
use afresh::Reference;

#[derive(Debug, Args)]
pub(crate) struct TagArguments {
    /// Snapshot: DIR[@NAME].
    snapshot: Reference,
    /// Name to add. A name in use moves to this snapshot.
    name: String,
}

#[derive(Debug, Args)]
pub(crate) struct UntagArguments {
    /// Name to remove: DIR@NAME.
    snapshot: Reference,
}

pub(crate) fn tag(arguments: &TagArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let store = arguments.snapshot.place().store()?;
    // Opened first: a name refers only to snapshots that open.
    let id = arguments.snapshot.load(&settings.open)?.id();
    store.tag(&arguments.name, Some(id))?;
    match settings.output {
        Format::Json => say!("{}", json!({"name": arguments.name, "id": id.to_string()}))?,
        Format::Text => say!("{} is {id}", arguments.name)?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn untag(arguments: &UntagArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let place = arguments.snapshot.place();
    let name = arguments.snapshot.explicit_name();
    let name = name.with_context(|| format!("no name is given; write {place}@NAME"))?;
    let id = place.store()?.untag(name)?;
    match settings.output {
        Format::Json => say!("{}", json!({"removed": name, "id": id.to_string()}))?,
        Format::Text => say!("{name} was {id}; `afresh gc {place}` removes unreferenced blobs")?,
    }
    Ok(ExitCode::SUCCESS)
}
