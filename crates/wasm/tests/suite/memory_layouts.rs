//! Every memory gets its own content, for every order, every declaration, and every heap that
//! wasmtime allocates itself.

use std::fmt::Write;

use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Imports, Mode, Val, WarmUp};
use arbitrary::Unstructured;
use wasmtime::component::Val as ComponentVal;

fn engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

/// A component of one memory that holds `value`, with `name` to read and `name-add` to add to it.
fn holder(name: &str, value: u8) -> String {
    format!(
        r#"(component ${name}
            (core module $m
                (memory (export "memory") 1)
                (data (i32.const 0) "\{value:02x}\00\00\00")
                (func (export "read") (result i32) (i32.load (i32.const 0)))
                (func (export "add") (param i32) (result i32)
                    (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
                    (i32.load (i32.const 0))))
            (core instance $i (instantiate $m))
            (func (export "read") (result u32) (canon lift (core func $i "read")))
            (func (export "add") (param "by" u32) (result u32) (canon lift (core func $i "add"))))"#
    )
}

/// Calls every function of `calls` in separate leases, twice, and all in one lease.
fn answers(component: &str, calls: &[(&str, u32)]) {
    let wasm = wat::parse_str(component).unwrap();
    let engine = engine();
    let warm = Guest::new(&engine, &wasm).unwrap().warm_component().unwrap();
    for _ in 0..2 {
        for (name, wanted) in calls {
            let answer = warm.lease().unwrap().call(name, &[]).unwrap();
            assert!(
                matches!(answer[..], [ComponentVal::U32(n)] if n == *wanted),
                "{name}: {answer:?}"
            );
        }
    }
    let mut lease = warm.lease().unwrap();
    for (name, wanted) in calls {
        let answer = lease.call(name, &[]).unwrap();
        assert!(matches!(answer[..], [ComponentVal::U32(n)] if n == *wanted), "{name}: {answer:?}");
    }
    assert_eq!(lease.differences().unwrap(), 0);
}

#[test]
fn nested_components_get_their_own_data() {
    let component = format!(
        r#"(component
            {} {}
            (instance $b (instantiate $b))
            (instance $a (instantiate $a))
            (func (export "a") (alias export $a "read"))
            (func (export "b") (alias export $b "read")))"#,
        holder("a", 100),
        holder("b", 7)
    );
    answers(&component, &[("a", 100), ("b", 7)]);
}

#[test]
fn a_component_that_is_instantiated_twice_has_two_memories_of_the_same_data() {
    let component = format!(
        r#"(component
            {} {}
            (instance $a1 (instantiate $a))
            (instance $b (instantiate $b))
            (instance $a2 (instantiate $a))
            (func (export "add1") (alias export $a1 "add"))
            (func (export "a1") (alias export $a1 "read"))
            (func (export "a2") (alias export $a2 "read"))
            (func (export "b") (alias export $b "read")))"#,
        holder("a", 100),
        holder("b", 7)
    );
    answers(&component, &[("a1", 100), ("a2", 100), ("b", 7)]);
    let wasm = wat::parse_str(&component).unwrap();
    let warm = Guest::new(&engine(), &wasm).unwrap().warm_component().unwrap();
    for _ in 0..3 {
        let mut lease = warm.lease().unwrap();
        let mut call =
            |name: &str, arguments: &[ComponentVal]| match lease.call(name, arguments).unwrap()[..]
            {
                [ComponentVal::U32(n)] => n,
                _ => panic!("{name} answers with something else"),
            };
        assert_eq!(call("add1", &[ComponentVal::U32(5)]), 105);
        assert_eq!((call("a1", &[]), call("a2", &[]), call("b", &[])), (105, 100, 7));
    }
}

#[test]
fn components_and_modules_that_come_in_by_alias_or_argument_get_their_own_data() {
    let component = format!(
        r#"(component
            {} {}
            (core module $plain
                (memory 1 2)
                (data (i32.const 0) "\21\00\00\00")
                (func (export "read") (result i32) (i32.load (i32.const 0))))
            (component $outer
                (alias outer 1 $b (component $mine))
                (alias outer 1 $plain (core module $core))
                (import "given" (component $given (export "read" (func (result u32)))))
                (core instance $p (instantiate $core))
                (instance $g (instantiate $given))
                (instance $m (instantiate $mine))
                (func (export "given") (alias export $g "read"))
                (func (export "mine") (alias export $m "read"))
                (func (export "plain") (result u32) (canon lift (core func $p "read"))))
            (instance $o (instantiate $outer (with "given" (component $a))))
            (instance $first (instantiate $b))
            (func (export "first") (alias export $first "read"))
            (func (export "given") (alias export $o "given"))
            (func (export "mine") (alias export $o "mine"))
            (func (export "plain") (alias export $o "plain")))"#,
        holder("a", 100),
        holder("b", 7)
    );
    answers(&component, &[("given", 100), ("mine", 7), ("plain", 33), ("first", 7)]);
}

#[test]
fn a_component_with_a_gc_heap_and_memories_without_a_page_gets_its_own_data() {
    let component = r#"(component
        (core module $gc
            (type $box (struct (field i32)))
            (memory $none 0)
            (memory $one 1)
            (data (memory $one) (i32.const 4) "\2a\00\00\00")
            (global $kept (ref $box) (struct.new $box (i32.const 1)))
            (func (export "read") (result i32)
                (drop (memory.grow $none (i32.const 1)))
                (i32.store $none (i32.const 0) (i32.const 5))
                (i32.add (i32.load $none (i32.const 0))
                    (i32.add (struct.get $box 0 (global.get $kept))
                        (i32.load $one (i32.const 4))))))
        (core instance $i (instantiate $gc))
        (func (export "read") (result u32) (canon lift (core func $i "read"))))"#;
    let wasm = wat::parse_str(component).unwrap();
    let warm = Guest::new(&engine(), &wasm).unwrap().warm_component().unwrap();
    for _ in 0..3 {
        let answer = warm.lease().unwrap().call("read", &[]).unwrap();
        assert!(matches!(answer[..], [ComponentVal::U32(48)]), "{answer:?}");
    }
}

/// A module whose objects live on wasmtime's own heap, in addition to `memories`; `read` looks at
/// the last.
fn gc_module(memories: &str, last: u32) -> Vec<u8> {
    let text = format!(
        r#"(module
            (type $box (struct (field (mut i32))))
            {memories}
            (func (export "warm")
                (drop (memory.grow {last} (i32.const 1)))
                (i32.store {last} (i32.const 8) (i32.const 40)))
            (func (export "read") (result i32)
                (i32.add (struct.get $box 0 (struct.new $box (i32.const 2)))
                    (i32.load {last} (i32.const 8))))
            (func (export "spoil") (result i32)
                (i32.store {last} (i32.const 8) (i32.const 1000))
                (i32.load {last} (i32.const 8))))"#
    );
    wat::parse_str(text).unwrap()
}

#[test]
fn the_gc_heap_never_takes_the_place_of_a_memory() {
    let engine = engine();
    for (memories, last) in [
        ("(memory 0)", 0),
        ("(memory 1) (data (i32.const 0) \"x\")", 0),
        ("(memory 0) (memory 0 3)", 1),
        ("(memory 0 4) (memory 1) (memory 0)", 2),
        ("(memory i64 0)  (memory 0)", 1),
    ] {
        let wasm = gc_module(memories, last);
        for mode in [Mode::Reset, Mode::Fresh] {
            let options = GuestOptions { mode, ..GuestOptions::default() };
            let guest = Guest::with_options(&engine, &wasm, options).unwrap();
            let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
            for _ in 0..4 {
                let mut lease = warm.lease().unwrap();
                let read = lease.call("read", &[]).unwrap();
                assert!(matches!(read[..], [Val::I32(42)]), "{memories}, {mode:?}: {read:?}");
                lease.call("spoil", &[]).unwrap();
            }
        }
    }
}

#[test]
fn an_instantiation_inside_an_instantiation_takes_nothing_of_the_outer_one() {
    // Fresh mode without a warm-up keeps the start function of a module that cannot be baked, and
    // the start function calls a host function that makes an instance of another guest.
    let engine = engine();
    let inner = wat::parse_str(
        r#"(module (memory 1) (data (i32.const 0) "\07") (func (export "read") (result i32)
            (i32.load (i32.const 0))))"#,
    )
    .unwrap();
    let inner = Guest::new(&engine, &inner).unwrap().warm(WarmUp::new()).unwrap();
    let raw = wasmtime::Module::new(
        engine.wasmtime(),
        wat::parse_str("(module (memory 1) (memory 1))").unwrap(),
    )
    .unwrap();
    let imports = Imports::new(move |linker| {
        let (inner, raw) = (inner.clone(), raw.clone());
        linker.func_wrap("host", "nested", move || {
            let mut store = wasmtime::Store::new(raw.engine(), ());
            wasmtime::Instance::new(&mut store, &raw, &[]).unwrap();
            match inner.lease_new().unwrap().call("read", &[]).unwrap()[..] {
                [Val::I32(n)] => n,
                _ => panic!("no number"),
            }
        })?;
        Ok(())
    });
    let outer = wat::parse_str(
        r#"(module
            (import "host" "nested" (func $nested (result i32)))
            (type $box (struct (field (mut i32))))
            (global $b (mut (ref null $box)) (ref.null $box))
            (memory 1) (memory 1)
            (data (i32.const 0) "\64")
            (data (memory 1) (i32.const 0) "\65")
            (func $start
                (global.set $b (struct.new $box (i32.const 0)))
                (struct.set $box 0 (global.get $b) (call $nested)))
            (start $start)
            (func (export "read") (result i32)
                (i32.add (i32.mul (i32.load8_u (i32.const 0)) (i32.const 10000))
                    (i32.add (i32.mul (i32.load8_u 1 (i32.const 0)) (i32.const 10))
                        (struct.get $box 0 (global.get $b))))))"#,
    )
    .unwrap();
    let options = GuestOptions { imports, mode: Mode::Fresh, ..GuestOptions::default() };
    let warm = Guest::with_options(&engine, &outer, options).unwrap().warm(WarmUp::new()).unwrap();
    for _ in 0..3 {
        let read = warm.lease().unwrap().call("read", &[]).unwrap();
        assert!(matches!(read[..], [Val::I32(1_001_017)]), "{read:?}");
    }
}

#[test]
fn many_alike_components_keep_their_data_apart() {
    let mut component = String::from("(component ");
    let mut calls = Vec::new();
    for n in 0..12u8 {
        component += &holder(&format!("c{n}"), n + 1);
    }
    // In another order than the one in the binary.
    for n in [5, 3, 11, 0, 7, 2, 9, 1, 10, 4, 8, 6u8] {
        let _ = write!(component, "(instance $i{n} (instantiate $c{n}))");
    }
    for n in 0..12u8 {
        let _ = write!(component, "(func (export \"read{n}\") (alias export $i{n} \"read\"))");
        calls.push((format!("read{n}"), u32::from(n) + 1));
    }
    component.push(')');
    let calls: Vec<(&str, u32)> = calls.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    answers(&component, &calls);
}

/// A random module with GC types and several memories, some without a page.
fn random_module(seed: u64) -> Option<Vec<u8>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let bytes: Vec<u8> = (0..8000)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect();
    let config = wasm_smith::Config {
        bulk_memory_enabled: true,
        reference_types_enabled: true,
        gc_enabled: !seed.is_multiple_of(4),
        memory64_enabled: seed.is_multiple_of(16),
        exceptions_enabled: false,
        threads_enabled: false,
        relaxed_simd_enabled: false,
        custom_page_sizes_enabled: false,
        wide_arithmetic_enabled: false,
        shared_everything_threads_enabled: false,
        max_imports: 0,
        min_funcs: 3,
        max_funcs: 8,
        max_memories: 4,
        max_memory32_bytes: 1 << 18,
        max_memory64_bytes: 1 << 18,
        max_tables: 2,
        max_table_elements: 20,
        max_data_segments: 6,
        max_instructions: 80,
        min_exports: 4,
        allow_start_export: true,
        ..wasm_smith::Config::default()
    };
    let mut input = Unstructured::new(&bytes);
    let mut module = wasm_smith::Module::new(config, &mut input).ok()?;
    module.ensure_termination(100).ok()?;
    Some(module.to_bytes())
}

/// Bytes that a memory, or the heap for GC objects, may grow to: random arrays are as large as they
/// can be.
const MAX_MEMORY: usize = 8 << 20;

/// The part of a result that is the same in every instance.
fn show(result: Option<Vec<Val>>) -> String {
    let Some(values) = result else { return "trapped".to_owned() };
    let shown = values.iter().map(|value| match value.ref_() {
        Some(reference) => format!("null: {}", reference.is_null()),
        None => format!("{value:?}"),
    });
    shown.collect::<Vec<_>>().join(" ")
}

#[test]
fn random_modules_warm_and_do_what_new_instances_do() {
    let engine = engine();
    let mut tried = 0;
    for seed in 0..60 {
        let Some(wasm) = random_module(seed) else { continue };
        // The result of wasmtime itself, on its own memories.
        let mut config = wasmtime::Config::new();
        config.wasm_gc(true).wasm_function_references(true).wasm_exceptions(true);
        config.wasm_memory64(true).wasm_tail_call(true);
        let plain = wasmtime::Engine::new(&config).unwrap();
        let Ok(module) = wasmtime::Module::new(&plain, &wasm) else { continue };
        let new = || {
            let limits = wasmtime::StoreLimitsBuilder::new().memory_size(MAX_MEMORY).build();
            let mut store = wasmtime::Store::new(&plain, limits);
            store.limiter(|limits| limits);
            wasmtime::Instance::new(&mut store, &module, &[]).map(|instance| (store, instance))
        };
        if new().is_err() {
            continue;
        }
        for mode in [Mode::Auto, Mode::Fresh] {
            let options =
                GuestOptions { mode, memory_limit: MAX_MEMORY, ..GuestOptions::default() };
            let guest = Guest::with_options(&engine, &wasm, options).unwrap();
            let warm = guest
                .warm(WarmUp::new())
                .unwrap_or_else(|error| panic!("seed {seed}, {mode:?}: {error}"));
            for export in module.exports() {
                let Some(ty) = export.ty().func().cloned() else { continue };
                let arguments: Option<Vec<Val>> =
                    ty.params().map(|ty| Val::default_for_ty(&ty)).collect();
                let Some(arguments) = arguments else { continue };
                let (mut store, instance) = new().unwrap();
                let function = instance.get_func(&mut store, export.name()).unwrap();
                let mut results = vec![Val::I32(0); ty.results().len()];
                let result = function.call(&mut store, &arguments, &mut results);
                let wanted = show(result.is_ok().then_some(results));
                for round in 0..2 {
                    let mut lease = warm.lease().unwrap();
                    assert_eq!(lease.differences().unwrap(), (0, 0), "seed {seed}, {mode:?}");
                    let answer = show(lease.call(export.name(), &arguments).ok());
                    assert_eq!(answer, wanted, "seed {seed}, {mode:?}, {}, {round}", export.name());
                }
            }
        }
        tried += 1;
    }
    assert!(tried > 20, "only {tried} modules could be tried");
}
