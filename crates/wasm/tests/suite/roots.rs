//! Only the declared exports can be called: changes by others are not restored.

use afresh_wasm::wasmtime::Caller;
use afresh_wasm::{
    CallError, Engine, EngineConfig, Guest, GuestOptions, Host, Imports, Mode, Roots, Val, Warm,
    WarmError, WarmUp,
};

/// `count` writes state that no other function touches; `taken` is reachable through the table
/// alone.
const GUEST: &str = r#"(module
    (import "host" "call" (func $host (param i32) (result i64)))
    (type $number (func (result i64)))
    (memory (export "memory") 1)
    (table (export "table") 1 funcref)
    (elem (i32.const 0) $taken)
    (global $n (mut i64) (i64.const 0))
    (global $t (mut i64) (i64.const 0))
    (global $s (mut i64) (i64.const 0))
    (global $b (mut i32) (i32.const 0))
    (func $count (export "count") (result i64)
        (global.set $n (i64.add (global.get $n) (i64.const 1)))
        (global.get $n))
    (func $taken (result i64)
        (global.set $t (i64.add (global.get $t) (i64.const 1)))
        (global.get $t))
    (func (export "look") (result i64) (global.get $n))
    (func (export "entropy") (result i64) (global.get $s))
    (func (export "buffers") (param i32) (result i64) (i64.extend_i32_u (global.get $b)))
    (func (export "afresh_reseed") (param i64 i64)
        (global.set $s (i64.add (global.get $s) (i64.const 1))))
    (func (export "afresh_buffer") (param i32) (result i32)
        (global.set $b (i32.add (global.get $b) (i32.const 1)))
        (i32.const 64))
    (func $start (global.set $n (i64.add (global.get $n) (i64.const 100))))
    (start $start)
    (func (export "ask") (param i32) (result i64) (call $host (local.get 0))))"#;

/// A host function that calls back: an export by name, the table's first element, or the start
/// function.
fn calls_back() -> Imports {
    Imports::new(|linker| {
        linker.func_wrap("host", "call", |mut caller: Caller<'_, Host>, how: i32| {
            let func = match how {
                0 => caller.get_export("count").and_then(|e| e.into_func()),
                1 => caller.get_export("table").and_then(|e| e.into_table()).and_then(|table| {
                    table.get(&mut caller, 0).and_then(|e| e.unwrap_func().copied())
                }),
                _ => caller.get_export("afresh:start").and_then(|e| e.into_func()),
            };
            let Some(func) = func else { return Ok(-1) };
            let mut results = vec![Val::I64(0); func.ty(&caller).results().len()];
            func.call(&mut caller, &[], &mut results)?;
            Ok(results.first().and_then(Val::i64).unwrap_or(0))
        })?;
        Ok(())
    })
}

fn warm_as(mode: Mode, roots: &[&str], warm_up: WarmUp) -> Result<Warm, WarmError> {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let roots = Roots::Named(roots.iter().map(|&name| name.to_owned()).collect());
    let options = GuestOptions { mode, roots, imports: calls_back(), ..GuestOptions::default() };
    let wasm = wat::parse_str(GUEST).unwrap();
    Guest::with_options(&engine, &wasm, options).unwrap().warm(warm_up)
}

fn number(warm: &Warm, name: &str, arguments: &[Val]) -> Result<i64, CallError> {
    Ok(warm.lease().unwrap().call(name, arguments)?[0].unwrap_i64())
}

#[test]
fn an_export_outside_the_roots_is_refused_by_name() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = warm_as(mode, &["look"], WarmUp::new()).unwrap();
        assert_eq!(warm.report().mode, mode);
        let error = number(&warm, "count", &[]).unwrap_err();
        assert!(matches!(&error, CallError::NotARoot { name, .. } if name == "count"), "{error}");
        assert!(error.to_string().contains("look"), "{error}");
        assert!(matches!(warm.entry::<(), i64>("count"), Err(CallError::NotARoot { .. })));
        assert!(matches!(warm.bytes_entry("ask"), Err(CallError::NotARoot { .. })));
        let error = number(&warm, "cuont", &[]).unwrap_err();
        assert!(matches!(error, CallError::NoSuchExport { .. }), "{error}");
        assert_eq!(number(&warm, "look", &[]).unwrap(), 100);
        let error = warm_as(mode, &["lok"], WarmUp::new()).unwrap_err().to_string();
        assert!(error.contains("\"lok\"") && error.contains("look"), "{error}");
    }
}

#[test]
fn the_warm_up_may_call_any_export_and_calls_start_from_its_state() {
    let warm = warm_as(Mode::Reset, &["look"], WarmUp::new().call("count", &[])).unwrap();
    for _ in 0..3 {
        assert_eq!(number(&warm, "look", &[]).unwrap(), 101);
    }
}

#[test]
fn writes_of_host_hooks_are_reset() {
    let warm = warm_as(Mode::Reset, &["entropy", "buffers"], WarmUp::new()).unwrap();
    for _ in 0..5 {
        assert_eq!(number(&warm, "entropy", &[]).unwrap(), 1);
    }
    let buffers = warm.bytes_entry("buffers").unwrap();
    for _ in 0..5 {
        let mut lease = warm.lease().unwrap();
        // The answer's length is the count.
        assert_eq!(lease.call_bytes(&buffers, b"x").unwrap().len(), 1);
    }
}

#[test]
fn a_host_function_cannot_call_what_the_roots_do_not_reach() {
    let warm = warm_as(Mode::Reset, &["ask", "look"], WarmUp::new().call("ask", &[Val::I32(0)]));
    // Before the state was saved, the host could.
    let warm = warm.unwrap();
    assert_eq!(number(&warm, "look", &[]).unwrap(), 101);
    for round in 0..3 {
        if round == 2 {
            // A new instance has its exports sealed as well.
            warm.lease().unwrap().discard();
        }
        for how in [0, 2] {
            let error = number(&warm, "ask", &[Val::I32(how)]).unwrap_err();
            let unreachable = afresh_wasm::wasmtime::Trap::UnreachableCodeReached;
            assert!(
                matches!(&error, CallError::Trap { trap, .. } if *trap == unreachable),
                "{how}: {error}"
            );
        }
        assert_eq!(number(&warm, "look", &[]).unwrap(), 101);
        // The analysis follows functions in tables.
        assert_eq!(number(&warm, "ask", &[Val::I32(1)]).unwrap(), 1);
    }
    assert_eq!(warm.lease().unwrap().differences().unwrap().1, 1, "the reseeding alone");
}

#[test]
fn a_table_that_a_host_function_wrote_or_grew_comes_back() {
    let wat = r#"(module
        (import "host" "write" (func $write (param i32)))
        (memory 1)
        (table (export "table") 2 8 funcref)
        (elem (i32.const 0) $one)
        (func $one (result i32) (i32.const 1))
        (func $two (export "two") (result i32) (i32.const 2))
        (func (export "write") (param i32) (call $write (local.get 0)))
        (func (export "size") (result i32) (table.size 0))
        (func (export "first") (result i32) (call_indirect (result i32) (i32.const 0))))"#;
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "write", |mut caller: Caller<'_, Host>, grow: i32| {
            let two = caller.get_export("two").and_then(|e| e.into_func());
            let table = caller.get_export("table").and_then(|e| e.into_table()).unwrap();
            table.set(&mut caller, 0, two.into())?;
            table.grow(&mut caller, grow as u64, two.into())?;
            Ok(())
        })?;
        Ok(())
    });
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { mode: Mode::Reset, imports, ..GuestOptions::default() };
    let wasm = wat::parse_str(wat).unwrap();
    let warm = Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new()).unwrap();
    let number = |lease: &mut afresh_wasm::Lease<'_>, name: &str| {
        lease.call(name, &[]).unwrap()[0].unwrap_i32()
    };
    for (round, grow) in [0, 0, 3, 0].into_iter().enumerate() {
        let mut lease = warm.lease().unwrap();
        assert_eq!((number(&mut lease, "first"), number(&mut lease, "size")), (1, 2), "{round}");
        lease.call("write", &[Val::I32(grow)]).unwrap();
        assert_eq!((number(&mut lease, "first"), number(&mut lease, "size")), (2, 2 + grow));
        drop(lease);
        assert!(warm.compare().unwrap().is_clean(), "{round}");
    }
    assert_eq!(warm.growth_stats().0, 1);
}

#[test]
fn an_export_of_a_component_outside_the_roots_is_refused_by_name() {
    let wasm = wat::parse_str(
        r#"(component
            (core module $m
                (global $n (mut i32) (i32.const 6))
                (func (export "step") (global.set $n (i32.add (global.get $n) (i32.const 2))))
                (func (export "sum") (result i32) (global.get $n)))
            (core instance $i (instantiate $m))
            (func (export "step") (canon lift (core func $i "step")))
            (func (export "sum") (result u32) (canon lift (core func $i "sum"))))"#,
    )
    .unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let warm_for = |roots: &[&str]| {
        let roots = Roots::Named(roots.iter().map(|&name| name.to_owned()).collect());
        let options = GuestOptions { roots, ..GuestOptions::default() };
        let up = WarmUp::new().call_component("step", &[]);
        Guest::with_options(&engine, &wasm, options).unwrap().warm_component_with(&up)
    };
    let warm = warm_for(&["sum"]).unwrap();
    let mut lease = warm.lease().unwrap();
    let error = lease.call("step", &[]).unwrap_err();
    assert!(matches!(&error, CallError::NotARoot { name, .. } if name == "step"), "{error}");
    assert!(error.to_string().contains("sum"), "{error}");
    let error = lease.call_text("setp", &[]).unwrap_err();
    assert!(matches!(error, CallError::NoSuchExport { .. }), "{error}");
    assert_eq!(lease.call_text("sum", &[]).unwrap(), "8");
    let error = warm_for(&["smu"]).unwrap_err().to_string();
    assert!(error.contains("\"smu\"") && error.contains("sum"), "{error}");
}
