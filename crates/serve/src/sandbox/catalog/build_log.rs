//! The log of a build.
//!
//! Promises: a log is bounded, and later lines are left out. The log of a failed build ends with
//! the last output of the failing command and the reason, however much was printed before.

use std::collections::VecDeque;
use std::time::SystemTime;

use afresh_interpreter::Stream;
use serde_json::{Value, json};

use crate::sandbox::http::response::rfc3339;

/// Maximum bytes of the log of one build.
const MAX_LOG_BYTES: usize = 256 << 10;
/// Maximum bytes of one line.
const MAX_LINE_BYTES: usize = 4 << 10;
/// Maximum entries of one answer, as in E2B.
const MAX_ENTRIES: usize = 100;
/// Maximum bytes of the last output of a command that is kept for its failure.
const MAX_TAIL_BYTES: usize = 16 << 10;
/// Maximum bytes of that output in the message of the failure.
const MAX_SHOWN_BYTES: usize = 2 << 10;
/// The levels of output.
const STDOUT: &str = "info";
const STDERR: &str = "warn";

/// The log of a build.
#[derive(Default)]
pub(crate) struct BuildLog {
    entries: Vec<LogEntry>,
    /// Bytes of the entries.
    bytes: usize,
    tail: OutputTail,
}

#[derive(Clone)]
pub(crate) struct LogEntry {
    at: SystemTime,
    level: &'static str,
    pub(crate) text: String,
}

impl LogEntry {
    pub(crate) fn to_json(&self) -> Value {
        json!({"timestamp": rfc3339(self.at), "level": self.level, "message": self.text})
    }
}

/// The last output of a command.
#[derive(Default)]
struct OutputTail {
    lines: VecDeque<TailLine>,
    bytes: usize,
}

struct TailLine {
    entry: LogEntry,
    is_logged: bool,
}

impl OutputTail {
    fn add(&mut self, line: TailLine) {
        self.bytes += line.entry.text.len();
        self.lines.push_back(line);
        while self.bytes > MAX_TAIL_BYTES || self.lines.len() > MAX_ENTRIES {
            let Some(first) = self.lines.pop_front() else { return };
            self.bytes -= first.entry.text.len();
        }
    }

    /// The last lines of one level, for a message.
    fn text(&self, level: &str) -> String {
        let mut room = MAX_SHOWN_BYTES;
        let mut shown: Vec<&str> = Vec::new();
        for line in self.lines.iter().rev().filter(|line| line.entry.level == level) {
            let text = line.entry.text.as_str();
            // The end of a line is nearest to the failure.
            shown.push(&text[text.ceil_char_boundary(text.len().saturating_sub(room))..]);
            room = room.saturating_sub(text.len() + 1);
            if room == 0 {
                break;
            }
        }
        shown.reverse();
        shown.join("\n").trim().to_owned()
    }
}

/// Entries for the lines of a text.
fn entries(level: &'static str, text: &str) -> impl Iterator<Item = LogEntry> {
    text.lines().map(move |line| {
        let text = line[..line.floor_char_boundary(MAX_LINE_BYTES)].to_owned();
        LogEntry { at: SystemTime::now(), level, text }
    })
}

impl BuildLog {
    /// Adds lines.
    pub(crate) fn add(&mut self, level: &'static str, text: &str) {
        for entry in entries(level, text) {
            self.push(entry);
        }
    }

    /// Adds an entry; false if there is no room.
    fn push(&mut self, mut entry: LogEntry) -> bool {
        if self.bytes > MAX_LOG_BYTES {
            return false;
        }
        // With the entry itself.
        self.bytes += entry.text.len() + 64;
        let has_room = self.bytes <= MAX_LOG_BYTES;
        if !has_room {
            "the log is full; later lines are left out".clone_into(&mut entry.text);
        }
        self.entries.push(entry);
        has_room
    }

    /// Forgets the output of the command before.
    pub(crate) fn begin_output(&mut self) {
        self.tail = OutputTail::default();
    }

    /// Keeps output of a command for its failure. With `is_logged` it is in the log as well.
    pub(crate) fn keep_output(&mut self, stream: Stream, text: &str, is_logged: bool) {
        let level = if stream == Stream::Stderr { STDERR } else { STDOUT };
        for entry in entries(level, text) {
            let is_logged = is_logged && self.push(entry.clone());
            self.tail.add(TailLine { entry, is_logged });
        }
    }

    /// Ends the log of a failed build, also where the log is full.
    pub(crate) fn fail(&mut self, why: &str) {
        let missing = self.tail.lines.iter().filter(|line| !line.is_logged);
        self.entries.extend(missing.map(|line| line.entry.clone()));
        self.entries.extend(entries("error", why));
    }

    /// Entries for one answer, from `offset`.
    pub(crate) fn page(&self, offset: usize) -> impl Iterator<Item = &LogEntry> {
        self.entries.iter().skip(offset).take(MAX_ENTRIES)
    }

    /// The reason of a failure with the output of its command: of standard error, or of standard
    /// output without that.
    pub(crate) fn reason(&self, why: &str) -> Value {
        let shown = [STDERR, STDOUT].map(|level| self.tail.text(level));
        let message = match shown.iter().find(|shown| !shown.is_empty()) {
            Some(shown) => format!("{why}:\n{shown}"),
            None => why.to_owned(),
        };
        let entries: Vec<Value> = self.tail.lines.iter().map(|line| line.entry.to_json()).collect();
        json!({"message": message, "logEntries": entries})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_bounded() {
        let mut log = BuildLog::default();
        for _ in 0..1000 {
            log.add("info", &"ä".repeat(3000));
        }
        let bytes: usize = log.entries.iter().map(|entry| entry.text.len()).sum();
        assert!(bytes <= MAX_LOG_BYTES && log.entries.last().unwrap().text.contains("full"));
        assert_eq!(log.page(1).count(), log.entries.len() - 1);
    }

    #[test]
    fn a_failure_has_the_last_output_of_its_command() {
        let mut log = BuildLog::default();
        log.keep_output(Stream::Stderr, "of the step before\n", true);
        log.begin_output();
        for line in 0..100_000 {
            log.keep_output(Stream::Stdout, &format!("line {line}\n"), true);
        }
        log.keep_output(Stream::Stderr, &format!("{}\n", "\u{e9}".repeat(8 << 20)), true);
        log.keep_output(Stream::Stderr, "the cause\nand more\n", true);
        log.keep_output(Stream::Stdout, "the end\n", true);
        let why = "`make` failed with exit code 2";
        log.fail(why);
        let last = &log.entries[log.entries.len() - 4..];
        let last: Vec<_> = last.iter().map(|entry| (entry.level, entry.text.as_str())).collect();
        let output = [("warn", "the cause"), ("warn", "and more"), ("info", "the end")];
        assert_eq!((&last[..3], last[3]), (&output[..], ("error", why)));
        let reason = log.reason(why);
        let message = reason["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{why}:\n\u{e9}")), "{message}");
        assert!(message.ends_with("\u{e9}\nthe cause\nand more"), "{message}");
        assert!(message.len() < MAX_SHOWN_BYTES + 100 && !message.contains("before"), "{message}");
        assert!(reason["logEntries"].as_array().unwrap().len() <= MAX_ENTRIES);
        assert!(reason["logEntries"].to_string().len() < 2 * MAX_TAIL_BYTES);
    }

    #[test]
    fn the_oldest_line_of_a_message_keeps_its_end() {
        let mut log = BuildLog::default();
        let line = format!("begins{} ends\nthe cause\n", "x".repeat(MAX_SHOWN_BYTES));
        log.keep_output(Stream::Stderr, &line, true);
        let reason = log.reason("no");
        let message = reason["message"].as_str().unwrap();
        assert!(message.ends_with("x ends\nthe cause") && !message.contains("begins"), "{message}");
    }

    #[test]
    fn a_failure_without_standard_error_has_standard_output() {
        let mut log = BuildLog::default();
        assert_eq!(log.reason("no"), json!({"message": "no", "logEntries": []}));
        log.keep_output(Stream::Stdout, "1 failed\n", false);
        assert_eq!(log.page(0).count(), 0);
        log.fail("no");
        assert_eq!(log.page(0).count(), 2);
        assert_eq!(log.reason("no")["message"], "no:\n1 failed");
    }
}
