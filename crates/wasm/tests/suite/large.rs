//! Modules near the limits of engines run with the items that afresh adds.

use std::fmt::Write;

use afresh_wasm::{Engine, EngineConfig, Guest, GuestOptions, Mode, Val, Warm, WarmError, WarmUp};

fn warm(text: &str, mode: Mode) -> Result<Warm, WarmError> {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let options = GuestOptions { mode, ..GuestOptions::default() };
    let guest = Guest::with_options(&engine, &wat::parse_str(text).unwrap(), options).unwrap();
    guest.warm(WarmUp::new().call("warm", &[]))
}

fn ask(warm: &Warm, name: &str, argument: i32) -> i32 {
    let results = warm.lease().unwrap().call(name, &[Val::I32(argument)]).unwrap();
    results[0].unwrap_i32()
}

#[test]
fn sixty_written_tables_run_in_fresh_mode() {
    let mut text =
        String::from("(module (func $f (result i32) (i32.const 9)) (elem declare func $f)");
    let (mut set, mut get) = (String::new(), String::new());
    for table in 0..60 {
        write!(text, "(table $t{table} 1 funcref)").unwrap();
        write!(set, "(table.set $t{table} (i32.const 0) (ref.func $f))").unwrap();
        write!(get, "(i32.add (ref.is_null (table.get $t{table} (i32.const 0))))").unwrap();
    }
    write!(text, r#"(func (export "warm") {set})"#).unwrap();
    write!(text, r#"(func (export "nulls") (param i32) (result i32) (i32.const 0) {get}"#).unwrap();
    text += "(table.set $t7 (i32.const 0) (ref.null func))))";
    let warmed = warm(&text, Mode::Auto).unwrap();
    assert_eq!(warmed.report().mode, Mode::Fresh);
    let why = warmed.report().why_fresh.clone().unwrap();
    assert!(why.contains("120 tables, and engines take 100"), "{why}");
    for _ in 0..3 {
        assert_eq!(ask(&warmed, "nulls", 0), 0);
    }
    let error = warm(&text, Mode::Reset).unwrap_err();
    assert!(error.to_string().contains("120 tables"), "{error}");
}

#[test]
fn a_table_with_150_000_holes_is_kept() {
    let text = r#"(module (table $t 300001 funcref) (elem declare func $f)
        (func $f (result i32) (i32.const 9))
        (func (export "warm") (local i32) (loop
            (table.set $t (local.get 0) (ref.func $f))
            (br_if 0 (i32.le_u (local.tee 0 (i32.add (local.get 0) (i32.const 2))) (i32.const 300000)))))
        (func (export "at") (param i32) (result i32) (ref.is_null (table.get $t (local.get 0)))
            (table.set $t (local.get 0) (ref.null func))))"#;
    for mode in [Mode::Fresh, Mode::Reset] {
        let warmed = warm(text, mode).unwrap();
        for at in [0, 1, 2, 299_999, 300_000, 300_000] {
            assert_eq!(ask(&warmed, "at", at), at % 2, "{} {at}", mode.name());
        }
    }
}
