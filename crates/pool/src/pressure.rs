//! Memory pressure: the share of time for which tasks wait for memory, and the memory that is left.
//!
//! A group at its limit, without swap, is killed after a few milliseconds of waiting. So the time
//! alone comes too late there, and the memory that is left counts as well.
//!
//! Promises: a look reads some small files. A share of time is that since the look before, so it
//! falls as soon as the pressure does. Where the kernel reports neither, there is no pressure. May
//! break it: memory that grows from [`NEAR_PART`] to the end within [`LOOK_INTERVAL`].

use std::time::{Duration, Instant};

use afresh_sys::host::{self, MemoryRoom};

/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two looks while memory is nearly scarce.
const NEAR_INTERVAL: Duration = Duration::from_millis(100);
/// Memory is scarce when less than this part of it is left.
const SCARCE_PART: u64 = 16;
/// Memory is nearly scarce when less than this part of it is left.
const NEAR_PART: u64 = 4;

/// Looks at the memory pressure.
pub(crate) struct PressureGauge {
    /// When the last look at the stalls was, and how long tasks had waited until then.
    stalls: Option<(Instant, Duration)>,
    room: Option<MemoryRoom>,
}

impl PressureGauge {
    pub(crate) fn new() -> Self {
        Self { stalls: stalls(), room: host::memory_room() }
    }

    /// Time until the next look.
    pub(crate) fn interval(&self) -> Duration {
        let near = self.room.is_some_and(|room| room.left < room.total / NEAR_PART);
        if near { NEAR_INTERVAL } else { LOOK_INTERVAL }
    }

    /// Looks. Returns whether some task waited for memory in at least `limit` percent of the time,
    /// or memory is scarce.
    pub(crate) fn is_high(&mut self, limit: u32) -> bool {
        let room = std::mem::replace(&mut self.room, host::memory_room());
        let scarce = self.room.is_some_and(|now| is_scarce(room, now));
        self.percent().is_some_and(|percent| percent >= limit) || scarce
    }

    /// The percentage of the time since it was returned last; `None` before [`LOOK_INTERVAL`] has
    /// passed, and where it is not known.
    fn percent(&mut self) -> Option<u32> {
        let Some((since, before)) = self.stalls else {
            self.stalls = stalls();
            return None;
        };
        if since.elapsed() < LOOK_INTERVAL {
            return None;
        }
        self.stalls = stalls();
        let (at, stalled) = self.stalls?;
        share(at.duration_since(since), stalled.saturating_sub(before))
    }
}

fn stalls() -> Option<(Instant, Duration)> {
    host::memory_stalls().map(|stalls| (Instant::now(), stalls))
}

fn share(time: Duration, stalled: Duration) -> Option<u32> {
    let percent = (stalled.as_micros() * 100).checked_div(time.as_micros())?;
    // The two are not read at the same moment.
    Some(u32::try_from(percent.min(100)).unwrap_or(100))
}

/// Whether less than a part of the memory is left, or would be after two more intervals like the
/// last.
fn is_scarce(before: Option<MemoryRoom>, now: MemoryRoom) -> bool {
    let used = before.filter(|before| before.total == now.total);
    let used = used.map_or(0, |before| before.left.saturating_sub(now.left));
    now.left.saturating_sub(used.saturating_mul(2)) < now.total / SCARCE_PART
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_that_of_the_time_between_two_looks() {
        let millis = Duration::from_millis;
        assert_eq!(share(millis(1000), millis(0)), Some(0));
        assert_eq!(share(millis(1000), millis(255)), Some(25));
        assert_eq!(share(millis(1000), millis(1001)), Some(100));
        assert_eq!(share(millis(0), millis(1)), None);
        assert_eq!(share(Duration::MAX, Duration::MAX), Some(100));
    }

    #[test]
    fn memory_is_scarce_when_little_is_left_or_soon_will_be() {
        let room = |left| MemoryRoom { left, total: 1600 };
        assert!(is_scarce(None, room(99)));
        assert!(!is_scarce(None, room(100)));
        assert!(!is_scarce(Some(room(500)), room(400)));
        assert!(is_scarce(Some(room(600)), room(400)));
        // Memory that was released is not growth.
        assert!(!is_scarce(Some(room(100)), room(400)));
        // Another group is the tightest now.
        assert!(!is_scarce(Some(MemoryRoom { left: 900, total: 9000 }), room(400)));
    }
}
