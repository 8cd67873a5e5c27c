//! The root of a guest from an OCI image: its layers, and not the host system.
//!
//! Promises: all guests of an image, and all their states, share one; a snapshot holds the layers'
//! bytes once, so that it opens without the image, and saving it again costs nothing for them. May
//! break it: an unavailable page of a snapshot; the read then fails, with its reason.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use afresh_files::{Budget, Kind, LayerError, OciImage, Tree};
use afresh_snapshot::{LayerImage, LayersError};

/// Layers count against no budget.
const UNCOUNTED: Budget = Budget { bytes: u64::MAX / 2, files: u64::MAX / 2 };
/// The default search path of programs in an image.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Layers, and the same as pages once they were saved.
#[derive(Debug)]
pub(crate) struct Base {
    tree: Tree,
    kept: OnceLock<LayerImage>,
}

impl PartialEq for Base {
    fn eq(&self, other: &Self) -> bool {
        self.tree == other.tree
    }
}

impl Eq for Base {}

impl Base {
    /// From a snapshot's pages.
    pub(crate) fn thawed(kept: LayerImage) -> Result<Self, LayersError> {
        Ok(Self { tree: kept.tree(UNCOUNTED)?, kept: OnceLock::from(kept) })
    }

    /// A tree over the layers, without changes.
    pub(crate) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The layers as pages, made once.
    pub(crate) fn layer_image(&self) -> Result<LayerImage, LayersError> {
        if let Some(kept) = self.kept.get() {
            return Ok(kept.clone());
        }
        let kept = LayerImage::of(&self.tree)?;
        Ok(self.kept.get_or_init(|| kept).clone())
    }
}

/// An empty tree, or one over `base`.
pub(crate) fn over(base: Option<&Arc<Base>>) -> Tree {
    base.map_or_else(|| Tree::new(UNCOUNTED), |base| base.tree().clone())
}

/// An image as the root of a program, and its command line.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    pub(crate) base: Arc<Base>,
    /// The beginning of every command line.
    entry: Vec<OsString>,
    /// The default arguments.
    usual: Vec<OsString>,
}

impl Root {
    pub(crate) fn new(image: &OciImage) -> Result<Self, LayerError> {
        let tree = Tree::new(UNCOUNTED).with_layer("/", image.layer())?;
        let words = |words: &[String]| words.iter().map(OsString::from).collect();
        Ok(Self {
            base: Arc::new(Base { tree, kept: OnceLock::new() }),
            entry: words(&image.config().entrypoint),
            usual: words(&image.config().command),
        })
    }

    /// Replaces the beginning of command lines.
    pub(crate) fn start_with(&mut self, words: Vec<OsString>) {
        (self.entry, self.usual) = (words, Vec::new());
    }

    /// The command line with these arguments; empty if neither the image nor the caller names a
    /// program.
    pub(crate) fn command(&self, arguments: &[OsString]) -> Vec<OsString> {
        let rest = if arguments.is_empty() { &self.usual } else { arguments };
        self.entry.iter().chain(rest).cloned().collect()
    }
}

/// The path of the program in `tree` that `word` means: one with a slash is taken from `directory`,
/// another looked for in `path`.
pub(crate) fn find_program(
    tree: &Tree,
    word: &OsStr,
    directory: &Path,
    path: Option<&OsStr>,
) -> Option<PathBuf> {
    if word.as_bytes().contains(&b'/') {
        return Some(directory.join(word));
    }
    let folders = std::env::split_paths(path.unwrap_or(OsStr::new(USUAL_PATH)));
    let mut files = folders.map(|folder| directory.join(folder).join(word));
    files.find(|file| {
        let stat = tree.stat_path(file.as_os_str().as_bytes());
        stat.is_ok_and(|stat| stat.kind == Kind::File && stat.mode & 0o111 != 0)
    })
}
