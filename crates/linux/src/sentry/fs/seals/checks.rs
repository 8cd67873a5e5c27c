//! Calls on seals, and the mappings that seals forbid.

use rustix::io::Errno;

use super::{ALL, EXEC, FUTURE, GROW, SEAL, SHRINK, WRITE};
use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

impl Kernel {
    /// Whether memory may be made writable that shows sealed files.
    pub(in crate::sentry) fn may_open_memory(
        &self,
        start: u64,
        len: u64,
        protection: u64,
    ) -> Result<(), Errno> {
        if protection & libc::PROT_WRITE as u64 == 0
            || self.shares.is_empty()
            || self.seals.0.is_empty()
        {
            return Ok(());
        }
        let end = start.saturating_add(len);
        let shared = self.layout.shared().into_iter();
        let mut meant = shared.filter(|s| s.range.start < end && start < s.range.end);
        let closed = |s: &crate::sentry::mm::file_backing::SharedMapping| {
            s.protection & libc::PROT_WRITE as u64 == 0
        };
        meant.try_for_each(|s| match closed(&s) {
            true => self.seals.may_map(s.share.node).map_err(|_| Errno::ACCESS),
            false => Ok(()),
        })
    }
}

impl Sentry {
    /// `fcntl(F_GET_SEALS)` and `fcntl(F_ADD_SEALS)`.
    pub(in crate::sentry) fn seals(
        &mut self,
        descriptor: u64,
        added: Option<u64>,
    ) -> SyscallResult {
        let FileObject::File(open) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let (node, writes) = (open.node, open.access.write);
        let held = self.state.seals.0.get(&node).copied();
        let Some(added) = added else {
            return Ok(SyscallControl::Value(held.ok_or(Errno::INVAL)?.into()));
        };
        if added & !u64::from(ALL) != 0 {
            return Err(Errno::INVAL.into());
        }
        if !writes {
            return Err(Errno::PERM.into());
        }
        let held = held.ok_or(Errno::INVAL)?;
        if held & SEAL != 0 {
            return Err(Errno::PERM.into());
        }
        let mut added = added as u32;
        if added & WRITE != 0 && held & WRITE == 0 {
            let layouts = std::iter::once(&self.state.layout).chain(self.state.processes.layouts());
            let mut shared = layouts.flat_map(crate::sentry::Layout::shared);
            let writable = |s: &crate::sentry::mm::file_backing::SharedMapping| {
                s.protection & libc::PROT_WRITE as u64 != 0
            };
            if shared.any(|s| s.share.node == node && writable(&s)) {
                return Err(Errno::BUSY.into());
            }
        }
        if added & EXEC != 0 && self.state.tree.stat(node)?.mode & 0o111 != 0 {
            // An executable file cannot be changed either.
            added |= SHRINK | GROW | WRITE | FUTURE;
        }
        self.change().seals.0.insert(node, held | added);
        Ok(ZERO)
    }
}
