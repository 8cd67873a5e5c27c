//! A cache of directory paths, for calls that look the same ones up repeatedly.
//!
//! Promises: each path is found once while the paths take at most [`MAX_BYTES`]; beyond that all
//! are forgotten, and found again.

use std::collections::BTreeMap;

use afresh_files::{Node, Tree};

use crate::sentry::name_lengths::PATH_LEN;
use crate::sentry::syscalls::path::path_of;

/// Maximum bytes of the paths.
const MAX_BYTES: usize = 1 << 20;
/// Bytes that each takes in addition to its path.
const ENTRY_SIZE: usize = 64;

/// The paths of directories, or that no call takes them.
#[derive(Debug, Default)]
pub(in crate::sentry) struct DirectoryPaths {
    paths: BTreeMap<Node, Option<Vec<u8>>>,
    bytes: usize,
    /// Searches for a path: each looks at up to half as many directories as a path has bytes.
    searches: usize,
}

impl DirectoryPaths {
    /// Paths that were searched for.
    pub(in crate::sentry) fn searches(&self) -> usize {
        self.searches
    }

    /// The path of a file by one of its names. `None` without a name, and where no call takes it.
    pub(in crate::sentry) fn path_of_file(&mut self, tree: &Tree, node: Node) -> Option<Vec<u8>> {
        let (directory, name) = tree.name(node)?;
        if !self.paths.contains_key(&directory) {
            let path = path_of(tree, directory).ok();
            let size = path.as_ref().map_or(0, Vec::len) + ENTRY_SIZE;
            if self.bytes + size > MAX_BYTES {
                (self.paths, self.bytes) = (BTreeMap::new(), 0);
            }
            self.bytes += size;
            self.searches += 1;
            self.paths.insert(directory, path);
        }
        let mut path = self.paths.get(&directory)?.clone()?;
        if !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend(&name[..]);
        (path.len() < PATH_LEN).then_some(path)
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Time};

    use super::*;

    #[test]
    fn a_path_is_searched_for_once_within_the_bound_of_bytes() {
        let (mut tree, now) = (Tree::new(Budget::default()), Time::default());
        let mut nodes = Vec::new();
        for directory in 0..40 {
            let directory = format!("/{directory}");
            for file in 0..3 {
                let path = format!("{directory}/{file}");
                nodes.push((tree.write_path(&path, b"", now).unwrap(), path));
            }
        }
        let mut paths = DirectoryPaths::default();
        for _ in 0..2 {
            for (node, path) in &nodes {
                assert_eq!(paths.path_of_file(&tree, *node).unwrap(), path.as_bytes());
            }
        }
        assert_eq!((paths.searches(), paths.paths.len()), (40, 40));
        paths.bytes = MAX_BYTES;
        let top = tree.write_path("/top", b"", now).unwrap();
        assert_eq!(paths.path_of_file(&tree, top).unwrap(), b"/top");
        assert_eq!((paths.searches(), paths.paths.len()), (41, 1));
        assert_eq!(paths.bytes, 1 + ENTRY_SIZE);
    }
}
