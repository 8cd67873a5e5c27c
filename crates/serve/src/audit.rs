//! The audit log: one line of JSON for each operation on sandboxes, appended to a file.
//!
//! Promises: a line has no code, no content, no key and no token. Lines are only written at the end
//! of the file. A line that cannot be written is counted and logged; a log that is required refuses
//! the operation then. A full disk may cut off such a line, and the next record begins on a new
//! line. May break it: a host that loses power, since lines are not synced to the disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Mutex;

use hyper::StatusCode;
use prometheus_client::metrics::counter::Counter;
use serde_json::{Map, Value, json};

use crate::error_response::ErrorResponse;
use crate::lock::lock;

/// Permissions of a new log: its owner's alone.
const MODE: u32 = 0o600;

/// The audit log of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditConfig {
    /// The file. It is created if it is missing, and opened again with each reload.
    pub path: PathBuf,
    /// Whether an operation is refused whose beginning cannot be recorded. Each operation has two
    /// lines then.
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
    file: Mutex<LineWriter<File>>,
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

/// Appends lines.
struct LineWriter<W> {
    file: W,
    /// The last line was cut off.
    is_torn: bool,
}

impl<W: Write> LineWriter<W> {
    fn new(file: W) -> Self {
        Self { file, is_torn: false }
    }

    /// Appends a line in one write, so that lines of several processes do not mix.
    fn append(&mut self, line: &str) -> io::Result<()> {
        let begin = if self.is_torn { "\n" } else { "" };
        let line = format!("{begin}{line}\n");
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    rest = &rest[written..];
                    self.is_torn = !rest.is_empty();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl AuditLog {
    pub(crate) fn open(config: &AuditConfig) -> io::Result<Self> {
        Ok(Self {
            file: Mutex::new(LineWriter::new(open(config)?)),
            config: config.clone(),
            records: Counter::default(),
            failures: Counter::default(),
        })
    }

    /// Opens the file of this name again: after a rotation that is another one.
    pub(crate) fn reopen(&self) {
        match open(&self.config) {
            Ok(file) => {
                *lock(&self.file) = LineWriter::new(file);
            }
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
        let line = Value::Object(line).to_string();
        let mut file = lock(&self.file);
        let written = file.append(&line);
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

    /// Records an operation of an operator on the whole server, such as a reload.
    pub(crate) fn record_server(&self, action: &str, is_done: bool) {
        self.write(Map::from_iter([
            ("event".to_owned(), json!("end")),
            ("key".to_owned(), json!("server")),
            ("action".to_owned(), json!(action)),
            ("result".to_owned(), json!(if is_done { "ok" } else { "failed" })),
        ]));
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

    /// A file with room for so many bytes.
    struct FullFile {
        bytes: Vec<u8>,
        room: usize,
    }

    impl Write for FullFile {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let written = bytes.len().min(self.room);
            if written == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= written;
            self.bytes.extend_from_slice(&bytes[..written]);
            Ok(written)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_that_a_full_disk_cuts_off_spoils_no_other_line() {
        let mut log = LineWriter::new(FullFile { bytes: Vec::new(), room: 15 });
        log.append(r#"{"n":1}"#).unwrap();
        // Seven bytes of it fit, and none of the next line.
        log.append(r#"{"n":2}!"#).unwrap_err();
        log.append(r#"{"n":3}"#).unwrap_err();
        log.file.room = 100;
        log.append(r#"{"n":4}"#).unwrap();
        log.append(r#"{"n":5}"#).unwrap();
        let text = String::from_utf8(log.file.bytes).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!([lines[0], lines[2], lines[3]], [r#"{"n":1}"#, r#"{"n":4}"#, r#"{"n":5}"#]);
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
