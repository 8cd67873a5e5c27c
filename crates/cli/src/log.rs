//! Messages of services on standard error: lines for people, or for the journal of systemd.

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt;

use clap::ValueEnum;

use crate::output::printable;

/// How severe a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Level {
    /// An operation has failed.
    Error,
    /// A state of the service.
    Info,
    /// An event of the normal operation.
    Debug,
}

impl Level {
    /// Its priority in the journal, as syslog numbers them.
    fn priority(self) -> u8 {
        match self {
            Self::Error => 3,
            Self::Info => 6,
            Self::Debug => 7,
        }
    }
}

/// Where messages go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log {
    level: Level,
    /// Whether standard error is the journal's.
    journal: bool,
}

impl Log {
    /// Prints messages of `level` and more severe ones.
    pub(crate) fn new(level: Level) -> Self {
        let stderr = std::fs::metadata("/proc/self/fd/2");
        let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
        let journal = stderr.is_ok_and(|meta| stream == format!("{}:{}", meta.dev(), meta.ino()));
        Self { level, journal }
    }

    /// Prints a message. Without a reader it is lost.
    pub(crate) fn line(self, level: Level, text: &str) {
        if level <= self.level {
            let text = self.format(level, &printable(text));
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }

    /// Each line of a message has its priority in the journal.
    fn format(self, level: Level, text: &str) -> String {
        if !self.journal {
            return format!("afresh: {text}\n");
        }
        let mut lines = String::new();
        for line in text.lines() {
            // Writing to a string cannot fail.
            let _ = writeln!(lines, "<{}>{line}", level.priority());
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_priority_in_the_journal_alone() {
        let log = Log { level: Level::Info, journal: true };
        assert_eq!(log.format(Level::Error, "one\ntwo"), "<3>one\n<3>two\n");
        let log = Log { level: Level::Info, journal: false };
        assert_eq!(log.format(Level::Debug, "one"), "afresh: one\n");
        assert!(Level::Error < Level::Debug);
    }
}
