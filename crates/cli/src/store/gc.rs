//! `afresh gc`: removes unreferenced blobs from a directory or an object store.

use std::process::ExitCode;
#[cfg(feature = "remote")]
use std::time::Duration;

use clap::Args;
use indicatif::BinaryBytes;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};
use afresh::Place;
use afresh::store::CollectionReport;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory, or URL of an object store.
    place: Place,
    #[cfg(feature = "remote")]
    #[command(flatten)]
    remote: RemoteArguments,
}

/// Further options for an object store with concurrent writers.
#[cfg(feature = "remote")]
#[derive(Debug, Args)]
struct RemoteArguments {
    /// Minimum age of the blobs to remove from an object store, in hours, at least 48.
    #[arg(long, value_name = "HOURS")]
    grace: Option<u64>,
    /// NATS servers of the fleet that uses this store, separated by commas.
    #[cfg(feature = "fleet")]
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    #[cfg(feature = "fleet")]
    #[command(flatten)]
    client: crate::fleet::NatsArguments,
    /// Name of the fleet, if several share the NATS servers.
    #[cfg(feature = "fleet")]
    #[arg(long, value_name = "NAME", requires = "nats")]
    fleet: Option<String>,
}

#[cfg(feature = "remote")]
impl RemoteArguments {
    fn grace(&self) -> Duration {
        self.grace.map_or(afresh::store::remote::GRACE_PERIOD, |hours| {
            Duration::from_secs(hours.saturating_mul(3600))
        })
    }

    /// Collects the store of a fleet if --nats is given.
    #[cfg(feature = "fleet")]
    fn fleets(&self, place: &Place) -> anyhow::Result<Option<CollectionReport>> {
        let Some(nats) = &self.nats else { return Ok(None) };
        let mut config = afresh_serve::fleet::FleetConfig::new(nats);
        self.client.apply(&mut config);
        config.store = Some(place.to_string());
        if let Some(fleet) = &self.fleet {
            config.fleet.clone_from(fleet);
        }
        let collecting = afresh_serve::fleet::collect(&config, self.grace());
        Ok(Some(crate::fleet::runtime()?.block_on(collecting)?))
    }
}

#[cfg(feature = "remote")]
fn collect(arguments: &Arguments) -> anyhow::Result<CollectionReport> {
    #[cfg(feature = "fleet")]
    if let Some(collected) = arguments.remote.fleets(&arguments.place)? {
        return Ok(collected);
    }
    match &arguments.place {
        place @ Place::Remote(_) => Ok(place.remote()?.gc(None, arguments.remote.grace())?),
        place if arguments.remote.grace.is_none() => Ok(place.store()?.gc()?),
        _ => anyhow::bail!(
            "--grace applies to object stores only; omit it: in a directory, a lock protects every save"
        ),
    }
}

#[cfg(not(feature = "remote"))]
fn collect(arguments: &Arguments) -> anyhow::Result<CollectionReport> {
    Ok(arguments.place.store()?.gc()?)
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let collected = collect(arguments)?;
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
