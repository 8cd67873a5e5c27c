//! Calls through a component's shim, before and after they are taken into the module that makes
//! them.

use afresh_rewrite::direct_calls;
use wasmtime::component::{Component, Linker};
use wasmtime::{Config, Engine, Store};

const THROUGH: &str = "local.get 0 local.get 1 i32.const SLOT call_indirect (type 0)";

/// A component as tools make them, whose shim has these two functions.
fn component(zero: &str, one: &str, more: &str) -> Vec<u8> {
    let text = format!(
        r#"(component
  (import "f" (func $f (param "s" string) (result u32)))
  (import "g" (func $g (param "s" string) (result u32)))
  (import "h" (func $h (result u32)))
  (core module $shim
    (type (func (param i32 i32) (result i32)))
    (table (export "$imports") 2 2 funcref)
    (func (export "0") (type 0) {zero})
    (func (export "1") (type 0) {one}))
  (core module $main
    (type (func (result i32)))
    (type $taker (func (param i32 i32) (result i32)))
    (import "host" "g" (func $g (type $taker)))
    (import "own" "h" (func $h (type 0)))
    (import "host" "f" (func $f (type $taker)))
    (memory (export "memory") 1)
    (table 4 funcref)
    (table $other 4 funcref)
    (elem (i32.const 0) $f $g $h $last)
    (data (i32.const 8) "abc")
    (func $first (result i32) (i32.const 7))
    (func (export "run") (param $which i32) (result i32)
      (block (block (block (block (block (block
        (br_table 0 1 2 3 4 5 (local.get $which)))
        (return (call $f (i32.const 8) (i32.const 2))))
        (return (call $g (i32.const 8) (i32.const 3))))
        (return (call $h)))
        (return (i32.add (call $first) (call $last))))
        (return (call_indirect (type $taker) (i32.const 8) (i32.const 1) (i32.const 0))))
      (i32.add
        (call_indirect (type $taker) (i32.const 8) (i32.const 3) (i32.const 1))
        (i32.mul (call_indirect (type 0) (i32.const 2)) (call_indirect (type 0) (i32.const 3)))))
    (func $last (result i32) (i32.const 11)))
  (core module $fixups
    (type (func (param i32 i32) (result i32)))
    (import "" "0" (func (type 0)))
    (import "" "1" (func (type 0)))
    (import "" "$imports" (table 2 2 funcref))
    (elem (i32.const 0) func 0 1))
  (core instance $s (instantiate $shim))
  (core func $h1 (canon lower (func $h)))
  (alias core export $s "0" (core func $s0))
  (alias core export $s "1" (core func $s1))
  (core instance $host (export "f" (func $s0)) (export "g" (func $s1)))
  (core instance $own (export "h" (func $h1)))
  (core instance $m (instantiate $main (with "host" (instance $host)) (with "own" (instance $own))))
  {more}
  (alias core export $m "memory" (core memory $memory))
  (alias core export $s "$imports" (core table $table))
  (core func $f1 (canon lower (func $f) (memory $memory)))
  (core func $g1 (canon lower (func $g) (memory $memory)))
  (core instance $fill (export "0" (func $f1)) (export "1" (func $g1)) (export "$imports" (table $table)))
  (core instance (instantiate $fixups (with "" (instance $fill))))
  (alias core export $m "run" (core func $run))
  (func (export "run") (param "which" u32) (result u32) (canon lift (core func $run))))"#
    );
    wat::parse_str(text).unwrap()
}

fn through(slot: u32) -> String {
    THROUGH.replace("SLOT", &slot.to_string())
}

/// The answers of its function to each question.
fn answers(wasm: &[u8]) -> Vec<u32> {
    let engine = Engine::new(&Config::new()).unwrap();
    let component = Component::new(&engine, wasm).unwrap();
    let mut linker = Linker::new(&engine);
    let mut root = linker.root();
    root.func_wrap("f", |_, (text,): (String,)| Ok((100 + text.len() as u32,))).unwrap();
    root.func_wrap("g", |_, (text,): (String,)| Ok((200 + text.len() as u32,))).unwrap();
    root.func_wrap("h", |_, ()| Ok((5u32,))).unwrap();
    let mut store = Store::new(&engine, ());
    let instance = linker.instantiate(&mut store, &component).unwrap();
    let run = instance.get_typed_func::<(u32,), (u32,)>(&mut store, "run").unwrap();
    (0..6).map(|which| run.call(&mut store, (which,)).unwrap().0).collect()
}

/// The imports of its modules, one after the other.
fn imports(wasm: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    for payload in wasmparser::Parser::new(0).parse_all(wasm) {
        if let wasmparser::Payload::ImportSection(section) = payload.unwrap() {
            let names = section.into_imports().map(|import| import.unwrap().module.to_owned());
            found.extend(names);
        }
    }
    found
}

#[test]
fn calls_through_a_shim_become_the_modules_own() {
    for (zero, one, expected) in
        [(0, 1, [102, 203, 5, 18, 101, 258]), (1, 0, [202, 103, 5, 18, 201, 158])]
    {
        let before = component(&through(zero), &through(one), "");
        let after = direct_calls(&before);
        assert_eq!(answers(&before), expected);
        assert_eq!(answers(&after), expected);
        assert_eq!(imports(&before), ["host", "own", "host", "", "", ""]);
        assert_eq!(imports(&after), ["own", "afresh:shim", "", "", ""]);
        assert_eq!(direct_calls(&after), after, "there is nothing left to do");
    }
}

#[test]
fn in_a_component_within_a_component_too() {
    let inner = component(&through(0), &through(1), "");
    let mut outer = wasm_encoder::Component::new();
    outer.section(&wasm_encoder::RawSection { id: 4, data: &inner });
    let after = direct_calls(&outer.finish());
    assert_eq!(imports(&after), ["own", "afresh:shim", "", "", ""]);
    wasmparser::Validator::new().validate_all(&after).unwrap();
}

#[test]
fn other_functions_than_shims_stay_unchanged() {
    let twice = "(core instance (instantiate $main (with \"host\" (instance $host)) (with \"own\" (instance $own))))";
    let swapped = "local.get 1 local.get 0 i32.const 0 call_indirect (type 0)";
    let with_more = [
        format!("nop {}", through(0)),
        format!("(local i32) {}", through(0)),
        format!("{} i32.const 1 i32.add", through(0)),
        swapped.to_owned(),
        "i32.const 1".to_owned(),
    ];
    let mut others: Vec<_> =
        with_more.iter().map(|zero| component(zero, &through(1), "")).collect();
    others.push(component(&through(0), &through(1), twice));
    for other in others {
        assert_eq!(direct_calls(&other), other);
    }
    assert_eq!(direct_calls(b"no component"), b"no component");
}

#[test]
fn modules_that_others_can_instantiate_stay_as_they_are() {
    let shared = [
        // An inner component instantiates it with other arguments.
        r#"(component
            (alias outer 1 $main (core module $again))
            (core module $given
                (func (export "f") (param i32 i32) (result i32) (i32.const 1))
                (func (export "h") (result i32) (i32.const 1)))
            (core instance $g (instantiate $given))
            (alias core export $g "f" (core func $f))
            (core instance $host (export "f" (func $f)) (export "g" (func $f)))
            (core instance (instantiate $again (with "host" (instance $host)) (with "own" (instance $g)))))"#,
        r#"(component (component (alias outer 2 $main (core module))))"#,
        r#"(component $taker (import "m" (core module
                (import "host" "g" (func (param i32 i32) (result i32)))
                (import "own" "h" (func (result i32)))
                (import "host" "f" (func (param i32 i32) (result i32))))))
           (instance (instantiate $taker (with "m" (core module $main))))"#,
        r#"(instance (export "m" (core module $main)))"#,
        r#"(export "m" (core module $main))"#,
    ];
    for more in shared {
        let before = component(&through(0), &through(1), more);
        wasmparser::Validator::new().validate_all(&before).unwrap();
        assert_eq!(direct_calls(&before), before, "{more}");
        assert_eq!(answers(&before), [102, 203, 5, 18, 101, 258]);
    }
}

#[test]
fn damaged_components_never_panic() {
    let component = component(&through(0), &through(1), "");
    let mut changed = 0;
    for at in 0..component.len() {
        for byte in [0, 1, 4, 0x7f, 0x80, 0xff] {
            let mut damaged = component.clone();
            damaged[at] = byte;
            changed += u32::from(direct_calls(&damaged) != damaged);
        }
    }
    assert!(changed > 50, "{changed} changed");
}
