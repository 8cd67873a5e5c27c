//! Calls that wait do not hold their thread; one that is dropped, forgotten, stopped or that panics
//! in the middle leaves nothing behind.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use afresh_snapshot::Guest as _;
use afresh_wasm::wasmtime::{self, Caller, Linker};
use afresh_wasm::{
    CallError, Engine, EngineConfig, Entry, Guest, GuestOptions, Host, Imports, LeaseOptions, Mode,
    OwnedLease, Session, Val, Warm, WarmError, WarmUp,
};
use tokio::runtime::Runtime;
use tokio::sync::Barrier;
use tokio::time::{sleep, timeout};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const MODES: [Mode; 2] = [Mode::Reset, Mode::Fresh];

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap()
}

/// Runs a test, which must end by itself.
fn run<T: Send + 'static>(test: impl Future<Output = T> + Send + 'static) -> T {
    let runtime = runtime();
    let test = runtime.spawn(async { timeout(TEST_TIMEOUT, test).await });
    runtime.block_on(test).unwrap().expect("the test hangs")
}

fn engine() -> Engine {
    Engine::new(EngineConfig { fuel: true, ..EngineConfig::default() }).unwrap()
}

/// `host.wait` waits without end below 0, panics at 0, and otherwise sleeps for that many
/// milliseconds; `host.meet` waits for all others at the barrier.
fn imports(barrier: usize) -> Imports {
    let barrier = Arc::new(Barrier::new(barrier));
    Imports::new(move |linker: &mut Linker<Host>| {
        let barrier = barrier.clone();
        linker.func_wrap_async("host", "wait", |_: Caller<'_, Host>, (ms,): (i32,)| {
            Box::new(async move { wait(ms).await })
        })?;
        linker.func_wrap_async("host", "meet", move |_: Caller<'_, Host>, (): ()| {
            let barrier = barrier.clone();
            Box::new(async move {
                barrier.wait().await;
            })
        })?;
        Ok(())
    })
}

async fn wait(ms: i32) {
    match ms {
        ..0 => pending().await,
        0 => panic!("a host function panics"),
        _ => sleep(Duration::from_millis(ms as u64)).await,
    }
}

fn options(mode: Mode) -> GuestOptions {
    GuestOptions { mode, asynchronous: true, imports: imports(1), ..GuestOptions::default() }
}

fn guest(text: &str, options: GuestOptions) -> Guest {
    Guest::with_options(&engine(), &wat::parse_str(text).unwrap(), options).unwrap()
}

/// `spoil` changes all state, waits, and changes more; `sum` is 42 in the warm state, and changes
/// it.
const SPOILED: &str = r#"(module
    (import "host" "wait" (func $wait (param i32)))
    (import "host" "meet" (func $meet))
    (memory 1 10)
    (table $t 2 4 funcref)
    (elem declare func $f)
    (func $f)
    (data $text "passive")
    (global $n (mut i32) (i32.const 0))
    (func (export "warm") (global.set $n (i32.const 40)) (i32.store (i32.const 8) (i32.const 2)))
    (func $change
        (global.set $n (i32.add (global.get $n) (i32.const 1000)))
        (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (i32.const 1000)))
        (i32.store (i32.const 40000) (i32.const 7))
        (table.set $t (i32.const 1) (ref.func $f)))
    (func (export "spoil") (param $ms i32)
        (call $change)
        (memory.init $text (i32.const 100) (i32.const 0) (i32.const 7))
        (data.drop $text)
        (drop (memory.grow (i32.const 1)))
        (call $wait (local.get $ms))
        (call $change))
    (func (export "meet") (result i32) (call $change) (call $meet) (global.get $n))
    (func (export "spin") (call $change) (loop (br 0)))
    (func (export "trap") (call $change) (call $wait (i32.const 1)) unreachable)
    (func (export "sum") (result i32)
        (memory.init $text (i32.const 200) (i32.const 0) (i32.const 1))
        (i32.add
            (i32.add (i32.load (i32.const 40000)) (i32.load8_u (i32.const 100)))
            (i32.add
                (i32.mul (i32.const 10000)
                    (i32.add (i32.eqz (ref.is_null (table.get $t (i32.const 1))))
                        (i32.sub (memory.size) (i32.const 1))))
                (i32.add (global.get $n) (i32.load (i32.const 8)))))
        (call $change)))"#;

async fn spoiled(mode: Mode) -> (Warm, Entry<(), i32>) {
    let warm_up = WarmUp::new().call("warm", &[]);
    let warm = guest(SPOILED, options(mode)).warm_async(warm_up).await.unwrap();
    let sum = warm.entry("sum").unwrap();
    (warm, sum)
}

async fn lease(warm: &Warm) -> OwnedLease {
    warm.lease_async(&LeaseOptions::new()).await.unwrap()
}

/// The next thousand calls see nothing of earlier ones.
async fn pristine(warm: &Warm, sum: &Entry<(), i32>) {
    for _ in 0..1000 {
        assert_eq!(lease(warm).await.invoke_async(sum, ()).await.unwrap(), 42);
    }
    assert!(warm.compare().unwrap().is_clean());
    assert_eq!(warm.pool_stats().quarantined, 0);
}

/// Polls a future once, and gives it back.
fn poll_once<'a, T>(
    future: impl Future<Output = T> + 'a,
) -> std::pin::Pin<Box<dyn Future<Output = T> + 'a>> {
    let mut future: std::pin::Pin<Box<dyn Future<Output = T> + 'a>> = Box::pin(future);
    let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending(), "the call does not wait");
    future
}

#[test]
fn a_call_that_is_dropped_in_the_middle_leaves_nothing() {
    for mode in MODES {
        run(async move {
            let (warm, sum) = spoiled(mode).await;
            let spoil = warm.entry::<i32, ()>("spoil").unwrap();
            for round in 0..5 {
                let mut lease = lease(&warm).await;
                if round % 2 == 0 {
                    drop(poll_once(lease.invoke_async(&spoil, -1)));
                } else {
                    drop(poll_once(lease.call_async("spoil", &[Val::I32(-1)])));
                }
                let error = lease.invoke_async(&sum, ()).await.unwrap_err();
                assert!(matches!(error, CallError::CutOff), "{error}");
                let error = lease.call_async("sum", &[]).await.unwrap_err();
                assert!(matches!(error, CallError::CutOff), "{error}");
                drop(lease);
                pristine(&warm, &sum).await;
            }
            let replaced = if mode == Mode::Reset { 5 } else { 0 };
            assert_eq!(warm.growth_stats().0, replaced, "{mode:?}");
        });
    }
}

#[test]
fn a_task_that_is_aborted_in_the_middle_leaves_nothing() {
    for mode in MODES {
        run(async move {
            let (warm, sum) = spoiled(mode).await;
            let tasks: Vec<_> = (0..20)
                .map(|_| {
                    let mut lease = warm.lease_owned(&LeaseOptions::new()).unwrap();
                    tokio::spawn(async move { lease.call_async("spoil", &[Val::I32(-1)]).await })
                })
                .collect();
            sleep(Duration::from_millis(20)).await;
            for task in tasks {
                task.abort();
                assert!(task.await.unwrap_err().is_cancelled());
            }
            pristine(&warm, &sum).await;
        });
    }
}

#[test]
fn a_call_that_is_forgotten_in_the_middle_leaves_nothing() {
    for mode in MODES {
        run(async move {
            let (warm, sum) = spoiled(mode).await;
            let mut lease = lease(&warm).await;
            std::mem::forget(poll_once(lease.call_async("spoil", &[Val::I32(-1)])));
            let error = lease.call_async("sum", &[]).await.unwrap_err();
            assert!(matches!(error, CallError::CutOff), "{error}");
            drop(lease);
            pristine(&warm, &sum).await;
        });
    }
}

#[test]
fn a_session_whose_call_was_cut_off_is_rolled_back_and_kept_by_no_checkpoint() {
    run(async {
        let (warm, sum) = spoiled(Mode::Reset).await;
        let spoil = warm.entry::<i32, ()>("spoil").unwrap();
        let root = warm.root().unwrap();
        let mut session = Session::make(&warm, &root).unwrap();
        for _ in 0..3 {
            let mut lease = session.lease();
            drop(poll_once(lease.invoke_async(&spoil, -1)));
            drop(lease);
            let error = session.checkpoint().unwrap_err().to_string();
            assert!(error.contains("cut off"), "{error}");
            session.switch(&root).unwrap();
            let state = session.checkpoint().unwrap();
            assert_eq!(session.lease().invoke_async(&sum, ()).await.unwrap(), 42);
            assert_ne!(session.lease().invoke_async(&sum, ()).await.unwrap(), 42);
            session.switch(&state).unwrap();
            assert_eq!(session.lease().invoke_async(&sum, ()).await.unwrap(), 42);
            session.switch(&root).unwrap();
        }
    });
}

#[test]
fn a_call_that_continues_after_waiting_behaves_as_any_other() {
    for mode in MODES {
        run(async move {
            let (warm, sum) = spoiled(mode).await;
            for _ in 0..3 {
                let mut lease = lease(&warm).await;
                // Its task may wake up on the other thread.
                lease.call_async("spoil", &[Val::I32(1)]).await.unwrap();
                let seen = lease.call_async("spoil", &[Val::I32(1)]).await;
                assert!(matches!(seen, Err(CallError::Trap { .. })), "its segment is dropped");
                drop(lease);
                assert_eq!(self::lease(&warm).await.invoke_async(&sum, ()).await.unwrap(), 42);
            }
            pristine(&warm, &sum).await;
        });
    }
}

#[test]
fn a_panic_a_trap_a_timeout_and_no_fuel_leave_nothing() {
    for mode in MODES {
        run(async move {
            let (warm, sum) = spoiled(mode).await;
            let mut panics = lease(&warm).await;
            let task =
                tokio::spawn(async move { panics.call_async("spoil", &[Val::I32(0)]).await });
            assert!(task.await.unwrap_err().is_panic());
            pristine(&warm, &sum).await;
            let error = lease(&warm).await.call_async("trap", &[]).await.unwrap_err();
            assert!(matches!(error, CallError::Trap { .. }), "{error}");
            pristine(&warm, &sum).await;
            let short = LeaseOptions::new().timeout(Duration::from_millis(10));
            let mut lease = warm.lease_async(&short).await.unwrap();
            let error = lease.call_async("spin", &[]).await.unwrap_err();
            assert!(matches!(error, CallError::Timeout(_)), "{error}");
            drop(lease);
            pristine(&warm, &sum).await;
            let mut lease = warm.lease_async(&LeaseOptions::new().fuel(1000)).await.unwrap();
            let error = lease.call_async("spin", &[]).await.unwrap_err();
            assert!(matches!(error, CallError::OutOfFuel(1000)), "{error}");
            drop(lease);
            pristine(&warm, &sum).await;
        });
    }
}

#[test]
fn a_thousand_calls_wait_at_once_on_two_threads() {
    const CALLS: usize = 1000;
    for mode in MODES {
        run(async move {
            let options = GuestOptions { imports: imports(CALLS), ..options(mode) };
            let warm_up = WarmUp::new().call("warm", &[]);
            let warm = guest(SPOILED, options).warm_async(warm_up).await.unwrap();
            let meet = warm.entry::<(), i32>("meet").unwrap();
            let tasks: Vec<_> = (0..CALLS)
                .map(|_| {
                    let (warm, meet) = (warm.clone(), meet.clone());
                    tokio::spawn(async move {
                        let mut lease = warm.lease_async(&LeaseOptions::new()).await.unwrap();
                        lease.invoke_async(&meet, ()).await.unwrap()
                    })
                })
                .collect();
            for task in tasks {
                assert_eq!(task.await.unwrap(), 1040);
            }
            assert_eq!(warm.pool_stats().alive, CALLS);
            assert!(warm.compare().unwrap().is_clean());
        });
    }
}

/// `nap` sleeps as WASI does, for a millisecond, and gives WASI's error.
const NAPS: &str = r#"(module
    (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "nap") (result i32)
        (i32.store (i32.const 16) (i32.const 1))
        (i64.store (i32.const 24) (i64.const 1000000))
        (call $poll (i32.const 0) (i32.const 128) (i32.const 1) (i32.const 256))))"#;

#[test]
fn wasi_that_waits_does_not_panic_in_a_task() {
    for mode in MODES {
        run(async move {
            let warm = guest(NAPS, options(mode)).warm_async(WarmUp::new().call("nap", &[])).await;
            let warm = warm.unwrap();
            let tasks: Vec<_> = (0..50)
                .map(|_| {
                    let warm = warm.clone();
                    tokio::spawn(async move { lease(&warm).await.call_async("nap", &[]).await })
                })
                .collect();
            for task in tasks {
                assert!(matches!(task.await.unwrap().unwrap()[..], [Val::I32(0)]), "{mode:?}");
            }
            assert!(warm.compare().unwrap().is_clean());
        });
    }
}

#[test]
fn a_warm_up_waits_also_outside_of_a_task() {
    for mode in MODES {
        let warm_up = WarmUp::new().call("spoil", &[Val::I32(1)]).call("warm", &[]);
        let warm = guest(SPOILED, options(mode)).warm(warm_up).unwrap();
        assert_eq!(warm.lease().unwrap().differences().unwrap(), (0, 0));
    }
}

#[test]
fn the_wrong_kind_of_call_says_which_is_right() {
    run(async {
        for mode in MODES {
            let (warm, sum) = spoiled(mode).await;
            let mut lease = lease(&warm).await;
            let error = lease.call("sum", &[]).unwrap_err();
            assert!(matches!(error, CallError::Asynchronous), "{error}");
            let error = lease.invoke(&sum, ()).unwrap_err();
            assert!(matches!(error, CallError::Asynchronous), "{error}");
            assert_eq!(lease.invoke_async(&sum, ()).await.unwrap(), 42);
        }
        let plain = guest(NAPS, GuestOptions::default()).warm(WarmUp::new()).unwrap();
        let error = lease(&plain).await.call_async("nap", &[]).await.unwrap_err();
        assert!(matches!(error, CallError::Synchronous), "{error}");
        // Without the option nothing may wait, and the error is reported before anything runs.
        let options = GuestOptions { asynchronous: false, ..options(Mode::Auto) };
        let error = guest(SPOILED, options).warm(WarmUp::new()).unwrap_err();
        assert!(error.to_string().contains("GuestOptions::asynchronous"), "{error}");
    });
}

/// Each instance runs `_initialize`, which waits, because no other instance could hold its result.
const INITIALISED: &str = r#"(module
    (import "host" "wait" (func $wait (param i32)))
    (type $box (struct (field i32)))
    (memory 1)
    (global $kept (mut (ref null $box)) (ref.null $box))
    (func (export "_initialize")
        (call $wait (i32.const 1))
        (global.set $kept (struct.new $box (i32.const 42))))
    (func (export "read") (result i32) (struct.get $box 0 (global.get $kept))))"#;

#[test]
fn a_lease_waits_for_the_start_of_its_guest() {
    run(async {
        let warm = guest(INITIALISED, options(Mode::Auto)).warm_async(WarmUp::new()).await.unwrap();
        assert!(warm.report().why_fresh.is_some());
        let read = warm.entry::<(), i32>("read").unwrap();
        for _ in 0..3 {
            assert_eq!(lease(&warm).await.invoke_async(&read, ()).await.unwrap(), 42);
            let error = warm.lease().unwrap_err();
            assert!(matches!(error, WarmError::Instantiate(_)), "{error}");
            assert!(error.to_string().contains("lease_async"), "{error}");
            // Dropped before it is there.
            drop(poll_once(warm.lease_async(&LeaseOptions::new())));
        }
        assert!(warm.compare().unwrap().is_clean());
    });
}

/// Two modules. The second has its own memory, made after the first's start function has waited.
const COMPONENT: &str = r#"(component
    (import "host" (instance $host
        (export "wait" (func (param "ms" s32)))
        (export "meet" (func))))
    (import "wasi:io/poll@0.2.0" (instance $poll
        (export "pollable" (type $pollable (sub resource)))
        (export "[method]pollable.block" (func (param "self" (borrow $pollable))))))
    (alias export $poll "pollable" (type $pollable))
    (import "wasi:clocks/monotonic-clock@0.2.0" (instance $clock
        (alias outer 1 $pollable (type $outer))
        (export "pollable" (type $pollable (eq $outer)))
        (export "subscribe-duration" (func (param "when" u64) (result (own $pollable))))))
    (core func $wait (canon lower (func $host "wait")))
    (core func $meet (canon lower (func $host "meet")))
    (core func $block (canon lower (func $poll "[method]pollable.block")))
    (core func $subscribe (canon lower (func $clock "subscribe-duration")))
    (core func $drop (canon resource.drop $pollable))
    (core module $first
        (import "host" "meet" (func $meet))
        (memory (export "memory") 1)
        (data (i32.const 8) "\05\00\00\00")
        (func $start (call $meet) (i32.store (i32.const 16) (i32.const 30)))
        (start $start))
    (core instance $first (instantiate $first
        (with "host" (instance (export "meet" (func $meet))))))
    (core module $second
        (import "first" "memory" (memory $first 1))
        (import "host" "wait" (func $wait (param i32)))
        (import "clock" "subscribe" (func $subscribe (param i64) (result i32)))
        (import "poll" "block" (func $block (param i32)))
        (import "poll" "drop" (func $drop (param i32)))
        (memory $own 1)
        (data (memory $own) (i32.const 8) "\07\00\00\00")
        (global $n (mut i32) (i32.const 0))
        (func $change
            (global.set $n (i32.add (global.get $n) (i32.const 1000)))
            (i32.store $own (i32.const 8) (i32.const 1000))
            (i32.store $first (i32.const 8) (i32.const 1000)))
        (func (export "spoil") (param i32)
            (call $change) (call $wait (local.get 0)) (call $change))
        (func (export "nap") (local $pollable i32)
            (call $change)
            (local.set $pollable (call $subscribe (i64.const 1000000)))
            (call $block (local.get $pollable))
            (call $drop (local.get $pollable)))
        (func (export "sum") (result i32)
            (i32.add (global.get $n) (i32.add (i32.load $own (i32.const 8))
                (i32.add (i32.load $first (i32.const 8)) (i32.load $first (i32.const 16)))))
            (call $change)))
    (core instance $second (instantiate $second
        (with "first" (instance $first))
        (with "host" (instance (export "wait" (func $wait))))
        (with "clock" (instance (export "subscribe" (func $subscribe))))
        (with "poll" (instance (export "block" (func $block)) (export "drop" (func $drop))))))
    (func (export "spoil") (param "ms" s32) (canon lift (core func $second "spoil")))
    (func (export "nap") (canon lift (core func $second "nap")))
    (func (export "sum") (result u32) (canon lift (core func $second "sum"))))"#;

mod component {
    use super::*;
    use afresh_wasm::wasmtime::component::{Linker, Val};
    use afresh_wasm::{ComponentLease, OwnedComponentLease, WarmComponent};

    fn options(barrier: Arc<Barrier>) -> GuestOptions {
        let link = move |linker: &mut Linker<Host>| -> wasmtime::Result<()> {
            let mut host = linker.instance("host")?;
            let barrier = barrier.clone();
            host.func_wrap_async("wait", |_, (ms,): (i32,)| {
                Box::new(async move {
                    wait(ms).await;
                    Ok(())
                })
            })?;
            host.func_wrap_async("meet", move |_, (): ()| {
                let barrier = barrier.clone();
                Box::new(async move {
                    barrier.wait().await;
                    Ok(())
                })
            })
        };
        let imports = Imports::default().component(link);
        GuestOptions { asynchronous: true, imports, ..GuestOptions::default() }
    }

    async fn warm(barrier: Arc<Barrier>) -> WarmComponent {
        let guest = guest(COMPONENT, options(barrier));
        guest.warm_component_async(&WarmUp::new()).await.unwrap()
    }

    async fn lease(warm: &WarmComponent) -> OwnedComponentLease {
        warm.lease_async(&LeaseOptions::new()).await.unwrap()
    }

    async fn sum(lease: &mut ComponentLease<'_>) -> u32 {
        match lease.call_async("sum", &[]).await.unwrap()[..] {
            [Val::U32(sum)] => sum,
            ref other => panic!("{other:?}"),
        }
    }

    async fn pristine(warm: &WarmComponent) {
        for _ in 0..1000 {
            assert_eq!(sum(&mut lease(warm).await).await, 42);
        }
        assert!(warm.compare().unwrap().is_clean());
        assert_eq!(warm.pool_stats().quarantined, 0);
    }

    #[test]
    fn memories_find_their_instances_while_several_wait_half_made() {
        const GUESTS: usize = 10;
        run(async {
            let barrier = Arc::new(Barrier::new(GUESTS));
            let tasks: Vec<_> = (0..GUESTS).map(|_| tokio::spawn(warm(barrier.clone()))).collect();
            for task in tasks {
                let warm = task.await.unwrap();
                assert_eq!(warm.rerun_reason(), None);
                assert_eq!(sum(&mut lease(&warm).await).await, 42);
            }
        });
    }

    #[test]
    fn a_call_that_is_dropped_in_the_middle_leaves_nothing() {
        run(async {
            let warm = warm(Arc::new(Barrier::new(1))).await;
            for _ in 0..3 {
                let mut lease = lease(&warm).await;
                drop(poll_once(lease.call_async("spoil", &[Val::S32(-1)])));
                let error = lease.call_async("sum", &[]).await.unwrap_err();
                assert!(matches!(error, CallError::CutOff), "{error}");
                drop(lease);
                pristine(&warm).await;
            }
            let mut lease = lease(&warm).await;
            std::mem::forget(poll_once(lease.call_async("spoil", &[Val::S32(-1)])));
            drop(lease);
            pristine(&warm).await;
        });
    }

    #[test]
    fn wasi_that_waits_does_not_panic_in_a_task() {
        run(async {
            let warm = warm(Arc::new(Barrier::new(1))).await;
            let naps = AtomicUsize::new(0);
            let naps = Arc::new(naps);
            let tasks: Vec<_> = (0..50)
                .map(|_| {
                    let (warm, naps) = (warm.clone(), naps.clone());
                    tokio::spawn(async move {
                        let mut lease = lease(&warm).await;
                        lease.call_async("nap", &[]).await.unwrap();
                        naps.fetch_add(1, Ordering::Relaxed);
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            assert_eq!(naps.load(Ordering::Relaxed), 50);
            let mut panics = lease(&warm).await;
            let task =
                tokio::spawn(async move { panics.call_async("spoil", &[Val::S32(0)]).await });
            assert!(task.await.unwrap_err().is_panic());
            pristine(&warm).await;
        });
    }

    #[test]
    fn the_wrong_kind_of_call_says_which_is_right() {
        run(async {
            let warm = warm(Arc::new(Barrier::new(1))).await;
            let error = lease(&warm).await.call("sum", &[]).unwrap_err();
            assert!(matches!(error, CallError::Asynchronous), "{error}");
        });
    }
}

#[test]
fn a_call_that_computes_gives_way_and_still_ends_in_time() {
    for mode in MODES {
        // One thread: without giving way nothing else would run until the call has ended.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let limit = Some(Duration::from_millis(300));
            let options = GuestOptions { gives_way: true, timeout: limit, ..options(mode) };
            let warm = guest(SPOILED, options).warm_async(WarmUp::new().call("warm", &[])).await;
            let warm = warm.unwrap();
            let (spin, sum) = (warm.entry::<(), ()>("spin").unwrap(), warm.entry("sum").unwrap());
            let mut spinning = lease(&warm).await;
            let others = async {
                for _ in 0..3 {
                    assert_eq!(lease(&warm).await.invoke_async(&sum, ()).await.unwrap(), 42);
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                biased;
                ended = spinning.invoke_async(&spin, ()) => panic!("nobody else ran: {ended:?}"),
                () = others => {}
            }
            let ended = lease(&warm).await.invoke_async(&spin, ()).await;
            assert!(matches!(ended, Err(CallError::Timeout(_))), "{ended:?}");
            drop(spinning);
            pristine(&warm, &sum).await;
        });
    }
}
