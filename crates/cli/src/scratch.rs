//! A temporary directory for one command.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// A directory that is removed with its contents on drop.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates a directory in `parent` or in the system's temporary directory.
    pub(crate) fn new(parent: Option<&Path>) -> anyhow::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        let path = parent.join(format!("afresh-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Files that cannot be removed stay in the temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
