//! Seals of unnamed files (`memfd_create`): operations that are forbidden on a file for good.
//!
//! Promises: sealed operations are refused to all calls and to mappings. Seals last until the file
//! is removed, and are in every state.

use std::collections::BTreeMap;

use afresh_files::{Node, Tree};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::{Kernel, Sentry, SyscallControl, SyscallResult, ZERO};

pub(in crate::sentry) const ADD: i32 = 1033;
pub(in crate::sentry) const GET: i32 = 1034;
/// More seals.
pub(in crate::sentry) const SEAL: u32 = 1;
const SHRINK: u32 = 2;
const GROW: u32 = 4;
const WRITE: u32 = 8;
/// Writes, except through existing mappings.
const FUTURE: u32 = 16;
/// Changes of whether it is a program.
pub(in crate::sentry) const EXEC: u32 = 32;
const ALL: u32 = SEAL | SHRINK | GROW | WRITE | FUTURE | EXEC;
/// A seal that only the sentry sets: mappings of `/dev/afresh/generation` show this file.
const SHOWS_GENERATION: u32 = 1 << 31;
/// All seals of that file, which no call of the program changes.
pub(in crate::sentry) const GENERATION_PAGE: u32 = ALL | SHOWS_GENERATION;

/// The seals of files that can be sealed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seals(BTreeMap<Node, u32>);

impl Seals {
    /// The seals of a file.
    fn of(&self, node: Node) -> u32 {
        self.0.get(&node).copied().unwrap_or_default()
    }

    /// A file that was made with these seals. Those of removed files are dropped.
    pub(in crate::sentry) fn begin(&mut self, node: Node, seals: u32, tree: &Tree) {
        *self = self.lasting(tree);
        self.0.insert(node, seals);
    }

    /// The file that mappings of `/dev/afresh/generation` show, if it was made.
    pub(in crate::sentry) fn generation_page(&self) -> Option<Node> {
        self.0.iter().find(|(_, seals)| **seals & SHOWS_GENERATION != 0).map(|(node, _)| *node)
    }

    /// Those of files that are there.
    pub(in crate::sentry) fn lasting(&self, tree: &Tree) -> Self {
        let there = self.0.iter().filter(|(node, _)| tree.stat(**node).is_ok());
        Self(there.map(|(node, seals)| (*node, *seals)).collect())
    }

    /// Refuses to write to a file up to `end`, if its size is `size`.
    pub(in crate::sentry) fn may_write(
        &self,
        node: Node,
        end: u64,
        size: u64,
    ) -> Result<(), Errno> {
        let seals = self.of(node);
        let grows = seals & GROW != 0 && end > size;
        if seals & (WRITE | FUTURE) != 0 || grows { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Refuses to give a file another size.
    pub(in crate::sentry) fn may_resize(
        &self,
        node: Node,
        old: u64,
        new: u64,
    ) -> Result<(), Errno> {
        let seals = self.of(node);
        let sealed = seals & SHRINK != 0 && new < old || seals & GROW != 0 && new > old;
        if sealed { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Refuses a mapping through which a file would be written.
    pub(in crate::sentry) fn may_map(&self, node: Node) -> Result<(), Errno> {
        if self.of(node) & (WRITE | FUTURE) != 0 { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Refuses to make a file a program, or none.
    pub(in crate::sentry) fn may_turn(&self, node: Node, old: u32, new: u32) -> Result<(), Errno> {
        let turns = (old ^ new) & 0o111 != 0;
        if self.of(node) & EXEC != 0 && turns { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Whether a guest could have made them.
    pub(in crate::sentry) fn is_sound(&self, is_file: impl Fn(Node) -> bool) -> bool {
        let shown = self.0.values().filter(|seals| **seals & SHOWS_GENERATION != 0).count();
        let known = |seals: u32| seals & !ALL == 0 || seals == GENERATION_PAGE;
        shown <= 1 && self.0.iter().all(|(node, seals)| known(*seals) && is_file(*node))
    }
}

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
        let closed = |s: &crate::sentry::mm::shared::SharedMapping| {
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
            let writable = |s: &crate::sentry::mm::shared::SharedMapping| {
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
