//! A temporary directory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_memory::fork;

use crate::OpenError;

/// Removed with everything in it when dropped.
pub(crate) struct TempDir {
    path: PathBuf,
    /// The process that made it. A child of a fork leaves its parent's directory alone.
    generation: u32,
}

impl TempDir {
    /// A new directory where temporary files go.
    pub(crate) fn new() -> Result<Self, OpenError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("afresh-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match std::fs::DirBuilder::new().create(&path) {
                Ok(()) => return Ok(Self { path, generation: fork::generation() }),
                // Left behind by a process of the same number that was killed.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(OpenError::Read { path, source }),
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        if self.generation == fork::generation() {
            // Leftovers stay among temporary files.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
