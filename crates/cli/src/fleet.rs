//! `afresh nodes` and `afresh drain`, and how `afresh serve` joins a fleet.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use afresh_serve::fleet::{self, FleetConfig};
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};

/// Where a fleet meets.
#[derive(Debug, Args)]
pub(crate) struct FleetArguments {
    /// The NATS servers that the hosts of the fleet meet at, several with commas between.
    #[arg(long, value_name = "URL")]
    nats: String,
    /// A file with a token for NATS, or with a user and a password.
    #[arg(long, value_name = "FILE")]
    nats_credentials: Option<PathBuf>,
    /// The fleet, if several meet at the same servers.
    #[arg(long, value_name = "NAME", default_value = "default")]
    fleet: String,
}

impl FleetArguments {
    fn config(&self) -> FleetConfig {
        let mut config = FleetConfig::new(&self.nats);
        config.credentials.clone_from(&self.nats_credentials);
        config.fleet.clone_from(&self.fleet);
        config
    }
}

/// How a server joins.
#[derive(Debug, Args)]
#[group(id = "join", conflicts_with = "stdio", multiple = true)]
pub(crate) struct JoinArguments {
    /// Share the work with all hosts that meet at these NATS servers, several with commas between.
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    /// A file with a token for NATS, or with a user and a password.
    #[arg(long, value_name = "FILE", requires = "nats")]
    nats_credentials: Option<PathBuf>,
    /// The fleet, if several meet at the same NATS servers.
    #[arg(long, value_name = "NAME", requires = "nats")]
    fleet: Option<String>,
    /// Where all hosts of the fleet keep saved sandboxes: a URL, or a directory that all of them
    /// see.
    #[arg(long, value_name = "PLACE", requires = "nats")]
    store: Option<String>,
    /// The name of this host; its host name if not given.
    #[arg(long, value_name = "NAME", requires = "nats")]
    host_name: Option<String>,
    /// Time without a sign of a host after which others take over its work; the same on all hosts.
    #[arg(long, value_name = "TIME", requires = "nats", value_parser = afresh_serve::parse_duration)]
    lease: Option<Duration>,
    /// Servers of a NATS cluster that keep each entry.
    #[arg(long, value_name = "N", requires = "nats")]
    nats_replicas: Option<usize>,
}

impl JoinArguments {
    /// The fleet to join: the command line's, over that of a file.
    pub(crate) fn config(&self, file: Option<FleetConfig>) -> anyhow::Result<Option<FleetConfig>> {
        let mut config = match (&self.nats, file) {
            (Some(nats), Some(mut file)) => {
                file.nats.clone_from(nats);
                file
            }
            (Some(nats), None) => FleetConfig::new(nats),
            (None, file) => return Ok(file),
        };
        if let Some(file) = &self.nats_credentials {
            config.credentials = Some(file.clone());
        }
        if let Some(fleet) = &self.fleet {
            config.fleet.clone_from(fleet);
        }
        if let Some(store) = &self.store {
            config.store = Some(store.clone());
        }
        if let Some(name) = &self.host_name {
            config.name = Some(name.clone());
        }
        if let Some(lease) = self.lease {
            config.lease = lease;
        }
        if let Some(replicas) = self.nats_replicas {
            config.replicas = replicas;
        }
        Ok(Some(config))
    }
}

/// `afresh nodes`
#[derive(Debug, Args)]
pub(crate) struct NodesArguments {
    #[command(flatten)]
    fleet: FleetArguments,
}

/// `afresh drain`
#[derive(Debug, Args)]
pub(crate) struct DrainArguments {
    /// The host, as `afresh nodes` calls it, or its id.
    host: String,
    #[command(flatten)]
    fleet: FleetArguments,
}

pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}

pub(crate) fn nodes(arguments: &NodesArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let all = runtime()?.block_on(fleet::nodes(&arguments.fleet.config()))?;
    if all.is_empty() {
        eprintln!("no host answers in the fleet `{}`", arguments.fleet.fleet);
    }
    for host in all {
        match settings.output {
            Format::Json => say!("{}", json!(host))?,
            Format::Text => {
                let state = if host.draining { "ending" } else { "serving" };
                say!(
                    "{} ({}): {state}, {:.1} % busy, {} live sandboxes, holds {} things",
                    host.name,
                    host.host,
                    f64::from(host.load) / 10.0,
                    host.sandboxes,
                    host.held.len(),
                )?;
                for held in &host.held {
                    say!("  {held}")?;
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn drain(arguments: &DrainArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let host = runtime()?.block_on(fleet::drain(&arguments.fleet.config(), &arguments.host))?;
    match settings.output {
        Format::Json => say!("{}", json!({"name": host.name, "host": host.host}))?,
        Format::Text => say!("{} ({}) saves its sandboxes and ends", host.name, host.host)?,
    }
    Ok(ExitCode::SUCCESS)
}
