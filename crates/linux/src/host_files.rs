//! Host files that a guest's processes map themselves, in a run without a frozen state.
//!
//! A copy of a file in memory is for states that are frozen: they must not follow the host. A run
//! from start to end has none. There a mapping shows the bytes of the file, also those that the
//! host writes later, as it does in any process of the host. The libraries of a compiler have
//! 250 MB, of which a run reads the pages that it touches.
//!
//! Promises: a file is mapped for reading, privately. Only files are mapped that the host lets this
//! process execute. May break it: a host that cuts a mapped file, whose missing pages raise SIGBUS.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use afresh_files::{HostFile, Node, Tree};
use afresh_sys::file::can_be_executed;

/// Maximum files that are open for mappings. Others are copied.
const MAX_HOST_FILES: usize = 256;

/// The host files that were mapped, by their identities.
#[derive(Debug, Default)]
pub(crate) struct HostFiles {
    known: HashMap<HostFile, Option<Arc<File>>>,
}

impl HostFiles {
    /// The file with exactly the bytes of `node`; `None` if it is not an unchanged host file, or
    /// cannot be mapped.
    pub(crate) fn find(&mut self, tree: &Tree, node: Node) -> Option<Arc<File>> {
        let (file, identity) = tree.open_host_file(node)?;
        if let Some(known) = self.known.get(&identity) {
            return known.clone();
        }
        if self.known.len() >= MAX_HOST_FILES {
            // The mappings of a file do not need its descriptor.
            self.known
                .retain(|_, known| known.as_ref().is_some_and(|file| Arc::strong_count(file) > 1));
            if self.known.len() >= MAX_HOST_FILES {
                return None;
            }
        }
        let mappable = can_be_executed(file.as_fd()).then_some(file);
        self.known.insert(identity, mappable.clone());
        mappable
    }
}
