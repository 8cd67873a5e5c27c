//! Save and restore from inside the module, one promise a test, on wasmtime.

use crate::common::{engine, start_prepared, wat};
use afresh_rewrite::{PrepareError, PrepareOptions, Refusal, Roots, analyze, names, prepare};
use wasmtime::Val;

fn roots(names: &[&str]) -> PrepareOptions {
    let names = names.iter().map(|&name| name.to_owned()).collect();
    PrepareOptions { roots: Roots::Named(names), ..PrepareOptions::default() }
}

fn refusals(text: &str, options: &PrepareOptions) -> Vec<Refusal> {
    match prepare(&wat(text), options) {
        Err(PrepareError::NotRestorable(refusals)) => refusals.0,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn globals_of_every_type_come_back() {
    let text = r#"(module
        (type $f (func (result i32)))
        (global $i (mut i32) (i32.const 1))
        (global $l (mut i64) (i64.const 2))
        (global $f (mut f32) (f32.const 3))
        (global $d (mut f64) (f64.const nan:0x4000000000001))
        (global $v (mut v128) (v128.const i64x2 5 6))
        (global $r (mut funcref) (ref.null func))
        (global $e (mut externref) (ref.null extern))
        (global $t (mut (ref $f)) (ref.func $one))
        (func $one (type $f) (i32.const 1))
        (func $two (type $f) (i32.const 2))
        (elem declare func $one $two)
        (func (export "warm")
            (global.set $i (i32.const 10))
            (global.set $r (ref.func $one)))
        (func (export "spoil") (param externref)
            (global.set $i (i32.const -1))
            (global.set $l (i64.const -1))
            (global.set $f (f32.const -1))
            (global.set $d (f64.const -1))
            (global.set $v (v128.const i64x2 -1 -1))
            (global.set $r (ref.null func))
            (global.set $e (local.get 0))
            (global.set $t (ref.func $two)))
        (func (export "state") (result i32 i64 f32 i64 i64 i32 i32 i32)
            (global.get $i) (global.get $l) (global.get $f)
            (i64.reinterpret_f64 (global.get $d))
            (i64x2.extract_lane 1 (global.get $v))
            (ref.is_null (global.get $r)) (ref.is_null (global.get $e))
            (call_ref $f (global.get $t))))"#;
    let (prepared, mut run) = start_prepared(&engine(), text, &PrepareOptions::default());
    assert_eq!(prepared.restorable.as_ref().map(|r| r.globals.len()), Some(8));
    run.call("warm", &[]).expect("no trap");
    let before = format!("{:?}", run.call("state", &[]));
    run.save();
    for _ in 0..3 {
        let host = wasmtime::ExternRef::new(&mut run.store, 7).expect("room in the GC heap");
        run.call("spoil", &[Val::ExternRef(Some(host))]).expect("no trap");
        assert_ne!(before, format!("{:?}", run.call("state", &[])));
        assert_eq!(run.restore(), 0);
        assert_eq!(before, format!("{:?}", run.call("state", &[])));
    }
}

#[test]
fn only_globals_that_the_roots_can_change_are_saved() {
    let text = r#"(module
        (import "" "" (func $host))
        (table 1 funcref) (elem (i32.const 0) $taken)
        (global $a (mut i32) (i32.const 0))
        (global $b (mut i32) (i32.const 0))
        (global $c (mut i32) (i32.const 0))
        (global $d (export "d") (mut i32) (i32.const 0))
        (func $set_a (global.set $a (i32.const 1)))
        (func (export "a") (call $set_a))
        (func $taken (global.set $b (i32.const 1)))
        (func (export "indirect") (call_indirect (i32.const 0)))
        (func (export "host") (return_call $host))
        (func (export "c") (global.set $c (i32.const 1))))"#;
    let globals = |names: &[&str]| {
        let prepared = prepare(&wat(text), &roots(names)).expect("restorable");
        prepared.restorable.map(|restorable| restorable.globals)
    };
    assert_eq!(globals(&[]), Some(vec![3]), "an exported mutable global can always change");
    assert_eq!(globals(&["a"]), Some(vec![0, 3]), "through a direct call");
    assert_eq!(globals(&["indirect"]), Some(vec![1, 3]), "through a table");
    assert_eq!(globals(&["host"]), Some(vec![1, 3]), "the host may call any reference");
    assert_eq!(globals(&["a", "c"]), Some(vec![0, 2, 3]));
    let error = prepare(&wat(text), &roots(&["nope"])).expect_err("no such export");
    assert!(error.to_string().contains("\"nope\"; it exports a, indirect"), "{error}");
}

#[test]
fn nothing_to_restore_adds_nothing_to_do() {
    let text = r#"(module (global (mut i32) (i32.const 0)) (memory 1)
        (func (export "f") (result i32) (i32.load (i32.const 0))))"#;
    let (prepared, mut run) = start_prepared(&engine(), text, &PrepareOptions::default());
    assert!(prepared.restorable.as_ref().is_some_and(afresh_rewrite::RestorableState::is_empty));
    run.save();
    assert_eq!(run.restore(), 0);
}

/// A module that changes its table in every way, with index type `it`.
fn table_module(it: &str, element: &str, init: &str) -> String {
    let narrow = |value: String| match it {
        "i64" => format!("(i32.wrap_i64 {value})"),
        _ => value,
    };
    let grow = |by: u32| {
        let grown = narrow(format!("(table.grow $t (ref.func $two) ({it}.const {by}))"));
        format!("(i32.eq (i32.const -1) {grown})")
    };
    let index = if it == "i64" { "(i64.extend_i32_u (local.get 0))" } else { "(local.get 0)" };
    format!(
        r#"(module
        (type $f (func (result i32)))
        (func $one (type $f) (i32.const 1))
        (func $two (type $f) (i32.const 2))
        (func $three (type $f) (i32.const 3))
        (table $other {it} 4 {element} {init})
        (table $t {it} 10 20 {element} {init})
        (elem $e {element} (ref.func $two) (ref.func $three) (ref.func $two))
        (func (export "set") (param i32)
            (if (local.get 0)
                (then (table.set $t ({it}.const 3) (ref.func $two)))
                (else (table.set $t ({it}.const 99) (ref.func $two)))))
        (func (export "last") (table.set $t ({it}.const 9) (ref.func $three)))
        (func (export "fill")
            (table.fill $t ({it}.const 2) (ref.func $three) ({it}.const 4)))
        (func (export "copy")
            (table.fill $other ({it}.const 0) (ref.func $two) ({it}.const 4))
            (table.copy $t $other ({it}.const 6) ({it}.const 1) ({it}.const 3)))
        (func (export "init")
            (table.init $t $e ({it}.const 0) (i32.const 1) (i32.const 2)))
        (func (export "grow") (result i32) {})
        (func (export "grow-too-far") (result i32) {})
        (func (export "sum") (result i32) (local $i i32) (local $s i32)
            (loop $l
                (local.set $s (i32.add (i32.mul (local.get $s) (i32.const 4))
                    (call $at (local.get $i))))
                (local.set $i (i32.add (local.get $i) (i32.const 1)))
                (br_if $l (i32.lt_u (local.get $i) (i32.const 10))))
            (local.get $s))
        (func $at (param i32) (result i32)
            (block $null
                (br_on_null $null (table.get $t {index}))
                (drop)
                (return (call_indirect $t (type $f) {index})))
            (i32.const 0)))"#,
        grow(2),
        grow(99),
    )
}

fn check_table(it: &str, element: &str, init: &str) {
    let text = table_module(it, element, init);
    let (prepared, mut run) = start_prepared(&engine(), &text, &PrepareOptions::default());
    assert_eq!(prepared.restorable.as_ref().map(|r| r.tables.clone()), Some(vec![0, 1]));
    run.call("last", &[]).expect("no trap");
    run.save();
    let warm = run.int("sum").expect("no trap");
    for change in ["fill", "copy", "init", "last"] {
        run.call(change, &[]).expect("no trap");
        let spoilt = run.int("sum").expect("no trap");
        assert_eq!(spoilt == warm, change == "last", "{change} is seen");
        assert_eq!(run.restore(), 0);
        assert_eq!(run.int("sum"), Ok(warm), "{change} is undone");
    }
    run.int_of("set", &[1]).expect("no trap");
    let trap = run.int_of("set", &[0]).expect_err("out of bounds");
    assert!(trap.contains("out of bounds table access"), "{trap}");
    assert_eq!(run.restore(), 0);
    assert_eq!(run.int("sum"), Ok(warm), "also after a trap");

    assert_eq!(run.int("grow-too-far"), Ok(1), "growing past the maximum fails");
    assert_eq!(run.restore(), 0, "and needs no replacement");
    assert_eq!(run.int("grow"), Ok(0));
    assert_eq!(run.restore(), 1, "a grown table cannot shrink");
    run.save();
    let warm = run.int("sum").expect("no trap");
    run.call("fill", &[]).expect("no trap");
    assert_eq!(run.restore(), 0, "a save accepts the growth");
    assert_eq!(run.int("sum"), Ok(warm));
}

#[test]
fn a_table_comes_back_whatever_changed_it() {
    check_table("i32", "(ref null $f)", "");
    check_table("i32", "funcref", "");
}

#[test]
fn a_64_bit_table_comes_back() {
    check_table("i64", "(ref null $f)", "");
}

#[test]
fn a_table_of_non_nullable_references_comes_back() {
    check_table("i32", "(ref $f)", "(ref.func $one)");
    check_table("i64", "(ref $f)", "(ref.func $one)");
}

#[test]
fn a_table_that_no_root_changes_has_no_shadow() {
    let text = r#"(module (table (export "t") 5 funcref) (func $f) (elem declare func $f)
        (func (export "warm") (table.set (i32.const 0) (ref.func $f)))
        (func (export "run") (drop (table.get (i32.const 0)))))"#;
    let prepared = prepare(&wat(text), &roots(&["run"])).expect("restorable");
    assert_eq!(prepared.restorable.map(|r| r.tables), Some(vec![]));
    let prepared = prepare(&wat(text), &roots(&["warm"])).expect("restorable");
    assert_eq!(prepared.restorable.map(|r| r.tables), Some(vec![0]));
}

#[test]
fn a_dropped_segment_behaves_as_dropped_and_comes_back() {
    let text = r#"(module (memory 1) (table 4 funcref) (func $f)
        (data $d "abcd") (elem $e func $f $f)
        (func (export "drop") (data.drop $d) (elem.drop $e))
        (func (export "memory") (param i32 i32 i32)
            (memory.init $d (local.get 0) (local.get 1) (local.get 2)))
        (func (export "table") (param i32 i32 i32)
            (table.init $e (local.get 0) (local.get 1) (local.get 2))))"#;
    let (prepared, mut run) = start_prepared(&engine(), text, &PrepareOptions::default());
    let restorable = prepared.restorable.expect("asked for");
    assert_eq!((restorable.data, restorable.elements), (vec![0], vec![0]));
    run.save();
    for _ in 0..2 {
        run.int_of("memory", &[8, 0, 4]).expect("in bounds");
        run.int_of("table", &[0, 0, 2]).expect("in bounds");
        run.call("drop", &[]).expect("no trap");
        for (name, end, kind) in
            [("memory", 65536, "out of bounds memory access"), ("table", 4, "out of bounds table")]
        {
            run.int_of(name, &[0, 0, 0]).expect("an empty read of a dropped segment is no trap");
            run.int_of(name, &[end, 0, 0]).expect("neither is one at the very end");
            for bad in [[0, 0, 1], [0, 1, 0], [0, -1, 0], [0, -1, -1], [end + 1, 0, 0]] {
                let trap = run.int_of(name, &bad).expect_err("out of bounds");
                assert!(trap.contains(kind), "{name} {bad:?}: {trap}");
            }
        }
        assert_eq!(run.restore(), 0);
    }
}

#[test]
fn gc_arrays_read_dropped_segments_as_before() {
    let text = r#"(module (type $a (array (mut i8))) (type $r (array (mut funcref))) (func $f)
        (data $d "abcd") (elem $e func $f $f)
        (func (export "drop") (data.drop $d) (elem.drop $e))
        (func (export "data") (param i32 i32) (result i32)
            (array.len (array.new_data $a $d (local.get 0) (local.get 1))))
        (func (export "elem") (param i32 i32) (result i32)
            (array.len (array.new_elem $r $e (local.get 0) (local.get 1)))))"#;
    let (_, mut run) = start_prepared(&engine(), text, &PrepareOptions::default());
    run.save();
    for _ in 0..2 {
        assert_eq!(run.int_of("data", &[1, 3]), Ok(3));
        assert_eq!(run.int_of("elem", &[0, 2]), Ok(2));
        run.call("drop", &[]).expect("no trap");
        assert_eq!(run.int_of("data", &[0, 0]), Ok(0));
        assert_eq!(run.int_of("elem", &[0, 0]), Ok(0));
        let trap = run.int_of("data", &[1, 0]).expect_err("out of bounds");
        assert!(trap.contains("out of bounds memory access"), "{trap}");
        let trap = run.int_of("elem", &[0, 1]).expect_err("out of bounds");
        assert!(trap.contains("out of bounds table access"), "{trap}");
        assert_eq!(run.restore(), 0);
    }
}

#[test]
fn state_comes_back_after_a_stack_overflow_and_after_an_exception() {
    let text = r#"(module (tag $t (param i32)) (global $g (mut i32) (i32.const 5))
        (func $deep (export "deep")
            (global.set $g (i32.add (global.get $g) (i32.const 1))) (call $deep) (call $deep))
        (func (export "throw") (global.set $g (i32.const 0)) (throw $t (i32.const 1)))
        (func (export "catch") (result i32)
            (block $h (result i32)
                (try_table (catch $t $h) (global.set $g (i32.const 9)) (throw $t (i32.const 3)))
                (i32.const 0)))
        (func (export "get") (result i32) (global.get $g)))"#;
    let (_, mut run) = start_prepared(&engine(), text, &PrepareOptions::default());
    run.save();
    assert!(run.call("deep", &[]).expect_err("overflows").contains("call stack exhausted"));
    assert_eq!((run.restore(), run.int("get")), (0, Ok(5)));
    run.call("throw", &[]).expect_err("uncaught");
    assert_eq!((run.restore(), run.int("get")), (0, Ok(5)));
    assert_eq!(run.int("catch"), Ok(3));
    assert_eq!((run.restore(), run.int("get")), (0, Ok(5)));
}

#[test]
fn state_that_cannot_be_restored_is_refused_with_the_reason() {
    let all = PrepareOptions::default();
    let cases = [
        (r#"(module (memory 1 1 shared))"#, "memory 0 is shared"),
        (r#"(module (import "env" "mem" (memory 1)))"#, "imported as \"env\" \"mem\""),
        (
            r#"(module (import "env" "g" (global (mut i32))))"#,
            "global 0, imported as \"env\" \"g\"",
        ),
        (
            r#"(module (import "env" "t" (table 1 funcref))
                (func (export "f") (table.set (i32.const 0) (ref.null func))))"#,
            "table 0, imported as \"env\" \"t\", is written by function 0",
        ),
        (
            r#"(module (type $s (struct (field (mut i32))))
                (func (export "f") (param (ref $s)) (struct.set $s 0 (local.get 0) (i32.const 1))))"#,
            "function 0 changes a GC object in place (struct.set)",
        ),
        (
            r#"(module (type $s (struct (field (mut i32))))
                (import "env" "f" (func $f (param (ref $s))))
                (global $g (ref $s) (struct.new_default $s))
                (func (export "go") (call $f (global.get $g))))"#,
            "the host function 0 can reach GC objects",
        ),
        (
            r#"(module (type $a (array (mut i8)))
                (import "env" "other" (func)) (import "env" "f" (func $f))
                (global (export "g") (ref $a) (array.new_default $a (i32.const 9)))
                (func (export "go") (call $f)))"#,
            "the host function 1 can reach GC objects",
        ),
        (
            r#"(module (type $a (array (mut i8))) (import "env" "f" (func $f))
                (table $t (export "t") 1 anyref)
                (elem (table $t) (i32.const 0) anyref (item (array.new_default $a (i32.const 9))))
                (func (export "go") (call $f)))"#,
            "the host function 0 can reach GC objects",
        ),
        (
            r#"(module (type $s (struct (field (mut i32)))) (import "env" "f" (func $f))
                (global $g (ref $s) (struct.new_default $s))
                (func (export "get") (result anyref) (global.get $g))
                (func (export "go") (call $f)))"#,
            "the host function 0 can reach GC objects",
        ),
        (
            r#"(module (type $a (array (mut i8))) (data $d "x")
                (func (export "f") (param (ref $a))
                    (array.init_data $a $d (local.get 0) (i32.const 0) (i32.const 0) (i32.const 0))))"#,
            "(array.init_data)",
        ),
        (
            r#"(module (type $f (func)) (type $c (cont $f)) (func $g) (elem declare func $g)
                (func (export "f") (resume $c (cont.new $c (ref.func $g)))))"#,
            "switches stacks (cont.new)",
        ),
    ];
    for (text, reason) in cases {
        let refusals = refusals(text, &all);
        let text: Vec<String> = refusals.iter().map(ToString::to_string).collect();
        assert!(text.iter().any(|text| text.contains(reason)), "{reason}: {text:?}");
    }
}

#[test]
fn unreachable_writes_are_not_refused_nor_is_fresh_mode() {
    let text = r#"(module (type $s (struct (field (mut i32))))
        (func (export "warm") (param (ref $s)) (struct.set $s 0 (local.get 0) (i32.const 1)))
        (func (export "run")))"#;
    prepare(&wat(text), &roots(&["run"])).expect("the root does not reach struct.set");
    let fresh = PrepareOptions { restorable: false, ..PrepareOptions::default() };
    prepare(&wat(text), &fresh).expect("fresh mode takes every module");
}

#[test]
fn reserved_names_invalid_modules_and_components_are_refused() {
    let options = PrepareOptions::default();
    let prepared = prepare(&wat("(module (memory 1))"), &options).expect("restorable");
    let error = prepare(&prepared.module, &options).expect_err("prepared already");
    assert!(error.to_string().contains("reserved"), "{error}");
    let error = prepare(b"\0asm\x01\0\0\0\x63", &options).expect_err("cut off");
    assert!(error.to_string().contains("not a valid Wasm module"), "{error}");
    let error = prepare(&wat("(component)"), &options).expect_err("a component");
    assert!(error.to_string().contains("component"), "{error}");
}

#[test]
fn every_memory_is_exported() {
    let text = "(module (memory 1) (memory i64 2) (memory 3 (pagesize 1)))";
    let (prepared, mut run) = start_prepared(&engine(), text, &PrepareOptions::default());
    let sizes: Vec<usize> = run.memories(3).iter().map(Vec::len).collect();
    assert_eq!(sizes, [65536, 131_072, 3]);
    assert_eq!(prepared.analysis.memories[2].page_size_log2, 0);
    assert_eq!(names::memory(2), "afresh:memory:2");
}

#[test]
fn objects_out_of_reach_of_host_functions_are_no_reason_to_refuse() {
    for text in [
        // No object can change.
        r#"(module (type $s (struct (field i32)))
            (import "env" "f" (func $f (param (ref $s))))
            (global $g (export "g") (ref $s) (struct.new_default $s))
            (func (export "go") (call $f (global.get $g))))"#,
        // The host function is given none, and no export leads to one.
        r#"(module (type $s (struct (field (mut i32)))) (type $f (func))
            (import "env" "f" (func $f (param i32 funcref (ref $f))))
            (global $g (ref $s) (struct.new_default $s))
            (func $go (export "go") (call $f (i32.const 1) (ref.func $go) (ref.func $go))))"#,
        // Instantiation makes none, and a reset drops those of calls.
        r#"(module (type $s (struct (field (mut i32))))
            (import "env" "f" (func $f (param (ref null $s) externref)))
            (global $g (export "g") (mut (ref null $s)) (ref.null $s))
            (func (export "go") (global.set $g (struct.new_default $s))
                (call $f (global.get $g) (ref.null extern))))"#,
        // No host function is called.
        r#"(module (type $s (struct (field (mut i32)))) (import "env" "f" (func (param (ref $s))))
            (global $g (export "g") (ref $s) (struct.new_default $s))
            (func (export "go")))"#,
    ] {
        let wanted = Roots::Named(vec!["go".to_owned()]);
        let found = analyze(&wat(text), &wanted).unwrap();
        assert_eq!(found.refusals(), [], "{text}");
    }
}
