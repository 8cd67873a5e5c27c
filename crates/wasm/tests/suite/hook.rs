//! Call hooks: notified of guest calls and of no other, in every mode and on every stack, and able
//! to end them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use afresh_snapshot::Guest as _;
use afresh_wasm::wasmtime::{self, CallHook, Caller, Linker, Trap};
use afresh_wasm::{
    CallError, Engine, EngineConfig, Guest, GuestOptions, Hook, Host, Imports, LeaseOptions, Mode,
    Session, State, Val, WarmUp,
};

const MODES: [Mode; 2] = [Mode::Reset, Mode::Fresh];

/// The events of a hook, over all leases.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<&'static str>>>);

impl Log {
    fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// An embedder's state of a lease.
#[derive(Default)]
struct Events {
    /// The number of events that its hook received.
    times: usize,
    /// The time at which it has enough.
    enough: Option<usize>,
    /// Traps then instead of returning an error.
    trap: bool,
    panic: bool,
}

fn hook(log: &Log) -> Hook {
    let log = log.clone();
    Hook::new(move |host, what| {
        log.0.lock().unwrap().push(match what {
            CallHook::CallingWasm => "in",
            CallHook::ReturningFromWasm => "out",
            CallHook::CallingHost => "host",
            CallHook::ReturningFromHost => "back",
        });
        let told: &mut Events = host.state();
        told.times += 1;
        if told.enough != Some(told.times) {
            return Ok(());
        }
        assert!(!told.panic, "the hook of this test panics");
        match told.trap {
            true => Err(Trap::Interrupt.into()),
            false => Err(wasmtime::Error::msg("that is enough")),
        }
    })
}

/// With a host function `ask`, which may wait in a guest that may.
fn options(mode: Mode, log: &Log, asynchronous: bool) -> GuestOptions {
    let imports = Imports::new(move |linker: &mut Linker<Host>| {
        match asynchronous {
            true => linker.func_wrap_async("host", "ask", |_: Caller<'_, Host>, ()| {
                Box::new(async {
                    tokio::task::yield_now().await;
                    7
                })
            })?,
            false => linker.func_wrap("host", "ask", || 7)?,
        };
        Ok(())
    });
    let state = State::new(Events::default);
    GuestOptions { mode, imports, state, hook: hook(log), asynchronous, ..GuestOptions::default() }
}

/// Has a global, a table and a memory to restore, and writes all of them around a call of its
/// host's.
const GUEST: &str = r#"(module
    (import "host" "ask" (func $ask (result i32)))
    (memory (export "memory") 1)
    (table $t 2 8 funcref)
    (elem declare func $write)
    (global $g (mut i32) (i32.const 0))
    (func $write (param i32)
        (global.set $g (i32.add (global.get $g) (local.get 0)))
        (i32.store (i32.const 64) (i32.add (i32.load (i32.const 64)) (local.get 0)))
        (table.set $t (i32.const 1) (ref.func $write)))
    (func (export "warm") (call $write (call $ask)))
    (func (export "add") (param i32) (result i32)
        (call $write (local.get 0))
        (call $write (call $ask))
        (i32.add (global.get $g) (i32.load (i32.const 64))))
    (func (export "grow") (result i32)
        (drop (table.grow $t (ref.null func) (i32.const 1)))
        (drop (memory.grow (i32.const 1)))
        (call $write (call $ask))
        (table.size $t)))"#;

const CALL: [&str; 4] = ["in", "host", "back", "out"];

fn guest(engine: &Engine, wat: &str, options: GuestOptions) -> Guest {
    Guest::with_options(engine, &wat::parse_str(wat).unwrap(), options).unwrap()
}

fn default_engine() -> Engine {
    Engine::new(EngineConfig::default()).unwrap()
}

#[test]
fn a_hook_sees_calls_of_the_guest_and_no_others() {
    let deep = EngineConfig { stack: 16 << 20, ..EngineConfig::default() };
    for engine in [default_engine(), Engine::new(deep).unwrap()] {
        for mode in MODES {
            let log = Log::default();
            let guest = guest(&engine, GUEST, options(mode, &log, false));
            let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
            assert_eq!(log.take(), CALL, "{mode:?}: the warm-up's call");
            let add = warm.entry::<i32, i32>("add").unwrap();
            for _ in 0..3 {
                drop(warm.lease().unwrap());
                drop(warm.lease_new().unwrap());
                assert!(warm.compare().unwrap().is_clean());
                assert!(log.take().is_empty(), "{mode:?}: what afresh itself runs");
                let mut lease = warm.lease().unwrap();
                assert_eq!(lease.invoke(&add, 1).unwrap(), 30);
                assert_eq!(log.take(), CALL, "{mode:?}");
                assert!(matches!(lease.call("add", &[Val::I32(0)]).unwrap()[..], [Val::I32(44)]));
                assert_eq!(log.take(), CALL, "{mode:?}");
                assert_eq!(lease.host_mut().state::<Events>().times, 8);
                drop(lease);
                assert!(log.take().is_empty(), "{mode:?}: the reset");
            }
        }
    }
}

#[test]
fn an_error_of_a_hook_ends_the_call_and_leaves_nothing_behind() {
    let engine = default_engine();
    for mode in MODES {
        let log = Log::default();
        let guest = guest(&engine, GUEST, options(mode, &log, false));
        let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
        let add = warm.entry::<i32, i32>("add").unwrap();
        // Growth is runtime work, with a hook call before and after it.
        for (name, times) in [("add", CALL.len()), ("grow", CALL.len() + 4)] {
            for (time, trap) in (1..=times).flat_map(|time| [(time, false), (time, true)]) {
                let mut lease = warm.lease().unwrap();
                let told: &mut Events = lease.host_mut().state();
                (told.enough, told.trap) = (Some(time), trap);
                let error = match name {
                    "add" => lease.invoke(&add, 1).unwrap_err(),
                    _ => lease.call(name, &[]).unwrap_err(),
                };
                match trap {
                    true => assert!(matches!(error, CallError::Timeout(_)), "{error}"),
                    false => {
                        assert!(matches!(error, CallError::Host(_)), "{error}");
                        assert!(error.to_string().contains("that is enough"), "{error}");
                    }
                }
                // The lease continues with the state that the call left.
                assert!(lease.invoke(&add, 1).is_ok());
                drop(lease);
                assert!(warm.compare().unwrap().is_clean(), "{mode:?}, {name}, {time}");
                log.take();
                assert_eq!(warm.lease().unwrap().invoke(&add, 1).unwrap(), 30);
                assert_eq!(log.take(), CALL, "{mode:?}, {name}, {time}");
            }
        }
    }
}

#[test]
fn a_hook_that_panics_ends_the_call_and_sees_the_next() {
    let engine = default_engine();
    for mode in MODES {
        let log = Log::default();
        let warm = guest(&engine, GUEST, options(mode, &log, false)).warm(WarmUp::new()).unwrap();
        for time in 1..=4 {
            let mut lease = warm.lease().unwrap();
            let told: &mut Events = lease.host_mut().state();
            (told.enough, told.panic) = (Some(time), true);
            let add = &[Val::I32(1)];
            let error = catch_unwind(AssertUnwindSafe(|| lease.call("add", add).unwrap_err()));
            let error = error.unwrap_or_else(|_| panic!("it got past the call"));
            assert!(error.to_string().contains("call hook panicked"), "{error}");
            log.take();
            assert!(lease.call("add", add).is_ok());
            assert_eq!(log.take(), CALL, "{mode:?}");
        }
    }
}

#[test]
fn a_hook_runs_on_fibers_and_sees_the_end_of_dropped_calls() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let engine = default_engine();
    runtime.block_on(async {
        for mode in MODES {
            let log = Log::default();
            let guest = guest(&engine, GUEST, options(mode, &log, true));
            let warm = guest.warm_async(WarmUp::new().call("warm", &[])).await.unwrap();
            assert_eq!(log.take(), CALL, "{mode:?}");
            let add = warm.entry::<i32, i32>("add").unwrap();
            for _ in 0..2 {
                drop(warm.lease_async(&LeaseOptions::new()).await.unwrap());
                assert!(log.take().is_empty(), "{mode:?}");
                let mut lease = warm.lease_async(&LeaseOptions::new()).await.unwrap();
                assert_eq!(lease.invoke_async(&add, 1).await.unwrap(), 30);
                assert_eq!(log.take(), CALL, "{mode:?}");
                lease.host_mut().state::<Events>().enough = Some(6);
                let error = lease.invoke_async(&add, 1).await.unwrap_err();
                assert!(error.to_string().contains("that is enough"), "{error}");
                log.take();
                drop(lease);
                let mut lease = warm.lease_async(&LeaseOptions::new()).await.unwrap();
                {
                    let call = std::pin::pin!(lease.invoke_async(&add, 1));
                    let mut call = call;
                    let polled = std::future::poll_fn(|context| {
                        std::task::Poll::Ready(call.as_mut().poll(context).is_pending())
                    });
                    assert!(polled.await, "it waits in its host function");
                    assert_eq!(log.take(), ["in", "host"]);
                }
                assert_eq!(log.take(), ["back", "out"], "{mode:?}: as wasmtime unwinds it");
                drop(lease);
                assert!(warm.compare().unwrap().is_clean());
                assert!(log.take().is_empty());
            }
        }
    });
}

#[test]
fn a_session_reports_its_calls_and_not_its_rollback() {
    let log = Log::default();
    let guest = guest(&default_engine(), GUEST, options(Mode::Reset, &log, false));
    let warm = guest.warm(WarmUp::new().call("warm", &[])).unwrap();
    log.take();
    let root = warm.root().unwrap();
    let mut session = Session::make(&warm, &root).unwrap();
    let add = |session: &mut Session, n: i32| match session
        .lease()
        .call("add", &[Val::I32(n)])
        .unwrap()[..]
    {
        [Val::I32(sum)] => sum,
        _ => panic!("`add` gives a number"),
    };
    assert!(log.take().is_empty(), "the instance was made");
    for _ in 0..2 {
        assert_eq!(add(&mut session, 1), 30);
        let state = session.checkpoint().unwrap();
        assert_eq!(add(&mut session, 1), 46);
        assert_eq!(log.take(), [CALL, CALL].concat());
        session.switch(&state).unwrap();
        assert_eq!(add(&mut Session::make(&warm, &state).unwrap(), 1), 46);
        assert_eq!(log.take(), CALL);
        session.switch(&root).unwrap();
        assert!(log.take().is_empty(), "it was brought back");
    }
}

/// A reactor whose start function calls the host, and that holds a reference which no other
/// instance can have.
const COLD: &str = r#"(module
    (import "host" "ask" (func $ask (result i32)))
    (import "host" "token" (func $token (result externref)))
    (global $kept (mut externref) (ref.null extern))
    (global $g (mut i32) (i32.const 0))
    (func $start (global.set $g (call $ask)) (global.set $kept (call $token)))
    (start $start)
    (func (export "get") (result i32) (global.get $g)))"#;

#[test]
fn the_start_of_a_new_instance_is_reported_where_it_starts_cold() {
    let log = Log::default();
    let mut options = options(Mode::Auto, &log, false);
    options.imports = Imports::new(|linker| {
        linker.func_wrap("host", "ask", || 7)?;
        linker.func_wrap("host", "token", |mut caller: Caller<'_, Host>| {
            wasmtime::ExternRef::new(&mut caller, 1).map(Some)
        })?;
        Ok(())
    });
    let warm = guest(&default_engine(), COLD, options).warm(WarmUp::new()).unwrap();
    log.take();
    let mut lease = warm.lease().unwrap();
    assert_eq!(log.take(), ["in", "host", "back", "host", "back", "out"]);
    assert!(matches!(lease.call("get", &[]).unwrap()[..], [Val::I32(7)]));
    assert_eq!(log.take(), ["in", "out"]);
}

const COMPONENT: &str = r#"(component
    (import "ask" (func $ask (result u32)))
    (core func $lowered (canon lower (func $ask)))
    (core module $m
        (import "host" "ask" (func $ask (result i32)))
        (memory 1)
        (global $g (mut i32) (i32.const 0))
        (func (export "add") (param i32) (result i32)
            (global.set $g (i32.add (global.get $g) (local.get 0)))
            (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (call $ask)))
            (i32.add (global.get $g) (i32.load (i32.const 8)))))
    (core instance $i (instantiate $m (with "host" (instance (export "ask" (func $lowered))))))
    (func (export "add") (param "n" u32) (result u32) (canon lift (core func $i "add"))))"#;

#[test]
fn calls_of_a_component_are_reported_and_can_be_ended() {
    use wasmtime::component::Val;
    let log = Log::default();
    let imports = Imports::default()
        .component(|linker| linker.root().func_wrap("ask", |_, (): ()| Ok((7_u32,))));
    let options = GuestOptions { imports, ..options(Mode::Auto, &log, false) };
    let add = &[Val::U32(1)];
    let guest = guest(&default_engine(), COMPONENT, options);
    let warm = guest.warm_component_with(&WarmUp::new().call_component("add", add)).unwrap();
    assert_eq!(log.take(), CALL, "the warm-up's call");
    for time in 0..=4 {
        let mut lease = warm.lease().unwrap();
        assert!(log.take().is_empty(), "its instance was made");
        lease.host_mut().state::<Events>().enough = Some(time);
        let result = lease.call("add", add);
        match time {
            0 => {
                assert_eq!(result.unwrap(), [Val::U32(16)]);
                assert_eq!(log.take(), CALL);
            }
            _ => {
                let error = result.unwrap_err();
                assert!(error.to_string().contains("that is enough"), "{error}");
            }
        }
        drop(lease);
        log.take();
        assert!(warm.compare().unwrap().is_clean());
    }
}
