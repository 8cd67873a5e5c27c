//! A watch ends calls, and warm-ups, that may not continue; other calls keep their time limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use wasmtime::AsContextMut;

use afresh_wasm::{
    CallError, CallOptions, Engine, EngineConfig, Guest, GuestOptions, Host, Imports, LeaseOptions,
    LoadError, State, Val, WarmError, WarmUp, Watch,
};

const MODULE: &str = r#"(module
    (memory (export "memory") 4)
    (func (export "spin") (loop $on (br $on)))
    (func (export "touch") (param $pages i32)
        (loop $on
            (local.set $pages (i32.sub (local.get $pages) (i32.const 1)))
            (i32.store (i32.mul (local.get $pages) (i32.const 4096)) (i32.const 7))
            (br_if $on (local.get $pages)))))"#;

/// Asked so often at most by one call.
#[derive(Default)]
struct Requests(u32);

fn guest(options: GuestOptions) -> Guest {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let module = wat::parse_str(MODULE).unwrap();
    Guest::with_options(&engine, &module, options).unwrap()
}

fn ends_after(times: u32, total: &Arc<AtomicU32>) -> GuestOptions {
    let total = total.clone();
    GuestOptions {
        state: State::new(Requests::default),
        watch: Watch::new(move |host| {
            total.fetch_add(1, Ordering::Relaxed);
            let asked = host.state::<Requests>();
            asked.0 += 1;
            asked.0 < times
        }),
        ..GuestOptions::default()
    }
}

#[test]
fn a_call_refused_by_its_watch_ends_and_the_next_runs() {
    let total = Arc::new(AtomicU32::new(0));
    let warm = guest(ends_after(3, &total)).warm(WarmUp::new()).unwrap();
    for round in 1..=3 {
        let mut lease = warm.lease().unwrap();
        assert!(matches!(lease.call("spin", &[]), Err(CallError::Stopped)));
        // The state is the lease's own.
        assert_eq!(total.load(Ordering::Relaxed), round * 3);
        lease.call("touch", &[Val::I32(2)]).unwrap();
    }
}

#[test]
fn a_warm_up_refused_by_its_watch_ends() {
    let total = Arc::new(AtomicU32::new(0));
    let warmed = guest(ends_after(2, &total)).warm(WarmUp::new().call("spin", &[]));
    let error = warmed.expect_err("it never ends by itself");
    assert!(matches!(error, WarmError::Call { error: CallError::Stopped, .. }), "{error}");
}

#[test]
fn a_time_limit_ends_a_call_that_the_watch_permits() {
    let options = GuestOptions {
        timeout: Some(Duration::from_millis(40)),
        watch: Watch::new(|_| true),
        ..GuestOptions::default()
    };
    let warm = guest(options).warm(WarmUp::new()).unwrap();
    let mut lease = warm.lease().unwrap();
    for _ in 0..2 {
        let error = lease.call("spin", &[]).expect_err("it never ends by itself");
        assert!(matches!(error, CallError::Timeout(_)), "{error}");
    }
}

#[test]
fn a_cpu_time_limit_ends_a_busy_call_and_counts_no_waits() {
    let slept = Arc::new(AtomicBool::new(false));
    let woken = slept.clone();
    let module = wat::parse_str(
        r#"(module
            (import "host" "sleep" (func $sleep))
            (memory (export "memory") 1)
            (func (export "spin") (loop $on (br $on)))
            (func (export "wait") (call $sleep)))"#,
    );
    let options = GuestOptions {
        imports: Imports::new(move |linker| {
            let woken = woken.clone();
            linker.func_wrap("host", "sleep", move || {
                std::thread::sleep(Duration::from_millis(300));
                woken.store(true, Ordering::Relaxed);
            })?;
            Ok(())
        }),
        watch: Watch::default().stoppable(),
        ..GuestOptions::default()
    };
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let guest = Guest::with_options(&engine, &module.unwrap(), options).unwrap();
    let warm = guest.warm(WarmUp::new()).unwrap();
    let limit = Duration::from_millis(200);
    let mut lease =
        warm.lease_with(&LeaseOptions::new().calls(CallOptions::new().cpu_time(limit))).unwrap();
    lease.call("wait", &[]).unwrap();
    assert!(slept.load(Ordering::Relaxed));
    let error = lease.call("spin", &[]).expect_err("it never ends by itself");
    assert!(matches!(error, CallError::CpuTime(found) if found == limit), "{error}");
    drop(lease);
    // It is the lease's own.
    let mut lease = warm.lease_with(&LeaseOptions::new().timeout(Duration::from_millis(50)));
    let error = lease.as_mut().unwrap().call("spin", &[]).expect_err("it never ends by itself");
    assert!(matches!(error, CallError::Timeout(_)), "{error}");
}

#[test]
fn a_cpu_time_limit_without_a_watch_is_refused() {
    let warm = guest(GuestOptions::default()).warm(WarmUp::new()).unwrap();
    let limit = CallOptions::new().cpu_time(Duration::from_secs(1));
    let error = warm.lease().unwrap().set_limits(&limit).expect_err("nothing checks it");
    assert!(matches!(error, LoadError::Limit { limit: "CPU time limit", .. }), "{error}");
}

#[test]
fn a_watch_without_timeouts_is_refused() {
    let config = EngineConfig { timeouts: false, ..EngineConfig::default() };
    let module = wat::parse_str(MODULE).unwrap();
    let options = GuestOptions { watch: Watch::new(|_| true), ..GuestOptions::default() };
    let guest = Guest::with_options(&Engine::new(config).unwrap(), &module, options).unwrap();
    let error = guest.warm(WarmUp::new()).expect_err("the engine looks at no epoch");
    assert!(matches!(error, WarmError::Load(LoadError::Limit { limit: "watch", .. })), "{error}");
}

#[test]
fn dirty_pages_differ_from_the_state_of_the_next_rollback() {
    let warm = guest(GuestOptions::default()).warm(WarmUp::new()).unwrap();
    for pages in [1, 9, 3] {
        let mut lease = warm.lease().unwrap();
        assert_eq!(lease.dirty_pages().unwrap(), 0);
        lease.call("touch", &[Val::I32(pages)]).unwrap();
        assert_eq!(lease.dirty_pages().unwrap(), pages as usize);
    }
}

#[test]
fn a_watch_that_panics_ends_its_call_and_watches_the_next() {
    let asked = Arc::new(AtomicU32::new(0));
    let watch = Watch::new({
        let asked = asked.clone();
        move |_| match asked.fetch_add(1, Ordering::Relaxed) {
            0 => panic!("the watch fails once"),
            count => count < 3,
        }
    });
    let warm =
        guest(GuestOptions { watch, ..GuestOptions::default() }).warm(WarmUp::new()).unwrap();
    let mut lease = warm.lease().unwrap();
    let error = lease.call("spin", &[]).expect_err("the watch panicked");
    assert!(format!("{error:?}").contains("watch panicked"), "{error:?}");
    for _ in 0..2 {
        let error = lease.call("spin", &[]).expect_err("it never ends by itself");
        assert!(matches!(error, CallError::Stopped), "{error}");
    }
}

#[test]
fn a_time_limit_beyond_the_clock_is_no_limit() {
    let options = GuestOptions {
        timeout: Some(Duration::MAX),
        watch: Watch::new(|_| true),
        ..GuestOptions::default()
    };
    let warm = guest(options).warm(WarmUp::new()).unwrap();
    warm.lease().unwrap().call("touch", &[Val::I32(1)]).unwrap();
}

/// `import` calls the host once, and then never returns.
const IMPORTS: &str = r#"(module
    (import "host" "meddle" (func $meddle))
    (global $state (mut i32) (i32.const 0))
    (func (export "import") (global.set $state (i32.const 1)) (call $meddle) (loop $on (br $on)))
    (func (export "spin") (loop $on (br $on)))
    (func (export "look") (result i32) (global.get $state)))"#;

/// A guest whose watch lets calls run while `permits` holds. It may look before the host function
/// is called.
fn meddling(
    permits: &Arc<AtomicBool>,
    meddle: fn(wasmtime::Caller<'_, afresh_wasm::Host>),
) -> afresh_wasm::Warm {
    let imports = afresh_wasm::Imports::new(move |linker: &mut wasmtime::Linker<_>| {
        linker.func_wrap(
            "host",
            "meddle",
            move |caller: wasmtime::Caller<'_, afresh_wasm::Host>| {
                meddle(caller);
            },
        )?;
        Ok(())
    });
    let timeout = Some(Duration::from_secs(20));
    let permits = Arc::clone(permits);
    let watch = Watch::new(move |_| permits.load(Ordering::Relaxed));
    let options = GuestOptions { imports, timeout, watch, ..GuestOptions::default() };
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let module = wat::parse_str(IMPORTS).unwrap();
    Guest::with_options(&engine, &module, options).unwrap().warm(WarmUp::new()).unwrap()
}

#[test]
fn a_watch_that_a_host_function_removed_is_back_in_the_next_lease() {
    let permits = Arc::new(AtomicBool::new(true));
    let warm = meddling(&permits, |mut caller| caller.as_context_mut().epoch_deadline_trap());
    for _ in 0..2 {
        permits.store(true, Ordering::Relaxed);
        let error = warm.lease().unwrap().call("import", &[]).expect_err("it never returns");
        assert!(matches!(error, CallError::Timeout(_)), "{error}");
        permits.store(false, Ordering::Relaxed);
        let error = warm.lease().unwrap().call("spin", &[]).expect_err("it never returns");
        assert!(matches!(error, CallError::Stopped), "{error}");
    }
    // A session has no limit any more, and is refused.
    let mut session =
        <afresh_wasm::Session as afresh_snapshot::Guest>::make(&warm, &warm.root().unwrap())
            .unwrap();
    permits.store(true, Ordering::Relaxed);
    session.lease().call("import", &[]).expect_err("it never returns");
    let error = session.lease().call("spin", &[]).expect_err("its watch is gone");
    assert!(matches!(error, CallError::CutOff), "{error}");
}

#[test]
fn a_lease_is_spent_once_a_host_function_panicked_in_it() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let permits = Arc::new(AtomicBool::new(true));
    let warm = meddling(&permits, |_| panic!("in the middle of a call"));
    let mut lease = warm.lease().unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| lease.call("import", &[]))).is_err());
    let error = lease.call("look", &[]).expect_err("the call before was cut off");
    assert!(matches!(error, CallError::CutOff), "{error}");
    drop(lease);
    let answer = warm.lease().unwrap().call("look", &[]).unwrap();
    assert!(matches!(answer[..], [Val::I32(0)]), "{answer:?}");
    // A session does not keep the state half-way.
    let mut session =
        <afresh_wasm::Session as afresh_snapshot::Guest>::make(&warm, &warm.root().unwrap())
            .unwrap();
    let mut lease = session.lease();
    assert!(catch_unwind(AssertUnwindSafe(|| lease.call("import", &[]))).is_err());
    drop(lease);
    let error = afresh_snapshot::Guest::checkpoint(&mut session).expect_err("it is half-way");
    assert!(matches!(error, afresh_wasm::SessionError::State(_)), "{error}");
}

const ASKING: &str = r#"(component
    (import "ask" (func $ask (result u32)))
    (core func $lowered (canon lower (func $ask)))
    (core module $m
        (import "host" "ask" (func $ask (result i32)))
        (func (export "get") (result i32) (call $ask)))
    (core instance $i (instantiate $m (with "host" (instance (export "ask" (func $lowered))))))
    (func (export "get") (result u32) (canon lift (core func $i "get"))))"#;

#[test]
fn a_lease_of_a_component_is_spent_once_a_host_function_panicked_in_it() {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let panics = Arc::new(AtomicBool::new(true));
    let asked = panics.clone();
    let imports = Imports::default().component(move |linker| {
        let asked = asked.clone();
        linker.root().func_wrap("ask", move |_, (): ()| {
            assert!(!asked.load(Ordering::Relaxed), "in the middle of a call");
            Ok((7_u32,))
        })
    });
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { imports, ..GuestOptions::default() };
    let wasm = wat::parse_str(ASKING).unwrap();
    let guest = Guest::with_options(&engine, &wasm, options).unwrap();
    let warm = guest.warm_component().unwrap();
    let mut lease = warm.lease().unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| lease.call("get", &[]))).is_err());
    panics.store(false, Ordering::Relaxed);
    assert!(lease.is_cut_short());
    for error in [lease.call("get", &[]).unwrap_err(), lease.call_text("get", &[]).unwrap_err()] {
        assert!(matches!(error, CallError::CutOff), "{error}");
    }
    drop(lease);
    assert_eq!(warm.lease().unwrap().call_text("get", &[]).unwrap(), "7");
}

#[test]
fn a_lease_of_a_component_is_spent_once_a_call_trapped_in_it() {
    let text = r#"(component
        (core module $m
            (memory (export "memory") 1)
            (func (export "crash")
                (i32.store (i32.const 0) (i32.const 9))
                unreachable)
            (func (export "get") (result i32) (i32.load (i32.const 0))))
        (core instance $i (instantiate $m))
        (func (export "crash") (canon lift (core func $i "crash")))
        (func (export "get") (result u32) (canon lift (core func $i "get"))))"#;
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let guest = Guest::new(&engine, &wat::parse_str(text).unwrap()).unwrap();
    let warm = guest.warm_component().unwrap();
    let mut lease = warm.lease().unwrap();
    assert!(lease.call("missing", &[]).is_err() && !lease.is_cut_short());
    let error = lease.call("crash", &[]).unwrap_err();
    assert!(matches!(error, CallError::Trap { .. }), "{error}");
    assert!(lease.is_cut_short());
    for error in [lease.call("get", &[]).unwrap_err(), lease.call_text("get", &[]).unwrap_err()] {
        assert!(matches!(error, CallError::CutOff), "{error}");
    }
    drop(lease);
    assert_eq!(warm.lease().unwrap().call_text("get", &[]).unwrap(), "0");
}

/// A module and a component whose start function runs in each instance, as long as the host says.
const STARTS: [&str; 2] = [
    r#"(module
        (import "host" "more" (func $more (result i32)))
        (import "host" "token" (func $token (result externref)))
        (global $kept (mut externref) (ref.null extern))
        (func $start (global.set $kept (call $token)) (loop $on (br_if $on (call $more))))
        (start $start)
        (func (export "get") (result i32) (i32.const 7)))"#,
    r#"(component
        (import "more" (func $more (result u32)))
        (core func $lowered (canon lower (func $more)))
        (core module $m
            (import "host" "more" (func $more (result i32)))
            (global $kept (mut funcref) (ref.null func))
            (elem declare func $start)
            (func $start
                (global.set $kept (ref.func $start))
                (loop $on (br_if $on (call $more))))
            (start $start)
            (func (export "get") (result i32) (i32.const 7)))
        (core instance $i
            (instantiate $m (with "host" (instance (export "more" (func $lowered))))))
        (func (export "get") (result u32) (canon lift (core func $i "get"))))"#,
];

/// Guests of `STARTS`, and what the host says.
fn starts(options: impl Fn() -> GuestOptions) -> [(Guest, Arc<AtomicBool>); 2] {
    STARTS.map(|text| {
        let more = Arc::new(AtomicBool::new(false));
        let (of_module, of_component) = (more.clone(), more.clone());
        let imports = Imports::new(move |linker| {
            let more = of_module.clone();
            linker.func_wrap("host", "more", move || i32::from(more.load(Ordering::Relaxed)))?;
            linker.func_wrap("host", "token", |mut caller: wasmtime::Caller<'_, Host>| {
                wasmtime::ExternRef::new(&mut caller, 1).map(Some)
            })?;
            Ok(())
        });
        let imports = imports.component(move |linker| {
            let more = of_component.clone();
            linker
                .root()
                .func_wrap("more", move |_, (): ()| Ok((u32::from(more.load(Ordering::Relaxed)),)))
        });
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let options = GuestOptions { imports, ..options() };
        let wasm = wat::parse_str(text).unwrap();
        (Guest::with_options(&engine, &wasm, options).unwrap(), more)
    })
}

/// The error of a lease whose start function does not end.
fn refused_start(
    guest: &Guest,
    more: &AtomicBool,
    is_component: bool,
    options: &LeaseOptions,
) -> WarmError {
    if is_component {
        let warm = guest.warm_component().unwrap();
        assert!(warm.rerun_reason().is_some());
        more.store(true, Ordering::Relaxed);
        return warm.lease_with(options).map(drop).unwrap_err();
    }
    let warm = guest.warm(WarmUp::new()).unwrap();
    more.store(true, Ordering::Relaxed);
    warm.lease_with(options).map(drop).unwrap_err()
}

#[test]
fn a_start_function_keeps_the_limits_of_a_call() {
    let timeout = Some(Duration::from_millis(50));
    let limited = || GuestOptions { timeout, ..GuestOptions::default() };
    for (is_component, (guest, more)) in [false, true].into_iter().zip(starts(limited)) {
        let error = refused_start(&guest, &more, is_component, &LeaseOptions::new());
        let timed_out = matches!(error, WarmError::Call { error: CallError::Timeout(_), .. });
        assert!(timed_out, "{is_component}: {error}");
    }
    // A plain lease polls a start function once, which must not give way then.
    let giving_way = || GuestOptions { gives_way: true, asynchronous: true, ..limited() };
    for (is_component, (guest, more)) in [false, true].into_iter().zip(starts(giving_way)) {
        let error = refused_start(&guest, &more, is_component, &LeaseOptions::new());
        let timed_out = matches!(error, WarmError::Call { error: CallError::Timeout(_), .. });
        assert!(timed_out, "{is_component}: {error}");
    }
    let of_lease = LeaseOptions::new().timeout(Duration::from_millis(20));
    for (is_component, (guest, more)) in [false, true].into_iter().zip(starts(limited)) {
        let error = refused_start(&guest, &more, is_component, &of_lease);
        let ended = matches!(&error, WarmError::Call { error: CallError::Timeout(limit), .. }
            if *limit == Duration::from_millis(20));
        assert!(ended, "{is_component}: {error}");
    }
    let total = Arc::new(AtomicU32::new(0));
    let watched = starts(|| ends_after(3, &total));
    for (is_component, (guest, more)) in [false, true].into_iter().zip(watched) {
        let error = refused_start(&guest, &more, is_component, &LeaseOptions::new());
        let stopped = matches!(error, WarmError::Call { error: CallError::Stopped, .. });
        assert!(stopped, "{is_component}: {error}");
    }
}

#[test]
fn a_component_whose_warm_up_does_not_end_is_stopped_by_its_watch() {
    for gives_way in [false, true] {
        let total = Arc::new(AtomicU32::new(0));
        let options =
            || GuestOptions { gives_way, asynchronous: gives_way, ..ends_after(3, &total) };
        let [_, (guest, more)] = starts(options);
        more.store(true, Ordering::Relaxed);
        let error = guest.warm_component().map(drop).unwrap_err();
        assert!(matches!(error, WarmError::Call { error: CallError::Stopped, .. }), "{error}");
    }
}
