//! The descriptors that hold each description: those of all processes, those in flight,
//! and those of calls that wait.
//!
//! Promises: a description is taken out with its last descriptor, at a cost that does not depend on
//! the number of others. The counts are no part of a snapshot, and are made again from the
//! descriptors there.

use std::collections::BTreeMap;

use super::{Description, FdTable, FileObject};
use crate::sentry::kernel::inotify::Inotify;

impl FdTable {
    /// Counts the descriptors of each description, and finds those that watch files.
    pub(super) fn count_holders(&mut self) {
        let lists = self.others.values().chain([&self.descriptors]);
        let open = lists.flat_map(|list| list.values().map(|descriptor| descriptor.description));
        let mut holders: BTreeMap<u64, u32> = BTreeMap::new();
        for id in open.chain(self.carried.all()) {
            *holders.entry(id).or_default() += 1;
        }
        let watches = |(_, d): &(&u64, &Description)| matches!(d.open, FileObject::Watches(_));
        self.watching = self.descriptions.iter().filter(watches).map(|(&id, _)| id).collect();
        self.holders = holders;
    }

    /// Counts a further descriptor of a description.
    pub(in crate::sentry::kernel) fn hold(&mut self, id: u64) {
        *self.holders.entry(id).or_default() += 1;
    }

    /// Counts a descriptor of a description less. Returns the description without any.
    pub(super) fn release(&mut self, id: u64) -> Option<Description> {
        let left = self.holders.get_mut(&id)?;
        *left -= 1;
        if *left > 0 {
            return None;
        }
        self.holders.remove(&id);
        self.watching.remove(&id);
        self.async_files.remove(id);
        self.descriptions.remove(&id)
    }

    /// Closes many descriptors. Returns the objects whose last descriptors they were.
    pub(super) fn close_all(&mut self, descriptors: &[u64]) -> Vec<Description> {
        let closed = descriptors.iter().filter_map(|n| self.close(*n).ok().flatten());
        closed.collect()
    }

    /// Takes out those of the descriptions that are open nowhere after a message in flight or a
    /// call.
    pub(in crate::sentry::kernel) fn unused(&mut self, list: Vec<u64>) -> Vec<Description> {
        list.into_iter().filter_map(|id| self.release(id)).collect()
    }

    /// The descriptions that watch files.
    pub(in crate::sentry) fn watching(&self) -> impl Iterator<Item = &Inotify> + '_ {
        self.watching.iter().filter_map(|id| match &self.descriptions.get(id)?.open {
            FileObject::Watches(watches) => Some(watches),
            _ => None,
        })
    }

    /// Calls a function with each of the descriptions that watch files.
    pub(in crate::sentry) fn for_each_watching(&mut self, mut each: impl FnMut(&mut Inotify)) {
        for id in &self.watching {
            if let Some(Description { open: FileObject::Watches(watches), .. }) =
                self.descriptions.get_mut(id)
            {
                each(watches);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::sentry::kernel::fd_table::{Descriptor, MAX_ALL_DESCRIPTORS};

    #[test]
    fn a_description_ends_with_its_last_descriptor_and_counts_are_made_again() {
        let mut table = FdTable::new();
        let add = |table: &mut FdTable| {
            let description = Description::new(FileObject::Process(2), 0);
            u64::from(table.add(description, false).ok().unwrap())
        };
        let (first, second) = (add(&mut table), add(&mut table));
        table.fork(9);
        let parcel = table.carry(&[first, second, second]).unwrap();
        let mut counted = table.clone();
        counted.count_holders();
        assert!(table == counted);
        assert_eq!((table.close(first), table.close(second)), (Ok(None), Ok(None)));
        // The other process has both.
        assert!(table.drop_parcel(parcel).is_empty());
        table.switch(1, 9);
        let last = u64::from(table.duplicate(first, 0, false).unwrap());
        assert_eq!((table.close(first), table.close(second).unwrap().is_some()), (Ok(None), true));
        let mut counted = table.clone();
        counted.count_holders();
        assert!(table == counted);
        assert!(table.close(last).unwrap().is_some());
    }

    #[test]
    fn a_child_with_a_descriptor_for_its_parent_needs_room_for_that_as_well() {
        let mut table = FdTable::new();
        let descriptor = Descriptor { description: 0, close_on_exec: false };
        let all = (0..MAX_ALL_DESCRIPTORS as u32 - 6).map(|number| (number, descriptor));
        table.others.insert(9, all.collect());
        assert_eq!((table.check_fork(), table.check_described_fork()), (Ok(()), Err(Errno::NFILE)));
        table.close(2).unwrap();
        assert_eq!(table.check_described_fork(), Ok(()));
    }

    #[test]
    fn watching_descriptions_are_found_alone() {
        let mut table = FdTable::new();
        let watches = Description::new(FileObject::Watches(Inotify::default()), 0);
        let number = table.add(watches, false).ok().unwrap();
        let mut looks = 0;
        table.for_each_watching(|_| looks += 1);
        assert_eq!((looks, table.watching().count()), (1, 1));
        assert!(table.close(number.into()).unwrap().is_some());
        assert_eq!(table.watching().count(), 0);
    }
}
