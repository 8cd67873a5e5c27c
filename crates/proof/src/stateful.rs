//! Random modules made of little but state: state machines over memories, globals, tables,
//! segments, GC objects and exceptions, with operands that are mostly in bounds.
//!
//! Each module exports `f0` to `f5` and `machine`, all `(param i32 i32) (result i64)`, which change
//! and read state, and `look`, which folds everything that can be seen from inside into one number:
//! every byte of every memory, every global, every element of every table. `clear` sets every
//! reference to an object to null, so that the state can be kept. `spoil` has the host spoil what
//! belongs to the store ([`meddling`]). Loops are bounded, and calls go only to functions made
//! before, so that every call ends.

mod shape;

use std::fmt::Write;

use shape::{Shape, constant, reference};

use crate::meddling;
use crate::random::Random;

/// Number of functions in addition to the state machine.
pub const FUNCTIONS: usize = 6;
/// Functions that references point to.
const LEAVES: usize = 4;

/// Features of a module that reset mode refuses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    /// Changes to GC objects in place, which reset mode refuses.
    pub gc_writes: bool,
    /// GC objects and exceptions in globals.
    pub objects: bool,
    /// GC objects in constant globals, which host functions change: reset mode refuses them.
    pub kept: bool,
}

/// The text of a random module.
#[must_use]
pub fn module(random: &mut Random, features: Features) -> String {
    let shape = Shape::random(random, features);
    let mut text = String::from(
        "(module
    (type $leaf (func (result i32)))
    (type $other (func (param i32) (result i32)))
    (type $struct (struct (field i32) (field (mut i32))))
    (type $array (array (mut i8)))
    (type $step (func (param i32 i32) (result i64)))
    (import \"env\" \"host\" (func $host (param i32) (result i32)))
    (import \"env\" \"object\" (func $object (param i32) (result externref)))
    (import \"env\" \"number\" (func $number (param externref) (result i32)))
    (import \"env\" \"touch\" (func $touch (param i32 i32) (result i32)))
    (import \"env\" \"change\" (func $change (param structref i32)))
    (import \"env\" \"alter\" (func $alter (param arrayref i32)))
    (import \"env\" \"meddle\" (func $meddle))
    (tag $tag (param i32))\n",
    );
    // Writing to a string succeeds.
    let _ = declare(&mut text, random, &shape);
    for function in 0..FUNCTIONS {
        let body = shape.statements(random, 7, function);
        let _ = writeln!(text, "    (func $f{function} (export \"f{function}\") {LOCALS}{body}");
        let _ = match function.checked_sub(1).filter(|_| random.one_in(4)) {
            Some(last) => {
                writeln!(text, "        (return_call $f{last} (local.get 1) (i32.const 3)))")
            }
            None => writeln!(text, "        (local.get $acc))"),
        };
    }
    let states = 2 + random.below(4);
    let _ = writeln!(text, "    (func (export \"machine\") {LOCALS}");
    let labels: Vec<String> = (0..states).map(|state| format!("$s{state}")).collect();
    let blocks: String = labels.iter().rev().map(|label| format!("(block {label} ")).collect();
    let _ = writeln!(
        text,
        "        (block $out {blocks}(br_table {} $out (global.get $state)))",
        labels.join(" ")
    );
    for state in 0..states {
        let body = shape.statements(random, 5, FUNCTIONS);
        let next = random.below(states);
        let _ = writeln!(text, "{body}\n        (global.set $state (i32.const {next}))");
        let _ = writeln!(text, "        {}", if state + 1 < states { "(br $out))" } else { ")" });
    }
    let _ = writeln!(text, "        (local.get $acc))");
    let _ = writeln!(text, "    (func (export \"clear\"){})", shape.clear());
    let _ = writeln!(text, "    (func (export \"spoil\") (call $meddle))");
    let _ = writeln!(
        text,
        "    (func (export \"look\") (result i64) (local $acc i64) (local $at i64){}\n        (local.get $acc)))",
        shape.look()
    );
    text
}

const LOCALS: &str = "(type $step) (local $acc i64) (local $n i32) (local $a (ref null $array))";

/// The export of something under a name, in half of the modules: host functions reach what is
/// exported.
fn exported(random: &mut Random, name: &str) -> String {
    if random.one_in(2) { format!("(export \"{name}\")") } else { String::new() }
}

/// Everything before the functions that change it.
fn declare(text: &mut String, random: &mut Random, shape: &Shape) -> std::fmt::Result {
    let index_type = |wide| if wide { "i64" } else { "i32" };
    for (t, table) in shape.tables.iter().enumerate() {
        let init = if table.element == "(ref $leaf)" { "(ref.func $leaf0)" } else { "" };
        let minimum = if random.one_in(6) { random.below(9) } else { 9 + random.below(5) };
        let index = index_type(table.wide);
        let export = exported(random, &meddling::table(t));
        writeln!(text, "    (table {export} {index} {minimum} 20 {} {init})", table.element)?;
    }
    let mut sizes = Vec::new();
    for (m, memory) in shape.memories.iter().enumerate() {
        let minimum = if random.one_in(6) { 0 } else { 1 + random.below(2) };
        sizes.push(minimum * 65536);
        let index = index_type(memory.wide);
        let export = exported(random, &meddling::memory(m));
        writeln!(text, "    (memory {export} {index} {minimum} {})", memory.maximum)?;
    }
    let exported = exported(random, meddling::GLOBAL);
    writeln!(
        text,
        "    (global $i {exported} (mut i32) (i32.const {})) (global $state (mut i32) (i32.const 0))
    (global $l (mut i64) (i64.const {})) (global $v (mut v128) (v128.const i64x2 1 2))
    (global $f (mut f32) (f32.const nan:0x200001)) (global $d (mut f64) (f64.const -0))
    (global $r (mut funcref) (ref.null func)) (global $n (mut (ref $leaf)) (ref.func $leaf1))
    (global $e (mut externref) (ref.null extern)) (global $o (mut (ref null $struct)) (ref.null $struct))",
        random.below(100),
        random.word()
    )?;
    if shape.features.objects {
        writeln!(
            text,
            "    (global $j (mut i31ref) {}) (global $x (mut exnref) (ref.null exn))",
            if random.one_in(4) { "(ref.i31 (i32.const 3))" } else { "(ref.null i31)" }
        )?;
    }
    if shape.features.kept {
        writeln!(
            text,
            "    (global $kept (ref $struct) (struct.new $struct (i32.const 1) (i32.const 2)))
    (global $bytes (ref $array) (array.new $array (i32.const 7) (i32.const 5)))"
        )?;
    }
    writeln!(text, "    (elem declare func $leaf0 $leaf1 $leaf2 $leaf3 $other)")?;
    for &element in &shape.elements {
        let items: Vec<String> = (0..2 + random.below(4))
            .map(|_| match element {
                "externref" => "(ref.null extern)".into(),
                _ => reference(random, element),
            })
            .collect();
        writeln!(text, "    (elem {element} {})", items.join(" "))?;
    }
    for (t, table) in shape.tables.iter().enumerate() {
        if table.element == "funcref" && random.one_in(2) {
            let at = constant(table.wide, random.below(4));
            writeln!(text, "    (elem (table {t}) {at} func $leaf2 $leaf3)")?;
        }
    }
    for _ in 0..shape.data {
        let memory = (!sizes.is_empty()).then(|| random.below(sizes.len()));
        match memory.filter(|m| sizes[*m] > 0 && random.one_in(3)) {
            Some(m) => {
                let at = random.below(sizes[m] / 4096) * 4096 + 4096 - random.below(5) - 6;
                let at = constant(shape.memories[m].wide, at);
                writeln!(text, "    (data (memory {m}) {at} \"active\")")?;
            }
            None => writeln!(text, "    (data \"{}\")", &"passive"[..2 + random.below(6)])?,
        }
    }
    for leaf in 0..LEAVES {
        writeln!(text, "    (func $leaf{leaf} (type $leaf) (i32.const {}))", leaf + 10)?;
    }
    writeln!(text, "    (func $other (type $other) (i32.add (local.get 0) (global.get $i)))")?;
    if random.one_in(3) {
        let memory = shape.memories.iter().zip(&sizes).position(|(m, size)| !m.wide && *size > 0);
        let store = match memory {
            Some(m) => format!("(i32.store {m} (i32.const 8000) (i32.const 99))"),
            None => String::new(),
        };
        writeln!(
            text,
            "    (func $start (global.set $l (i64.add (global.get $l) (i64.const 5))) {store}) (start $start)"
        )?;
    }
    Ok(())
}
