//! Descriptors in flight between processes (`SCM_RIGHTS`), which stay open until they are received
//! or dropped.
//!
//! Promises: their number is bounded, and descriptors that cannot be received any more are closed.
//! A socket in flight to itself stays open until a reset, and counts against the same bound.

mod passing;

use std::collections::BTreeMap;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Descriptors that may be on their way: the default limit of open files, which Linux compares them
/// with.
pub(in crate::sentry) const CARRIED: usize = 1024;

/// Descriptors that one message may have (`SCM_MAX_FD`).
const TOGETHER: usize = 253;

/// All that is on its way: descriptions, by message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InFlightFds {
    list: BTreeMap<u64, Vec<u64>>,
    next: u64,
}

impl InFlightFds {
    /// Notes descriptions that are sent together.
    pub(in crate::sentry) fn add(&mut self, descriptions: Vec<u64>) -> Result<u64, Errno> {
        if descriptions.len() > TOGETHER {
            return Err(Errno::INVAL);
        }
        let carried: usize = self.list.values().map(Vec::len).sum();
        if carried + descriptions.len() > CARRIED {
            return Err(Errno::TOOMANYREFS);
        }
        let id = self.next;
        self.next += 1;
        self.list.insert(id, descriptions);
        Ok(id)
    }

    pub(in crate::sentry) fn get(&self, id: u64) -> &[u64] {
        self.list.get(&id).map_or(&[], Vec::as_slice)
    }

    pub(in crate::sentry) fn take(&mut self, id: u64) -> Vec<u64> {
        self.list.remove(&id).unwrap_or_default()
    }

    /// All descriptions on their way, as often as they are.
    pub(in crate::sentry) fn all(&self) -> impl Iterator<Item = u64> + '_ {
        self.list.values().flatten().copied()
    }

    /// Whether all descriptors in flight are open, and equal `carried`.
    pub(in crate::sentry) fn is_sound(
        &self,
        is_open: impl Fn(u64) -> bool,
        carried: impl Iterator<Item = u64>,
    ) -> bool {
        let mut carried: Vec<u64> = carried.collect();
        carried.sort_unstable();
        let sum: usize = self.list.values().map(Vec::len).sum();
        let sound = self.list.iter().all(|(id, list)| {
            *id < self.next && list.len() <= TOGETHER && list.iter().all(|one| is_open(*one))
        });
        sound && sum <= CARRIED && self.next < 1 << 62 && self.list.keys().eq(carried.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_in_flight_are_bounded_and_sound() {
        let mut parcels = InFlightFds::default();
        assert_eq!(parcels.add(vec![1; TOGETHER + 1]), Err(Errno::INVAL));
        assert_eq!((parcels.add(vec![1, 2]), parcels.add(vec![2])), (Ok(0), Ok(1)));
        for _ in 0..4 {
            let _ = parcels.add(vec![3; TOGETHER]);
        }
        assert_eq!(parcels.add(vec![3; 10]), Err(Errno::TOOMANYREFS));
        assert_eq!(parcels.all().filter(|id| *id == 2).count(), 2);
        let sound = |parcels: &InFlightFds, open: u64, ids: &[u64]| {
            parcels.is_sound(|id| id <= open, ids.iter().copied())
        };
        assert!(sound(&parcels, 3, &[5, 0, 1, 2, 3, 4]));
        assert!(!sound(&parcels, 2, &[0, 1, 2, 3, 4, 5]), "one is not open");
        assert!(!sound(&parcels, 3, &[0, 1, 2, 3, 4]), "one is nowhere");
        assert!(!sound(&parcels, 3, &[0, 1, 1, 2, 3, 4, 5]), "one is in two places");
        parcels.next = 2;
        assert!(!sound(&parcels, 3, &[0, 1, 2, 3, 4, 5]));
    }
}
