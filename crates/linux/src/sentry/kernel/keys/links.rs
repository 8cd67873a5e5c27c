//! Links of keyrings, and searches through them.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;

use super::{Key, KeyContents, KeyKind, Keys, LINK_BYTES};

/// Maximum keyrings within each other.
pub(in crate::sentry) const MAX_DEPTH: usize = 6;

impl Keys {
    /// Links a key. The link of another key with its type and description ends.
    pub(in crate::sentry) fn link(&mut self, keyring: i32, id: i32) -> Result<(), Errno> {
        let key = self.get(id).ok_or(Errno::NOKEY)?;
        let (kind, description) = (key.kind, key.description.clone());
        let ring = self.get(keyring).ok_or(Errno::NOKEY)?;
        let links = ring.links()?;
        if links.contains(&id) {
            return Ok(());
        }
        if kind == KeyKind::Keyring {
            self.check_nesting(keyring, id)?;
        }
        let same = |other: &Key| other.kind == kind && other.description == description;
        let displaced = links.iter().position(|link| self.get(*link).is_some_and(same));
        if displaced.is_none() {
            self.afford(ring.user, 0, LINK_BYTES, LINK_BYTES)?;
        }
        if let Some(Key { contents: KeyContents::Links(links), .. }) = self.get_mut(keyring) {
            match displaced {
                Some(at) => links[at] = id,
                None => links.push(id),
            }
        }
        self.drop_unused();
        Ok(())
    }

    /// Refuses the link of keyring `id` in `keyring` if that is within it, or it is too deep.
    fn check_nesting(&self, keyring: i32, id: i32) -> Result<(), Errno> {
        if self.reach(vec![id]).contains(&keyring) {
            return Err(Errno::DEADLK);
        }
        if self.depth(id, MAX_DEPTH + 1) > MAX_DEPTH { Err(Errno::LOOP) } else { Ok(()) }
    }

    /// These keys, and all that they link through others.
    pub(super) fn reach(&self, mut left: Vec<i32>) -> BTreeSet<i32> {
        let mut reached = BTreeSet::new();
        while let Some(id) = left.pop() {
            if reached.insert(id)
                && let Some(Key { contents: KeyContents::Links(links), .. }) = self.get(id)
            {
                left.extend(links);
            }
        }
        reached
    }

    /// Levels of keyrings from one on, at most `limit`.
    fn depth(&self, keyring: i32, limit: usize) -> usize {
        let mut level = BTreeSet::from([keyring]);
        let mut depth = 0;
        while !level.is_empty() && depth < limit {
            depth += 1;
            let links = level.iter().filter_map(|id| self.get(*id)?.links().ok()).flatten();
            let is_ring = |id: &&i32| self.get(**id).is_some_and(|k| k.kind == KeyKind::Keyring);
            level = links.filter(is_ring).copied().collect();
        }
        depth
    }

    /// Whether no keyring links itself through others.
    pub(super) fn are_acyclic(&self) -> bool {
        // Keys whose links are all taken away are taken away, until none is left.
        let mut above: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        let (mut counts, mut ends) = (BTreeMap::new(), Vec::new());
        for (id, key) in self.iter() {
            let links = key.links().unwrap_or_default();
            links.iter().for_each(|link| above.entry(*link).or_default().push(id));
            counts.insert(id, links.len());
            if links.is_empty() {
                ends.push(id);
            }
        }
        let mut taken = 0;
        while let Some(id) = ends.pop() {
            taken += 1;
            for ring in above.remove(&id).unwrap_or_default() {
                let Some(count) = counts.get_mut(&ring) else { continue };
                *count -= 1;
                if *count == 0 {
                    ends.push(ring);
                }
            }
        }
        taken == counts.len()
    }

    /// Ends a link.
    pub(in crate::sentry) fn unlink(&mut self, keyring: i32, id: i32) -> Result<(), Errno> {
        let ring = self.get_mut(keyring).ok_or(Errno::NOKEY)?;
        let KeyContents::Links(links) = &mut ring.contents else { return Err(Errno::NOTDIR) };
        let at = links.iter().position(|link| *link == id).ok_or(Errno::NOENT)?;
        links.remove(at);
        self.drop_unused();
        Ok(())
    }

    /// A key is invalid from now on: nothing links it any more.
    pub(in crate::sentry) fn invalidate(&mut self, id: i32) {
        for key in self.list.values_mut() {
            if let KeyContents::Links(links) = &mut key.contents {
                links.retain(|link| *link != id);
            }
        }
        if let Some(key) = self.list.get_mut(&id) {
            key.invalid = true;
        }
        self.drop_unused();
    }

    /// Ends all links of a keyring.
    pub(in crate::sentry) fn clear(&mut self, keyring: i32) -> Result<(), Errno> {
        let ring = self.get_mut(keyring).ok_or(Errno::NOKEY)?;
        let KeyContents::Links(links) = &mut ring.contents else { return Err(Errno::NOTDIR) };
        links.clear();
        self.drop_unused();
        Ok(())
    }

    /// A key that a keyring links itself, with this type and description, and that may be updated.
    pub(in crate::sentry) fn linked(
        &self,
        keyring: i32,
        kind: KeyKind,
        description: &[u8],
    ) -> Result<Option<i32>, Errno> {
        let links = self.get(keyring).ok_or(Errno::NOKEY)?.links()?;
        let same = |key: &Key| {
            key.kind == kind && key.description == description && !key.revoked && !key.invalid
        };
        Ok(links.iter().copied().find(|id| self.get(*id).is_some_and(same)))
    }

    /// The keys within a keyring that `meant` means, nearest first, through keyrings that
    /// `enters` lets it search. Each keyring is searched once.
    pub(in crate::sentry) fn find_all(
        &self,
        keyring: i32,
        meant: impl Fn(i32, &Key) -> bool,
        enters: impl Fn(&Key) -> bool,
    ) -> Vec<i32> {
        let (mut found, mut seen) = (Vec::new(), BTreeSet::from([keyring]));
        let mut level = vec![keyring];
        for _ in 0..MAX_DEPTH {
            let mut next = Vec::new();
            for id in level {
                let Some(Key { contents: KeyContents::Links(links), .. }) = self.get(id) else {
                    continue;
                };
                for link in links {
                    let Some(key) = self.get(*link) else { continue };
                    if meant(*link, key) {
                        found.push(*link);
                    }
                    if key.kind == KeyKind::Keyring && enters(key) && seen.insert(*link) {
                        next.push(*link);
                    }
                }
            }
            level = next;
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn cycles_are_found_in_a_time_that_grows_with_the_links() {
        const RINGS: usize = 150;
        let mut keys = Keys::default();
        let rings: Vec<i32> = (0..RINGS)
            .map(|n| keys.add_keyring(format!("{n}").as_bytes(), [0, 0], 0).unwrap())
            .collect();
        // As in a hostile state, each links the last one many times, and then the next.
        let link = |keys: &mut Keys, ring: i32, links: Vec<i32>| {
            keys.list.get_mut(&ring).unwrap().contents = KeyContents::Links(links);
        };
        for pair in rings.windows(2) {
            let mut links = vec![rings[RINGS - 1]; 5000];
            links.push(pair[1]);
            link(&mut keys, pair[0], links);
        }
        let begun = Instant::now();
        assert!(keys.are_acyclic());
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        link(&mut keys, rings[RINGS - 1], vec![rings[RINGS / 2]]);
        assert!(!keys.are_acyclic());
        link(&mut keys, rings[RINGS - 1], vec![rings[RINGS - 1]]);
        assert!(!keys.are_acyclic());
    }
}
