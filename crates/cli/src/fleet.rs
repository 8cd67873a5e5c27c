//! `afresh nodes`, `afresh drain`, and the options of `afresh serve` that join a fleet.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use afresh_serve::fleet::{self, FleetConfig};
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};

/// The address of a fleet.
#[derive(Debug, Args)]
pub(crate) struct FleetArguments {
    /// NATS servers of the fleet, separated by commas.
    #[arg(long, value_name = "URL")]
    nats: String,
    /// File with a token for NATS, or with a user and a password.
    #[arg(long, value_name = "FILE")]
    nats_credentials: Option<PathBuf>,
    /// Name of the fleet, if several share the NATS servers.
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

/// Options of a server that joins a fleet.
#[derive(Debug, Args)]
#[group(id = "join", conflicts_with = "stdio", multiple = true)]
pub(crate) struct JoinArguments {
    /// Join the fleet at these NATS servers, separated by commas.
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    /// File with a token for NATS, or with a user and a password.
    #[arg(long, value_name = "FILE", requires = "nats")]
    nats_credentials: Option<PathBuf>,
    /// Name of the fleet, if several share the NATS servers.
    #[arg(long, value_name = "NAME", requires = "nats")]
    fleet: Option<String>,
    /// Store for saved sandboxes, shared by all hosts of the fleet: a URL or a shared directory.
    #[arg(long, value_name = "PLACE", requires = "nats")]
    store: Option<String>,
    /// Name of this host in the fleet [default: its host name].
    #[arg(long, value_name = "NAME", requires = "nats")]
    host_name: Option<String>,
    /// Time without a heartbeat after which other hosts take over a host's sandboxes.
    ///
    /// All hosts must use the same value.
    #[arg(long, value_name = "TIME", requires = "nats", value_parser = afresh_serve::parse_duration)]
    lease: Option<Duration>,
    /// Number of NATS servers that store each entry.
    #[arg(long, value_name = "N", requires = "nats")]
    nats_replicas: Option<usize>,
}

impl JoinArguments {
    /// The fleet to join. Options override the configuration file.
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
    /// Name or id of the host, as `afresh nodes` prints it.
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
        eprintln!("no host of the fleet `{}` responds", arguments.fleet.fleet);
    }
    for host in all {
        match settings.output {
            Format::Json => say!("{}", json!(host))?,
            Format::Text => {
                let state = if host.draining { "draining" } else { "serving" };
                say!(
                    "{} ({}): {state}, {:.1} % busy, {} live sandboxes, {} local states",
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
        Format::Text => say!("{} ({}) saves its sandboxes and stops", host.name, host.host)?,
    }
    Ok(ExitCode::SUCCESS)
}
