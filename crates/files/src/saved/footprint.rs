//! Memory that a saved tree takes once it is decoded.
//!
//! A description is walked before it is decoded. The walk allocates nothing, adds up the memory of
//! every item, and charges the sum to a budget.
//!
//! Promises: a description from a stranger that would take more than [`MAX_DECODED`] is refused
//! before it is decoded, and so is one when it is written. May break it: a form that changes in
//! `wire` or `stored_layers` and not here; the walk then fails on every description.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use afresh_budget::{Budget, Charge};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::layers::archive::StoredFile;
use crate::nodes::attributes::Attributes;
use crate::nodes::inode::{Entry, Inode};
use crate::nodes::name::Name;
use crate::nodes::node::{Kind, Node, Times};
use crate::saved::description::{
    FORM_WITH_ATTRIBUTES, FORM_WITH_NUMBERS, FORM_WITH_OWNERS, SavedEntry, SavedNode, SavedSource,
    TreeError, damaged,
};

/// Maximum bytes that a description may take when it is decoded: half a million files.
pub(crate) const MAX_DECODED: usize = 512 << 20;
/// Bytes that are allowed in addition for each file that a tree's budget allows.
const FILE: u64 = 1 << 10;
/// Bytes that the allocator adds to a block, and the counters of an `Arc`.
const BLOCK: usize = 32;

/// Bytes of a growing vector or a half-full map per item.
const fn twice<T>() -> u64 {
    2 * size_of::<T>() as u64
}

/// Bytes that an item takes when it is decoded.
trait MemoryCost {
    fn cost(&self) -> u64;
}

/// The costs of the items of a sequence. The items are not kept.
struct SequenceCost<T>(u64, PhantomData<T>);

impl<'de, T: Deserialize<'de> + MemoryCost> Deserialize<'de> for SequenceCost<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CostVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + MemoryCost> Visitor<'de> for CostVisitor<T> {
            type Value = u64;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<u64, A::Error> {
                let mut sum: u64 = 0;
                while let Some(item) = items.next_element::<T>()? {
                    sum = sum.saturating_add(item.cost());
                }
                Ok(sum)
            }
        }
        Ok(Self(deserializer.deserialize_seq(CostVisitor::<T>(PhantomData))?, PhantomData))
    }
}

/// Fields of `wire::SavedDescription`.
#[derive(Deserialize)]
#[expect(dead_code, reason = "fields without owned memory are skipped")]
struct TreeShape<'a>(
    u32,
    (u64, u64),
    u64,
    #[serde(borrow)] SequenceCost<&'a [u8]>,
    #[serde(borrow)] SequenceCost<(u64, &'a [u8])>,
    #[serde(borrow)] SequenceCost<(u64, NodeShape<'a>)>,
    SequenceCost<u64>,
    SequenceCost<(u64, u32)>,
    u64,
);

/// Fields of `stored_layers::SavedLayer`.
#[derive(Deserialize)]
#[expect(dead_code, reason = "fields without owned memory are skipped")]
struct LayersShape<'a>(
    u32,
    u64,
    #[serde(borrow)] SequenceCost<(&'a [u8], SequenceCost<u64>)>,
    #[serde(borrow)] SequenceCost<(u64, NodeShape<'a>)>,
);

/// Fields of `wire::SavedNode`.
#[derive(Deserialize)]
#[expect(dead_code, reason = "fields without owned memory are skipped")]
struct NodeShape<'a>(u32, Times, bool, #[serde(borrow)] BodyShape<'a>);

/// Variants of `wire::SavedBody`.
#[derive(Deserialize)]
#[expect(dead_code, reason = "fields without owned memory are skipped")]
enum BodyShape<'a> {
    File(u64, SequenceCost<(u64, u32)>, Option<(SavedSource, u64)>),
    Directory(u64, #[serde(borrow)] SequenceCost<EntryShape<'a>>),
    Link(&'a [u8]),
    Device(u64),
}

/// `wire::SavedEntry`.
type EntryShape<'a> = (&'a [u8], Option<(u64, Kind, bool)>);

impl MemoryCost for u64 {
    fn cost(&self) -> u64 {
        twice::<Self>() + size_of::<StoredFile>() as u64
    }
}

impl MemoryCost for (u64, u32) {
    fn cost(&self) -> u64 {
        twice::<Self>() + twice::<(u64, Arc<Vec<u8>>)>()
    }
}

impl MemoryCost for (u64, u64) {
    fn cost(&self) -> u64 {
        // A host directory remembers the owner of the number.
        twice::<Self>() + 128
    }
}

impl MemoryCost for (u64, [u32; 2]) {
    fn cost(&self) -> u64 {
        twice::<Self>() + twice::<(Node, [u32; 2])>()
    }
}

impl MemoryCost for &[u8] {
    fn cost(&self) -> u64 {
        twice::<String>() + (self.len() + BLOCK) as u64
    }
}

impl MemoryCost for (u64, &[u8]) {
    fn cost(&self) -> u64 {
        // A host directory remembers the path, name by name.
        twice::<(u64, Vec<u8>)>() + 256 + 2 * (self.1.len() + BLOCK) as u64
    }
}

impl MemoryCost for (&[u8], &[u8]) {
    fn cost(&self) -> u64 {
        let copied = |bytes: &[u8]| 2 * (bytes.len() + BLOCK) as u64;
        let decoded = twice::<(Vec<u8>, Vec<u8>)>() + twice::<(Arc<[u8]>, Arc<[u8]>)>();
        decoded + copied(self.0) + copied(self.1)
    }
}

/// The extended attributes of a file.
type AttributesShape<'a> = (u64, SequenceCost<(&'a [u8], &'a [u8])>);

impl MemoryCost for AttributesShape<'_> {
    fn cost(&self) -> u64 {
        let file = twice::<(u64, Vec<(Vec<u8>, Vec<u8>)>)>() + twice::<(Node, Attributes)>();
        // The map of the attributes has at least one node.
        self.1.0.saturating_add(file + 512)
    }
}

impl MemoryCost for (&[u8], SequenceCost<u64>) {
    fn cost(&self) -> u64 {
        self.1.0.saturating_add(1024 + 3 * self.0.len() as u64)
    }
}

impl MemoryCost for EntryShape<'_> {
    fn cost(&self) -> u64 {
        let name = 2 * (self.0.len() + BLOCK) as u64;
        twice::<SavedEntry>() + twice::<(Name, Entry)>() + name
    }
}

impl MemoryCost for (u64, NodeShape<'_>) {
    fn cost(&self) -> u64 {
        // Decoded, in the tree, and in the tables of the check.
        let decoded = twice::<(u64, SavedNode)>();
        let inode = twice::<(Node, Arc<Inode>)>() + (size_of::<Inode>() + BLOCK) as u64;
        let checked = twice::<(Node, (u32, Option<(Node, Name)>))>() + 3 * twice::<Node>();
        let body = match &self.1.3 {
            BodyShape::File(_, pages, _) => pages.0,
            BodyShape::Directory(_, entries) => entries.0,
            BodyShape::Link(target) => 2 * (target.len() + BLOCK) as u64,
            BodyShape::Device(_) => 0,
        };
        body.saturating_add(decoded + inode + checked)
    }
}

/// Charges the memory of the `description` of a tree, under a budget of `files` files.
pub(crate) fn charge_tree(description: &[u8], files: u64) -> Result<Charge, TreeError> {
    let (shape, rest) = walk::<TreeShape<'_>>(description)?;
    let (attributes, rest) = match shape.0 {
        FORM_WITH_ATTRIBUTES | FORM_WITH_NUMBERS | FORM_WITH_OWNERS => {
            let (attributes, rest) = walk::<SequenceCost<AttributesShape<'_>>>(rest)?;
            (attributes.0, rest)
        }
        _ => (0, rest),
    };
    let numbers = match shape.0 {
        FORM_WITH_NUMBERS => walk::<SequenceCost<(u64, u64)>>(rest)?.0.0,
        FORM_WITH_OWNERS => {
            type Numbers = Option<SequenceCost<(u64, u64)>>;
            let (numbers, owners) = walk::<(Numbers, SequenceCost<(u64, [u32; 2])>)>(rest)?.0;
            numbers.map_or(0, |numbers| numbers.0).saturating_add(owners.0)
        }
        _ => 0,
    };
    let costs = [shape.3.0, shape.4.0, shape.5.0, shape.6.0, shape.7.0, attributes, numbers];
    charge(&costs, files.saturating_mul(FILE))
}

/// Charges the memory of a description of stored layers.
pub(crate) fn charge_layers(description: &[u8]) -> Result<Charge, TreeError> {
    let (shape, _) = walk::<LayersShape<'_>>(description)?;
    charge(&[shape.2.0, shape.3.0], 0)
}

/// The shape of an item, and the bytes behind it.
fn walk<'a, T: Deserialize<'a>>(description: &'a [u8]) -> Result<(T, &'a [u8]), TreeError> {
    postcard::take_from_bytes(description).map_err(|error| damaged(error.to_string()))
}

fn charge(costs: &[u64], more: u64) -> Result<Charge, TreeError> {
    let sum = costs.iter().fold(0, |sum: u64, cost| sum.saturating_add(*cost));
    let limit = usize::try_from(more).unwrap_or(usize::MAX).saturating_add(MAX_DECODED);
    let budget = Budget::new("saved file tree", limit);
    Ok(budget.charge(usize::try_from(sum).unwrap_or(usize::MAX))?)
}

#[cfg(test)]
mod tests {
    use afresh_budget::meter::{Meter, peak};

    use super::*;
    use crate::{LayerBytes, New, Time, Tree};

    #[global_allocator]
    static METER: Meter = Meter;

    #[derive(Debug)]
    struct NoBytes;

    impl LayerBytes for NoBytes {
        fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), String> {
            Err("there are none".to_owned())
        }
    }

    const BUDGET: crate::Budget = crate::Budget { bytes: 1 << 30, files: 1 << 20 };

    /// Trees that have many items of one kind each.
    fn trees() -> impl Iterator<Item = Tree> {
        let now = Time::default();
        (0..7).map(move |kind| {
            let mut tree = Tree::new(BUDGET);
            let file = tree.write_path("/file", b"", now).unwrap();
            for number in 0_u32..5000 {
                let name = format!("{number}");
                let name = name.as_bytes();
                match kind {
                    0 => drop(tree.create(Tree::ROOT, name, New::File, 0o644, now).unwrap()),
                    1 => drop(tree.create(Tree::ROOT, name, New::Directory, 0o755, now).unwrap()),
                    2 => drop(tree.create(Tree::ROOT, name, New::Link(b"x"), 0o777, now).unwrap()),
                    3 => tree.link(file, Tree::ROOT, name, now).unwrap(),
                    5 => {
                        let node = tree.create(Tree::ROOT, name, New::File, 0o644, now).unwrap();
                        tree.set_owner(node, Some([number, 33]), now).unwrap();
                    }
                    4 => {
                        let node = tree.create(Tree::ROOT, name, New::File, 0o644, now).unwrap();
                        tree.set_attribute(node, b"user.x", Some(b"y"), now).unwrap();
                    }
                    _ => drop(tree.write(file, u64::from(number) << 13, b"x", now).unwrap()),
                }
            }
            tree
        })
    }

    #[test]
    fn decoding_takes_no_more_than_was_charged() {
        for (kind, tree) in trees().enumerate() {
            let saved = tree.saved().unwrap();
            let charge = charge_tree(&saved.description, 0).unwrap();
            let base = Tree::new(BUDGET);
            let (restored, peak) = peak(|| base.restored(&saved).unwrap());
            assert_eq!(restored.used(), tree.used());
            assert!(peak <= charge.bytes() + 4096, "{kind}: {peak} of {}", charge.bytes());
            assert!(charge.bytes() < 4 * peak, "{kind}: {peak} of {}", charge.bytes());
        }
    }

    #[test]
    fn decoding_layers_takes_no_more_than_was_charged() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..2000 {
            std::fs::write(directory.path().join(format!("{number}")), b"x").unwrap();
        }
        let layer = crate::Layer::directory(directory.path()).unwrap();
        let kept = Tree::new(BUDGET).with_layer("/", &layer).unwrap().stored_layers().unwrap();
        let charge = charge_layers(kept.description()).unwrap();
        let bytes: Arc<dyn LayerBytes> = Arc::new(NoBytes);
        let over =
            || Tree::with_stored_layers(BUDGET, kept.description(), kept.pages(), &bytes).unwrap();
        let (tree, peak) = peak(over);
        assert_eq!(tree.list_path("/").unwrap().len(), 2000);
        assert!(peak <= charge.bytes() + 4096, "{peak} of {}", charge.bytes());
    }

    #[test]
    fn short_files_of_stored_layers_are_refused_before_they_are_decoded() {
        let mut description = postcard::to_allocvec(&(1_u32, 10_u64, 1_u64, "layer")).unwrap();
        let files = 16_u64 << 20;
        description.extend(postcard::to_allocvec(&files).unwrap());
        description.resize(description.len() + files as usize + 1, 0);
        let bytes: Arc<dyn LayerBytes> = Arc::new(NoBytes);
        let (result, peak) = afresh_budget::meter::within(1 << 20, || {
            Tree::with_stored_layers(BUDGET, &description, 0, &bytes)
        });
        assert!(matches!(result, Err(TreeError::Exceeded(_))), "{result:?}");
        assert!(peak < 1 << 20, "{peak}");
    }
}
