//! Memory and storage of a fleet over time.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::nats_server::files_below;

/// Memory and storage at one time, in KiB.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) at: Duration,
    /// Resident memory of each host, and its age.
    pub(crate) hosts: Vec<(u64, Duration)>,
    /// Directories of all hosts.
    pub(crate) local: u64,
    /// Directories of all NATS servers.
    pub(crate) nats: u64,
    /// The fleet's store, before unreferenced states were removed and after.
    pub(crate) store: (u64, u64),
}

impl std::fmt::Display for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hosts = self.hosts.iter().map(|(kib, age)| format!("{} ({})", kib, age.as_secs()));
        write!(
            f,
            "at {} s: KiB of hosts {}; of their directories {}, of NATS {}, of the store {} before and {} after gc",
            self.at.as_secs(),
            hosts.collect::<Vec<_>>().join(", "),
            self.local,
            self.nats,
            self.store.0,
            self.store.1
        )
    }
}

/// KiB of all files below a directory.
pub(crate) fn kib_below(dir: &Path) -> u64 {
    let size = |file: PathBuf| fs::metadata(file).map_or(0, |found| found.len());
    files_below(dir).into_iter().map(size).sum::<u64>() >> 10
}
