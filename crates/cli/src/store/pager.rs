//! `afresh pager`: serves the memory of snapshots to virtual machine monitors.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use afresh::pager::vmm::{
    Cause, ControlServer, DoorOptions, HostEvent, Keeper, Served, SocketAccess, VmmError, VmmHost,
    keep, parse_mode, parse_owner,
};
use afresh::pager::{PageSource, SnapshotSource};
use afresh::store::Store;
use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::Settings;
use crate::output::{Format, say};
use afresh::{LATEST, Reference};

/// How long one wait takes before a signal is noticed.
const TICK: Duration = Duration::from_millis(50);

/// Name of the hidden command that [`run_keeper`] serves.
const KEEPER: &str = "pager-keeper";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Snapshot: PLACE[@NAME].
    snapshot: Reference,
    /// Unix socket to listen on, the path of the VMM's `uffd` memory backend.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
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
    #[arg(long, default_value = "vm", requires = "control")]
    name: String,
    /// Maximum memory of the pager for the VMMs of the socket, in MiB [default: no limit].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    budget: Option<u32>,
    /// Fill pages only when they are touched, without prefetching the rest.
    #[arg(long)]
    on_demand: bool,
    /// Fill each touched page alone, so that the control request `record` finds the working set.
    #[arg(long, requires = "control", conflicts_with_all = ["on_demand", "window"])]
    record: bool,
    /// Number of pages filled per fault, 1 to 512.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=512))]
    window: u16,
    /// Serve one VMM, and exit when it exits.
    #[arg(long)]
    once: bool,
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

/// The process that holds the VMMs of a pager, which is at its standard input, and closes them if it is killed.
pub(crate) fn run_keeper() -> anyhow::Result<ExitCode> {
    // A service manager ends the pager with the same signal, and then this process has nothing to do any more.
    afresh_sys::termination::watch()?;
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    if !stream.local_addr().is_ok_and(|address| address.is_unnamed()) {
        anyhow::bail!("`{KEEPER}` is started by `pager` alone");
    }
    keep(&stream)?;
    Ok(ExitCode::SUCCESS)
}

/// A report of a thread of the host.
enum Report {
    Served { name: String, number: usize, result: Result<Served, String> },
    Failed { door: String, error: String },
}

impl From<&HostEvent<'_>> for Report {
    fn from(event: &HostEvent<'_>) -> Self {
        match event {
            HostEvent::Served { name, number, result } => Self::Served {
                name: (*name).to_owned(),
                number: *number,
                result: result.as_ref().map(|served| *served).map_err(VmmError::to_string),
            },
            HostEvent::Failed { door, error } => {
                Self::Failed { door: (*door).to_owned(), error: error.to_string() }
            }
            _ => Self::Failed { door: String::new(), error: format!("{event:?}") },
        }
    }
}

impl Arguments {
    fn door(&self) -> DoorOptions {
        let mut door = DoorOptions::new(&self.name, &self.snapshot.to_string(), &self.socket);
        let (user, group) = self.socket_owner.map_or((None, None), |(u, g)| (Some(u), g));
        door.access = SocketAccess { user, group, mode: self.socket_mode };
        door.makes_directory = self.make_dir;
        door.budget = self.budget.map(|mib| (mib as usize) << 20);
        door.stream = !self.on_demand;
        door.record = self.record;
        door.window = self.window.into();
        door.once = self.once;
        door
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let mut options = settings.open.clone();
    if let Some(dir) = &arguments.cache {
        options = options.cache_pages(dir);
    }
    let source = SnapshotSource::new(arguments.snapshot.load(&options)?);
    let pages = source.pages();
    // Signals are watched before the socket exists, so that it is always removed.
    let stop = afresh_sys::termination::watch()?;
    let (reports, reported) = mpsc::channel();
    let keeper = Keeper::start(
        std::process::Command::new(std::env::current_exe().context("finding this program")?)
            .arg(KEEPER),
    )
    .context("starting the process that closes VMMs if this one is killed")?;
    let host = VmmHost::new(Some(keeper), move |event| {
        // The receiver lives until the host has stopped.
        let _ = reports.send(Report::from(event));
    });
    let control = match &arguments.control {
        Some(path) => {
            let access = SocketAccess::default();
            Some(ControlServer::bind(path, access, host.clone(), Snapshots(options))?)
        }
        None => None,
    };
    host.open_door(arguments.door(), Arc::new(source))?;
    eprintln!("afresh: {pages} pages of {} on {}", arguments.snapshot, arguments.socket.display());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let control = control.as_ref().map(|control| scope.spawn(|| control.serve(&over)));
        let mut succeeded = true;
        while !stop.load(Ordering::Acquire) {
            let Ok(report) = reported.recv_timeout(TICK) else { continue };
            let served = print(&report, settings.output);
            if arguments.once && matches!(report, Report::Served { .. }) {
                succeeded = served;
                break;
            }
        }
        host.stop();
        over.store(true, Ordering::Release);
        for report in reported.try_iter() {
            print(&report, settings.output);
        }
        if let Some(Err(error)) = control.map(|thread| thread.join().unwrap_or(Ok(()))) {
            return Err(error).context("the control socket");
        }
        Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    })
}

/// Prints a report. Returns whether a VMM was served without an error.
fn print(report: &Report, format: Format) -> bool {
    let (name, number, result) = match report {
        Report::Served { name, number, result } => (name, number, result),
        Report::Failed { door, error } => {
            eprintln!("afresh: accepting a VMM at {door}: {error}");
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
            eprintln!("afresh: VMM {name}: {error}");
            Ok(())
        }
    };
    result.is_ok() && printed.is_ok()
}
