//! The files that a language's guest finds before any program has written one.

use std::path::PathBuf;

use afresh::files::{Budget, Layer, LayerError, Refused, Time, Tree};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::error::{self, OpenError};

/// A host file below the guest's own: its directory and its name in the guest, its path on the
/// host, and its identity.
pub(crate) type LayerFile = (String, String, PathBuf, String);

/// The files of a Wasm guest, as the Python half gives them.
#[derive(Default, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct FileOptions {
    /// Those that it finds, or those that a snapshot needs.
    below: Vec<LayerFile>,
    /// Paths and contents of files that are part of its states.
    files: Vec<(String, PyBackedBytes)>,
    /// Maximum bytes that it stores itself; `None` for the usual limit.
    storage: Option<u64>,
}

impl FileOptions {
    fn budget(&self) -> Budget {
        let usual = Budget::default();
        Budget { bytes: self.storage.unwrap_or(usual.bytes), ..usual }
    }

    /// Whether a limit is given.
    pub(crate) fn is_limited(&self) -> bool {
        self.storage.is_some()
    }

    /// An empty tree.
    pub(crate) fn empty(&self) -> Tree {
        Tree::new(self.budget())
    }

    /// A tree with the files, and a directory for temporary files; `None` where a guest has no
    /// files.
    pub(crate) fn tree(&self) -> PyResult<Option<Tree>> {
        if self.below.is_empty() {
            return Ok(None);
        }
        let layers = || -> Result<Tree, LayerError> {
            let mut tree = Tree::new(self.budget());
            for (directory, name, path, identity) in &self.below {
                tree = tree.with_layer(directory, &Layer::file(path, name)?.known_as(identity))?;
            }
            Ok(tree)
        };
        let mut tree = layers().map_err(|error| error::raise::<OpenError>(&error))?;
        tree.make_directories("/tmp", Time::now())
            .map_err(|error| error::raise::<OpenError>(&error))?;
        for (path, bytes) in &self.files {
            tree.write_path(path, bytes, Time::now()).map_err(|error| match error {
                Refused::Full => OpenError::new_err(format!(
                    "the packages do not fit into {} bytes of files: leave some out, or raise `storage_limit`",
                    self.budget().bytes
                )),
                error => OpenError::new_err(format!("cannot store the package's file {path}: {error}")),
            })?;
        }
        Ok(Some(tree))
    }
}
