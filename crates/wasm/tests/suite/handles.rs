//! Entries and references are usable only where they come from; segments that the warm-up dropped
//! are dropped in every instance.

use afresh_sys::planted::{self, Bug};
use afresh_wasm::wasmtime::{Func, Trap};
use afresh_wasm::{
    CallError, Engine, EngineConfig, Frozen, Guest, GuestOptions, LoadError, Mode, Roots, Val,
    Warm, WarmError, WarmUp,
};

fn warm(wat: &str, mode: Mode, warm_up: WarmUp) -> Warm {
    let wasm = wat::parse_str(wat).unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { mode, ..GuestOptions::default() };
    Guest::with_options(&engine, &wasm, options).unwrap().warm(warm_up).unwrap()
}

#[test]
fn an_entry_of_another_guest_calls_nothing() {
    let one = r#"(module (memory 1) (global $n (mut i32) (i32.const 0))
        (func (export "harmless") (result i32) (global.set $n (i32.const 1)) (i32.const 1)))"#;
    let other = r#"(module (memory 1) (global $n (mut i32) (i32.const 0))
        (func (export "delete_all") (result i32) (global.set $n (i32.const 1)) (i32.const 666)))"#;
    for mode in [Mode::Reset, Mode::Fresh] {
        let (one, other) = (warm(one, mode, WarmUp::new()), warm(other, mode, WarmUp::new()));
        let harmless = one.entry::<(), i32>("harmless").unwrap();
        let delete_all = other.entry::<(), i32>("delete_all").unwrap();
        for _ in 0..2 {
            assert_eq!(other.lease().unwrap().invoke(&delete_all, ()).unwrap(), 666);
            let error = other.lease().unwrap().invoke(&harmless, ()).unwrap_err();
            assert!(error.to_string().contains("\"harmless\" belongs to another"), "{error}");
        }
        // A clone of the guest is the same guest.
        assert_eq!(one.clone().lease().unwrap().invoke(&harmless.clone(), ()).unwrap(), 1);
    }
}

#[test]
fn a_reference_of_another_instance_is_an_error() {
    let wat = r#"(module (memory 1) (table $t 1 4 funcref) (elem declare func $f)
        (func $f (export "f"))
        (func (export "give") (result funcref) (ref.func $f))
        (func (export "grow") (drop (table.grow $t (ref.null func) (i32.const 1))))
        (func (export "take") (param funcref) (result i32) (ref.is_null (local.get 0))))"#;
    for mode in [Mode::Reset, Mode::Fresh] {
        let (one, other) = (warm(wat, mode, WarmUp::new()), warm(wat, mode, WarmUp::new()));
        let mut lease = one.lease().unwrap();
        let given = lease.call("give", &[]).unwrap();
        assert!(matches!(lease.call("take", &given).unwrap()[..], [Val::I32(0)]), "{mode:?}");
        let take = other.entry::<Option<Func>, i32>("take").unwrap();
        for _ in 0..2 {
            let mut foreign = other.lease().unwrap();
            let error = foreign.call("take", &given).unwrap_err();
            assert!(matches!(error, CallError::Arguments { .. }), "{mode:?}: {error}");
            assert!(foreign.invoke(&take, given[0].unwrap_funcref().copied()).is_err());
        }
        // The instance that it is of is replaced, because its table grew.
        lease.call("grow", &[]).unwrap();
        drop(lease);
        let error = one.lease().unwrap().call("take", &given).unwrap_err();
        assert!(matches!(error, CallError::Arguments { .. }), "{mode:?}: {error}");
        let wrong = one.lease().unwrap().call("take", &[Val::I32(1)]).unwrap_err();
        assert!(matches!(wrong, CallError::Arguments { .. }), "{mode:?}: {wrong}");
    }
}

/// Its warm-up drops segments that calls read.
const DROPS: &str = r#"(module
    (memory 1)
    (table $t 4 8 funcref)
    (data $text "passive text")
    (elem $functions func $f $f)
    (func $f)
    (func (export "warm") (data.drop $text) (elem.drop $functions))
    (func (export "text") (memory.init $text (i32.const 0) (i32.const 0) (i32.const 1)))
    (func (export "empty") (memory.init $text (i32.const 0) (i32.const 0) (i32.const 0)))
    (func (export "functions")
        (table.init $t $functions (i32.const 0) (i32.const 0) (i32.const 1)))
    (func (export "grow") (drop (table.grow $t (ref.null func) (i32.const 1))))
    (func (export "drop") (data.drop $text) (elem.drop $functions)))"#;

fn reads_trap(warm: &Warm, which: &str) {
    let expect = |name: &str, expected: Trap| {
        let error = warm.lease().unwrap().call(name, &[]).unwrap_err();
        let trap = match &error {
            CallError::Trap { trap, .. } => *trap,
            _ => panic!("{which}, {name}: {error}"),
        };
        assert_eq!(trap, expected, "{which}, {name}");
    };
    expect("text", Trap::MemoryOutOfBounds);
    expect("functions", Trap::TableOutOfBounds);
    warm.lease().unwrap().call("empty", &[]).unwrap();
    let found = warm.compare().unwrap();
    assert!(found.is_clean(), "{which}: {found:?}");
}

#[test]
fn segments_dropped_in_the_warm_up_are_dropped_in_every_instance() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = warm(DROPS, mode, WarmUp::new().call("warm", &[]));
        reads_trap(&warm, "the first instance");
        let held = warm.lease().unwrap();
        reads_trap(&warm, "a second instance");
        drop(held);
        let error = warm.lease_new().unwrap().call("text", &[]).unwrap_err();
        assert!(matches!(error, CallError::Trap { .. }), "{error}");
        let mut lease = warm.lease().unwrap();
        lease.call("grow", &[]).unwrap();
        drop(lease);
        reads_trap(&warm, "a replaced instance");
        let frozen = warm.freeze().unwrap();
        let frozen = Frozen::from_parts(frozen.memory().clone(), &frozen.bytes().unwrap()).unwrap();
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let thawed = Warm::thaw(&engine, &options, &frozen).unwrap();
        reads_trap(&thawed, "a thawed guest");
    }
}

#[test]
fn differences_are_named() {
    let warm = warm(DROPS, Mode::Reset, WarmUp::new());
    let mut lease = warm.lease().unwrap();
    assert!(lease.compare().unwrap().is_clean());
    lease.call("drop", &[]).unwrap();
    lease.host_mut().set_data(1);
    let found = lease.compare().unwrap();
    assert_eq!(found.items, ["data segment 0", "element segment 0", "host state"]);
    assert!(found.unseen.is_empty());
    drop(lease);
    assert!(warm.compare().unwrap().is_clean());
}

#[test]
fn a_limit_that_the_engine_does_not_keep_is_an_error() {
    let wasm = wat::parse_str(r#"(module (func (export "f")))"#).unwrap();
    let config = EngineConfig { timeouts: false, fuel: false, ..EngineConfig::default() };
    let engine = Engine::new(config).unwrap();
    let second = Some(std::time::Duration::from_secs(1));
    let bare = GuestOptions { roots: Roots::AllExports, ..GuestOptions::default() };
    let frozen = Guest::with_options(&engine, &wasm, bare.clone()).unwrap().warm(WarmUp::new());
    let frozen = frozen.unwrap().freeze().unwrap();
    for (limit, options) in [
        ("timeout", GuestOptions { timeout: second, ..bare.clone() }),
        ("fuel", GuestOptions { fuel: Some(1000), ..bare.clone() }),
    ] {
        let component = wat::parse_str("(component)").unwrap();
        let errors = [
            Guest::with_options(&engine, &wasm, options.clone())
                .unwrap()
                .warm(WarmUp::new())
                .unwrap_err(),
            Guest::with_options(&engine, &component, options.clone())
                .unwrap()
                .warm_component()
                .unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, WarmError::Load(LoadError::Limit { .. })), "{error}");
            assert!(error.to_string().contains(limit), "{error}");
        }
        let error = Warm::thaw(&engine, &options, &frozen).unwrap_err().to_string();
        assert!(error.contains(limit), "{error}");
    }
}

#[test]
fn a_planted_bug_in_the_thaw_of_an_instance_is_caught() {
    planted::must_be_caught(
        &[Bug::Thaw],
        &["handles::segments_dropped_in_the_warm_up_are_dropped_in_every_instance"],
    );
}
