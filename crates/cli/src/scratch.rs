//! A temporary directory for one command.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// Removed with everything in it when dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// A new directory in `parent`, or where temporary files go.
    pub(crate) fn new(parent: Option<&Path>) -> anyhow::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        let path = parent.join(format!("afresh-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Files that cannot be removed stay among temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
