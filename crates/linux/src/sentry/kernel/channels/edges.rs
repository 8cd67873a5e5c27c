//! Numbers that differ whenever an end of a pipe has a new event, for edge-triggered waits.

use super::{Channel, MAX_RESERVED};

impl Channel {
    /// A number that differs whenever a reader of a pipe has a new event: bytes, or the end.
    pub(crate) fn read_edges(&self) -> u64 {
        self.passed() << 1 | u64::from(self.writers == 0)
    }

    /// Bytes that were read from it so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.taken
    }

    /// A number that differs whenever a writer of a pipe has a new event: room, or no reader.
    pub(crate) fn write_edges(&self) -> u64 {
        let room = (self.capacity as u64) << (u64::BITS - MAX_RESERVED.ilog2() - 1);
        (self.taken << 1 | u64::from(self.readers == 0)).wrapping_add(room)
    }
}
