//! Options for the connections of Linux programs: grants, a file of them, and a log.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use afresh::linux::{ConnectionLog, ConnectionReceiver, ConnectionRecord, NetGrant};
use anyhow::Context;
use clap::Args;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Maximum bytes of a file of rules.
const MAX_RULES_BYTES: u64 = 1 << 20;

#[derive(Debug, Args)]
pub(crate) struct NetArguments {
    /// Allow a Linux program to connect to a server.
    ///
    /// `*.NAME` matches subdomains, and `*` any port; =HOST:PORT redirects the connection. A table
    /// in JSON is a rule for HTTP requests. Without this option only loopback is reachable. May be
    /// repeated.
    #[arg(long, value_name = "NAME:PORT[=HOST:PORT]")]
    net: Vec<NetGrant>,
    /// Allow a Linux program the connections that a TOML file lists:
    /// `net = ["NAME:PORT", { to = "NAME:PORT", … }]`.
    ///
    /// The list is that of a template of `afresh serve`. May be repeated, and with `--net`.
    #[arg(long, value_name = "FILE")]
    net_rules: Vec<PathBuf>,
    /// Append a line of JSON to a file for each connection of a Linux program, and for each request
    /// that a rule allows or refuses.
    ///
    /// A line has `time`, `host`, `port` and `result`, and `reason`, `method` and `path` where
    /// there are any. After 100 lines at once there are at most 10 in a second, and `dropped`
    /// counts those left out. A new file has access for this user alone.
    #[arg(long, value_name = "FILE")]
    net_log: Option<PathBuf>,
}

/// A file of `--net-rules`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesFile {
    net: Vec<NetGrant>,
}

/// A log of connections in a file.
struct LogFile(Mutex<File>);

impl ConnectionReceiver for LogFile {
    fn record(&self, record: &ConnectionRecord) {
        let mut line = line(record, SystemTime::now()).to_string();
        line.push('\n');
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(line.as_bytes()) {
            // Standard error may be closed.
            let _ = writeln!(io::stderr(), "afresh: --net-log: a line is lost: {error}");
        }
    }
}

/// The line of a record.
fn line(record: &ConnectionRecord, time: SystemTime) -> Value {
    let request = |part: fn(&(String, String)) -> &String| record.request.as_ref().map(part);
    let fields = [
        ("time", json!(humantime::format_rfc3339_millis(time).to_string())),
        ("host", json!(record.host)),
        ("port", json!(record.port)),
        ("result", json!(record.outcome.as_str())),
        ("reason", json!(record.reason)),
        ("method", json!(request(|(method, _)| method))),
        ("path", json!(request(|(_, path)| path))),
        ("dropped", json!((record.dropped > 0).then_some(record.dropped))),
    ];
    let given = fields.into_iter().filter(|(_, value)| !value.is_null());
    Value::Object(Map::from_iter(given.map(|(name, value)| (name.to_owned(), value))))
}

impl NetArguments {
    /// Whether no option is given.
    pub(crate) fn is_empty(&self) -> bool {
        self.net.is_empty() && self.net_rules.is_empty() && self.net_log.is_none()
    }

    /// The grants of the options and of the files.
    pub(crate) fn grants(&self) -> anyhow::Result<Vec<NetGrant>> {
        let mut all = self.net.clone();
        for path in &self.net_rules {
            let of = || format!("--net-rules {}", path.display());
            // The size of a pipe is not known before.
            let mut text = String::new();
            let mut file = File::open(path).with_context(of)?.take(MAX_RULES_BYTES + 1);
            file.read_to_string(&mut text).with_context(of)?;
            anyhow::ensure!(file.limit() > 0, "{}: it has more than {MAX_RULES_BYTES} bytes", of());
            let file: RulesFile = toml::from_str(&text).with_context(of)?;
            all.extend(file.net);
        }
        Ok(all)
    }

    /// The log, if there is one.
    pub(crate) fn log(&self) -> anyhow::Result<Option<ConnectionLog>> {
        let Some(path) = &self.net_log else { return Ok(None) };
        // Requests of a program are no other user's business.
        let file = File::options().append(true).create(true).mode(0o600).open(path);
        let file = file.with_context(|| format!("--net-log {}", path.display()))?;
        let receiver = Arc::new(LogFile(Mutex::new(file)));
        Ok(Some(ConnectionLog::of_requests("", receiver)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_log_is_private() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let net_log = Some(path.clone());
        let arguments = NetArguments { net: Vec::new(), net_rules: Vec::new(), net_log };
        arguments.log().unwrap().unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn rules_without_an_end_are_an_error() {
        let net_rules = vec![PathBuf::from("/dev/zero")];
        let arguments = NetArguments { net: Vec::new(), net_rules, net_log: None };
        let error = arguments.grants().unwrap_err().to_string();
        assert!(error.contains("/dev/zero: it has more than 1048576 bytes"), "{error}");
    }
}
