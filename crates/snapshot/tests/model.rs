//! Random programs of write, reset, snapshot, restore, fork, drop and compact, against a naive model
//! that copies everything.

use std::collections::HashMap;

use afresh_memory::{Image, PAGE_SIZE, PageRange, Slot, SlotConfig, Strategy as Reset};
use afresh_snapshot::{Branch, SnapshotId, Tree};
use proptest::prelude::*;

const PAGES: usize = 24;
/// Two regions with a gap between them.
const REGIONS: [PageRange; 2] = [PageRange::new(0, 10), PageRange::new(13, 11)];

#[derive(Debug, Clone)]
enum Step {
    Write { guest: usize, offset: usize, len: usize, value: u8 },
    Reset { guest: usize },
    Snapshot { guest: usize },
    Restore { guest: usize, snapshot: usize },
    Fork { guest: usize, snapshot: usize },
    Drop { snapshot: usize },
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let guest = || 0..8_usize;
    let snapshot = || 0..64_usize;
    prop_oneof![
        8 => (guest(), 0..PAGES * PAGE_SIZE, 1..9000_usize, 0..4_u8)
            .prop_map(|(guest, offset, len, value)| Step::Write { guest, offset, len, value }),
        3 => guest().prop_map(|guest| Step::Reset { guest }),
        5 => guest().prop_map(|guest| Step::Snapshot { guest }),
        5 => (guest(), snapshot()).prop_map(|(guest, snapshot)| Step::Restore { guest, snapshot }),
        2 => (guest(), snapshot()).prop_map(|(guest, snapshot)| Step::Fork { guest, snapshot }),
        2 => snapshot().prop_map(|snapshot| Step::Drop { snapshot }),
        1 => Just(Step::Compact),
    ]
}

fn content(slot: &Slot) -> Vec<u8> {
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    for region in REGIONS {
        let range = region.byte_start()..region.byte_start() + region.byte_len();
        slot.read(range.start, &mut bytes[range]).unwrap();
    }
    bytes
}

/// A guest, what it should hold, and what it should return to.
struct Live {
    branch: Branch<Slot>,
    now: Vec<u8>,
    base: Vec<u8>,
}

fn slot(strategy: Reset) -> Option<Slot> {
    let config = SlotConfig { strategy, regions: REGIONS.to_vec(), ..SlotConfig::default() };
    match Slot::new(&Image::zero(PAGES), config) {
        Ok(slot) => Some(slot),
        Err(error) => {
            eprintln!("SKIPPED: strategy {strategy} is not available here: {error}");
            None
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn every_state_is_what_the_naive_model_says(
        steps in prop::collection::vec(step(), 1..70),
        strategy in prop::sample::select(Reset::FORCED.to_vec()),
        budget in prop::sample::select(vec![1_usize, 4, 1000]),
    ) {
        let Some(slot) = slot(strategy) else { return Ok(()) };
        let tree = Tree::with_budget(budget);
        let zero = vec![0; PAGES * PAGE_SIZE];
        let branch = Branch::plant(&tree, slot).unwrap();
        let mut model: HashMap<SnapshotId, Vec<u8>> = HashMap::from([(branch.at(), zero.clone())]);
        let mut ids = vec![branch.at()];
        let mut guests = vec![Live { branch, now: zero.clone(), base: zero }];
        for step in steps {
            match step {
                Step::Write { guest, offset, len, value } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    let bytes = vec![value; len];
                    if live.branch.guest_mut().write(offset, &bytes).is_ok() {
                        live.now[offset..offset + len].copy_from_slice(&bytes);
                    }
                }
                Step::Reset { guest } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    live.branch.guest_mut().reset().unwrap();
                    live.now = live.base.clone();
                    prop_assert!(live.branch.guest_mut().verify().unwrap().is_empty());
                }
                Step::Snapshot { guest } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    let id = live.branch.snapshot().unwrap();
                    model.insert(id, live.now.clone());
                    ids.push(id);
                    live.base = live.now.clone();
                }
                Step::Restore { guest, snapshot } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    let id = ids[snapshot % ids.len()];
                    match model.get(&id) {
                        Some(bytes) => {
                            live.branch.restore(id).unwrap();
                            live.now = bytes.clone();
                            live.base = bytes.clone();
                        }
                        None => prop_assert!(live.branch.restore(id).is_err()),
                    }
                }
                Step::Fork { guest, snapshot } if guests.len() < 8 => {
                    let id = ids[snapshot % ids.len()];
                    let live = &guests[guest % guests.len()];
                    if let Some(bytes) = model.get(&id) {
                        let branch = live.branch.fork(id).unwrap();
                        guests.push(Live { branch, now: bytes.clone(), base: bytes.clone() });
                    }
                }
                Step::Fork { .. } => {}
                Step::Drop { snapshot } => {
                    let id = ids[snapshot % ids.len()];
                    prop_assert_eq!(tree.drop_snapshot(id).is_ok(), model.remove(&id).is_some());
                }
                Step::Compact => {
                    tree.compact().unwrap();
                }
            }
            for live in &guests {
                prop_assert!(content(live.branch.guest()) == live.now, "{}", strategy);
            }
        }
        // Every state that is left is whole, and every guest still returns to its base.
        prop_assert_eq!(tree.len(), model.len());
        for (id, bytes) in &model {
            let mut stored = vec![0; PAGES * PAGE_SIZE];
            tree.get(*id).unwrap().image.read(0, &mut stored);
            prop_assert!(stored == *bytes);
        }
        for live in &mut guests {
            live.branch.guest_mut().reset().unwrap();
            prop_assert!(content(live.branch.guest()) == live.base, "{}", strategy);
            live.branch.guest_mut().trim().unwrap();
            prop_assert!(content(live.branch.guest()) == live.base, "after trim, {}", strategy);
            prop_assert!(live.branch.guest_mut().verify().unwrap().is_empty());
        }
    }
}

#[test]
fn a_snapshot_stores_only_what_changed() {
    let Some(slot) = slot(Reset::Auto) else { return };
    let tree = Tree::new();
    let mut branch = Branch::plant(&tree, slot).unwrap();
    let all = vec![1; 10 * PAGE_SIZE];
    branch.guest_mut().write(0, &all).unwrap();
    branch.snapshot().unwrap();
    branch.guest_mut().write(3 * PAGE_SIZE, &[2]).unwrap();
    // Written, but with what was there.
    branch.guest_mut().write(5 * PAGE_SIZE, &[1]).unwrap();
    let last = branch.snapshot().unwrap();
    let list = tree.list();
    let own: Vec<usize> = list.iter().map(|info| info.own_pages).collect();
    assert_eq!(own, [0, 10, 1]);
    assert_eq!(list[2].id, last);
    assert_eq!(list[2].parent, Some(list[1].id));
    assert_eq!(list[2].stored_pages, 10);
}

#[test]
fn dropping_the_middle_leaves_the_ends() {
    let Some(slot) = slot(Reset::Auto) else { return };
    let tree = Tree::new();
    let mut branch = Branch::plant(&tree, slot).unwrap();
    let root = branch.at();
    let mut ids = Vec::new();
    for value in 1..6 {
        branch.guest_mut().write(usize::from(value) * PAGE_SIZE, &[value]).unwrap();
        ids.push(branch.snapshot().unwrap());
    }
    for middle in &ids[..4] {
        tree.drop_snapshot(*middle).unwrap();
    }
    let list = tree.list();
    assert_eq!(list.len(), 2);
    assert_eq!(list[1].parent, Some(root));
    assert_eq!(list[0].children, [ids[4]]);
    branch.restore(root).unwrap();
    branch.restore(ids[4]).unwrap();
    let mut byte = [0];
    for value in 1..6 {
        branch.guest().read(usize::from(value) * PAGE_SIZE, &mut byte).unwrap();
        assert_eq!(byte, [value]);
    }
}
