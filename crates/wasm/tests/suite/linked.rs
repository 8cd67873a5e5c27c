//! Guests of several modules: one exports a memory, a table and globals, and another imports them.

use afresh_wasm::wasmtime::{self, Caller, Extern, Linker};
use afresh_wasm::{
    Engine, EngineConfig, Guest, GuestOptions, Host, Imports, LoadError, Mode, Val, Warm, WarmUp,
};

const LIBRARY: &str = r#"(module
    (import "host" "look" (func $look (param i32) (result i32)))
    (memory (export "memory") 1 16)
    (table (export "table") 4 16 funcref)
    (global (export "count") (mut i32) (i32.const 0))
    (data (i32.const 0) "library")
    (func (export "look") (param i32) (result i32) (call $look (local.get 0)))
    (func (export "_initialize") (i32.store8 (i32.const 32) (i32.const 1))))"#;

const PROGRAM: &str = r#"(module
    (import "library" "memory" (memory 1))
    (import "library" "table" (table $t 4 16 funcref))
    (import "library" "count" (global $count (mut i32)))
    (import "library" "look" (func $look (param i32) (result i32)))
    (data (i32.const 64) "program")
    (elem declare func $secret)
    (global $own (mut i32) (i32.const 0))
    (func $secret (result i32) (i32.const 42))
    (func (export "warm")
        (global.set $count (i32.const 5))
        (i32.store (i32.const 128) (i32.const 7)))
    (func (export "plant") (param i32)
        (global.set $count (local.get 0))
        (global.set $own (local.get 0))
        (i32.store (i32.const 128) (local.get 0))
        (table.set $t (i32.const 2) (ref.func $secret))
        (if (i32.lt_s (local.get 0) (i32.const 0))
            (then
                (drop (memory.grow (i32.const 1)))
                (drop (table.grow $t (ref.func $secret) (i32.const 1)))
                (i32.store (i32.const 70000) (local.get 0))))
        (if (i32.eq (local.get 0) (i32.const -2)) (then (unreachable))))
    (func (export "traces") (result i32)
        (i32.add
            (i32.add (global.get $count) (global.get $own))
            (i32.add
                (i32.add (i32.load (i32.const 128)) (call $look (i32.const 128)))
                (i32.add
                    (i32.mul (i32.const 1000) (i32.eqz (ref.is_null (table.get $t (i32.const 2)))))
                    (i32.mul (i32.const 10000)
                        (i32.add (memory.size) (i32.add (table.size $t) (i32.load8_u (i32.const 32))))))))))"#;

/// The sum after the warm-up: 5, 0, 7 twice, and sizes of 1 and 4, plus the state that the
/// library's initialisation left.
const PRISTINE: i32 = 5 + 7 + 7 + 60_000;

fn options(mode: Mode) -> GuestOptions {
    let imports = Imports::new(|linker: &mut Linker<Host>| {
        let look = |mut caller: Caller<'_, Host>, at: i32| {
            let memory = caller.get_export("memory").and_then(Extern::into_memory);
            let memory = memory.ok_or_else(|| wasmtime::Error::msg("no memory"))?;
            wasmtime::Result::Ok(i32::from(memory.data(&caller)[at as usize]))
        };
        linker.func_wrap("host", "look", look)?;
        Ok(())
    });
    GuestOptions { mode, imports, ..GuestOptions::default() }
}

fn traces(warm: &Warm) -> i32 {
    match warm.lease().unwrap().call("traces", &[]).unwrap()[..] {
        [Val::I32(traces)] => traces,
        _ => panic!("`traces` gives a number"),
    }
}

#[test]
fn nothing_of_a_call_stays_in_any_of_linked_modules() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let (library, program) = (wat::parse_str(LIBRARY).unwrap(), wat::parse_str(PROGRAM).unwrap());
    for mode in [Mode::Reset, Mode::Fresh] {
        let modules = [("library", &library[..]), ("program", &program[..])];
        let guest = Guest::linked(&engine, &modules, options(mode)).unwrap();
        let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
        assert_eq!(warm.report().mode, mode);
        assert_eq!(traces(&warm), PRISTINE, "{mode:?}");
        for planted in [1, -1, -2, 77, -2, -1] {
            let mut lease = warm.lease().unwrap();
            let outcome = lease.call("plant", &[Val::I32(planted)]);
            assert_eq!(outcome.is_err(), planted == -2);
            let [Val::I32(seen)] = lease.call("traces", &[]).unwrap()[..] else { panic!() };
            assert_ne!(seen, PRISTINE);
            drop(lease);
            assert!(warm.compare().unwrap().is_clean(), "{mode:?} {planted}");
            assert_eq!(traces(&warm), PRISTINE, "{mode:?} {planted}");
        }
    }
}

#[test]
fn a_module_without_those_that_it_imports_from_is_refused_and_linked_it_is_not() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let program = wat::parse_str(PROGRAM).unwrap();
    let alone = Guest::with_options(&engine, &program, options(Mode::Auto)).unwrap();
    let error = alone.warm(WarmUp::new()).unwrap_err().to_string();
    assert!(error.contains("library.memory") && error.contains("Guest::linked"), "{error}");
    let modules = [("other", &program[..]), ("program", &program[..])];
    let guest = Guest::linked(&engine, &modules, options(Mode::Auto));
    // No module has the name that they import from, so the host would have to provide it.
    assert!(guest.unwrap().warm(WarmUp::new()).is_err());
    let modules = [("library", &program[..]), ("program", &program[..])];
    let error = Guest::linked(&engine, &modules, options(Mode::Auto)).unwrap_err();
    assert!(matches!(error, LoadError::Modules(_)), "{error}");
}
