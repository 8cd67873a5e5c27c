//! Budgets of tenants and of the whole server, as the configuration sets them.
//!
//! Promises: a tenant's own value precedes the value for each tenant. A limit that is not set does
//! not bind.

use std::collections::BTreeMap;
use std::time::Duration;

/// Length of a window if the configuration sets none.
const DEFAULT_WINDOW: Duration = Duration::from_secs(60 * 60);

/// Limits of one tenant, or of all tenants together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum sandboxes, paused ones included.
    pub sandboxes: Option<usize>,
    /// Maximum bytes of memory of live sandboxes, checked when one is made, forked or resumed.
    pub memory: Option<u64>,
    /// Maximum bytes of saved sandboxes and snapshots.
    pub stored: Option<u64>,
    /// Maximum connections to programs in sandboxes at the same time.
    pub connections: Option<usize>,
    /// Maximum calls that run at the same time.
    pub running_calls: Option<usize>,
    /// Maximum CPU time of sandboxes in a window.
    pub cpu_time: Option<Duration>,
    /// Maximum bytes of answers in a window.
    pub sent: Option<u64>,
    /// Maximum bytes that programs send to servers outside in a window.
    pub outbound: Option<u64>,
    /// The share of a tenant in calls, saves and pulls while others wait.
    pub weight: Option<u32>,
}

impl Limits {
    /// Whether it has a limit for all hosts of a fleet that each host checks by the reports of the
    /// others.
    #[cfg(feature = "fleet")]
    pub(crate) fn has_shared(&self) -> bool {
        self.memory.is_some()
            || self.connections.is_some()
            || self.cpu_time.is_some()
            || self.sent.is_some()
            || self.outbound.is_some()
    }

    /// These limits, and `others` where they are not set.
    fn or(&self, others: &Self) -> Self {
        Self {
            sandboxes: self.sandboxes.or(others.sandboxes),
            memory: self.memory.or(others.memory),
            stored: self.stored.or(others.stored),
            connections: self.connections.or(others.connections),
            running_calls: self.running_calls.or(others.running_calls),
            cpu_time: self.cpu_time.or(others.cpu_time),
            sent: self.sent.or(others.sent),
            outbound: self.outbound.or(others.outbound),
            weight: self.weight.or(others.weight),
        }
    }
}

/// Budgets of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Budgets {
    /// Length of the windows of CPU time, sent bytes and outbound bytes.
    pub window: Duration,
    /// Limits of all tenants together. The weight has no meaning here.
    pub server: Limits,
    /// Limits of each tenant.
    pub tenant: Limits,
    /// Limits of single tenants, by name.
    pub tenants: BTreeMap<String, Limits>,
}

impl Default for Budgets {
    fn default() -> Self {
        Self {
            window: DEFAULT_WINDOW,
            server: Limits::default(),
            tenant: Limits::default(),
            tenants: BTreeMap::new(),
        }
    }
}

impl Budgets {
    /// The limits of a tenant.
    pub(crate) fn of(&self, tenant: &str) -> Limits {
        match self.tenants.get(tenant) {
            Some(own) => own.or(&self.tenant),
            None => self.tenant.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_own_limit_precedes_the_limit_of_each_tenant() {
        let tenant = Limits { memory: Some(1), weight: Some(2), ..Limits::default() };
        let mut budgets = Budgets { tenant, ..Budgets::default() };
        let own = Limits { memory: Some(5), ..Limits::default() };
        budgets.tenants.insert("acme".to_owned(), own);
        assert_eq!((budgets.of("acme").memory, budgets.of("acme").weight), (Some(5), Some(2)));
        assert_eq!(budgets.of("other").memory, Some(1));
        assert_eq!(budgets.of("other").stored, None);
    }
}
