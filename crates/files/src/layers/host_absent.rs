//! Host directories are no layers on this system.
//!
//! Only Linux resolves a path below a directory in one step (`openat2`), whatever other processes
//! do meanwhile. No value of a directory exists here, and opening one gives the reason.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{LayerError, Refused};
use crate::layers::layer_bytes::LayerBytes;
use crate::layers::name_lookup::NameLookup;
use crate::nodes::inode::{Body, Inode};
use crate::nodes::node::{Node, Time};
use crate::nodes::source::SourceVersion;

/// The bit of numbers of hosts' files. The 14 bits from 48 on are the layer's number.
pub(crate) const HOST: u64 = 1 << 62;

/// A host directory.
#[derive(Debug)]
pub(crate) struct HostDirectory {
    pub(crate) path: PathBuf,
    absent: Infallible,
}

/// The identity of a host file at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostFile {
    absent: Infallible,
}

impl HostFile {
    pub(crate) fn version(&self) -> SourceVersion {
        match self.absent {}
    }

    /// The identity of an open file.
    ///
    /// # Errors
    /// Always.
    pub fn of(_: &File) -> std::io::Result<Self> {
        Err(Error::from(ErrorKind::Unsupported))
    }

    pub(crate) fn modified(&self) -> Time {
        match self.absent {}
    }

    pub(crate) fn body(&self, _: Node) -> Body {
        match self.absent {}
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        match self.absent {}
    }

    /// Whether the two have the same content.
    #[must_use]
    pub fn has_content_of(&self, _: &Self) -> bool {
        match self.absent {}
    }

    /// Its length.
    #[must_use]
    pub fn size(&self) -> u64 {
        match self.absent {}
    }

    /// Whether a further change would show in its times.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        match self.absent {}
    }
}

impl HostDirectory {
    pub(crate) fn follow(&self, _: Node) {
        match self.absent {}
    }

    pub(crate) fn is_readable(&self, _: Node) -> bool {
        match self.absent {}
    }

    pub(crate) fn seen_file(&self, _: Node) -> Option<HostFile> {
        match self.absent {}
    }

    pub(crate) fn stop_following(&self) {
        match self.absent {}
    }

    pub(crate) fn open(path: &Path) -> Result<Self, LayerError> {
        let source = Error::new(
            ErrorKind::Unsupported,
            "a host directory is a layer on Linux alone, whose `openat2` keeps the paths of a \
             guest in the directory; pack the files into a tar or a zip",
        );
        Err(LayerError::Read { path: path.display().to_string(), source })
    }

    pub(crate) fn subdirectory(&self, _: &Path) -> Result<Self, LayerError> {
        match self.absent {}
    }

    pub(crate) fn numbered(&self, _: u32) -> Self {
        match self.absent {}
    }

    pub(crate) fn root(&self) -> Node {
        match self.absent {}
    }

    pub(crate) fn parent(&self, _: Node) -> Option<Node> {
        match self.absent {}
    }

    pub(crate) fn path(&self, _: Node) -> Result<PathBuf, Refused> {
        match self.absent {}
    }

    pub(crate) fn enter(&self, _: &Path) -> Result<Node, Refused> {
        match self.absent {}
    }

    pub(crate) fn inode(&self, _: Node) -> Result<Arc<Inode>, Refused> {
        match self.absent {}
    }

    pub(crate) fn lookup(&self, _: Node, _: &[u8], _: bool) -> Result<NameLookup, Refused> {
        match self.absent {}
    }

    pub(crate) fn unlisted(&self, _: Node) -> Option<(Node, Arc<[u8]>)> {
        match self.absent {}
    }

    pub(crate) fn inode_number(&self, _: Node) -> u64 {
        match self.absent {}
    }

    pub(crate) fn lasting_number(&self, _: Node) -> Option<u64> {
        match self.absent {}
    }

    pub(crate) fn restore_number(&self, _: Node, _: u64) -> Result<(), Refused> {
        match self.absent {}
    }

    pub(crate) fn number_by_path(&self) {
        match self.absent {}
    }

    pub(crate) fn is_numbered_by_path(&self) -> bool {
        match self.absent {}
    }

    pub(crate) fn lost_directory(&self, _: Node) -> Option<PathBuf> {
        match self.absent {}
    }

    pub(crate) fn open_on_host(&self, _: Node) -> Option<(Arc<File>, HostFile)> {
        match self.absent {}
    }

    pub(crate) fn identity(&self) -> &str {
        match self.absent {}
    }

    pub(crate) fn is_kept(&self) -> bool {
        match self.absent {}
    }

    pub(crate) fn keep(&self, _: Arc<dyn LayerBytes>, _: HashMap<Node, u64>) -> bool {
        match self.absent {}
    }

    pub(crate) fn next_data(&self, _: Node, _: u64) -> Option<u64> {
        match self.absent {}
    }

    pub(crate) fn read(
        &self,
        _: Node,
        _: Option<SourceVersion>,
        _: u64,
        _: &mut [u8],
    ) -> Result<(), Refused> {
        match self.absent {}
    }
}
