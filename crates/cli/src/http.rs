//! `afresh serve` over HTTP: builds a server from arguments and a file, and handles signals.
//!
//! SIGTERM and SIGINT end it after pending requests are answered, a second SIGINT immediately.
//! SIGHUP reloads the file, keys, budgets and certificate, and opens the guests and the audit log
//! again.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use afresh_serve::{Config, GuestConfig, ServeError, Server};
use anyhow::{Context, anyhow};
use clap::Args;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
#[cfg(feature = "otel")]
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::Settings;
use crate::output::{Format, message, say};
use crate::serve::Arguments;

/// Time for which an ended server waits for its threads.
const THREADS_END_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
#[group(id = "http", conflicts_with = "stdio", multiple = true)]
pub(crate) struct HttpArguments {
    /// Address to listen on [default: 127.0.0.1:8080].
    #[arg(long, value_name = "ADDR:PORT")]
    addr: Option<SocketAddr>,
    /// Separate address for /metrics, /status, /healthz and /readyz [default: the address of
    /// --addr].
    #[arg(long, value_name = "ADDR:PORT")]
    admin: Option<SocketAddr>,
    /// Read guests, routes and budgets from a file.
    ///
    /// Guests of the command line are added.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check a file as --config would read it, print each fault with its line and column, and exit.
    ///
    /// Nothing is opened or listened at. The exit code is 1 if there is a fault.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "guests"])]
    check: Option<PathBuf>,
    /// Append a line of JSON for each operation on sandboxes to a file.
    ///
    /// SIGHUP opens the file again.
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
    /// Refuse operations on sandboxes that the audit log cannot record.
    #[arg(long)]
    audit_required: bool,
    /// Content type of the responses of byte guests.
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,
    /// Maximum size of a request body, in KiB.
    #[arg(long, value_name = "KIB")]
    max_body: Option<usize>,
    /// Maximum number of concurrent requests, over all guests.
    #[arg(long, value_name = "N")]
    max_concurrent_requests: Option<usize>,
    /// Maximum number of concurrent connections.
    #[arg(long, value_name = "N")]
    max_concurrent_connections: Option<usize>,
    /// Number of requests that an instance answers before it is reset.
    ///
    /// With more than 1, a request sees the state that earlier ones left.
    #[arg(long, value_name = "N")]
    max_instance_reuse_count: Option<usize>,
    /// Time that an instance waits for another request before it is reset, as `1s` or `100ms`.
    #[arg(long, value_name = "TIME", value_parser = afresh_serve::parse_duration)]
    idle_instance_timeout: Option<Duration>,
    /// Serve HTTPS with this PEM file: the certificate, followed by its intermediate certificates.
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the private key of --tls-cert.
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Log level on standard error: error, warn, info, debug (each request) or trace.
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    log: tracing::Level,
}

/// Splits an argument into a route and a guest.
fn route(text: &str) -> (Option<&str>, &str) {
    match text.split_once('=') {
        Some((route, guest)) if route.starts_with('/') => (Some(route), guest),
        _ => (None, text),
    }
}

impl Arguments {
    fn config(&self, settings: &Settings) -> anyhow::Result<Config> {
        let http = &self.http;
        let mut config = match &http.config {
            Some(path) => {
                let mut open = settings.open.clone();
                if let Some(cache) = &self.how.cache {
                    open = open.cache(cache);
                }
                Config::read(path, &open)?
            }
            None => Config::default(),
        };
        if let Some(addr) = http.addr {
            config.addr = addr;
        }
        config.admin = http.admin.or(config.admin);
        if let Some(path) = &http.audit {
            config.audit = Some(afresh_serve::AuditConfig::new(path));
        }
        if http.audit_required {
            let audit = config.audit.as_mut();
            let audit = audit.context(
                "--audit-required needs --audit FILE, or `audit` in the file of --config",
            )?;
            audit.required = true;
        }
        #[cfg(feature = "fleet")]
        {
            config.fleet = self.fleet.config(config.fleet.take())?;
        }
        #[cfg(feature = "tls")]
        if let (Some(certificate), Some(key)) = (&http.tls_cert, &http.tls_key) {
            let (certificate, key) = (certificate.clone(), key.clone());
            config.tls = Some(afresh_serve::TlsConfig { certificate, key });
        }
        if let Some(most) = http.max_concurrent_requests {
            config.max_concurrent_requests = most;
        }
        if let Some(most) = http.max_concurrent_connections {
            config.max_concurrent_connections = most;
        }
        for text in &self.guests {
            config.guests.push(self.guest(text, settings)?);
        }
        Ok(config)
    }

    fn guest(&self, text: &str, settings: &Settings) -> anyhow::Result<GuestConfig> {
        let http = &self.http;
        let (route, reference) = route(text);
        if let (None, Some((before, _))) = (route, text.split_once('=')) {
            anyhow::ensure!(
                Path::new(text).exists() || before.contains(['/', '@', '.', ':']),
                "a route begins with `/`: `/{text}`"
            );
        }
        let found = self.how.reference(reference.as_ref())?.into_string();
        let found = found.map_err(|path| anyhow!("{} is not UTF-8", path.display()))?;
        let mut guest = GuestConfig::new(found);
        guest.name = route.unwrap_or(reference).to_owned();
        guest.open = self.how.options(reference.as_ref(), settings, self.command())?;
        let mode = self.how.wasm.mode.unwrap_or(guest.wasm.mode);
        guest.wasm = self.how.wasm(reference.as_ref(), self.command())?;
        guest.wasm.mode = mode;
        guest.call.clone_from(&self.call);
        if let Some(route) = route {
            route.clone_into(&mut guest.route);
        }
        if let Some(content_type) = &http.content_type {
            guest.content_type.clone_from(content_type);
        }
        if let Some(timeout) = self.how.timeout {
            guest.timeout = Duration::from_millis(timeout);
        }
        if let Some(mib) = self.how.memory {
            guest.memory = mib.saturating_mul(1 << 20);
        }
        if let Some(kib) = http.max_body {
            guest.max_body = kib.saturating_mul(1 << 10);
        }
        if let Some(most) = http.max_instance_reuse_count {
            guest.max_instance_reuse_count = most;
        }
        if let Some(idle) = http.idle_instance_timeout {
            guest.idle_instance_timeout = idle;
        }
        Ok(guest)
    }
}

/// Prints the faults of a configuration.
fn check(path: &Path, settings: &Settings) -> anyhow::Result<ExitCode> {
    let faults = Config::check(path);
    if settings.output == Format::Json {
        let listed = faults.iter().map(
            |fault| json!({"line": fault.line, "column": fault.column, "message": fault.message}),
        );
        say!(
            "{}",
            json!({"file": path.display().to_string(), "faults": listed.collect::<Vec<_>>()})
        )?;
    } else {
        for fault in &faults {
            say!("{fault}")?;
        }
        if faults.is_empty() {
            say!("{}: no faults", path.display())?;
        }
    }
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    if let Some(path) = &arguments.http.check {
        return check(path, settings);
    }
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = log.fmt_fields(crate::log_fields::printable_fields());
    // Escape codes are for terminals alone.
    let log = log.with_ansi(std::io::stderr().is_terminal());
    let log = log.with_filter(LevelFilter::from_level(arguments.http.log));
    let subscriber = tracing_subscriber::registry().with(log);
    let config = arguments.config(settings)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.max_blocking_threads(config.blocking_threads()).enable_all().build()?;
    #[cfg(not(feature = "otel"))]
    let ended = {
        subscriber.init();
        runtime.block_on(serve(config, arguments, settings))
    };
    #[cfg(feature = "otel")]
    let ended = {
        let traces = afresh_serve::otel::Settings::from_env()?;
        let notes = traces.as_ref().map_or_else(Vec::new, |traces| traces.notes().to_vec());
        let traces = traces.map(afresh_serve::otel::Traces::new);
        // The spans of the server itself, independent of the log level.
        let own = Targets::new().with_target("afresh", LevelFilter::DEBUG);
        subscriber.with(traces.as_ref().map(|traces| traces.layer().with_filter(own))).init();
        notes.into_iter().for_each(|note| tracing::warn!("{note}"));
        runtime.block_on(async {
            let counted = traces.as_ref().map(afresh_serve::otel::Traces::counted);
            let sending = traces.map(afresh_serve::otel::Traces::begin).transpose()?;
            let ended = serve(config, arguments, settings, counted).await;
            if let Some(sending) = sending {
                sending.end().await;
            }
            ended
        })
    };
    // A call that hangs has a thread that never ends.
    runtime.shutdown_timeout(THREADS_END_TIMEOUT);
    ended
}

async fn serve(
    #[cfg_attr(not(feature = "otel"), allow(unused_mut, reason = "traces are counted"))]
    mut config: Config,
    arguments: &Arguments,
    settings: &Settings,
    #[cfg(feature = "otel")] traces: Option<afresh_serve::otel::TraceCounts>,
) -> anyhow::Result<ExitCode> {
    #[cfg(feature = "otel")]
    {
        config.traces = traces;
    }
    let (mut end, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut renew = signal(SignalKind::hangup())?;
    let names: Vec<&str> = config.guests.iter().map(|guest| guest.name.as_str()).collect();
    if !names.is_empty() {
        message!("Opening {}", names.join(", "));
    }
    let server = tokio::select! {
        server = Server::bind(config) => server?,
        _ = end.recv() => return Ok(ExitCode::SUCCESS),
        _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
    };
    let addr = server.addr();
    let scheme = if server.is_https() { "https" } else { "http" };
    message!("Serving HTTP on {scheme}://{addr}/");
    if settings.output == Format::Json {
        let line = json!({"addr": addr.to_string(), "admin": server.admin().to_string()});
        say!("{line}")?;
    }
    let handle = server.handle();
    let mut serving = tokio::spawn(server.run());
    let mut reloading: Option<tokio::task::JoinHandle<Result<(), ServeError>>> = None;
    loop {
        tokio::select! {
            // A signal during a reload waits for its end. Several count as one.
            _ = renew.recv(), if reloading.is_none() => match arguments.config(settings) {
                Ok(config) => {
                    let handle = handle.clone();
                    reloading = Some(tokio::spawn(async move { handle.reload(&config).await }));
                }
                Err(error) => {
                    handle.record_failed_reload();
                    report_reload(Err(error));
                }
            },
            done = async { reloading.as_mut().expect("a reload").await }, if reloading.is_some() => {
                reloading = None;
                report_reload(done.map_err(anyhow::Error::from).and_then(|done| Ok(done?)));
            }
            _ = end.recv() => break,
            _ = interrupt.recv() => break,
            // Another task ended the server.
            done = &mut serving => {
                return ended(done?);
            }
        }
    }
    // It exchanges everything at its end, or nothing.
    reloading.inspect(tokio::task::JoinHandle::abort);
    handle.shutdown();
    tokio::select! {
        done = serving => ended(done?),
        _ = interrupt.recv() => {
            message!("afresh: pending requests were aborted");
            ended_early(handle.unsaved_sandboxes())
        }
    }
}

fn report_reload(done: anyhow::Result<()>) {
    match done {
        Ok(()) => message!("Reloaded the guests, templates, keys, budgets and certificate"),
        Err(error) => {
            let why = crate::describe(&error);
            message!("afresh: cannot reload, the previous configuration stays in effect: {why}");
        }
    }
}

/// The exit status of a server that has ended.
fn ended(saved: bool) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(saved, "some sandboxes could not be saved; the log names them");
    Ok(ExitCode::SUCCESS)
}

/// The end of a server that was interrupted while it saved its sandboxes.
fn ended_early(unsaved: usize) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        unsaved == 0,
        "{unsaved} sandboxes were not saved, and their calls since the last save are lost"
    );
    Ok(ExitCode::SUCCESS)
}
