//! A session's files from outside: inputs for a guest's next call, and results of its last one.
//!
//! Files that are written here are part of the present state, like those that calls write: the next
//! checkpoint freezes them, and a rollback undoes them.

use std::ops::Deref;
use std::sync::LazyLock;

use afresh_budget::{Budget as MemoryBudget, Charge};
use afresh_files::{DirEntry, Refused, Stat, Time, Tree};

use super::SessionError;

/// Maximum bytes of all files that [`SessionFiles::read`] reads at the same time.
const MAX_READ: usize = 1 << 30;

/// The budget of all reads that name none.
static READS: LazyLock<MemoryBudget> = LazyLock::new(|| MemoryBudget::new("file reads", MAX_READ));

/// The content of a file, charged to a budget until it is dropped.
#[derive(Debug)]
pub struct FileContent {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl FileContent {
    /// The bytes, without their charge.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl Deref for FileContent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A session with files.
pub(crate) trait FileOwner {
    /// The tree as it is now.
    fn present_tree(&self) -> Tree;

    /// Changes the tree.
    fn change_tree(
        &mut self,
        change: &mut dyn FnMut(&mut Tree) -> Result<(), Refused>,
    ) -> Result<Result<(), Refused>, SessionError>;

    /// Whether the guest finds other files at a path than those of the tree.
    fn is_generated(&self, path: &str) -> bool {
        let _ = path;
        false
    }
}

/// The files of a session. Paths begin at the root of its tree, with or without a slash.
pub struct SessionFiles<'a> {
    owner: &'a mut dyn FileOwner,
}

impl std::fmt::Debug for SessionFiles<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionFiles").field("tree", &self.tree()).finish()
    }
}

/// Something about a file was refused.
fn refused(path: &str) -> impl Fn(Refused) -> SessionError {
    move |source| SessionError::Files { path: path.to_owned(), source }
}

impl<'a> SessionFiles<'a> {
    #[allow(dead_code, reason = "a micro-VM has no files")]
    pub(super) fn new(owner: &'a mut dyn FileOwner) -> Self {
        Self { owner }
    }

    /// The present tree. A copy costs nothing, and never changes.
    #[must_use]
    pub fn tree(&self) -> Tree {
        self.owner.present_tree()
    }

    /// Reads a whole file. All reads of the process together may take 1 GiB while they run.
    /// [`SessionFiles::read_within`] takes another budget. Read a file that is mostly holes in
    /// parts, from [`SessionFiles::tree`], so that the memory follows its stored bytes.
    ///
    /// # Errors
    /// [`SessionError::Files`] and [`SessionError::Budget`], before memory is allocated for the
    /// file.
    pub fn read(&self, path: &str) -> Result<Vec<u8>, SessionError> {
        self.read_within(path, &READS).map(FileContent::into_bytes)
    }

    /// As [`SessionFiles::read`], charged to `budget` until the content is dropped.
    ///
    /// # Errors
    /// As [`SessionFiles::read`].
    pub fn read_within(
        &self,
        path: &str,
        budget: &MemoryBudget,
    ) -> Result<FileContent, SessionError> {
        let tree = self.tree();
        let size = tree.stat_path(path).map_err(refused(path))?.size;
        let charge = budget.charge(usize::try_from(size).unwrap_or(usize::MAX));
        let exceeded = |source| SessionError::Budget { path: path.to_owned(), source };
        let charge = charge.map_err(exceeded)?;
        let bytes = tree.read_path(path, size).map_err(refused(path))?;
        Ok(FileContent { bytes, _charge: charge })
    }

    /// The file at a path.
    ///
    /// # Errors
    /// [`SessionError::Files`].
    pub fn stat(&self, path: &str) -> Result<Stat, SessionError> {
        self.tree().stat_path(path).map_err(refused(path))
    }

    /// The names in a directory, in order.
    ///
    /// # Errors
    /// [`SessionError::Files`].
    pub fn list(&self, path: &str) -> Result<Vec<DirEntry>, SessionError> {
        self.tree().list_path(path).map_err(refused(path))
    }

    /// Writes a whole file, and makes missing directories above it.
    ///
    /// # Errors
    /// [`SessionError::Files`], with nothing changed.
    pub fn write(&mut self, path: &str, bytes: &[u8]) -> Result<(), SessionError> {
        self.check(path)?;
        self.change(path, |tree| tree.write_path(path, bytes, Time::now()).map(drop))
    }

    /// Makes a directory, and missing ones above it.
    ///
    /// # Errors
    /// [`SessionError::Files`].
    pub fn make_directory(&mut self, path: &str) -> Result<(), SessionError> {
        self.check(path)?;
        self.change(path, |tree| tree.make_directories(path, Time::now()).map(drop))
    }

    /// Removes a file, or a directory with everything in it.
    ///
    /// # Errors
    /// [`SessionError::Files`].
    pub fn remove(&mut self, path: &str) -> Result<(), SessionError> {
        self.check(path)?;
        self.change(path, |tree| tree.remove_path(path, Time::now()))
    }

    /// Refuses a path whose files the guest would not find: `/proc` and `/sys` of Linux programs.
    fn check(&self, path: &str) -> Result<(), SessionError> {
        match self.owner.is_generated(path) {
            true => Err(refused(path)(Refused::NotPermitted)),
            false => Ok(()),
        }
    }

    /// Changes the tree in any way. Mappings of a file in a Linux program keep their content.
    ///
    /// # Errors
    /// [`SessionError::Files`] as `change` returns, naming `path`; [`SessionError::State`] when the
    /// session's instance cannot be made.
    pub fn change<T>(
        &mut self,
        path: &str,
        change: impl FnOnce(&mut Tree) -> Result<T, Refused>,
    ) -> Result<T, SessionError> {
        let (mut change, mut result) = (Some(change), None);
        let changed = self.owner.change_tree(&mut |tree| {
            // The owner calls it at most once.
            let Some(change) = change.take() else { return Ok(()) };
            result = Some(change(tree)?);
            Ok(())
        })?;
        changed.map_err(refused(path))?;
        result.ok_or_else(|| refused(path)(Refused::Missing))
    }
}
