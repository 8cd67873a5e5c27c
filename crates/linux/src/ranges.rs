//! Sets of address ranges: sorted, disjoint, joined where they touch.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of addresses, kept as ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// Start to end; no two overlap or touch.
    map: BTreeMap<u64, u64>,
}

impl Ranges {
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Whether `address` is in the set.
    pub(crate) fn holds(&self, address: u64) -> bool {
        self.map.range(..=address).next_back().is_some_and(|(_, end)| *end > address)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.map.iter().map(|(&start, &end)| start..end)
    }

    pub(crate) fn insert(&mut self, mut range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&start, &end)) = self.map.range(..=range.end).next_back() {
            if end < range.start {
                break;
            }
            self.map.remove(&start);
            range = range.start.min(start)..range.end.max(end);
        }
        self.map.insert(range.start, range.end);
    }

    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&start, &end)) = self.map.range(..range.end).next_back() {
            if end <= range.start {
                break;
            }
            self.map.remove(&start);
            if end > range.end {
                self.map.insert(range.end, end);
            }
            if start < range.start {
                self.map.insert(start, range.start);
            }
        }
    }

    /// The parts of `range` that are in the set.
    pub(crate) fn within(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts: Vec<_> = self
            .map
            .range(..range.end)
            .rev()
            .take_while(|(_, end)| **end > range.start)
            .map(|(&start, &end)| start.max(range.start)..end.min(range.end))
            .filter(|part| !part.is_empty())
            .collect();
        parts.reverse();
        parts
    }
}

/// Bytes of `parts` outside `mapped`.
pub(crate) fn bytes_beside(parts: Vec<Range<u64>>, mapped: &Ranges) -> u64 {
    let mut all = Ranges::default();
    parts.into_iter().for_each(|part| all.insert(part));
    parts_beside(&all, mapped).into_iter().map(|part| part.end - part.start).sum()
}

/// The parts of `ranges` outside `mapped`.
pub(crate) fn parts_beside(ranges: &Ranges, mapped: &Ranges) -> Vec<Range<u64>> {
    let mut left = ranges.clone();
    mapped.iter().for_each(|part| left.remove(part));
    left.iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random inserts and removals against a plain array of bits.
    #[test]
    fn ranges_are_the_set_that_was_put_in() {
        let mut random = 1u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let (mut set, mut bits) = (Ranges::default(), [false; 64]);
        for _ in 0..20_000 {
            let start = next(64);
            let range = start..start + next(65 - start);
            let add = next(2) == 0;
            if add {
                set.insert(range.clone());
            } else {
                set.remove(range.clone());
            }
            bits[range.start as usize..range.end as usize].fill(add);
            for (address, bit) in bits.iter().enumerate() {
                assert_eq!(set.holds(address as u64), *bit);
            }
            let ends: Vec<_> = set.iter().collect();
            assert!(ends.windows(2).all(|pair| pair[0].end < pair[1].start), "{ends:?}");
            let part = next(64)..64;
            let inside: u64 = set.within(part.clone()).iter().map(|r| r.end - r.start).sum();
            assert_eq!(inside, (part.start..64).filter(|a| bits[*a as usize]).count() as u64);
        }
    }
}
