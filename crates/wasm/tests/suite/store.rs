//! State that a store keeps between two calls must not reach the next call, nor accumulate.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use afresh_sys::planted::{self, Bug};
use afresh_wasm::wasmtime::{
    AsContextMut, Caller, Engine as Wasmtime, ExternRef, Instance, Module, Rooted,
};
use afresh_wasm::{
    CallError, Engine, EngineConfig, Guest, GuestOptions, Host, Imports, Mode, Val, Warm, WarmUp,
};

fn warm(wat: &str, mode: Mode, imports: Imports) -> Warm {
    let wasm = wat::parse_str(wat).unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { mode, imports, ..GuestOptions::default() };
    Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new()).unwrap()
}

/// Counts the host objects that are alive.
struct CountedObject(Arc<AtomicUsize>, u64);

impl CountedObject {
    fn new(alive: &Arc<AtomicUsize>, number: u64) -> Self {
        alive.fetch_add(1, Ordering::SeqCst);
        Self(alive.clone(), number)
    }
}

impl Drop for CountedObject {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

const THROWS: &str = r#"(module
    (import "host" "pending" (func $pending (result i32)))
    (tag $secret (param i64))
    (memory 1)
    (global $n (mut i32) (i32.const 0))
    (func (export "throw") (param i64)
        (global.set $n (i32.const 1))
        (throw $secret (local.get 0)))
    (func (export "pending") (result i32) (call $pending)))"#;

#[test]
fn an_uncaught_exception_does_not_reach_the_next_call() {
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "pending", |mut caller: Caller<'_, Host>| {
            i32::from(caller.as_context_mut().take_pending_exception().is_some())
        })?;
        Ok(())
    });
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = warm(THROWS, mode, imports.clone());
        for _ in 0..3 {
            let mut lease = warm.lease().unwrap();
            let error = lease.call("throw", &[Val::I64(0x5ec2e7)]).unwrap_err();
            assert!(matches!(error, CallError::Exception(_)), "{mode:?}: {error}");
            let found = lease.call("pending", &[]).unwrap();
            assert!(matches!(found[..], [Val::I32(0)]), "{mode:?}: {found:?} in the same lease");
            let throw = warm.entry::<i64, ()>("throw").unwrap();
            lease.invoke(&throw, 1).unwrap_err();
            drop(lease);
            let found = warm.lease().unwrap().call("pending", &[]).unwrap();
            assert!(matches!(found[..], [Val::I32(0)]), "{mode:?}: {found:?} in the next");
        }
        assert_eq!(warm.growth_stats().0, 0);
    }
}

#[test]
fn an_exception_that_the_host_left_behind_is_not_there_for_the_next_call() {
    use afresh_wasm::wasmtime::{ExnRef, ExnRefPre, ExnType, FuncType, Tag, TagType, ValType};
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "pending", |mut caller: Caller<'_, Host>| {
            let taken = caller.as_context_mut().take_pending_exception().is_some();
            // Thrown, and then kept to itself.
            let engine = caller.engine().clone();
            let ty = FuncType::new(&engine, [ValType::I32], []);
            let tag = Tag::new(&mut caller, &TagType::new(ty.clone()))?;
            let kind = ExnRefPre::new(&mut caller, ExnType::new(&engine, [ValType::I32])?);
            let thrown = ExnRef::new(&mut caller, &kind, &tag, &[Val::I32(7)])?;
            let _ = caller.as_context_mut().throw::<()>(thrown);
            Ok(i32::from(taken))
        })?;
        Ok(())
    });
    let warm = warm(THROWS, Mode::Reset, imports);
    for _ in 0..3 {
        let found = warm.lease().unwrap().call("pending", &[]).unwrap();
        assert!(matches!(found[..], [Val::I32(0)]), "{found:?}");
    }
}

const OBJECTS: &str = r#"(module
    (import "host" "make" (func $make (param i64) (result externref)))
    (import "host" "number" (func $number (param externref) (result i64)))
    (memory 1)
    (global $n (mut i32) (i32.const 0))
    (table $kept 4 externref)
    (func (export "make") (param i64) (result externref)
        (global.set $n (i32.const 1))
        (call $make (local.get 0)))
    (func (export "keep") (param i64)
        (table.set $kept (i32.const 1) (call $make (local.get 0))))
    (func (export "kept") (result externref) (table.get $kept (i32.const 1)))
    (func (export "number") (param externref) (result i64) (call $number (local.get 0))))"#;

fn objects(alive: &Arc<AtomicUsize>) -> Imports {
    let alive = alive.clone();
    Imports::new(move |linker| {
        let alive = alive.clone();
        linker.func_wrap("host", "make", move |mut caller: Caller<'_, Host>, number: i64| {
            ExternRef::new(&mut caller, CountedObject::new(&alive, number as u64)).map(Some)
        })?;
        linker.func_wrap(
            "host",
            "number",
            |caller: Caller<'_, Host>, object: Option<Rooted<ExternRef>>| {
                let Some(object) = object else { return Ok(-1) };
                let data = object.data(&caller)?;
                Ok(data.and_then(|d| d.downcast_ref::<CountedObject>()).map_or(-2, |c| c.1 as i64))
            },
        )?;
        Ok(())
    })
}

#[test]
fn host_objects_that_calls_gave_end_with_their_lease() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let alive = Arc::new(AtomicUsize::new(0));
        let warm = warm(OBJECTS, mode, objects(&alive));
        let make = warm.entry::<i64, Option<Rooted<ExternRef>>>("make").unwrap();
        for n in 0..500 {
            let mut lease = warm.lease().unwrap();
            // A later call of the lease can take the result of an earlier one.
            let object = lease.call("make", &[Val::I64(n)]).unwrap();
            let number = lease.call("number", &object).unwrap();
            assert!(matches!(number[..], [Val::I64(found)] if found == n), "{number:?}");
            lease.invoke(&make, n).unwrap();
            lease.call("keep", &[Val::I64(n)]).unwrap();
            assert!(lease.call("kept", &[]).unwrap()[0].unwrap_externref().is_some());
            drop(lease);
            let there = alive.load(Ordering::SeqCst);
            assert_eq!(there, 0, "{mode:?}: {there} objects are alive after {n} leases");
        }
        assert_eq!(warm.growth_stats().0, 0, "{mode:?}");
    }
}

#[test]
fn a_reference_is_of_no_use_once_its_lease_has_ended() {
    let alive = Arc::new(AtomicUsize::new(0));
    let warm = warm(OBJECTS, Mode::Reset, objects(&alive));
    let object = warm.lease().unwrap().call("make", &[Val::I64(5)]).unwrap();
    // The same instance, a later lease: and another object may be where the first one was.
    let mut lease = warm.lease().unwrap();
    lease.call("make", &[Val::I64(6)]).unwrap();
    let error = lease.call("number", &object).unwrap_err();
    assert!(matches!(error, CallError::Arguments { .. }), "{error}");
    let number = warm.entry::<Option<Rooted<ExternRef>>, i64>("number").unwrap();
    assert!(lease.invoke(&number, object[0].externref().unwrap().copied()).is_err());
}

const GROWS: &str = r#"(module
    (type $bytes (array (mut i8)))
    (memory 1)
    (global $n (mut i32) (i32.const 0))
    (func (export "build") (param $size i32) (result i32)
        (global.set $n (i32.const 1))
        (array.len (array.new_default $bytes (local.get $size)))))"#;

#[test]
fn a_large_heap_of_collected_objects_goes_with_its_call_and_a_small_one_is_counted() {
    let warm = warm(GROWS, Mode::Reset, Imports::default());
    let build = |size| warm.lease().unwrap().call("build", &[Val::I32(size)]).unwrap();
    let resident = || warm.pool_stats().resident_bytes;
    build(100);
    let little = resident();
    assert!((1..1 << 20).contains(&little), "{little} bytes");
    for _ in 0..50 {
        build(1000);
    }
    assert_eq!(warm.growth_stats().0, 0, "small heaps are kept");
    assert!(resident() <= 1 << 20, "{} bytes", resident());
    for round in 1..=3 {
        build(64 << 20);
        assert_eq!(warm.growth_stats().0, round);
        assert!(resident() <= 1 << 20, "{} bytes", resident());
        assert_eq!(warm.pool_stats().alive, 1);
    }
}

#[test]
fn garbage_of_the_warm_up_is_not_kept() {
    let wasm = wat::parse_str(GROWS).unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
    let guest = Guest::with_options(&engine, &wasm, options).unwrap();
    let warm = guest.warm(WarmUp::new().call("build", &[Val::I32(64 << 20)])).unwrap();
    drop(warm.lease().unwrap());
    let resident = warm.pool_stats().resident_bytes;
    assert!(resident < 1 << 20, "{resident} bytes");
}

#[test]
fn a_host_function_cannot_leave_instances_in_a_store_that_is_used_again() {
    let wat = r#"(module
        (import "host" "plug" (func $plug (result i32)))
        (memory 1)
        (global $n (mut i32) (i32.const 0))
        (func (export "plug") (result i32) (call $plug)))"#;
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "plug", |mut caller: Caller<'_, Host>| {
            let engine: Wasmtime = caller.engine().clone();
            let module = Module::new(&engine, "\0asm\x01\0\0\0")?;
            let made = Instance::new(&mut caller, &module, &[]);
            Ok(i32::from(made.is_ok()))
        })?;
        Ok(())
    });
    for (mode, expected) in [(Mode::Reset, 0), (Mode::Fresh, 1)] {
        let warm = warm(wat, mode, imports.clone());
        for _ in 0..3 {
            let made = warm.lease().unwrap().call("plug", &[]).unwrap();
            assert!(matches!(made[..], [Val::I32(n)] if n == expected), "{mode:?}: {made:?}");
        }
    }
}

#[test]
fn limits_that_a_host_function_set_end_with_its_lease() {
    let wat = r#"(module
        (import "host" "hurry" (func $hurry))
        (memory 1)
        (func (export "hurry") (call $hurry))
        (func (export "spin") (result i32) (local $i i32)
            (loop $next
                (local.set $i (i32.add (local.get $i) (i32.const 1)))
                (br_if $next (i32.lt_u (local.get $i) (i32.const 1000))))
            (local.get $i)))"#;
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "hurry", |mut caller: Caller<'_, Host>| {
            caller.as_context_mut().set_epoch_deadline(0);
        })?;
        Ok(())
    });
    let warm = warm(wat, Mode::Reset, imports);
    for _ in 0..3 {
        // The deadline is over as soon as it is set, and may end this call.
        let _ = warm.lease().unwrap().call("hurry", &[]);
        let spun = warm.lease().unwrap().call("spin", &[]).unwrap();
        assert!(matches!(spun[..], [Val::I32(1000)]));
    }
}

#[test]
fn a_planted_bug_that_keeps_exceptions_is_caught() {
    planted::must_be_caught(
        &[Bug::Exception],
        &["store::an_uncaught_exception_does_not_reach_the_next_call"],
    );
}
