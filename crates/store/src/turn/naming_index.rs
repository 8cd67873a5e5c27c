//! The `index.json` that names the manifest of a journal, looked at before each append.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::blobs::file::{open_file, read_bounded};
use crate::disk::os::identity;
use crate::format::json::parse;
use crate::format::layout::IndexJson;
use crate::format::manifest::{INDEX_FILE, MAX_INDEX_JSON};
use crate::{OpenError, Sha256};

/// An `index.json` that named a manifest.
#[derive(Debug)]
pub(crate) struct NamingIndex {
    path: PathBuf,
    /// The name that must mean the manifest; without one, any name suffices.
    name: Option<String>,
    /// The file that named it. The open file keeps its inode number from being used again.
    seen: Option<(File, [i64; 5])>,
}

impl NamingIndex {
    /// The index of the store at `root`, asked for `name`, or for any name.
    pub(crate) fn new(root: &Path, name: Option<&str>) -> Self {
        Self { path: root.join(INDEX_FILE), name: name.map(str::to_owned), seen: None }
    }

    /// Whether `base` has the name. Costs one `stat` while the file is the same.
    pub(crate) fn names(&mut self, base: Sha256) -> Result<bool, OpenError> {
        let io = |e| OpenError::io(&self.path, e);
        let now = identity(&fs::symlink_metadata(&self.path).map_err(io)?);
        if self.seen.as_ref().is_some_and(|(_, seen)| *seen == now) {
            return Ok(true);
        }
        let file = open_file(&self.path).map_err(io)?;
        let opened = identity(&file.metadata().map_err(io)?);
        let bytes = read_bounded(&self.path, "`index.json`", MAX_INDEX_JSON)?;
        let index: IndexJson = parse("`index.json`", &bytes)?;
        let named = match &self.name {
            Some(name) => index.target(name) == Some(base),
            None => index.manifests.iter().any(|it| it.digest.parse() == Ok(base)),
        };
        let after = identity(&fs::symlink_metadata(&self.path).map_err(io)?);
        // Only where the bytes are those of the open file.
        self.seen = (named && opened == after).then_some((file, opened));
        Ok(named)
    }
}
