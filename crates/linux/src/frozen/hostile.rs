//! States from strangers whose bytes are worth the most memory.

use afresh_budget::meter::{Meter, peak};
use afresh_budget::{MAX_DECODED, MAX_UNCHECKED, decode};
use afresh_files::Node;
use afresh_memory::Image;

use super::golden::golden_bytes;
use super::{ENGINE_BEFORE, Frozen, Header};
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
    let (mut header, _) = decode::<Header>(&golden_bytes(ENGINE_BEFORE), MAX_DECODED).unwrap();
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

#[test]
fn a_state_that_decodes_to_more_than_its_limit_is_refused_before_it_takes_the_memory() {
    let bytes = hostile_state(CHANGES[0], 6_200_000);
    let frozen = Frozen::from_parts(Image::zero(1 << 20).into(), &bytes);
    let (thawed, taken) = peak(|| Warm::thaw(&frozen, &Program::new("/bin/sh")).map(drop));
    let error = thawed.unwrap_err().to_string();
    assert!(error.contains("takes more than"), "{error}");
    assert!(taken <= MAX_DECODED, "{taken} taken");
}
