//! Random programs of write, reset, snapshot, restore, fork, drop and compact, against a naive
//! model that copies everything.

use std::collections::HashMap;

use afresh_memory::{Image, PAGE_SIZE, PageRange, Slot, SlotConfig, Strategy as Reset};
use afresh_snapshot::{Branch, SnapshotId, Tree, TreeError};
use proptest::prelude::*;

const PAGES: usize = 24;
/// Two regions with a gap between them.
const REGIONS: [PageRange; 2] = [PageRange::new(0, 10), PageRange::new(13, 11)];
/// Maximum size of a slot of one region.
const CAPACITY: usize = PAGES + 40;

#[derive(Debug, Clone)]
enum Step {
    Write { guest: usize, offset: usize, len: usize, value: u8 },
    Grow { guest: usize, pages: usize },
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
        8 => (guest(), 0..CAPACITY * PAGE_SIZE, 1..9000_usize, 0..4_u8)
            .prop_map(|(guest, offset, len, value)| Step::Write { guest, offset, len, value }),
        2 => (guest(), 1..12_usize).prop_map(|(guest, pages)| Step::Grow { guest, pages }),
        3 => guest().prop_map(|guest| Step::Reset { guest }),
        5 => guest().prop_map(|guest| Step::Snapshot { guest }),
        5 => (guest(), snapshot()).prop_map(|(guest, snapshot)| Step::Restore { guest, snapshot }),
        2 => (guest(), snapshot()).prop_map(|(guest, snapshot)| Step::Fork { guest, snapshot }),
        2 => snapshot().prop_map(|snapshot| Step::Drop { snapshot }),
        1 => Just(Step::Compact),
    ]
}

fn content(slot: &Slot) -> Vec<u8> {
    let mut bytes = vec![0; slot.end() * PAGE_SIZE];
    let (last, before) = slot.regions().split_last().unwrap();
    let last = PageRange::new(last.start, slot.end() - last.start);
    for region in before.iter().chain([&last]) {
        let range = region.byte_start()..region.byte_start() + region.byte_len();
        slot.read(range.start, &mut bytes[range]).unwrap();
    }
    bytes
}

/// A guest, what it should hold, and what it should return to.
struct LiveGuest {
    branch: Branch<Slot>,
    now: Vec<u8>,
    base: Vec<u8>,
}

fn slot(strategy: Reset, grows: bool) -> Option<Slot> {
    let config = SlotConfig {
        strategy,
        regions: if grows { Vec::new() } else { REGIONS.to_vec() },
        capacity: grows.then_some(CAPACITY),
        ..SlotConfig::default()
    };
    match Slot::new(&Image::zero(PAGES), config) {
        Ok(slot) => Some(slot),
        Err(error) => {
            eprintln!("SKIPPED: strategy {strategy} is not available here: {error}");
            None
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn every_state_is_what_the_naive_model_says(
        steps in prop::collection::vec(step(), 1..70),
        strategy in prop::sample::select(Reset::FORCED.to_vec()),
        budget in prop::sample::select(vec![1_usize, 4, 1000]),
        grows in any::<bool>(),
    ) {
        let Some(slot) = slot(strategy, grows) else { return Ok(()) };
        let tree = Tree::with_budget(budget);
        let zero = vec![0; PAGES * PAGE_SIZE];
        let branch = Branch::from_guest(&tree, slot).unwrap();
        let mut model: HashMap<SnapshotId, Vec<u8>> = HashMap::from([(branch.at(), zero.clone())]);
        let mut ids = vec![branch.at()];
        let mut guests = vec![LiveGuest { branch, now: zero.clone(), base: zero }];
        for step in steps {
            match step {
                Step::Write { guest, offset, len, value } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    let bytes = vec![value; len];
                    if live.branch.guest_mut().unwrap().write(offset, &bytes).is_ok() {
                        live.now[offset..offset + len].copy_from_slice(&bytes);
                    }
                }
                Step::Grow { guest, pages } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    let slot = live.branch.guest_mut().unwrap();
                    let end = slot.end() + pages;
                    if slot.grow(end).is_ok() {
                        live.now.resize(end * PAGE_SIZE, 0);
                    }
                }
                Step::Reset { guest } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    live.branch.guest_mut().unwrap().reset().unwrap();
                    live.now = live.base.clone();
                    prop_assert!(live.branch.guest_mut().unwrap().verify().unwrap().is_empty());
                }
                Step::Snapshot { guest } => {
                    let count = guests.len();
                    let live = &mut guests[guest % count];
                    let id = live.branch.checkpoint().unwrap();
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
                            live.branch.rollback(id).unwrap();
                            live.now = bytes.clone();
                            live.base = bytes.clone();
                        }
                        None => prop_assert!(live.branch.rollback(id).is_err()),
                    }
                }
                Step::Fork { guest, snapshot } if guests.len() < 8 => {
                    let id = ids[snapshot % ids.len()];
                    let live = &guests[guest % guests.len()];
                    if let Some(bytes) = model.get(&id) {
                        let branch = live.branch.fork(id).unwrap();
                        guests.push(LiveGuest { branch, now: bytes.clone(), base: bytes.clone() });
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
                // One that was forked and not used yet is in the state that it was forked from.
                if let Some(slot) = live.branch.guest() {
                    prop_assert!(content(slot) == live.now, "{}", strategy);
                }
            }
        }
        // Every state that is left is whole, and every guest still returns to its base.
        prop_assert_eq!(tree.len(), model.len());
        for (id, bytes) in &model {
            let memories = tree.get(*id).unwrap().memories;
            let mut stored = vec![0; bytes.len()];
            memories[0].read(0, &mut stored);
            prop_assert!(memories[0].pages() * PAGE_SIZE == bytes.len() && stored == *bytes);
        }
        // The difference of any two is what comparing their bytes says.
        let left: Vec<SnapshotId> = model.keys().copied().take(6).collect();
        for (one, two) in left.iter().flat_map(|one| left.iter().map(move |two| (*one, *two))) {
            let (first, second) = (&model[&one], &model[&two]);
            let length = first.len().max(second.len());
            let byte = |bytes: &[u8], at: usize| bytes.get(at).copied().unwrap_or(0);
            let bytes = (0..length).filter(|at| byte(first, *at) != byte(second, *at));
            let bytes: Vec<usize> = bytes.collect();
            let mut pages: Vec<usize> = bytes.iter().map(|at| at / PAGE_SIZE).collect();
            pages.dedup();
            let found = tree.diff(one, two).unwrap();
            prop_assert_eq!((found.pages, found.bytes), (pages.len(), bytes.len()));
            prop_assert_eq!(found.state, first.len() != second.len());
        }
        for live in &mut guests {
            live.branch.guest_mut().unwrap().reset().unwrap();
            prop_assert!(content(live.branch.guest().unwrap()) == live.base, "{}", strategy);
            live.branch.guest_mut().unwrap().trim().unwrap();
            prop_assert!(content(live.branch.guest().unwrap()) == live.base, "after trim, {}", strategy);
            prop_assert!(live.branch.guest_mut().unwrap().verify().unwrap().is_empty());
        }
    }
}

#[test]
fn a_snapshot_stores_only_what_changed() {
    let Some(slot) = slot(Reset::Auto, false) else { return };
    let tree = Tree::new();
    let mut branch = Branch::from_guest(&tree, slot).unwrap();
    let all = vec![1; 10 * PAGE_SIZE];
    branch.guest_mut().unwrap().write(0, &all).unwrap();
    branch.checkpoint().unwrap();
    branch.guest_mut().unwrap().write(3 * PAGE_SIZE, &[2]).unwrap();
    // Written with the same bytes.
    branch.guest_mut().unwrap().write(5 * PAGE_SIZE, &[1]).unwrap();
    let last = branch.checkpoint().unwrap();
    let list = tree.list();
    let own: Vec<usize> = list.iter().map(|info| info.own_pages).collect();
    assert_eq!(own, [0, 10, 1]);
    assert_eq!(list[2].id, last);
    assert_eq!(list[2].parent, Some(list[1].id));
    assert_eq!(list[2].stored_pages, 10);
}

#[test]
fn dropping_the_middle_leaves_the_ends() {
    let Some(slot) = slot(Reset::Auto, false) else { return };
    let tree = Tree::new();
    let mut branch = Branch::from_guest(&tree, slot).unwrap();
    let root = branch.at();
    let mut ids = Vec::new();
    for value in 1..6 {
        branch.guest_mut().unwrap().write(usize::from(value) * PAGE_SIZE, &[value]).unwrap();
        ids.push(branch.checkpoint().unwrap());
    }
    for middle in &ids[..4] {
        tree.drop_snapshot(*middle).unwrap();
    }
    let list = tree.list();
    assert_eq!(list.len(), 2);
    assert_eq!(list[1].parent, Some(root));
    assert_eq!(list[0].children, [ids[4]]);
    branch.rollback(root).unwrap();
    branch.rollback(ids[4]).unwrap();
    let mut byte = [0];
    for value in 1..6 {
        branch.guest().unwrap().read(usize::from(value) * PAGE_SIZE, &mut byte).unwrap();
        assert_eq!(byte, [value]);
    }
}

#[test]
fn a_name_means_the_nearest_on_the_way_to_the_root() {
    let Some(slot) = slot(Reset::Auto, false) else { return };
    let tree = Tree::new();
    let mut branch = Branch::from_guest(&tree, slot).unwrap();
    let root = branch.at();
    let mut twin = branch.fork(root).unwrap();
    let named = |branch: &mut Branch<Slot>, name: &str| {
        branch.guest_mut().unwrap().write(0, &[1]).unwrap();
        let id = branch.checkpoint().unwrap();
        tree.name(id, name).unwrap();
        id
    };
    let first = named(&mut branch, "turn");
    let second = named(&mut branch, "turn");
    let only = named(&mut twin, "aside");
    assert_eq!(tree.find("turn", branch.at()).unwrap(), second);
    assert_eq!(tree.find("turn", first).unwrap(), first);
    assert_eq!(tree.find("aside", branch.at()).unwrap(), only);
    assert!(matches!(tree.find("turn", root), Err(TreeError::Ambiguous { .. })));
    assert!(matches!(tree.find("none", root), Err(TreeError::NoSuchName { .. })));
    // An id of another tree is unknown here.
    let other = Tree::new();
    let stranger =
        Branch::<Slot>::from_state(&other, SlotConfig::default(), tree.get(root).unwrap()).at();
    assert!(matches!(tree.get(stranger), Err(TreeError::Unknown(_))));
}

#[test]
fn a_guest_whose_state_was_dropped_is_forked_as_it_is() {
    let Some(slot) = slot(Reset::Auto, false) else { return };
    let mut branch = Branch::from_guest(&Tree::new(), slot).unwrap();
    let root = branch.at();
    branch.guest_mut().unwrap().write(0, &[1]).unwrap();
    let one = branch.checkpoint().unwrap();
    branch.drop_snapshot(one).unwrap();
    let here = branch.current().unwrap();
    let mut fork = branch.fork(here).unwrap();
    assert_eq!(content(fork.guest_mut().unwrap())[0], 1);
    let of_here = branch.tree().list().into_iter().find(|info| info.id == here).unwrap();
    assert_eq!(of_here.parent, Some(root));
}

#[test]
fn a_checkpoint_costs_what_changed_also_after_much_was_written() {
    const MANY_PAGES: usize = 4000;
    let config = SlotConfig { strategy: Reset::WriteSet(None), ..SlotConfig::default() };
    let Ok(slot) = Slot::new(&Image::zero(MANY_PAGES), config) else {
        println!("SKIPPED: no tracker here");
        return;
    };
    let tree = Tree::new();
    let mut branch = Branch::from_guest(&tree, slot).unwrap();
    let root = branch.at();
    branch.guest_mut().unwrap().write(0, &vec![1; MANY_PAGES * PAGE_SIZE]).unwrap();
    let full = branch.checkpoint().unwrap();
    for turn in 0..20_usize {
        for page in 0..10 {
            let at = (turn * 7 + page) * PAGE_SIZE;
            branch.guest_mut().unwrap().write(at, &[turn as u8 + 2]).unwrap();
        }
        branch.checkpoint().unwrap();
        // Pages that the next checkpoint examines, written or not.
        let looked_at = branch.guest().unwrap().write_set_len();
        assert!(looked_at <= 100, "{looked_at} pages after turn {turn}");
    }
    branch.rollback(full).unwrap();
    branch.rollback(root).unwrap();
    branch.rollback(full).unwrap();
    assert!(branch.guest().unwrap().write_set_len() <= 100);
    assert!(branch.guest_mut().unwrap().verify().unwrap().is_empty());
}

#[test]
fn a_guest_relocated_to_equal_content_keeps_nothing_of_its_old_state() {
    for strategy in Reset::FORCED {
        let Some(slot) = slot(strategy, false) else { continue };
        // Everything is stored in many places, and so gathered in a new one by each snapshot.
        let tree = Tree::with_budget(1);
        let mut branch = Branch::from_guest(&tree, slot).unwrap();
        let root = branch.at();
        tree.drop_snapshot(root).unwrap();
        for page in [0, 19] {
            branch.guest_mut().unwrap().write(page * PAGE_SIZE, &[1]).unwrap();
        }
        let first = branch.checkpoint().unwrap();
        let mut fork = branch.fork(first).unwrap();
        tree.drop_snapshot(first).unwrap();
        let expected = content(fork.guest_mut().unwrap());
        let second = branch.checkpoint().unwrap();
        // The fork now uses the new file alone, and the first one is unused.
        fork.rollback(second).unwrap();
        assert!(content(fork.guest().unwrap()) == expected, "{strategy}");
    }
}
