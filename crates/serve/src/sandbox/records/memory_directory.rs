//! A directory in memory: where a host saves its sandboxes when it ends and its disk is full.
//!
//! Promises: nobody but this user reads it; it is removed with its value, and by a restart of the
//! machine.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The file system in memory that Linux distributions and container runtimes mount.
const SHARED_MEMORY: &str = "/dev/shm";

#[derive(Debug)]
pub(crate) struct MemoryDirectory(PathBuf);

impl MemoryDirectory {
    /// Makes one whose name contains `name`.
    ///
    /// # Errors
    /// Without a file system in memory, or if the directory exists.
    pub(crate) fn create(name: &str) -> io::Result<Self> {
        let path =
            Path::new(SHARED_MEMORY).join(format!("afresh-save-{}-{name}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for MemoryDirectory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "a directory in memory stays");
        }
    }
}
