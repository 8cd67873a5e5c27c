//! A file in the tree: its kind, mode, times, and its contents by kind.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::attributes::Attributes;
use crate::content::Content;
use crate::map::Map;

/// Identifies a file of one tree and its relatives, independent of its names; programs see it as
/// the inode number.
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
    /// The inode number.
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
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name(pub(crate) Arc<[u8]>);

impl std::borrow::Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl From<&[u8]> for Name {
    fn from(name: &[u8]) -> Self {
        Self(name.into())
    }
}

/// The target of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) node: Node,
    pub(crate) kind: Kind,
    /// Whether it was paid for out of the budget: names of layers are not.
    pub(crate) paid: bool,
}

/// A file.
#[derive(Clone, Debug)]
pub(crate) struct Inode {
    pub(crate) body: Body,
    /// Permission bits.
    pub(crate) mode: u32,
    pub(crate) links: u32,
    pub(crate) times: Times,
    /// Whether it was paid for out of the budget.
    pub(crate) paid: bool,
    /// The name it has, and the directory that is in. Known if there was never a second one; the
    /// name of a removed file is not valid.
    pub(crate) name: Option<(Node, Name)>,
    pub(crate) attributes: Attributes,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    File(Content),
    Directory(Directory),
    Link(Arc<[u8]>),
    Device(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Directory {
    pub(crate) entries: Map<Name, Entry>,
    /// Where `..` leads.
    pub(crate) parent: Node,
}

impl Inode {
    pub(crate) fn new(body: Body, mode: u32, now: Time) -> Self {
        let links = if matches!(body, Body::Directory(_)) { 2 } else { 1 };
        let (mode, times) = (mode & 0o7777, Times::all(now));
        let attributes = Attributes::default();
        Self { body, mode, links, times, paid: true, name: None, attributes }
    }

    pub(crate) fn kind(&self) -> Kind {
        match &self.body {
            Body::File(_) => Kind::File,
            Body::Directory(_) => Kind::Directory,
            Body::Link(_) => Kind::Link,
            Body::Device(_) => Kind::Device,
        }
    }

    pub(crate) fn stat(&self, node: Node) -> Stat {
        let (size, stored, device) = match &self.body {
            Body::File(content) => (content.size, content.occupied(), 0),
            Body::Directory(_) => (4096, 0, 0),
            Body::Link(target) => (target.len() as u64, 0, 0),
            Body::Device(device) => (0, 0, *device),
        };
        Stat {
            node,
            kind: self.kind(),
            mode: self.mode,
            links: self.links,
            size,
            stored,
            device,
            times: self.times,
        }
    }

    /// Whether the two look the same to a reader.
    pub(crate) fn same(&self, other: &Self) -> bool {
        let body = match (&self.body, &other.body) {
            (Body::File(a), Body::File(b)) => a.same(b),
            (Body::Directory(a), Body::Directory(b)) => {
                a.parent == b.parent
                    && a.entries.differing(&b.entries, |x, y| x.node == y.node).is_empty()
            }
            (Body::Link(a), Body::Link(b)) => a == b,
            (Body::Device(a), Body::Device(b)) => a == b,
            _ => false,
        };
        body && self.mode == other.mode
            && self.links == other.links
            && self.times == other.times
            && self.attributes == other.attributes
    }
}
