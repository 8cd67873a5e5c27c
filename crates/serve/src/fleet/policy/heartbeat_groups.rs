//! The part of a large fleet that a host hears: its own group, and another that changes.
//!
//! The first bits of an id are the place of the host. A group is all hosts whose places begin with
//! the same bits, and each host chooses by itself how many bits these are, so that it hears about
//! as many hosts in any fleet. Hosts need not agree on that: a heartbeat is sent to the place, and
//! reaches the listeners of each group around it.
//!
//! Promises: in a fleet of up to [`MAX_GROUP`] hosts each hears all. Each host is heard by the
//! others of its group, which watch its lease. The far group connects the groups: over time each
//! host places work on all others.

use super::SplitMix64;

/// Bits of a place.
const PLACE_BITS: u32 = 12;
/// Hosts of the own group from which it is halved.
pub const MAX_GROUP: usize = 64;
/// Hosts of the own group below which it is doubled: less than half of the maximum, so that neither
/// follows the other.
const MIN_GROUP: usize = 20;

/// Hosts whose places begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// The bits, below which all others are zero.
    bits: u32,
    /// How many of them count.
    depth: u32,
}

/// The place of a host.
fn place(host: &str) -> u32 {
    let digits = host.get(..3).unwrap_or_default();
    u32::from_str_radix(digits, 16).unwrap_or(0)
}

fn tokens(bits: u32, count: u32) -> String {
    let token = |at: u32| if bits >> (PLACE_BITS - 1 - at) & 1 == 1 { "1." } else { "0." };
    (0..count).map(token).collect()
}

/// The place of a host as the end of a subject.
#[must_use]
pub fn place_tokens(host: &str) -> String {
    let tokens = tokens(place(host), PLACE_BITS);
    tokens.trim_end_matches('.').to_owned()
}

impl Group {
    fn new(bits: u32, depth: u32) -> Self {
        let mask = (1 << PLACE_BITS) - (1 << (PLACE_BITS - depth));
        Self { bits: bits & mask, depth }
    }

    /// Whether a host is in it.
    #[must_use]
    pub fn contains(&self, host: &str) -> bool {
        Self::new(place(host), self.depth) == *self
    }

    /// The end of the subjects that its hosts send to, with a wildcard.
    #[must_use]
    pub fn wildcard(&self) -> String {
        tokens(self.bits, self.depth) + ">"
    }
}

/// The groups that a host hears.
#[derive(Clone, Debug)]
pub struct HeartbeatGroups {
    place: u32,
    own: Group,
    far: Group,
}

impl HeartbeatGroups {
    /// That of a host that joins a fleet of about `hosts` hosts.
    #[must_use]
    pub fn new(host: &str, hosts: usize, random: &mut SplitMix64) -> Self {
        let mut depth = 0;
        while depth < PLACE_BITS && hosts >> depth > MAX_GROUP {
            depth += 1;
        }
        let place = place(host);
        let own = Group::new(place, depth);
        let mut this = Self { place, own, far: own };
        this.change_far(random);
        this
    }

    /// The groups: one in a fleet in which each hears all.
    pub fn groups(&self) -> impl Iterator<Item = Group> {
        [self.own].into_iter().chain((self.far != self.own).then_some(self.far))
    }

    /// Whether the host hears a part of the fleet only.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.own.depth > 0
    }

    /// Whether a host is in the own group.
    #[must_use]
    pub fn has_near(&self, host: &str) -> bool {
        self.own.contains(host)
    }

    /// The size of the fleet, where `near` hosts of the own group are known.
    #[must_use]
    pub fn hosts(&self, near: usize) -> usize {
        near << self.own.depth
    }

    /// Hears more or fewer, where `near` hosts of the own group are known. Returns whether the
    /// groups changed.
    pub fn adjust(&mut self, near: usize, random: &mut SplitMix64) -> bool {
        let depth = match near {
            near if near > MAX_GROUP && self.own.depth < PLACE_BITS => self.own.depth + 1,
            near if near < MIN_GROUP && self.own.depth > 0 => self.own.depth - 1,
            _ => return false,
        };
        self.own = Group::new(self.place, depth);
        self.change_far(random);
        true
    }

    /// Chooses another far group.
    pub fn change_far(&mut self, random: &mut SplitMix64) {
        let bits = u32::try_from(random.below(1 << PLACE_BITS)).unwrap_or(0);
        self.far = Group::new(bits, self.own.depth);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> String {
        format!("{:012x}-1", SplitMix64::new(number as u64).next_word() >> 16)
    }

    #[test]
    fn each_hears_about_as_many_and_is_heard_by_its_group_in_any_fleet() {
        let mut random = SplitMix64::new(1);
        for count in [3, 60, 300, 10_000] {
            let names: Vec<String> = (0..count).map(name).collect();
            let all: Vec<HeartbeatGroups> =
                names.iter().map(|name| HeartbeatGroups::new(name, count, &mut random)).collect();
            for (name, one) in names.iter().zip(&all).step_by(count.div_ceil(50)) {
                let hears = |host: &String| one.groups().any(|group| group.contains(host));
                let heard = names.iter().filter(|host| hears(host)).count();
                let near = names.iter().filter(|host| one.has_near(host)).count();
                assert!(
                    heard <= 3 * MAX_GROUP && heard >= MAX_GROUP.min(count) / 4,
                    "{count}: {heard}"
                );
                assert!(one.has_near(name) && near >= 2);
                assert!(one.hosts(near) <= 2 * count && one.hosts(near) * 2 >= count);
                assert!(one.is_partial() || heard == count);
            }
        }
    }

    #[test]
    fn a_group_follows_the_size_of_the_fleet_and_comes_to_rest() {
        let mut random = SplitMix64::new(2);
        let own = name(7);
        let mut one = HeartbeatGroups::new(&own, 1, &mut random);
        for (count, partial) in [(64, false), (5_000, true), (100, true), (10, false)] {
            let names: Vec<String> = (0..count).map(name).collect();
            let near =
                |one: &HeartbeatGroups| names.iter().filter(|host| one.has_near(host)).count();
            let mut changes = 0;
            while one.adjust(near(&one), &mut random) {
                changes += 1;
                assert!(changes < 20, "{count}");
            }
            assert_eq!(one.is_partial(), partial, "{count}");
            assert!(near(&one) <= MAX_GROUP);
        }
    }

    #[test]
    fn a_wildcard_matches_the_places_of_its_hosts() {
        let host = "a5f000000000-1";
        assert_eq!(place_tokens(host), "1.0.1.0.0.1.0.1.1.1.1.1");
        let group = Group::new(place(host), 4);
        assert_eq!(group.wildcard(), "1.0.1.0.>");
        assert!(group.contains("a00") && group.contains(host) && !group.contains("b5f0"));
        assert_eq!(Group::new(place(host), 0).wildcard(), ">");
        // An id of another form is at some place.
        assert_eq!(place_tokens("é"), place_tokens(""));
    }
}
