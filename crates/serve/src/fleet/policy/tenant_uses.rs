//! The use of tenants on other hosts, as their heartbeats report it.
//!
//! A heartbeat has the uses of at most [`MAX_REPORTED_TENANTS`] tenants, those of one range of
//! keys. The ranges follow each other, so a heartbeat that is lost is repaired by a later one of
//! the same range.
//!
//! Promises: a use of another window is not added. Memory and connections of a silent host count
//! until its heartbeat has expired, and its use in a window until the window ends. Memory here is
//! bounded, whatever other hosts send. May break it: clocks of hosts that differ, for windows are
//! those of the wall clock.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::{MonotonicTime, is_life};
pub use crate::sandbox::records::store::TenantUse;

/// Maximum tenants in one heartbeat.
pub const MAX_REPORTED_TENANTS: usize = 64;
/// Maximum tenants of one host that are remembered.
const MAX_TENANTS: usize = 10_000;
/// Maximum hosts that are remembered.
const MAX_HOSTS: usize = 1_000;

/// Digits of the key of a tenant.
const KEY_DIGITS: usize = 16;

/// Whether this is the key of a tenant, and no text of a stranger of any length.
fn is_key(key: &str) -> bool {
    key.len() == KEY_DIGITS && key.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The uses of the tenants of a host whose keys are in a range.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantUses {
    /// The range begins after this key, or with the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// It ends with this key, or with the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub up_to: Option<String>,
    /// By keys of tenants. A tenant of the range that is missing uses nothing.
    pub uses: BTreeMap<String, TenantUse>,
}

impl TenantUses {
    fn contains(&self, key: &str) -> bool {
        self.after.as_deref().is_none_or(|after| after < key)
            && self.up_to.as_deref().is_none_or(|up_to| key <= up_to)
    }
}

/// The uses that a host reports, one range after the other.
#[derive(Clone, Debug, Default)]
pub struct UseReports {
    /// The end of the last range.
    last: Option<String>,
    /// Something was reported, so that its end has to be reported too.
    reported: bool,
}

impl UseReports {
    /// The report of the next heartbeat; `None` from a host that has nothing to report.
    pub fn next(&mut self, all: &BTreeMap<String, TenantUse>) -> Option<TenantUses> {
        if all.is_empty() && !self.reported {
            return None;
        }
        self.reported = true;
        let after = self.last.take();
        let mut rest = all.iter().filter(|(key, _)| after.as_ref().is_none_or(|last| *key > last));
        let chosen = rest.by_ref().take(MAX_REPORTED_TENANTS);
        let uses: BTreeMap<_, _> = chosen.map(|(key, one)| (key.clone(), *one)).collect();
        if rest.next().is_some() {
            self.last = uses.keys().next_back().cloned();
        }
        Some(TenantUses { after, up_to: self.last.clone(), uses })
    }
}

#[derive(Clone, Debug, Default)]
struct HostUses {
    uses: BTreeMap<String, TenantUse>,
    expires: MonotonicTime,
}

/// The uses of tenants on other hosts.
#[derive(Clone, Debug, Default)]
pub struct KnownUses(HashMap<String, HostUses>);

impl KnownUses {
    /// A host reports uses, which count until `expires`. `host` is the same in all of its lives.
    pub fn receive(&mut self, host: &str, report: TenantUses, expires: MonotonicTime) {
        if !is_life(host) {
            return;
        }
        if !self.0.contains_key(host) && self.0.len() >= MAX_HOSTS {
            let oldest = self.0.iter().min_by_key(|(_, known)| known.expires);
            let Some(oldest) = oldest.map(|(host, _)| host.clone()) else { return };
            self.0.remove(&oldest);
        }
        let known = self.0.entry(host.to_owned()).or_default();
        known.expires = expires;
        known.uses.retain(|key, _| !report.contains(key));
        let room = MAX_TENANTS.saturating_sub(known.uses.len()).min(MAX_REPORTED_TENANTS);
        let in_range = |key: &String| is_key(key) && report.contains(key);
        let uses = report.uses.iter().filter(|(key, _)| in_range(key)).take(room);
        known.uses.extend(uses.map(|(key, one)| (key.clone(), *one)));
    }

    /// The use of a tenant on all other hosts at `now`, in this window.
    #[must_use]
    pub fn elsewhere(&self, key: &str, window: u64, now: MonotonicTime) -> TenantUse {
        let mut sum = TenantUse { window, ..TenantUse::default() };
        for host in self.0.values() {
            let Some(known) = host.uses.get(key) else { continue };
            if host.expires > now {
                sum.add_held(known);
            }
            if known.window == window {
                sum.add_window(known);
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn used(window: u64, amount: u64) -> TenantUse {
        TenantUse { window, memory: amount, connections: 1, cpu: amount, sent: 1, outbound: 2 }
    }

    fn uses(list: &[(&str, TenantUse)]) -> BTreeMap<String, TenantUse> {
        list.iter().map(|(text, one)| (key(text), *one)).collect()
    }

    fn key(text: &str) -> String {
        format!("{text:0>16}")
    }

    #[test]
    fn uses_of_hosts_add_up_within_a_window_and_end_with_it() {
        let at = Duration::from_secs;
        let (mut known, mut one, mut two) =
            (KnownUses::default(), UseReports::default(), UseReports::default());
        assert_eq!(one.next(&uses(&[])), None);
        known.receive(
            "one",
            one.next(&uses(&[("a", used(7, 10)), ("b", used(7, 1))])).unwrap(),
            at(4),
        );
        known.receive("two", two.next(&uses(&[("a", used(7, 5))])).unwrap(), at(10));
        let sum =
            TenantUse { window: 7, memory: 15, connections: 2, cpu: 15, sent: 2, outbound: 4 };
        assert_eq!(known.elsewhere(&key("a"), 7, at(1)), sum);
        assert_eq!(
            known.elsewhere(&key("c"), 7, at(1)),
            TenantUse { window: 7, ..TenantUse::default() }
        );
        // A host that is silent has no memory here, and has used what it used.
        let later = known.elsewhere(&key("a"), 7, at(5));
        assert_eq!((later.memory, later.connections, later.cpu), (5, 1, 15));
        // The next window begins with nothing.
        let next = known.elsewhere(&key("a"), 8, at(1));
        assert_eq!((next.memory, next.cpu, next.sent, next.outbound), (15, 0, 0, 0));
        // The last use of a tenant ended.
        known.receive("two", two.next(&uses(&[])).unwrap(), at(20));
        assert_eq!(known.elsewhere(&key("a"), 7, at(12)).memory, 0);
        assert_eq!(known.elsewhere(&key("a"), 7, at(1)).cpu, 10);
    }

    #[test]
    fn many_tenants_are_reported_in_turn_and_a_lost_report_is_repaired() {
        let mut all: BTreeMap<String, TenantUse> =
            (0..150).map(|number| (format!("{number:016}"), used(1, number))).collect();
        let (mut reports, mut known) = (UseReports::default(), KnownUses::default());
        let sum = |known: &KnownUses| {
            let cpu =
                |number: u64| known.elsewhere(&format!("{number:016}"), 1, Duration::ZERO).cpu;
            (0..150).map(cpu).sum::<u64>()
        };
        for turn in 0..6 {
            let report = reports.next(&all).unwrap();
            assert!(report.uses.len() <= MAX_REPORTED_TENANTS);
            let sent = serde_json::to_vec(&report).unwrap();
            assert_eq!(serde_json::from_slice::<TenantUses>(&sent).unwrap(), report);
            // The second report is lost.
            if turn != 1 {
                known.receive("one", report, Duration::MAX);
            }
        }
        assert_eq!(sum(&known), (0..150).sum::<u64>());
        all.retain(|name, _| *name < key("010") || *name > key("140"));
        for _ in 0..2 {
            known.receive("one", reports.next(&all).unwrap(), Duration::MAX);
        }
        assert_eq!(sum(&known), (0..10).chain(141..150).sum::<u64>());
    }

    #[test]
    fn reports_of_strangers_take_bounded_memory() {
        let mut known = KnownUses::default();
        for host in 0..MAX_HOSTS + 5 {
            let report = TenantUses { uses: uses(&[("a", used(1, 1))]), ..TenantUses::default() };
            known.receive(&host.to_string(), report, Duration::from_secs(host as u64));
        }
        assert_eq!(known.0.len(), MAX_HOSTS);
        for host in ["a".repeat(1 << 20), String::new(), "a b".to_owned()] {
            let report = TenantUses { uses: uses(&[("a", used(1, 1))]), ..TenantUses::default() };
            known.receive(&host, report, Duration::MAX);
            assert!(!known.0.contains_key(&host));
        }
        let many = (0..20_000).map(|number| (format!("{number:016}"), used(1, u64::MAX))).collect();
        known.receive("a", TenantUses { uses: many, ..TenantUses::default() }, Duration::MAX);
        assert_eq!(known.0["a"].uses.len(), MAX_REPORTED_TENANTS);
        assert_eq!(known.elsewhere(&key("0"), 1, Duration::ZERO).cpu, u64::MAX);
        // No key of a tenant, or out of the range.
        let odd = ["a".repeat(1 << 20), "g".repeat(16), String::new(), key("1"), key("5")];
        let (after, up_to) = (Some(key("1")), Some(key("4")));
        let odd = odd.into_iter().chain([key("3")]).map(|name| (name, used(1, 1))).collect();
        known.receive("b", TenantUses { after, up_to, uses: odd }, Duration::MAX);
        assert!(known.0["b"].uses.keys().eq([&key("3")]));
    }
}
