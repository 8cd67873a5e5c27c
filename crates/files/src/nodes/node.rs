//! The number of a file, and its attributes.

use serde::{Deserialize, Serialize};

/// Identifies a file of one tree and its relatives, independent of its names. Programs see
/// [`crate::Tree::inode_number`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
pub struct Node(pub u64);

/// A point in time: seconds since 1970, and nanoseconds.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Time {
    /// Whole seconds.
    pub seconds: i64,
    /// Nanoseconds beyond, below a billion.
    pub nanos: u32,
}

impl Time {
    /// The host's clock.
    #[must_use]
    pub fn now() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let since = since.unwrap_or_default();
        Self { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
    }

    /// A time in nanoseconds after 1970.
    #[must_use]
    pub fn from_nanos(nanos: u64) -> Self {
        Self { seconds: (nanos / 1_000_000_000) as i64, nanos: (nanos % 1_000_000_000) as u32 }
    }

    /// Nanoseconds since 1970; 0 for an earlier time, and the largest number for one too far ahead.
    #[must_use]
    pub fn nanos(&self) -> u64 {
        let seconds = u64::try_from(self.seconds).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(u64::from(self.nanos))
    }
}

/// The times of a file. Reading changes none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// As it was set last.
    pub accessed: Time,
    /// When its content changed.
    pub modified: Time,
    /// When anything about it changed.
    pub changed: Time,
}

impl Times {
    /// All three the same.
    #[must_use]
    pub fn all(now: Time) -> Self {
        Self { accessed: now, modified: now, changed: now }
    }
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// Bytes.
    File,
    /// Names of other files.
    Directory,
    /// A symbolic link.
    Link,
    /// A character device. The tree keeps its number; the code that runs the guest implements it.
    Device,
}

impl Kind {
    /// The bits of a mode for this kind.
    #[must_use]
    pub fn mode(self) -> u32 {
        match self {
            Self::File => 0o100_000,
            Self::Directory => 0o040_000,
            Self::Link => 0o120_000,
            Self::Device => 0o020_000,
        }
    }
}

/// What `stat` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The file.
    pub node: Node,
    /// What it is.
    pub kind: Kind,
    /// Permission bits, without those of the kind.
    pub mode: u32,
    /// Names it has; of a directory, two and one for each below.
    pub links: u32,
    /// Bytes of content; of a link, of its target.
    pub size: u64,
    /// Bytes that are stored for it: holes are not.
    pub stored: u64,
    /// The number of a device.
    pub device: u64,
    /// Its times.
    pub times: Times,
    /// User and group, if [recorded](crate::Tree::set_owner). Other files belong to the guest's
    /// user.
    pub owner: Option<[u32; 2]>,
}
