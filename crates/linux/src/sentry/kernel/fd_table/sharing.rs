//! Descriptors that processes share (`CLONE_FILES`).
//!
//! Promises: each table belongs to one living process, and the others that share it refer to that.
//! It is closed with the last of them.

use std::collections::BTreeMap;

use rustix::io::Errno;

use super::{Descriptor, FdTable};

impl FdTable {
    /// The process whose table `process` uses.
    pub(in crate::sentry) fn table_owner(&self, process: u32) -> u32 {
        self.shared.get(&process).copied().unwrap_or(process)
    }

    /// Whether a process shares its descriptors with another.
    pub(in crate::sentry) fn is_shared(&self, process: u32) -> bool {
        self.shared.contains_key(&process) || self.shared.values().any(|owner| *owner == process)
    }

    /// Has a new process share the descriptors of `with`.
    pub(in crate::sentry) fn share(&mut self, process: u32, with: u32) {
        let owner = self.table_owner(with);
        self.shared.insert(process, owner);
    }

    /// Has a child that was forked share the descriptors of the current process `own` instead of
    /// its copy.
    pub(in crate::sentry) fn share_with_child(&mut self, child: u32, own: u32) {
        let copy = self.others.remove(&child).unwrap_or_default();
        // The current process has them open.
        copy.values().for_each(|descriptor| drop(self.release(descriptor.description)));
        self.share(child, own);
    }

    /// Leaves the shared table of the current process `own` to the others, and gives it an empty
    /// one. Returns its descriptors, or nothing if it shares none.
    fn leave_shared(&mut self, own: u32) -> Option<BTreeMap<u32, Descriptor>> {
        let owner = match self.shared.remove(&own) {
            Some(owner) => owner,
            None => {
                // Another becomes the owner.
                let (&heir, _) = self.shared.iter().find(|(_, owner)| **owner == own)?;
                self.shared.remove(&heir);
                let others = self.shared.values_mut().filter(|owner| **owner == own);
                others.for_each(|owner| *owner = heir);
                heir
            }
        };
        let left = std::mem::take(&mut self.descriptors);
        self.others.insert(owner, left.clone());
        Some(left)
    }

    /// The current process `own` ends: descriptors that it shares stay open.
    pub(in crate::sentry) fn abandon_shared(&mut self, own: u32) {
        self.leave_shared(own);
    }

    /// Refuses the current process `own` a copy of descriptors that it shares if there are too
    /// many.
    pub(in crate::sentry) fn check_unshare(&self, own: u32) -> Result<(), Errno> {
        if self.is_shared(own) { self.check_fork() } else { Ok(()) }
    }

    /// Gives the current process `own` its own copy of descriptors that it shares. The caller has
    /// checked the room ([`Self::check_unshare`]).
    pub(in crate::sentry) fn unshare(&mut self, own: u32) {
        if let Some(copy) = self.leave_shared(own) {
            copy.values().for_each(|descriptor| self.hold(descriptor.description));
            self.descriptors = copy;
        }
    }

    /// Processes that share the descriptors of others, and those.
    pub(in crate::sentry) fn sharing(&self) -> BTreeMap<u32, u32> {
        self.shared.clone()
    }

    /// Takes the sharing of a snapshot, in which `own` is the current process. Returns
    /// whether that has only descriptors that it shares. The caller checks the rest
    /// ([`Self::is_sharing_sound`]).
    pub(in crate::sentry) fn thaw_sharing(&mut self, shared: BTreeMap<u32, u32>, own: u32) -> bool {
        self.shared = shared;
        let owner = self.table_owner(own);
        if owner == own {
            return true;
        }
        let had = std::mem::replace(
            &mut self.descriptors,
            self.others.remove(&owner).unwrap_or_default(),
        );
        had.is_empty()
    }

    /// Whether a guest can have this sharing.
    pub(in crate::sentry) fn is_sharing_sound(&self, lives: impl Fn(u32) -> bool) -> bool {
        self.shared.iter().all(|(process, owner)| {
            let has_own = self.others.get(process).is_some_and(|list| !list.is_empty());
            let shares = !self.shared.contains_key(owner) && !has_own;
            lives(*process) && lives(*owner) && shares
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sentry::kernel::fd_table::{Description, FileObject};

    fn add(table: &mut FdTable) -> u64 {
        let description = Description::new(FileObject::Process(2), 0);
        u64::from(table.add(description, false).ok().unwrap())
    }

    #[test]
    fn shared_descriptors_are_one_table_until_the_last_process_ends() {
        let mut table = FdTable::new();
        table.share(9, 2);
        let number = add(&mut table);
        table.switch(2, 9);
        assert!(table.get(number).is_ok() && table.is_shared(2) && table.is_shared(9));
        assert_eq!(table.listed(Some(2)).count(), table.listed(None).count());
        // The owner ends first.
        table.switch(9, 2);
        table.abandon_shared(2);
        assert!(table.numbers(0, 99).is_empty() && !table.is_shared(9));
        table.switch(2, 9);
        table.drop_process(2);
        assert!(table.close(number).unwrap().is_some());
    }

    #[test]
    fn a_process_unshares_its_descriptors_as_a_copy() {
        for unsharing in [2, 9] {
            let mut table = FdTable::new();
            table.share(9, 2);
            let number = add(&mut table);
            if unsharing == 9 {
                table.switch(2, 9);
            }
            table.unshare(unsharing);
            assert_eq!(table.close(number), Ok(None), "the other has it open");
            table.switch(unsharing, 11 - unsharing);
            assert!(table.close(number).unwrap().is_some() && !table.is_shared(2));
        }
    }

    #[test]
    fn sharing_of_a_snapshot_is_with_owners_of_tables() {
        let thaw = |shared: &[(u32, u32)]| {
            let mut table = FdTable::new();
            table.others.insert(8, table.descriptors.clone());
            table.thaw_sharing(shared.iter().copied().collect(), 2)
                && table.is_sharing_sound(|id| [2, 8, 9].contains(&id))
        };
        assert!(thaw(&[]) && thaw(&[(9, 2)]) && thaw(&[(9, 8)]));
        assert!(!thaw(&[(8, 2)]) && !thaw(&[(2, 8)]) && !thaw(&[(9, 7)]) && !thaw(&[(7, 2)]));
    }
}
