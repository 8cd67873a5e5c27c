//! A file in the tree: its attributes, and its contents by kind.

use std::sync::Arc;

use crate::nodes::attributes::Attributes;
use crate::nodes::content::Content;
use crate::nodes::map::Map;
use crate::nodes::name::Name;
use crate::nodes::node::{Kind, Node, Stat, Time, Times};

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
    /// User and group, where they are recorded.
    pub(crate) owner: Option<[u32; 2]>,
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
        Self { body, mode, links, times, paid: true, name: None, attributes, owner: None }
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
            owner: self.owner,
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
            && self.owner == other.owner
    }
}
