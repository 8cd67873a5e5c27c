//! `afresh run` and `afresh verify` of HTTP components: one request at a time, without a server.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use afresh::{Answer, Verification};
use afresh_serve::Handler;
use serde_json::json;
use tokio::runtime::Runtime;

use crate::Settings;
use crate::guest::{Command, GuestArguments};
use crate::output::{self, Format, message, say};
use crate::request::{self, Request};

/// Default maximum duration of a request.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of an answer.
const MAX_ANSWER: usize = 1 << 30;

/// A handler and its request.
pub(crate) struct HandlerRequest {
    runtime: Runtime,
    handler: Handler,
    path: String,
    body: Option<Vec<u8>>,
}

impl HandlerRequest {
    /// Opens the guest if it is an HTTP component and no function is named. The argument is the
    /// path, and the input is the body.
    pub(crate) fn open(
        guest: &GuestArguments,
        request: &Request<'_>,
        settings: &Settings,
    ) -> anyhow::Result<Option<Self>> {
        let Some((path, body)) = request.of_http() else { return Ok(None) };
        // A name that is not a file is a snapshot. If it is missing, opening it fails later.
        // A pipe would wait for its writer, and be empty for its reader.
        let file = std::path::Path::new(&guest.guest);
        let named = file.is_file()
            && std::fs::read(file).is_ok_and(|bytes| {
                afresh::Kind::of(&bytes) == Some(afresh::Kind::Component)
                    && Handler::is_named_in(&bytes)
            });
        if !named {
            return Ok(None);
        }
        let options = guest.options(settings, Command { shown: true, ..Command::default() })?;
        let wasm = guest.wasm(Command { shown: true, ..Command::default() })?;
        let opened = guest.open(&options.wasm(Handler::options(wasm)))?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let time = guest.timeout().unwrap_or(DEFAULT_TIMEOUT);
        let handler = runtime.block_on(Handler::of(&opened, time, MAX_ANSWER))?;
        Ok(handler.map(|handler| Self { runtime, handler, path, body }))
    }

    /// Sends the request `repeat` times and prints the bodies. A 5xx status counts as a failure of
    /// the guest.
    pub(crate) fn run(
        &self,
        repeat: u64,
        report: bool,
        format: Format,
    ) -> anyhow::Result<ExitCode> {
        let (mut times, mut failed) = (Vec::new(), false);
        for _ in 0..repeat {
            let begun = Instant::now();
            let asking = self.handler.request(&self.path, self.body.as_deref());
            let reply = self.runtime.block_on(asking)?;
            let us = begun.elapsed().as_secs_f64() * 1e6;
            times.push(us);
            failed |= reply.status >= 500;
            let text = String::from_utf8_lossy(&reply.body);
            match format {
                Format::Json => {
                    say!("{}", json!({"status": reply.status, "result": text, "us": us}))?;
                }
                Format::Text => {
                    if reply.status >= 400 {
                        message!("afresh: the guest answers with status {}", reply.status);
                    }
                    request::print(&Answer::Bytes(reply.body.to_vec()), &mut std::io::stdout())?;
                }
            }
        }
        if report && !times.is_empty() {
            output::times(times);
        }
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// Sends the request `calls` times. Before each, the next instance is compared with the warm
    /// state.
    pub(crate) fn verify(
        &self,
        calls: u64,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<Verification> {
        let asking = self.handler.verify(&self.path, self.body.as_deref(), calls, progress);
        Ok(self.runtime.block_on(asking)?)
    }
}
