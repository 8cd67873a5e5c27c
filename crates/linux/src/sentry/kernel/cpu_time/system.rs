//! System time of guest processes: CPU time of the sentry while it serves their calls.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Nanoseconds of each process and of its reaped children, where there are any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SystemTimes(BTreeMap<u32, [u64; 2]>);

impl SystemTimes {
    /// The time of a process, and of its reaped children.
    pub(in crate::sentry) fn of(&self, process: u32) -> [u64; 2] {
        self.0.get(&process).copied().unwrap_or_default()
    }

    /// The time of a process with that of its reaped children.
    pub(in crate::sentry) fn sum_of(&self, process: u32) -> u64 {
        let [own, children] = self.of(process);
        own.saturating_add(children)
    }

    fn add(&mut self, process: u32, [own, children]: [u64; 2]) {
        if own > 0 || children > 0 {
            let times = self.0.entry(process).or_default();
            *times = [times[0].saturating_add(own), times[1].saturating_add(children)];
        }
    }

    pub(in crate::sentry) fn spend(&mut self, process: u32, time: u64) {
        self.add(process, [time, 0]);
    }

    /// A process reaps a child.
    pub(in crate::sentry) fn reap(&mut self, process: u32, child: u32) {
        let time = self.sum_of(child);
        self.0.remove(&child);
        self.add(process, [0, time]);
    }

    /// Drops the times of processes that do not exist.
    pub(in crate::sentry) fn keep(&mut self, exists: impl Fn(u32) -> bool) {
        self.0.retain(|process, _| exists(*process));
    }

    /// Whether all are of processes that exist.
    pub(in crate::sentry) fn is_sound(&self, exists: impl Fn(u32) -> bool) -> bool {
        self.0.keys().all(|process| exists(*process))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_reaped_child_is_its_parents() {
        let mut times = SystemTimes::default();
        times.spend(2, 5);
        times.spend(3, 7);
        times.spend(4, 1);
        times.reap(3, 4);
        assert_eq!((times.of(3), times.sum_of(3)), ([7, 1], 8));
        times.reap(2, 3);
        assert_eq!((times.of(2), times.of(3)), ([5, 8], [0, 0]));
        assert!(times.is_sound(|id| id == 2) && !times.is_sound(|id| id == 3));
        times.keep(|_| false);
        assert_eq!(times, SystemTimes::default());
    }
}
