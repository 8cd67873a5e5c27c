//! Fresh mode: features that reset mode refuses, and components.

use afresh_wasm::{
    CallOptions, Engine, EngineConfig, Guest, GuestOptions, Mode, Val, WarmError, WarmUp,
};
use wasmtime::component::Val as ComponentVal;

fn engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

#[test]
fn a_module_that_changes_gc_objects_runs_fresh_and_its_memory_comes_from_slots() {
    let wat = r#"(module
        (type $box (struct (field (mut i32))))
        (memory 1)
        (data (i32.const 0) "\07\00\00\00")
        (global $kept (mut (ref null $box)) (ref.null $box))
        (func (export "bump") (result i32)
            (if (ref.is_null (global.get $kept))
                (then (global.set $kept (struct.new $box (i32.const 0)))))
            (struct.set $box 0 (global.get $kept)
                (i32.add (struct.get $box 0 (global.get $kept)) (i32.const 1)))
            (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (i32.const 1)))
            (i32.add (struct.get $box 0 (global.get $kept)) (i32.load (i32.const 0)))))"#;
    let wasm = wat::parse_str(wat).unwrap();
    let engine = engine();
    let guest = Guest::new(&engine, &wasm).unwrap();
    let warm = guest.warm(WarmUp::new()).unwrap();
    assert_eq!(warm.report().mode, Mode::Fresh);
    assert!(warm.report().why_fresh.as_ref().unwrap().contains("struct.set"));
    for _ in 0..5 {
        let mut lease = warm.lease().unwrap();
        assert!(matches!(lease.call("bump", &[]).unwrap()[..], [Val::I32(9)]));
    }
    assert_eq!(warm.pool_stats().created, 1);
    let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
    let refused = Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new());
    assert!(matches!(refused, Err(WarmError::Refused { .. })));
}

const COMPONENT: &str = r#"(component
    (core module $a
        (memory (export "memory") 1)
        (data (i32.const 0) "\05\00\00\00")
        (global $n (mut i32) (i32.const 0))
        (func (export "bump") (result i32)
            (global.set $n (i32.add (global.get $n) (i32.const 1)))
            (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (i32.const 1)))
            (i32.add (global.get $n) (i32.load (i32.const 0)))))
    (core module $b
        (memory 1)
        (data (i32.const 0) "\64\00\00\00")
        (func (export "peek") (result i32) (i32.load (i32.const 0))))
    (core instance $b (instantiate $b))
    (core instance $a (instantiate $a))
    (func (export "bump") (result u32) (canon lift (core func $a "bump")))
    (func (export "peek") (result u32) (canon lift (core func $b "peek"))))"#;

#[test]
fn each_lease_of_a_component_starts_from_its_data_in_the_right_memory() {
    let wasm = wat::parse_str(COMPONENT).unwrap();
    let guest = Guest::new(&engine(), &wasm).unwrap();
    assert!(guest.is_component());
    let warm = guest.warm_component().unwrap();
    for _ in 0..5 {
        let mut lease = warm.lease().unwrap();
        assert_eq!(lease.differences().unwrap(), 0);
        assert_eq!(lease.call("bump", &[]).unwrap(), [ComponentVal::U32(7)]);
        assert_eq!(lease.call("peek", &[]).unwrap(), [ComponentVal::U32(100)]);
        assert!(lease.differences().unwrap() > 0);
        assert!(lease.call("nothing", &[]).is_err());
    }
    assert_eq!(warm.pool_stats().created, 1);
    assert!(guest.warm(WarmUp::new()).is_err());
}

#[test]
fn a_reactor_that_cannot_be_kept_warm_is_initialised_each_time() {
    let wat = r#"(module
        (import "wasi_snapshot_preview1" "sched_yield" (func (result i32)))
        (type $box (struct (field (mut i32))))
        (global $n (mut i32) (i32.const 0))
        (func (export "_initialize") (global.set $n (i32.const 3)))
        (func (export "touch") (struct.set $box 0 (struct.new $box (i32.const 0)) (i32.const 1)))
        (func (export "look") (result i32)
            (global.set $n (i32.add (global.get $n) (i32.const 1))) (global.get $n)))"#;
    let wasm = wat::parse_str(wat).unwrap();
    let options = GuestOptions { mode: Mode::Fresh, ..GuestOptions::default() };
    let warm = Guest::with_options(&engine(), &wasm, options).unwrap().warm(WarmUp::new()).unwrap();
    for _ in 0..3 {
        let look = warm.lease().unwrap().call("look", &[]).unwrap();
        assert!(matches!(look[..], [Val::I32(4)]), "{look:?}");
    }
}

#[test]
fn a_component_runs_on_an_engine_that_counts_fuel_and_within_its_limit() {
    let config = EngineConfig { fuel: true, ..EngineConfig::default() };
    let engine = Engine::new(config).unwrap();
    let wasm = wat::parse_str(COMPONENT).unwrap();
    for (fuel, works) in [(None, true), (Some(1_000_000), true), (Some(1), false)] {
        let options = GuestOptions { fuel, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, &wasm, options).unwrap();
        let warm = guest.warm_component().unwrap();
        let answer = warm.lease().unwrap().call("bump", &[]);
        assert_eq!(answer.is_ok(), works, "{fuel:?}: {answer:?}");
    }
}

#[test]
fn the_fuel_of_a_call_does_not_reach_the_next_call_of_a_component() {
    let engine = Engine::new(EngineConfig { fuel: true, ..EngineConfig::default() }).unwrap();
    let wasm = wat::parse_str(COMPONENT).unwrap();
    let warm = Guest::new(&engine, &wasm).unwrap().warm_component().unwrap();
    let mut lease = warm.lease().unwrap();
    let limits = lease.set_limits(&CallOptions::new().fuel(1000)).unwrap();
    lease.call("bump", &[]).unwrap();
    lease.restore_limits(limits);
    for call in 0..1000 {
        let answer = lease.call("bump", &[]);
        assert!(answer.is_ok(), "call {call}: {answer:?}");
    }
}
