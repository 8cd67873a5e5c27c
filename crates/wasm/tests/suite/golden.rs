//! Version 1 of the state, frozen: a snapshot that was written when the version began opens for
//! ever, and its state is written today byte for byte as then.
//!
//! `tests/golden/state-1.afresh` is never written again. A change that makes these tests fail needs
//! a new version, a second golden, and code that still reads this one. `AFRESH_WRITE_GOLDEN=1`
//! writes a golden that is missing.

use std::path::{Path, PathBuf};

use afresh_pager::Options;
use afresh_store::{Store, archive};
use afresh_wasm::{
    Engine, EngineConfig, Frozen, Guest, GuestOptions, Mode, SnapshotOptions, Val, Warm, WarmUp,
};

/// Memory, globals of each type, a table, and segments that are dropped or not take part in the
/// answer.
const GUEST: &str = r#"(module
    (memory (export "memory") 1)
    (global $i (mut i32) (i32.const 1))
    (global $l (mut i64) (i64.const 2))
    (global $f (mut f32) (f32.const 3))
    (global $d (mut f64) (f64.const 4))
    (global $v (mut v128) (v128.const i64x2 5 6))
    (table $t 3 funcref)
    (type $op (func (param i64) (result i64)))
    (func $twice (type $op) (i64.mul (local.get 0) (i64.const 2)))
    (func $thrice (type $op) (i64.mul (local.get 0) (i64.const 3)))
    (elem $gone func $twice $thrice)
    (data $kept "passive")
    (data $dropped "dropped")
    (func (export "warm")
        (table.init $t $gone (i32.const 0) (i32.const 0) (i32.const 2))
        (elem.drop $gone)
        (memory.init $dropped (i32.const 8) (i32.const 0) (i32.const 7))
        (data.drop $dropped)
        (drop (memory.grow (i32.const 1)))
        (i64.store (i32.const 65536) (i64.const 700))
        (global.set $i (i32.const 10))
        (global.set $l (i64.const 20))
        (global.set $f (f32.const 30))
        (global.set $d (f64.const 40))
        (global.set $v (v128.const i64x2 50 60)))
    (func (export "answer") (result i64)
        (memory.init $kept (i32.const 16) (i32.const 0) (i32.const 7))
        (i64.add (i64.extend_i32_u (i32.load8_u (i32.const 16)))
        (i64.add (i64.extend_i32_u (i32.load8_u (i32.const 8)))
        (i64.add (i64.extend_i32_u (memory.size))
        (i64.add (i64.load (i32.const 65536))
        (i64.add (i64.extend_i32_u (global.get $i))
        (i64.add (call_indirect $t (type $op) (global.get $l) (i32.const 1))
        (i64.add (i64.trunc_f32_s (global.get $f))
        (i64.add (i64.trunc_f64_s (global.get $d))
            (i64x2.extract_lane 1 (global.get $v))))))))))))"#;
/// `p` and `d`, two pages, and then what the warm-up set.
const ANSWER: i64 = 112 + 100 + 2 + 700 + 10 + 3 * 20 + 30 + 40 + 60;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/state-1.afresh")
}

fn engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

/// Writes the golden, if it is missing and this is asked for.
fn write() {
    if golden().exists() || std::env::var_os("AFRESH_WRITE_GOLDEN").is_none() {
        return;
    }
    let guest = Guest::new(&engine(), &wat::parse_str(GUEST).unwrap()).unwrap();
    let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    warm.freeze().unwrap().save(&store, "golden", &SnapshotOptions::default()).unwrap();
    archive::export(&store.load("golden").unwrap(), &golden(), Some("golden")).unwrap();
}

#[test]
fn a_snapshot_of_state_1_opens_and_is_written_as_it_was() {
    write();
    let engine = engine();
    let snapshot = archive::open(&golden()).unwrap();
    assert_eq!(snapshot.guest().engine, "afresh-wasm state 1");
    let frozen = Frozen::load(snapshot, &Options::default()).unwrap();
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let warm = Warm::thaw(&engine, &options, &frozen).unwrap();
        for _ in 0..2 {
            let mut lease = warm.lease().unwrap();
            assert!(matches!(lease.call("answer", &[]).unwrap()[..], [Val::I64(ANSWER)]));
        }
        let again = warm.freeze().unwrap().timeless_bytes().unwrap();
        assert!(again == frozen.timeless_bytes().unwrap(), "{mode:?}: the state has another form");
    }
}
