//! Preparing, baking and linking allocate in proportion to the size of a module.

use std::fmt::Write;

use afresh_budget::meter::{Meter, total};
use afresh_rewrite::{PrepareOptions, WarmState, WarmValue, bake, link, prepare};

#[global_allocator]
static METER: Meter = Meter;

/// A module with this number of exported globals. Its warm-up sets each.
fn exporting(globals: u32) -> Vec<u8> {
    let mut text = String::from("(module (memory 1)");
    for index in 0..globals {
        let _ = write!(text, r#"(global (export "g{index}") (mut i32) (i32.const {index}))"#);
    }
    text.push_str("(func (export \"warm\")");
    for index in 0..globals {
        let _ = write!(text, "(global.set {index} (i32.const 1))");
    }
    text.push_str("))");
    wat::parse_str(text).unwrap()
}

/// A module that imports so many globals.
fn importing(globals: u32) -> Vec<u8> {
    let mut text = String::from("(module ");
    for index in 0..globals {
        let _ = write!(text, r#"(import "all" "g{index}" (global (mut i32)))"#);
    }
    text.push(')');
    wat::parse_str(text).unwrap()
}

/// Bytes that are allocated to prepare and bake a module with so many globals.
fn baking(globals: u32) -> usize {
    let wasm = exporting(globals);
    let (baked, bytes) = total(|| {
        let options =
            PrepareOptions { restorable: false, bakeable: true, ..PrepareOptions::default() };
        let prepared = prepare(&wasm, &options).unwrap();
        let visible = prepared.visible.as_ref().unwrap();
        assert_eq!(visible.globals.len(), globals as usize);
        let values = visible.globals.iter().map(|index| (*index, WarmValue::I32(7)));
        let warm =
            WarmState { memories: vec![1], globals: values.collect(), ..WarmState::default() };
        assert!(warm.opaque().is_none());
        bake(&prepared, &warm).unwrap()
    });
    assert!(baked.len() > globals as usize * 4);
    bytes
}

/// Bytes that are allocated to make a module with so many globals restorable.
fn restoring(globals: u32) -> usize {
    let wasm = exporting(globals);
    let (prepared, bytes) = total(|| prepare(&wasm, &PrepareOptions::default()).unwrap());
    assert_eq!(prepared.restorable.unwrap().globals.len(), globals as usize);
    bytes
}

/// Bytes that are allocated to link a module that imports so many globals.
fn linking(globals: u32) -> usize {
    let (all, user) = (exporting(globals), importing(globals));
    total(|| link(&[("all", &all), ("user", &user)]).unwrap()).1
}

#[test]
fn eight_times_the_globals_take_eight_times_the_memory() {
    for work in [baking, restoring, linking] {
        let (few, many) = (work(10_000), work(80_000));
        assert!(many < few * 12, "{few} bytes, then {many}");
    }
}
