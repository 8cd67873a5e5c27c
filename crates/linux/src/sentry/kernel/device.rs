//! Devices that every guest has, as a descriptor has them.

use serde::{Deserialize, Serialize};

/// A character device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    Null,
    Zero,
    /// Zeros to read, and no room to write.
    Full,
    Random,
    /// Output for the host alone, apart from the program's standard output.
    Host,
    Generation(GenerationWatch),
}

/// The last generation that a descriptor read, and the process that it signals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GenerationWatch {
    /// The generation that was read last, or was there when the device was opened.
    pub(super) seen: u64,
    /// The process that is signalled, or the group if it is negative (`F_SETOWN`).
    pub(in crate::sentry) owner: i32,
    /// The signal (`F_SETSIG`); 0 is `SIGIO` without a descriptor.
    pub(in crate::sentry) signal: u8,
}

impl GenerationWatch {
    /// The device before it is opened.
    pub(in crate::sentry) const UNOPENED: Self = Self { seen: 0, owner: 0, signal: 0 };

    /// Whether a guest could have made it.
    pub(in crate::sentry) fn is_sound(&self) -> bool {
        self.signal <= 64 && self.owner != i32::MIN
    }

    /// Whether the generation is another one than was seen.
    pub(in crate::sentry) fn differs(&self, generation: u64) -> bool {
        self.seen != generation
    }
}
