//! Permission bits, for a user who owns every file: the owner's bits apply.
//!
//! Promises: access that a guest forbids itself, or a layer forbids its files' owner, is refused as
//! in Linux (`EACCES`). Directories on the way are checked by the walk itself (`Walk::searching`).
//! Open files stay open. A process with `CAP_DAC_OVERRIDE` over files, such as `root` in a user
//! namespace, passes the bits.

use afresh_files::{Access, Kind, Node, ResolvedName, Walk};
use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::DAC_OVERRIDE;
use crate::sentry::result::SyscallResult;

/// Bits of a class, as `access` names them.
pub(in crate::sentry) const READ: u32 = 4;
pub(in crate::sentry) const WRITE: u32 = 2;
pub(in crate::sentry) const SEARCH: u32 = 1;

/// Whether a mode lets its owner do all of this.
fn allows(mode: u32, wanted: u32) -> bool {
    mode >> 6 & wanted & 7 == wanted & 7
}

/// The access for the flags of an open; none with `O_PATH`.
pub(in crate::sentry) fn access_of(flags: i32) -> Access {
    let only_named = flags & libc::O_PATH != 0;
    let mode = flags & libc::O_ACCMODE;
    Access {
        read: !only_named && matches!(mode, libc::O_RDONLY | libc::O_RDWR),
        write: !only_named && matches!(mode, libc::O_WRONLY | libc::O_RDWR),
        append: !only_named && flags & libc::O_APPEND != 0,
    }
}

impl Kernel {
    /// Whether the current process passes permission bits.
    pub(in crate::sentry) fn passes_bits(&self) -> bool {
        self.has_over_files(DAC_OVERRIDE)
    }

    /// Whether the current process may do all of this with a file. A file without a bit to execute
    /// it is no program for `root` either.
    pub(in crate::sentry) fn permits(&self, mode: u32, is_directory: bool, wanted: u32) -> bool {
        let executes = wanted & SEARCH != 0 && !is_directory;
        allows(mode, wanted) || !(executes && mode & 0o111 == 0) && self.passes_bits()
    }

    /// The same walk through directories alone that the current process may search.
    pub(in crate::sentry) fn searching(&self, walk: Walk) -> Walk {
        if self.passes_bits() { walk } else { walk.searching() }
    }

    /// Refuses access that the bits of a file forbid.
    pub(in crate::sentry) fn may(&self, node: Node, wanted: u32) -> Result<(), Errno> {
        let stat = self.tree.stat(node).map_err(|refused| refused.errno())?;
        let is_directory = stat.kind == Kind::Directory;
        if self.permits(stat.mode, is_directory, wanted) { Ok(()) } else { Err(Errno::ACCESS) }
    }

    /// Refuses changes to a directory's names.
    pub(in crate::sentry) fn may_change(&self, directory: Node) -> Result<(), Errno> {
        self.may(directory, WRITE | SEARCH)
    }

    /// Refuses to create a name in a directory that forbids it.
    pub(in crate::sentry) fn may_make(&self, place: &ResolvedName) -> Result<(), Errno> {
        if place.found.is_some() { Ok(()) } else { self.may_change(place.directory) }
    }

    /// Refuses to remove a name, if it exists.
    pub(in crate::sentry) fn may_remove(&self, place: &ResolvedName) -> Result<(), Errno> {
        if place.found.is_none() { Ok(()) } else { self.may_change(place.directory) }
    }
}

impl Sentry {
    /// Refuses a rename that the directories forbid.
    pub(in crate::sentry) fn may_rename(
        &self,
        from: &ResolvedName,
        to: &ResolvedName,
    ) -> SyscallResult<()> {
        let Some((node, kind)) = from.found else { return Ok(()) };
        self.state.may_change(from.directory)?;
        self.state.may_change(to.directory)?;
        // Its `..` changes.
        if kind == Kind::Directory && from.directory != to.directory {
            self.state.may(node, WRITE)?;
        }
        Ok(())
    }

    /// Refuses to open a file for more than the current process may do.
    pub(in crate::sentry) fn may_open(
        &self,
        mode: u32,
        access: Access,
        flags: i32,
    ) -> SyscallResult<()> {
        let bit = |holds: bool, bit: u32| if holds { bit } else { 0 };
        let only_named = flags & libc::O_PATH != 0;
        let cuts = flags & libc::O_TRUNC != 0 && !only_named;
        // An open with both flags needs both rights, and gives none.
        let both = flags & libc::O_ACCMODE == libc::O_ACCMODE && !only_named;
        let wanted = bit(access.read || both, READ) | bit(access.write || cuts || both, WRITE);
        // No open executes, so the kind makes no difference.
        if self.state.permits(mode, false, wanted) { Ok(()) } else { Err(Errno::ACCESS.into()) }
    }
}
