//! The interval of heartbeats.
//!
//! Promises: for any number of hosts, the heartbeats that all of them receive together stay within
//! a budget of bytes a second; hosts that were started together do not send together.

use std::time::Duration;

use super::SplitMix64;

/// The interval of heartbeats.
#[derive(Clone, Copy, Debug)]
pub struct HeartbeatInterval {
    /// Time between two heartbeats of one host in a small fleet.
    pub least: Duration,
    /// Maximum bytes of heartbeats that NATS delivers in a second, to all hosts together.
    pub bytes: u64,
}

/// The cost of a heartbeat.
#[derive(Clone, Copy, Debug)]
pub struct HeartbeatCost {
    /// Hosts of the fleet.
    pub hosts: usize,
    /// Hosts that receive each heartbeat.
    pub heard_by: usize,
    /// Bytes of a heartbeat, with its subject.
    pub bytes: usize,
}

impl Default for HeartbeatInterval {
    fn default() -> Self {
        Self { least: Duration::from_secs(1), bytes: 10_000_000 }
    }
}

impl HeartbeatInterval {
    /// The usual time between two heartbeats of a host.
    #[must_use]
    pub fn usual(&self, cost: HeartbeatCost) -> Duration {
        let delivered = (cost.hosts as u64).saturating_mul(cost.heard_by as u64);
        let bytes = delivered.saturating_mul(cost.bytes as u64);
        let milliseconds = bytes.saturating_mul(1000) / self.bytes.max(1);
        self.least.max(Duration::from_millis(milliseconds))
    }

    /// The time until the next: the usual one, a quarter more or less.
    #[must_use]
    pub fn next(&self, cost: HeartbeatCost, random: &mut SplitMix64) -> Duration {
        let usual = self.usual(cost);
        usual * 3 / 4 + usual / 1000 * u32::try_from(random.below(500)).unwrap_or(0)
    }
}

/// Time for which a heartbeat counts without a successor.
#[must_use]
pub fn expiry(interval: Duration) -> Duration {
    interval * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deliveries_to_all_hosts_stay_within_the_budget() {
        let pace = HeartbeatInterval::default();
        let mut random = SplitMix64::new(1);
        for hosts in [1, 3, 100, 500, 10_000, 1_000_000] {
            let cost = HeartbeatCost { hosts, heard_by: hosts.min(130), bytes: 400 };
            let all: Duration = (0..1000).map(|_| pace.next(cost, &mut random)).sum();
            let mean = all.as_secs_f64() / 1000.0;
            let delivered = (hosts * cost.heard_by * cost.bytes) as f64 / mean;
            assert!(delivered <= 1.03 * pace.bytes as f64, "{hosts} hosts, every {mean} s");
            assert!((mean / pace.usual(cost).as_secs_f64() - 1.0).abs() < 0.05, "{mean}");
        }
        let small = HeartbeatCost { hosts: 3, heard_by: 3, bytes: 400 };
        assert_eq!(pace.usual(small), Duration::from_secs(1));
    }
}
