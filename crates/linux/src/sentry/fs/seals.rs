//! Seals of unnamed files (`memfd_create`): operations that are forbidden on a file permanently.
//!
//! Promises: sealed operations are refused to all calls and to mappings. Seals last until the file
//! is removed, and are in every state.

mod checks;

use std::collections::BTreeMap;

use afresh_files::{Node, Tree};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

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

    /// Whether a file may have seals: whether it was made by `memfd_create`.
    pub(in crate::sentry) fn has(&self, node: Node) -> bool {
        self.0.contains_key(&node)
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
