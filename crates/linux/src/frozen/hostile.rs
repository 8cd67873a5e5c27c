//! States from strangers whose bytes are worth the most memory.

use std::collections::BTreeMap;

use afresh_budget::meter::{Meter, peak};
use afresh_budget::{MAX_DECODED, MAX_UNCHECKED, decode};
use afresh_files::Node;
use afresh_memory::{Image, ImageBuilder, PAGE_SIZE};

use super::golden::golden_bytes;
use super::{ENGINES_BEFORE, Frozen, Header, PackedAdditions};
use crate::platform::HostTraits;
use crate::program::Program;
use crate::warm::Warm;

#[global_allocator]
static METER: Meter = Meter;

/// Changes that add up to as many of the smallest items.
const CHANGES: [fn(&mut Header, usize); 3] = [
    |header, items| header.state.add_empty_layers(items),
    |header, items| header.state.add_descriptions(items / 4),
    |header, items| {
        let part = &mut header.parts[0];
        part.behind = (0..items as u32 / 4).map(|n| (Node(n.into()), Vec::new())).collect();
    },
];

fn hostile_state(change: fn(&mut Header, usize), items: usize) -> Vec<u8> {
    let (mut header, _) = decode::<Header>(&golden_bytes(ENGINES_BEFORE[0]), MAX_DECODED).unwrap();
    change(&mut header, items);
    postcard::to_allocvec(&header).unwrap()
}

#[test]
fn a_byte_of_a_state_becomes_at_most_512() {
    for change in CHANGES {
        let bytes = hostile_state(change, MAX_UNCHECKED / 4);
        let (state, taken) = peak(|| decode::<Header>(&bytes, MAX_DECODED).map(drop));
        println!("{} bytes become {taken}: {} times", bytes.len(), taken / bytes.len());
        assert!(state.is_ok() && taken <= bytes.len() * (MAX_DECODED / MAX_UNCHECKED));
    }
}

/// A file tree that claims to have removed many files takes a byte for each. Files of layers count
/// against no budget, so that the opener's number of files limits the tree.
#[test]
fn a_file_tree_that_decodes_to_more_than_its_opener_allows_is_refused_before_it_takes_the_memory() {
    const ITEMS: usize = 32 << 20;
    let none: Vec<(u64, u64)> = Vec::new();
    let (form, room, numbers) = (1u32, (u64::MAX, u64::MAX), vec![0u64; ITEMS]);
    let description = (form, room, 0u64, &none, &none, &none, numbers, &none, 0u64);
    let description = postcard::to_allocvec(&description).unwrap();
    let mut tree = (description.len() as u64).to_le_bytes().to_vec();
    tree.extend(description);
    let mut pages = ImageBuilder::new(tree.len().div_ceil(PAGE_SIZE));
    pages.segment(0, &tree).unwrap();
    let bytes = hostile_state(
        |header, files| {
            header.files = files as u64;
            header.seen = HostTraits::here();
            header.state.remove_layers();
        },
        tree.len(),
    );
    let frozen = Frozen::from_parts(pages.build().unwrap().into(), &bytes).unwrap();
    let (thawed, taken) = peak(|| Warm::thaw(&frozen, &Program::new("/bin/sh")).map(drop));
    let error = thawed.unwrap_err().to_string();
    assert!(error.contains("too many files or names"), "{error}");
    assert!(taken < 4 * ITEMS, "{taken} taken");
}

#[test]
fn a_state_that_decodes_to_more_than_its_limit_is_refused_before_it_takes_the_memory() {
    let bytes = hostile_state(CHANGES[0], 6_200_000);
    let frozen = Frozen::from_parts(Image::zero(1 << 20).into(), &bytes).unwrap();
    let (thawed, taken) = peak(|| Warm::thaw(&frozen, &Program::new("/bin/sh")).map(drop));
    let error = thawed.unwrap_err().to_string();
    assert!(error.contains("takes more than"), "{error}");
    assert!(taken <= MAX_DECODED, "{taken} taken");
}

#[test]
fn the_parts_of_a_state_share_a_limit() {
    let header = hostile_state(CHANGES[0], 5_000_000);
    let additions = postcard::to_allocvec(&PackedAdditions::default()).unwrap();
    type Tunables = BTreeMap<u32, (i16, u16)>;
    let tunables: Tunables = (0..4_000_000).map(|id| (id, (1, 1))).collect();
    let tunables = postcard::to_allocvec(&tunables).unwrap();
    // Each alone is within it.
    decode::<Header>(&header, MAX_DECODED).unwrap();
    decode::<Tunables>(&tunables, MAX_DECODED).unwrap();
    let bytes = [header, additions, tunables].concat();
    let frozen = Frozen::from_parts(Image::zero(1 << 20).into(), &bytes).unwrap();
    let (thawed, taken) = peak(|| Warm::thaw(&frozen, &Program::new("/bin/sh")).map(drop));
    let error = thawed.unwrap_err().to_string();
    assert!(error.contains("takes more than"), "{error}");
    assert!(taken <= MAX_DECODED, "{taken} taken");
}
