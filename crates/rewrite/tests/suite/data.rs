//! Data that moves into the image, in modules and in components.

use crate::common::{engine, start, start_prepared, wat};
use afresh_rewrite::{
    DataSegment, MARK_BYTES, PrepareComponentError, PrepareOptions, prepare, prepare_component,
};
use wasmtime::component::Component;
use wasmtime::{Engine, Module};

fn fresh() -> PrepareOptions {
    PrepareOptions { restorable: false, ..PrepareOptions::default() }
}

fn segment(memory: u32, offset: u64, bytes: &[u8]) -> (u32, u64, Vec<u8>) {
    (memory, offset, bytes.to_vec())
}

/// Segments without their places.
fn without_places(segments: &[DataSegment]) -> Vec<(u32, u64, Vec<u8>)> {
    segments.iter().map(|s| segment(s.memory, s.offset, &s.bytes)).collect()
}

#[test]
fn constant_segments_in_bounds_move_out_in_order() {
    let text = r#"(module (memory 1) (memory i64 1) (memory 8 (pagesize 1))
        (global $base i32 (i32.const 100))
        (data (i32.const 4) "abcd")
        (data "passive")
        (data (i32.add (i32.const 4) (i32.mul (i32.const 1) (i32.const 2))) "XY")
        (data (memory 1) (i64.const 65532) "last")
        (data (memory 2) (i32.const 0) "12345678")
        (data (i32.sub (global.get $base) (i32.const 1)) "g")
        (data (i32.const 65536) "")
        (func (export "read") (param i32) (result i32) (i32.load8_u (local.get 0)))
        (func (export "init") (param i32 i32)
            (memory.init 0 (i32.const 0) (local.get 0) (local.get 1)))
        (func (export "passive") (memory.init 1 (i32.const 0) (i32.const 0) (i32.const 7))))"#;
    let (prepared, mut run) = start_prepared(&engine(), text, &PrepareOptions::default());
    let expected = [
        segment(0, 4, b"abcd"),
        segment(0, 6, b"XY"),
        segment(1, 65532, b"last"),
        segment(2, 0, b"12345678"),
        segment(0, 99, b"g"),
        segment(0, 65536, b""),
    ];
    assert_eq!(without_places(&prepared.segments), expected);
    assert_eq!(run.memories(1)[0][4..8], *b"abXY");
    run.int_of("init", &[0, 0]).expect("an empty read of a dropped segment");
    for bad in [[0, 1], [1, 0]] {
        let trap = run.int_of("init", &bad).expect_err("an active segment is dropped");
        assert!(trap.contains("out of bounds memory access"), "{trap}");
    }
    run.call("passive", &[]).expect("passive segments stay");
    assert_eq!(run.int_of("read", &[0]), Ok(i32::from(b'p')));
}

#[test]
fn moving_stops_where_the_place_is_not_certain() {
    let imported = r#"(module (import "" "" (global $g i32)) (memory 1)
        (data (i32.const 0) "a") (data (global.get $g) "b") (data (i32.const 2) "c"))"#;
    let prepared = prepare(&wat(imported), &fresh()).expect("fresh mode");
    assert_eq!(without_places(&prepared.segments), [segment(0, 0, b"a")]);
    let outside = r#"(module (memory 1)
        (data (i32.const 0) "a") (data (i32.const 65535) "bc") (data (i32.const 2) "c"))"#;
    let prepared = prepare(&wat(outside), &fresh()).expect("fresh mode");
    assert_eq!(without_places(&prepared.segments), [segment(0, 0, b"a")]);
    let Err(error) = start(&engine(), &prepared.module) else { panic!("must trap as before") };
    let trap = error.downcast_ref::<wasmtime::Trap>();
    assert_eq!(trap, Some(&wasmtime::Trap::MemoryOutOfBounds));
    let foreign = r#"(module (import "" "" (memory 1)) (memory 1)
        (data (memory 1) (i32.const 0) "a") (data (i32.const 0) "b"))"#;
    let prepared = prepare(&wat(foreign), &fresh()).expect("fresh mode");
    assert_eq!(without_places(&prepared.segments), [segment(1, 0, b"a")]);
}

#[test]
fn custom_sections_survive_unless_they_point_at_code() {
    let text = r#"(module $named (@custom "keep" "1") (@custom ".debug_info" "2")
        (func $f (export "f")))"#;
    let prepared = prepare(&wat(text), &fresh()).expect("fresh mode");
    let module = Module::new(&engine(), &prepared.module).expect("valid");
    assert_eq!(module.name(), Some("named"));
    let text = String::from_utf8_lossy(&prepared.module).into_owned();
    assert!(text.contains("keep") && !text.contains("debug_info"));
}

#[test]
fn a_component_loses_the_data_of_all_its_modules() {
    let text = r#"(component
        (core module $a (memory (export "m") 1) (data (i32.const 1) "aa"))
        (component
            (core module $b (import "" "" (memory 1)) (memory 1)
                (data (memory 1) (i32.const 2) "bb") (data (i32.const 0) "no")))
        (core module $c (memory 1) (memory i64 2) (data (memory 1) (i64.const 65536) "cc")
            (func (export "f") (result i32) (i32.const 42)))
        (core instance $i (instantiate $c))
        (func (export "f") (result u32) (canon lift (core func $i "f"))))"#;
    let original = wat(text);
    let prepared = prepare_component(&original).expect("a component");
    let segments: Vec<_> = prepared.modules.iter().map(|m| without_places(&m.segments)).collect();
    let expected =
        [vec![segment(0, 1, b"aa")], vec![segment(1, 2, b"bb")], vec![segment(1, 65536, b"cc")]];
    assert_eq!(segments, expected);
    assert!(prepared.modules[1].memories[0].imported);
    let engine: Engine = engine();
    let component = Component::new(&engine, &prepared.component).expect("valid");
    let mut store = wasmtime::Store::new(&engine, ());
    let linker = wasmtime::component::Linker::new(&engine);
    let instance = linker.instantiate(&mut store, &component).expect("instantiates");
    let f = instance.get_typed_func::<(), (u32,)>(&mut store, "f").expect("still exported");
    assert_eq!(f.call(&mut store, ()).expect("no trap"), (42,));
    let again = prepare_component(&prepared.component).expect("a component still");
    assert_eq!(again.component, prepared.component, "nothing is left to move");
}

#[test]
fn bytes_that_are_no_component_are_refused() {
    let error = prepare_component(&wat("(module)")).expect_err("a core module");
    assert!(matches!(error, PrepareComponentError::NotAComponent), "{error}");
    let mut cut = wat(r#"(component (core module (memory 1) (data (i32.const 0) "x")))"#);
    cut.pop();
    prepare_component(&cut).expect_err("cut off");
}

#[test]
fn every_memory_of_a_probe_identifies_itself_and_no_code_of_it_runs() {
    let text = r#"(component
        (component
            (core module $a
                (memory (export "m") 1) (data (i32.const 0) "overwritten?")
                (func $start (i32.store (i32.const 0) (i32.const -1)) (unreachable))
                (start $start)))
        (core module $b
            (import "" "" (memory 1))
            (memory (export "none") 0)
            (memory (export "big") i64 2)
            (data $passive "kept")
            (data (memory 0) (i32.const 0) "in somebody else's memory")
            (func (export "f") (result i32)
                (memory.init 0 $passive (i32.const 0) (i32.const 0) (i32.const 4))
                (i32.const 42))))"#;
    let prepared = prepare_component(&wat(text)).expect("a component");
    assert_eq!(prepared.marked([0; MARK_BYTES]), None);
    assert_eq!(prepared.marked([0xff; MARK_BYTES]), None);
    let engine = engine();
    let mut found = Vec::new();
    for payload in wasmparser::Parser::new(0).parse_all(&prepared.probe) {
        let payload = payload.expect("a component still");
        let wasmparser::Payload::ModuleSection { unchecked_range, .. } = payload else { continue };
        let module = wasmtime::Module::new(&engine, &prepared.probe[unchecked_range]).unwrap();
        let mut store = wasmtime::Store::new(&engine, ());
        let given = wasmtime::MemoryType::new(1, None);
        let given = wasmtime::Memory::new(&mut store, given).unwrap();
        let imports = vec![given.into(); module.imports().len()];
        let instance = wasmtime::Instance::new(&mut store, &module, &imports).unwrap();
        assert!(given.data(&store).iter().all(|byte| *byte == 0), "somebody else's is untouched");
        for name in ["m", "none", "big"] {
            let Some(memory) = instance.get_memory(&mut store, name) else { continue };
            let mut mark = [0; MARK_BYTES];
            let read = memory.read(&store, 0, &mut mark);
            found.push((name, read.ok().and_then(|()| prepared.marked(mark))));
        }
        if let Some(f) = instance.get_func(&mut store, "f") {
            f.call(&mut store, &[], &mut [wasmtime::Val::I32(0)]).expect_err("it has no body");
        }
    }
    assert_eq!(found, [("m", Some((0, 0))), ("none", None), ("big", Some((1, 2)))]);
}
