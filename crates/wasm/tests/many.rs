//! Thousands of warm guests in one process, to which the kernel by default allows 65,530 mappings.

use std::time::{Duration, Instant};

use afresh_wasm::{Budget, Engine, EngineConfig, Guest, GuestOptions, Mode, Warm, WarmUp};

const GUESTS: i32 = 10_000;

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn ask(warm: &Warm) -> i32 {
    warm.lease().unwrap().call("number", &[]).unwrap()[0].unwrap_i32()
}

#[test]
fn ten_thousand_warm_guests_fit_in_one_process() {
    let engine = Engine::new(EngineConfig { timeouts: false, ..EngineConfig::default() }).unwrap();
    let budget = Budget::process();
    let before = resident_bytes();
    let guests: Vec<Warm> = (0..GUESTS)
        .map(|number| {
            let wasm = wat::parse_str(format!(
                r#"(module (memory 1)
                    (global $calls (mut i32) (i32.const 0))
                    (func (export "warm") (i32.store (i32.const 8) (i32.const {number})))
                    (func (export "number") (result i32)
                        (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
                        (i32.store (i32.const 8)
                            (i32.add (i32.load (i32.const 8))
                                (i32.sub (global.get $calls) (i32.const 1))))
                        (i32.load (i32.const 8))))"#
            ));
            let options = GuestOptions { mode: Mode::Reset, ..GuestOptions::default() };
            let guest = Guest::with_options(&engine, &wasm.unwrap(), options).unwrap();
            let warm = guest.warm(WarmUp::new().call("warm", &[]));
            let warm = warm.unwrap_or_else(|error| panic!("guest {number}: {error}"));
            assert_eq!(ask(&warm), number);
            warm
        })
        .collect();
    let usage = budget.usage();
    assert!(usage.mappings <= budget.bounds().mappings, "{usage:?} of {:?}", budget.bounds());
    let each = resident_bytes().saturating_sub(before) / GUESTS as usize;
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    println!("{each} bytes resident for each guest; {mappings} mappings; {usage:?}");
    // The budget counts at least the existing mappings.
    assert!(mappings <= usage.mappings + 1000, "{mappings} mappings, {usage:?}");
    // Those whose instance went are as warm as the others, and as pristine.
    for (number, warm) in (0..).zip(&guests).step_by(37) {
        for _ in 0..2 {
            assert_eq!(ask(warm), number);
        }
        assert!(warm.compare().unwrap().is_clean(), "guest {number}");
    }
    assert!(each < 160 << 10, "{each} bytes resident for each guest");
    drop(guests);
    let since = Instant::now();
    while (budget.usage().items, budget.usage().mappings) != (0, 0) {
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", budget.usage());
        std::thread::sleep(Duration::from_millis(10));
    }
}
