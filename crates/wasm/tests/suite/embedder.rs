//! An embedder's own engine, state, limiter and bindings: new for each lease where they are of a
//! lease, and refused by name where they do not fit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use afresh_wasm::wasmtime::{self, Caller, Linker, ResourceLimiter, Trap};
use afresh_wasm::{
    CallError, Engine, EngineConfig, EpochSource, Guest, GuestOptions, Host, Imports, LeaseOptions,
    Limiter, LoadError, Mode, State, Val, WarmError, WarmUp,
};

const MODES: [Mode; 2] = [Mode::Reset, Mode::Fresh];

/// Data that an embedder keeps for a request.
#[derive(Default)]
struct Request {
    calls: u32,
    tenant: String,
    /// Pages that its memories may have grown by.
    pages: usize,
}

impl ResourceLimiter for Request {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let more = (desired - current) >> 16;
        let granted = current == 0 || more <= self.pages;
        self.pages -= if granted && current > 0 { more } else { 0 };
        Ok(granted)
    }

    fn table_growing(&mut self, _: usize, _: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(true)
    }
}

static MADE: AtomicUsize = AtomicUsize::new(0);

fn options(mode: Mode) -> GuestOptions {
    let imports = Imports::new(|linker: &mut Linker<Host>| {
        linker.func_wrap("host", "count", |mut caller: Caller<'_, Host>| {
            let request: &mut Request = caller.data_mut().state();
            request.calls += 1;
            request.calls
        })?;
        Ok(())
    });
    let state = State::new(|| {
        MADE.fetch_add(1, Ordering::Relaxed);
        Request { pages: 2, ..Request::default() }
    });
    let limiter = Limiter::new(|host| host.state::<Request>());
    GuestOptions { mode, imports, state, limiter, ..GuestOptions::default() }
}

const GUEST: &str = r#"(module
    (import "host" "count" (func $count (result i32)))
    (memory 1 100)
    (func (export "count") (result i32) (call $count))
    (func (export "grow") (result i32) (memory.grow (i32.const 1)))
    (func $deep (export "deep") (param i32) (result i32)
        (if (result i32) (local.get 0)
            (then (i32.add (i32.const 1) (call $deep (i32.sub (local.get 0) (i32.const 1)))))
            (else (i32.const 0))))
    (func (export "spin") (loop (br 0))))"#;

fn guest(engine: &Engine, options: GuestOptions) -> Guest {
    Guest::with_options(engine, &wat::parse_str(GUEST).unwrap(), options).unwrap()
}

fn number(lease: &mut afresh_wasm::Lease<'_>, name: &str) -> i32 {
    match lease.call(name, &[]).unwrap()[..] {
        [Val::I32(n)] => n,
        _ => panic!("{name} gives no number"),
    }
}

#[test]
fn the_embedders_state_and_limits_are_new_for_each_lease() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for mode in MODES {
        let warm = guest(&engine, options(mode)).warm(WarmUp::new().call("count", &[])).unwrap();
        for round in 0..5 {
            let before = MADE.load(Ordering::Relaxed);
            let mut lease = warm.lease_owned(&LeaseOptions::new()).unwrap();
            lease.host_mut().state::<Request>().tenant = format!("tenant {round}");
            assert_eq!([number(&mut lease, "count"), number(&mut lease, "count")], [1, 2]);
            // Two pages more, and not a third.
            let grown = [0; 3].map(|_| number(&mut lease, "grow"));
            assert_eq!(grown, [1, 2, -1], "{mode:?}");
            let request = lease.host_mut().state::<Request>();
            assert_eq!((request.calls, request.pages), (2, 0));
            assert_eq!(request.tenant, format!("tenant {round}"));
            drop(lease);
            assert!(warm.compare().unwrap().is_clean());
            assert!(warm.lease().unwrap().host_mut().state::<Request>().tenant.is_empty());
            let made = MADE.load(Ordering::Relaxed) - before;
            assert!(made <= 4, "{made} states were made for two leases");
        }
    }
}

#[test]
fn an_engine_that_was_not_set_up_for_it_is_refused_by_what_it_lacks() {
    let refused = |wasm: &wasmtime::Config| {
        let engine = wasmtime::Engine::new(wasm).unwrap();
        match Engine::over(engine, EngineConfig::default()).unwrap_err() {
            LoadError::Settings { missing } => missing.join(", "),
            other => panic!("{other}"),
        }
    };
    let plain = refused(&wasmtime::Config::new());
    for setting in ["memory_may_move", "memory_init_cow", "epoch_interruption"] {
        assert!(plain.contains(setting), "{plain}");
    }
    let applied = || {
        let mut wasm = wasmtime::Config::new();
        EngineConfig::default().apply(&mut wasm);
        wasm
    };
    assert_eq!(refused(applied().memory_init_cow(true)), "memory_init_cow");
    assert_eq!(refused(applied().consume_fuel(true)), "consume_fuel");
    let mut pool = wasmtime::PoolingAllocationConfig::new();
    pool.total_memories(1).total_gc_heaps(1);
    let mut pooling = wasmtime::Config::new();
    pooling.allocation_strategy(wasmtime::InstanceAllocationStrategy::Pooling(pool));
    assert!(refused(&pooling).contains("allocation_strategy"));
    // All numbers as required, but with wasmtime's own memories.
    let engine = wasmtime::Engine::new(&applied()).unwrap();
    let mut own = wasmtime::Config::new();
    own.memory_reservation(engine.get_memory_reservation())
        .memory_guard_size(engine.get_memory_guard_size())
        .memory_reservation_for_growth(0)
        .memory_may_move(false)
        .gc_heap_reservation(engine.get_gc_heap_reservation())
        .gc_heap_guard_size(engine.get_gc_heap_guard_size())
        .gc_heap_reservation_for_growth(0)
        .gc_heap_may_move(false)
        .memory_init_cow(false)
        .epoch_interruption(true);
    assert_eq!(refused(&own), "with_host_memory");
}

#[test]
fn guests_run_on_the_embedders_engine_and_epochs() {
    let config = EngineConfig {
        epochs: EpochSource::Embedder(Duration::from_millis(1)),
        ..EngineConfig::default()
    };
    let mut wasm = wasmtime::Config::new();
    wasm.wasm_backtrace_max_frames(std::num::NonZeroUsize::new(3));
    config.apply(&mut wasm);
    let wasmtime = wasmtime::Engine::new(&wasm).unwrap();
    let engine = Engine::over(wasmtime.clone(), config).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let ticker = {
        let (stop, wasmtime) = (stop.clone(), wasmtime.clone());
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                wasmtime.increment_epoch();
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    };
    for mode in MODES {
        let options = GuestOptions { timeout: Some(Duration::from_millis(300)), ..options(mode) };
        let warm = guest(&engine, options).warm(WarmUp::new()).unwrap();
        for _ in 0..2 {
            let error = warm.lease().unwrap().call("spin", &[]).unwrap_err();
            assert!(matches!(error, CallError::Timeout(_)), "{error}");
            assert_eq!(number(&mut warm.lease().unwrap(), "count"), 1);
        }
    }
    // The embedder's own guests still run.
    let module = wasmtime::Module::new(&wasmtime, "(module (memory 1))");
    let module = module.or_else(|_| {
        wasmtime::Module::new(&wasmtime, wat::parse_str("(module (memory 1))").unwrap())
    });
    let mut store = wasmtime::Store::new(&wasmtime, ());
    wasmtime::Instance::new(&mut store, &module.unwrap(), &[]).unwrap();
    stop.store(true, Ordering::Relaxed);
    ticker.join().unwrap();
}

#[test]
fn a_guest_may_have_more_stack_than_its_thread() {
    let calls = |stack: usize, mode: Mode| {
        let engine = Engine::new(EngineConfig { stack, ..EngineConfig::default() }).unwrap();
        let warm = guest(&engine, options(mode)).warm(WarmUp::new()).unwrap();
        let deep = warm.entry::<i32, i32>("deep").unwrap();
        let thread = std::thread::Builder::new().stack_size(1 << 20);
        let call = move || {
            let by_name = warm.lease().unwrap().call("deep", &[Val::I32(100_000)]);
            let typed = warm.lease().unwrap().invoke(&deep, 100_000);
            assert_eq!(by_name.is_ok(), typed.is_ok());
            assert!(warm.lease().unwrap().invoke(&deep, 10).is_ok());
            assert!(warm.compare().unwrap().is_clean());
            typed
        };
        thread.spawn(call).unwrap().join().unwrap()
    };
    for mode in MODES {
        let overflow = calls(512 << 10, mode).unwrap_err();
        let wanted = Trap::StackOverflow;
        assert!(matches!(overflow, CallError::Trap { trap, .. } if trap == wanted), "{overflow}");
        assert_eq!(calls(16 << 20, mode).unwrap(), 100_000, "{mode:?}");
    }
}

mod bindings {
    use super::*;
    use wasmtime::component::HasSelf;

    wasmtime::component::bindgen!({
        inline: "
            package test:plugin;
            world plugin {
                import count: func() -> u32;
                export handle: func(n: u32) -> u32;
            }
        ",
    });

    impl PluginImports for Request {
        fn count(&mut self) -> u32 {
            self.calls += 1;
            self.calls
        }
    }

    const COMPONENT: &str = r#"(component
        (import "count" (func $count (result u32)))
        (core func $lowered (canon lower (func $count)))
        (core module $m
            (import "host" "count" (func $count (result i32)))
            (memory 1)
            (func (export "handle") (param i32) (result i32)
                (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (local.get 0)))
                (i32.add (i32.mul (i32.const 100) (call $count)) (i32.load (i32.const 8)))))
        (core instance $i (instantiate $m
            (with "host" (instance (export "count" (func $lowered))))))
        (func (export "handle") (param "n" u32) (result u32) (canon lift (core func $i "handle"))))"#;

    #[test]
    fn every_missing_import_of_a_component_is_named() {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let wasm = wat::parse_str(
            r#"(component
                (import "count" (func (result u32)))
                (import "my:host/store@1.2.0" (instance
                    (export "entry" (type $entry (sub resource)))
                    (export "get" (func (param "key" string) (result (own $entry))))
                    (export "len" (func (result u32)))))
                (import "wasi:random/random@0.2.0" (instance
                    (export "get-random-u64" (func (result u64))))))"#,
        )
        .unwrap();
        let load = |imports: Imports, stub_imports: bool| {
            let options = GuestOptions { imports, stub_imports, ..GuestOptions::default() };
            Guest::with_options(&engine, &wasm, options).unwrap().warm_component()
        };
        let named = |imports: Imports| {
            let error = load(imports, false).unwrap_err();
            let WarmError::Load(LoadError::Imports { missing }) = error else {
                panic!("{error:?}")
            };
            missing
        };
        let missing = named(Imports::default());
        let store = ["entry (resource)", "get (function)", "len (function)"];
        let store: Vec<String> =
            store.iter().map(|name| format!("my:host/store@1.2.0.{name}")).collect();
        assert_eq!(missing, [&["count (function)".to_owned()], &store[..]].concat());
        let one = Imports::default().component(|linker| {
            let mut store = linker.instance("my:host/store@1.2.0")?;
            store.func_wrap("len", |_, (): ()| Ok((0_u32,)))
        });
        assert_eq!(named(one), [&["count (function)".to_owned()], &store[..2]].concat());
        load(Imports::default(), true).unwrap();
    }

    #[test]
    fn an_error_names_the_first_missing_imports_and_counts_the_rest() {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let many = |count: usize| {
            let imports: String =
                (0..count).map(|n| format!("(import \"call-{n}\" (func))")).collect();
            let wasm = wat::parse_str(format!("(component {imports})")).unwrap();
            Guest::new(&engine, &wasm).unwrap().warm_component().unwrap_err()
        };
        let error = many(300);
        let WarmError::Load(LoadError::Imports { missing }) = &error else { panic!("{error:?}") };
        assert_eq!(missing.len(), 300);
        let text = error.to_string();
        assert!(text.contains(": call-0 (function), call-1 (function)"), "{text}");
        assert!(text.contains("call-7 (function), and 292 more; provide it with"), "{text}");
        assert!(many(9).to_string().contains("call-7 (function), and 1 more;"));
        assert!(many(8).to_string().contains("call-6 (function), call-7 (function); provide"));
    }

    #[test]
    fn generated_bindings_find_the_embedders_state_and_a_leases_instance() {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let imports = Imports::default().component(|linker| {
            Plugin::add_to_linker::<Host, HasSelf<Request>>(linker, |host| host.state())
        });
        let options = GuestOptions {
            imports,
            state: State::new(Request::default),
            ..GuestOptions::default()
        };
        let wasm = wat::parse_str(COMPONENT).unwrap();
        let guest = Guest::with_options(&engine, &wasm, options).unwrap();
        let warm = wasmtime::component::Val::U32(30);
        let warm = guest.warm_component_with(&WarmUp::new().call_component("handle", &[warm]));
        let warm = warm.unwrap();
        for _ in 0..3 {
            let mut lease = warm.lease_owned(&LeaseOptions::new()).unwrap();
            let (mut store, instance) = lease.bindings().unwrap();
            let plugin = Plugin::new(&mut store, &instance).unwrap();
            assert_eq!(plugin.call_handle(&mut store, 12).unwrap(), 142);
            assert_eq!(plugin.call_handle(&mut store, 1).unwrap(), 243);
            drop(lease);
            assert!(warm.compare().unwrap().is_clean());
        }
    }
}

/// A resource of an embedder.
struct Ticket;

#[test]
fn resources_of_a_call_are_in_no_other_ones_table() {
    const WASM: &str = r#"(module
        (import "host" "issue" (func $issue (result i32)))
        (func (export "issue") (result i32) (call $issue)))"#;
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for mode in MODES {
        let imports = Imports::new(|linker: &mut Linker<Host>| {
            linker.func_wrap("host", "issue", |mut caller: Caller<'_, Host>| {
                let (_, table) = caller.data_mut().state_and_table::<Request>();
                Ok(table.push(Ticket)?.rep())
            })?;
            Ok(())
        });
        let options = GuestOptions { imports, ..options(mode) };
        let wasm = wat::parse_str(WASM).unwrap();
        let warm =
            Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new()).unwrap();
        let issue = warm.entry::<(), u32>("issue").unwrap();
        let numbers = || {
            let mut lease = warm.lease().unwrap();
            [lease.invoke(&issue, ()).unwrap(), lease.invoke(&issue, ()).unwrap()]
        };
        let first = numbers();
        assert_ne!(first[0], first[1], "{mode:?}");
        assert_eq!(numbers(), first, "{mode:?}");
    }
}
