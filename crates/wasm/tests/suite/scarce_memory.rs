//! Hosts with few addresses, or little memory, to give away.

use afresh_sys::run_isolated;
use afresh_wasm::{
    Engine, EngineConfig, Guest, GuestOptions, Mode, Val, WarmUp, memory_reservation,
};

const GUEST: &str = r#"(module
    (memory (export "memory") 2)
    (func (export "count") (result i64)
        (i64.store (i32.const 70000) (i64.add (i64.load (i32.const 70000)) (i64.const 1)))
        (i64.load (i32.const 70000)))
    (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
    (func (export "read") (param i32) (result i32) (i32.load (local.get 0))))"#;

/// Runs the test `name` in a separate process, with a limit on its address space.
fn limited(name: &str, limit: u64, test: impl FnOnce()) {
    run_isolated(name, || {
        let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
        // SAFETY: plain call; it concerns this process, which is the test's own.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
        test();
    });
}

#[test]
fn guests_run_and_stay_inside_their_memory_under_a_limit_of_two_gibibytes() {
    let name =
        "scarce_memory::guests_run_and_stay_inside_their_memory_under_a_limit_of_two_gibibytes";
    limited(name, 2 << 30, || {
        assert!(memory_reservation() < 4 << 30);
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let wasm = wat::parse_str(GUEST).unwrap();
        for mode in [Mode::Reset, Mode::Fresh] {
            let options = GuestOptions { mode, ..GuestOptions::default() };
            let guest = Guest::with_options(&engine, &wasm, options).unwrap();
            let warm = guest.warm(WarmUp::new()).unwrap();
            let call = |name: &str, arguments: &[Val]| warm.lease().unwrap().call(name, arguments);
            for _ in 0..3 {
                assert!(matches!(call("count", &[]).unwrap()[..], [Val::I64(1)]));
            }
            // Inside, at the end, right behind it, beyond every reservation, and at the end of all
            // addresses.
            assert!(call("read", &[Val::I32(131_068)]).is_ok());
            for address in [131_069, 131_072, 200 << 20, i32::MAX, -4, -1] {
                assert!(call("read", &[Val::I32(address)]).is_err(), "{address:#x}");
            }
            // Growth ends where the reservation does, and is refused, not fatal.
            assert!(matches!(call("grow", &[Val::I32(100)]).unwrap()[..], [Val::I32(2)]));
            assert!(matches!(call("grow", &[Val::I32(60_000)]).unwrap()[..], [Val::I32(-1)]));
            let mut lease = warm.lease().unwrap();
            assert!(matches!(lease.call("grow", &[Val::I32(1)]).unwrap()[..], [Val::I32(2)]));
            assert!(lease.call("read", &[Val::I32(196_604)]).is_ok());
            assert!(lease.call("read", &[Val::I32(196_608)]).is_err());
        }
    });
}

#[test]
fn warming_takes_little_more_memory_than_the_guest_itself() {
    run_isolated("scarce_memory::warming_takes_little_more_memory_than_the_guest_itself", || {
        const MIB: usize = 96;
        let wasm = wat::parse_str(format!(
            r#"(module (memory {pages})
                (func (export "fill") (local $at i32)
                    (loop $next
                        (i32.store (local.get $at) (i32.add (local.get $at) (i32.const 1)))
                        (local.set $at (i32.add (local.get $at) (i32.const 4096)))
                        (br_if $next (i32.lt_u (local.get $at) (i32.const {bytes})))))
                (func (export "last") (result i32) (i32.load (i32.const {last}))))"#,
            pages = MIB * 16,
            bytes = MIB << 20,
            last = (MIB << 20) - 4096,
        ))
        .unwrap();
        let engine = Engine::new(EngineConfig::default()).unwrap();
        let before = most_resident();
        let guest = Guest::new(&engine, &wasm).unwrap();
        let warm = guest.warm(WarmUp::new().call("fill", &[])).unwrap();
        let peak = most_resident() - before;
        let last = warm.lease().unwrap().call("last", &[]).unwrap();
        assert!(matches!(last[..], [Val::I32(n)] if n == (MIB << 20) as i32 - 4095));
        // The guest's own memory, and that of its compilation. The image is not resident until it
        // is touched. Each copy on the way would be as much again.
        assert!(peak < (MIB + MIB / 2) << 20, "{} MiB", peak >> 20);
    });
}

/// The most memory of the process that was resident so far, in bytes.
fn most_resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}
