//! Native stacks: the memory that idle instances keep of them.

use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Limits, Mode, Val, WarmUp};

/// Calls itself as often as the argument says, and returns that.
const DOWN: &str = r#"(module
    (memory 1)
    (func $down (export "down") (param $n i32) (result i32)
        (if (result i32) (i32.eqz (local.get $n))
            (then (i32.const 0))
            (else (i32.add (i32.const 1) (call $down (i32.sub (local.get $n) (i32.const 1))))))))"#;

const CALLS: i32 = 200_000;
/// A frame has a return address and a frame pointer at least.
const TOUCHED: usize = CALLS as usize * 16;

#[test]
fn the_stack_of_an_idle_instance_is_counted_and_given_back() {
    let engine = Engine::new(EngineConfig { stack: 32 << 20, ..EngineConfig::default() }).unwrap();
    let wasm = wat::parse_str(DOWN).unwrap();
    for limit in [usize::MAX, 1 << 20] {
        let limits = Limits { resident_bytes: limit, ..Limits::default() };
        let options = GuestOptions { mode: Mode::Reset, limits, ..GuestOptions::default() };
        let guest = Guest::with_options(&engine, &wasm, options).unwrap();
        // Stack pages of the warm-up are not kept.
        let warm = guest.warm(WarmUp::new().call("down", &[Val::I32(CALLS)])).unwrap();
        assert!(warm.pool_stats().resident_bytes < 1 << 20, "{:?}", warm.pool_stats());
        // Without a limit a stack is counted now and then.
        for _ in 0..if limit == usize::MAX { 64 } else { 3 } {
            let mut lease = warm.lease().unwrap();
            let down = lease.call("down", &[Val::I32(CALLS)]).unwrap();
            assert!(matches!(down[..], [Val::I32(CALLS)]), "{down:?}");
            drop(lease);
            let stats = warm.pool_stats();
            assert!(limit == usize::MAX || stats.resident_bytes <= limit, "{stats:?}");
            assert_eq!(stats.idle, 1, "{stats:?}");
        }
        let stats = warm.pool_stats();
        assert!(limit != usize::MAX || stats.resident_bytes >= TOUCHED, "{stats:?}");
    }
}
