//! Host files that are open in a tree.
//!
//! Promises: an open file stays the host file that was opened, with its present size and bytes,
//! also after the host has removed or replaced it. May break it: more open host files than a
//! process has descriptors for them. Then a file is read by its path, and one that was replaced
//! cannot be read.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::Refused;
use crate::layers::host::HostFile;
use crate::nodes::inode::Inode;
use crate::nodes::node::{Node, Stat};
use crate::read_at::FileExt;

/// Descriptors of the process for open host files.
const MAX_DESCRIPTORS: usize = 256;
static DESCRIPTORS: AtomicUsize = AtomicUsize::new(0);

/// A file that is open, or held for another reason.
#[derive(Clone, Debug)]
pub(crate) struct FileHold {
    /// How often.
    pub(crate) count: u32,
    /// The host file that was opened, if it was one.
    pub(crate) file: Option<Arc<HeldFile>>,
}

/// An open host file.
#[derive(Debug)]
pub(crate) struct HeldFile(Arc<File>);

impl HeldFile {
    /// `None` without descriptors.
    pub(crate) fn new(file: Arc<File>) -> Option<Self> {
        let before = DESCRIPTORS.fetch_add(1, Ordering::Relaxed);
        let this = Self(file);
        // Dropping it gives the descriptor back.
        (before < MAX_DESCRIPTORS).then_some(this)
    }

    /// Reads from `offset` on as much as there is.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize, Refused> {
        let mut done = 0;
        while done < out.len() {
            match self.0.read_at(&mut out[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(len) => done += len,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Refused::Layer(error.to_string())),
            }
        }
        Ok(done)
    }

    /// The attributes of a file with the present size and times of the host file.
    pub(crate) fn stat(&self, stat: Stat) -> Stat {
        match HostFile::of(&self.0) {
            Ok(present) => {
                let (size, modified) = (present.size(), present.modified());
                let mut times = stat.times;
                (times.modified, times.changed) = (modified, times.changed.max(modified));
                Stat { size, stored: size, times, ..stat }
            }
            Err(_) => stat,
        }
    }

    /// Gives a file the present version of the host file.
    pub(crate) fn show(&self, node: Node, inode: &mut Inode) {
        if let Ok(present) = HostFile::of(&self.0) {
            inode.body = present.body(node);
            inode.times.modified = present.modified();
        }
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        DESCRIPTORS.fetch_sub(1, Ordering::Relaxed);
    }
}
