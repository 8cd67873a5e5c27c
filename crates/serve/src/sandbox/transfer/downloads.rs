//! Versions of files that clients download from a sandbox.
//!
//! Promises: a version that a client keeps open counts in the memory of its sandbox until the
//! client has it or leaves, and once for all clients that download it. The versions of one sandbox
//! are bounded: a program that rewrites a file while slow clients read it keeps no more. They end
//! with their sandbox, so that nothing is kept that no budget counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use afresh::files::{FileReader, FileVersion, Node, Tree};
use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::sandbox::transfer::file_entry::refused;

/// The downloads of a sandbox. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Downloads(Arc<DownloadTable>);

#[derive(Default)]
struct DownloadTable {
    versions: Mutex<Vec<OpenVersion>>,
    bytes: AtomicU64,
    next: AtomicU64,
}

/// A version of a file that clients download.
struct OpenVersion {
    number: u64,
    node: Node,
    version: FileVersion,
    reader: Arc<FileReader>,
    clients: usize,
}

/// One client's download, until it is dropped.
pub(crate) struct Download {
    all: Downloads,
    number: u64,
}

impl Drop for Download {
    fn drop(&mut self) {
        let mut versions = lock(&self.all.0.versions);
        let Some(at) = versions.iter().position(|open| open.number == self.number) else { return };
        versions[at].clients -= 1;
        if versions[at].clients == 0 {
            let open = versions.swap_remove(at);
            self.all.0.bytes.fetch_sub(open.reader.memory(), Ordering::Relaxed);
        }
    }
}

impl Download {
    /// The file, unless its sandbox has ended.
    pub(crate) fn reader(&self) -> Option<Arc<FileReader>> {
        let versions = lock(&self.all.0.versions);
        versions.iter().find(|open| open.number == self.number).map(|open| open.reader.clone())
    }
}

impl Downloads {
    /// Begins to download the present version of a file. `admit` decides about the bytes of one
    /// that no client downloads yet; all versions have at most `most`.
    pub(crate) fn begin(
        &self,
        tree: &Tree,
        node: Node,
        most: u64,
        admit: impl FnOnce(u64) -> Result<(), ErrorResponse>,
    ) -> Result<Download, ErrorResponse> {
        let refuse = |error| refused("the file", &error);
        let mut versions = lock(&self.0.versions);
        let is_it =
            |open: &&mut OpenVersion| open.node == node && tree.is_version(node, &open.version);
        if let Some(open) = versions.iter_mut().find(is_it) {
            open.clients += 1;
            return Ok(Download { all: self.clone(), number: open.number });
        }
        let reader = tree.reader(node).map_err(refuse)?;
        let bytes = reader.memory();
        let held = self.bytes();
        if held.saturating_add(bytes) > most {
            let message = format!(
                "clients download {} MiB of files of this sandbox that have changed since, and its files may have {} MiB; \
                 end some downloads",
                held.div_ceil(1 << 20),
                most >> 20
            );
            return Err(ErrorResponse::busy(StatusCode::TOO_MANY_REQUESTS, message));
        }
        admit(bytes)?;
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let version = tree.version(node).map_err(refuse)?;
        versions.push(OpenVersion { number, node, version, reader: reader.into(), clients: 1 });
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Download { all: self.clone(), number })
    }

    /// Ends all of them, since the sandbox ends. The answers to their clients break off.
    pub(crate) fn end(&self) {
        for open in lock(&self.0.versions).drain(..) {
            self.0.bytes.fetch_sub(open.reader.memory(), Ordering::Relaxed);
        }
    }

    /// Bytes of the versions.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use afresh::files::{Budget, Time};

    use super::*;

    #[test]
    fn a_version_counts_once_until_its_last_client_has_it() {
        const FILE: u64 = 4096;
        let mut tree = Tree::new(Budget::default());
        let downloads = Downloads::default();
        let node = tree.write_path("/a", &[1; FILE as usize], Time::now()).unwrap();
        let begin = |tree: &Tree| downloads.begin(tree, node, 2 * FILE, |_| Ok(()));
        let first = begin(&tree).unwrap();
        let second = begin(&tree).unwrap();
        assert_eq!(downloads.bytes(), FILE);
        // A program writes the file again and again, and each version has a slow client.
        tree.write_path("/a", &[2; FILE as usize], Time::now()).unwrap();
        let third = begin(&tree).unwrap();
        assert_eq!(downloads.bytes(), 2 * FILE);
        tree.write_path("/a", &[3; FILE as usize], Time::now()).unwrap();
        let full = begin(&tree).err().unwrap();
        assert_eq!((full.status, full.later), (StatusCode::TOO_MANY_REQUESTS, true));
        drop(first);
        assert!(begin(&tree).is_err(), "another client has the first version");
        drop(second);
        let refusal = downloads.begin(&tree, node, 2 * FILE, |_| Err(ErrorResponse::no_memory()));
        assert!(refusal.is_err());
        assert_eq!(downloads.bytes(), FILE);
        let fourth = begin(&tree).unwrap();
        assert!(fourth.reader().is_some());
        drop(third);
        downloads.end();
        assert!(fourth.reader().is_none());
        drop(fourth);
        assert_eq!((downloads.bytes(), lock(&downloads.0.versions).len()), (0, 0));
    }
}
