//! Bytes that are not a proper module give an error or a valid module, never a panic.

use crate::common::random::Random;
use crate::common::{engine, stateful, wat};
use afresh_rewrite::{
    PrepareOptions, Roots, WarmState, WarmValue, analyze, bake_component, open_component, prepare,
    prepare_component,
};
use wasmtime::Module;

#[test]
fn damaged_modules_are_refused_or_stay_valid() {
    let engine = engine();
    let (mut refused, mut taken) = (0, 0);
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let wasm = wat(&stateful::module(&mut random));
        for _ in 0..40 {
            let mut damaged = wasm.clone();
            for _ in 0..=random.below(2) {
                let at = random.below(damaged.len());
                damaged[at] = random.next() as u8;
            }
            if random.below(8) == 0 {
                damaged.truncate(random.below(wasm.len()));
            }
            let options = PrepareOptions { bakeable: true, ..PrepareOptions::default() };
            match prepare(&damaged, &options) {
                Ok(prepared) => {
                    taken += 1;
                    if Module::validate(&engine, &damaged).is_ok() {
                        Module::validate(&engine, &prepared.module).expect("stays valid");
                    }
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 100 && taken > 100, "{refused} refused, {taken} taken");
}

#[test]
fn damaged_components_never_panic() {
    let component = wat(r#"(component (core module $a (memory 1) (data (i32.const 0) "x"))
        (component $c
            (alias outer 1 $a (core module $b))
            (core module $m (memory 1) (data (i32.const 0) "y") (data $p "z")
                (global (export "g") (mut i64) (i64.const 0))
                (func (export "f") (data.drop $p)))
            (core instance $i (instantiate $m)) (core instance (instantiate $b))
            (func (export "f") (canon lift (core func $i "f"))))
        (core instance (instantiate $a))
        (instance $x (instantiate $c))
        (func (export "f") (alias export $x "f")))"#);
    let opened = open_component(&component).expect("nothing comes from outside");
    assert_eq!(opened.modules(), 2);
    let paths: Vec<_> = opened.ways.iter().map(|way| (way.path.join("."), way.module)).collect();
    assert_eq!(paths, [("afresh-state.component0.core0".to_owned(), 1)]);
    let mut state = WarmState::default();
    state.globals.insert(0, WarmValue::I64(7));
    let states = [None, Some(state)];
    bake_component(&component, &states).expect("it has such a global");
    let mut refused = 0;
    for at in 0..component.len() {
        for byte in [0, 1, 4, 0x7f, 0x80, 0xff] {
            let mut damaged = component.clone();
            damaged[at] = byte;
            refused += u32::from(prepare_component(&damaged).is_err());
            let _ = open_component(&damaged);
            let _ = bake_component(&damaged, &states);
        }
    }
    assert!(refused > 50, "{refused} refused");
}

#[test]
fn the_analysis_says_who_changes_what() {
    let text = r#"(module (memory (export "m") 2 9) (table 3 7 funcref)
        (global (mut i32) (i32.const 0)) (global i32 (i32.const 0))
        (data "a") (data "b")
        (func $set (global.set 0 (i32.const 1)))
        (func (export "run") (data.drop 0) (memory.init 0 (i32.const 0) (i32.const 0) (i32.const 0))
            (drop (table.grow 0 (ref.null func) (i32.const 1))))
        (func (export "other") (call $set) (data.drop 1)))"#;
    let analysis = analyze(&wat(text), &Roots::Named(vec!["run".into()])).expect("valid");
    assert!(analysis.refusals().is_empty());
    assert_eq!((analysis.functions, analysis.reachable), (3, 1));
    assert_eq!(analysis.exported_functions, ["run", "other"]);
    assert_eq!((analysis.memories[0].minimum, analysis.memories[0].maximum), (2, Some(9)));
    assert_eq!(analysis.globals[0].set_by, [0]);
    assert!(analysis.globals[0].mutable && !analysis.globals[0].changeable);
    assert!(!analysis.globals[1].mutable);
    assert!(analysis.tables[0].growable && analysis.tables[0].changeable);
    assert!(analysis.data[0].changeable, "dropped and read");
    assert!(analysis.data[1].dropped && !analysis.data[1].changeable, "never read");
    let all = analyze(&wat(text), &Roots::AllExports).expect("valid");
    assert!(all.globals[0].changeable);
    assert_eq!(all.reachable, 3);
}
