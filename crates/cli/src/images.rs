//! `afresh images`: passes the memory of snapshots to processes, which share it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use afresh::Reference;
use afresh::pager::images::{
    ImageClient, ImageClientError, ImageEvent, ImageServer, MAX_IMAGES, is_protected,
};
use afresh::pager::vmm::Listener;
use afresh_sys::own_process;
use anyhow::Context;
use clap::Args;

use crate::Settings;
use crate::log::{Level, Log};
use crate::output::message;
use crate::units::mebibytes;

/// The variable that names the socket of an image server.
const VARIABLE: &str = "AFRESH_IMAGES";

/// Maximum time of one wait before a signal is noticed.
const TICK: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Snapshots to share from the start: PLACE[@NAME]. Processes add others.
    snapshots: Vec<Reference>,
    /// Unix socket to listen on, which processes name in the variable AFRESH_IMAGES.
    ///
    /// For processes of this user and of root.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Maximum memory of the images, in MiB or with a unit.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = mebibytes)]
    budget: u64,
    /// Least severe messages on standard error. In a service each line has the priority of the
    /// journal.
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "info")]
    log_level: Level,
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let log = Log::new(arguments.log_level);
    // Before the first file: another process could write to it until it is sealed.
    own_process::deny_access()?;
    // Half of the descriptors are for images.
    own_process::raise_descriptor_limit(2 * MAX_IMAGES);
    anyhow::ensure!(
        is_protected(&arguments.socket),
        "other users can write to the directory of {}: use a directory of this user alone",
        arguments.socket.display()
    );
    // Signals are watched before the socket exists, so that it is always removed.
    let stop = afresh_sys::termination::watch()?;
    let listener = Listener::bind(&arguments.socket)?;
    let budget = usize::try_from(arguments.budget)
        .ok()
        .and_then(|mib| mib.checked_mul(1 << 20))
        .context("--budget is larger than the address space")?;
    let server = ImageServer::new(listener, budget, move |event| report(log, event));
    for reference in &arguments.snapshots {
        let snapshot = reference.load(&settings.open)?;
        server.add(&snapshot).map_err(|error| anyhow::anyhow!("{reference}: {error}"))?;
    }
    log.line(Level::Info, &format!("images on {}", arguments.socket.display()));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| server.serve(&over));
        while !stop.load(Ordering::Acquire) {
            std::thread::sleep(TICK);
        }
        over.store(true, Ordering::Release);
    });
    Ok(ExitCode::SUCCESS)
}

fn report(log: Log, event: &ImageEvent<'_>) {
    match event {
        ImageEvent::Added { snapshot, bytes, charged } => {
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            let text = format!(
                "the memory of {snapshot} is shared: {:.1} MiB, all images {:.1} MiB",
                mib(*bytes),
                mib(*charged)
            );
            log.line(Level::Info, &text);
        }
        ImageEvent::Failed { snapshot, error } => {
            log.line(Level::Error, &format!("the memory of {snapshot} is not shared: {error}"));
        }
        ImageEvent::OtherUser { user } => {
            log.line(Level::Error, &format!("a process of user {user} was refused"));
        }
        ImageEvent::AnswerFailed { error } => {
            let text = format!("a client got no answer, others may follow: {error}");
            log.line(Level::Error, &text);
        }
        ImageEvent::ClientFailed { error } => {
            log.line(Level::Error, &format!("accepting a client: {error}"));
        }
        _ => log.line(Level::Debug, &format!("{event:?}")),
    }
}

/// The options with the image server that the environment names.
pub(crate) fn with_image_server(options: afresh::Options) -> afresh::Options {
    let Some(socket) = std::env::var_os(VARIABLE).filter(|socket| !socket.is_empty()) else {
        return options;
    };
    let path = PathBuf::from(&socket);
    let report = move |error: &ImageClientError| {
        message!(
            "afresh: {VARIABLE}={}: {error}; this process makes its own images",
            path.display()
        );
    };
    options.images(Arc::new(ImageClient::new(socket, report)))
}
