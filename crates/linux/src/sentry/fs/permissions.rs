//! Permission bits: those of the owner, of the group, or of others apply.
//!
//! Promises: access that a guest forbids itself, or a layer forbids its files' owner, is refused as
//! in Linux (`EACCES`). Directories on the way are checked by the walk itself (`Walk::searching`),
//! by the owner's bits for all users. Open files stay open. A process with `CAP_DAC_OVERRIDE` over
//! files, such as `root`, passes the bits.

use afresh_files::{Access, Kind, Node, ResolvedName, Stat, Walk};
use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::{Credentials, DAC_OVERRIDE, FOWNER};
use crate::sentry::kernel::users::{FOR_FILES, ProcessIds, REAL};
use crate::sentry::result::SyscallResult;

/// Bits of a class, as `access` names them.
pub(in crate::sentry) const READ: u32 = 4;
pub(in crate::sentry) const WRITE: u32 = 2;
pub(in crate::sentry) const SEARCH: u32 = 1;

/// The permission bits of a file, and its recorded owner.
#[derive(Clone, Copy, Debug)]
pub(in crate::sentry) struct FilePermissions {
    pub(in crate::sentry) mode: u32,
    pub(in crate::sentry) owner: Option<[u32; 2]>,
}

impl FilePermissions {
    pub(in crate::sentry) fn of(stat: &Stat) -> Self {
        Self { mode: stat.mode, owner: stat.owner }
    }
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
        self.has_over(None, DAC_OVERRIDE)
    }

    /// The bits of a mode that apply to a process with these users and groups.
    fn class_bits(&self, file: FilePermissions, ids: &ProcessIds) -> u32 {
        let ([user, group], mode) = (self.owner_of(file.owner), file.mode);
        match ids.user[FOR_FILES] == user {
            true => mode >> 6,
            false if ids.is_in_group(group) => mode >> 3,
            false => mode,
        }
    }

    /// Refuses changes of attributes that only the owner of a file may make.
    pub(in crate::sentry) fn check_ownership(&self, node: Node) -> Result<(), Errno> {
        let stat = self.tree.stat(node).map_err(|refused| refused.errno())?;
        let is_own = self.ids().user[FOR_FILES] == self.owner_of(stat.owner)[0];
        if is_own || self.has_over(stat.owner, FOWNER) { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Whether the current process may do all of this with a file. A file without a bit to execute
    /// it is no program for `root` either.
    pub(in crate::sentry) fn permits(
        &self,
        file: FilePermissions,
        is_directory: bool,
        wanted: u32,
    ) -> bool {
        self.permits_as((&self.ids(), self.credentials()), file, is_directory, wanted)
    }

    /// As [`Self::permits`], with the real user and group in place of those for files.
    pub(in crate::sentry) fn permits_really(
        &self,
        file: FilePermissions,
        is_directory: bool,
        wanted: u32,
    ) -> bool {
        let (mut ids, mut own) = (self.ids(), self.credentials());
        ids.user[FOR_FILES] = ids.user[REAL];
        ids.group[FOR_FILES] = ids.group[REAL];
        let [[real, _], _] = self.real_and_effective();
        own.effective = if real == 0 { own.permitted } else { 0 };
        self.permits_as((&ids, own), file, is_directory, wanted)
    }

    fn permits_as(
        &self,
        (ids, own): (&ProcessIds, Credentials),
        file: FilePermissions,
        is_directory: bool,
        wanted: u32,
    ) -> bool {
        let executes = wanted & SEARCH != 0 && !is_directory;
        let allows = self.class_bits(file, ids) & wanted & 7 == wanted & 7;
        let passes = || self.have_over(own, file.owner, DAC_OVERRIDE);
        allows || !(executes && file.mode & 0o111 == 0) && passes()
    }

    /// Whether the current process may run a file as a program.
    pub(crate) fn may_run(&self, stat: &Stat) -> bool {
        self.permits(FilePermissions::of(stat), false, SEARCH)
    }

    /// The same walk below the root directory of the current process, through directories alone
    /// that it may search.
    pub(crate) fn searching(&self, walk: Walk) -> Walk {
        let walk = if walk.beneath { walk } else { walk.root(self.root()) };
        if self.passes_bits() { walk } else { walk.searching() }
    }

    /// Refuses access that the bits of a file forbid.
    pub(in crate::sentry) fn may(&self, node: Node, wanted: u32) -> Result<(), Errno> {
        let stat = self.tree.stat(node).map_err(|refused| refused.errno())?;
        let is_directory = stat.kind == Kind::Directory;
        if self.permits(FilePermissions::of(&stat), is_directory, wanted) {
            Ok(())
        } else {
            Err(Errno::ACCESS)
        }
    }

    /// Refuses changes to a directory's names.
    pub(in crate::sentry) fn may_change(&self, directory: Node) -> Result<(), Errno> {
        self.may(directory, WRITE | SEARCH)
    }

    /// Refuses to create a name in a directory that forbids it.
    pub(in crate::sentry) fn may_make(&self, place: &ResolvedName) -> Result<(), Errno> {
        if place.found.is_some() { Ok(()) } else { self.may_change(place.directory) }
    }

    /// Refuses to remove a name, if it exists. In a directory with the sticky bit only the owner of
    /// the file or of the directory may.
    pub(in crate::sentry) fn may_remove(&self, place: &ResolvedName) -> Result<(), Errno> {
        let Some((node, _)) = place.found else { return Ok(()) };
        self.may_change(place.directory)?;
        let stat = self.tree.stat(place.directory).map_err(|refused| refused.errno())?;
        if stat.mode & libc::S_ISVTX == 0 || self.check_ownership(place.directory).is_ok() {
            return Ok(());
        }
        self.check_ownership(node)
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
        self.state.may_remove(from)?;
        self.state.may_change(to.directory)?;
        self.state.may_remove(to)?;
        // Its `..` changes.
        if kind == Kind::Directory && from.directory != to.directory {
            self.state.may(node, WRITE)?;
        }
        Ok(())
    }

    /// Refuses to open a file for more than the current process may do.
    pub(in crate::sentry) fn may_open(
        &self,
        file: FilePermissions,
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
        if self.state.permits(file, false, wanted) { Ok(()) } else { Err(Errno::ACCESS.into()) }
    }
}
