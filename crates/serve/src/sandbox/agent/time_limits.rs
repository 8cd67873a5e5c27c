//! The time limits of the commands of one sandbox.
//!
//! Promises: a limit ends no command but its own. It stays until its command has ended, also where
//! the sandbox may not run when it is over.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// The limits of commands, by the numbers of these.
#[derive(Default)]
pub(crate) struct TimeLimits(BTreeMap<u32, TimeLimit>);

/// The limit of one command.
struct TimeLimit {
    begun: std::time::Instant,
    ends: Instant,
    /// The subscribers have the reason, and the command has still to be ended.
    is_over: bool,
}

impl TimeLimits {
    /// Limits a command that begins now.
    pub(crate) fn set(&mut self, number: u32, limit: Duration) {
        if let Some(ends) = Instant::now().checked_add(limit) {
            let begun = std::time::Instant::now();
            self.0.insert(number, TimeLimit { begun, ends, is_over: false });
        }
    }

    pub(crate) fn remove(&mut self, number: u32) {
        self.0.remove(&number);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The next moment at which a command has to be ended. One that could not be ended is tried
    /// again at `retry`.
    pub(crate) fn next(&self, retry: Option<Instant>) -> Option<Instant> {
        let moments = self.0.values().map(|limit| match limit.is_over {
            true => retry.unwrap_or_else(Instant::now),
            false => limit.ends,
        });
        moments.min()
    }

    /// The commands whose time is over.
    pub(crate) fn overdue(&mut self) -> Vec<u32> {
        let now = Instant::now();
        let over = self.0.iter_mut().filter(|(_, limit)| limit.ends <= now);
        let over = over.map(|(number, limit)| {
            limit.is_over = true;
            *number
        });
        over.collect()
    }

    /// Drops the limits of commands that began after `since`, or of all: the sandbox was taken back
    /// to a state before them, and others may get their numbers.
    pub(crate) fn drop_since(&mut self, since: Option<std::time::Instant>) {
        self.0.retain(|_, limit| since.is_some_and(|since| limit.begun < since));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(3600);

    #[test]
    fn a_rollback_drops_the_limits_of_commands_that_began_after_it() {
        let mut limits = TimeLimits::default();
        limits.set(7, Duration::ZERO);
        std::thread::sleep(Duration::from_millis(2));
        let mark = std::time::Instant::now();
        limits.set(8, Duration::ZERO);
        limits.drop_since(Some(mark));
        assert_eq!(limits.overdue(), [7]);
        limits.drop_since(None);
        assert!(limits.overdue().is_empty());
    }

    #[test]
    fn a_limit_that_is_over_stays_until_its_command_has_ended() {
        let mut limits = TimeLimits::default();
        limits.set(7, Duration::ZERO);
        limits.set(8, TEST_TIMEOUT);
        let retry = Instant::now() + TEST_TIMEOUT / 2;
        for _ in 0..2 {
            assert_eq!(limits.overdue(), [7]);
            assert_eq!(limits.next(Some(retry)), Some(retry));
        }
        limits.remove(7);
        assert!(limits.next(None).is_some_and(|at| at > retry));
    }
}
