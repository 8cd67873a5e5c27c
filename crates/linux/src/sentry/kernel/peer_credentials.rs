//! The process at the other side of a connection or message, with the user that it had.
//!
//! Promises: the numbers are those of the moment when it connected, listened or sent, whatever
//! becomes of the process. Frozen ones are checked before use.

use serde::{Deserialize, Serialize};

/// The PID of a process, and the user and group that it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerCredentials {
    /// 0 without a process of the guest.
    pub(crate) process: u32,
    /// The user and group, unless they are the guest's. [`PeerUsers`] stores them.
    #[serde(skip)]
    pub(crate) user: Option<[u32; 2]>,
}

/// Users of peers, by their places among all peers of a state.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::sentry) struct PeerUsers(Vec<(u64, [u32; 2])>);

impl PeerUsers {
    pub(in crate::sentry) fn of<'a>(peers: impl Iterator<Item = &'a mut PeerCredentials>) -> Self {
        let users = (0..).zip(peers).filter_map(|(place, peer)| Some((place, peer.user?)));
        Self(users.collect())
    }

    /// Whether a guest of user `owner` can have these.
    pub(in crate::sentry) fn is_sound(&self, owner: u32) -> bool {
        let mut numbers = self.0.iter().flat_map(|(_, user)| user);
        (owner == 0 || self.0.is_empty()) && numbers.all(|number| *number != u32::MAX)
    }

    /// Gives the users to the peers that they are of. `None` if a guest could not have them: one of
    /// user `owner` has others if that is 0.
    pub(in crate::sentry) fn give<'a>(
        self,
        owner: u32,
        peers: impl Iterator<Item = &'a mut PeerCredentials>,
    ) -> Option<()> {
        if !self.is_sound(owner) {
            return None;
        }
        let mut left = self.0.into_iter().peekable();
        for (place, peer) in (0..).zip(peers) {
            peer.user = left.next_if(|(of, _)| *of == place).map(|(_, user)| user);
        }
        left.next().is_none().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_of_peers_are_kept_and_those_of_none_are_refused() {
        let user = Some([33, 44]);
        let mut peers =
            [None, user, None, Some([0, 5])].map(|user| PeerCredentials { process: 2, user });
        let known = peers;
        let kept = || PeerUsers::of(known.clone().iter_mut()).0;
        peers.iter_mut().for_each(|peer| peer.user = None);
        assert_eq!(PeerUsers(kept()).give(0, peers.iter_mut()), Some(()));
        assert_eq!(peers, known);
        for odd in [vec![(4, [1, 1])], vec![(1, [1, u32::MAX])], vec![(1, [1; 2]), (0, [1; 2])]] {
            assert_eq!(PeerUsers(odd.clone()).give(0, peers.iter_mut()), None, "{odd:?}");
        }
        assert_eq!(PeerUsers(kept()).give(1000, peers.iter_mut()), None);
        assert_eq!(PeerUsers::default().give(1000, peers.iter_mut()), Some(()));
    }
}
