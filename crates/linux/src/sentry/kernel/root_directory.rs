//! Root directories of processes (`chroot`).
//!
//! Promises: paths of a process start from its root directory, and `..` does not lead out of it,
//! unless they start from an open directory outside, as in Linux. May break it: a walk that does
//! not go through [`Kernel::searching`].

use afresh_files::{Node, Refused, Tree};
use rustix::io::Errno;

use crate::sentry::fs::proc_paths::plain;
use crate::sentry::kernel::packed_kernel::PackedRoots;
use crate::sentry::kernel::process_table::ProcessTable;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::syscalls::path::path_of;

/// Before a path that the root directory does not lead to.
const UNREACHABLE: &[u8] = b"(unreachable)";

/// The rest of `path` below `top`, beginning with a slash.
fn below(path: &[u8], top: &[u8]) -> Option<Vec<u8>> {
    match path.strip_prefix(top)? {
        [] => Some(b"/".to_vec()),
        rest if rest.starts_with(b"/") => Some(rest.to_vec()),
        _ => None,
    }
}

impl Kernel {
    /// The root directory of the current process.
    pub(crate) fn root(&self) -> Node {
        self.current().root()
    }

    /// Whether the current process has another root directory than its guest.
    pub(in crate::sentry) fn has_own_root(&self) -> bool {
        self.current().root.is_some()
    }

    /// Makes `node` the root directory of the current process.
    pub(in crate::sentry) fn set_root(&mut self, node: Node) -> Result<(), Refused> {
        let new = (node != Tree::ROOT).then_some(node);
        if let Some(node) = new {
            self.tree.hold(node)?;
        }
        let old = std::mem::replace(&mut self.current_mut().root, new);
        old.into_iter().for_each(|old| self.tree.release(old));
        Ok(())
    }

    /// The path of the tree that `path` means from the directory `from`, without links.
    pub(in crate::sentry) fn absolute(&self, from: Node, path: &[u8]) -> Option<Vec<u8>> {
        let Some(root) = self.current().root else {
            if path.starts_with(b"/") {
                return Some(path.to_vec());
            }
            return Some([path_of(&self.tree, from).ok()?, path.to_vec()].join(&b'/'));
        };
        let top = path_of(&self.tree, root).ok()?;
        let mut inside = path.to_vec();
        if !path.starts_with(b"/") {
            let start = path_of(&self.tree, from).ok()?;
            match below(&start, &top) {
                Some(start) => inside = [&start, path].join(&b'/'),
                None => return Some([&start, path].join(&b'/')),
            }
        }
        Some([top, plain(&inside)].concat())
    }

    /// A path of the tree as the current process sees it, if its root directory leads there.
    fn seen_below_root(&self, path: &[u8]) -> Option<Vec<u8>> {
        match self.current().root {
            None => Some(path.to_vec()),
            Some(root) => below(path, &path_of(&self.tree, root).ok()?),
        }
    }

    /// A path of the tree as a link in `/proc` shows it to the current process.
    pub(in crate::sentry) fn visible_path(&self, path: Vec<u8>) -> Vec<u8> {
        self.seen_below_root(&path).unwrap_or(path)
    }

    /// The path of a directory, as such a link.
    pub(in crate::sentry) fn path_seen(&self, directory: Node) -> Result<Vec<u8>, Errno> {
        path_of(&self.tree, directory).map(|path| self.visible_path(path))
    }

    /// The path of the current directory, as `getcwd` returns it.
    pub(in crate::sentry) fn directory_path(&self) -> Result<Vec<u8>, Errno> {
        let path = path_of(&self.tree, self.current().directory)?;
        Ok(self.seen_below_root(&path).unwrap_or_else(|| [UNREACHABLE, &path].concat()))
    }
}

impl ProcessTable {
    /// Sets the root directories of a frozen table. Returns whether they are of its processes.
    pub(in crate::sentry) fn set_roots(&mut self, roots: PackedRoots) -> bool {
        roots.into_iter().all(|(id, root)| {
            let process = match self.current.info.id == id {
                true => Some(&mut self.current),
                false => self.others.get_mut(&id),
            };
            root != Tree::ROOT && process.map(|process| process.root = Some(root)).is_some()
        })
    }
}
