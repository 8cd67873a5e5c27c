//! Errors of backups and restores.

use std::path::PathBuf;

/// A fleet could not be backed up or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The fleet cannot be reached.
    #[error("cannot reach the fleet")]
    Away(#[source] afresh::Cause),
    /// No store was given.
    #[error("the store of the fleet is not named: name it as its hosts do")]
    NoStore,
    /// The ledger could not be read or written.
    #[error("the ledger of the fleet cannot be read or written")]
    Ledger(#[source] afresh::Cause),
    /// No entry could be read.
    #[error(
        "none of the {0} entries can be read, so the backup is unchanged: name the key that sealed them as `entry-key`"
    )]
    Unreadable(usize),
    /// A store could not be opened.
    #[error("the store cannot be opened")]
    Store(#[source] afresh::Cause),
    /// A file of the backup.
    #[error("the file {file} of the backup")]
    File {
        /// The file.
        file: PathBuf,
        /// Its fault.
        #[source]
        source: std::io::Error,
    },
    /// The file is no backup.
    #[error("line {line} of {file} is damaged: {fault}")]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Its line.
        line: usize,
        /// The fault.
        fault: String,
    },
    /// The backup is sealed by another key, or by none.
    #[error("the backup {} cannot be restored: {fault}", file.display())]
    Key {
        /// The file.
        file: PathBuf,
        /// The fault.
        fault: &'static str,
    },
    /// Hosts are running.
    #[error("hosts of the fleet are running ({names}); stop them, restore, and start them again")]
    Running {
        /// Their names.
        names: String,
    },
    /// An entry is there with another content.
    #[error("the fleet already has another entry `{key}`; restore into an empty ledger")]
    Exists {
        /// Its key.
        key: String,
    },
    /// A thread could not be started.
    #[error(
        "cannot start a thread; raise the limits of tasks (`ulimit -u`, the cgroup's `pids.max`)"
    )]
    Thread(#[source] afresh::Cause),
}
