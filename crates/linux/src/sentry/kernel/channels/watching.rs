//! Channels of open files that send signals (`O_ASYNC`): which of them have changed since the last
//! look at those files.
//!
//! Promises: each change of a watched channel, and its end, is noted. May break it: a change that
//! does not call [`WatchedChannels::touch`].

use std::collections::{BTreeMap, BTreeSet};

use super::Channels;

/// Watched channels, and those of them that have changed. No part of a snapshot: all files are
/// looked at after a thaw.
#[derive(Clone, Debug, Default, Eq)]
pub(super) struct WatchedChannels {
    /// Open files of each channel.
    files: BTreeMap<u64, BTreeSet<u64>>,
    touched: BTreeSet<u64>,
}

impl PartialEq for WatchedChannels {
    /// States are equal whatever is looked at next.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl WatchedChannels {
    /// A channel is about to change.
    pub(super) fn touch(&mut self, channel: u64) {
        if self.files.contains_key(&channel) {
            self.touched.insert(channel);
        }
    }
}

impl Channels {
    /// Notes changes of a channel of an open file from now on, until the next one.
    pub(in crate::sentry) fn watch(&mut self, channel: u64, file: u64) {
        if self.list.contains_key(&channel) {
            self.watched.files.entry(channel).or_default().insert(file);
        }
    }

    /// Whether a watched channel has changed.
    pub(in crate::sentry) fn is_touched(&self) -> bool {
        !self.watched.touched.is_empty()
    }

    /// The open files of watched channels that have changed, which are no more watched.
    pub(in crate::sentry) fn take_touched(&mut self) -> Vec<u64> {
        let WatchedChannels { files, touched } = &mut self.watched;
        let changed = std::mem::take(touched);
        changed.iter().filter_map(|channel| files.remove(channel)).flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sentry::kernel::channels::ChannelEnd;

    #[test]
    fn every_change_of_a_watched_channel_is_noted_once() {
        const FILE: u64 = 7;
        type Change = fn(&mut Channels, u64);
        let changes: [Change; 8] = [
            |channels, id| {
                let _ = channels.get_mut(id);
            },
            |channels, id| channels.join(id, true),
            |channels, id| drop(channels.leave(id, true)),
            |channels, id| drop([false, true].map(|writes| channels.leave(id, writes))),
            |channels, id| channels.hold_back(id, 1, 0),
            |channels, id| channels.set_capacity(id, 4096),
            |channels, id| {
                channels.get_mut(id).unwrap().end = ChannelEnd::Feeds;
                channels.let_go(id);
            },
            |channels, id| {
                channels.get_mut(id).unwrap().push(b"x");
                channels.hold_back(id, 1, 0);
                channels.watch(id, FILE);
                assert_eq!(channels.take_touched(), [FILE]);
                channels.watch(id, FILE);
                assert!(channels.release_late_corks(u64::MAX));
            },
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let mut channels = Channels::default();
            let [id, other] = [(); 2].map(|()| channels.add().unwrap());
            channels.watch(id, FILE);
            let _ = channels.get_mut(other);
            assert!(!channels.is_touched(), "{index}");
            change(&mut channels, id);
            assert!(channels.is_touched(), "{index}");
            assert_eq!(channels.take_touched(), [FILE], "{index}");
            assert!(!channels.is_touched() && channels.take_touched().is_empty());
        }
    }
}
