//! Read-only layers below a tree: a host directory, a zip, a tar, an OCI image.
//!
//! Promises: a layer is never written; no layer leads outside itself; claims of an archive are
//! checked against limits before memory is reserved for it. May break it: changes to a host
//! directory while trees are over it: names stay as first seen, and a file follows the host's until
//! a guest changes it ([`crate::host`]).

use std::path::Path;
use std::sync::Arc;

use crate::error::LayerError;
use crate::layers::archive::Archive;
use crate::layers::host::HostDirectory;
use crate::layers::item::LayerLimits;
use crate::layers::stack::Part;
use crate::layers::{tar, zip};

/// A read-only source of files below a tree.
#[derive(Debug)]
pub struct Layer {
    pub(crate) parts: Vec<Part>,
}

impl Layer {
    /// A host directory. It is read on demand, and never left through a link: its symbolic links
    /// are resolved within the tree. Only files, directories and links are shown.
    ///
    /// # Errors
    /// [`LayerError::Read`].
    pub fn directory(path: impl AsRef<Path>) -> Result<Self, LayerError> {
        let host = HostDirectory::open(path.as_ref())?;
        Ok(Self { parts: vec![Part::Host(Arc::new(host))] })
    }

    /// A directory `below` the directory `top`, as [`Layer::directory`]. No symbolic link is
    /// followed on the way from `top`, so that a path from a stranger leads nowhere else.
    ///
    /// # Errors
    /// [`LayerError::Read`].
    pub fn subdirectory(
        top: impl AsRef<Path>,
        below: impl AsRef<Path>,
    ) -> Result<Self, LayerError> {
        let host = HostDirectory::open(top.as_ref())?.subdirectory(below.as_ref())?;
        Ok(Self { parts: vec![Part::Host(Arc::new(host))] })
    }

    /// A zip. Files are unpacked on first read, and cached with the layer.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn zip(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        let archive = zip::open(path.as_ref(), limits)?;
        Ok(Self { parts: vec![Part::Archive(Arc::new(archive))] })
    }

    /// A tar, plain or compressed with gzip or zstd; a compressed one is unpacked to a temporary
    /// file first.
    ///
    /// # Errors
    /// [`LayerError`].
    pub fn tar(path: impl AsRef<Path>, limits: &LayerLimits) -> Result<Self, LayerError> {
        let archive = tar::open(path.as_ref(), limits)?;
        Ok(Self { parts: vec![Part::Archive(Arc::new(archive))] })
    }

    /// One host file under a name. It is opened once, and read when the guest reads.
    ///
    /// # Errors
    /// [`LayerError`]: `path` is not a readable file.
    pub fn file(path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<Self, LayerError> {
        let archive = Archive::file(path.as_ref(), name.as_ref())?;
        Ok(Self { parts: vec![Part::Archive(Arc::new(archive))] })
    }

    /// Names the content of the layer uniquely: by a package and its version, or by a digest. Trees
    /// are distinguished by it, so the layer is not read for that. A snapshot of a guest whose
    /// files are over such layers alone does not contain them, but needs the layers again. The
    /// caller guarantees that every layer with this name has the same bytes. Host directories have
    /// no fixed content, so this does not change them.
    #[must_use]
    pub fn known_as(mut self, what: impl Into<String>) -> Self {
        let what = what.into();
        for part in &mut self.parts {
            if let Part::Archive(archive) = part
                && let Some(archive) = Arc::get_mut(archive)
            {
                archive.known_as = Some(what.clone());
            }
        }
        self
    }
}
