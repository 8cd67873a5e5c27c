//! The use of a tenant on one host of a fleet, or on several.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The use of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantUse {
    /// The window of CPU time, sent and outbound bytes: the time since 1970 in lengths of a window.
    pub window: u64,
    /// Bytes of memory of live sandboxes.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory: u64,
    /// Open connections to programs in sandboxes.
    #[serde(skip_serializing_if = "is_zero")]
    pub connections: u64,
    /// Milliseconds of CPU time in the window.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu: u64,
    /// Bytes of answers in the window.
    #[serde(skip_serializing_if = "is_zero")]
    pub sent: u64,
    /// Bytes to servers outside in the window.
    #[serde(skip_serializing_if = "is_zero")]
    pub outbound: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(feature = "fleet")]
impl TenantUse {
    /// Adds memory and connections of another host.
    pub(crate) fn add_held(&mut self, other: &Self) {
        self.memory = self.memory.saturating_add(other.memory);
        self.connections = self.connections.saturating_add(other.connections);
    }

    /// Adds the use of another host in the window.
    pub(crate) fn add_window(&mut self, other: &Self) {
        self.cpu = self.cpu.saturating_add(other.cpu);
        self.sent = self.sent.saturating_add(other.sent);
        self.outbound = self.outbound.saturating_add(other.outbound);
    }

    /// Whether the tenant uses nothing.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self { window: self.window, ..Self::default() }
    }
}

/// The number of the window of this length at `now`, and the seconds until its end. Windows of one
/// length begin at the same moments on all hosts.
pub(crate) fn window_at(now: SystemTime, length: Duration) -> (u64, u64) {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let length = length.as_millis().max(1);
    let whole = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
    (whole(since / length), whole((length - since % length) / 1000).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_all_hosts_begin_at_the_same_moments() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let hour = Duration::from_secs(3600);
        assert_eq!(window_at(at(7200), hour), (2, 3601));
        assert_eq!(window_at(at(10_799), hour), (2, 2));
        assert_eq!(window_at(at(10_800), hour).0, 3);
        assert_eq!(window_at(at(1), Duration::ZERO), (1000, 1));
    }
}
