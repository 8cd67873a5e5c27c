//! Several modules linked to one: an instance of it behaves as the many that wasmtime links itself.

use afresh_rewrite::{LinkError, Roots, analyze, extism, link, link_over, names};
use wasm_encoder::{
    EntityType, GlobalType, ImportSection, MemoryType, RefType, TableType, TypeSection,
};
use wasmtime::{
    Caller, Engine, Extern, ExternType, Instance, Linker, Module, Mutability, Store, Val, ValType,
};

use crate::common::random::Random;
use crate::common::{engine, wat};

/// The numbers that the host received, each with a byte of memory from the caller.
type Calls = Vec<(i32, Option<usize>)>;

fn linker(engine: &Engine) -> Linker<Calls> {
    let mut linker = Linker::new(engine);
    let told = |mut caller: Caller<'_, Calls>, number: i32| {
        let memory = caller.get_export("memory").and_then(Extern::into_memory);
        let byte = memory.map(|memory| usize::from(memory.data(&caller)[0]));
        caller.data_mut().push((number, byte));
        number * 2
    };
    linker.func_wrap("host", "tell", told).unwrap();
    linker
}

struct LinkedModule {
    store: Store<Calls>,
    instance: Instance,
}

impl LinkedModule {
    /// As wasmtime links them: each a separate instance.
    fn apart(engine: &Engine, modules: &[(&str, Vec<u8>)]) -> wasmtime::Result<Self> {
        let mut linker = linker(engine);
        let mut store = Store::new(engine, Calls::default());
        let (last, others) = modules.split_last().unwrap();
        for (name, wasm) in others {
            linker.module(&mut store, name, &Module::new(engine, wasm)?)?;
        }
        let instance = linker.instantiate(&mut store, &Module::new(engine, &last.1)?)?;
        Ok(Self { store, instance })
    }

    fn together(engine: &Engine, modules: &[(&str, Vec<u8>)]) -> wasmtime::Result<Self> {
        let mut store = Store::new(engine, Calls::default());
        let module = Module::new(engine, linked(modules).map_err(wasmtime::Error::new)?)?;
        let instance = linker(engine).instantiate(&mut store, &module)?;
        Ok(Self { store, instance })
    }

    fn call(&mut self, name: &str, arguments: &[i32]) -> Result<Vec<i32>, String> {
        let func = self.instance.get_func(&mut self.store, name).expect(name);
        let arguments: Vec<Val> = arguments.iter().map(|n| Val::I32(*n)).collect();
        let mut results = vec![Val::I32(0); func.ty(&self.store).results().len()];
        func.call(&mut self.store, &arguments, &mut results)
            .map_err(|error| error.root_cause().to_string())?;
        Ok(results.iter().map(|value| value.unwrap_i32()).collect())
    }
}

fn linked(modules: &[(&str, Vec<u8>)]) -> Result<Vec<u8>, LinkError> {
    let modules: Vec<(&str, &[u8])> =
        modules.iter().map(|(name, wasm)| (*name, &wasm[..])).collect();
    link(&modules)
}

fn texts<'a>(modules: &[(&'a str, &str)]) -> Vec<(&'a str, Vec<u8>)> {
    modules.iter().map(|(name, text)| (*name, wat(text))).collect()
}

/// Makes both, and calls both alike.
fn alike(modules: &[(&str, &str)], calls: &[(&str, &[i32])]) -> LinkedModule {
    let engine = Engine::default();
    let modules = texts(modules);
    let mut apart = LinkedModule::apart(&engine, &modules).unwrap();
    let mut together = LinkedModule::together(&engine, &modules).unwrap();
    assert_eq!(apart.store.data(), together.store.data(), "what was told as they were made");
    for (name, arguments) in calls {
        assert_eq!(
            apart.call(name, arguments),
            together.call(name, arguments),
            "{name} {arguments:?}"
        );
        assert_eq!(apart.store.data(), together.store.data(), "{name} {arguments:?}");
    }
    together
}

/// Owns items that others use: a memory, a table with its own functions, globals and a tag.
const LIBRARY: &str = r#"(module
    (type $unused (func (param f64)))
    (type $number (func (param i32) (result i32)))
    (import "host" "tell" (func $tell (param i32) (result i32)))
    (memory (export "memory") 1 3)
    (table (export "table") 4 8 funcref)
    (global (export "top") (mut i32) (i32.const 512))
    (global (export "base") i32 (i32.const 64))
    (tag (export "oops") (param i32))
    (data (i32.const 0) "\05library")
    (elem (i32.const 0) func $double)
    (func $double (type $number) (i32.mul (local.get 0) (i32.const 2)))
    (func (export "push") (type $number)
        (global.set 0 (i32.sub (global.get 0) (i32.const 4)))
        (i32.store (global.get 0) (local.get 0))
        (global.get 0))
    (func (export "report") (type $number) (call $tell (i32.load8_u (local.get 0)))))"#;

/// Uses all of it, by the library's names.
const PROGRAM: &str = r#"(module
    (type $number (func (param i32) (result i32)))
    (import "library" "push" (func $push (type $number)))
    (import "host" "tell" (func $tell (param i32) (result i32)))
    (import "library" "table" (table $t 1 8 funcref))
    (import "library" "memory" (memory 1))
    (import "library" "base" (global $base i32))
    (import "library" "top" (global $top (mut i32)))
    (import "library" "report" (func $report (type $number)))
    (import "library" "oops" (tag $oops (param i32)))
    (global $own (mut i32) (i32.add (global.get $base) (i32.const 1)))
    (table $mine 2 funcref)
    (data (global.get $base) "program")
    (data $later "passive")
    (elem (table $t) (i32.const 1) func $triple $push)
    (elem $more func $report $triple)
    (func $triple (type $number) (i32.mul (local.get 0) (i32.const 3)))
    (func (export "call") (param i32 i32) (result i32)
        (call_indirect $t (type $number) (local.get 1) (local.get 0)))
    (func (export "load") (param i32) (result i32) (i32.load8_u (local.get 0)))
    (func (export "push") (param i32) (result i32)
        (i32.add (call $push (local.get 0)) (global.get $top)))
    (func (export "own") (result i32)
        (global.set $own (i32.add (global.get $own) (i32.const 1)))
        (global.get $own))
    (func (export "late")
        (memory.init $later (i32.const 200) (i32.const 0) (i32.const 7))
        (data.drop $later)
        (table.init $t $more (i32.const 2) (i32.const 0) (i32.const 2))
        (elem.drop $more))
    (func (export "grow") (result i32 i32)
        (memory.grow (i32.const 1))
        (table.grow $t (ref.func $triple) (i32.const 1)))
    (func (export "catch") (param i32) (result i32)
        (block $caught (result i32)
            (try_table (result i32) (catch $oops $caught) (throw $oops (local.get 0)))))
    (func (export "tell") (result i32) (call $tell (call $report (i32.const 0)))))"#;

#[test]
fn a_linked_module_does_what_instances_that_import_from_one_another_do() {
    let pair = [("library", LIBRARY), ("program", PROGRAM)];
    let calls: [(&str, &[i32]); 21] = [
        ("call", &[0, 7]),
        ("call", &[1, 7]),
        ("call", &[2, 7]),
        ("call", &[3, 7]),
        ("load", &[64]),
        ("load", &[2]),
        ("push", &[77]),
        ("push", &[78]),
        ("load", &[508]),
        ("own", &[]),
        ("own", &[]),
        ("late", &[]),
        ("late", &[]),
        ("load", &[203]),
        ("call", &[2, 3]),
        ("call", &[3, 5]),
        ("grow", &[]),
        ("grow", &[]),
        ("grow", &[]),
        ("catch", &[9]),
        ("load", &[70_000]),
    ];
    alike(&pair, &calls);
    // The library's host function finds the memory, though the program exports none.
    let engine = Engine::default();
    let mut together = LinkedModule::together(&engine, &texts(&pair)).unwrap();
    assert_eq!(together.call("tell", &[]).unwrap(), [20]);
    assert_eq!(*together.store.data(), [(5, Some(5)), (10, Some(5))]);
    let analysis = analyze(&linked(&texts(&pair)).unwrap(), &Roots::AllExports).unwrap();
    assert!(analysis.refusals().is_empty(), "{:?}", analysis.refusals());
}

#[test]
fn a_module_starts_before_the_next_is_instantiated() {
    const FIRST: &str = r#"(module
        (import "host" "tell" (func $tell (param i32) (result i32)))
        (memory (export "memory") 1)
        (table (export "table") 2 funcref)
        (data (i32.const 0) "first")
        (func $start (drop (call $tell (i32.const 1))) (i32.store8 (i32.const 100) (i32.load8_u (i32.const 64))))
        (func (export "_initialize") (drop (call $tell (i32.const 2)))
            (i32.store8 (i32.const 101) (i32.load8_u (i32.const 64))))
        (start $start))"#;
    const SECOND: &str = r#"(module
        (import "first" "memory" (memory 1))
        (import "first" "table" (table 2 funcref))
        (export "memory" (memory 0))
        (data (i32.const 64) "second")
        (data $own "passive")
        (elem (i32.const 0) $seven)
        (func $seven (result i32) (i32.const 7))
        (func $start (i32.store8 (i32.const 102) (i32.load8_u (i32.const 65))))
        (func (export "_initialize") (i32.store8 (i32.const 103) (i32.load8_u (i32.const 0))))
        (start $start))"#;
    const THIRD: &str = r#"(module
        (import "host" "tell" (func $tell (param i32) (result i32)))
        (import "second" "memory" (memory $m 1))
        (import "first" "table" (table 2 funcref))
        (export "memory" (memory $m))
        (data (i32.const 0) "third")
        (elem (i32.const 1) $eight)
        (func $eight (result i32) (i32.const 8))
        (func $start (drop (call $tell (i32.load8_u (i32.const 1)))))
        (func (export "load") (param i32) (result i32) (i32.load8_u (local.get 0)))
        (func (export "call") (param i32) (result i32) (call_indirect (result i32) (local.get 0)))
        (func (export "again")
            (memory.init 0 (i32.const 0) (i32.const 0) (i32.const 1)))
        (func (export "_initialize") (i32.store8 (i32.const 104) (i32.const 9)))
        (start $start))"#;
    let calls: Vec<(&str, &[i32])> = vec![
        ("load", &[100]),
        ("load", &[101]),
        ("load", &[102]),
        ("load", &[103]),
        ("load", &[104]),
        ("load", &[0]),
        ("load", &[64]),
        ("call", &[0]),
        ("call", &[1]),
        ("again", &[]),
        ("_initialize", &[]),
        ("load", &[104]),
    ];
    alike(&[("first", FIRST), ("second", SECOND), ("third", THIRD)], &calls);
    // Nothing has to run for these, and segments stay as they are.
    let quiet = linked(&texts(&[("library", LIBRARY), ("program", PROGRAM)])).unwrap();
    assert!(Module::new(&Engine::default(), &quiet).is_ok());
    let analysis = analyze(&quiet, &Roots::AllExports).unwrap();
    assert_eq!(analysis.data.iter().filter(|segment| segment.passive).count(), 1);
}

#[test]
fn imports_that_do_not_match_are_refused_by_name() {
    let refused = |modules: &[(&str, &str)]| linked(&texts(modules)).unwrap_err();
    let import = |library: &str, program: &str, why: &str| {
        let error = refused(&[("a", library), ("b", program)]);
        assert!(matches!(error, LinkError::Import { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    };
    let memory = r#"(module (memory (export "m") 1 4))"#;
    import(memory, r#"(module (import "a" "n" (memory 1)))"#, "no such export");
    import(memory, r#"(module (import "a" "m" (func)))"#, "another kind");
    import(memory, r#"(module (import "a" "m" (memory 2)))"#, "2 are wanted");
    import(memory, r#"(module (import "a" "m" (memory 1 3)))"#, "no more than 3");
    import(memory, r#"(module (import "a" "m" (memory i64 1)))"#, "another form");
    import(memory, r#"(module (import "b" "m" (memory 1)))"#, "does not come before");
    let global = r#"(module (global (export "g") (mut i32) (i32.const 0)))"#;
    import(global, r#"(module (import "a" "g" (global i32)))"#, "mutable");
    let table = r#"(module (table (export "t") 1 funcref))"#;
    import(table, r#"(module (import "a" "t" (table 1 9 funcref)))"#, "any size");
    let late = refused(&[("b", r#"(module (import "a" "m" (memory 1)))"#), ("a", memory)]);
    assert!(matches!(late, LinkError::Import { .. }), "{late}");
    let wrong = refused(&[
        ("a", r#"(module (func (export "f") (param i32)))"#),
        ("b", r#"(module (import "a" "f" (func $f)) (func (export "g") (call $f)))"#),
    ]);
    assert!(matches!(wrong, LinkError::Invalid { .. }), "{wrong}");
    assert!(matches!(refused(&[]), LinkError::Names(_)));
    assert!(matches!(refused(&[("a", memory), ("a", memory)]), LinkError::Names(_)));
    let command = r#"(module (func (export "_start")))"#;
    assert!(matches!(refused(&[("a", command), ("b", memory)]), LinkError::Command(_)));
    assert!(linked(&texts(&[("a", memory), ("b", command)])).is_ok());
    // Two memories with one name: a host function could find the wrong one.
    let asking = r#"(module (import "host" "tell" (func (param i32) (result i32)))
        (memory (export "memory") 1))"#;
    let shadowed = refused(&[("a", asking), ("b", r#"(module (memory (export "memory") 1))"#)]);
    assert!(matches!(&shadowed, LinkError::Shadowed { module, .. } if module == "a"), "{shadowed}");
    let both = r#"(module (import "a" "memory" (memory 1)) (export "memory" (memory 0)))"#;
    assert!(linked(&texts(&[("a", asking), ("b", both)])).is_ok());
    let component = vec![("a", wat(memory)), ("b", wat("(component)"))];
    assert!(matches!(linked(&component).unwrap_err(), LinkError::Invalid { .. }));
}

/// A module whose imports are the exports of `library`, for the generator to choose from.
fn offered(library: &[u8]) -> Vec<u8> {
    let (mut types, mut imports) = (TypeSection::new(), ImportSection::new());
    let module = Module::new(&engine(), library).unwrap();
    for export in module.exports() {
        let entity = match export.ty() {
            ExternType::Func(ty) => {
                let numbers = |mut all: Box<dyn Iterator<Item = ValType> + '_>| {
                    all.by_ref().map(number).collect::<Option<Vec<_>>>()
                };
                let (Some(params), Some(results)) =
                    (numbers(Box::new(ty.params())), numbers(Box::new(ty.results())))
                else {
                    continue;
                };
                types.ty().function(params, results);
                EntityType::Function(types.len() - 1)
            }
            ExternType::Memory(ty) => EntityType::Memory(MemoryType {
                minimum: ty.minimum(),
                maximum: ty.maximum(),
                memory64: ty.is_64(),
                shared: false,
                page_size_log2: (ty.page_size_log2() != 16).then(|| ty.page_size_log2().into()),
            }),
            ExternType::Table(ty) if !ty.element().matches(&wasmtime::RefType::FUNCREF) => continue,
            ExternType::Table(ty) => EntityType::Table(TableType {
                element_type: RefType::FUNCREF,
                table64: ty.is_64(),
                minimum: ty.minimum(),
                maximum: ty.maximum(),
                shared: false,
            }),
            ExternType::Global(ty) => {
                let Some(val_type) = number(ty.content().clone()) else { continue };
                let mutable = ty.mutability() == Mutability::Var;
                EntityType::Global(GlobalType { val_type, mutable, shared: false })
            }
            ExternType::Tag(_) => continue,
        };
        imports.import("library", export.name(), entity);
    }
    let mut module = wasm_encoder::Module::new();
    module.section(&types).section(&imports);
    module.finish()
}

fn number(ty: ValType) -> Option<wasm_encoder::ValType> {
    Some(match ty {
        ValType::I32 => wasm_encoder::ValType::I32,
        ValType::I64 => wasm_encoder::ValType::I64,
        ValType::F32 => wasm_encoder::ValType::F32,
        ValType::F64 => wasm_encoder::ValType::F64,
        _ => return None,
    })
}

/// A random terminating module, with the imports that a library offers; `None` if no module came
/// out.
fn random_module(random: &mut Random, available: Option<Vec<u8>>) -> Option<Vec<u8>> {
    let bytes: Vec<u8> = (0..6000).map(|_| random.next() as u8).collect();
    let mut config = wasm_smith::Config {
        export_everything: true,
        min_memories: 1,
        max_memories: 2,
        min_tables: 1,
        max_tables: 2,
        min_data_segments: 1,
        min_element_segments: 1,
        min_funcs: 3,
        max_memory32_bytes: 1 << 18,
        max_memory64_bytes: 1 << 18,
        max_table_elements: 64,
        memory_max_size_required: true,
        table_max_size_required: true,
        gc_enabled: false,
        threads_enabled: false,
        simd_enabled: false,
        exceptions_enabled: false,
        tail_call_enabled: false,
        custom_page_sizes_enabled: false,
        wide_arithmetic_enabled: false,
        canonicalize_nans: true,
        max_imports: 0,
        ..wasm_smith::Config::default()
    };
    if let Some(available) = available {
        (config.min_imports, config.max_imports) = (2, 12);
        config.available_imports = Some(available);
    }
    let mut input = arbitrary::Unstructured::new(&bytes);
    let mut module = wasm_smith::Module::new(config, &mut input).ok()?;
    module.ensure_termination(500).ok()?;
    Some(module.to_bytes())
}

/// The visible state of an instance.
fn visible_state(made: &mut LinkedModule) -> Vec<String> {
    let names: Vec<String> =
        made.instance.exports(&mut made.store).map(|export| export.name().to_owned()).collect();
    let mut all = Vec::new();
    for name in names {
        let Some(export) = made.instance.get_export(&mut made.store, &name) else { continue };
        all.push(match export {
            Extern::Memory(memory) => format!("{name}: {:x?}", {
                let data = memory.data(&made.store);
                (
                    data.len(),
                    data.iter().position(|b| *b != 0),
                    data.iter().map(|b| u64::from(*b)).sum::<u64>(),
                )
            }),
            Extern::Global(global)
                if number(global.ty(&made.store).content().clone()).is_some() =>
            {
                format!("{name}: {:?}", global.get(&mut made.store))
            }
            Extern::Table(table) => {
                let size = table.size(&made.store);
                let nulls = (0..size).filter(|at| {
                    table.get(&mut made.store, *at).is_some_and(|element| element.is_null())
                });
                format!("{name}: {size} {:?}", nulls.collect::<Vec<_>>())
            }
            _ => continue,
        });
    }
    all
}

#[test]
fn random_modules_do_linked_what_they_do_apart() {
    let engine = engine();
    let (mut imported, mut called, mut ran) = (0, 0, 0);
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let Some(library) = random_module(&mut random, None) else { continue };
        let Some(program) = random_module(&mut random, Some(offered(&library))) else { continue };
        let modules = [("library", library), ("program", program)];
        let apart = LinkedModule::apart(&engine, &modules);
        let together = LinkedModule::together(&engine, &modules);
        let (mut apart, mut together) = match (apart, together) {
            (Ok(apart), Ok(together)) => (apart, together),
            (Err(_), Err(_)) => continue,
            (apart, together) => {
                panic!("seed {seed}: {:?} {:?}", apart.err(), together.err())
            }
        };
        imported += Module::new(&engine, &modules[1].1).unwrap().imports().len();
        let functions: Vec<String> = apart
            .instance
            .exports(&mut apart.store)
            .filter_map(|export| Some((export.name().to_owned(), export.into_func()?)))
            .map(|(name, _)| name)
            .collect();
        for round in 0..2 {
            for name in &functions {
                let find = |made: &mut LinkedModule| {
                    made.instance.get_func(&mut made.store, name).unwrap()
                };
                let (one, other) = (find(&mut apart), find(&mut together));
                let ty = one.ty(&apart.store);
                let Some(arguments) =
                    ty.params().map(|ty| random.value(&ty)).collect::<Option<Vec<_>>>()
                else {
                    continue;
                };
                let call = |func: wasmtime::Func, made: &mut LinkedModule| {
                    let mut results = vec![Val::I32(0); ty.results().len()];
                    let called = func.call(&mut made.store, &arguments, &mut results);
                    let numbers = ty.results().all(|ty| number(ty).is_some());
                    match called {
                        Ok(()) if numbers => format!("{results:?}"),
                        Ok(()) => "references".to_owned(),
                        Err(error) => error.root_cause().to_string(),
                    }
                };
                let (first, second) = (call(one, &mut apart), call(other, &mut together));
                assert_eq!(first, second, "seed {seed}, round {round}: {name} {arguments:?}");
                called += 1;
                ran += usize::from(first.starts_with('['));
            }
            assert_eq!(
                visible_state(&mut apart),
                visible_state(&mut together),
                "seed {seed}, round {round}"
            );
        }
    }
    assert!(imported > 300 && called > 500 && ran > 100, "{imported} {called} {ran}");
}

const HOSTED: &str = r#"(module
    (memory (export "memory") 1)
    (func (export "alloc") (param i32) (result i32) (local.get 0))
    (func (export "put") (i32.store8 (i32.const 3) (i32.const 33))))"#;

/// Imports from its host functions that the library lacks, and has a memory and an allocator by the
/// library's names.
const MAIN_MODULE: &str = r#"(module
    (import "library" "put" (func $put))
    (import "library" "tell" (func $tell (param i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "alloc") (param i32) (result i32) (i32.const 1))
    (func (export "run") (result i32)
        (call $put)
        (i32.store8 (i32.const 3) (i32.const 7))
        (call $tell (i32.const 3))))"#;

#[test]
fn over_a_library_the_host_provides_what_it_lacks_and_finds_both_memories() {
    let engine = engine();
    let (library, over) = (wat(HOSTED), wat(MAIN_MODULE));
    let whole = link_over(("library", &library), &[("over", &over)]).unwrap();
    let mut linker = Linker::new(&engine);
    let of_library = names::of_library("library", "memory");
    let tell = move |mut caller: Caller<'_, ()>, at: i32| {
        let mut byte = |name: &str| {
            let memory = caller.get_export(name).and_then(Extern::into_memory).expect(name);
            i32::from(memory.data(&caller)[at as usize])
        };
        byte("memory") * 100 + byte(&of_library)
    };
    linker.func_wrap("library", "tell", tell).unwrap();
    let mut store = Store::new(&engine, ());
    let instance = linker.instantiate(&mut store, &Module::new(&engine, &whole).unwrap()).unwrap();
    let run = instance.get_typed_func::<(), i32>(&mut store, "run").unwrap();
    assert_eq!(run.call(&mut store, ()).unwrap(), 733);
    // If the host does not complete the library, the same import has no provider.
    let error = link(&[("library", &library), ("over", &over)]).unwrap_err();
    assert!(matches!(&error, LinkError::Import { name, .. } if name == "tell"), "{error}");
}

#[test]
fn an_extism_kernel_is_checked_for_its_exports() {
    let error = extism::linked(&wat(HOSTED), &[("main", &wat("(module)"))]).unwrap_err();
    assert!(matches!(&error, LinkError::Import { name, .. } if name == "reset"), "{error}");
    assert!(matches!(extism::linked(&wat(HOSTED), &[]), Err(LinkError::Names(_))));
}
