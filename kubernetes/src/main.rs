//! The command `afresh-kube`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use afresh_kube::context::Settings;
use afresh_kube::controller::{LeaseSettings, run};
use afresh_kube::health::Monitor;
use afresh_kube::operations;
use afresh_kube::server::Server;
use anyhow::{Context, ensure};
use clap::Parser;
use reqwest::Url;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Minimum age of sandboxes that are ended for want of an object. Longer than any request to make
/// one.
const ORPHAN_AGE: Duration = Duration::from_secs(120);
/// Time between two looks at a sandbox that the server does not know, before it counts as ended.
const CONFIRMATION: Duration = Duration::from_secs(30);

/// Limits of `--keep`.
const MIN_KEEP: Duration = Duration::from_secs(60);
const MAX_KEEP: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Maximum bytes of identifiers.
const MAX_ID_BYTES: usize = 512;

/// Serves the custom resources of agent-sandbox by sandboxes of an afresh server.
#[derive(Debug, Parser)]
#[command(name = "afresh-kube", version)]
struct Options {
    /// URL of `afresh serve`
    #[arg(long, env = "AFRESH_URL")]
    server: Url,
    /// File with an API key of the server
    #[arg(long)]
    api_key_file: PathBuf,
    /// URL of the server in statuses and Secrets; that of --server if absent
    #[arg(long)]
    public_url: Option<Url>,
    /// Domain of the server: ports of containers have the address PORT-ID.DOMAIN in the status
    #[arg(long)]
    domain: Option<String>,
    /// Serve this namespace only
    #[arg(long)]
    namespace: Option<String>,
    /// Leave objects whose pod template has another runtime class than `afresh` to other
    /// controllers
    #[arg(long)]
    ignore_other_runtimes: bool,
    /// Time after which the server pauses a sandbox while no controller runs; at most the `timeout`
    /// of the server
    #[arg(long, default_value = "1h", value_parser = humantime::parse_duration)]
    keep: Duration,
    /// Interval of checks of each sandbox
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    resync: Duration,
    /// Interval of searches for sandboxes without an object
    #[arg(long, default_value = "5m", value_parser = humantime::parse_duration)]
    sweep: Duration,
    /// Namespace of the lease; that of the service account if absent
    #[arg(long)]
    lease_namespace: Option<String>,
    /// Identifier of this controller in the cluster, which no other installation may have; the
    /// namespace and the name of the lease if absent
    #[arg(long)]
    controller_id: Option<String>,
    /// Identifier of the cluster, which no other cluster with the same API key may have; that of
    /// the namespace `kube-system` if absent
    #[arg(long)]
    cluster_id: Option<String>,
    /// Image that objects may name, or the start of images before a `*`; may be repeated. Without
    /// it all templates of the server, and no snapshots
    #[arg(long = "image", value_name = "IMAGE")]
    images: Vec<String>,
    /// Name of the lease
    #[arg(long, default_value = "afresh-kube")]
    lease: String,
    /// Address of /healthz, /readyz and /metrics, which need no key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9091")]
    metrics: SocketAddr,
}

impl Options {
    fn check(&self) -> anyhow::Result<()> {
        for (name, url) in
            [("--server", Some(&self.server)), ("--public-url", self.public_url.as_ref())]
        {
            let is_http = url.is_none_or(|url| matches!(url.scheme(), "http" | "https"));
            ensure!(is_http, "{name} needs a URL that begins with http:// or https://");
            let has_user =
                url.is_some_and(|url| !url.username().is_empty() || url.password().is_some());
            ensure!(
                !has_user,
                "{name} must have no user and no password, since statuses and logs show it; the \
                 key is in --api-key-file"
            );
        }
        ensure!(
            (MIN_KEEP..=MAX_KEEP).contains(&self.keep),
            "--keep must be from 60s to 365days, and no more than the `timeout` of the server"
        );
        ensure!(self.resync >= Duration::from_secs(1), "--resync must be at least 1s");
        ensure!(
            self.resync <= self.keep / 3,
            "--resync must be at most a third of --keep, so that sandboxes are prolonged in time"
        );
        for (name, id) in
            [("--controller-id", &self.controller_id), ("--cluster-id", &self.cluster_id)]
        {
            let fits = |id: &String| {
                let letter = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
                !id.is_empty() && id.len() <= MAX_ID_BYTES && id.chars().all(letter)
            };
            ensure!(
                id.as_ref().is_none_or(fits),
                "{name} must be of at most {MAX_ID_BYTES} letters, digits, `-`, `_`, `.` and `/`"
            );
        }
        ensure!(self.sweep >= Duration::from_secs(1), "--sweep must be at least 1s");
        Ok(())
    }
}

async fn serve(options: Options) -> anyhow::Result<()> {
    options.check()?;
    // Before the lease: a process without probes does no work.
    let listener = TcpListener::bind(options.metrics).await.with_context(|| {
        format!("cannot listen on {}; give another address to --metrics", options.metrics)
    })?;
    let config = kube::Config::infer().await.context("cannot find the Kubernetes API")?;
    let namespace = options.lease_namespace.unwrap_or_else(|| config.default_namespace.clone());
    let client = kube::Client::try_from(config).context("cannot reach the Kubernetes API")?;
    let server = Server::new(options.server.clone(), options.api_key_file)?;
    let controller =
        options.controller_id.unwrap_or_else(|| format!("{namespace}/{}", options.lease));
    let settings = Settings {
        controller,
        public_url: options.public_url.unwrap_or(options.server),
        domain: options.domain,
        namespace: options.namespace,
        ignore_other_runtimes: options.ignore_other_runtimes,
        images: options.images,
        keep: options.keep,
        resync: options.resync,
        sweep: options.sweep,
        orphan_age: ORPHAN_AGE,
        confirmation: CONFIRMATION,
    };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/uuid")
        .context("cannot draw a name for this process")?;
    let identity = format!("{}_{}", host.trim(), boot.trim());
    let lease = LeaseSettings { namespace, name: options.lease, identity };
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    };
    let monitor = Arc::new(Monitor::default());
    let running = run(client, server, settings, options.cluster_id, lease, monitor.clone(), stop);
    tokio::select! {
        ended = running => ended,
        () = operations::serve(listener, monitor) => Ok(()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
        tracing::error!("a provider of cryptography is installed already");
        return ExitCode::FAILURE;
    }
    match serve(options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_on_loopback_unless_an_address_is_given() {
        let all = ["afresh-kube", "--api-key-file=key", "--server=http://a"];
        assert!(Options::parse_from(all).metrics.ip().is_loopback());
    }

    #[test]
    fn urls_with_a_password_are_refused() {
        let check = |name: &str, url: &str| {
            let all = ["afresh-kube", "--api-key-file=key", "--server=http://a", name, url];
            let all =
                all.into_iter().filter(|word| *word != "--server=http://a" || name != "--server");
            Options::parse_from(all).check()
        };
        for name in ["--server", "--public-url"] {
            for url in
                ["http://user:secret@afresh/", "http://user@afresh/", "http://:secret@afresh/"]
            {
                let error = check(name, url).expect_err(url).to_string();
                assert!(error.contains(name) && !error.contains("secret"), "{error}");
            }
            check(name, "http://afresh:8080/path").expect("a URL without a user");
        }
    }
}
