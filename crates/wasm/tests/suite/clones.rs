//! Clones of a warmed component: entropy and generations.

use afresh_wasm::wasmtime::component::Val;
use afresh_wasm::{
    Engine, EngineConfig, Guest, GuestOptions, LeaseOptions, WarmComponent, WarmError, WarmUp,
};

/// A generator that its warm-up seeds, and `HOOK` for the hook that seeds it again.
const DRAWS: &str = r#"(component
    (import "afresh:host/clones@0.1.0" (instance $clones
        (export "generation" (func (result u64)))
        (export "entropy" (func (result (tuple u64 u64))))))
    (core module $memory (memory (export "memory") 1))
    (core instance $memory (instantiate $memory))
    (core func $generation (canon lower (func $clones "generation")))
    (core func $entropy (canon lower (func $clones "entropy") (memory (core memory $memory "memory"))))
    (core module $M
        (import "m" "memory" (memory 1))
        (import "c" "generation" (func $generation (result i64)))
        (import "c" "entropy" (func $entropy (param i32)))
        (global $seed (mut i64) (i64.const 1)) (global $calls (mut i32) (i32.const 0))
        (func (export "warm") (global.set $seed (i64.const 7)))
        (func (export "reseed") (param i64 i64)
            (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
            (global.set $seed (i64.xor (local.get 0) (local.get 1))))
        (func (export "draw") (result i64)
            (global.set $seed (i64.mul (global.get $seed) (i64.const 6364136223846793005)))
            (global.get $seed))
        (func (export "calls") (result i32) (global.get $calls))
        (func (export "generation") (result i64) (call $generation))
        (func (export "entropy") (result i64) (call $entropy (i32.const 8)) (i64.load (i32.const 8))))
    (core instance $m (instantiate $M
        (with "m" (instance $memory))
        (with "c" (instance
            (export "generation" (func $generation)) (export "entropy" (func $entropy))))))
    HOOK
    (func (export "warm") (canon lift (core func $m "warm")))
    (func (export "draw") (result u64) (canon lift (core func $m "draw")))
    (func (export "calls") (result u32) (canon lift (core func $m "calls")))
    (func (export "generation") (result u64) (canon lift (core func $m "generation")))
    (func (export "entropy") (result u64) (canon lift (core func $m "entropy"))))"#;

const HOOK: &str = r#"(func (export "afresh-reseed") (param "lo" u64) (param "hi" u64)
    (canon lift (core func $m "reseed")))"#;

fn warm(hook: &str) -> Result<WarmComponent, WarmError> {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let wasm = wat::parse_str(DRAWS.replace("HOOK", hook)).unwrap();
    let guest = Guest::with_options(&engine, &wasm, GuestOptions::default()).unwrap();
    guest.warm_component_with(&WarmUp::new().call_component("warm", &[]))
}

fn ask(warm: &WarmComponent, name: &str) -> [Vec<Val>; 2] {
    let mut lease = warm.lease().unwrap();
    [lease.call(name, &[]).unwrap(), lease.call(name, &[]).unwrap()]
}

#[test]
fn clones_of_a_component_take_fresh_entropy() {
    let without = warm("").unwrap();
    assert!(!without.reseeds());
    assert_eq!(ask(&without, "draw"), ask(&without, "draw"));

    let with = warm(HOOK).unwrap();
    assert!(with.reseeds());
    let (one, other) = (ask(&with, "draw"), ask(&with, "draw"));
    assert!(one.iter().all(|draw| !other.contains(draw)), "{one:?} {other:?}");
    // Once for each clone, and not in the warm state.
    let once = vec![Val::U32(1)];
    assert_eq!(ask(&with, "calls"), [once.clone(), once.clone()]);
    let mut owned = with.lease_owned(&LeaseOptions::new()).unwrap();
    assert_eq!(owned.call("calls", &[]).unwrap(), once);
    assert!(with.compare().unwrap().is_clean());

    let frozen = with.freeze().unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let thawed = WarmComponent::thaw(&engine, &GuestOptions::default(), &frozen).unwrap();
    assert!(!other.contains(&ask(&thawed, "draw")[0]));
    assert_eq!(ask(&thawed, "calls")[0], once);
}

#[test]
fn components_read_a_generation_of_each_clone_and_entropy_of_each_call() {
    let warm = warm("").unwrap();
    let ([one, again], [other, _]) = (ask(&warm, "generation"), ask(&warm, "generation"));
    assert_eq!(one, again);
    assert_ne!(one, other);
    let ([one, again], [other, _]) = (ask(&warm, "entropy"), ask(&warm, "entropy"));
    assert!(one != again && one != other && again != other);
}

#[test]
fn a_hook_of_another_type_is_refused_when_the_component_is_warmed() {
    let hook = r#"(func (export "afresh-reseed") (canon lift (core func $m "warm")))"#;
    let error = warm(hook).unwrap_err();
    assert!(matches!(&error, WarmError::Call { name, .. } if name == "afresh-reseed"), "{error}");
}
