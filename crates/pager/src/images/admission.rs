//! The choice of snapshots that a server reads.
//!
//! Promises: a memory is read at its second request, so one that a single process opens takes no
//! memory here. A read that failed is not repeated for [`FAILURE_INTERVAL`], and so is reported at
//! most once in that time. Both lists have a fixed maximum.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::message::{ImageRequest, RefusalReason};

/// Time for which a failed read is not repeated.
const FAILURE_INTERVAL: Duration = Duration::from_secs(10);
/// Requests, and failures, that are remembered.
const MAX_ENTRIES: usize = 1024;

/// A request, and the device and inode of the directory that came with it: another store can have
/// the snapshot undamaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) request: ImageRequest,
    pub(super) directory: (u64, u64),
}

/// A decision about a memory that a server does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// It is read now.
    Read,
    /// It is read at the next request.
    Wait,
    /// A read failed a short time ago.
    Refuse(RefusalReason),
}

/// Requests and failures.
#[derive(Default)]
pub(super) struct Admission {
    requested: VecDeque<[u8; 32]>,
    failed: VecDeque<(Source, RefusalReason, Instant)>,
}

impl Admission {
    /// Decides about a request that comes at `now`.
    pub(super) fn decide(&mut self, source: &Source, now: Instant) -> Decision {
        self.failed.retain(|(_, _, at)| now.saturating_duration_since(*at) < FAILURE_INTERVAL);
        if let Some((_, reason, _)) = self.failed.iter().find(|(failed, ..)| failed == source) {
            return Decision::Refuse(*reason);
        }
        if self.requested.contains(&source.request.memory) {
            return Decision::Read;
        }
        if self.requested.len() == MAX_ENTRIES {
            self.requested.pop_front();
        }
        self.requested.push_back(source.request.memory);
        Decision::Wait
    }

    /// Notes a failure.
    pub(super) fn fail(&mut self, source: Source, reason: RefusalReason, now: Instant) {
        if self.failed.len() == MAX_ENTRIES {
            self.failed.pop_front();
        }
        self.failed.push_back((source, reason, now));
    }
}

#[cfg(test)]
mod tests {
    use afresh_store::Sha256;

    use super::*;

    fn source(number: usize) -> Source {
        let mut memory = [0; 32];
        memory[..8].copy_from_slice(&number.to_le_bytes());
        let request = ImageRequest { memory, snapshot: Sha256([0; 32]) };
        Source { request, directory: (1, 2) }
    }

    #[test]
    fn a_memory_is_read_at_its_second_request() {
        let (mut admission, now) = (Admission::default(), Instant::now());
        assert_eq!(admission.decide(&source(1), now), Decision::Wait);
        assert_eq!(admission.decide(&source(2), now), Decision::Wait);
        assert_eq!(admission.decide(&source(1), now), Decision::Read);
        // The oldest requests make room.
        for number in 3..MAX_ENTRIES + 3 {
            assert_eq!(admission.decide(&source(number), now), Decision::Wait);
        }
        assert_eq!(admission.requested.len(), MAX_ENTRIES);
        assert_eq!(admission.decide(&source(1), now), Decision::Wait);
    }

    #[test]
    fn a_failure_is_repeated_after_an_interval_only() {
        let (mut admission, now) = (Admission::default(), Instant::now());
        let (one, other) = (source(1), Source { directory: (1, 3), ..source(1) });
        admission.decide(&one, now);
        admission.fail(one, RefusalReason::Failed, now);
        let soon = now + FAILURE_INTERVAL / 2;
        assert_eq!(admission.decide(&one, soon), Decision::Refuse(RefusalReason::Failed));
        assert_eq!(admission.decide(&other, soon), Decision::Read, "another store");
        assert_eq!(admission.decide(&one, now + FAILURE_INTERVAL), Decision::Read);
        for number in 0..2 * MAX_ENTRIES {
            admission.fail(source(number), RefusalReason::Budget, now);
        }
        assert_eq!(admission.failed.len(), MAX_ENTRIES);
    }
}
