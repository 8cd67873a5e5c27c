//! Random programs on a tree of micro-VM snapshots, against a naive model.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::common::{guest, kvm, words};
use afresh_snapshot::{Branch, SnapshotId, Tree};
use afresh_vm::{ResetMethod as Reset, Sandbox};
use proptest::prelude::{Strategy as _, *};

/// Heap pages the programs write; the model keeps the first word of each.
const PAGES: u64 = 300;
type Model = Vec<u64>;

#[derive(Debug, Clone)]
enum Step {
    Write { guest: usize, first: u64, count: u64, stride: u64, value: u64 },
    HostWrite { guest: usize, page: u64, value: u64 },
    Crash { guest: usize },
    Reset { guest: usize },
    Snapshot { guest: usize },
    Restore { guest: usize, snapshot: usize },
    Fork { guest: usize, snapshot: usize },
    Drop { snapshot: usize },
}

fn step() -> impl proptest::strategy::Strategy<Value = Step> {
    let (guest, snapshot) = (|| 0..4_usize, || 0..64_usize);
    prop_oneof![
        8 => (guest(), 0..PAGES, 1..50_u64, 1..7_u64, 1..100_u64).prop_map(
            |(guest, first, count, stride, value)| Step::Write {
                guest, first, count: count.min((PAGES - first).div_ceil(stride)), stride, value,
            }),
        3 => (guest(), 0..PAGES, 1..100_u64)
            .prop_map(|(guest, page, value)| Step::HostWrite { guest, page, value }),
        1 => guest().prop_map(|guest| Step::Crash { guest }),
        3 => guest().prop_map(|guest| Step::Reset { guest }),
        5 => guest().prop_map(|guest| Step::Snapshot { guest }),
        6 => (guest(), snapshot()).prop_map(|(guest, snapshot)| Step::Restore { guest, snapshot }),
        2 => (guest(), snapshot()).prop_map(|(guest, snapshot)| Step::Fork { guest, snapshot }),
        2 => snapshot().prop_map(|snapshot| Step::Drop { snapshot }),
    ]
}

fn elf() -> &'static [u8] {
    static ELF: OnceLock<Vec<u8>> = OnceLock::new();
    ELF.get_or_init(|| guest("dirty"))
}

struct LiveSandbox {
    branch: Branch<Sandbox>,
    now: Model,
    base: Model,
}

/// Address of the first word of a page that the programs write.
fn address(sandbox: &Sandbox, page: u64) -> u64 {
    sandbox.heap().start + (16 + page) * 4096
}

fn content(sandbox: &Sandbox) -> Model {
    (0..PAGES)
        .map(|page| {
            let mut word = [0; 8];
            sandbox.read_memory(address(sandbox, page), &mut word).unwrap();
            u64::from_le_bytes(word)
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn every_state_of_the_tree_is_what_the_naive_model_says(
        steps in prop::collection::vec(step(), 1..50),
        method in prop::sample::select(Reset::ALL.to_vec()),
        // With the smallest each state is stored anew.
        budget in prop::sample::select(vec![1, 4, 1 << 10]),
    ) {
        if !kvm() {
            return Ok(());
        }
        let sandbox = Sandbox::builder().memory(2 << 20).reset_method(method).build(elf()).unwrap();
        let tree = Tree::with_budget(budget);
        let zero = vec![0; PAGES as usize];
        let branch = Branch::from_guest(&tree, sandbox).unwrap();
        let mut ids = vec![branch.at()];
        let mut model: HashMap<SnapshotId, Model> = HashMap::from([(branch.at(), zero.clone())]);
        let mut guests = vec![LiveSandbox { branch, now: zero.clone(), base: zero }];
        for step in steps {
            let count = guests.len();
            match step {
                Step::Write { guest, first, count: pages, stride, value } => {
                    let live = &mut guests[guest % count];
                    let input = words(&[1, first, pages, stride, value]);
                    live.branch.guest_mut().unwrap().call(&input).unwrap();
                    for index in 0..pages {
                        live.now[(first + index * stride) as usize] = value;
                    }
                }
                Step::HostWrite { guest, page, value } => {
                    let live = &mut guests[guest % count];
                    let at = address(live.branch.guest_mut().unwrap(), page);
                    live.branch.guest_mut().unwrap().write_memory(at, &value.to_le_bytes()).unwrap();
                    live.now[page as usize] = value;
                }
                Step::Crash { guest } => {
                    let live = &mut guests[guest % count];
                    prop_assert!(live.branch.guest_mut().unwrap().call(&words(&[4, 8, 1])).is_err());
                    prop_assert!(live.branch.checkpoint().is_err(), "a crashed guest is not frozen");
                    live.branch.guest_mut().unwrap().reset().unwrap();
                    live.now = live.base.clone();
                }
                Step::Reset { guest } => {
                    let live = &mut guests[guest % count];
                    live.branch.guest_mut().unwrap().reset().unwrap();
                    live.now = live.base.clone();
                    if let Err(error) = live.branch.guest_mut().unwrap().verify() {
                        return Err(TestCaseError::fail(format!("{method:?}: {error}")));
                    }
                }
                Step::Snapshot { guest } => {
                    let live = &mut guests[guest % count];
                    let id = live.branch.checkpoint().unwrap();
                    model.insert(id, live.now.clone());
                    ids.push(id);
                    live.base = live.now.clone();
                }
                Step::Restore { guest, snapshot } => {
                    let id = ids[snapshot % ids.len()];
                    let live = &mut guests[guest % count];
                    match model.get(&id) {
                        Some(state) => {
                            live.branch.rollback(id).unwrap();
                            (live.now, live.base) = (state.clone(), state.clone());
                        }
                        None => prop_assert!(live.branch.rollback(id).is_err()),
                    }
                }
                Step::Fork { guest, snapshot } if count < 4 => {
                    let id = ids[snapshot % ids.len()];
                    if let Some(state) = model.get(&id) {
                        let branch = guests[guest % count].branch.fork(id).unwrap();
                        guests.push(LiveSandbox { branch, now: state.clone(), base: state.clone() });
                    }
                }
                Step::Fork { .. } => {}
                Step::Drop { snapshot } => {
                    let id = ids[snapshot % ids.len()];
                    prop_assert_eq!(tree.drop_snapshot(id).is_ok(), model.remove(&id).is_some());
                }
            }
            for live in &guests {
                // One that was forked and not used yet is in the state that it was forked from.
                if let Some(sandbox) = live.branch.guest() {
                    prop_assert!(content(sandbox) == live.now, "{:?}", method);
                }
            }
        }
        for live in &mut guests {
            live.branch.guest_mut().unwrap().reset().unwrap();
            prop_assert!(content(live.branch.guest().unwrap()) == live.base, "{:?}", method);
            if let Err(error) = live.branch.guest_mut().unwrap().verify() {
                return Err(TestCaseError::fail(format!("{method:?}: {error}")));
            }
        }
    }
}

#[test]
fn forks_share_the_memory_they_do_not_write() {
    // Other tests of this process would count as well.
    afresh_sys::run_isolated("snapshots::forks_share_the_memory_they_do_not_write", || {
        if !kvm() {
            return;
        }
        const WARM: u64 = 4096;
        let mut first = Sandbox::builder().memory(32 << 20).build(elf()).unwrap();
        first.call(&words(&[1, 0, WARM, 1, 7])).unwrap();
        let snapshot = first.checkpoint().unwrap();
        drop(first);
        let read_all = |sandbox: &mut Sandbox| {
            let sum = sandbox.run(&words(&[2, 0, WARM, 1])).unwrap();
            assert_eq!(sum, (WARM * 7).to_le_bytes());
            let mut bytes = vec![0; 4096];
            for page in 0..WARM {
                sandbox.read_memory(address(sandbox, page), &mut bytes).unwrap();
            }
        };
        let mut forks: Vec<Sandbox> = (0..2).map(|_| snapshot.fork().unwrap()).collect();
        forks.iter_mut().for_each(read_all);
        let before = pss_kib();
        let mut more: Vec<Sandbox> = (0..6).map(|_| snapshot.fork().unwrap()).collect();
        more.iter_mut().for_each(read_all);
        let each = pss_kib().saturating_sub(before) / 6;
        // 16 MiB are warm; a full copy would cost all of them again.
        assert!(each < 4 << 10, "a fork costs {each} KiB");
    });
}

/// This process's proportional share of memory.
fn pss_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn two_forks_of_one_snapshot_do_not_draw_the_same_random_numbers() {
    if !kvm() {
        return;
    }
    let sandbox = Sandbox::builder().build(elf()).unwrap();
    let snapshot = sandbox.pristine();
    let draw = |sandbox: &mut Sandbox| {
        let at = sandbox.heap().start + 20 * 4096;
        sandbox.call(&words(&[7, 7, at, 16])).unwrap();
        let mut bytes = [0; 16];
        sandbox.read_memory(at, &mut bytes).unwrap();
        let generation = sandbox.call(&words(&[7, 8])).unwrap();
        sandbox.reset().unwrap();
        (bytes, generation)
    };
    let (mut one, mut two) = (snapshot.fork().unwrap(), snapshot.fork().unwrap());
    let draws = [draw(&mut one), draw(&mut two), draw(&mut one)];
    for (index, first) in draws.iter().enumerate() {
        for second in &draws[index + 1..] {
            assert!(first.0 != second.0 && first.1 != second.1);
        }
    }
}
