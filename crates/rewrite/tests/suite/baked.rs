//! A warm instance's state, written into a new module.

use crate::common::{engine, start, start_prepared, wat};
use afresh_rewrite::{BakeError, PrepareError, PrepareOptions, WarmState, bake, prepare};
use wasmtime::{Module, Val};

fn bakeable() -> PrepareOptions {
    PrepareOptions { restorable: false, bakeable: true, ..PrepareOptions::default() }
}

const GUEST: &str = r#"(module
    (type $f (func (result i32)))
    (memory (export "memory") 1 5)
    (global $i (export "counter") (mut i32) (i32.const 1))
    (global $fixed i64 (i64.const 7))
    (global $d (mut f64) (f64.const 0))
    (global $v (mut v128) (v128.const i64x2 0 0))
    (global $r (mut funcref) (ref.null func))
    (global $t (mut (ref $f)) (ref.func $one))
    (global $e (mut externref) (ref.null extern))
    (table $plain (export "table") 4 funcref)
    (table $still 2 funcref)
    (table $typed 2 (ref $f) (ref.func $one))
    (elem (table $plain) (i32.const 1) func $one)
    (elem (table $still) (i32.const 0) func $two $one)
    (elem $p func $two $three)
    (data $d1 "warm") (data $d2 "kept") (data (i32.const 32) "active")
    (func $one (type $f) (i32.const 1))
    (func $two (type $f) (i32.const 2))
    (func $three (type $f) (i32.const 3))
    (func $start (global.set $i (i32.add (global.get $i) (i32.const 1))))
    (start $start)
    (func (export "warm")
        (global.set $i (i32.add (global.get $i) (i32.const 40)))
        (global.set $d (f64.const 2.5))
        (global.set $v (v128.const i64x2 3 4))
        (global.set $r (ref.func $three))
        (global.set $t (ref.func $two))
        (table.init $plain $p (i32.const 2) (i32.const 0) (i32.const 2))
        (drop (table.grow $plain (ref.func $two) (i32.const 3)))
        (table.set $plain (i32.const 5) (ref.null func))
        (table.set $typed (i32.const 1) (ref.func $three))
        (drop (memory.grow (i32.const 1)))
        (memory.init $d1 (i32.const 0) (i32.const 0) (i32.const 4))
        (data.drop $d1) (elem.drop $p))
    (func (export "state") (result i32 i64 f64 i64 i32 i32 i32 i32 i32 i32 i32 i32)
        (global.get $i) (global.get $fixed) (global.get $d)
        (i64x2.extract_lane 1 (global.get $v))
        (ref.is_null (global.get $r)) (call_ref $f (global.get $t))
        (memory.size) (table.size $plain)
        (call_indirect $plain (type $f) (i32.const 3))
        (ref.is_null (table.get $plain (i32.const 5)))
        (call_indirect $typed (type $f) (i32.const 1))
        (call_indirect $still (type $f) (i32.const 0)))
    (func (export "d1") (memory.init $d1 (i32.const 0) (i32.const 0) (i32.const 1)))
    (func (export "d2") (data.drop $d2)
        (memory.init $d2 (i32.const 0) (i32.const 0) (i32.const 1)))
    (func (export "d2-first") (memory.init $d2 (i32.const 0) (i32.const 0) (i32.const 1)))
    (func (export "p") (table.init $plain $p (i32.const 0) (i32.const 0) (i32.const 1)))
    (func (export "keep") (param externref) (global.set $e (local.get 0))))"#;

#[test]
fn a_baked_module_starts_warm() {
    let engine = engine();
    let (prepared, mut warm) = start_prepared(&engine, GUEST, &bakeable());
    warm.call("warm", &[]).expect("no trap");
    let before = format!("{:?}", warm.call("state", &[]));
    assert!(before.starts_with("Ok([I32(42)"), "the start function ran once: {before}");
    let state = warm.warm_state(&prepared);
    assert_eq!(state.dropped_data.iter().copied().collect::<Vec<_>>(), [0]);
    assert_eq!(state.dropped_elements.iter().copied().collect::<Vec<_>>(), [2]);
    let baked = bake(&prepared, &state).expect("has a constant form");
    let memories = warm.memories(1);
    for _ in 0..2 {
        let mut run = start(&engine, &baked).expect("a valid module");
        assert!(run.memories(1)[0].iter().all(|&byte| byte == 0), "the image holds all data");
        assert!(run.set_memories(&memories), "the memory has its warm size");
        assert_eq!(before, format!("{:?}", run.call("state", &[])));
        run.call("d1", &[]).expect_err("dropped in the warm-up");
        run.call("p", &[]).expect_err("dropped in the warm-up");
        run.call("d2-first", &[]).expect("not dropped");
        run.call("d2", &[]).expect_err("dropped just now");
    }
}

#[test]
fn a_baked_module_exports_the_original_and_no_machinery() {
    let (prepared, mut warm) = start_prepared(&engine(), GUEST, &bakeable());
    let state = warm.warm_state(&prepared);
    let baked = bake(&prepared, &state).expect("has a constant form");
    let names = |wasm: &[u8]| -> Vec<String> {
        let module = Module::new(&engine(), wasm).expect("valid");
        module.exports().map(|export| export.name().to_owned()).collect()
    };
    let mut expected = names(&wat(GUEST));
    expected.push("afresh:memory:0".into());
    assert_eq!(names(&baked), expected);
}

#[test]
fn restore_and_bake_agree() {
    let engine = engine();
    let options = PrepareOptions { bakeable: true, ..PrepareOptions::default() };
    let (prepared, mut warm) = start_prepared(&engine, GUEST, &options);
    warm.call("warm", &[]).expect("no trap");
    warm.save();
    let state = warm.warm_state(&prepared);
    warm.call("d2", &[]).expect_err("dropped just now");
    assert_ne!(state, warm.warm_state(&prepared));
    assert_eq!(warm.restore(), 0);
    assert_eq!(state, warm.warm_state(&prepared));
}

#[test]
fn a_state_without_constant_form_is_refused_with_the_reason() {
    let engine = engine();
    let (prepared, mut warm) = start_prepared(&engine, GUEST, &bakeable());
    let host = wasmtime::ExternRef::new(&mut warm.store, 1).expect("room in the GC heap");
    warm.call("keep", &[Val::ExternRef(Some(host))]).expect("no trap");
    let error = bake(&prepared, &warm.warm_state(&prepared)).expect_err("holds a host object");
    assert!(matches!(error, BakeError::OpaqueGlobal { global: 6 }), "{error}");

    let error = bake(&prepared, &WarmState::default()).expect_err("nothing was read");
    assert!(error.to_string().contains("memory 0"), "{error}");
    let plain = prepare(&wat(GUEST), &PrepareOptions::default()).expect("restorable");
    let error = bake(&plain, &WarmState::default()).expect_err("shows nothing");
    assert!(matches!(error, BakeError::NotBakeable), "{error}");
}

#[test]
fn a_module_that_changes_gc_objects_is_refused() {
    let text = r#"(module (type $s (struct (field (mut i32))))
        (global $g (ref $s) (struct.new $s (i32.const 0)))
        (func (export "warm") (struct.set $s 0 (global.get $g) (i32.const 1))))"#;
    let error = prepare(&wat(text), &bakeable()).expect_err("the change would be lost");
    assert!(matches!(error, PrepareError::NotBakeable(_)), "{error}");
}

#[test]
fn references_to_imported_functions_and_tables_written_by_the_host_are_baked() {
    let text = r#"(module (type $f (func (result i32)))
        (import "env" "h" (func $h (type $f)))
        (table (export "t") 4 funcref) (elem (i32.const 0) $one) (elem declare func $h)
        (func $one (export "one") (type $f) (i32.const 1))
        (func (export "warm") (table.set (i32.const 1) (ref.func $h)))
        (func (export "call") (param i32) (result i32) (call_indirect (type $f) (local.get 0))))"#;
    let engine = engine();
    let (prepared, mut warm) = start_prepared(&engine, text, &bakeable());
    warm.call("warm", &[]).expect("no trap");
    let (table, one) = (warm.table("t"), warm.func("one"));
    table.set(&mut warm.store, 3, one.into()).expect("in bounds");
    let baked = bake(&prepared, &warm.warm_state(&prepared)).expect("has a constant form");
    let mut run = start(&engine, &baked).expect("a valid module");
    assert_eq!(run.int_of("call", &[0]), Ok(1));
    assert_eq!(run.int_of("call", &[1]), Ok(77));
    assert_eq!(run.int_of("call", &[3]), Ok(1));
    run.int_of("call", &[2]).expect_err("still null");

    let host = wasmtime::Func::wrap(&mut warm.store, || 5);
    table.set(&mut warm.store, 2, host.into()).expect("in bounds");
    let error = bake(&prepared, &warm.warm_state(&prepared)).expect_err("not its own function");
    assert!(matches!(error, BakeError::OpaqueElement { table: 0, element: 2 }), "{error}");
}
