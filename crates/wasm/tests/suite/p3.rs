//! Components of WASI 0.3: functions that wait without their thread, from a warm state, in tasks.

use std::collections::BTreeSet;

use afresh_wasm::afresh_files::{Budget, Tree};
use afresh_wasm::wasmtime::component::Val;
use afresh_wasm::{
    Engine, EngineConfig, Guest, GuestOptions, LeaseOptions, WarmComponent, WarmUp, Wasi,
};

/// Waits for a millisecond in each call, and counts calls in a global and a memory.
const COUNTER: &str = r#"(component
    (import "wasi:clocks/monotonic-clock@0.3.0" (instance $clock
        (export "wait-for" (func async (param "how-long" u64)))))
    (import "wasi:random/random@0.3.0" (instance $random
        (export "get-random-u64" (func (result u64)))))
    (core module $libc (memory (export "memory") 1) (data (i32.const 64) "data"))
    (core instance $libc (instantiate $libc))
    (core func $wait (canon lower (func $clock "wait-for") async (memory (core memory $libc "memory"))))
    (core func $random (canon lower (func $random "get-random-u64")))
    (core func $return (canon task.return (result u64)))
    (core func $set-new (canon waitable-set.new))
    (core func $set-drop (canon waitable-set.drop))
    (core func $join (canon waitable.join))
    (core func $drop (canon subtask.drop))
    (core module $code
        (import "libc" "memory" (memory 1))
        (import "host" "wait" (func $wait (param i64) (result i32)))
        (import "host" "random" (func $random (result i64)))
        (import "host" "return" (func $return (param i64)))
        (import "host" "set-new" (func $set-new (result i32)))
        (import "host" "set-drop" (func $set-drop (param i32)))
        (import "host" "join" (func $join (param i32 i32)))
        (import "host" "drop" (func $drop (param i32)))
        (global $count (mut i32) (i32.const 0))
        (global $set (mut i32) (i32.const 0))
        ;; Both have to agree.
        (func $count (result i64)
            (if (i32.ne (i32.load (i32.const 0)) (global.get $count)) (then (unreachable)))
            (if (i32.ne (i32.load8_u (i32.const 64)) (i32.const 100)) (then (unreachable)))
            (i64.extend_i32_u (global.get $count)))
        (func $next
            (global.set $count (i32.add (global.get $count) (i32.const 1)))
            (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (i32.const 1))))
        ;; Waits, and says in which set, or 0.
        (func $begin (result i32) (local $status i32)
            (local.set $status (call $wait (i64.const 1000000)))
            (if (result i32) (i32.eq (i32.and (local.get $status) (i32.const 15)) (i32.const 2))
                (then (i32.const 0))
                (else
                    (global.set $set (call $set-new))
                    (call $join (i32.shr_u (local.get $status) (i32.const 4)) (global.get $set))
                    (i32.or (i32.shl (global.get $set) (i32.const 4)) (i32.const 2)))))
        (func (export "next") (result i32) (local $code i32)
            (call $next)
            (local.set $code (call $begin))
            (if (i32.eqz (local.get $code)) (then (call $return (call $count))))
            (local.get $code))
        (func (export "waited") (param $event i32) (param $subtask i32) (param $state i32) (result i32)
            (if (i32.or (i32.ne (local.get $event) (i32.const 1)) (i32.ne (local.get $state) (i32.const 2)))
                (then (return (i32.or (i32.shl (global.get $set) (i32.const 4)) (i32.const 2)))))
            (call $drop (local.get $subtask))
            (call $set-drop (global.get $set))
            (global.set $set (i32.const 0))
            (call $return (call $count))
            (i32.const 0))
        ;; Answers, and goes on waiting behind its caller's back.
        (func (export "linger") (result i32)
            (call $return (i64.const 7))
            (call $begin))
        (func (export "lingered") (param i32 i32 i32) (result i32) (i32.const 0))
        ;; Answers, and is not over.
        (func (export "yielding") (result i32)
            (call $return (i64.const 8))
            (i32.const 1))
        (func (export "yielded") (param i32 i32 i32) (result i32) (i32.const 1))
        (func (export "peek") (result i64) (call $count))
        (func (export "random") (result i64) (call $random)))
    (core instance $code (instantiate $code
        (with "libc" (instance $libc))
        (with "host" (instance
            (export "wait" (func $wait)) (export "random" (func $random)) (export "return" (func $return))
            (export "set-new" (func $set-new)) (export "set-drop" (func $set-drop))
            (export "join" (func $join)) (export "drop" (func $drop))))))
    (func (export "next") async (result u64)
        (canon lift (core func $code "next") async (callback (core func $code "waited"))))
    (func (export "linger") async (result u64)
        (canon lift (core func $code "linger") async (callback (core func $code "lingered"))))
    (func (export "yielding") async (result u64)
        (canon lift (core func $code "yielding") async (callback (core func $code "yielded"))))
    (func (export "peek") (result u64) (canon lift (core func $code "peek")))
    (func (export "random") (result u64) (canon lift (core func $code "random"))))"#;

fn guest(options: GuestOptions) -> Guest {
    let engine = Engine::new(EngineConfig { p3: true, ..EngineConfig::default() }).unwrap();
    Guest::with_options(&engine, &wat::parse_str(COUNTER).unwrap(), options).unwrap()
}

fn asynchronous() -> GuestOptions {
    GuestOptions { asynchronous: true, ..GuestOptions::default() }
}

async fn warm(calls: &[&str]) -> Result<WarmComponent, afresh_wasm::WarmError> {
    let warm_up = calls.iter().fold(WarmUp::new(), |up, name| up.call(*name, &[]));
    guest(asynchronous()).warm_component_async(&warm_up).await
}

async fn ask(warm: &WarmComponent, names: &[&str]) -> Vec<u64> {
    let mut lease = warm.lease_async(&LeaseOptions::default()).await.unwrap();
    let mut answers = Vec::new();
    for name in names {
        match lease.call_async(name, &[]).await.unwrap()[..] {
            [Val::U64(answer)] => answers.push(answer),
            ref other => panic!("{name}: {other:?}"),
        }
    }
    answers
}

#[tokio::test]
async fn a_component_that_waits_starts_every_call_from_its_warm_state() {
    let warm = warm(&["next", "next", "peek"]).await.unwrap();
    assert_eq!(warm.rerun_reason(), None);
    for _ in 0..10 {
        assert_eq!(ask(&warm, &["peek", "next", "next", "peek"]).await, [2, 3, 4, 4]);
        assert!(warm.compare().unwrap().is_clean());
        // Work that continues after the answer ends with its lease.
        assert_eq!(ask(&warm, &["linger", "yielding", "peek"]).await, [7, 8, 2]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_many_tasks_wait_side_by_side() {
    let warm = warm(&["next"]).await.unwrap();
    let tasks = (0..32).map(|_| {
        let warm = warm.clone();
        tokio::spawn(async move { ask(&warm, &["next", "next"]).await })
    });
    for task in tasks.collect::<Vec<_>>() {
        assert_eq!(task.await.unwrap(), [2, 3]);
    }
}

#[tokio::test]
async fn clones_draw_their_own_random_numbers_and_a_call_that_is_dropped_leaves_nothing() {
    let warm = warm(&["random", "next"]).await.unwrap();
    let mut drawn = BTreeSet::new();
    for _ in 0..8 {
        drawn.extend(ask(&warm, &["random"]).await);
        let mut lease = warm.lease_async(&LeaseOptions::default()).await.unwrap();
        let cut = tokio::time::timeout(std::time::Duration::ZERO, lease.call_async("next", &[]));
        drop(cut.await);
        drop(lease);
        assert_eq!(ask(&warm, &["next"]).await, [2]);
    }
    assert_eq!(drawn.len(), 8);
}

#[tokio::test]
async fn a_warm_up_whose_tasks_go_on_is_refused() {
    for unfinished in ["linger", "yielding"] {
        let error = warm(&["next", unfinished]).await.unwrap_err().to_string();
        assert!(error.contains("alive"), "{unfinished}: {error}");
    }
}

#[tokio::test]
async fn it_is_for_asynchronous_guests_and_has_no_files() {
    let error = guest(GuestOptions::default()).warm_component().unwrap_err().to_string();
    assert!(error.contains("wasi:clocks/monotonic-clock@0.3.0"), "{error}");
    let text = r#"(component (import "wasi:filesystem/preopens@0.3.0" (instance
        (export "nothing" (func)))))"#;
    let engine = Engine::new(EngineConfig { p3: true, ..EngineConfig::default() }).unwrap();
    let tree = Wasi { files: Some(Tree::new(Budget::default())), ..Wasi::default() };
    let dirs = vec![(std::env::temp_dir(), "/data".to_owned(), false)];
    let directory = Wasi { dirs, ..Wasi::default() };
    for wasi in [tree, directory.clone()] {
        let options = GuestOptions { wasi, stub_imports: true, ..asynchronous() };
        let guest = Guest::with_options(&engine, &wat::parse_str(text).unwrap(), options).unwrap();
        let error = guest.warm_component_async(&WarmUp::new()).await.unwrap_err().to_string();
        assert!(error.contains("wasi:filesystem/preopens@0.3.0"), "{error}");
        assert!(error.contains("WASI 0.2"), "{error}");
    }
    // Nor does one lease have any.
    let text = r#"(component (import "wasi:filesystem/preopens@0.3.0" (instance)))"#;
    let guest = Guest::with_options(&engine, &wat::parse_str(text).unwrap(), asynchronous());
    let warm = guest.unwrap().warm_component_async(&WarmUp::new()).await.unwrap();
    warm.lease_async(&LeaseOptions::default()).await.unwrap();
    let options = LeaseOptions::new().wasi(directory);
    let error = warm.lease_async(&options).await.unwrap_err().to_string();
    assert!(error.contains("wasi:filesystem/preopens@0.3.0"), "{error}");
}

#[test]
fn an_engine_without_it_refuses_the_component() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let wasm = wat::parse_str(COUNTER).unwrap();
    let guest = Guest::with_options(&engine, &wasm, GuestOptions::default()).unwrap();
    assert!(guest.warm_component().is_err());
}
