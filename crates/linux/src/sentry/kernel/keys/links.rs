//! Links of keyrings, and searches through them.

use std::collections::BTreeSet;

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
        if self.is_within(id, keyring) {
            return Err(Errno::DEADLK);
        }
        if self.depth(id, MAX_DEPTH + 1) > MAX_DEPTH { Err(Errno::LOOP) } else { Ok(()) }
    }

    /// Whether `other` is a keyring or one that it links, through others.
    fn is_within(&self, keyring: i32, other: i32) -> bool {
        let (mut left, mut seen) = (vec![keyring], BTreeSet::new());
        while let Some(id) = left.pop() {
            if id == other {
                return true;
            }
            if seen.insert(id)
                && let Some(Key { contents: KeyContents::Links(links), .. }) = self.get(id)
            {
                left.extend(links);
            }
        }
        false
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
        let links = |key: &Key| match &key.contents {
            KeyContents::Links(links) => links.clone(),
            _ => Vec::new(),
        };
        let mut left: Vec<(i32, Vec<i32>)> =
            self.iter().map(|(id, key)| (id, links(key))).collect();
        // Keys whose links all end are taken away, until none is left.
        loop {
            let open: BTreeSet<i32> = left.iter().map(|(id, _)| *id).collect();
            let before = left.len();
            left.retain(|(_, links)| links.iter().any(|link| open.contains(link)));
            if left.is_empty() || left.len() == before {
                return left.is_empty();
            }
        }
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
