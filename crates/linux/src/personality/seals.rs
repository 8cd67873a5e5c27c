//! Seals of files without a name (`memfd_create`): what may be done to one no more, by whoever has it.
//!
//! Promises: what is sealed is refused to all calls alike, and to mappings. They last as long as the file, and are in every state.

use std::collections::BTreeMap;

use afresh_files::{Node, Tree};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::table::Open;
use super::{DONE, Outcome, Person, Served, State};

pub(super) const ADD: i32 = 1033;
pub(super) const GET: i32 = 1034;
/// More seals.
pub(super) const SEAL: u32 = 1;
const SHRINK: u32 = 2;
const GROW: u32 = 4;
const WRITE: u32 = 8;
/// Writes, but through mappings that there are.
const FUTURE: u32 = 16;
/// Changes of whether it is a program.
pub(super) const EXEC: u32 = 32;
const ALL: u32 = SEAL | SHRINK | GROW | WRITE | FUTURE | EXEC;

/// What is sealed, of files that may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seals(BTreeMap<Node, u32>);

impl Seals {
    /// What of a file is sealed.
    fn of(&self, node: Node) -> u32 {
        self.0.get(&node).copied().unwrap_or_default()
    }

    /// A file that was made with these. Those that are gone are forgotten.
    pub(super) fn begin(&mut self, node: Node, seals: u32, tree: &Tree) {
        *self = self.lasting(tree);
        self.0.insert(node, seals);
    }

    /// Those of files that are there.
    pub(super) fn lasting(&self, tree: &Tree) -> Self {
        let there = self.0.iter().filter(|(node, _)| tree.stat(**node).is_ok());
        Self(there.map(|(node, seals)| (*node, *seals)).collect())
    }

    /// Refuses to write to a file up to `end`, which is as long as `size`.
    pub(super) fn may_write(&self, node: Node, end: u64, size: u64) -> Result<(), Errno> {
        let seals = self.of(node);
        let grows = seals & GROW != 0 && end > size;
        if seals & (WRITE | FUTURE) != 0 || grows { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Refuses to give a file another size.
    pub(super) fn may_resize(&self, node: Node, old: u64, new: u64) -> Result<(), Errno> {
        let seals = self.of(node);
        let sealed = seals & SHRINK != 0 && new < old || seals & GROW != 0 && new > old;
        if sealed { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Refuses a mapping through which a file would be written.
    pub(super) fn may_map(&self, node: Node) -> Result<(), Errno> {
        if self.of(node) & (WRITE | FUTURE) != 0 { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Refuses to make a file a program, or none.
    pub(super) fn may_turn(&self, node: Node, old: u32, new: u32) -> Result<(), Errno> {
        let turns = (old ^ new) & 0o111 != 0;
        if self.of(node) & EXEC != 0 && turns { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Whether it is what a guest could have.
    pub(super) fn is_sound(&self, is_file: impl Fn(Node) -> bool) -> bool {
        self.0.iter().all(|(node, seals)| seals & !ALL == 0 && is_file(*node))
    }
}

impl State {
    /// Whether memory may be made writable that shows sealed files.
    pub(super) fn may_open_memory(
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
        let closed = |s: &super::shared::Shared| s.protection & libc::PROT_WRITE as u64 == 0;
        meant.try_for_each(|s| match closed(&s) {
            true => self.seals.may_map(s.share.node).map_err(|_| Errno::ACCESS),
            false => Ok(()),
        })
    }
}

impl Person {
    /// `fcntl(F_GET_SEALS)` and `fcntl(F_ADD_SEALS)`.
    pub(super) fn seals(&mut self, descriptor: u64, added: Option<u64>) -> Served {
        let Open::File(open) = &self.state.table.get(descriptor)?.open else {
            return Err(Errno::INVAL.into());
        };
        let (node, writes) = (open.node, open.access.write);
        let held = self.state.seals.0.get(&node).copied();
        let Some(added) = added else {
            return Ok(Outcome::Value(held.ok_or(Errno::INVAL)?.into()));
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
            let layouts = std::iter::once(&self.state.layout).chain(self.state.family.layouts());
            let mut shared = layouts.flat_map(super::Layout::shared);
            let writable = |s: &super::shared::Shared| s.protection & libc::PROT_WRITE as u64 != 0;
            if shared.any(|s| s.share.node == node && writable(&s)) {
                return Err(Errno::BUSY.into());
            }
        }
        if added & EXEC != 0 && self.state.tree.stat(node)?.mode & 0o111 != 0 {
            // Who may run it may not change it either.
            added |= SHRINK | GROW | WRITE | FUTURE;
        }
        self.change().seals.0.insert(node, held | added);
        Ok(DONE)
    }
}
