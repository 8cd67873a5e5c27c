//! Sets of held things that a large fleet knows although each host hears a part of it: a host
//! announces its set to all unless enough others have announced the same one lately.
//!
//! Promises: each set is announced about [`MIN_HEARD`] times in an interval, however many hosts
//! have it, while one of them is up.

use std::collections::HashMap;

/// Announcements of a set in an interval after which further hosts keep silent.
const MIN_HEARD: u32 = 2;
/// Sets that are counted.
const MAX_SETS: usize = 10_000;

/// The announcements that were heard since the last turn of this host.
#[derive(Clone, Debug, Default)]
pub struct Announcements {
    heard: HashMap<String, u32>,
}

impl Announcements {
    /// Another host announced a set.
    pub fn receive(&mut self, set: &str) {
        if let Some(count) = self.heard.get_mut(set) {
            *count = count.saturating_add(1);
        } else if self.heard.len() < MAX_SETS {
            self.heard.insert(set.to_owned(), 1);
        }
    }

    /// Whether this host announces its set, in its turn of an interval.
    pub fn is_due(&mut self, own: &str) -> bool {
        let heard = self.heard.get(own).copied().unwrap_or_default();
        self.heard.clear();
        heard < MIN_HEARD
    }
}

#[cfg(test)]
mod tests {
    use super::super::SplitMix64;
    use super::*;

    #[test]
    fn a_set_is_announced_as_often_by_a_thousand_hosts_as_by_three() {
        let mut random = SplitMix64::new(3);
        for (hosts, rare) in [(3_usize, 0), (1000, 1)] {
            let mut all = vec![Announcements::default(); hosts];
            let mut turns: Vec<(u64, usize)> = Vec::new();
            // Twenty intervals of 30 s, in which each host has one turn.
            for host in 0..hosts {
                let mut at = random.below(30_000) as u64;
                while at < 600_000 {
                    turns.push((at, host));
                    at += 15_000 + random.below(30_000) as u64;
                }
            }
            turns.sort_unstable();
            let mut counts = HashMap::new();
            for (_, host) in turns {
                let set = if host < rare { "rare" } else { "usual" };
                if all[host].is_due(set) {
                    *counts.entry(set).or_insert(0) += 1;
                    all.iter_mut()
                        .enumerate()
                        .filter(|(other, _)| *other != host)
                        .for_each(|(_, other)| other.receive(set));
                }
            }
            assert!((20..=120).contains(&counts["usual"]), "{hosts}: {counts:?}");
            assert!(rare == 0 || counts["rare"] >= 15, "{counts:?}");
        }
    }
}
