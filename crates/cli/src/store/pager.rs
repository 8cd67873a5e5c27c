//! `afresh pager`: serves the memory of snapshots to virtual machine monitors.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use afresh::pager::vmm::{
    Cause, ControlServer, EndpointOptions, HostEvent, Listener, MetricsServer, ServeCounts,
    SocketAccess, VmmError, VmmHost, Watchdog, parse_mode, parse_owner, run_watchdog,
};
use afresh::pager::{PageSource, SnapshotSource};
use afresh::store::Store;
use anyhow::Context;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory};
use serde_json::json;

use crate::Settings;
use crate::log::{Level, Log};
use crate::output::{Format, say};
use afresh::{LATEST, Reference};

/// Maximum time of one wait before a signal is noticed.
const TICK: Duration = Duration::from_millis(50);

/// Name that a service manager gives the control socket.
const CONTROL: &str = "control";

/// Name of the hidden command that [`run_watchdog`] serves.
const WATCHDOG: &str = "pager-watchdog";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Snapshot: PLACE[@NAME].
    snapshot: Reference,
    /// Unix socket to listen on, the path of the VMM's `uffd` memory backend.
    ///
    /// Needed unless a service manager passes a socket.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Owner of the socket: UID or UID:GID, in numbers [default: this user].
    #[arg(long, value_name = "UID[:GID]", value_parser = parse_owner)]
    socket_owner: Option<(u32, Option<u32>)>,
    /// Permissions of the socket, in octal digits.
    #[arg(long, value_name = "MODE", default_value = "0600", value_parser = parse_mode)]
    socket_mode: u32,
    /// Create the directory of the socket, for the socket's owner alone, and remove it at the end.
    #[arg(long)]
    make_dir: bool,
    /// Unix socket for control requests, a JSON object per line. For this user alone.
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Name of the socket in control requests. Its VMMs are called NAME.1, NAME.2 and so on.
    #[arg(long, default_value = "vm")]
    name: String,
    /// Maximum memory of the pager for the VMMs of the socket, in MiB [default: no limit].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    budget: Option<u32>,
    /// Fill pages only when they are touched, without prefetching the rest.
    #[arg(long)]
    on_demand: bool,
    /// Fill each touched page alone, so that the control request `record` finds the working set.
    #[arg(long, conflicts_with_all = ["on_demand", "window"])]
    record: bool,
    /// Number of pages filled per fault, 1 to 512.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=512))]
    window: u16,
    /// Serve one VMM, and exit when it exits.
    #[arg(long)]
    once: bool,
    /// Loopback address for metrics in Prometheus' text format, at `/metrics`.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// Least severe messages on standard error. In a service each line has the priority of the
    /// journal.
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "info")]
    log_level: Level,
    /// Directory that caches the pages of a remote snapshot.
    ///
    /// Processes can share it.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

/// Opens snapshots for control requests, with the options of the command.
struct Snapshots(afresh::Options);

impl afresh::pager::vmm::Snapshots for Snapshots {
    fn open(&self, reference: &str) -> Result<Arc<dyn PageSource>, Cause> {
        let reference: Reference = reference.parse()?;
        Ok(Arc::new(SnapshotSource::new(reference.load(&self.0)?)))
    }

    fn target(&self, reference: &str) -> Result<(Store, String), Cause> {
        let reference: Reference = reference.parse()?;
        let name = reference.target(LATEST)?.to_owned();
        Ok((reference.place().create()?, name))
    }
}

/// The process that holds the VMMs of a pager, which is at its standard input, and closes them if
/// it is killed.
pub(crate) fn run_pager_watchdog() -> anyhow::Result<ExitCode> {
    // A service manager ends the pager with the same signal, and then this process has nothing to
    // do any more.
    afresh_sys::termination::watch()?;
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    if !stream.local_addr().is_ok_and(|address| address.is_unnamed()) {
        anyhow::bail!("`{WATCHDOG}` is started by `pager` alone");
    }
    run_watchdog(&stream)?;
    Ok(ExitCode::SUCCESS)
}

/// A report of a thread of the host.
enum Report {
    Connected { name: String },
    Served { name: String, number: usize, result: Result<ServeCounts, String> },
    Failed { endpoint: String, error: String },
    ClientFailed { error: String },
}

impl From<&HostEvent<'_>> for Report {
    fn from(event: &HostEvent<'_>) -> Self {
        match event {
            HostEvent::Connected { name } => Self::Connected { name: (*name).to_owned() },
            HostEvent::Served { name, number, result } => Self::Served {
                name: (*name).to_owned(),
                number: *number,
                result: result.as_ref().map(|served| *served).map_err(VmmError::to_string),
            },
            HostEvent::Failed { endpoint, error } => {
                Self::Failed { endpoint: (*endpoint).to_owned(), error: error.to_string() }
            }
            HostEvent::ClientFailed { error } => Self::ClientFailed { error: error.to_string() },
            _ => Self::Failed { endpoint: String::new(), error: format!("{event:?}") },
        }
    }
}

/// The sockets of the command: those that the service manager passed, and those that are to be
/// made.
struct Sockets {
    vmms: Option<Listener>,
    control: Option<Listener>,
}

impl Sockets {
    /// Takes the sockets of the service manager: one for VMMs, and one called `control`.
    fn of_manager() -> anyhow::Result<Self> {
        let mut sockets = Self { vmms: None, control: None };
        for (name, socket) in afresh_sys::socket::activated()? {
            let listener = Listener::of_socket(socket)?;
            let place = match &*name {
                CONTROL => &mut sockets.control,
                _ => &mut sockets.vmms,
            };
            if place.replace(listener).is_some() {
                anyhow::bail!(
                    "the service manager passes two sockets of one kind: give one of them FileDescriptorName={CONTROL}, and leave out others"
                );
            }
        }
        if sockets.vmms.is_none() && sockets.control.is_some() {
            anyhow::bail!("the service manager passes a control socket, and none for VMMs");
        }
        Ok(sockets)
    }
}

/// Ends the command for wrong usage.
fn refuse(kind: ErrorKind, text: &str) -> ! {
    let mut command = crate::Cli::command();
    command.build();
    match command.find_subcommand_mut("pager") {
        Some(pager) => pager.error(kind, text).exit(),
        None => command.error(kind, text).exit(),
    }
}

impl Arguments {
    /// Refuses options that contradict each other, or the sockets of the service manager.
    fn check(&self, sockets: &Sockets) {
        match (&sockets.vmms, &self.socket) {
            (None, None) => refuse(
                ErrorKind::MissingRequiredArgument,
                "--socket is missing, and no service manager passes a socket",
            ),
            (Some(_), Some(_)) => refuse(
                ErrorKind::ArgumentConflict,
                "the service manager passes a socket: leave out --socket",
            ),
            _ => {}
        }
        let access = self.socket_owner.is_some() || self.make_dir || self.socket_mode != 0o600;
        if sockets.vmms.is_some() && access {
            refuse(
                ErrorKind::ArgumentConflict,
                "the service manager passes the socket: use SocketUser=, SocketMode= and DirectoryMode= of its unit instead of --socket-owner, --socket-mode and --make-dir",
            );
        }
        if sockets.control.is_some() && self.control.is_some() {
            refuse(
                ErrorKind::ArgumentConflict,
                "the service manager passes a control socket: leave out --control",
            );
        }
        if self.record && sockets.control.is_none() && self.control.is_none() {
            refuse(
                ErrorKind::MissingRequiredArgument,
                "--record needs --control, for the request `record`",
            );
        }
    }

    fn endpoint(&self, socket: &Path) -> EndpointOptions {
        let mut endpoint = EndpointOptions::new(&self.name, &self.snapshot.to_string(), socket);
        let (user, group) = self.socket_owner.map_or((None, None), |(u, g)| (Some(u), g));
        endpoint.access = SocketAccess { user, group, mode: self.socket_mode };
        endpoint.makes_directory = self.make_dir;
        endpoint.budget = self.budget.map(|mib| (mib as usize) << 20);
        endpoint.stream = !self.on_demand;
        endpoint.record = self.record;
        endpoint.window = self.window.into();
        endpoint.once = self.once;
        endpoint
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let sockets = Sockets::of_manager()?;
    arguments.check(&sockets);
    let log = Log::new(arguments.log_level);
    let mut options = settings.open.clone();
    if let Some(dir) = &arguments.cache {
        options = options.cache_pages(dir);
    }
    let source = SnapshotSource::new(arguments.snapshot.load(&options)?);
    let pages = source.pages();
    // Signals are watched before the socket exists, so that it is always removed.
    let stop = afresh_sys::termination::watch()?;
    let (reports, reported) = mpsc::channel();
    let watchdog = Watchdog::start(
        std::process::Command::new(std::env::current_exe().context("finding this program")?)
            .arg(WATCHDOG),
    )
    .context("starting the process that closes VMMs if this one is killed")?;
    let host = VmmHost::new(Some(watchdog), move |event| {
        // The receiver lives until the host has stopped.
        let _ = reports.send(Report::from(event));
    });
    let control = match (sockets.control, &arguments.control) {
        (Some(listener), _) => Some(ControlServer::new(listener, host.clone(), Snapshots(options))),
        (None, Some(path)) => {
            let access = SocketAccess::default();
            Some(ControlServer::bind(path, access, host.clone(), Snapshots(options))?)
        }
        (None, None) => None,
    };
    let metrics = match arguments.metrics {
        Some(address) => {
            let server = MetricsServer::bind(address, host.clone()).context("--metrics")?;
            log.line(Level::Info, &format!("metrics at http://{}/metrics", server.address()?));
            Some(server)
        }
        None => None,
    };
    let socket = match (sockets.vmms, &arguments.socket) {
        (Some(listener), _) => {
            let path = listener.path().to_owned();
            host.open_endpoint_at(listener, arguments.endpoint(&path), Arc::new(source))?;
            path
        }
        (None, path) => {
            let path = path.clone().unwrap_or_default();
            host.open_endpoint(arguments.endpoint(&path), Arc::new(source))?;
            path
        }
    };
    let text = format!("{pages} pages of {} on {}", arguments.snapshot, socket.display());
    log.line(Level::Info, &text);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if let Some(control) = &control {
            scope.spawn(|| control.serve(&over));
        }
        let metrics = metrics.as_ref().map(|metrics| scope.spawn(|| metrics.serve(&over)));
        let mut succeeded = true;
        while !stop.load(Ordering::Acquire) {
            let Ok(report) = reported.recv_timeout(TICK) else { continue };
            let served = print(&report, settings.output, log);
            if arguments.once && matches!(report, Report::Served { .. }) {
                succeeded = served;
                break;
            }
        }
        host.stop();
        over.store(true, Ordering::Release);
        for report in reported.try_iter() {
            print(&report, settings.output, log);
        }
        if let Some(Err(error)) = metrics.map(|thread| thread.join().unwrap_or(Ok(()))) {
            return Err(error).context("the address of --metrics");
        }
        Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    })
}

/// Prints a report. Returns whether a VMM was served without an error.
fn print(report: &Report, format: Format, log: Log) -> bool {
    let (name, number, result) = match report {
        Report::Connected { name } => {
            log.line(Level::Debug, &format!("VMM {name} has connected"));
            return true;
        }
        Report::Served { name, number, result } => (name, number, result),
        Report::Failed { endpoint, error } => {
            log.line(Level::Error, &format!("accepting a VMM at {endpoint}: {error}"));
            return false;
        }
        Report::ClientFailed { error } => {
            log.line(Level::Error, &format!("accepting a client of the control socket: {error}"));
            return false;
        }
    };
    let printed = match (result, format) {
        (Ok(served), Format::Json) => say!(
            "{}",
            json!({
                "vmm": number, "name": name, "faults": served.faults, "pages": served.pages,
                "zeroed": served.zeroed, "removals": served.removals,
            })
        ),
        (Ok(served), Format::Text) => say!(
            "VMM {name}: {} faults answered, {} pages filled, {} zeroed after {} discards",
            served.faults,
            served.pages,
            served.zeroed,
            served.removals
        ),
        (Err(error), _) => {
            log.line(Level::Error, &format!("VMM {name}: {error}"));
            Ok(())
        }
    };
    result.is_ok() && printed.is_ok()
}
