//! The audit log: one line of JSON for each operation on sandboxes, appended to a file.
//!
//! Promises: a line has no code, no content, no key and no token. Lines are only written at the end
//! of the file, by one thread, so that a file that takes no bytes stops nothing else. A line that
//! cannot be written is counted and logged; a log that is required refuses the operation then. A
//! full disk may cut off such a line, and the next record begins on a new line. May break it: a
//! host that loses power, since lines are not synced to the disk, and a killed server, which loses
//! its queued lines.

mod line_queue;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use line_queue::{Entry, LineQueue};
use prometheus_client::metrics::counter::Counter;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use crate::error_response::ErrorResponse;

/// Permissions of a new log: its owner's alone.
const MODE: u32 = 0o600;
/// Time for which an operation waits for its line if the log is required.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which an ending server waits for its lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

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
    queue: Arc<LineQueue>,
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

/// The thread that writes the lines.
struct LogThread {
    config: AuditConfig,
    queue: Arc<LineQueue>,
    file: LineWriter<File>,
    records: Counter,
    failures: Counter,
}

impl LogThread {
    fn run(mut self) {
        while let Some(entry) = self.queue.take() {
            match entry {
                Entry::Line { result: Some(result), .. } if result.is_closed() => {}
                Entry::Line { text, result } => {
                    let is_written = self.append(&text);
                    if let Some(result) = result {
                        // An operation that waits no longer was refused.
                        let _ = result.send(is_written);
                    }
                }
                Entry::Reopen => self.reopen(),
                Entry::Flush(done) => {
                    // The server may have stopped waiting.
                    let _ = done.send(());
                }
            }
        }
    }

    fn append(&mut self, line: &str) -> bool {
        match self.file.append(line) {
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

    fn reopen(&mut self) {
        match open(&self.config) {
            Ok(file) => self.file = LineWriter::new(file),
            Err(error) => {
                self.failures.inc();
                let path = self.config.path.display();
                tracing::error!(%path, %error, "the audit log cannot be opened again; lines go to the old file");
            }
        }
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl AuditLog {
    pub(crate) fn open(config: &AuditConfig) -> io::Result<Self> {
        let log = Self {
            config: config.clone(),
            queue: Arc::default(),
            records: Counter::default(),
            failures: Counter::default(),
        };
        let thread = LogThread {
            config: config.clone(),
            queue: log.queue.clone(),
            file: LineWriter::new(open(config)?),
            records: log.records.clone(),
            failures: log.failures.clone(),
        };
        std::thread::Builder::new().name("audit".to_owned()).spawn(|| thread.run())?;
        Ok(log)
    }

    /// Opens the file of this name again, after the lines of before: after a rotation that is
    /// another one.
    pub(crate) fn reopen(&self) {
        self.queue.add_reopen();
    }

    /// Whether operations without a record are refused.
    pub(crate) fn is_required(&self) -> bool {
        self.config.required
    }

    fn count_failure(&self, error: &str) {
        self.failures.inc();
        let path = self.config.path.display();
        tracing::error!(%path, error, "a line of the audit log could not be written");
    }

    /// Queues one line. False if it is lost.
    fn queue(&self, fields: Map<String, Value>, result: Option<oneshot::Sender<bool>>) -> bool {
        let time = humantime::format_rfc3339_millis(std::time::SystemTime::now()).to_string();
        let mut line = Map::new();
        line.insert("time".to_owned(), Value::String(time));
        line.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
        let is_queued = self.queue.add_line(Value::Object(line).to_string(), result);
        if !is_queued {
            self.count_failure("too many lines wait for the file");
        }
        is_queued
    }

    /// Appends one line, without a wait. A line that is lost is counted.
    pub(crate) fn write(&self, fields: Map<String, Value>) {
        self.queue(fields, None);
    }

    /// Appends one line. False if it could not be written in time; it may be written later then if
    /// the file has taken a part of it.
    async fn write_now(&self, fields: Map<String, Value>) -> bool {
        // With others before it that do not move, it would wait in vain.
        if self.queue.is_stalled(WRITE_TIMEOUT) {
            self.count_failure("the file takes no bytes");
            return false;
        }
        let (sender, result) = oneshot::channel();
        if !self.queue(fields, Some(sender)) {
            return false;
        }
        let Ok(result) = tokio::time::timeout(WRITE_TIMEOUT, result).await else {
            self.count_failure("the file takes no bytes");
            return false;
        };
        // An error is a thread that has ended.
        result.unwrap_or(false)
    }

    /// Waits until the lines of before are written, for a limited time.
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        self.queue.add_flush(done);
        if tokio::time::timeout(FLUSH_TIMEOUT, flushed).await.is_err() {
            let (path, lines) = (self.config.path.display(), self.queue.lines());
            tracing::error!(%path, lines, "the file takes no bytes, and loses lines");
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
    pub(crate) async fn begin(&self, mut fields: Map<String, Value>) -> Result<(), ErrorResponse> {
        if !self.is_required() {
            return Ok(());
        }
        fields.insert("event".to_owned(), json!("begin"));
        match self.write_now(fields).await {
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

    #[tokio::test]
    async fn lines_are_appended_and_a_rotated_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let config = AuditConfig::new(dir.path().join("audit"));
        std::fs::write(&config.path, "{}\n").unwrap();
        let log = AuditLog::open(&config).unwrap();
        assert!(log.write_now(fields()).await);
        let rotated = dir.path().join("audit.1");
        std::fs::rename(&config.path, &rotated).unwrap();
        log.write(fields());
        log.reopen();
        log.write(fields());
        log.flush().await;
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

    #[tokio::test]
    async fn a_required_log_that_cannot_be_written_refuses() {
        let mut config = AuditConfig::new("/dev/full");
        let log = AuditLog::open(&config).unwrap();
        assert!(!log.write_now(fields()).await && log.begin(fields()).await.is_ok());
        config.required = true;
        let log = AuditLog::open(&config).unwrap();
        let refused = log.begin(fields()).await.unwrap_err();
        assert_eq!((refused.status, refused.later), (StatusCode::SERVICE_UNAVAILABLE, true));
        assert_eq!(log.failures.get(), 1);
    }
}
