//! The files that a language's guest finds before any program has written one.

use std::path::PathBuf;

use afresh::files::{Budget, Layer, LayerError, Time, Tree};
use pyo3::prelude::*;

use crate::error::{self, OpenError};

/// A host file below the guest's own: its directory and its name in the guest, its path on the
/// host, and its identity.
pub(crate) type LayerFile = (String, String, PathBuf, String);

/// A tree with the files, and a directory for temporary files; `None` where a guest has no files.
pub(crate) fn tree(below: &[LayerFile]) -> PyResult<Option<Tree>> {
    if below.is_empty() {
        return Ok(None);
    }
    let made = || -> Result<Tree, LayerError> {
        let mut tree = Tree::new(Budget::default());
        for (directory, name, path, known_as) in below {
            tree = tree.over(directory, &Layer::file(path, name)?.known_as(known_as))?;
        }
        Ok(tree)
    };
    let mut tree = made().map_err(|error| error::raise::<OpenError>(&error))?;
    tree.make_directories("/tmp", Time::now())
        .map_err(|error| error::raise::<OpenError>(&error))?;
    Ok(Some(tree))
}
