//! Capacities of channels: that of a new one, and changes by the program.
//!
//! Promises: all channels together hold a limited number of bytes, which the sentry has in addition
//! to the memory limit.

use rustix::io::Errno;

use super::{CAPACITY, Channel, Channels, MAX_RESERVED, MAX_SOCKET_BYTES, PAGE};

/// Bytes beyond the usual that all may hold together.
pub(in crate::sentry) const MAX_EXTRA_BYTES: usize = 64 << 20;
/// Bytes that all may hold together, each up to the usual size (`pipe-user-pages-soft`). Later ones
/// are one page, as in Linux.
pub(in crate::sentry) const MAX_USUAL_BYTES: usize = 64 << 20;

impl Channel {
    fn larger(&self) -> usize {
        self.capacity.saturating_sub(CAPACITY)
    }
}

impl Channels {
    /// Bytes that channels may hold, up to the usual and beyond.
    fn reserved(&self) -> (usize, usize) {
        let list = self.list.values();
        list.fold((0, 0), |(usual, larger), channel| {
            (usual + channel.capacity.min(CAPACITY), larger + channel.larger())
        })
    }

    /// The capacity of a new channel.
    pub(super) fn first_capacity(&self) -> usize {
        if self.reserved().0 + CAPACITY > MAX_USUAL_BYTES { PAGE } else { CAPACITY }
    }

    /// Whether channels of a snapshot are as large as they may be.
    pub(super) fn is_affordable(&self) -> bool {
        self.reserved().1 <= MAX_EXTRA_BYTES
    }

    /// Whether a channel may become larger.
    fn may_grow(&self, channel: &Channel, capacity: usize) -> bool {
        let (usual, larger) = self.reserved();
        let usual = usual - channel.capacity.min(CAPACITY) + capacity.min(CAPACITY);
        let larger = larger - channel.larger() + capacity.saturating_sub(CAPACITY);
        let beyond = capacity > CAPACITY && larger > MAX_EXTRA_BYTES;
        !beyond && (usual <= MAX_USUAL_BYTES || channel.capacity >= CAPACITY)
    }

    /// Sets the capacity of a channel, rounded up.
    pub(in crate::sentry) fn resize(&mut self, id: u64, bytes: u64) -> Result<usize, Errno> {
        if bytes > i32::MAX as u64 {
            return Err(Errno::INVAL);
        }
        let capacity = (bytes as usize).max(PAGE).next_power_of_two();
        let channel = self.list.get(&id).ok_or(Errno::BADF)?;
        let grows = capacity > channel.capacity;
        if capacity > MAX_RESERVED || grows && !self.may_grow(channel, capacity) {
            return Err(Errno::PERM);
        }
        if channel.len() > capacity {
            return Err(Errno::BUSY);
        }
        self.set(id, capacity);
        Ok(capacity)
    }

    /// Sets the capacity of a channel between sockets, within the bounds of all. Its bytes stay.
    pub(in crate::sentry) fn set_capacity(&mut self, id: u64, bytes: usize) {
        let capacity = bytes.clamp(PAGE, MAX_SOCKET_BYTES);
        let Some(channel) = self.list.get(&id) else { return };
        if capacity <= channel.capacity || self.may_grow(channel, capacity) {
            self.set(id, capacity);
        }
    }

    fn set(&mut self, id: u64, capacity: usize) {
        if let Some(channel) = self.get_mut(id) {
            channel.capacity = capacity;
            channel.edges += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_channels_together_are_bounded() {
        let mut channels = Channels::default();
        let ids: Vec<u64> = std::iter::from_fn(|| channels.add()).collect();
        let usual = ids.iter().filter(|id| channels.list[id].capacity == CAPACITY).count();
        assert_eq!(usual, MAX_USUAL_BYTES / CAPACITY);
        // One of a page stays so, and one of the usual size may become larger.
        let (first, last) = (ids[0], ids[ids.len() - 1]);
        assert_eq!(channels.list[&last].capacity, PAGE);
        assert_eq!(channels.resize(last, CAPACITY as u64), Err(Errno::PERM));
        channels.set_capacity(last, CAPACITY);
        assert_eq!(channels.list[&last].capacity, PAGE);
        assert_eq!(channels.resize(first, 1 << 20), Ok(1 << 20));
        let larger = ids.iter().filter(|id| channels.resize(**id, 1 << 20).is_ok()).count();
        assert_eq!(larger, MAX_EXTRA_BYTES / ((1 << 20) - CAPACITY));
        assert_eq!(channels.resize(first, PAGE as u64), Ok(PAGE));
        assert!(channels.is_affordable());
    }
}
