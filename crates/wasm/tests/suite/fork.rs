//! A server that warms a guest and then forks: its children draw other entropy and other numbers
//! than it does, keep timeouts, start from the warm state, and report an error where they cannot
//! continue.

use std::time::Duration;

use afresh_sys::run_isolated;
use afresh_wasm::{
    CallError, Engine, EngineConfig, Guest, GuestOptions, LoadError, Val, Warm, WarmUp,
};

const GUEST: &str = r#"(module
    (memory (export "memory") 1)
    (global $high (mut i64) (i64.const 0))
    (global $low (mut i64) (i64.const 0))
    (func (export "afresh_reseed") (param i64 i64)
        (global.set $high (local.get 0)) (global.set $low (local.get 1)))
    (func (export "high") (result i64) (global.get $high))
    (func (export "low") (result i64) (global.get $low))
    (func (export "count") (result i64)
        (i64.store (i32.const 9000) (i64.add (i64.load (i32.const 9000)) (i64.const 1)))
        (i64.load (i32.const 9000)))
    (func (export "spin") (loop (br 0))))"#;

fn warm(options: GuestOptions) -> Warm {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let wasm = wat::parse_str(GUEST).unwrap();
    Guest::with_options(&engine, &wasm, options).unwrap().warm(WarmUp::new()).unwrap()
}

fn ask(warm: &Warm, name: &str) -> i64 {
    match warm.lease().unwrap().call(name, &[]).unwrap()[..] {
        [Val::I64(value)] => value,
        ref other => panic!("{other:?}"),
    }
}

/// Runs `work` in a forked child, and returns its result, or `None` if it failed or took a minute.
fn in_child<const N: usize>(work: impl FnOnce() -> [i64; N]) -> Option<[i64; N]> {
    let bytes = N * size_of::<i64>();
    // SAFETY: a new shared mapping, which the child writes and the parent reads once the child has
    // ended.
    let shared = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes.max(1),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(shared, libc::MAP_FAILED);
    let shared = shared.cast::<[i64; N]>();
    // SAFETY: each test here runs in its own process, so no other thread of it holds a lock that
    // the child needs.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(60) };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        if let Ok(result) = &result {
            // SAFETY: the mapping has the size of the array.
            unsafe { shared.write(*result) };
        }
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(result.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    // SAFETY: the child wrote it, and has ended.
    (status == 0).then(|| unsafe { shared.read() })
}

#[test]
fn parent_and_children_draw_different_entropy_and_numbers() {
    run_isolated("fork::parent_and_children_draw_different_entropy_and_numbers", || {
        let warm = warm(GuestOptions::default());
        let draw = || {
            let entropy = [ask(&warm, "high"), ask(&warm, "low")];
            let lease = warm.lease().unwrap();
            [entropy[0], entropy[1], lease.host().generation() as i64]
        };
        let before = draw();
        let children = [in_child(draw).unwrap(), in_child(draw).unwrap()];
        let all = [before, children[0], children[1], draw()];
        for at in 0..3 {
            for (i, j) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
                assert_ne!(all[i][at], all[j][at], "{all:?}");
            }
        }
    });
}

#[test]
fn timeouts_come_in_a_child() {
    run_isolated("fork::timeouts_come_in_a_child", || {
        let timeout = Some(Duration::from_millis(50));
        let warm = warm(GuestOptions { timeout, ..GuestOptions::default() });
        let spin = || match warm.lease().unwrap().call("spin", &[]) {
            Err(CallError::Timeout(_)) => [1],
            other => panic!("{other:?}"),
        };
        assert_eq!(spin(), [1]);
        assert_eq!(in_child(spin), Some([1]));
        assert_eq!(spin(), [1], "and in the parent as before");
    });
}

#[test]
fn every_call_in_a_child_starts_from_the_warm_state() {
    run_isolated("fork::every_call_in_a_child_starts_from_the_warm_state", || {
        let warm = warm(GuestOptions::default());
        let three = || [(); 3].map(|()| ask(&warm, "count"));
        assert_eq!(three(), [1, 1, 1]);
        assert_eq!(in_child(three), Some([1, 1, 1]));
        assert_eq!(three(), [1, 1, 1]);
    });
}

#[test]
fn a_forked_child_compiles_with_its_own_engine() {
    run_isolated("fork::a_forked_child_compiles_with_its_own_engine", || {
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let wasm = wat::parse_str(GUEST).unwrap();
        let count = |engine: &Engine| {
            let warm = Guest::new(engine, &wasm)?.warm(WarmUp::new());
            warm.map(|warm| ask(&warm, "count"))
                .map_err(|error| LoadError::Engine(wasmtime::Error::msg(error.to_string())))
        };
        assert_eq!(count(&engine).unwrap(), 1);
        let child = in_child(|| {
            let error = count(&engine).unwrap_err().to_string();
            assert!(error.contains("before a fork"), "{error}");
            [count(&Engine::new(EngineConfig::default()).unwrap()).unwrap()]
        });
        assert_eq!(child, Some([1]));
    });
}
