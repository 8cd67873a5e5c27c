//! The directory of the sandboxes of one server.
//!
//! Promises: while one server has the directory, another is refused. The kernel ends the lock with
//! the process. May break it: a file system without locks. The log reports it.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::private_directory::create_private;

/// The lock on a directory, held until it is dropped.
pub(crate) struct Directory {
    #[allow(dead_code, reason = "the lock ends when the file is closed")]
    file: File,
}

impl Directory {
    /// Locks a directory that exists.
    pub(crate) fn lock(dir: &Path) -> Result<Self, afresh::Cause> {
        let file = create_private(&dir.join("lock"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(format!(
                    "another server keeps its sandboxes in {}; end it, or give this one another directory",
                    dir.display()
                )
                .into());
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!(%error, dir = %dir.display(), "the directory cannot be locked against other servers");
            }
        }
        Ok(Self { file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_server_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = Directory::lock(dir.path()).unwrap();
        let refused = Directory::lock(dir.path()).err().expect("it is locked").to_string();
        assert!(refused.contains("another directory"), "{refused}");
        drop(first);
        Directory::lock(dir.path()).unwrap();
    }
}
