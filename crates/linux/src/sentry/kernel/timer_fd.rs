//! Timers behind descriptors (`timerfd_create`).

use crate::sentry::kernel::time::MonotonicTime;
use serde::{Deserialize, Serialize};

/// A timer that is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TimerFd {
    pub(crate) at: Option<MonotonicTime>,
    pub(crate) every: u64,
    pub(crate) clock: u64,
}

impl TimerFd {
    /// The number of expirations since it was read.
    pub(crate) fn expired(&self, now: MonotonicTime) -> u64 {
        match self.at {
            Some(at) if at <= now && self.every > 0 => (now - at) / self.every + 1,
            Some(at) if at <= now => 1,
            _ => 0,
        }
    }

    pub(in crate::sentry) fn take(&mut self, now: MonotonicTime) -> u64 {
        let expired = self.expired(now);
        if expired > 0 {
            let next = |at: MonotonicTime| at.saturating_add(expired.saturating_mul(self.every));
            self.at = self.at.filter(|_| self.every > 0).map(next);
        }
        expired
    }

    pub(in crate::sentry) fn left(&self, now: MonotonicTime) -> u64 {
        self.at.map_or(0, |at| at.saturating_sub(now).max(1))
    }
}
