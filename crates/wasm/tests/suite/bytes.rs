//! Handlers that take an address, and bytes that host functions hand to the guest: on a thread's
//! own stack, on a deep one, and where calls may wait.

use afresh_wasm::wasmtime::Caller;
use afresh_wasm::{
    CallError, Engine, EngineConfig, Frozen, Guest, GuestOptions, Host, Imports, LeaseOptions,
    Mode, Val, Warm, WarmUp, hand_over, hand_over_async,
};

/// Its allocator gives out ever higher addresses. `echo` answers with its input and the host's
/// reply to it, `status` returns the first byte of its input, `silent` nothing; `down` recurses and
/// calls the host at the bottom; `host_alloc` itself recurses without end once `spoil` was called.
const GUEST: &str = r#"(module
    (import "host" "say" (func $say (param i32 i32) (result i32)))
    (memory (export "memory") 4)
    (global $next (mut i32) (i32.const 1024))
    (global $spoilt (mut i32) (i32.const 0))
    (func $alloc (export "host_alloc") (param $len i32) (result i32)
        (if (global.get $spoilt) (then (return (i32.add (i32.const 1) (call $alloc (local.get $len))))))
        (if (i32.gt_u (local.get $len) (i32.const 60000)) (then (return (i32.const 0))))
        (global.get $next)
        (global.set $next (i32.add (global.get $next) (local.get $len))))
    (func (export "echo") (param $at i32) (param $len i32) (result i64)
        (local $said i32)
        ;; What is said lies right behind the input: both are the answer.
        (local.set $said (call $say (local.get $at) (local.get $len)))
        (i64.or (i64.shl (i64.extend_i32_u (local.get $at)) (i64.const 32))
            (i64.extend_i32_u (i32.add (local.get $len) (i32.const 3)))))
    (func (export "status") (param $at i32) (param $len i32) (result i32)
        (i32.store8 (i32.const 8) (i32.add (i32.load8_u (i32.const 8)) (i32.const 1)))
        (i32.load8_u (local.get $at)))
    (func (export "silent") (param i32 i32))
    (func (export "count") (result i32) (i32.load8_u (i32.const 8)))
    (func (export "spoil") (global.set $spoilt (i32.const 1)))
    (func $down (export "down") (param $steps i32) (result i32)
        (if (result i32) (local.get $steps)
            (then (i32.add (i32.const 1) (call $down (i32.sub (local.get $steps) (i32.const 1)))))
            (else (i32.load8_u (call $say (i32.const 8) (i32.const 0)))))))"#;

/// Says three bytes back.
fn say(mut caller: Caller<'_, Host>, _at: i32, _len: i32) -> afresh_wasm::wasmtime::Result<i32> {
    Ok(hand_over(&mut caller, b"yes")?.unwrap_or(0) as i32)
}

fn options() -> GuestOptions {
    GuestOptions {
        imports: Imports::new(|linker| linker.func_wrap("host", "say", say).map(drop)),
        ..GuestOptions::default()
    }
}

fn engine(stack: usize) -> Engine {
    Engine::new(EngineConfig { stack, ..EngineConfig::default() }).unwrap()
}

fn warm(engine: &Engine, options: GuestOptions, warm_up: WarmUp) -> Warm {
    let wasm = wat::parse_str(GUEST).unwrap();
    Guest::with_options(engine, &wasm, options).unwrap().warm(warm_up).unwrap()
}

/// Its allocator calls `say`, which calls the allocator, as often as `nest` says.
const NESTING_GUEST: &str = r#"(module
    (import "host" "say" (func $say (param i32 i32) (result i32)))
    (memory (export "memory") 1)
    (global $left (mut i32) (i32.const 0))
    (func (export "afresh_alloc") (param i32) (result i32)
        (global.set $left (i32.sub (global.get $left) (i32.const 1)))
        (if (global.get $left) (then (drop (call $say (i32.const 0) (i32.const 0)))))
        (i32.const 1024))
    (func (export "nest") (param $calls i32) (result i32)
        (global.set $left (local.get $calls))
        (call $say (i32.const 0) (i32.const 0))))"#;

#[test]
fn an_allocator_that_calls_itself_by_the_host_takes_a_bounded_number_of_stacks() {
    let wasm = wat::parse_str(NESTING_GUEST).unwrap();
    let guest = Guest::with_options(&engine(DEEP), &wasm, options()).unwrap();
    let warm = guest.warm(WarmUp::new()).unwrap();
    for _ in 0..2 {
        assert_eq!(
            warm.lease().unwrap().call("nest", &[Val::I32(16)]).unwrap()[0].i32(),
            Some(1024)
        );
        let error = warm.lease().unwrap().call("nest", &[Val::I32(17)]).unwrap_err();
        assert!(format!("{error:?}").contains("more than 16 deep"), "{error:?}");
    }
}

const DEFAULT_LIMIT: usize = 512 << 10;
const DEEP: usize = 8 << 20;

#[test]
fn a_handler_that_takes_an_address_finds_its_input_where_its_allocator_made_room() {
    for stack in [DEFAULT_LIMIT, DEEP] {
        for mode in [Mode::Reset, Mode::Fresh] {
            let options = GuestOptions { mode, ..options() };
            let warm_up = WarmUp::new().call_bytes("status", [0_u8, 7]).call_bytes("silent", *b"x");
            let guest = warm(&engine(stack), options, warm_up);
            let echo = guest.bytes_entry("echo").unwrap();
            let status = guest.bytes_entry("status").unwrap();
            let silent = guest.bytes_entry("silent").unwrap();
            for _ in 0..3 {
                let mut lease = guest.lease().unwrap();
                assert_eq!(lease.call_bytes(&echo, b"hello ").unwrap(), b"hello yes");
                assert_eq!(lease.call_bytes(&echo, b"").unwrap(), b"yes");
                assert_eq!(lease.call_bytes(&silent, b"nothing").unwrap(), b"");
                assert_eq!(lease.call_bytes(&status, &[0]).unwrap(), b"");
                // The warm-up's, and this one.
                assert!(matches!(lease.call("count", &[]).unwrap()[..], [Val::I32(2)]));
                let failed = lease.call_bytes(&status, &[3]);
                assert!(matches!(failed, Err(CallError::Exit(3))), "{failed:?}");
                let full = lease.call_bytes(&silent, &[0; 70_000]);
                assert!(matches!(full, Err(CallError::Interface(_))), "{full:?}");
            }
        }
    }
}

#[test]
fn a_warm_up_fails_with_the_status_of_its_handler() {
    let wasm = wat::parse_str(GUEST).unwrap();
    let guest = Guest::with_options(&engine(DEFAULT_LIMIT), &wasm, options()).unwrap();
    let failed = guest.warm(WarmUp::new().call_bytes("status", [4_u8])).unwrap_err();
    assert!(format!("{failed:?}").contains("Exit(4)"), "{failed:?}");
}

#[test]
fn a_guest_without_an_allocator_gets_the_list_of_accepted_ones() {
    let wasm = wat::parse_str(r#"(module (memory 1) (func (export "turn") (param i32 i32)))"#);
    let guest =
        Guest::new(&engine(DEFAULT_LIMIT), &wasm.unwrap()).unwrap().warm(WarmUp::new()).unwrap();
    let missing = guest.bytes_entry("turn").unwrap_err();
    assert!(missing.to_string().contains("afresh_alloc"), "{missing}");
}

#[test]
fn a_host_function_hands_bytes_to_a_guest_that_is_deep_in_its_stack() {
    let guest = warm(&engine(DEEP), options(), WarmUp::new());
    // To the maximum depth: by halves between a depth that returns and one that overflows.
    let (mut good, mut bad) = (1, 1 << 22);
    while bad - good > 1 {
        let steps = (good + bad) / 2;
        let down = guest.lease().unwrap().call("down", &[Val::I32(steps)]);
        match down {
            Ok(results) => {
                // The first byte of the input, plus one for each step.
                assert!(matches!(results[..], [Val::I32(n)] if n == steps + i32::from(b'y')));
                good = steps;
            }
            Err(CallError::Trap { .. }) => bad = steps,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(good > 50_000, "{good} steps on 8 MiB");
}

#[test]
fn an_allocator_without_end_traps_wherever_it_is_called_from() {
    for stack in [DEFAULT_LIMIT, DEEP] {
        let guest = warm(&engine(stack), options(), WarmUp::new());
        let echo = guest.bytes_entry("echo").unwrap();
        for steps in [0, 2000] {
            let mut lease = guest.lease().unwrap();
            lease.call("spoil", &[]).unwrap();
            let down = lease.call("down", &[Val::I32(steps)]);
            assert!(matches!(down, Err(CallError::Trap { .. } | CallError::Host(_))), "{down:?}");
        }
        // And the next call works.
        assert_eq!(guest.lease().unwrap().call_bytes(&echo, b"no ").unwrap(), b"no yes");
    }
}

#[test]
fn an_asynchronous_host_function_hands_bytes_over_while_it_waits() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(asynchronously());
}

async fn asynchronously() {
    let options = GuestOptions {
        imports: Imports::new(|linker| {
            linker
                .func_wrap_async(
                    "host",
                    "say",
                    |mut caller: Caller<'_, Host>, (_, _): (i32, i32)| {
                        Box::new(async move {
                            tokio::task::yield_now().await;
                            let there = hand_over_async(&mut caller, b"yes").await?;
                            Ok::<_, afresh_wasm::wasmtime::Error>(there.unwrap_or(0) as i32)
                        })
                    },
                )
                .map(drop)
        }),
        asynchronous: true,
        ..GuestOptions::default()
    };
    let wasm = wat::parse_str(GUEST).unwrap();
    let guest = Guest::with_options(&engine(DEFAULT_LIMIT), &wasm, options).unwrap();
    let guest = guest.warm_async(WarmUp::new()).await.unwrap();
    let echo = guest.bytes_entry("echo").unwrap();
    let status = guest.bytes_entry("status").unwrap();
    let mut lease = guest.lease_async(&LeaseOptions::default()).await.unwrap();
    assert_eq!(lease.call_bytes_async(&echo, b"hello ").await.unwrap(), b"hello yes");
    let failed = lease.call_bytes_async(&status, &[5]).await;
    assert!(matches!(failed, Err(CallError::Exit(5))), "{failed:?}");
}

#[test]
fn a_frozen_guest_keeps_its_stack_and_opens_from_the_cache_of_its_origin() {
    let folder = tempfile::tempdir().unwrap();
    let config = EngineConfig {
        stack: DEEP,
        cache: Some(folder.path().to_owned()),
        ..EngineConfig::default()
    };
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, ..options() };
        let engine = Engine::new(config.clone()).unwrap();
        let guest = warm(&engine, options.clone(), WarmUp::new().call_bytes("status", [0_u8]));
        let frozen = guest.freeze().unwrap();
        let frozen = Frozen::from_parts(frozen.memory().clone(), &frozen.bytes().unwrap()).unwrap();
        assert_eq!(frozen.stack(), Some(DEEP));
        let modules = || {
            let names = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap());
            let own = names.filter(|e| e.path().extension().is_some_and(|x| x == "cwasm"));
            own.map(|e| std::os::unix::fs::MetadataExt::ino(&e.metadata().unwrap()))
                .collect::<std::collections::BTreeSet<_>>()
        };
        let before = modules();
        let again = Warm::thaw(&Engine::new(config.clone()).unwrap(), &options, &frozen).unwrap();
        assert_eq!(modules(), before, "it was compiled again");
        let count = again.lease().unwrap().call("count", &[]).unwrap();
        assert!(matches!(count[..], [Val::I32(1)]));
    }
    let usual = warm(&engine(DEFAULT_LIMIT), options(), WarmUp::new()).freeze().unwrap();
    assert_eq!(usual.stack(), None);
}
