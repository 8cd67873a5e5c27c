//! Leases that own their guest, leases of tasks, their options, and why none is available.

use std::error::Error;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use afresh::pool::{LimitPolicy, Limits, MAX_CALL_THREADS, run_blocking};
use afresh::wasm::{EngineConfig, GuestOptions, Imports};
use afresh::{
    AsyncLease, Call, CallError, CallOptions, Guest, LeaseError, LeaseOptions, Options, OwnedLease,
    Session, SessionError,
};

/// Counts in memory. `spin` never ends, and `count` takes fuel in proportion to its argument.
const COUNTER: &str = r#"(module
    (memory (export "memory") 1)
    (func (export "afresh_buffer") (param i32) (result i32) (i32.const 1024))
    (func (export "add") (param i32) (result i32)
        (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
        (i32.load (i32.const 0)))
    (func (export "bytes") (param i32) (result i64)
        (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
        (i64.or (i64.shl (i64.const 1024) (i64.const 32)) (i64.extend_i32_u (local.get 0))))
    (func (export "spin") (param i32) (result i64)
        (i32.store (i32.const 0) (i32.const 1000))
        (loop (br 0)) unreachable)
    (func (export "count") (param i32) (result i32)
        (loop (local.set 0 (i32.sub (local.get 0) (i32.const 1))) (br_if 0 (local.get 0)))
        (i32.const 0)))"#;

/// Maximum wait for an end that is due.
const END_TIMEOUT: Duration = Duration::from_secs(60);

fn guest(options: &Options) -> Guest {
    Guest::from_bytes("counter", &wat::parse_str(COUNTER).unwrap(), options).unwrap()
}

/// With one instance.
fn one(exhausted: LimitPolicy) -> Options {
    Options::new().limits(Limits { items: 1, exhausted, ..Limits::default() })
}

fn add(number: &str) -> Call {
    Call::text("add", [number])
}

/// Runs a task on one thread, which must not be blocked.
fn block_on<T>(task: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(END_TIMEOUT, task).await.expect("it hangs") })
}

#[test]
fn an_owned_lease_outlives_its_guest_and_moves_between_threads() {
    let guest = guest(&one(LimitPolicy::Error));
    let mut lease = guest.lease_owned().unwrap();
    assert!(matches!(guest.lease(), Err(LeaseError::Exhausted { limit: 1 })));
    let other = guest.clone();
    drop(guest);
    let lease: OwnedLease = std::thread::spawn(move || {
        assert_eq!(lease.invoke(&add("40")).unwrap().text(), "40");
        lease
    })
    .join()
    .unwrap();
    let mut lease = std::thread::spawn(move || lease).join().unwrap();
    assert_eq!(lease.invoke(&add("2")).unwrap().text(), "42");
    drop(lease);
    assert_eq!(other.invoke(&add("1")).unwrap().text(), "1");
    let mut last = other.lease_owned().unwrap();
    drop(other);
    assert_eq!(last.invoke(&add("1")).unwrap().text(), "1");
    assert_eq!(last.call("bytes", b"four").unwrap().len(), 4);
}

#[test]
fn an_error_tells_why_no_instance_is_available() {
    let guest_of = guest;
    let guest = guest_of(&one(LimitPolicy::Error));
    let held = guest.lease().unwrap();
    let error = guest.lease().unwrap_err();
    assert!(matches!(error, LeaseError::Exhausted { limit: 1 }), "{error:?}");
    assert!(error.to_string().contains("Guest::lease_async"), "{error}");
    let error = guest.call("bytes", b"").unwrap_err();
    assert!(matches!(error, CallError::Lease(LeaseError::Exhausted { .. })), "{error:?}");
    // A lease decides for itself how it waits.
    let wait = LeaseOptions::new().exhausted(LimitPolicy::Wait(Duration::from_millis(5)));
    let error = guest.lease_with(&wait).unwrap_err();
    assert!(matches!(error, LeaseError::Timeout { waited } if waited.as_millis() == 5));
    let more = LeaseOptions::new().exhausted(LimitPolicy::OnDemand);
    drop((guest.lease_with(&more).unwrap(), guest.lease_owned_with(&more).unwrap()));
    drop(held);
    // The engine counts neither time nor fuel.
    for options in [LeaseOptions::new().timeout(END_TIMEOUT), LeaseOptions::new().fuel(1)] {
        let error = guest.lease_with(&options).unwrap_err();
        assert!(matches!(error, LeaseError::Option(_)), "{error:?}");
        assert!(error.source().unwrap().to_string().contains("EngineConfig"), "{error:?}");
    }
    let error = guest.call_with("bytes", b"", &CallOptions::new().fuel(1)).unwrap_err();
    assert!(matches!(error, CallError::Option { .. }), "{error:?}");

    // It works in the first instance, which warms the guest, and not in a later one.
    let reseeds = r#"(module (global $ran (mut i32) (i32.const 0))
        (func (export "warm") (global.set $ran (i32.const 1)))
        (func (export "afresh_reseed") (param i64 i64)
            (if (global.get $ran) (then unreachable))))"#;
    let options = Options::new().warm(Call::text("warm", [""; 0]));
    let guest = Guest::from_bytes("reseeds", &wat::parse_str(reseeds).unwrap(), &options).unwrap();
    let error = guest.lease().unwrap_err();
    assert!(matches!(error, LeaseError::Guest(_)) && error.source().is_some(), "{error:?}");
}

#[test]
fn options_of_a_call_go_before_those_of_its_lease_and_its_guest() {
    let with = |fuel| GuestOptions { fuel, ..GuestOptions::default() };
    let guest = guest(&Options::new().wasm(with(Some(1_000))));
    let count = Call::text("count", ["1000"]);
    let (less, more) = (CallOptions::new().fuel(10), CallOptions::new().fuel(1_000_000));
    let lease_options = LeaseOptions::new().fuel(1_000_000);

    assert!(guest.invoke(&count).is_err());
    assert!(guest.invoke_with(&count, &more).is_ok());
    let mut lease = guest.lease_with(&lease_options).unwrap();
    for _ in 0..2 {
        assert!(lease.invoke(&count).is_ok());
        let error = lease.invoke_with(&count, &less).unwrap_err();
        assert!(matches!(error, CallError::Guest { .. }), "{error:?}");
    }
    drop(lease);
    // The instance comes back with the limits of its guest.
    assert!(guest.invoke(&count).is_err());
    let mut session = guest.session().unwrap();
    assert!(session.invoke_with(&count, &more).is_ok());
    assert!(session.invoke(&count).is_err());
    block_on(async {
        let mut lease = guest.lease_async_with(&lease_options).await.unwrap();
        assert!(lease.invoke(count.clone()).await.is_ok());
        assert!(lease.invoke_with(count.clone(), &less).await.is_err());
        assert!(guest.invoke_async(count.clone()).await.is_err());
        drop(lease);
        assert!(guest.invoke_async_with(count.clone(), &more).await.is_ok());
    });
}

/// Grows its memory by a number of pages.
const GROWING: &str = r#"(module (memory (export "memory") 1)
    (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
    (func (export "pages") (result i32) (memory.size)))"#;

#[test]
fn a_memory_limit_of_a_call_goes_before_that_of_its_lease_and_its_guest() {
    let wasm = wat::parse_str(GROWING).unwrap();
    let open = |options: &Options| Guest::from_bytes("growing", &wasm, options).unwrap();
    let grow = |pages: &str| Call::text("grow", [pages]);
    let limit = |pages: u64| CallOptions::new().memory(pages << 16);
    let guest = open(&one(LimitPolicy::Error).memory(4 << 16));

    assert_eq!(guest.invoke(&grow("3")).unwrap().text(), "1");
    assert_eq!(guest.invoke(&grow("4")).unwrap().text(), "-1");
    assert_eq!(guest.invoke_with(&grow("4"), &limit(5)).unwrap().text(), "1");
    assert_eq!(guest.invoke_with(&grow("1"), &limit(1)).unwrap().text(), "-1");
    assert_eq!(guest.invoke(&grow("4")).unwrap().text(), "-1");

    let mut lease = guest.lease_with(&LeaseOptions::new().memory(2 << 16)).unwrap();
    assert_eq!(lease.invoke(&grow("2")).unwrap().text(), "-1");
    assert_eq!(lease.invoke_with(&grow("2"), &limit(3)).unwrap().text(), "1");
    // It has more than the lease allows, and keeps it.
    assert_eq!(lease.invoke(&grow("1")).unwrap().text(), "-1");
    assert_eq!(lease.invoke(&Call::text("pages", [""; 0])).unwrap().text(), "3");
    drop(lease);
    assert_eq!(guest.invoke(&grow("3")).unwrap().text(), "1");

    let mut session = guest.session().unwrap();
    let root = session.at();
    assert_eq!(session.invoke_with(&grow("8"), &limit(9)).unwrap().text(), "1");
    assert_eq!(session.invoke(&grow("1")).unwrap().text(), "-1");
    // A limit of a call does not outlast it: a state of any size can be reached.
    session.checkpoint("large").unwrap();
    session.rollback(root).unwrap();
    assert_eq!(session.invoke_with(&grow("1"), &limit(1)).unwrap().text(), "-1");
    session.rollback("large").unwrap();
    let mut fork = session.fork(1).unwrap().remove(0);
    for session in [&mut session, &mut fork] {
        assert_eq!(session.invoke(&Call::text("pages", [""; 0])).unwrap().text(), "9");
        assert_eq!(session.invoke(&grow("1")).unwrap().text(), "-1");
    }
    session.rollback(root).unwrap();
    assert_eq!(session.invoke(&grow("3")).unwrap().text(), "1");

    let error = open(&Options::new()).invoke_with(&grow("1"), &limit(9)).unwrap_err();
    assert!(matches!(error, CallError::Option { .. }), "{error:?}");
    assert!(error.source().unwrap().to_string().contains("GuestOptions::memory_limit"));
}

#[test]
fn every_form_of_a_call_takes_options() {
    let with = GuestOptions { fuel: Some(1_000), ..GuestOptions::default() };
    let guest = guest(&Options::new().wasm(with));
    let none = CallOptions::new().fuel(1);
    let (sender, receiver) = std::sync::mpsc::channel();
    let hear = move |_, piece: &[u8]| sender.send(piece.to_vec()).is_ok();
    let mut lease = guest.lease().unwrap();
    lease.call_streaming("bytes", b"four", hear.clone()).unwrap();
    assert_eq!(receiver.recv().unwrap().len(), 4);
    let streamed = lease.call_streaming_with("bytes", b"four", &none, hear);
    let logged = lease.call_logged_with("bytes", b"four", &none, |_, _| {});
    let errors = [streamed.unwrap_err(), logged.unwrap_err()];
    drop(lease);
    let call = block_on(guest.call_async_with("bytes", *b"four", &none));
    for error in errors.into_iter().chain(call.err()) {
        assert!(matches!(error, CallError::Guest { .. }), "{error:?}");
    }
    assert!(receiver.recv().is_err());
    let mut lease = guest.lease().unwrap();
    assert_eq!(lease.call_logged("bytes", b"four", |_, _| {}).unwrap().len(), 4);
    // A kind that lacks an option refuses it in each form.
    let unlimited = CallOptions::new().timeout(END_TIMEOUT);
    let error = lease.call_streaming_with("bytes", b"", &unlimited, |_, _| true).unwrap_err();
    assert!(matches!(error, CallError::Option { .. }), "{error:?}");
}

#[test]
fn a_time_limit_of_a_call_needs_a_guest_that_can_be_interrupted() {
    let soon = CallOptions::new().timeout(Duration::from_millis(10));
    for options in [Options::new().interruptible(), Options::new().timeout(END_TIMEOUT)] {
        let error = guest(&options).call_with("spin", b"", &soon).unwrap_err();
        assert!(matches!(error, CallError::Timeout { .. }), "{error:?}");
    }
    let error = guest(&Options::new()).call_with("spin", b"", &soon).unwrap_err();
    assert!(matches!(error, CallError::Option { .. }), "{error:?}");
}

#[test]
fn a_task_waits_for_an_instance_and_blocks_no_thread() {
    // The policy of the guest does not matter: with `Wait`, a lease that is no task blocks.
    for policy in [LimitPolicy::Error, LimitPolicy::Wait(END_TIMEOUT)] {
        let guest = guest(&one(policy));
        block_on(async {
            let held = guest.lease_async().await.unwrap();
            let mut waiting = pin!(guest.lease_async());
            let mut context = Context::from_waker(Waker::noop());
            assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Pending));
            // A wait that a timeout ends takes nothing with it.
            let late = tokio::time::timeout(Duration::from_millis(5), guest.lease_async()).await;
            assert!(late.is_err());
            drop(held);
            let mut lease = waiting.await.unwrap();
            assert_eq!(lease.invoke(add("1")).await.unwrap().text(), "1");
            drop(lease);
            assert_eq!(guest.call_async("bytes", *b"four").await.unwrap().len(), 4);
        });
    }
    let guest = guest(&one(LimitPolicy::OnDemand));
    block_on(async {
        let leases = (guest.lease_async().await.unwrap(), guest.lease_async().await.unwrap());
        assert_eq!(guest.pool_stats().on_demand, 1);
        drop(leases);
    });
}

#[test]
fn many_tasks_share_few_instances() {
    let limits = Limits { items: 3, ..Limits::default() };
    let guest = guest(&Options::new().limits(limits));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let tasks: Vec<_> = (0..60)
        .map(|number: u32| {
            let guest = guest.clone();
            runtime.spawn(async move {
                let mut lease = guest.lease_async().await?;
                lease.invoke(add(&number.to_string())).await?;
                Ok::<_, CallError>(lease.invoke(add("1")).await?.text())
            })
        })
        .collect();
    for (number, task) in tasks.into_iter().enumerate() {
        assert_eq!(runtime.block_on(task).unwrap().unwrap(), (number + 1).to_string());
    }
    assert!(guest.pool_stats().alive <= 3);
}

#[test]
fn a_dropped_call_ends_and_its_instance_comes_back_pristine() {
    let guest = guest(&one(LimitPolicy::Error).interruptible());
    block_on(async {
        let mut lease = guest.lease_async().await.unwrap();
        let spinning = lease.call("spin", *b"");
        assert!(tokio::time::timeout(Duration::from_millis(20), spinning).await.is_err());
        assert!(lease.is_closed() && lease.get_mut().is_none());
        let error = lease.call("bytes", *b"").await.unwrap_err();
        assert!(matches!(error, CallError::Lease(LeaseError::Closed)), "{error:?}");
        // There is one instance, so this waits for the end of the call.
        let mut next = guest.lease_async().await.unwrap();
        assert_eq!(next.invoke(add("1")).await.unwrap().text(), "1");
        assert!(next.into_inner().is_some());
        // Before it has begun, too.
        let mut lease = guest.lease_async().await.unwrap();
        let mut call = Box::pin(lease.call("spin", *b""));
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(call);
        assert_eq!(guest.invoke_async(add("1")).await.unwrap().text(), "1");
    });
    assert_eq!(guest.pool_stats().in_use, 0);
}

/// Keeps every thread for calls busy until it is dropped.
struct BusyThreads(Arc<(Mutex<bool>, Condvar)>);

impl BusyThreads {
    fn new() -> Self {
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        for _ in 0..MAX_CALL_THREADS {
            let gate = Arc::clone(&gate);
            let wait = move || {
                let open = gate.0.lock().unwrap();
                drop(gate.1.wait_while(open, |open| !*open));
            };
            run_blocking(wait).unwrap();
        }
        Self(gate)
    }
}

impl Drop for BusyThreads {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

#[test]
fn a_dropped_call_that_waits_for_a_thread_gives_its_instance_back_at_once() {
    let guest = guest(&one(LimitPolicy::Error));
    let mut lease = block_on(guest.lease_async()).unwrap();
    let busy = BusyThreads::new();
    let mut call = Box::pin(lease.call("bytes", *b"four"));
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(guest.lease().is_err());
    drop(call);
    let mut next = guest.lease().unwrap();
    assert_eq!(next.invoke(&add("1")).unwrap().text(), "1");
    assert!(lease.is_closed());
    drop(busy);
}

/// A guest that calls the host.
const CALLER: &str = r#"(module
    (import "host" "wait" (func $wait))
    (memory (export "memory") 1)
    (func (export "add") (param i32) (result i32)
        (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
        (call $wait)
        (i32.load (i32.const 0))))"#;

#[test]
fn a_call_that_finds_no_thread_leaves_its_lease_as_it_was() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let name = "leases::a_call_that_finds_no_thread_leaves_its_lease_as_it_was";
    afresh_sys::run_isolated(name, || {
        let guest = guest(&Options::new());
        block_on(async {
            let mut lease = guest.lease_async().await.unwrap();
            lease.get_mut().unwrap().invoke(&add("5")).unwrap();
            let limit = getrlimit(Resource::As);
            // There is no room for the stack of a thread.
            setrlimit(Resource::As, Rlimit { current: Some(1), ..limit }).unwrap();
            let refused = lease.invoke(add("1")).await;
            setrlimit(Resource::As, limit).unwrap();
            assert!(
                matches!(&refused, Err(CallError::Lease(LeaseError::Create(_)))),
                "{refused:?}"
            );
            assert!(!lease.is_closed());
            assert_eq!(lease.invoke(add("1")).await.unwrap().text(), "6");
        });
    });
}

#[test]
fn an_asynchronous_guest_is_called_in_the_task_itself() {
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let imports = Imports::new(move |linker| {
        let gate = Arc::clone(&gate);
        linker.func_wrap_async("host", "wait", move |_, ()| {
            let gate = Arc::clone(&gate);
            Box::new(async move {
                while !gate.load(Ordering::Relaxed) {
                    tokio::task::yield_now().await;
                }
            })
        })?;
        Ok(())
    });
    let wasm = GuestOptions { imports, asynchronous: true, ..GuestOptions::default() };
    let options = one(LimitPolicy::Error).wasm(wasm);
    let guest = Guest::from_bytes("caller", &wat::parse_str(CALLER).unwrap(), &options).unwrap();
    block_on(async {
        let mut lease = guest.lease_async().await.unwrap();
        let mut call = Box::pin(lease.invoke(add("1")));
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(call);
        assert!(lease.is_closed());
        open.store(true, Ordering::Relaxed);
        assert_eq!(guest.invoke_async(add("2")).await.unwrap().text(), "2");
    });
}

#[test]
fn a_panic_of_a_host_function_reaches_the_task() {
    let panicking = Arc::new(AtomicBool::new(true));
    let switch = Arc::clone(&panicking);
    let imports = Imports::new(move |linker| {
        let switch = Arc::clone(&switch);
        linker.func_wrap("host", "wait", move || {
            assert!(!switch.load(Ordering::Relaxed), "a host function panics");
        })?;
        Ok(())
    });
    let options = one(LimitPolicy::Error).wasm(GuestOptions { imports, ..GuestOptions::default() });
    let guest = Guest::from_bytes("caller", &wat::parse_str(CALLER).unwrap(), &options).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (task, call) = (guest.clone(), add("1"));
    let panicked =
        runtime.block_on(runtime.spawn(async move { task.invoke_async(call).await.ok() }));
    assert!(panicked.unwrap_err().is_panic());
    panicking.store(false, Ordering::Relaxed);
    assert_eq!(runtime.block_on(guest.invoke_async(add("2"))).unwrap().text(), "2");
}

#[test]
fn futures_and_leases_can_move_between_threads() {
    fn movable<T: Send + 'static>(_: &T) {}
    let guest = guest(&Options::new());
    let (one, other) = (guest.clone(), guest.clone());
    movable(&async move { one.lease_async().await.map(drop) });
    movable(&async move { other.call_async("bytes", *b"").await });
    movable(&guest.lease_owned().unwrap());
    let mut lease: AsyncLease = block_on(guest.lease_async()).unwrap();
    movable(&lease);
    movable(&async move { lease.invoke(add("1")).await });
}

/// The error of an embedder.
#[derive(Debug, thiserror::Error)]
enum OwnError {
    #[error("the embedder refuses the answer")]
    Refused,
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Wasm(#[from] afresh::wasm::CallError),
}

#[test]
fn a_session_fails_with_its_calls_and_not_with_its_embedder() {
    let engine = EngineConfig { timeouts: true, ..EngineConfig::default() };
    let engine = afresh::wasm::Engine::new(engine).unwrap();
    let guest = guest(&Options::new().engine(engine).timeout(Duration::from_millis(20)));
    let mut session = guest.session().unwrap();
    let root = session.at();
    let refused = session.with(|lease| {
        lease.invoke(&add("1")).map_err(SessionError::from)?;
        Err::<(), _>(OwnError::Refused)
    });
    assert!(matches!(refused, Err(OwnError::Refused)) && session.failed().is_none());
    assert_eq!(session.invoke(&add("1")).unwrap().text(), "2");
    // A request that does not fit changes nothing either.
    let unfit = session.with(|lease| {
        Ok::<_, OwnError>(lease.invoke(&Call::text("none", ["1"])).map_err(SessionError::from)?)
    });
    assert!(unfit.is_err() && session.failed().is_none());

    type Run = fn(&mut afresh::Lease<'_>) -> Result<(), OwnError>;
    let by_front: Run =
        |lease| Ok(lease.call("spin", b"").map(drop).map_err(SessionError::from)?);
    let replaced: Run = |lease| lease.call("spin", b"").map(drop).map_err(|_| OwnError::Refused);
    let by_instance: Run = |lease| {
        let module = lease.as_module().unwrap();
        module.call("spin", &[afresh::wasm::Val::I32(0)])?;
        Ok(())
    };
    for run in [by_front, replaced, by_instance] {
        let failed = |session: &mut Session| session.with(run).unwrap_err();
        let error = failed(&mut session);
        assert!(session.failed().is_some(), "{error:?}");
        let again = failed(&mut session);
        assert!(matches!(again, OwnError::Session(SessionError::Failed { .. })), "{again:?}");
        session.rollback(root).unwrap();
        assert_eq!(session.invoke(&add("1")).unwrap().text(), "1");
        session.rollback(root).unwrap();
    }
}
