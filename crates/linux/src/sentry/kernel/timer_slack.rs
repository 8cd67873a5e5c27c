//! The default timer slack of processes: that of the parent when it forked.
//!
//! Promises: `PR_SET_TIMERSLACK` with 0 gives a process the slack that it began with.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::sentry::kernel::prctl_state::SLACK;

/// The slacks of processes that did not begin with the usual one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DefaultSlacks(BTreeMap<u32, u64>);

impl DefaultSlacks {
    pub(in crate::sentry) fn of(&self, process: u32) -> u64 {
        self.0.get(&process).copied().unwrap_or(SLACK)
    }

    /// A child begins with the present slack of its parent.
    pub(in crate::sentry) fn fork(&mut self, slack: u64, child: u32) {
        if slack != SLACK {
            self.0.insert(child, slack);
        }
    }

    /// Drops that of a process that has ended.
    pub(in crate::sentry) fn leave(&mut self, process: u32) {
        self.0.remove(&process);
    }

    /// Whether these are of living processes, as a guest makes them.
    pub(in crate::sentry) fn is_sound(&self, lives: impl Fn(u32) -> bool) -> bool {
        self.0.iter().all(|(process, slack)| lives(*process) && *slack != SLACK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_begins_with_the_slack_of_its_parent() {
        let mut slacks = DefaultSlacks::default();
        slacks.fork(70_000, 3);
        slacks.fork(SLACK, 4);
        assert_eq!([2, 3, 4].map(|id| slacks.of(id)), [SLACK, 70_000, SLACK]);
        assert!(slacks.is_sound(|id| id == 3) && !slacks.is_sound(|id| id == 4));
        slacks.leave(3);
        assert_eq!(slacks, DefaultSlacks::default());
    }
}
