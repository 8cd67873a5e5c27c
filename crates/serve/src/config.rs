//! Configuration of a server: its addresses, limits and guests.
//!
//! The defaults suit a server of a guest that is not trusted, on this machine alone.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use afresh::wasm::GuestOptions;

use crate::audit::AuditConfig;
use crate::sandbox::SandboxConfig;

/// A server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Address for requests.
    pub addr: SocketAddr,
    /// Address for `/metrics`, `/status`, `/healthz` and `/readyz`, if not that for requests.
    pub admin: Option<SocketAddr>,
    /// Maximum requests that guests answer at the same time, all guests together.
    pub max_concurrent_requests: usize,
    /// Maximum connections at the same time; further ones wait to be accepted.
    pub max_concurrent_connections: usize,
    /// Maximum bytes of requests and answers in memory, all guests together.
    pub max_buffered_bytes: usize,
    /// Maximum connections of one client address at the same time.
    pub max_connections_per_address: Option<usize>,
    /// Maximum requests of one client address in a minute.
    pub max_requests_per_address: Option<u32>,
    /// Whether a proxy in front names the client of a request last in `X-Forwarded-For`.
    pub forwarded_for: bool,
    /// The audit log of sandboxes, if there is one.
    pub audit: Option<AuditConfig>,
    /// Time limit for the head of a request, an idle connection's next one included.
    pub head_timeout: Duration,
    /// Time limit for the body of a request, and for a client to take the next part of an answer.
    pub body_timeout: Duration,
    /// Time for which an ending server still accepts connections. Each answer announces that it
    /// closes the connection.
    pub drain: Duration,
    /// Time for which it then waits for running requests.
    pub grace: Duration,
    /// The guests.
    pub guests: Vec<GuestConfig>,
    /// Sandboxes, if there are any.
    pub sandboxes: Option<SandboxConfig>,
    /// Other machines that share the work, if there are any.
    #[cfg(feature = "fleet")]
    pub fleet: Option<crate::fleet::FleetConfig>,
    /// The certificate and key to serve HTTPS with, in place of HTTP.
    #[cfg(feature = "tls")]
    pub tls: Option<crate::tls::TlsConfig>,
    /// Counters of traces, for `/metrics`.
    #[cfg(feature = "otel")]
    pub traces: Option<crate::otel::TraceCounts>,
}

/// Threads of a server for saves, pulls, builds and reads of files.
const OTHER_THREADS: usize = 256;
/// Threads of a server with few places.
const MIN_THREADS: usize = 512;
/// More are of no use, and a runtime adds its workers to them without a check.
const MAX_THREADS: usize = 1 << 16;

impl Config {
    /// Threads for blocking work that a runtime needs for as many calls and requests as this
    /// configuration allows at a time.
    #[must_use]
    pub fn blocking_threads(&self) -> usize {
        // As many calls as run may wait for their clients, each on its thread.
        let calls = self.sandboxes.as_ref().map_or(0, |all| all.max_running_calls);
        let calls = calls.saturating_mul(2).saturating_add(self.max_concurrent_requests);
        calls.saturating_add(OTHER_THREADS).clamp(MIN_THREADS, MAX_THREADS)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            admin: None,
            max_concurrent_requests: 128,
            max_concurrent_connections: 16 << 10,
            max_buffered_bytes: 256 << 20,
            max_connections_per_address: None,
            max_requests_per_address: None,
            forwarded_for: false,
            audit: None,
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            drain: Duration::from_millis(200),
            grace: Duration::from_secs(30),
            guests: Vec::new(),
            sandboxes: None,
            #[cfg(feature = "fleet")]
            fleet: None,
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "otel")]
            traces: None,
        }
    }
}

/// A guest under a route, with a separate budget.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GuestConfig {
    /// Its name in metrics and logs.
    pub name: String,
    /// The prefix of the paths that it answers: whole segments, `/` for all paths without another
    /// guest.
    pub route: String,
    /// The host that it answers for, without a port; any if not set.
    pub host: Option<String>,
    /// The reference for [`afresh::open`].
    pub reference: String,
    /// Options of opening it. Its timeout and memory are those below.
    pub open: afresh::Options,
    /// Options of Wasm guests. The server sets asynchronous calls, imports and state.
    pub wasm: GuestOptions,
    /// The function that answers, of guests that take and give bytes.
    pub call: String,
    /// Content type of guest answers.
    pub content_type: String,
    /// Time limit of one request once it has been read: for waiting, and for the guest.
    pub timeout: Duration,
    /// Maximum bytes of the memories and tables of one instance together.
    pub memory: u64,
    /// Maximum bytes of a request body.
    pub max_body: usize,
    /// Maximum requests that it answers at the same time.
    pub max_concurrent_requests: usize,
    /// Maximum requests that wait for that.
    pub max_waiting_requests: usize,
    /// Requests that one instance answers before it is reset. With 1 every request is answered from
    /// the warm state; with more, a request sees the state of up to that many before it.
    pub max_instance_reuse_count: usize,
    /// Time for which an instance is kept for its next request, if it may answer several.
    pub idle_instance_timeout: Duration,
}

impl GuestConfig {
    /// The guest that `reference` names, for all paths, with the usual limits.
    #[must_use]
    pub fn new(reference: impl Into<String>) -> Self {
        let reference = reference.into();
        Self {
            name: "guest".to_owned(),
            route: "/".to_owned(),
            host: None,
            reference,
            open: afresh::Options::new(),
            wasm: GuestOptions { mode: afresh::wasm::Mode::Fresh, ..GuestOptions::default() },
            call: "handle".to_owned(),
            content_type: "application/octet-stream".to_owned(),
            timeout: Duration::from_secs(30),
            memory: 1 << 30,
            max_body: 8 << 20,
            max_concurrent_requests: 64,
            max_waiting_requests: 1024,
            max_instance_reuse_count: 1,
            idle_instance_timeout: Duration::from_secs(1),
        }
    }
}

/// Parses a time as `wasmtime serve` does: seconds, or a number with `s`, `ms` or `us` behind it.
///
/// # Errors
/// A message for any other text.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| {
        format!("`{text}` is not a duration: write a whole number followed by s, ms or us")
    })?;
    match &text[digits.len()..] {
        "" | "s" => Ok(Duration::from_secs(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "us" => Ok(Duration::from_micros(number)),
        other => Err(format!("`{text}`: the unit `{other}` is not known; there are s, ms and us")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_follow_the_places_for_calls_and_requests() {
        let mut config = Config::default();
        assert_eq!(config.blocking_threads(), MIN_THREADS);
        config.max_concurrent_requests = 1000;
        assert_eq!(config.blocking_threads(), 1000 + OTHER_THREADS);
        let mut sandboxes = crate::SandboxConfig::new("/nonexistent");
        sandboxes.max_running_calls = 700;
        config.sandboxes = Some(sandboxes);
        assert_eq!(config.blocking_threads(), 2400 + OTHER_THREADS);
    }

    #[test]
    fn times_are_read_with_and_without_a_unit() {
        assert_eq!(parse_duration("3"), Ok(Duration::from_secs(3)));
        assert_eq!(parse_duration("3s"), Ok(Duration::from_secs(3)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("7us"), Ok(Duration::from_micros(7)));
        for wrong in ["", "s", "-1", "1.5", "1h", "1 s", "99999999999999999999"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }
}
