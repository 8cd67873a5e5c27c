//! Sessions: every state equals a plain copy of everything, and a session survives every failure.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::common::{Random, WASM_PAGE, ints, machine, val, words};
use afresh::memory::Strategy;
use afresh::snapshot::SnapshotId;
use afresh::wasm::{GuestOptions, Imports, Mode, Val};
use afresh::{Call, CallError, Guest, Options, Session, SessionError};

/// Everything that a state of a module can hold.
const EVERYTHING: &str = r#"(module
    (memory 2 6)
    (global $g (mut i64) (i64.const 5))
    (global $v (mut v128) (v128.const i64x2 1 2))
    (table $t 4 12 funcref)
    (type $f (func (result i32)))
    (data $d "hello")
    (elem declare func $one $two)
    (func $one (result i32) (i32.const 1))
    (func $two (result i32) (i32.const 2))
    (func (export "fill") (param i32 i32 i32)
        (memory.fill (local.get 0) (local.get 1) (local.get 2)))
    (func (export "set") (param i64)
        (global.set $g (local.get 0))
        (global.set $v (i64x2.splat (local.get 0))))
    (func (export "get") (result i64)
        (i64.add (global.get $g) (i64x2.extract_lane 1 (global.get $v))))
    (func (export "put") (param i32 i32)
        (if (i32.eqz (local.get 1)) (then (table.set $t (local.get 0) (ref.null func))))
        (if (i32.eq (local.get 1) (i32.const 1)) (then (table.set $t (local.get 0) (ref.func $one))))
        (if (i32.eq (local.get 1) (i32.const 2)) (then (table.set $t (local.get 0) (ref.func $two)))))
    (func (export "at") (param i32) (result i32)
        (if (ref.is_null (table.get $t (local.get 0))) (then (return (i32.const 0))))
        (call_indirect $t (type $f) (local.get 0)))
    (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
    (func (export "size") (result i32) (memory.size))
    (func (export "grow_table") (param i32) (result i32)
        (table.grow $t (ref.func $one) (local.get 0)))
    (func (export "table_size") (result i32) (table.size $t))
    (func (export "init") (memory.init $d (i32.const 100) (i32.const 0) (i32.const 5)))
    (func (export "drop") (data.drop $d))
    (func (export "trap") (param i32)
        (memory.fill (local.get 0) (i32.const 255) (i32.const 5000))
        (global.set $g (i64.const -1))
        (unreachable)))"#;

/// Wasm pages at the beginning.
const FIRST: usize = 2;

/// A plain copy of everything.
#[derive(Clone, PartialEq, Debug)]
struct Model {
    bytes: Vec<u8>,
    global: i64,
    table: Vec<i32>,
    dropped: bool,
}

impl Model {
    fn new() -> Self {
        Self { bytes: vec![0; FIRST * WASM_PAGE], global: 7, table: vec![0; 4], dropped: false }
    }
}

struct LiveState {
    session: Session,
    now: Model,
}

/// The session's contents, read through the guest and directly.
fn look(session: &mut Session) -> Model {
    let size = val(session, "size", &[]).unwrap() as usize;
    let mut bytes = vec![0; size * WASM_PAGE];
    session
        .with(|lease| {
            lease.as_module().unwrap().read_memory(0, &mut bytes).unwrap();
            Ok::<_, SessionError>(())
        })
        .unwrap();
    let global = val(session, "get", &[]).unwrap();
    let entries = val(session, "table_size", &[]).unwrap() as usize;
    let table = (0..entries).map(|at| val(session, "at", &ints([at])).unwrap() as i32).collect();
    // Whether the segment still exists shows only on use, so the model is checked elsewhere.
    Model { bytes, global, table, dropped: false }
}

fn everything(strategy: Strategy) -> Guest {
    let options = Options::new().wasm(GuestOptions {
        mode: Mode::Reset,
        strategy,
        ..GuestOptions::default()
    });
    Guest::from_bytes("everything", &wat::parse_str(EVERYTHING).unwrap(), &options).unwrap()
}

/// One random program.
fn program(guest: &Guest, seed: u64, steps: usize) {
    let mut random = Random(seed | 1);
    let session = guest.session().unwrap();
    let mut states: HashMap<SnapshotId, Model> = HashMap::from([(session.at(), Model::new())]);
    let mut ids = vec![session.at()];
    let mut all = vec![LiveState { session, now: Model::new() }];
    for step in 0..steps {
        let count = all.len();
        let which = random.below(count);
        let live = &mut all[which];
        let (session, now) = (&mut live.session, &mut live.now);
        match random.below(16) {
            0..=4 => {
                let at = random.below(now.bytes.len() - 1);
                let len = random.below(20_000).min(now.bytes.len() - at);
                let value = random.below(4);
                val(session, "fill", &ints([at, value, len])).unwrap();
                now.bytes[at..at + len].fill(value as u8);
            }
            5 => {
                let value = random.below(1 << 40) as i64;
                val(session, "set", &[Val::I64(value)]).unwrap();
                now.global = value * 2;
            }
            6 => {
                let (at, value) = (random.below(now.table.len()), random.below(3));
                val(session, "put", &ints([at, value])).unwrap();
                now.table[at] = value as i32;
            }
            7 if random.below(3) == 0 => {
                let pages = random.below(3);
                if val(session, "grow", &ints([pages])).unwrap() >= 0 {
                    now.bytes.resize(now.bytes.len() + pages * WASM_PAGE, 0);
                }
            }
            7 if random.below(2) == 0 => {
                let entries = random.below(4);
                if val(session, "grow_table", &ints([entries])).unwrap() >= 0 {
                    now.table.resize(now.table.len() + entries, 1);
                }
            }
            7 => {
                val(session, "drop", &[]).unwrap();
                now.dropped = true;
            }
            8 if !now.dropped => {
                val(session, "init", &[]).unwrap();
                now.bytes[100..105].copy_from_slice(b"hello");
            }
            8 => {
                // A segment that was dropped traps, and then only going back helps.
                assert!(val(session, "init", &[]).is_err());
                assert!(matches!(session.checkpoint("no"), Err(SessionError::Failed { .. })));
                let id = ids[random.below(ids.len())];
                if let Some(state) = states.get(&id) {
                    session.rollback(id).unwrap();
                    *now = state.clone();
                } else {
                    assert!(matches!(session.rollback(id), Err(SessionError::Tree(_))));
                    let (id, state) = states.iter().next().expect("one is left");
                    session.rollback(*id).unwrap();
                    *now = state.clone();
                }
            }
            9..=10 => {
                let id = session.checkpoint(format!("step {step}")).unwrap();
                states.insert(id, now.clone());
                ids.push(id);
            }
            11..=12 => {
                let id = ids[random.below(ids.len())];
                if random.below(4) == 0 {
                    let at = random.below(now.bytes.len() - 5000);
                    assert!(val(session, "trap", &ints([at])).is_err());
                    assert!(session.failed().is_some());
                    assert!(matches!(val(session, "size", &[]), Err(SessionError::Failed { .. })));
                    let to = states.contains_key(&id).then_some(id);
                    let to = to.unwrap_or_else(|| *states.keys().next().expect("one is left"));
                    session.rollback(to).unwrap();
                    *now = states[&to].clone();
                } else if let Some(state) = states.get(&id) {
                    session.rollback(id).unwrap();
                    *now = state.clone();
                } else {
                    assert!(matches!(session.rollback(id), Err(SessionError::Tree(_))));
                }
            }
            13 => {
                // A state that a fork makes is in the tree only while a session stands on it.
                let (forked, now) = (session.fork(2).unwrap(), now.clone());
                for session in forked {
                    let live = LiveState { session, now: now.clone() };
                    if all.len() < 5 {
                        all.push(live);
                    } else {
                        all[random.below(5)] = live;
                    }
                }
                continue;
            }
            14 if states.len() > 1 => {
                let id = ids[random.below(ids.len())];
                assert_eq!(session.drop_checkpoint(id).is_ok(), states.remove(&id).is_some());
            }
            _ => {
                let known: Vec<SnapshotId> = states.keys().copied().collect();
                let one = known[random.below(known.len())];
                let two = known[random.below(known.len())];
                let (first, second) = (&states[&one], &states[&two]);
                let shared = first.bytes.iter().zip(&second.bytes).filter(|(a, b)| a != b).count();
                let longer = if first.bytes.len() > second.bytes.len() { first } else { second };
                let beyond = &longer.bytes[first.bytes.len().min(second.bytes.len())..];
                let bytes = shared + beyond.iter().filter(|byte| **byte != 0).count();
                let found = session.diff(one, two).unwrap();
                assert_eq!(found.bytes, bytes);
                let besides = |model: &Model| (model.global, model.table.clone(), model.dropped);
                let same =
                    first.bytes.len() == second.bytes.len() && besides(first) == besides(second);
                assert_eq!(found.state, !same);
            }
        }
        let seen = look(&mut live.session);
        let expected = Model { dropped: false, ..live.now.clone() };
        assert!(seen == expected, "seed {seed}, step {step}, session {which}");
    }
    let transient = all[0].session.tree().into_iter().filter(|state| state.transient);
    for state in transient {
        assert!(all.iter().any(|live| live.session.at() == state.id), "seed {seed}, {state:?}");
    }
    for mut live in all {
        let expected = Model { dropped: false, ..live.now.clone() };
        assert!(look(&mut live.session) == expected, "seed {seed}, at the end");
        assert_eq!(val(&mut live.session, "init", &[]).is_err(), live.now.dropped);
    }
}

#[test]
fn every_state_is_what_a_plain_copy_says() {
    for strategy in [Strategy::Auto, Strategy::FullCopy, Strategy::Discard] {
        let guest = everything(strategy);
        let (seeds, steps) = if strategy == Strategy::Auto { (40, 200) } else { (2, 80) };
        for seed in 1..=seeds {
            program(&guest, 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed), steps);
        }
    }
}

#[test]
fn forks_of_forks_are_independent_and_share_one_tree() {
    let guest = everything(Strategy::Auto);
    let mut first = guest.session().unwrap();
    val(&mut first, "fill", &ints([0, 1, 10])).unwrap();
    first.checkpoint("one").unwrap();
    let mut second = first.fork(1).unwrap().remove(0);
    val(&mut second, "fill", &ints([0, 2, 10])).unwrap();
    let mut third = second.fork(1).unwrap().remove(0);
    val(&mut third, "fill", &ints([0, 3, 10])).unwrap();
    third.checkpoint("three").unwrap();
    for (session, byte) in [(&mut first, 1), (&mut second, 2), (&mut third, 3)] {
        assert_eq!(look(session).bytes[..10], [byte; 10]);
    }
    // Its checkpoint stays. The state that it began in leaves with the last session that stands on
    // it.
    drop(third);
    first.rollback("three").unwrap();
    assert_eq!(look(&mut first).bytes[..10], [3; 10]);
    second.rollback("one").unwrap();
    assert_eq!(look(&mut second).bytes[..10], [1; 10]);
    let tree = first.tree();
    assert_eq!(tree.len(), 3);
    assert!(tree[1..].iter().zip(&tree).all(|(child, parent)| child.parent == Some(parent.id)));
    assert_eq!(tree[1..].iter().map(|info| info.own_pages).collect::<Vec<_>>(), [1, 1]);
    let difference = first.diff("one", "three").unwrap();
    assert_eq!((difference.pages, difference.bytes, difference.state), (1, 10, false));
}

#[test]
fn forks_that_have_ended_leave_no_states_behind() {
    let guest = everything(Strategy::Auto);
    let mut session = guest.session().unwrap();
    for round in 0..10 {
        val(&mut session, "fill", &ints([0, round, 20_000])).unwrap();
        let mut fork = session.fork(1).unwrap().remove(0);
        val(&mut fork, "fill", &ints([0, round + 1, 20_000])).unwrap();
        let mark = fork.mark().unwrap();
        val(&mut fork, "fill", &ints([0, round + 2, 20_000])).unwrap();
        drop((fork, mark));
        assert!(session.tree().len() <= 2, "{:?}", session.tree());
    }
}

#[test]
fn a_rollback_finds_the_state_of_a_mark_that_a_relative_has_dropped() {
    let guest = everything(Strategy::Auto);
    let mut session = guest.session().unwrap();
    val(&mut session, "fill", &ints([0, 1, 10])).unwrap();
    let mark = session.mark().unwrap();
    let mut fork = session.fork(1).unwrap().remove(0);
    val(&mut session, "fill", &ints([0, 2, 10])).unwrap();
    fork.drop_checkpoint(&mark).unwrap();
    assert!(session.tree().iter().all(|state| state.id != mark.id()));
    let at = session.rollback(&mark).unwrap();
    assert_eq!(look(&mut session).bytes[..10], [1; 10]);
    assert!(session.tree().iter().any(|state| state.id == at && state.transient));
    // A mark of another tree means nothing here.
    let mut stranger = guest.session().unwrap();
    assert!(matches!(stranger.rollback(&mark), Err(SessionError::Tree(_))));
    assert_eq!(look(&mut stranger).bytes[..10], [0; 10]);
}

/// Runs without end, panics through a host function, requests random numbers.
const FRAGILE: &str = r#"(module
    (import "host" "panic" (func $panic))
    (import "afresh" "generation" (func $generation (result i64)))
    (memory 2)
    (func (export "afresh_reseed") (param i64 i64)
        (i64.store (i32.const 0) (local.get 0)) (i64.store (i32.const 8) (local.get 1)))
    (func (export "random") (result i64) (i64.load (i32.const 0)))
    (func (export "generation") (result i64) (call $generation))
    (func (export "store") (param i32) (i32.store (i32.const 5000) (local.get 0)))
    (func (export "load") (result i32) (i32.load (i32.const 5000)))
    (func (export "spin") (i32.store (i32.const 5000) (i32.const 99)) (loop $for_ever (br $for_ever)))
    (func (export "panic") (i32.store (i32.const 5000) (i32.const 99)) (call $panic)))"#;

fn fragile() -> Guest {
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "panic", || -> () { panic!("a host function's own") })?;
        Ok(())
    });
    let options = Options::new()
        .timeout(Duration::from_millis(400))
        .wasm(GuestOptions { imports, ..GuestOptions::default() });
    Guest::from_bytes("fragile", &wat::parse_str(FRAGILE).unwrap(), &options).unwrap()
}

#[test]
fn a_call_that_is_cut_short_fails_the_session_until_it_is_rolled_back() {
    let guest = fragile();
    let mut session = guest.session().unwrap();
    val(&mut session, "store", &ints([7])).unwrap();
    session.checkpoint("seven").unwrap();
    let late = session.invoke(&Call::text("spin", [] as [&str; 0]));
    assert!(matches!(late, Err(SessionError::Call(CallError::Timeout { .. }))), "{late:?}");
    assert!(matches!(session.fork(1), Err(SessionError::Failed { .. })));
    assert!(matches!(session.rollback("nowhere"), Err(SessionError::Tree(_))));
    assert!(session.failed().is_some(), "going nowhere heals nothing");
    session.rollback("seven").unwrap();
    assert_eq!(val(&mut session, "load", &[]).unwrap(), 7);

    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let unwound = catch_unwind(AssertUnwindSafe(|| val(&mut session, "panic", &[])));
    std::panic::set_hook(quiet);
    assert!(unwound.is_err());
    assert!(matches!(val(&mut session, "load", &[]), Err(SessionError::Failed { .. })));
    session.rollback("seven").unwrap();
    assert_eq!(val(&mut session, "load", &[]).unwrap(), 7);

    // A call that never began harms nothing.
    let wrong = session.invoke(&Call::text("no such thing", [] as [&str; 0]));
    assert!(matches!(wrong, Err(SessionError::Call(CallError::Request { .. }))));
    assert_eq!(val(&mut session, "load", &[]).unwrap(), 7);
}

#[test]
fn no_two_forks_and_no_two_tries_draw_the_same() {
    let guest = fragile();
    let mut session = guest.session().unwrap();
    val(&mut session, "store", &ints([1])).unwrap();
    session.checkpoint("here").unwrap();
    let mut draws = Vec::new();
    let mut draw = |session: &mut Session| {
        draws.push(val(session, "random", &[]).unwrap());
        draws.push(val(session, "generation", &[]).unwrap());
    };
    draw(&mut session);
    for fork in &mut session.fork(3).unwrap() {
        draw(fork);
        fork.rollback("here").unwrap();
        draw(fork);
    }
    let mut distinct = draws.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), draws.len(), "{draws:?}");
}

#[test]
fn a_saved_session_continues_elsewhere() {
    let guest = fragile();
    let mut session = guest.session().unwrap();
    val(&mut session, "store", &ints([42])).unwrap();
    session.checkpoint("before").unwrap();
    val(&mut session, "store", &ints([43])).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("session").display().to_string();
    session.save(&to.parse().unwrap(), &afresh::SaveOptions::new()).unwrap();
    session.rollback("before").unwrap();
    assert_eq!(val(&mut session, "load", &[]).unwrap(), 42);
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "panic", || {})?;
        Ok(())
    });
    let options = Options::new().wasm(GuestOptions { imports, ..GuestOptions::default() });
    let mut again = afresh::open(&to, &options).unwrap().session().unwrap();
    assert_eq!(val(&mut again, "load", &[]).unwrap(), 43);
    // A state of one guest is not valid in another.
    assert!(matches!(session.rollback(again.at()), Err(SessionError::Tree(_))));
}

#[test]
fn a_guest_without_sessions_reports_why() {
    let wasm = wat::parse_str("(module (memory 1))").unwrap();
    let options =
        Options::new().wasm(GuestOptions { mode: Mode::Fresh, ..GuestOptions::default() });
    let fresh = Guest::from_bytes("fresh", &wasm, &options).unwrap();
    assert!(matches!(fresh.session(), Err(SessionError::State(_))));
    let component = wat::parse_str("(component)").unwrap();
    let component = Guest::from_bytes("component", &component, &Options::new()).unwrap();
    assert!(matches!(component.session(), Err(SessionError::Guest(_))));
}

#[test]
fn sessions_move_between_threads_and_run_side_by_side() {
    let guest = everything(Strategy::Auto);
    let mut session = guest.session().unwrap();
    session.checkpoint("start").unwrap();
    let forks = session.fork(4).unwrap();
    std::thread::scope(|scope| {
        for (number, mut fork) in forks.into_iter().enumerate() {
            scope.spawn(move || {
                for turn in 0..20 {
                    val(&mut fork, "fill", &ints([turn * 3000, number + 1, 4000])).unwrap();
                    fork.checkpoint(format!("{number}")).unwrap();
                    if turn % 3 == 2 {
                        fork.rollback("start").unwrap();
                        assert!(look(&mut fork).bytes.iter().all(|byte| *byte == 0));
                    }
                }
            });
        }
    });
    assert_eq!(session.tree().len(), 2 + 4 * 20);
}

/// This process's proportional share of memory, in KiB.
fn pss_kib() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find(|line| line.starts_with("Pss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_fork_holds_its_writes_and_an_unused_one_holds_nothing() {
    // Other tests of this process would count as well.
    afresh_sys::run_isolated(
        "session::a_fork_holds_its_writes_and_an_unused_one_holds_nothing",
        || {
            const MIB: usize = 1 << 20;
            let wasm = wat::parse_str(
                r#"(module (memory 512)
            (func (export "fill") (param i32 i32 i32)
                (memory.fill (local.get 0) (local.get 1) (local.get 2)))
            (func (export "load") (param i32) (result i32) (i32.load8_u (local.get 0))))"#,
            );
            let guest = Guest::from_bytes("large", &wasm.unwrap(), &Options::new()).unwrap();
            let mut session = guest.session().unwrap();
            val(&mut session, "fill", &ints([0, 7, 24 * MIB])).unwrap();
            session.checkpoint("full").unwrap();
            let before = pss_kib();
            let idle = session.fork(1000).unwrap();
            let mut busy = session.fork(20).unwrap();
            for (number, fork) in busy.iter_mut().enumerate() {
                for page in 0..10 {
                    let at = (number + page * 100) * 4096;
                    val(fork, "fill", &ints([at, number, 1])).unwrap();
                    assert_eq!(val(fork, "load", &ints([at])).unwrap(), number as i64);
                    assert_eq!(val(fork, "load", &ints([at + 1])).unwrap(), 7);
                }
            }
            let each = pss_kib().saturating_sub(before) / busy.len();
            // 24 MiB are full; a full copy would hold them all again.
            assert!(each < 1024, "a fork holds {each} KiB");
            drop(idle);
        },
    );
}

#[test]
fn a_micro_vm_has_sessions_too() {
    let Some(dirty) = machine::find("dirty") else { return };
    let guest = afresh::open(dirty.display().to_string(), &Options::new().memory(4 << 20)).unwrap();
    let mut session = guest.session().unwrap();
    // Writes a word into each of the pages, and sums them up.
    let write = |session: &mut Session, value: u64| {
        session.call("", &words(&[1, 0, 20, 1, value])).unwrap();
    };
    let sum = |session: &mut Session| {
        let sum = session.call("", &words(&[2, 0, 20, 1])).unwrap();
        u64::from_le_bytes(sum.try_into().unwrap())
    };
    write(&mut session, 1);
    session.checkpoint("one").unwrap();
    write(&mut session, 2);
    let mut forks = session.fork(2).unwrap();
    write(&mut forks[0], 3);
    assert_eq!(sum(&mut forks[0]), 60);
    assert_eq!(sum(&mut forks[1]), 40);
    assert!(session.call("", &words(&[4, 8, 1])).is_err(), "it crashes");
    assert!(matches!(session.call("", &words(&[2, 0, 20, 1])), Err(SessionError::Failed { .. })));
    session.rollback("one").unwrap();
    assert_eq!(sum(&mut session), 20);
    forks[0].rollback("one").unwrap();
    assert_eq!(sum(&mut forks[0]), 20);
    assert!(session.diff("one", forks[1].at()).unwrap().pages >= 20);
}
