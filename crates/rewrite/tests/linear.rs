//! Preparing, baking and linking allocate in proportion to the size of a module.

use std::fmt::Write;

use afresh_budget::meter::{Meter, peak, total};
use afresh_rewrite::{
    PrepareError, PrepareOptions, WarmState, WarmValue, bake, link, prepare, prepare_component,
};
use wasm_encoder::{
    CodeSection, Component, ExportKind, ExportSection, Function, FunctionSection, HeapType,
    ImportSection, Module, RawSection, RefType, TableType, TypeSection,
};

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

/// The longest name that a validator accepts.
const MAX_NAME_BYTES: usize = 100_000;

const FUNCTIONS: TableType = TableType {
    element_type: RefType::FUNCREF,
    minimum: 1,
    maximum: None,
    table64: false,
    shared: false,
};

/// A module with a long name for its imported table, which each of its functions writes.
fn writing_an_imported_table(functions: u32) -> Vec<u8> {
    let mut types = TypeSection::new();
    types.ty().function([], []);
    let mut imports = ImportSection::new();
    imports.import(&"m".repeat(MAX_NAME_BYTES), &"n".repeat(MAX_NAME_BYTES), FUNCTIONS);
    let (mut declared, mut code) = (FunctionSection::new(), CodeSection::new());
    for _ in 0..functions {
        declared.function(0);
        let mut body = Function::new([]);
        body.instructions().i32_const(0).ref_null(HeapType::FUNC).table_set(0).end();
        code.function(&body);
    }
    let mut exports = ExportSection::new();
    exports.export("run", ExportKind::Func, 0);
    let mut module = Module::new();
    module.section(&types).section(&imports).section(&declared).section(&exports).section(&code);
    module.finish()
}

#[test]
fn a_refusal_does_not_copy_the_names_of_an_import_for_each_function() {
    let wasm = writing_an_imported_table(1000);
    let (prepared, bytes) = peak(|| prepare(&wasm, &PrepareOptions::default()));
    assert!(matches!(prepared, Err(PrepareError::NotRestorable(_))), "{prepared:?}");
    assert!(bytes < wasm.len() * 16, "{bytes} bytes");

    let mut component = Component::new();
    component.section(&RawSection { id: 1, data: &wasm });
    let component = component.finish();
    let (prepared, bytes) = peak(|| prepare_component(&component));
    assert!(prepared.is_ok(), "{prepared:?}");
    assert!(bytes < wasm.len() * 16, "{bytes} bytes");
}

#[test]
fn a_refusal_is_short_however_many_reasons_a_module_has() {
    for wasm in [importing(10_000), writing_an_imported_table(10_000)] {
        let refused = prepare(&wasm, &PrepareOptions::default()).unwrap_err().to_string();
        assert!(refused.len() < 8192, "{} bytes", refused.len());
    }
}
