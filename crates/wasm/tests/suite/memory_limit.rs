//! The memory limit bounds memories and tables together, in both modes and in components.

use afresh_wasm::{
    CallOptions, Engine, EngineConfig, Guest, GuestOptions, Limiter, Mode, Val, Warm, WarmUp,
};

const PAGE: usize = 1 << 16;

/// Five memories, three of them empty at first, and two tables.
const GUEST: &str = r#"(module
    (memory (export "memory") 1)
    (memory $second 1)
    (memory $third 0)
    (memory $fourth 0)
    (memory $fifth 0)
    (table $table 1 funcref)
    (table $small 0 8 funcref)
    (func (export "first") (param i32) (result i32) (memory.grow (local.get 0)))
    (func (export "second") (param i32) (result i32) (memory.grow $second (local.get 0)))
    (func (export "third") (param i32) (result i32) (memory.grow $third (local.get 0)))
    (func (export "fourth") (param i32) (result i32) (memory.grow $fourth (local.get 0)))
    (func (export "fifth") (param i32) (result i32) (memory.grow $fifth (local.get 0)))
    (func (export "table") (param i32) (result i32)
        (table.grow $table (ref.null func) (local.get 0)))
    (func (export "small") (param i32) (result i32)
        (table.grow $small (ref.null func) (local.get 0))))"#;

/// A limit of eight pages, and a little for the elements that the tables have.
const LIMIT: usize = 8 * PAGE + 1024;
/// Elements of a table that count as a page.
const ELEMENTS: i32 = (PAGE / 16) as i32;

fn warm(options: GuestOptions, warm_up: WarmUp) -> Warm {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let wasm = wat::parse_str(GUEST).unwrap();
    Guest::with_options(&engine, &wasm, options).unwrap().warm(warm_up).unwrap()
}

/// Grows one after another in one lease, and compares the answers.
fn check(warm: &Warm, growths: &[(&str, i32, i32)]) {
    let mut lease = warm.lease().unwrap();
    for (name, by, expected) in growths {
        let answer = lease.call(name, &[Val::I32(*by)]).unwrap()[0].unwrap_i32();
        assert_eq!(answer, *expected, "{name} by {by}");
    }
}

/// Growths of a guest that may have eight pages and starts with two.
fn check_total(warm: &Warm) {
    for _ in 0..2 {
        check(
            warm,
            &[
                ("third", 2, 0),
                ("fourth", 2, 0),
                ("fifth", 3, -1),
                ("fifth", 2, 0),
                ("first", 1, -1),
                ("table", ELEMENTS, -1),
                ("first", 0, 1),
            ],
        );
        check(
            warm,
            &[
                ("table", 50_000_000, -1),
                ("table", 5 * ELEMENTS, 1),
                ("second", 2, -1),
                ("second", 1, 1),
                ("fifth", 1, -1),
                ("table", ELEMENTS, -1),
            ],
        );
        // A growth beyond the maximum of a table takes nothing from the limit.
        check(warm, &[("small", 5 * ELEMENTS, -1), ("small", 8, 0), ("fourth", 6, 0)]);
        assert_eq!(warm.lease().unwrap().differences().unwrap(), (0, 0));
    }
}

#[test]
fn memories_and_tables_together_stay_within_the_memory_limit() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, memory_limit: LIMIT, ..GuestOptions::default() };
        check_total(&warm(options, WarmUp::new()));
    }
}

#[test]
fn a_limit_of_the_embedder_bounds_memories_and_tables_together() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let limiter = Limiter::of_total(|_| Some(LIMIT));
        let options = GuestOptions { mode, limiter, ..GuestOptions::default() };
        check_total(&warm(options, WarmUp::new()));
    }
}

#[test]
fn growth_in_the_warm_up_counts_in_later_calls() {
    for mode in [Mode::Reset, Mode::Fresh] {
        let options = GuestOptions { mode, memory_limit: LIMIT, ..GuestOptions::default() };
        let warm_up = WarmUp::new().call("third", &[Val::I32(5)]).call("table", &[Val::I32(32)]);
        let warm = warm(options, warm_up);
        for _ in 0..2 {
            check(&warm, &[("fifth", 2, -1), ("fifth", 1, 0), ("first", 1, -1), ("third", 0, 5)]);
        }
        let more = CallOptions::new().memory(LIMIT + PAGE);
        let mut lease = warm.lease().unwrap();
        let _limits = lease.set_limits(&more).unwrap();
        let mut grow = |name: &str| lease.call(name, &[Val::I32(2)]).unwrap()[0].unwrap_i32();
        assert_eq!((grow("first"), grow("second")), (1, -1));
    }
}

#[test]
fn a_module_that_declares_more_than_the_memory_limit_is_refused() {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    for module in
        ["(module (memory 3) (memory 3) (memory 3))", "(module (memory 1) (table 50000 funcref))"]
    {
        let wasm = wat::parse_str(module).unwrap();
        for mode in [Mode::Reset, Mode::Fresh] {
            let options = GuestOptions { mode, memory_limit: LIMIT, ..GuestOptions::default() };
            let guest = Guest::with_options(&engine, &wasm, options).unwrap();
            assert!(guest.warm(WarmUp::new()).is_err(), "{module} in {mode:?}");
        }
    }
}
