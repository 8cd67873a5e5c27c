//! Permission bits, as they are for a user to whom every file belongs: those of its owner hold.
//!
//! Promises: what a guest forbids itself, or a layer forbids its files' owner, is refused as in Linux (`EACCES`). Directories on the way
//! are checked by the walk itself (`Walk::searching`). What is open stays open.

use afresh_files::{Access, Kind, Node, Place};
use rustix::io::Errno;

use super::{Person, Served, State};

/// Bits of a class, as `access` names them.
pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
pub(super) const SEARCH: u32 = 1;

/// Whether a mode lets its owner do all of this.
pub(super) fn allows(mode: u32, wanted: u32) -> bool {
    mode >> 6 & wanted & 7 == wanted & 7
}

impl State {
    /// Refuses what the bits of a file do not let its owner do.
    pub(super) fn may(&self, node: Node, wanted: u32) -> Result<(), Errno> {
        let stat = self.tree.stat(node).map_err(|refused| refused.errno())?;
        if allows(stat.mode, wanted) { Ok(()) } else { Err(Errno::ACCESS) }
    }

    /// Refuses to change what names a directory has.
    pub(super) fn may_change(&self, directory: Node) -> Result<(), Errno> {
        self.may(directory, WRITE | SEARCH)
    }

    /// Refuses to make a name, if there is none yet.
    pub(super) fn may_make(&self, place: &Place) -> Result<(), Errno> {
        if place.found.is_some() { Ok(()) } else { self.may_change(place.directory) }
    }

    /// Refuses to remove a name, if there is one.
    pub(super) fn may_remove(&self, place: &Place) -> Result<(), Errno> {
        if place.found.is_none() { Ok(()) } else { self.may_change(place.directory) }
    }
}

impl Person {
    /// Refuses to give what has one name another.
    pub(super) fn may_rename(&self, from: &Place, to: &Place) -> Served<()> {
        let Some((node, kind)) = from.found else { return Ok(()) };
        self.state.may_change(from.directory)?;
        self.state.may_change(to.directory)?;
        // Its `..` changes.
        if kind == Kind::Directory && from.directory != to.directory {
            self.state.may(node, WRITE)?;
        }
        Ok(())
    }

    /// Refuses to open a file for more than its bits let its owner do.
    pub(super) fn may_open(&self, mode: u32, access: Access, flags: i32) -> Served<()> {
        let bit = |holds: bool, bit: u32| if holds { bit } else { 0 };
        let only_named = flags & libc::O_PATH != 0;
        let cuts = flags & libc::O_TRUNC != 0 && !only_named;
        let wanted = bit(access.read, READ) | bit(access.write || cuts, WRITE);
        if allows(mode, wanted) { Ok(()) } else { Err(Errno::ACCESS.into()) }
    }
}
