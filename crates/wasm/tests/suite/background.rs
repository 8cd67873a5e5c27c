//! Code of a guest that prepares each instance, in leases of tasks: the task's thread does other
//! things, and a dropped task stops the code.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use afresh_wasm::{
    Engine, EngineConfig, Guest, GuestOptions, Host, Imports, LeaseOptions, Limits, Mode, Warm,
    WarmComponent, WarmUp, Watch, wasmtime,
};

/// Each clone takes entropy, and waits at the gate.
const RESEEDED: &str = r#"(module
    (import "host" "gate" (func $gate))
    (memory 1)
    (func (export "afresh_reseed") (param i64 i64) (call $gate))
    (func (export "answer") (result i32) (i32.const 42)))"#;

/// Each instance runs `_initialize`, because no other could hold its result.
const INITIALISED: &str = r#"(module
    (import "host" "gate" (func $gate))
    (type $box (struct (field i32)))
    (memory 1)
    (global $kept (mut (ref null $box)) (ref.null $box))
    (func (export "_initialize")
        (call $gate)
        (global.set $kept (struct.new $box (i32.const 42))))
    (func (export "answer") (result i32) (struct.get $box 0 (global.get $kept))))"#;

/// The same, in a component.
const COMPONENT: &str = r#"(component
    (import "host" (instance $host (export "gate" (func))))
    (core func $gate (canon lower (func $host "gate")))
    (core module $m
        (import "host" "gate" (func $gate))
        (memory 1)
        (func (export "reseed") (param i64 i64) (call $gate))
        (func (export "answer") (result i32) (i32.const 42)))
    (core instance $host-core (export "gate" (func $gate)))
    (core instance $i (instantiate $m (with "host" (instance $host-core))))
    (func (export "afresh-reseed") (param "lo" u64) (param "hi" u64)
        (canon lift (core func $i "reseed")))
    (func (export "answer") (result u32) (canon lift (core func $i "answer"))))"#;

/// Keeps guests waiting while it is closed.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn close(&self) {
        *self.closed.lock().unwrap() = true;
    }

    fn open(&self) {
        *self.closed.lock().unwrap() = false;
        self.opened.notify_all();
    }

    /// An error where nothing opens it, for its thread should be free to.
    fn pass(&self) -> wasmtime::Result<()> {
        let closed = self.closed.lock().unwrap();
        let long = Duration::from_secs(20);
        let (_open, waited) =
            self.opened.wait_timeout_while(closed, long, |closed| *closed).unwrap();
        match waited.timed_out() {
            false => Ok(()),
            true => Err(wasmtime::Error::msg("no other task has run")),
        }
    }
}

fn options(gate: &Arc<Gate>) -> GuestOptions {
    let (module, component) = (gate.clone(), gate.clone());
    let imports = Imports::new(move |linker: &mut wasmtime::Linker<Host>| {
        let gate = module.clone();
        linker.func_wrap("host", "gate", move || gate.pass()).map(drop)
    })
    .component(move |linker| {
        let gate = component.clone();
        linker.instance("host")?.func_wrap("gate", move |_, ()| gate.pass())
    });
    GuestOptions { imports, ..GuestOptions::default() }
}

/// A task that waits for a lease, beside one that opens the gate.
async fn lease_beside<L>(gate: &Gate, lease: impl Future<Output = L>) -> L {
    gate.close();
    let (lease, ()) = tokio::join!(lease, async {
        tokio::task::yield_now().await;
        gate.open();
    });
    lease
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn code_that_prepares_an_instance_does_not_block_other_tasks() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let gate = Arc::new(Gate::default());
    for (text, mode) in
        [(RESEEDED, Mode::Reset), (RESEEDED, Mode::Fresh), (INITIALISED, Mode::Auto)]
    {
        let options = GuestOptions { mode, ..options(&gate) };
        let guest = Guest::with_options(&engine, &wat::parse_str(text).unwrap(), options).unwrap();
        let warm: Warm = guest.warm(WarmUp::new()).unwrap();
        let none = LeaseOptions::new();
        let mut lease = run(lease_beside(&gate, warm.lease_async(&none))).unwrap();
        assert_eq!(lease.call("answer", &[]).unwrap()[0].i32(), Some(42), "{mode:?}");
    }
}

#[test]
fn code_that_prepares_a_component_does_not_block_other_tasks() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let gate = Arc::new(Gate::default());
    let wasm = wat::parse_str(COMPONENT).unwrap();
    let guest = Guest::with_options(&engine, &wasm, options(&gate)).unwrap();
    let warm: WarmComponent = guest.warm_component().unwrap();
    let none = LeaseOptions::new();
    let mut lease = run(lease_beside(&gate, warm.lease_async(&none))).unwrap();
    assert_eq!(lease.call_text("answer", &[]).unwrap(), "42");
}

/// The code that prepares an instance never ends while the gate is shut.
const SPINNING: &str = r#"(module
    (import "host" "shut" (func $shut (result i32)))
    (memory 1)
    (func (export "afresh_reseed") (param i64 i64)
        (loop $again (br_if $again (call $shut))))
    (func (export "answer") (result i32) (i32.const 42)))"#;

#[test]
fn a_dropped_task_stops_the_code_that_prepares_its_instance() {
    let config = EngineConfig { timeouts: true, ..EngineConfig::default() };
    let engine = Engine::new(config).unwrap();
    let (shut, began) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (is_shut, begins) = (shut.clone(), began.clone());
    let imports = Imports::new(move |linker: &mut wasmtime::Linker<Host>| {
        let (is_shut, begins) = (is_shut.clone(), begins.clone());
        let answer = move || -> i32 {
            begins.store(true, Ordering::Relaxed);
            i32::from(is_shut.load(Ordering::Relaxed))
        };
        linker.func_wrap("host", "shut", answer).map(drop)
    });
    let limits = Limits { items: 1, ..Limits::default() };
    let watch = Watch::default().stoppable();
    let options = GuestOptions { imports, limits, watch, ..GuestOptions::default() };
    let guest = Guest::with_options(&engine, &wat::parse_str(SPINNING).unwrap(), options).unwrap();
    let warm = guest.warm(WarmUp::new()).unwrap();
    shut.store(true, Ordering::Relaxed);
    run(async {
        let none = LeaseOptions::new();
        let mut lease = Box::pin(warm.lease_async(&none));
        while !began.load(Ordering::Relaxed) {
            tokio::select! {
                _ = &mut lease => panic!("the code cannot have ended"),
                () = tokio::time::sleep(Duration::from_millis(1)) => {}
            }
        }
        // The only instance comes back, although the gate stays shut.
        drop(lease);
        warm.next_instance().wait().await;
        shut.store(false, Ordering::Relaxed);
        let mut lease = warm.lease_async(&none).await.unwrap();
        assert_eq!(lease.call("answer", &[]).unwrap()[0].i32(), Some(42));
    });
}
