//! The `afresh` command: run, verify and measure warm guests, and explain the host.
//!
//! Exit codes: 0 success; 1 the guest or a file failed; 2 wrong usage; 3 a verification or
//! comparison found a difference. `run` exits with the guest's code if the guest exits by itself.
//! Results are written to standard output, everything else to standard error.

#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "documentation of arguments is their help text, where brackets mark optional parts"
)]

mod doctor;
#[cfg(linux_guests)]
mod exec;
#[cfg(not(linux_guests))]
#[path = "exec_absent.rs"]
mod exec;
#[cfg(feature = "fleet")]
mod fleet;
mod guest;
#[cfg(feature = "serve")]
mod handler;
mod help;
mod hints;
#[cfg(feature = "serve")]
mod http;
mod images;
#[cfg(feature = "serve")]
mod interrupts;
#[cfg(feature = "seal")]
mod keys;
#[cfg(linux_guests)]
mod linux;
mod log;
#[cfg(feature = "serve")]
mod log_fields;
mod manual;
#[cfg(feature = "mcp")]
mod mcp;
#[cfg(linux_guests)]
mod net;
#[cfg(not(linux_guests))]
#[path = "net_absent.rs"]
mod net;
mod output;
#[cfg(feature = "serve")]
mod repl;
mod request;
mod run;
mod serve;
#[cfg(all(test, feature = "fleet", linux_guests, feature = "otel", feature = "tls"))]
mod serve_reference;
mod snapshot;
mod stdio;
mod store;
mod units;
mod verify;
#[cfg(feature = "wasm")]
mod wasm;
#[cfg(linux_guests)]
mod write_back;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use output::{Format, message};

/// Start every run from the same memory, and pay only for the pages that the last run changed.
#[derive(Debug, Parser)]
#[command(name = "afresh", version)]
struct Cli {
    /// Output format.
    #[arg(short = 'o', long = "output", value_enum, global = true, default_value = "text")]
    #[arg(help_heading = help::EVERY_COMMAND)]
    output: Format,
    /// Refuse to run Linux programs on a host that lacks an isolation layer that `doctor` lists.
    #[arg(long, global = true, help_heading = help::EVERY_COMMAND)]
    #[arg(hide = cfg!(not(linux_guests)))]
    require_isolation: bool,
    #[cfg(feature = "seal")]
    #[command(flatten)]
    access: keys::AccessArguments,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Warm a guest, or load a snapshot, and call it.
    #[command(after_help = help::RUN_EXAMPLE)]
    Run(run::Arguments),
    /// Run a Linux program once, with the streams, terminal and signals of this command.
    #[command(hide = cfg!(not(linux_guests)), after_help = help::EXEC_EXAMPLE)]
    Exec(exec::Arguments),
    /// Answer requests over HTTP, or lines of standard input, each from the warm state.
    #[command(after_help = help::SERVE_EXAMPLE)]
    Serve(Box<serve::Arguments>),
    /// Offer sandboxes to agents with the Model Context Protocol.
    #[cfg(feature = "mcp")]
    #[command(after_help = help::MCP_EXAMPLE)]
    Mcp(Box<mcp::Arguments>),
    /// List the hosts of a fleet with their load and sandboxes.
    #[cfg(feature = "fleet")]
    Nodes(fleet::NodesArguments),
    /// Save the sandboxes of a fleet host and stop its server.
    #[cfg(feature = "fleet")]
    Drain(fleet::DrainArguments),
    /// Prepare, back up and restore the ledger and the store of a fleet.
    #[cfg(feature = "fleet")]
    #[command(subcommand)]
    Fleet(Box<fleet::FleetCommand>),
    /// Call a guest from a prompt, with checkpoints, rollbacks and forks.
    #[cfg(feature = "serve")]
    Repl(repl::Arguments),
    /// Warm a guest and save it as a snapshot.
    #[command(after_help = help::SNAPSHOT_EXAMPLE)]
    Snapshot(snapshot::SnapshotArguments),
    /// Call a guest and save the state after the call as a snapshot.
    Fork(snapshot::ForkArguments),
    /// Check that every call of a guest starts from the same state.
    Verify(verify::Arguments),
    /// Show the features and costs of this host, and the chosen strategy.
    Doctor(doctor::Arguments),
    /// Show the layers, sizes, working set and page map of a snapshot.
    Inspect(store::inspect::Arguments),
    /// Compare two snapshots, with exit code 3 if they differ.
    Diff(store::diff::Arguments),
    /// Merge the layers of a snapshot into one.
    Compact(store::compact::Arguments),
    /// Copy a snapshot from a directory to a remote.
    Push(store::transfer::PushArguments),
    /// Copy a snapshot from a remote to a directory.
    Pull(store::transfer::PullArguments),
    /// List the snapshots in a directory or remote.
    List(store::list::Arguments),
    /// Add a name to a snapshot.
    Tag(store::tag::TagArguments),
    /// Remove a name from a snapshot.
    Untag(store::tag::UntagArguments),
    /// Remove unreferenced blobs from a store.
    Gc(store::gc::Arguments),
    /// Convert a raw memory image to a snapshot.
    Import(store::import::Arguments),
    /// Write the memory of a snapshot to a raw image.
    Export(store::export::Arguments),
    /// Create a key that signs or seals snapshots.
    #[cfg(feature = "seal")]
    Keygen(keys::KeygenArguments),
    /// Serve a snapshot's memory to VMMs with Firecracker's userfaultfd protocol.
    Pager(Box<store::pager::Arguments>),
    /// Pass the memory of snapshots to processes of this host, which share it.
    Images(images::Arguments),
    /// Close the VMMs of a pager that is killed.
    #[command(hide = true)]
    PagerWatchdog,
    /// Print completions for a shell.
    Completions(manual::CompletionArguments),
    /// Write the manual pages of this command.
    Man(manual::ManArguments),
}

/// Settings that apply to every command.
#[derive(Debug)]
struct Settings {
    output: Format,
    /// Options for opening guests and snapshots.
    open: afresh::Options,
    /// Limits on snapshots that are pulled.
    #[cfg_attr(not(feature = "remote"), allow(dead_code, reason = "only remotes are pulled from"))]
    limits: afresh::store::Limits,
}

impl Cli {
    fn settings(&self) -> anyhow::Result<Settings> {
        if self.require_isolation {
            require_programs("--require-isolation")?;
            #[cfg(linux_guests)]
            afresh::linux::require_isolation()?;
        }
        let open = images::with_image_server(afresh::Options::new());
        #[cfg(feature = "seal")]
        let open = open.access(self.access.access()?);
        #[cfg(feature = "seal")]
        let limits = self.access.limits()?;
        #[cfg(not(feature = "seal"))]
        let limits = afresh::store::Limits::default();
        Ok(Settings { output: self.output, open, limits })
    }
}

/// Fails with the reason if this build has no Linux programs, which `what` is for.
fn require_programs(what: &str) -> anyhow::Result<()> {
    match afresh::Kind::Program.missing_reason() {
        Some(reason) => anyhow::bail!("{what}: {reason}"),
        None => Ok(()),
    }
}

fn main() -> ExitCode {
    let cli = help::parse();
    let result = cli.settings().and_then(|settings| run_command(&cli.command, &settings));
    match result {
        Ok(code) => code,
        // The reader closed the output, as `head` does.
        Err(error) if is_broken_pipe(&error) => ExitCode::FAILURE,
        Err(error) => {
            message!("afresh: {}", describe(&error));
            hints::print(&error);
            ExitCode::FAILURE
        }
    }
}

fn run_command(command: &Command, settings: &Settings) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(arguments) => run::run(arguments, settings),
        Command::Exec(arguments) => exec::run(arguments, settings),
        Command::Serve(arguments) => serve::run(arguments, settings),
        #[cfg(feature = "mcp")]
        Command::Mcp(arguments) => mcp::run(arguments, settings),
        #[cfg(feature = "fleet")]
        Command::Nodes(arguments) => fleet::nodes(arguments, settings),
        #[cfg(feature = "fleet")]
        Command::Drain(arguments) => fleet::drain(arguments, settings),
        #[cfg(feature = "fleet")]
        Command::Fleet(command) => fleet::fleet(command, settings),
        #[cfg(feature = "serve")]
        Command::Repl(arguments) => repl::run(arguments, settings),
        Command::Snapshot(arguments) => snapshot::snapshot(arguments, settings),
        Command::Fork(arguments) => snapshot::fork(arguments, settings),
        Command::Verify(arguments) => verify::run(arguments, settings),
        Command::Doctor(arguments) => doctor::run(arguments, settings),
        Command::Inspect(arguments) => store::inspect::run(arguments, settings),
        Command::Diff(arguments) => store::diff::run(arguments, settings),
        Command::Compact(arguments) => store::compact::run(arguments, settings),
        Command::Push(arguments) => store::transfer::push(arguments, settings),
        Command::Pull(arguments) => store::transfer::pull(arguments, settings),
        Command::List(arguments) => store::list::run(arguments, settings),
        Command::Tag(arguments) => store::tag::tag(arguments, settings),
        Command::Untag(arguments) => store::tag::untag(arguments, settings),
        Command::Gc(arguments) => store::gc::run(arguments, settings),
        Command::Import(arguments) => store::import::run(arguments, settings),
        Command::Export(arguments) => store::export::run(arguments, settings),
        #[cfg(feature = "seal")]
        Command::Keygen(arguments) => keys::keygen(arguments, settings),
        Command::Pager(arguments) => store::pager::run(arguments, settings),
        Command::Images(arguments) => images::run(arguments, settings),
        Command::PagerWatchdog => store::pager::run_pager_watchdog(),
        Command::Completions(arguments) => manual::completions(arguments),
        Command::Man(arguments) => manual::man(arguments),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The error of a request, on one line.
fn reason(error: impl Into<anyhow::Error>) -> String {
    let text = describe(&error.into());
    text.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// An error and its causes.
fn describe(error: &anyhow::Error) -> String {
    afresh::describe_error(error.as_ref())
}
