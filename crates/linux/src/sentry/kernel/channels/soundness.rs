//! Whether channels of a snapshot are ones that a guest can have.

use std::collections::BTreeMap;

use super::{
    CHANNELS, Channel, Channels, LETTERS, MAX_COUNTER, MAX_MESSAGES, MAX_SOCKET_BYTES, PAGE,
};

impl Channel {
    /// Whether a guest could have sent its contents.
    pub(super) fn is_sound(&self) -> bool {
        let (len, mut at) = (self.data.len() as u64, 0);
        let end = self.taken.checked_add(len);
        let parcels = self.parcels.iter().all(|parcel| {
            let fits = at <= parcel.from && parcel.from < parcel.until && Some(parcel.until) <= end;
            // Of a message that was read in part only the sender is left.
            let whole = parcel.from >= self.taken || parcel.id.is_none();
            let sent = parcel.id.is_some() || parcel.sender.is_some();
            at = parcel.until;
            fits && whole && sent && parcel.until > self.taken
        });
        let parcels = parcels && self.parcels.len() <= MAX_MESSAGES;
        let sum = self.letters.iter().try_fold(0usize, |sum, letter| sum.checked_add(letter.len));
        let letters =
            self.letters.is_empty() || sum == Some(self.data.len()) && self.parcels.is_empty();
        let short = self.letters.iter().all(|letter| letter.from.is_short());
        let counts = self.taken < MAX_COUNTER && self.edges < MAX_COUNTER;
        let sized = (PAGE..=MAX_SOCKET_BYTES).contains(&self.capacity);
        sized && parcels && letters && short && counts && self.letters.len() <= LETTERS
    }
}

impl Channels {
    /// The first error of channels from a snapshot, if any: `ends` are all ends that descriptions
    /// have.
    pub(crate) fn check(&self, ends: &[(u64, bool)]) -> Result<(), &'static str> {
        let mut counts: BTreeMap<u64, (u32, u32)> = BTreeMap::new();
        for &(id, writes) in ends {
            let count = counts.entry(id).or_default();
            if writes { count.1 += 1 } else { count.0 += 1 }
        }
        let known = counts.keys().all(|id| self.list.contains_key(id));
        let sound = self.list.iter().all(|(id, channel)| {
            let (readers, writers) = counts.get(id).copied().unwrap_or_default();
            // One of its ends may be the caller's, or the host's.
            let fits = channel.writers == writers + u32::from(channel.end.writes())
                && channel.readers == readers + u32::from(channel.end.reads());
            *id < self.next && fits && channel.is_sound()
        });
        if known
            && sound
            && self.next < MAX_COUNTER
            && self.list.len() <= CHANNELS
            && self.is_affordable()
        {
            Ok(())
        } else {
            Err("its pipes and connections do not fit together")
        }
    }
}
