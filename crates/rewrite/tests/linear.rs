//! Preparing, baking and linking allocate in proportion to the size of a module.

use std::fmt::Write;

use afresh_budget::meter::{Meter, peak, total};
use afresh_rewrite::{
    PrepareError, PrepareOptions, WarmState, WarmValue, bake, direct_calls, link, prepare,
    prepare_component,
};
use wasm_encoder::{
    CodeSection, Component, ComponentBuilder, EntityType, ExportKind, ExportSection, Function,
    FunctionSection, GlobalType, HeapType, ImportSection, Imports, Module, ModuleArg, RawSection,
    RefType, TableSection, TableType, TypeSection, ValType,
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

/// The longest name that a validator accepts, and the maximum number of parameters.
const MAX_NAME_BYTES: usize = 100_000;
const MAX_PARAMETERS: usize = 1000;

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

/// A type with the maximum number of parameters, and one without any.
fn types() -> TypeSection {
    let mut types = TypeSection::new();
    types.ty().function([ValType::I32; MAX_PARAMETERS], []);
    types.ty().function([], []);
    types
}

/// A component whose modules all import one function of a shim, each this number of times. The
/// function has the maximum number of parameters.
fn calling_a_shim(modules: usize, imports: usize) -> Vec<u8> {
    let shim = {
        let (mut functions, mut tables) = (FunctionSection::new(), TableSection::new());
        functions.function(0);
        tables.table(FUNCTIONS);
        let mut exports = ExportSection::new();
        exports.export("0", ExportKind::Func, 0).export("$imports", ExportKind::Table, 0);
        let (mut code, mut body) = (CodeSection::new(), Function::new([]));
        let mut instructions = body.instructions();
        for local in 0..MAX_PARAMETERS {
            instructions.local_get(local as u32);
        }
        instructions.i32_const(0).call_indirect(0, 0).end();
        code.function(&body);
        let mut module = Module::new();
        module.section(&types()).section(&functions).section(&tables);
        module.section(&exports).section(&code).clone()
    };
    let caller = {
        let (mut imported, mut functions) = (ImportSection::new(), FunctionSection::new());
        for _ in 0..imports {
            imported.import("", "0", EntityType::Function(0));
        }
        functions.function(1);
        let (mut code, mut body) = (CodeSection::new(), Function::new([]));
        body.instructions().end();
        code.function(&body);
        let mut module = Module::new();
        module.section(&types()).section(&imported).section(&functions);
        module.section(&code).clone()
    };
    let mut component = ComponentBuilder::default();
    let shim = component.core_module(None, &shim);
    let none: [(&str, ModuleArg); 0] = [];
    let shim = component.core_instantiate(None, shim, none);
    let function = component.core_alias_export(None, shim, "0", ExportKind::Func);
    let functions = component.core_instantiate_exports(None, [("0", ExportKind::Func, function)]);
    for _ in 0..modules {
        let caller = component.core_module(None, &caller);
        component.core_instantiate(None, caller, [("", ModuleArg::Instance(functions))]);
    }
    component.finish()
}

#[test]
fn direct_calls_do_not_write_a_long_function_for_each_short_import() {
    for (modules, imports) in [(1, 10_000), (200, 20)] {
        let wasm = calling_a_shim(modules, imports);
        let (direct, bytes) = peak(|| direct_calls(&wasm));
        assert!(direct.len() <= 2 * wasm.len() + (64 << 10), "{} bytes", direct.len());
        assert!(bytes < 16 * wasm.len(), "{bytes} bytes for {}", wasm.len());
        // As many modules as there is room for.
        assert_eq!(direct == wasm, modules == 1);
    }
}

#[test]
fn imports_that_share_one_long_module_name_are_refused() {
    let ty = GlobalType { val_type: ValType::I32, mutable: false, shared: false };
    let names: Vec<String> = (0..1000).map(|index| index.to_string()).collect();
    let mut imports = ImportSection::new();
    imports.imports(Imports::Compact2 {
        module: &"m".repeat(MAX_NAME_BYTES),
        ty: EntityType::Global(ty),
        names: names.iter().map(String::as_str).collect(),
    });
    let mut module = Module::new();
    module.section(&imports);
    let wasm = module.finish();
    let (prepared, bytes) = peak(|| prepare(&wasm, &PrepareOptions::default()));
    assert!(prepared.unwrap_err().to_string().contains("compact imports"));
    assert!(bytes < wasm.len() * 16, "{bytes} bytes");
}
