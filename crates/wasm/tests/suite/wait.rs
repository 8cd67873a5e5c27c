//! Waits in WASI end with the limits for a call, in modules and components. Without a limit they
//! last for the requested time.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::Duration;

use afresh_wasm::afresh_files::{Budget, Tree};
use afresh_wasm::wasmtime::component;
use afresh_wasm::{
    CallError, Engine, EngineConfig, Guest, GuestOptions, Output, Val, WarmUp, Wasi, Watch,
};

/// `nap` polls two clocks that expire far apart. The result is the number of events in the high
/// half, and the user data of the first in the low half.
const MODULE: &str = r#"(module
    (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "nap") (param $nanoseconds i64) (result i64)
        (i64.store (i32.const 0) (i64.const 41))
        (i32.store (i32.const 16) (i32.const 1))
        (i64.store (i32.const 24) (i64.const 9000000000000000000))
        (i64.store (i32.const 48) (i64.const 42))
        (i32.store (i32.const 64) (i32.const 1))
        (i64.store (i32.const 72) (local.get $nanoseconds))
        (if (call $poll (i32.const 0) (i32.const 128) (i32.const 2) (i32.const 256)) (then unreachable))
        (i64.or (i64.shl (i64.load32_u (i32.const 256)) (i64.const 32)) (i64.load (i32.const 128)))))"#;

const COMPONENT: &str = r#"(component
    (import "wasi:io/poll@0.2.0" (instance $poll
        (export "pollable" (type $pollable (sub resource)))
        (export "[method]pollable.block" (func (param "self" (borrow $pollable))))))
    (alias export $poll "pollable" (type $pollable))
    (import "wasi:clocks/monotonic-clock@0.2.0" (instance $clock
        (alias outer 1 $pollable (type $outer))
        (export "pollable" (type $pollable (eq $outer)))
        (export "subscribe-duration" (func (param "when" u64) (result (own $pollable))))))
    (core func $block (canon lower (func $poll "[method]pollable.block")))
    (core func $subscribe (canon lower (func $clock "subscribe-duration")))
    (core func $drop (canon resource.drop $pollable))
    (core module $m
        (import "clock" "subscribe" (func $subscribe (param i64) (result i32)))
        (import "poll" "block" (func $block (param i32)))
        (import "poll" "drop" (func $drop (param i32)))
        (func (export "nap") (param $nanoseconds i64) (local $pollable i32)
            (local.set $pollable (call $subscribe (local.get $nanoseconds)))
            (call $block (local.get $pollable))
            (call $drop (local.get $pollable))))
    (core instance $i (instantiate $m
        (with "clock" (instance (export "subscribe" (func $subscribe))))
        (with "poll" (instance (export "block" (func $block)) (export "drop" (func $drop))))))
    (func (export "nap") (param "nanoseconds" u64) (canon lift (core func $i "nap"))))"#;

/// Longer than a test may take.
const LONG_WAIT: i64 = 60_000_000_000;
const SHORT_WAIT: i64 = 7_000_000;

fn limited() -> [(GuestOptions, bool); 3] {
    let timeout = Some(Duration::from_millis(30));
    let watch = Watch::new({
        let asked = std::sync::atomic::AtomicU32::new(0);
        move |_| asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 4 < 3
    });
    [
        (GuestOptions { timeout, ..GuestOptions::default() }, true),
        (GuestOptions { timeout, watch: Watch::new(|_| true), ..GuestOptions::default() }, true),
        (GuestOptions { watch, ..GuestOptions::default() }, false),
    ]
}

fn assert_limited(error: &CallError, by_time: bool) {
    match by_time {
        true => assert!(matches!(error, CallError::Timeout(_)), "{error}"),
        false => assert!(matches!(error, CallError::Stopped), "{error}"),
    }
}

fn with_tree(options: GuestOptions) -> GuestOptions {
    let tree = afresh_wasm::afresh_files::Tree::new(Default::default());
    GuestOptions { wasi: Wasi { files: Some(tree), ..Wasi::default() }, ..options }
}

#[test]
fn a_sleeping_module_ends_with_its_limits() {
    let module = wat::parse_str(MODULE).unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let plain = limited();
    let trees = limited().map(|(options, by_time)| (with_tree(options), by_time));
    for (options, by_time) in plain.into_iter().chain(trees) {
        let guest = Guest::with_options(&engine, &module, options).unwrap();
        let warm = guest.warm(WarmUp::new()).unwrap();
        for _ in 0..2 {
            let mut lease = warm.lease().unwrap();
            let error = lease.call("nap", &[Val::I64(LONG_WAIT)]).expect_err("a limit ends it");
            assert_limited(&error, by_time);
        }
    }
}

#[test]
fn a_poll_of_clocks_reports_the_first_that_expires() {
    let module = wat::parse_str(MODULE).unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for options in [GuestOptions::default(), with_tree(GuestOptions::default())] {
        let guest = Guest::with_options(&engine, &module, options).unwrap();
        let warm = guest.warm(WarmUp::new()).unwrap();
        let begun = std::time::Instant::now();
        let answer = warm.lease().unwrap().call("nap", &[Val::I64(SHORT_WAIT)]).unwrap();
        assert!(matches!(answer[..], [Val::I64(found)] if found == (1 << 32 | 42)), "{answer:?}");
        assert!(begun.elapsed() >= Duration::from_nanos(SHORT_WAIT as u64), "it slept too short");
    }
}

#[test]
fn a_blocked_component_ends_with_its_limits() {
    use wasmtime::component::Val;
    let component = wat::parse_str(COMPONENT).unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for (options, by_time) in limited() {
        let guest = Guest::with_options(&engine, &component, options).unwrap();
        let warm = guest.warm_component().unwrap();
        for _ in 0..2 {
            let mut lease = warm.lease().unwrap();
            let error =
                lease.call("nap", &[Val::U64(LONG_WAIT as u64)]).expect_err("a limit ends it");
            assert_limited(&error, by_time);
        }
        let mut lease = warm.lease().unwrap();
        lease.call("nap", &[Val::U64(1000)]).unwrap();
    }
}

/// `read` reads standard input, and `nap` polls it and a clock.
const INPUT: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "read") (param i64) (result i64)
        (i64.store (i32.const 0) (i64.const 0x100000400))
        (if (call $read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 512)) (then unreachable))
        (i64.or (i64.shl (i64.load32_u (i32.const 512)) (i64.const 32)) (i64.load8_u (i32.const 1024))))
    (func (export "nap") (param $nanoseconds i64) (result i64)
        (i64.store (i32.const 0) (i64.const 41))
        (i32.store8 (i32.const 8) (i32.const 1))
        (i32.store (i32.const 16) (i32.const 0))
        (i64.store (i32.const 48) (i64.const 42))
        (i32.store (i32.const 64) (i32.const 1))
        (i64.store (i32.const 72) (local.get $nanoseconds))
        (if (call $poll (i32.const 0) (i32.const 128) (i32.const 2) (i32.const 256)) (then unreachable))
        (i64.or (i64.shl (i64.load32_u (i32.const 256)) (i64.const 32)) (i64.load (i32.const 128)))))"#;

#[test]
fn a_wait_for_the_input_of_the_process_ends_with_its_limits() {
    let name = "wait::a_wait_for_the_input_of_the_process_ends_with_its_limits";
    afresh_sys::run_isolated(name, || {
        let (empty, mut writer) = std::io::pipe().unwrap();
        // SAFETY: no test but this one is in the process, and it keeps the descriptor.
        assert_eq!(unsafe { libc::dup2(empty.as_raw_fd(), 0) }, 0);
        let module = wat::parse_str(INPUT).unwrap();
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let warm = |options: GuestOptions| {
            let wasi = Wasi { inherit_stdin: true, ..Wasi::default() };
            let options = GuestOptions { wasi, ..options };
            let guest = Guest::with_options(&engine, &module, options).unwrap();
            guest.warm(WarmUp::new()).unwrap()
        };
        for (options, by_time) in limited() {
            let warm = warm(options);
            for function in ["read", "nap"] {
                let mut lease = warm.lease().unwrap();
                let error =
                    lease.call(function, &[Val::I64(LONG_WAIT)]).expect_err("a limit ends it");
                assert_limited(&error, by_time);
            }
        }
        let warm = warm(GuestOptions::default());
        let call = |function, time| {
            let answer = warm.lease().unwrap().call(function, &[Val::I64(time)]).unwrap();
            answer[0].unwrap_i64()
        };
        assert_eq!(call("nap", SHORT_WAIT), 1 << 32 | 42, "the clock expires first");
        writer.write_all(b"x").unwrap();
        assert_eq!(call("nap", LONG_WAIT), 1 << 32 | 41, "input comes first");
        assert_eq!(call("read", 0), 1 << 32 | i64::from(b'x'));
    });
}

/// Lists more buffers than a call may have, all empty.
const MANY_BUFFERS: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "read") (param $count i32) (result i32)
        (call $read (i32.const 0) (i32.const 0) (local.get $count) (i32.const 0)))
    (func (export "write") (param $count i32) (result i32)
        (call $write (i32.const 1) (i32.const 0) (local.get $count) (i32.const 0))))"#;

#[test]
fn a_call_on_a_standard_stream_takes_no_more_buffers_than_one_on_a_file() {
    const EINVAL: i32 = 28;
    let module = wat::parse_str(MANY_BUFFERS).unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let guest = Guest::with_options(&engine, &module, GuestOptions::default()).unwrap();
    let warm = guest.warm(WarmUp::new()).unwrap();
    for (count, expected) in [(1024, 0), (1025, EINVAL), (-1, EINVAL)] {
        for function in ["read", "write"] {
            let answer = warm.lease().unwrap().call(function, &[Val::I32(count)]).unwrap();
            assert_eq!(answer[0].unwrap_i32(), expected, "{function} with {count}");
        }
    }
}

/// Prints through WASI.
const PRINTS: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1)
    (data (i32.const 0) "\08\00\00\00\02\00\00\00hi")
    (func (export "print") (result i32) (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 64))))"#;

async fn call_plainly() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for files in [None, Some(Tree::new(Budget::default()))] {
        let wasi = Wasi { files, output: Output::Capture(64), ..Wasi::default() };
        let options = GuestOptions { wasi, ..GuestOptions::default() };
        let wasm = wat::parse_str(PRINTS).unwrap();
        let warm =
            Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new()).unwrap();
        let mut lease = warm.lease().unwrap();
        assert_eq!(lease.call("print", &[]).unwrap()[0].unwrap_i32(), 0);
        assert_eq!(lease.host().stdout(), b"hi");
    }

    let wasm = wat::parse_str(COMPONENT).unwrap();
    let guest = Guest::with_options(&engine, &wasm, GuestOptions::default()).unwrap();
    let warm = guest.warm_component().unwrap();
    let nap = [component::Val::U64(SHORT_WAIT as u64)];
    let error = warm.lease().unwrap().call("nap", &nap).unwrap_err();
    assert!(format!("{error:?}").contains("spawn_blocking"), "{error:?}");
    let napped =
        tokio::task::spawn_blocking(move || warm.lease().unwrap().call("nap", &nap).map(drop));
    napped.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_plain_call_in_a_task_may_print_and_reports_that_it_would_wait() {
    tokio::spawn(call_plainly()).await.unwrap();
}

#[tokio::test]
async fn a_plain_call_in_a_runtime_of_one_thread_may_print() {
    call_plainly().await;
}
