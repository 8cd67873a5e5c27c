//! Sets of semaphores that have keys and numbers in place of names (`semget`, of System V).
//!
//! Promises: their number is limited; the operations of a call are done all at once or not at all;
//! adjustments of a process (`SEM_UNDO`) are made at its end. Frozen ones are checked before use.

mod undo;

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Sets that there may be, semaphores of a set and of all, and operations of a call.
pub(in crate::sentry) const MAX_SETS: usize = 32_000;

pub(in crate::sentry) const MAX_IN_SET: usize = 32000;

pub(in crate::sentry) const MAX_SEMAPHORES: usize = 320 << 10;

pub(in crate::sentry) const MAX_OPERATIONS: usize = 500;

/// The highest value of a semaphore.
pub(in crate::sentry) const MAX_VALUE: u16 = 32767;

/// Adjustments of all processes.
pub(in crate::sentry) const MAX_ADJUSTMENTS: usize = 64 << 10;

/// An operation of `semop`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SemaphoreOperation {
    pub(in crate::sentry) number: u16,
    pub(in crate::sentry) change: i16,
    pub(in crate::sentry) flags: u16,
}

impl SemaphoreOperation {
    fn has(self, flag: i32) -> bool {
        i32::from(self.flags) & flag != 0
    }
}

/// A semaphore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Semaphore {
    pub(in crate::sentry) value: u16,
    /// The process that changed it last.
    pub(in crate::sentry) last: u32,
}

/// A set of semaphores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SemaphoreSet {
    /// Key 0 finds no set.
    pub(in crate::sentry) key: u32,
    pub(in crate::sentry) mode: u32,
    pub(in crate::sentry) list: Vec<Semaphore>,
    /// When it was used and changed, in seconds.
    pub(in crate::sentry) times: [i64; 2],
}

/// Why operations were not done.
pub(in crate::sentry) enum Refusal {
    /// They would have to wait; whether that is not wanted.
    Waits(bool),
    Errno(Errno),
}

/// All sets of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Semaphores {
    sets: BTreeMap<u32, SemaphoreSet>,
    next: u32,
    /// Amounts that are added at the end of a process, by process, set and number.
    adjustments: BTreeMap<(u32, u32, u16), i32>,
}

impl Semaphores {
    /// All sets by their numbers.
    pub(in crate::sentry) fn listed(&self) -> impl Iterator<Item = (u32, &SemaphoreSet)> {
        self.sets.iter().map(|(id, set)| (*id, set))
    }

    /// The highest number in use, and the numbers of sets and semaphores.
    pub(in crate::sentry) fn totals(&self) -> (Option<u32>, usize, usize) {
        let all = self.sets.values().map(|set| set.list.len()).sum();
        (self.sets.keys().next_back().copied(), self.sets.len(), all)
    }

    pub(in crate::sentry) fn get(&self, id: u64) -> Result<&SemaphoreSet, Errno> {
        self.sets.get(&(id as u32)).ok_or(Errno::INVAL)
    }

    pub(in crate::sentry) fn get_mut(&mut self, id: u64) -> Result<&mut SemaphoreSet, Errno> {
        self.sets.get_mut(&(id as u32)).ok_or(Errno::INVAL)
    }

    pub(in crate::sentry) fn keyed(&self, key: u32) -> Option<(u32, &SemaphoreSet)> {
        let found = self.sets.iter().find(|(_, set)| set.key == key && key != 0);
        found.map(|(id, set)| (*id, set))
    }

    /// A further set; its number.
    pub(in crate::sentry) fn add(&mut self, set: SemaphoreSet) -> Result<u32, Errno> {
        let all: usize = self.sets.values().map(|set| set.list.len()).sum();
        let full = self.sets.len() >= MAX_SETS
            || all + set.list.len() > MAX_SEMAPHORES
            || self.next > i32::MAX as u32;
        if full {
            return Err(Errno::NOSPC);
        }
        let id = self.next;
        self.next += 1;
        self.sets.insert(id, set);
        Ok(id)
    }

    pub(in crate::sentry) fn remove(&mut self, id: u64) {
        self.sets.remove(&(id as u32));
        self.adjustments.retain(|(_, set, _), _| *set != id as u32);
    }

    /// Forgets the adjustments of a semaphore that is given a value.
    pub(in crate::sentry) fn forget_adjustments(&mut self, id: u64, number: Option<u16>) {
        let meant =
            |set: u32, of: u16| set == id as u32 && number.is_none_or(|number| number == of);
        self.adjustments.retain(|(_, set, of), _| !meant(*set, *of));
    }

    /// The values after operations, by number.
    fn tried(
        &self,
        id: u32,
        operations: &[SemaphoreOperation],
    ) -> Result<BTreeMap<u16, u16>, Refusal> {
        let set = self.get(id.into()).map_err(Refusal::Errno)?;
        let mut values = BTreeMap::new();
        for operation in operations {
            let old = set.list.get(usize::from(operation.number));
            let old = old.ok_or(Refusal::Errno(Errno::FBIG))?.value;
            let value = values.entry(operation.number).or_insert(old);
            let waits = Refusal::Waits(operation.has(libc::IPC_NOWAIT));
            match operation.change {
                0 if *value != 0 => return Err(waits),
                change => {
                    let new = i32::from(*value) + i32::from(change);
                    if new > i32::from(MAX_VALUE) {
                        return Err(Refusal::Errno(Errno::RANGE));
                    }
                    *value = u16::try_from(new).map_err(|_| waits)?;
                }
            }
        }
        Ok(values)
    }

    /// Whether a wait for these operations is over.
    pub(in crate::sentry) fn is_over(&self, id: u32, operations: &[SemaphoreOperation]) -> bool {
        !matches!(self.tried(id, operations), Err(Refusal::Waits(_)))
    }

    /// Does all of the operations for a process.
    pub(in crate::sentry) fn operate(
        &mut self,
        id: u32,
        operations: &[SemaphoreOperation],
        process: u32,
        now: i64,
    ) -> Result<(), Refusal> {
        let values = self.tried(id, operations)?;
        let undone = operations.iter().filter(|operation| operation.has(libc::SEM_UNDO));
        if self.adjustments.len() + undone.clone().count() > MAX_ADJUSTMENTS {
            return Err(Refusal::Errno(Errno::NOSPC));
        }
        for operation in undone.filter(|operation| operation.change != 0) {
            let place = (process, id, operation.number);
            let sum = self.adjustments.entry(place).or_default();
            *sum = sum.saturating_sub(operation.change.into());
        }
        let set = self.sets.get_mut(&id).ok_or(Refusal::Errno(Errno::INVAL))?;
        for (number, value) in values {
            set.list[usize::from(number)] = Semaphore { value, last: process };
        }
        set.times[0] = now;
        Ok(())
    }

    /// Makes the adjustments of a process that ends.
    pub(in crate::sentry) fn leave(&mut self, process: u32) {
        if self.adjustments.is_empty() {
            return;
        }
        let (own, others) = std::mem::take(&mut self.adjustments)
            .into_iter()
            .partition(|((of, ..), _)| *of == process);
        self.adjustments = others;
        let own: BTreeMap<(u32, u32, u16), i32> = own;
        for ((_, id, number), sum) in own {
            let set = self.sets.get_mut(&id);
            if let Some(semaphore) = set.and_then(|set| set.list.get_mut(usize::from(number))) {
                let value = i32::from(semaphore.value).saturating_add(sum);
                semaphore.value = value.clamp(0, MAX_VALUE.into()) as u16;
                semaphore.last = process;
            }
        }
    }

    /// Whether a guest could have made them, with processes that `lives` knows.
    pub(in crate::sentry) fn is_sound(&self, lives: impl Fn(u32) -> bool) -> bool {
        let sets = self.sets.iter().all(|(id, set)| {
            let values = set.list.iter().all(|semaphore| semaphore.value <= MAX_VALUE);
            *id < self.next && set.mode & !0o777 == 0 && set.list.len() <= MAX_IN_SET && values
        });
        let adjustments = self.adjustments.keys().all(|(process, id, number)| {
            let set = self.sets.get(id);
            lives(*process) && set.is_some_and(|set| usize::from(*number) < set.list.len())
        });
        let all: usize = self.sets.values().map(|set| set.list.len()).sum();
        sets && adjustments
            && self.sets.len() <= MAX_SETS
            && all <= MAX_SEMAPHORES
            && self.adjustments.len() <= MAX_ADJUSTMENTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(number: u16, change: i16, flags: i32) -> SemaphoreOperation {
        SemaphoreOperation { number, change, flags: flags as u16 }
    }

    #[test]
    fn operations_are_done_all_or_not_at_all_and_undone_at_the_end() {
        let mut all = Semaphores::default();
        let list = vec![Semaphore::default(); 2];
        let id = all.add(SemaphoreSet { key: 7, mode: 0o600, list, times: [0; 2] }).unwrap();
        let undo = libc::SEM_UNDO;
        let waits = [operation(0, 3, 0), operation(1, -1, 0)];
        assert!(matches!(all.operate(id, &waits, 9, 0), Err(Refusal::Waits(false))));
        assert_eq!(all.get(id.into()).unwrap().list[0].value, 0);
        assert!(!all.is_over(id, &waits));
        assert!(all.operate(id, &[operation(1, 2, undo), operation(0, 1, 0)], 9, 0).is_ok());
        assert!(all.operate(id, &waits, 9, 0).is_ok());
        let values = |all: &Semaphores| {
            all.get(id.into()).unwrap().list.iter().map(|s| s.value).collect::<Vec<_>>()
        };
        assert_eq!(values(&all), [4, 1]);
        assert!(all.is_sound(|process| process == 9) && !all.is_sound(|_| false));
        let far = [operation(0, i16::MAX, 0)];
        assert!(matches!(all.operate(id, &far, 9, 0), Err(Refusal::Errno(Errno::RANGE))));
        let none = [operation(2, 1, 0)];
        assert!(matches!(all.operate(id, &none, 9, 0), Err(Refusal::Errno(Errno::FBIG))));
        all.leave(8);
        all.leave(9);
        // Two were added with `SEM_UNDO`, and one of them was taken.
        assert_eq!(values(&all), [4, 0]);
        all.remove(id.into());
        assert!(all.is_over(id, &waits) && all.keyed(7).is_none());
    }
}
