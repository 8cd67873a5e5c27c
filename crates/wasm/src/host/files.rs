//! A guest's open files, and its file tree: plain data that belongs to the guest's memory. A guest
//! without a tree has the host directories of its options, which are opened for each lease.
//!
//! Promises: every lease starts with the tree and the descriptors of the warm state, and no lease
//! sees another's writes to a tree; those of a session are part of its states. Descriptors of host
//! directories are closed with the lease. May break it: nothing outside, for a tree. Writes to host
//! directories stay.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use afresh_budget::{DecodeError, Decoder, MAX_DECODED, decode};
use afresh_files::{Access, Budget, HostHandle, SavedTree, Tree, TreeError};
use afresh_memory::{Image, ImageBuilder, ImageError, PAGE_SIZE, PageRange};
use afresh_snapshot::LayerImage;
use serde::{Deserialize, Serialize};

use crate::host::opened::OpenHandle;
use crate::host::preview1::rights;

/// Maximum descriptors of a guest.
const MAX_DESCRIPTORS: usize = 4096;
/// The same where each is a descriptor of this process. The directories of the options come in
/// addition.
const MAX_HOST_DESCRIPTORS: usize = 256;
/// The name under which a guest finds its tree.
pub(crate) const TOP: &str = "/";

/// The target of a preview 1 descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Descriptor {
    /// Standard input, output or error, by its number, which WASI's own implementation serves.
    Standard(u32),
    File(FileDescriptor),
}

/// A descriptor of a file or directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileDescriptor {
    pub(crate) open: OpenHandle,
    /// The name of a directory that was given.
    pub(crate) given: Option<String>,
    /// Flags and rights, as preview 1 has them.
    pub(crate) flags: u16,
    pub(crate) rights: u64,
    pub(crate) inheriting: u64,
}

/// A tree, and its open files.
#[derive(Clone, Debug)]
pub struct Files {
    pub(crate) tree: Tree,
    pub(crate) descriptors: Arc<BTreeMap<u32, Descriptor>>,
    /// The layers below the tree as pages, once they were saved. All copies of these files share
    /// it.
    layers: Arc<OnceLock<LayerImage>>,
}

/// Two are equal when their trees and their open files are.
impl PartialEq for Files {
    fn eq(&self, other: &Self) -> bool {
        self.tree == other.tree && self.descriptors == other.descriptors
    }
}

impl Eq for Files {}

impl Files {
    /// A tree with the initial descriptors of every call: standard streams, and the tree's root.
    pub(crate) fn new(mut tree: Tree) -> Self {
        let root = tree.open(Tree::ROOT, Access::reading());
        let root = root.map(|open| (OpenHandle::Tree(open), TOP.to_owned()));
        Self::with_directories(tree, root)
    }

    /// No tree, and standard streams alone.
    pub(crate) fn none() -> Self {
        static NONE: LazyLock<Files> = LazyLock::new(|| {
            Files::with_directories(Tree::new(Budget { bytes: 0, files: 0 }), None)
        });
        NONE.clone()
    }

    /// No tree, and host directories by their names, for writing or not.
    ///
    /// # Errors
    /// The directory that cannot be opened.
    pub(crate) fn of_directories(directories: &[(PathBuf, String, bool)]) -> Result<Self, String> {
        let none = Self::none();
        if directories.is_empty() {
            return Ok(none);
        }
        let open = |(host, guest, writable): &(PathBuf, String, bool)| {
            let handle = HostHandle::grant(host, *writable).map_err(|error| {
                format!("the directory {} for the guest's {guest:?}: {error}", host.display())
            })?;
            Ok((OpenHandle::Host(handle), guest.clone()))
        };
        let directories: Vec<_> = directories.iter().map(open).collect::<Result<_, String>>()?;
        Ok(Self::with_directories(none.tree, directories))
    }

    fn with_directories(tree: Tree, given: impl IntoIterator<Item = (OpenHandle, String)>) -> Self {
        let standard = (0..3).map(Descriptor::Standard);
        let directories = given.into_iter().map(|(open, name)| {
            let (rights, inheriting) = (rights::DIRECTORY, rights::EVERYTHING);
            let given = Some(name);
            Descriptor::File(FileDescriptor { open, given, flags: 0, rights, inheriting })
        });
        let descriptors = (0..).zip(standard.chain(directories)).collect();
        Self { tree, descriptors: Arc::new(descriptors), layers: Arc::default() }
    }

    /// The directories that were given, with their names.
    pub(crate) fn directories(&self) -> Vec<(OpenHandle, String)> {
        let given = |descriptor: &Descriptor| match descriptor {
            Descriptor::File(FileDescriptor { open, given: Some(name), .. }) => {
                Some((open.clone(), name.clone()))
            }
            _ => None,
        };
        self.descriptors.values().filter_map(given).collect()
    }

    /// The tree.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The lowest number that is free, if the guest may have at most `most` descriptors.
    pub(crate) fn free(&self, most: usize) -> Option<u32> {
        let taken = self.descriptors.keys().zip(0u32..).take_while(|(number, at)| **number == *at);
        let free = taken.count();
        (self.descriptors.len() < most).then_some(free as u32)
    }

    pub(crate) fn descriptors_mut(&mut self) -> &mut BTreeMap<u32, Descriptor> {
        Arc::make_mut(&mut self.descriptors)
    }

    /// Everything as bytes.
    pub(crate) fn save(&self) -> Result<SavedFiles, String> {
        // A snapshot contains everything that it needs, except layers whose names say where to get
        // them.
        let (tree, layers) = if self.tree.has_unknown_layers() {
            (
                self.tree.capture_host_directories().map_err(|e| e.to_string())?,
                Some(self.stored_layers()?),
            )
        } else {
            (self.tree.clone(), None)
        };
        let tree = tree.saved().map_err(|e| e.to_string())?;
        let descriptors = postcard::to_allocvec(&*self.descriptors).map_err(|e| e.to_string())?;
        Ok(SavedFiles { descriptors, pages: tree.pages.len() as u64, tree: tree.into(), layers })
    }

    /// The layers below the tree as pages, made once.
    fn stored_layers(&self) -> Result<LayerImage, String> {
        if let Some(layers) = self.layers.get() {
            return Ok(layers.clone());
        }
        let layers = LayerImage::of(&self.tree).map_err(|e| e.to_string())?;
        Ok(self.layers.get_or_init(|| layers).clone())
    }
}

/// Files as bytes: the pages apart, which are pages of a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedFiles {
    descriptors: Vec<u8>,
    pages: u64,
    tree: TreeDescription,
    /// Those that the tree needs, where the snapshot has them.
    #[serde(skip)]
    pub(crate) layers: Option<LayerImage>,
}

/// The description of a tree in bytes, and its pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct TreeDescription {
    description: Vec<u8>,
    #[serde(skip)]
    pages: Vec<Arc<Vec<u8>>>,
}

impl From<SavedTree> for TreeDescription {
    fn from(saved: SavedTree) -> Self {
        Self { description: saved.description, pages: saved.pages }
    }
}

impl SavedFiles {
    /// Bytes of the pages that follow the memories.
    pub(crate) fn page_bytes(&self) -> u64 {
        self.pages.saturating_mul(PAGE_SIZE as u64)
    }

    /// The pages, one after the other.
    pub(crate) fn image(&self) -> Result<Image, ImageError> {
        let mut image = ImageBuilder::new(self.tree.pages.len());
        for (index, page) in self.tree.pages.iter().enumerate() {
            image.segment(index * PAGE_SIZE, page)?;
        }
        image.build()
    }

    /// Takes the tree's pages out of a snapshot image.
    pub(crate) fn take(&mut self, image: &Image) -> Result<(), ImageError> {
        image.resolve(PageRange::new(0, image.pages()))?;
        let zeros = Arc::new(vec![0; PAGE_SIZE]);
        let page = |index| match image.page(index) {
            Some(page) => Arc::new(page.to_vec()),
            None => zeros.clone(),
        };
        self.tree.pages = (0..image.pages()).map(page).collect();
        Ok(())
    }

    /// Decodes the descriptors within what is left of the limit of a state. They are decoded again
    /// as the files are restored.
    pub(crate) fn check_descriptors(&self, state: &mut Decoder<'_>) -> Result<(), DecodeError> {
        state.decode_inner::<BTreeMap<u32, Descriptor>>(&self.descriptors).map(drop)
    }

    /// The files. Bytes from strangers are checked. The opener decides how much more the tree may
    /// store: `allowed` in all, or, if that is more, its own contents plus the space that it had
    /// left, up to `allowed`. A tree over layers is restored over the layers of `below`.
    pub(crate) fn restore(&self, allowed: Budget, below: Option<&Tree>) -> Result<Files, String> {
        let saved = SavedTree::new(self.tree.description.clone(), self.tree.pages.clone());
        // Layers that are open already are shared.
        let mut tree = Tree::new(allowed).restored(&saved);
        if let (Err(TreeError::Layers { .. }), Some(below)) = (&tree, below) {
            tree = below.restored(&saved);
        }
        if let (Err(TreeError::Layers { .. }), Some(layers)) = (&tree, &self.layers) {
            tree = layers.tree(allowed).map_err(|e| e.to_string())?.restored(&saved);
        }
        let tree = tree.map_err(|e| e.to_string())?;
        let (had, used) = (tree.budget(), tree.used());
        let most = |allowed: u64, had: u64, used: u64| match used <= allowed {
            true => allowed,
            false => used.saturating_add(had.saturating_sub(used).min(allowed)),
        };
        let tree = tree.with_budget(Budget {
            bytes: most(allowed.bytes, had.bytes, used.bytes),
            files: most(allowed.files, had.files, used.files),
        });
        let (descriptors, rest): (BTreeMap<u32, Descriptor>, _) =
            decode(&self.descriptors, MAX_DECODED).map_err(|e| e.to_string())?;
        if !rest.is_empty() || descriptors.len() > MAX_DESCRIPTORS {
            return Err("its descriptors are damaged".to_owned());
        }
        for descriptor in descriptors.values() {
            let known = match descriptor {
                Descriptor::Standard(number) => *number < 3,
                Descriptor::File(file) => file.open.node().is_some_and(|node| tree.is_held(node)),
            };
            if !known {
                return Err("a descriptor is open on nothing".to_owned());
            }
        }
        let layers = self.layers.clone().map(OnceLock::from).unwrap_or_default();
        Ok(Files { tree, descriptors: Arc::new(descriptors), layers: Arc::new(layers) })
    }
}

/// Files that a running call uses, and streams of its.
#[derive(Clone, Debug)]
pub(crate) struct LiveFiles(Arc<LiveState>);

#[derive(Debug)]
struct LiveState {
    files: Mutex<Files>,
    /// The descriptors that the guest was given, where it has no tree.
    given: Option<Arc<BTreeMap<u32, Descriptor>>>,
    /// Handles of preview 2 that are alive.
    handles: AtomicUsize,
    /// Maximum descriptors, and maximum handles.
    limit: usize,
}

impl LiveFiles {
    /// A tree, and what is open in it.
    pub(crate) fn of_tree(files: Files) -> Self {
        Self::new(files, None, MAX_DESCRIPTORS)
    }

    /// Open files of host directories.
    pub(crate) fn on_host(files: Files) -> Self {
        let given = files.descriptors.clone();
        let limit = given.len() + MAX_HOST_DESCRIPTORS;
        Self::new(files, Some(given), limit)
    }

    fn new(files: Files, given: Option<Arc<BTreeMap<u32, Descriptor>>>, limit: usize) -> Self {
        let (files, handles) = (Mutex::new(files), AtomicUsize::new(0));
        Self(Arc::new(LiveState { files, given, handles, limit }))
    }

    /// The descriptors that the guest was given; `None` where those of its tree are part of its
    /// state.
    pub(crate) fn granted_descriptors(&self) -> Option<&BTreeMap<u32, Descriptor>> {
        self.0.given.as_deref()
    }

    /// Maximum descriptors of the guest.
    pub(crate) fn limit(&self) -> usize {
        self.0.limit
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Files> {
        // Only the guest's call can panic here, and its files are dropped with it.
        self.0.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Permission for one more handle until it is dropped; `None` at the limit.
    pub(crate) fn ticket(&self) -> Option<Ticket> {
        let ticket = Ticket(self.clone());
        let before = self.0.handles.fetch_add(1, Ordering::Relaxed);
        (before < self.0.limit).then_some(ticket)
    }
}

/// The permission that each handle keeps.
#[derive(Debug)]
pub(crate) struct Ticket(LiveFiles);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.0.handles.fetch_sub(1, Ordering::Relaxed);
    }
}
