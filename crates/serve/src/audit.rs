//! The audit log: one line of JSON for each operation on sandboxes, appended to a file.
//!
//! Promises: a line has no code, no content, no key and no token. Lines are written whole, and only at the end of the
//! file. A line that cannot be written is counted and logged; a log that is required refuses the operation then. May
//! break it: a host that loses power, since lines are not synced to the disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use hyper::StatusCode;
use prometheus_client::metrics::counter::Counter;
use serde_json::{Map, Value, json};

use crate::error_response::ErrorResponse;

/// Permissions of a new log: its owner's alone.
const MODE: u32 = 0o600;

/// The audit log of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditConfig {
    /// The file. It is created if it is missing, and opened again with each reload.
    pub path: PathBuf,
    /// Whether an operation is refused whose beginning cannot be recorded. Each operation has two lines then.
    pub required: bool,
}

impl AuditConfig {
    /// A log in `path` that refuses nothing.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), required: false }
    }
}

/// The log, open.
pub(crate) struct AuditLog {
    config: AuditConfig,
    file: Mutex<File>,
    pub(crate) records: Counter,
    pub(crate) failures: Counter,
}

impl std::fmt::Debug for AuditLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuditLog").field("path", &self.config.path).finish_non_exhaustive()
    }
}

fn open(config: &AuditConfig) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(MODE).open(&config.path)
}

impl AuditLog {
    pub(crate) fn open(config: &AuditConfig) -> io::Result<Self> {
        Ok(Self {
            file: Mutex::new(open(config)?),
            config: config.clone(),
            records: Counter::default(),
            failures: Counter::default(),
        })
    }

    /// Opens the file of this name again: after a rotation that is another one.
    pub(crate) fn reopen(&self) {
        match open(&self.config) {
            Ok(file) => *self.file.lock().unwrap_or_else(PoisonError::into_inner) = file,
            Err(error) => {
                self.failures.inc();
                let path = self.config.path.display();
                tracing::error!(%path, %error, "the audit log cannot be opened again; lines go to the old file");
            }
        }
    }

    /// Whether operations without a record are refused.
    pub(crate) fn is_required(&self) -> bool {
        self.config.required
    }

    /// Appends one line. False if that failed.
    pub(crate) fn write(&self, fields: Map<String, Value>) -> bool {
        let time = humantime::format_rfc3339_millis(std::time::SystemTime::now()).to_string();
        let mut line = Map::new();
        line.insert("time".to_owned(), Value::String(time));
        line.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
        let line = format!("{}\n", Value::Object(line));
        // One write, so that lines of several processes do not mix.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = file.write_all(line.as_bytes());
        drop(file);
        match written {
            Ok(()) => {
                self.records.inc();
                true
            }
            Err(error) => {
                self.failures.inc();
                let path = self.config.path.display();
                tracing::error!(%path, %error, "a line of the audit log could not be written");
                false
            }
        }
    }

    /// Records the beginning of an operation if the log is required.
    pub(crate) fn begin(&self, fields: &Map<String, Value>) -> Result<(), ErrorResponse> {
        if !self.is_required() {
            return Ok(());
        }
        let mut fields = fields.clone();
        fields.insert("event".to_owned(), json!("begin"));
        match self.write(fields) {
            true => Ok(()),
            false => Err(ErrorResponse::busy(
                StatusCode::SERVICE_UNAVAILABLE,
                "the audit log cannot be written, and this server does nothing without it; try again later",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields() -> Map<String, Value> {
        Map::from_iter([("tenant".to_owned(), json!("acme")), ("key".to_owned(), Value::Null)])
    }

    #[test]
    fn lines_are_appended_and_a_rotated_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let config = AuditConfig::new(dir.path().join("audit"));
        std::fs::write(&config.path, "{}\n").unwrap();
        let log = AuditLog::open(&config).unwrap();
        assert!(log.write(fields()));
        let rotated = dir.path().join("audit.1");
        std::fs::rename(&config.path, &rotated).unwrap();
        assert!(log.write(fields()));
        log.reopen();
        assert!(log.write(fields()));
        let lines = |path| std::fs::read_to_string(path).unwrap();
        assert_eq!(lines(&rotated).lines().count(), 3);
        let text = lines(&config.path);
        let line: Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!(line["tenant"], "acme");
        assert!(line["time"].is_string() && line.get("key").is_none());
        assert_eq!(log.records.get(), 3);
    }

    #[test]
    fn a_required_log_that_cannot_be_written_refuses() {
        let mut config = AuditConfig::new("/dev/full");
        let log = AuditLog::open(&config).unwrap();
        assert!(!log.write(fields()) && log.begin(&fields()).is_ok());
        config.required = true;
        let log = AuditLog::open(&config).unwrap();
        let refused = log.begin(&fields()).unwrap_err();
        assert_eq!((refused.status, refused.later), (StatusCode::SERVICE_UNAVAILABLE, true));
        assert_eq!(log.failures.get(), 1);
    }
}
