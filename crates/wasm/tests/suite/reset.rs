//! Reset mode: after any change by a call, the next one starts from the warm state.

use std::sync::Arc;
use std::time::Duration;

use afresh_frames::ZeroPool;
use afresh_memory::{Features, HostAccess, Strategy};
use afresh_sys::planted::{self, Bug};
use afresh_wasm::{
    CallError, Engine, EngineConfig, Guest, GuestOptions, Imports, LimitPolicy, Limits, LoadError,
    Mode, Output, Val, Warm, WarmError, WarmUp, Wasi, ZeroMemory,
};

fn engine() -> Engine {
    Engine::new(EngineConfig { fuel: true, ..EngineConfig::default() }).unwrap()
}

fn warm_with(wat: &str, warm_up: WarmUp, options: GuestOptions) -> Warm {
    let wasm = wat::parse_str(wat).unwrap();
    Guest::with_options(&engine(), &wasm, options).unwrap().warm(warm_up).unwrap()
}

fn reset(wat: &str) -> Warm {
    let fuel = Some(1_000_000_000);
    warm_with(
        wat,
        WarmUp::new(),
        GuestOptions { mode: Mode::Reset, fuel, ..GuestOptions::default() },
    )
}

fn call(warm: &Warm, name: &str, arguments: &[Val]) -> Result<Vec<i64>, CallError> {
    let mut lease = warm.lease().unwrap();
    let values = lease.call(name, arguments)?;
    Ok(values
        .iter()
        .map(|v| match v {
            Val::I32(v) => i64::from(*v),
            Val::I64(v) => *v,
            other => panic!("{other:?}"),
        })
        .collect())
}

/// Every later lease starts pristine after any earlier one.
fn pristine(warm: &Warm) {
    for _ in 0..3 {
        assert_eq!(warm.lease().unwrap().differences().unwrap(), (0, 0));
    }
}

const EVERYTHING: &str = r#"(module
    (memory (export "memory") 1 200)
    (memory $second 1)
    (global $i32 (mut i32) (i32.const 1))
    (global $i64 (mut i64) (i64.const 2))
    (global $f32 (mut f32) (f32.const 3))
    (global $f64 (mut f64) (f64.const 4))
    (global $v128 (mut v128) (v128.const i64x2 5 6))
    (global $ref (mut funcref) (ref.null func))
    (global $ext (mut externref) (ref.null extern))
    (table $table 4 20 funcref)
    (elem (i32.const 0) $a $a $a $a)
    (elem $passive func $b $b)
    (data $text "passive text")
    (data (i32.const 100) "active text")
    (func $a (result i32) (i32.const 10))
    (func $b (result i32) (i32.const 20))
    (func (export "look") (result i64)
        (i64.add
          (i64.add (i64.extend_i32_u (global.get $i32)) (global.get $i64))
          (i64.add
            (i64.extend_i32_u (call_indirect $table (result i32) (i32.const 1)))
            (i64.add (i64.extend_i32_u (i32.load8_u (i32.const 100)))
                     (i64.extend_i32_u (i32.load $second (i32.const 8)))))))
    (func (export "size") (result i32) (memory.size))
    (func (export "peek") (param i32) (result i32) (i32.load (local.get 0)))
    (func $spoil (export "spoil")
        (global.set $i32 (i32.const -1))
        (global.set $i64 (i64.const -1))
        (global.set $f32 (f32.const -1))
        (global.set $f64 (f64.const -1))
        (global.set $v128 (v128.const i64x2 -1 -1))
        (global.set $ref (ref.func $b))
        (table.set $table (i32.const 1) (ref.func $b))
        (table.init $table $passive (i32.const 2) (i32.const 0) (i32.const 2))
        (elem.drop $passive)
        (memory.init $text (i32.const 100) (i32.const 0) (i32.const 12))
        (data.drop $text)
        (i32.store $second (i32.const 8) (i32.const 77))
        (memory.fill (i32.const 40000) (i32.const 7) (i32.const 20000)))
    (func (export "init_text") (memory.init $text (i32.const 0) (i32.const 0) (i32.const 12)))
    (func (export "spoil_and_trap") (call $spoil) unreachable)
    (func $deeper (export "overflow") (param i32) (result i32)
        (global.set $i32 (local.get 0))
        (i32.store (local.get 0) (local.get 0))
        (i32.add (call $deeper (i32.add (local.get 0) (i32.const 1))) (i32.const 1)))
    (func (export "grow") (param i32) (result i32)
        (local $old i32)
        (local.set $old (memory.grow (local.get 0)))
        (i32.store (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 4)) (i32.const 5))
        (local.get $old))
    (func (export "grow_table") (result i32)
        (table.grow $table (ref.func $b) (i32.const 3)))
    (func (export "table_size") (result i32) (table.size $table))
    (func (export "spin") (loop (br 0)))
    (func (export "add") (param i32 i64) (result i64)
        (i64.add (i64.extend_i32_s (local.get 0)) (local.get 1))))"#;

#[test]
fn memories_globals_tables_and_segments_come_back() {
    let warm = reset(EVERYTHING);
    assert_eq!(warm.report().mode, Mode::Reset);
    let before = call(&warm, "look", &[]).unwrap();
    for _ in 0..100 {
        let mut lease = warm.lease().unwrap();
        lease.call("spoil", &[]).unwrap();
        let (bytes, items) = lease.differences().unwrap();
        assert!(bytes > 20_000 && items >= 8, "{bytes} bytes, {items} items");
        drop(lease);
        assert_eq!(call(&warm, "look", &[]).unwrap(), before);
        call(&warm, "init_text", &[]).unwrap();
    }
    pristine(&warm);
    assert_eq!(warm.pool_stats().created, 1);
}

#[test]
fn a_trap_half_way_and_a_stack_overflow_are_undone() {
    let warm = reset(EVERYTHING);
    let before = call(&warm, "look", &[]).unwrap();
    for _ in 0..10 {
        let error = call(&warm, "spoil_and_trap", &[]).unwrap_err();
        assert!(matches!(
            error,
            CallError::Trap { trap: wasmtime::Trap::UnreachableCodeReached, .. }
        ));
        let error = call(&warm, "overflow", &[Val::I32(0)]).unwrap_err();
        assert!(
            matches!(error, CallError::Trap { trap: wasmtime::Trap::StackOverflow, .. }),
            "{error}"
        );
        assert_eq!(call(&warm, "look", &[]).unwrap(), before);
    }
    pristine(&warm);
    assert_eq!(warm.pool_stats().created, 1);
}

#[test]
fn growth_is_undone_and_what_was_grown_into_is_out_of_bounds_again() {
    for strategy in Strategy::FORCED {
        if let Err(error) = strategy.choose(Features::host(), HostAccess::Threads) {
            println!("SKIPPED: {strategy}: {error}");
            continue;
        }
        let options = GuestOptions { mode: Mode::Reset, strategy, ..GuestOptions::default() };
        let fuel = Some(1_000_000_000);
        let warm = warm_with(EVERYTHING, WarmUp::new(), GuestOptions { fuel, ..options });
        for _ in 0..20 {
            assert_eq!(call(&warm, "grow", &[Val::I32(10)]).unwrap(), [1], "{strategy}");
            assert_eq!(call(&warm, "size", &[]).unwrap(), [1], "{strategy}");
            let error = call(&warm, "peek", &[Val::I32(65536)]).unwrap_err();
            let bounds = wasmtime::Trap::MemoryOutOfBounds;
            assert!(
                matches!(error, CallError::Trap { trap, .. } if trap == bounds),
                "{strategy}: {error}"
            );
        }
        // Grown again, the memory is zero, and not an earlier call's content.
        let mut lease = warm.lease().unwrap();
        lease.call("grow", &[Val::I32(20)]).unwrap();
        let peek = lease.call("peek", &[Val::I32(11 * 65536 - 4)]).unwrap();
        assert!(matches!(peek[..], [Val::I32(0)]), "{strategy}: {peek:?}");
        drop(lease);
        pristine(&warm);
        assert_eq!(warm.pool_stats().created, 1);
        assert!(warm.growth_stats().1 >= 20);
    }
}

#[test]
fn growth_by_whole_blocks_from_a_zero_pool_is_undone_like_any_other() {
    let zero_pool = Arc::new(ZeroPool::new(4096).unwrap());
    let zero_memory = ZeroMemory::Source(zero_pool.clone());
    let engine = Engine::new(EngineConfig { zero_memory, ..EngineConfig::default() }).unwrap();
    // Grows by 8 MiB, finds zeros there, and writes every page, or three of them.
    let wasm = wat::parse_str(
        r#"(module (memory 1)
            (func (export "run") (param $step i32) (result i32)
                (local $at i32) (local $found i32)
                (local.set $at (i32.shl (memory.grow (i32.const 128)) (i32.const 16)))
                (loop $next
                    (local.set $found (i32.or (local.get $found) (i32.load (local.get $at))))
                    (i32.store (local.get $at) (i32.const -1))
                    (local.set $at (i32.add (local.get $at) (local.get $step)))
                    (br_if $next
                        (i32.lt_u (local.get $at) (i32.shl (memory.size) (i32.const 16)))))
                (local.get $found)))"#,
    )
    .unwrap();
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, ..GuestOptions::default() };
        let warm = Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new());
        let warm = warm.unwrap();
        for call_number in 0..12 {
            std::thread::sleep(Duration::from_millis(2));
            let step = if call_number % 4 == 3 { 3 << 20 } else { 4096 };
            assert_eq!(call(&warm, "run", &[Val::I32(step)]).unwrap(), [0]);
            pristine(&warm);
            if call_number == 6 {
                // The next call gets a new instance over a new slot.
                warm.lease().unwrap().discard();
            }
        }
    }
}

#[test]
fn an_instance_whose_table_grew_is_replaced_and_counted() {
    let warm = reset(EVERYTHING);
    for _ in 0..3 {
        assert_eq!(call(&warm, "grow_table", &[]).unwrap(), [4]);
        assert_eq!(call(&warm, "table_size", &[]).unwrap(), [4]);
    }
    assert_eq!(warm.growth_stats().0, 3);
    pristine(&warm);
}

#[test]
fn a_guest_that_grows_a_table_in_every_call_keeps_its_memory() {
    let warm = reset(EVERYTHING);
    for round in 0..20 {
        let mut lease = warm.lease().unwrap();
        if round > 0 {
            // Pages that earlier calls wrote are resident in an instance that has never run.
            assert!(lease.write_set_pages() >= 6, "{} pages", lease.write_set_pages());
        }
        lease.call("spoil", &[]).unwrap();
        lease.call("grow_table", &[]).unwrap();
    }
    assert_eq!(warm.growth_stats().0, 20);
    assert_eq!(warm.pool_stats().created, 1);
    pristine(&warm);
}

#[test]
fn further_instances_start_from_the_same_warm_state() {
    let wat = r#"(module
        (memory 1)
        (global $n (mut i32) (i32.const 0))
        (table $t 2 10 funcref)
        (func $one (result i32) (i32.const 1))
        (func $two (result i32) (i32.const 2))
        (elem declare func $two)
        (elem (i32.const 0) $one)
        (func $start (global.set $n (i32.add (global.get $n) (i32.const 1))))
        (start $start)
        (func (export "warm") (param i32)
            (drop (memory.grow (i32.const 3)))
            (i32.store (i32.const 200000) (local.get 0))
            (global.set $n (i32.add (global.get $n) (local.get 0)))
            (table.set $t (i32.const 1) (ref.func $two))
            (drop (table.grow $t (ref.func $two) (i32.const 2))))
        (func (export "look") (result i32)
            (i32.add (i32.add (global.get $n) (i32.load (i32.const 200000)))
                (i32.add (call_indirect $t (result i32) (i32.const 1))
                    (i32.add (table.size $t) (memory.size))))))"#;
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm_up = WarmUp::new().call("warm", &[Val::I32(40)]);
        let warm = warm_with(wat, warm_up, GuestOptions { mode, ..GuestOptions::default() });
        let mut leases: Vec<_> = (0..4).map(|_| warm.lease().unwrap()).collect();
        for lease in &mut leases {
            let look = lease.call("look", &[]).unwrap();
            assert!(matches!(look[..], [Val::I32(91)]), "{mode:?}: {look:?}");
        }
        drop(leases);
        assert_eq!(warm.pool_stats().alive, 4);
        pristine(&warm);
    }
}

#[test]
fn timeouts_and_fuel_stop_a_call_and_leave_the_pool_whole() {
    let base =
        GuestOptions { mode: Mode::Reset, fuel: Some(u64::MAX / 2), ..GuestOptions::default() };
    let timeout = Some(Duration::from_millis(300));
    let warm = warm_with(EVERYTHING, WarmUp::new(), GuestOptions { timeout, ..base.clone() });
    for _ in 0..3 {
        let error = call(&warm, "spin", &[]).unwrap_err();
        assert!(matches!(error, CallError::Timeout(t) if Some(t) == timeout), "{error}");
        call(&warm, "look", &[]).unwrap();
    }
    let warm = warm_with(EVERYTHING, WarmUp::new(), GuestOptions { fuel: Some(100_000), ..base });
    for _ in 0..3 {
        let error = call(&warm, "spin", &[]).unwrap_err();
        assert!(matches!(error, CallError::OutOfFuel(100_000)), "{error}");
        call(&warm, "spoil", &[]).unwrap();
    }
    pristine(&warm);
}

#[test]
fn a_memory_limit_makes_growth_fail_in_the_guest() {
    let options = GuestOptions {
        mode: Mode::Reset,
        // Five pages, and the bytes of the table.
        memory_limit: (5 << 16) + 1024,
        fuel: Some(1 << 40),
        ..GuestOptions::default()
    };
    let warm = warm_with(EVERYTHING, WarmUp::new(), options);
    assert_eq!(call(&warm, "grow", &[Val::I32(3)]).unwrap(), [1]);
    assert_eq!(call(&warm, "grow", &[Val::I32(4)]).unwrap(), [-1]);
    pristine(&warm);
}

#[test]
fn a_panic_in_a_host_function_leaves_the_pool_whole() {
    let wat = r#"(module
        (import "host" "boom" (func $boom))
        (memory 1)
        (func (export "go") (i32.store (i32.const 0) (i32.const 9)) (call $boom))
        (func (export "look") (result i32) (i32.load (i32.const 0))))"#;
    let imports = Imports::new(|linker| {
        linker.func_wrap("host", "boom", || -> () { panic!("host bug") })?;
        Ok(())
    });
    let options =
        GuestOptions { mode: Mode::Reset, fuel: Some(1 << 40), imports, ..GuestOptions::default() };
    let warm = warm_with(wat, WarmUp::new(), options);
    let panicked =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&warm, "go", &[])));
    assert!(panicked.is_err());
    assert_eq!(call(&warm, "look", &[]).unwrap(), [0]);
    assert_eq!(warm.pool_stats().abandoned, 1);
}

#[test]
fn wrong_calls_say_what_would_be_right() {
    let warm = reset(EVERYTHING);
    let text = call(&warm, "lok", &[]).unwrap_err().to_string();
    assert!(text.contains("\"lok\"") && text.contains("look"), "{text}");
    let text = call(&warm, "add", &[Val::I32(1)]).unwrap_err().to_string();
    assert!(text.contains("1 given, 2 wanted"), "{text}");
    let text = call(&warm, "add", &[Val::I32(1), Val::F32(0)]).unwrap_err().to_string();
    assert!(text.contains("argument 2 is not of type i64"), "{text}");
    let entry = warm.entry::<i32, i32>("add").unwrap();
    let text = warm.lease().unwrap().invoke(&entry, 1).unwrap_err().to_string();
    assert!(text.contains("wrong arguments"), "{text}");
    assert_eq!(call(&warm, "add", &[Val::I32(-1), Val::I64(5)]).unwrap(), [4]);
    let other = reset(r#"(module (func (export "f")))"#);
    assert!(other.lease().unwrap().invoke(&entry, 1).is_err());
}

#[test]
fn bad_guests_are_refused_by_name() {
    let engine = engine();
    let not_wasm = Guest::new(&engine, b"#!/bin/sh\n").unwrap_err();
    assert!(matches!(not_wasm, LoadError::NotWasm { .. }));
    let truncated = Guest::new(&engine, b"\0asm\x01\0\0\0\x01\xff").unwrap();
    assert!(matches!(truncated.warm(WarmUp::new()), Err(WarmError::Load(_))));
    let load = |wat: &str, mode| {
        let wasm = wat::parse_str(wat).unwrap();
        let options = GuestOptions { mode, ..GuestOptions::default() };
        Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new())
    };
    let imports = load(r#"(module (import "env" "mystery" (func)))"#, Mode::Auto).unwrap_err();
    assert!(imports.to_string().contains("mystery"), "{imports}");
    let global = r#"(module (import "env" "g" (global (mut i32))))"#;
    let refused = load(global, Mode::Reset).unwrap_err();
    assert!(
        matches!(&refused, WarmError::Refused { mode: "reset", reason } if reason.contains("mutable"))
    );
    let wasm = wat::parse_str(r#"(module (func (export "warm") unreachable))"#).unwrap();
    let trapped =
        Guest::new(&engine, &wasm).unwrap().warm(WarmUp::new().call("warm", &[])).unwrap_err();
    assert!(trapped.to_string().contains("warm-up call \"warm\" failed"), "{trapped}");
    let missing =
        Guest::new(&engine, &wasm).unwrap().warm(WarmUp::new().call("cold", &[])).unwrap_err();
    assert!(missing.to_string().contains("no function \"cold\"; it exports warm"), "{missing}");
}

#[test]
fn an_exhausted_pool_says_so_and_recovers() {
    let limits = Limits { items: 2, exhausted: LimitPolicy::Error, ..Limits::default() };
    let options = GuestOptions { limits, fuel: Some(1 << 40), ..GuestOptions::default() };
    let warm = warm_with(EVERYTHING, WarmUp::new(), options);
    let held = (warm.lease().unwrap(), warm.lease().unwrap());
    let error = warm.lease().unwrap_err();
    assert!(error.to_string().contains("all 2 instances"), "{error}");
    drop(held);
    pristine(&warm);
}

#[test]
fn host_state_is_new_for_every_call() {
    let wat = r#"(module
        (import "wasi_snapshot_preview1" "fd_write"
            (func $write (param i32 i32 i32 i32) (result i32)))
        (memory (export "memory") 1)
        (data (i32.const 16) "hello")
        (func (export "say") (result i32)
            (i32.store (i32.const 0) (i32.const 16))
            (i32.store (i32.const 4) (i32.const 5))
            (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8))))"#;
    for mode in [Mode::Reset, Mode::Fresh] {
        let wasi = Wasi { output: Output::Capture(100), ..Wasi::default() };
        let options = GuestOptions { mode, wasi, fuel: Some(1 << 40), ..GuestOptions::default() };
        let warm = warm_with(wat, WarmUp::new(), options);
        for _ in 0..3 {
            let mut lease = warm.lease().unwrap();
            assert!(lease.host().stdout().is_empty());
            assert!(lease.host_mut().data::<String>().is_none());
            lease.host_mut().set_data("mine".to_owned());
            lease.call("say", &[]).unwrap();
            assert_eq!(lease.host().stdout(), b"hello");
        }
        pristine(&warm);
    }
}

#[test]
fn clones_have_different_generations_and_take_fresh_entropy() {
    let wat = r#"(module
        (import "afresh" "generation" (func $generation (result i64)))
        (memory 1)
        (global $state (mut i64) (i64.const 42))
        (func (export "afresh_reseed") (param i64 i64)
            (global.set $state (i64.xor (local.get 0) (local.get 1))))
        (func (export "random") (result i64) (global.get $state))
        (func (export "generation") (result i64) (call $generation)))"#;
    for mode in [Mode::Reset, Mode::Fresh] {
        let warm = warm_with(
            wat,
            WarmUp::new(),
            GuestOptions { mode, fuel: Some(1 << 40), ..GuestOptions::default() },
        );
        assert!(warm.report().reseeds);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..50 {
            let random = call(&warm, "random", &[]).unwrap()[0];
            let generation = call(&warm, "generation", &[]).unwrap()[0];
            assert!(seen.insert(random) && seen.insert(generation));
        }
    }
}

#[test]
fn a_secret_of_one_call_is_nowhere_in_the_next_under_any_strategy_and_mode() {
    const SECRET: &[u8] = b"canary-0xfeedface";
    for strategy in Strategy::FORCED.into_iter().chain([Strategy::Auto]) {
        if let Err(error) = strategy.choose(Features::host(), HostAccess::Threads) {
            println!("SKIPPED: {strategy}: {error}");
            continue;
        }
        for mode in [Mode::Reset, Mode::Fresh] {
            let options =
                GuestOptions { mode, strategy, fuel: Some(1 << 40), ..GuestOptions::default() };
            let warm = warm_with(EVERYTHING, WarmUp::new(), options);
            for round in 0..5 {
                let mut lease = warm.lease().unwrap();
                lease.call("grow", &[Val::I32(2)]).unwrap();
                for at in [0, 5000, 65_530, 150_000] {
                    lease.write_memory(at + round, SECRET).unwrap();
                }
                drop(lease);
                let mut lease = warm.lease().unwrap();
                lease.call("grow", &[Val::I32(2)]).unwrap();
                let mut all = vec![0; 3 << 16];
                lease.read_memory(0, &mut all).unwrap();
                assert!(!all.windows(8).any(|w| w == &SECRET[..8]), "{strategy} {mode:?}");
            }
        }
    }
}

#[test]
fn sixty_four_bit_memories_are_restored() {
    let wat = r#"(module
        (memory i64 2 100000)
        (func (export "grow") (result i64) (memory.grow (i64.const 5)))
        (func (export "put") (param i64) (i64.store (local.get 0) (i64.const -1)))
        (func (export "get") (param i64) (result i64) (i64.load (local.get 0))))"#;
    let warm = reset(wat);
    for _ in 0..3 {
        let mut lease = warm.lease().unwrap();
        lease.call("grow", &[]).unwrap();
        lease.call("put", &[Val::I64(400_000)]).unwrap();
        lease.call("put", &[Val::I64(100)]).unwrap();
        drop(lease);
        assert_eq!(call(&warm, "get", &[Val::I64(100)]).unwrap(), [0]);
        assert!(call(&warm, "get", &[Val::I64(400_000)]).is_err());
        assert!(call(&warm, "get", &[Val::I64(1 << 40)]).is_err());
    }
    pristine(&warm);
}

#[test]
fn many_threads_share_a_guest() {
    let warm = reset(EVERYTHING);
    let before = call(&warm, "look", &[]).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    call(&warm, "spoil", &[]).unwrap();
                    assert_eq!(call(&warm, "look", &[]).unwrap(), before);
                }
            });
        }
    });
    let stats = warm.pool_stats();
    assert_eq!(stats.idle, stats.alive);
    assert_eq!(stats.quarantined, 0);
}

#[test]
fn planted_bugs_are_caught() {
    planted::must_be_caught(
        &[Bug::CopyBack, Bug::Global, Bug::Element, Bug::Segment],
        &["reset::memories_globals_tables_and_segments_come_back"],
    );
    planted::must_be_caught(
        &[Bug::GrownSize, Bug::View],
        &["reset::growth_is_undone_and_what_was_grown_into_is_out_of_bounds_again"],
    );
    planted::must_be_caught(
        &[Bug::Replace],
        &["reset::an_instance_whose_table_grew_is_replaced_and_counted"],
    );
    planted::must_be_caught(&[Bug::HostState], &["reset::host_state_is_new_for_every_call"]);
}

#[test]
fn writes_beyond_a_tables_end_trap_and_what_came_before_is_undone_in_place() {
    let wasm = wat::parse_str(
        r#"(module
            (table $t 4 8 funcref)
            (table $source 4 funcref)
            (elem $segment func $f $f $f $f)
            (func $f)
            (func (export "set") (param i32) (table.set $t (local.get 0) (ref.func $f)))
            (func (export "fill") (param i32)
                (table.fill $t (local.get 0) (ref.func $f) (i32.const 3)))
            (func (export "copy") (param i32)
                (table.copy $t $source (local.get 0) (i32.const 0) (i32.const 3)))
            (func (export "init") (param i32)
                (table.init $t $segment (local.get 0) (i32.const 0) (i32.const 3)))
            (func (export "grow") (param i32)
                (drop (table.grow $t (ref.null func) (local.get 0)))))"#,
    )
    .unwrap();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
    let warm = Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new()).unwrap();
    for name in ["set", "fill", "copy", "init"] {
        for beyond in [5, 1000, -1, -3] {
            let mut lease = warm.lease().unwrap();
            lease.call("set", &[Val::I32(2)]).unwrap();
            let error = lease.call(name, &[Val::I32(beyond)]).unwrap_err();
            assert!(matches!(error, CallError::Trap { .. }), "{name} {beyond}: {error}");
            lease.call("set", &[Val::I32(1)]).unwrap();
            // Fails, and grows by nothing.
            lease.call("grow", &[Val::I32(100)]).unwrap();
            lease.call("grow", &[Val::I32(0)]).unwrap();
            assert!(!lease.compare().unwrap().is_clean());
            drop(lease);
            assert!(warm.compare().unwrap().is_clean(), "{name} {beyond}");
        }
    }
    assert_eq!(warm.growth_stats(), (0, 0), "no instance had to be replaced");
}
