//! Placement of new work: on a host that holds the guest or template, and of two such on the one
//! with less load.
//!
//! Promises: a host that is ending or full is not chosen while there is another; hosts whose
//! adverts are a moment old are not all flooded by the same choice, as each choice looks at two at
//! random (the power of two choices), and work sent since an advert counts. The choosing host
//! prefers itself where the difference is small, because that saves a hop.

use super::{Members, SplitMix64};

/// Thousandths that a host may have more to do than another, and still be chosen because it is
/// where the request is.
const MAX_LOCAL_EXCESS: u32 = 100;
/// Thousandths from which a host is full.
const FULL_LOAD: u32 = 1000;
/// Thousandths from which another host had better begin to hold a thing, too.
const SPREAD_LOAD: u32 = 800;
/// Thousandths that each thing sent since the last advert counts.
const SENT_LOAD: u32 = 2;
/// Pairs that are looked at before all are.
const MAX_SAMPLED_PAIRS: usize = 4;

/// A choice among the hosts that are known.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// The known hosts.
    pub members: &'a Members,
    /// The host that chooses, if it may choose itself.
    pub own: Option<&'a str>,
}

impl<'a> Placement<'a> {
    /// The known load of a host; `None` if it takes nothing new.
    fn load(&self, host: &str) -> Option<u32> {
        let member = self.members.get(host)?;
        let load = member.advert.load.saturating_add(member.sent.saturating_mul(SENT_LOAD));
        (!member.advert.draining && load < FULL_LOAD).then_some(load)
    }

    /// One of `hosts`, which are in order, with a load below `most`.
    fn of<'h>(&self, hosts: &'h [String], most: u32, random: &mut SplitMix64) -> Option<&'h str> {
        if hosts.is_empty() {
            return None;
        }
        let mut least: Option<(u32, &'h str)> = None;
        for _ in 0..MAX_SAMPLED_PAIRS {
            for _ in 0..2 {
                let host = hosts[random.below(hosts.len())].as_str();
                if let Some(load) = self.load(host).filter(|load| *load < most)
                    && least.is_none_or(|(other, _)| load < other)
                {
                    least = Some((load, host));
                }
            }
            if least.is_some() {
                break;
            }
        }
        if least.is_none() {
            let all = hosts.iter().filter_map(|host| Some((self.load(host)?, host.as_str())));
            least = all.filter(|(load, _)| *load < most).min();
        }
        let (load, host) = least?;
        let here =
            self.own.and_then(|own| hosts.binary_search_by(|host| host.as_str().cmp(own)).ok());
        match here.and_then(|at| Some((self.load(&hosts[at])?, hosts[at].as_str()))) {
            Some((ours, here)) if ours <= load + MAX_LOCAL_EXCESS => Some(here),
            _ => Some(host),
        }
    }

    /// A host for work that needs `held`: one with room that holds it, else any with room, else any
    /// that holds it.
    #[must_use]
    pub fn host(&self, held: &str, random: &mut SplitMix64) -> Option<&'a str> {
        if let Some(spare) = self.of(self.members.holders(held), SPREAD_LOAD, random) {
            return Some(spare);
        }
        self.of(self.members.hosts(), SPREAD_LOAD, random).or_else(|| self.any(random))
    }

    /// Any host that takes something.
    #[must_use]
    pub fn any(&self, random: &mut SplitMix64) -> Option<&'a str> {
        self.of(self.members.hosts(), FULL_LOAD, random)
    }

    /// A host that holds `held`.
    #[must_use]
    pub fn holder(&self, held: &str, random: &mut SplitMix64) -> Option<&'a str> {
        self.of(self.members.holders(held), FULL_LOAD, random)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::{MonotonicTime, NodeStatus};
    use super::*;

    fn member(members: &mut Members, host: &str, load: u32, held: &[&str], draining: bool) {
        let held = held.iter().map(|held| (*held).to_owned()).collect();
        let advert =
            NodeStatus { host: host.to_owned(), load, held, draining, ..NodeStatus::default() };
        members.receive(advert, MonotonicTime::MAX);
    }

    #[test]
    fn holders_come_first_then_those_with_less_to_do() {
        let mut random = SplitMix64::new(3);
        let mut members = Members::default();
        member(&mut members, "idle", 0, &[], false);
        member(&mut members, "holds", 700, &["x"], false);
        member(&mut members, "ending", 0, &["x"], true);
        member(&mut members, "full", 1000, &["x"], false);
        for _ in 0..100 {
            let choice = Placement { members: &members, own: None };
            assert_eq!(choice.host("x", &mut random), Some("holds"));
            assert!(choice.host("y", &mut random).is_some());
            let choice = Placement { members: &members, own: Some("idle") };
            assert_eq!(choice.host("x", &mut random), Some("holds"));
            assert_eq!(choice.host("y", &mut random), Some("idle"));
            assert_eq!(choice.holder("z", &mut random), None);
        }
        for load in [850, 1000] {
            member(&mut members, "holds", load, &["x"], false);
            let choice = Placement { members: &members, own: None };
            // No holder has room.
            assert_eq!(choice.host("x", &mut random), Some("idle"));
            assert_eq!(choice.holder("x", &mut random), (load < 1000).then_some("holds"));
        }
        assert_eq!(
            Placement { members: &Members::default(), own: None }.host("x", &mut random),
            None
        );
    }

    #[test]
    fn the_asking_host_is_chosen_only_while_its_load_is_comparable() {
        let mut random = SplitMix64::new(4);
        let mut members = Members::default();
        member(&mut members, "own", 150, &["x"], false);
        member(&mut members, "other", 100, &["x"], false);
        let choice = Placement { members: &members, own: Some("own") };
        assert_eq!(choice.host("x", &mut random), Some("own"));
        member(&mut members, "own", 350, &["x"], false);
        let choice = Placement { members: &members, own: Some("own") };
        let others = (0..100).filter(|_| choice.host("x", &mut random) == Some("other")).count();
        assert!(others >= 50, "{others}");
    }

    /// A thousand requests for ten hosts between two heartbeats: no host gets much more than its
    /// share.
    #[test]
    fn old_adverts_flood_no_host() {
        let mut random = SplitMix64::new(5);
        let mut members = Members::default();
        for host in 0..10 {
            member(&mut members, &format!("h{host}"), 10 * host, &["x"], false);
        }
        let mut got: HashMap<String, u32> = HashMap::new();
        for _ in 0..1000 {
            let choice = Placement { members: &members, own: None };
            let host = choice.host("x", &mut random).unwrap().to_owned();
            members.note_sent(&host);
            *got.entry(host).or_default() += 1;
        }
        assert!(got.values().all(|count| (40..=180).contains(count)), "{got:?}");
    }
}
