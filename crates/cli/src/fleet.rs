//! `afresh nodes`, `afresh drain`, `afresh fleet`, and the options of `afresh serve` that join a
//! fleet.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use afresh_serve::fleet::{self, FleetConfig};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::Settings;
use crate::output::{Format, message, one_line, say};

/// Identity and trust of a client of NATS.
#[derive(Debug, Args)]
pub(crate) struct NatsArguments {
    /// File with a token for NATS, a user and a password, the seed of an nkey, or a JWT and its
    /// seed (`.creds`).
    ///
    /// It is read again for each connection.
    #[arg(long, value_name = "FILE", requires = "nats")]
    nats_credentials: Option<PathBuf>,
    /// File with the certificates that NATS servers are checked by [default: those of the system].
    #[arg(long, value_name = "FILE", requires = "nats")]
    nats_ca: Option<PathBuf>,
    /// File with the client certificate for NATS.
    #[arg(long, value_name = "FILE", requires_all = ["nats", "nats_certificate_key"])]
    nats_certificate: Option<PathBuf>,
    /// File with the key of the client certificate.
    #[arg(long, value_name = "FILE", requires_all = ["nats", "nats_certificate"])]
    nats_certificate_key: Option<PathBuf>,
    /// File with the key that entries of the ledger are sealed by, as `afresh keygen sealing`
    /// writes it.
    ///
    /// All hosts of a fleet must use the same key.
    #[arg(long, value_name = "FILE", requires = "nats")]
    entry_key: Option<PathBuf>,
    /// Refuse entries of the ledger that are not sealed.
    ///
    /// Run `afresh fleet seal` before, or entries from before the fleet had a key are refused.
    #[arg(long, requires = "nats")]
    require_sealed: bool,
}

impl NatsArguments {
    /// Options override the configuration file.
    pub(crate) fn apply(&self, config: &mut FleetConfig) {
        let set = |place: &mut Option<PathBuf>, given: &Option<PathBuf>| {
            if let Some(file) = given {
                *place = Some(file.clone());
            }
        };
        set(&mut config.credentials, &self.nats_credentials);
        set(&mut config.ca, &self.nats_ca);
        set(&mut config.certificate, &self.nats_certificate);
        set(&mut config.certificate_key, &self.nats_certificate_key);
        set(&mut config.entry_key, &self.entry_key);
        config.require_sealed |= self.require_sealed;
    }
}

/// The address of a fleet.
#[derive(Debug, Args)]
pub(crate) struct FleetArguments {
    /// NATS servers of the fleet, separated by commas.
    #[arg(long, value_name = "URL")]
    nats: String,
    #[command(flatten)]
    client: NatsArguments,
    /// Name of the fleet, if several share the NATS servers.
    #[arg(long, value_name = "NAME", default_value = "default")]
    fleet: String,
}

impl FleetArguments {
    fn config(&self) -> FleetConfig {
        let mut config = FleetConfig::new(&self.nats);
        self.client.apply(&mut config);
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
    #[command(flatten)]
    client: NatsArguments,
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
        self.client.apply(&mut config);
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

/// `afresh fleet`
#[derive(Debug, Subcommand)]
pub(crate) enum FleetCommand {
    /// Make the buckets of a fleet in NATS, so that its hosts need no permission to do so.
    Init(InitArguments),
    /// Copy the ledger of a fleet and all states that it names to a directory.
    ///
    /// Hosts keep working. A later backup to the same directory copies only new states. Sandboxes
    /// that were never saved are not part of it.
    Backup(BackupArguments),
    /// Write a backup to the ledger and the store of a fleet without hosts.
    Restore(BackupArguments),
    /// Seal the entries of the ledger from before the fleet had a key.
    ///
    /// Hosts keep working. Run it once all hosts have the key and before they have
    /// `require-sealed`.
    Seal(SealArguments),
}

/// `afresh fleet seal`
#[derive(Debug, Args)]
pub(crate) struct SealArguments {
    /// Change nothing, and list entries that are not sealed.
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    fleet: FleetArguments,
}

/// Seals the entries of a ledger, or lists those that are not sealed.
fn seal(arguments: &SealArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let config = arguments.fleet.config();
    let report = runtime()?.block_on(fleet::seal(&config, arguments.check))?;
    match settings.output {
        Format::Json => say!("{}", json!(report))?,
        Format::Text => say!(
            "{} entries were sealed, {} are sealed now, {} are plain, {} are sealed by another key or damaged",
            report.sealed,
            report.changed,
            report.plain.len(),
            report.unreadable.len(),
        )?,
    }
    for key in &report.plain {
        message!("not sealed: {key}");
    }
    for key in &report.unreadable {
        message!("not readable: {key}");
    }
    let is_whole = report.plain.is_empty() && report.unreadable.is_empty();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `afresh fleet init`
#[derive(Debug, Args)]
pub(crate) struct InitArguments {
    #[command(flatten)]
    fleet: FleetArguments,
    /// Number of NATS servers that store each entry.
    #[arg(long, value_name = "N", default_value = "1")]
    nats_replicas: usize,
}

/// `afresh fleet backup` and `afresh fleet restore`
#[derive(Debug, Args)]
pub(crate) struct BackupArguments {
    /// Directory of the backup.
    directory: PathBuf,
    #[command(flatten)]
    fleet: FleetArguments,
    /// Store of the fleet: a URL or a shared directory.
    #[arg(long, value_name = "PLACE")]
    store: String,
    /// Number of NATS servers that store each entry, if the buckets are made.
    #[arg(long, value_name = "N", default_value = "1")]
    nats_replicas: usize,
}

impl BackupArguments {
    fn config(&self) -> FleetConfig {
        let mut config = self.fleet.config();
        config.store = Some(self.store.clone());
        config.replicas = self.nats_replicas;
        config
    }
}

pub(crate) fn fleet(command: &FleetCommand, settings: &Settings) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let (report, verb) = match command {
        FleetCommand::Init(arguments) => {
            let mut config = arguments.fleet.config();
            config.replicas = arguments.nats_replicas;
            runtime.block_on(fleet::init(&config))?;
            match settings.output {
                Format::Json => say!("{}", json!({"fleet": config.fleet}))?,
                Format::Text => say!("the fleet `{}` has its buckets", config.fleet)?,
            }
            return Ok(ExitCode::SUCCESS);
        }
        FleetCommand::Seal(arguments) => return seal(arguments, settings),
        FleetCommand::Backup(arguments) => {
            let config = arguments.config();
            (runtime.block_on(fleet::backup(&config, &arguments.directory))?, "copied")
        }
        FleetCommand::Restore(arguments) => {
            let config = arguments.config();
            (runtime.block_on(fleet::restore(&config, &arguments.directory))?, "restored")
        }
    };
    match settings.output {
        Format::Json => say!("{}", json!(report))?,
        Format::Text => {
            say!(
                "{verb} {} sandboxes, {} snapshots with their names and {} templates, in {} states",
                report.sandboxes,
                report.snapshots,
                report.templates,
                report.states,
            )?;
            for id in &report.unsaved {
                message!("not in the backup, as it was never saved: the sandbox {id}");
            }
        }
    }
    for missing in &report.missing {
        message!("left out: {missing}");
    }
    Ok(if report.missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}

pub(crate) fn nodes(arguments: &NodesArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let all = runtime()?.block_on(fleet::nodes(&arguments.fleet.config()))?;
    if all.is_empty() {
        message!("no host of the fleet `{}` responds", arguments.fleet.fleet);
    }
    for host in all {
        match settings.output {
            Format::Json => say!("{}", json!(host))?,
            Format::Text => {
                let state = if host.draining { "draining" } else { "serving" };
                say!(
                    "{} ({}): {state}, {:.1} % busy, {} live sandboxes, {} local states",
                    one_line(&host.name),
                    one_line(&host.host),
                    f64::from(host.load) / 10.0,
                    host.sandboxes,
                    host.held.len(),
                )?;
                for held in &host.held {
                    say!("  {}", one_line(held))?;
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
