//! A guest on every system: it starts pristine, traps at its limits, and is the same after a
//! snapshot was saved and loaded. `cargo xtask portable` runs it over the portable backend.

use std::time::{Duration, Instant};

use afresh_pager::Options;
use afresh_store::Store;
use afresh_sys::PORTABLE;
use afresh_wasm::{
    CallError, Engine, EngineConfig, Frozen, Guest, GuestOptions, Mode, SnapshotOptions, Val, Warm,
    WarmUp,
};

const GUEST: &str = r#"(module
    (memory (export "memory") 2 16)
    (global $calls (mut i32) (i32.const 0))
    (func (export "warm")
        (global.set $calls (i32.const 40))
        (i32.store (i32.const 4096) (i32.const 7))
        (drop (memory.grow (i32.const 1)))
        (i32.store (i32.const 135168) (i32.const 35)))
    (func (export "step") (result i32)
        (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
        (i32.store (i32.const 4096) (i32.add (i32.load (i32.const 4096)) (i32.const 1)))
        (i32.store (i32.const 100000) (i32.add (i32.load (i32.const 100000)) (i32.const 1)))
        (drop (memory.grow (i32.const 2)))
        (i32.store (i32.const 262144) (i32.add (i32.load (i32.const 262144)) (i32.const 1)))
        (i32.add (i32.add (global.get $calls) (memory.size))
            (i32.add (i32.load (i32.const 4096))
                (i32.add (i32.load (i32.const 100000))
                    (i32.add (i32.load (i32.const 262144)) (i32.load (i32.const 135168)))))))
    (func (export "load") (param $at i32) (result i32) (i32.load (local.get $at)))
    (func (export "divide") (param $by i32) (result i32)
        (i32.store (i32.const 8) (i32.const 1))
        (i32.div_s (i32.const 1) (local.get $by)))
    (func $deep (export "deep") (param $n i32) (result i32)
        (i32.add (call $deep (i32.add (local.get $n) (i32.const 1))) (i32.const 1)))
    (func (export "spin") (loop $again (br $again))))"#;

fn options(mode: Mode) -> GuestOptions {
    let timeout = Some(Duration::from_millis(200));
    GuestOptions { mode, timeout, ..GuestOptions::default() }
}

fn warm(engine: &Engine, mode: Mode) -> Warm {
    let guest = Guest::with_options(engine, &wat::parse_str(GUEST).unwrap(), options(mode));
    guest.unwrap().warm(WarmUp::new().call("warm", &[])).unwrap()
}

fn call(warm: &Warm, name: &str, values: &[Val]) -> Result<Vec<Val>, CallError> {
    warm.lease().unwrap().call(name, values)
}

/// Each call of `step` finds the warm state, also after calls that trap.
fn check(warm: &Warm) {
    // 41 calls, 5 pages, 8, 1, 1 and 35.
    let step = || assert_eq!(call(warm, "step", &[]).unwrap()[0].unwrap_i32(), 91);
    step();
    step();
    assert_eq!(call(warm, "load", &[Val::I32(135_168)]).unwrap()[0].unwrap_i32(), 35);
    // Beyond the end, also where another call had grown the memory.
    for at in [3 << 16, (3 << 16) - 1, 262_144, i32::MAX, -1] {
        assert!(matches!(call(warm, "load", &[Val::I32(at)]), Err(CallError::Trap { .. })), "{at}");
    }
    assert!(call(warm, "divide", &[Val::I32(0)]).is_err());
    assert!(call(warm, "deep", &[Val::I32(0)]).is_err());
    let start = Instant::now();
    assert!(call(warm, "spin", &[]).is_err());
    assert!(start.elapsed() >= Duration::from_millis(100));
    step();
    assert_eq!(warm.differences().unwrap(), (0, 0));
    assert!(warm.compare().unwrap().is_clean());
}

#[test]
fn every_call_starts_warm_and_so_does_every_call_of_a_loaded_snapshot() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for mode in [Mode::Reset, Mode::Fresh] {
        let first = warm(&engine, mode);
        let strategy = &first.report().strategy;
        assert_eq!(strategy.starts_with("full-copy"), PORTABLE, "{strategy}");
        check(&first);
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path()).unwrap();
        first.freeze().unwrap().save(&store, "a", &SnapshotOptions::default()).unwrap();
        let frozen = Frozen::load(store.load("a").unwrap(), &Options::default()).unwrap();
        check(&Warm::thaw(&engine, &options(mode), &frozen).unwrap());
    }
}

#[test]
fn features_of_linux_alone_are_refused_with_the_reason() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let store = Store::create(directory.path()).unwrap();
    let frozen = warm(&engine, Mode::Reset).freeze().unwrap();
    frozen.save(&store, "a", &SnapshotOptions::default()).unwrap();
    let recorded = Frozen::record(store.load("a").unwrap());
    assert_eq!(recorded.is_err(), PORTABLE);
    if let Err(error) = recorded {
        assert!(error.to_string().contains("Linux"), "{error}");
    }
    let strategy = afresh_memory::Strategy::Reprotect;
    let options = GuestOptions { strategy, ..GuestOptions::default() };
    let guest = Guest::with_options(&engine, &wat::parse_str(GUEST).unwrap(), options).unwrap();
    if PORTABLE {
        let error = guest.warm(WarmUp::new()).unwrap_err().to_string();
        assert!(error.contains("only Linux"), "{error}");
    }
}
