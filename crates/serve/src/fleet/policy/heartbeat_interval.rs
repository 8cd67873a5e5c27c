//! The interval of heartbeats.
//!
//! Promises: for any number of hosts, each receives at most about its budget of adverts a second;
//! hosts that were started together do not send together.

use std::time::Duration;

use super::Seed;

/// The interval of adverts.
#[derive(Clone, Copy, Debug)]
pub struct HeartbeatInterval {
    /// Time between two adverts of one host in a small fleet.
    pub least: Duration,
    /// Maximum adverts that each host receives in a second.
    pub heard: u32,
}

impl Default for HeartbeatInterval {
    fn default() -> Self {
        Self { least: Duration::from_secs(1), heard: 500 }
    }
}

impl HeartbeatInterval {
    /// The usual time between two adverts of a host in a fleet of `hosts` hosts.
    #[must_use]
    pub fn usual(&self, hosts: usize) -> Duration {
        let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
        self.least.max(Duration::from_secs(1).saturating_mul(hosts) / self.heard.max(1))
    }

    /// The time until the next: the usual one, a quarter more or less.
    #[must_use]
    pub fn next(&self, hosts: usize, random: &mut Seed) -> Duration {
        let usual = self.usual(hosts);
        usual * 3 / 4 + usual / 1000 * u32::try_from(random.below(500)).unwrap_or(0)
    }

    /// How long an advert counts without a successor.
    #[must_use]
    pub fn expiry(&self, hosts: usize) -> Duration {
        self.usual(hosts) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeat_traffic_of_a_host_is_bounded_for_any_number_of_hosts() {
        let pace = HeartbeatInterval::default();
        let mut random = Seed::new(1);
        for hosts in [1, 3, 100, 500, 10_000, 1_000_000] {
            let all: Duration = (0..1000).map(|_| pace.next(hosts, &mut random)).sum();
            let mean = all.as_secs_f64() / 1000.0;
            assert!(hosts as f64 / mean <= 510.0, "{hosts} hosts, every {mean} s");
            assert!((mean / pace.usual(hosts).as_secs_f64() - 1.0).abs() < 0.05, "{mean}");
        }
        assert_eq!(pace.usual(3), Duration::from_secs(1));
    }
}
