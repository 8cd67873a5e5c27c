//! Random modules made of little but state: tables of all kinds, segments, globals, memories,
//! and functions that change and read them with operands that are mostly in bounds.

use std::fmt::Write;

use super::random::Random;

/// A table: its index type and its element type.
struct Table {
    wide: bool,
    element: &'static str,
}

struct Shape {
    tables: Vec<Table>,
    memories: Vec<bool>,
    elements: Vec<&'static str>,
    data: usize,
    leaves: usize,
}

fn address(random: &mut Random, wide: bool) -> String {
    let index = match random.below(4) {
        0 => "(i32.and (local.get 0) (i32.const 7))".to_owned(),
        1 => "(local.get 1)".to_owned(),
        _ => format!("(i32.const {})", random.below(9)),
    };
    if wide { format!("(i64.extend_i32_u {index})") } else { index }
}

fn length(random: &mut Random, wide: bool) -> String {
    let length = random.below(4);
    if wide { format!("(i64.const {length})") } else { format!("(i32.const {length})") }
}

/// A reference that fits a table's element type.
fn reference(random: &mut Random, shape: &Shape, element: &str) -> String {
    let leaf = format!("(ref.func $leaf{})", random.below(shape.leaves));
    match (element, random.below(3)) {
        ("externref", _) => "(local.get 2)".into(),
        ("(ref $leaf)", _) | (_, 0..2) => leaf,
        ("funcref", _) => "(ref.null func)".into(),
        _ => "(ref.null $leaf)".into(),
    }
}

fn pick<'a, T>(random: &mut Random, items: &'a [T]) -> (usize, &'a T) {
    let at = random.below(items.len());
    (at, &items[at])
}

/// One statement; `acc` is the local that collects the values read.
fn statement(random: &mut Random, shape: &Shape, callees: usize) -> String {
    let (t, table) = pick(random, &shape.tables);
    let (m, &wide) = pick(random, &shape.memories);
    // Element segment 0 declares the functions.
    let (d, e) = (random.below(shape.data), random.below(shape.elements.len()));
    let at = address(random, table.wide);
    let to = address(random, wide);
    let small = address(random, false);
    let value = reference(random, shape, table.element);
    let read = |value: String| {
        format!("(local.set $acc (i32.add (i32.mul (local.get $acc) (i32.const 31)) {value}))")
    };
    let narrow = |wide: bool, value: String| {
        if wide { format!("(i32.wrap_i64 {value})") } else { value }
    };
    match random.below(22) {
        0 => format!("(global.set $i {small})"),
        1 => format!("(global.set $l (i64.extend_i32_u {small}))"),
        2 => format!("(global.set $v (i32x4.splat {small}))"),
        3 => format!("(global.set $r {})", reference(random, shape, "funcref")),
        4 => format!("(global.set $n {})", reference(random, shape, "(ref $leaf)")),
        5 => "(global.set $e (local.get 2))".into(),
        6 | 7 => format!("(table.set {t} {at} {value})"),
        8 => format!("(table.fill {t} {at} {value} {})", length(random, table.wide)),
        9 => {
            let fits: Vec<usize> = (0..shape.tables.len())
                .filter(|&from| shape.tables[from].element == table.element)
                .collect();
            let (_, &from) = pick(random, &fits);
            let source = shape.tables[from].wide;
            let length = length(random, table.wide && source);
            format!("(table.copy {t} {from} {at} {} {length})", address(random, source))
        }
        10 | 11 if shape.elements[e] == table.element => {
            format!("(table.init {t} {} {at} {small} {})", e + 1, length(random, false))
        }
        12 => format!("(elem.drop {})", e + 1),
        13 | 14 => format!("(memory.init {m} {d} {to} {small} {})", length(random, false)),
        15 => format!("(data.drop {d})"),
        16 if random.below(4) == 0 => {
            let size = length(random, table.wide);
            read(narrow(table.wide, format!("(table.grow {t} {value} {size})")))
        }
        17 if random.below(4) == 0 => {
            read(narrow(wide, format!("(memory.grow {m} {})", length(random, wide))))
        }
        18 => format!("(i32.store8 {m} {to} {small})"),
        19 if callees > 0 => {
            let callee = random.below(callees);
            read(format!("(call $f{callee} (local.get 1) {small} (local.get 2))"))
        }
        20 if table.element == "funcref" => read(format!("(call_indirect {t} (type $leaf) {at})")),
        _ => match random.below(7) {
            0 => read(format!("(ref.is_null (table.get {t} {at}))")),
            1 => read(narrow(table.wide, format!("(table.size {t})"))),
            2 => read(narrow(wide, format!("(memory.size {m})"))),
            3 => read(format!("(i32.load8_u {m} {to})")),
            4 => read("(call_ref $leaf (global.get $n))".into()),
            5 => read("(i32x4.extract_lane 2 (global.get $v))".into()),
            _ => read("(i32.add (global.get $i) (i32.wrap_i64 (global.get $l)))".into()),
        },
    }
}

/// The text of a random module.
pub(crate) fn module(random: &mut Random) -> String {
    let kinds = ["funcref", "(ref null $leaf)", "externref", "(ref $leaf)"];
    let tables = (0..=random.below(4))
        .map(|_| Table { wide: random.below(3) == 0, element: pick(random, &kinds).1 })
        .collect();
    let shape = Shape {
        tables,
        memories: (0..=random.below(2)).map(|_| random.below(3) == 0).collect(),
        elements: (0..=random.below(5)).map(|_| *pick(random, &kinds).1).collect(),
        data: 1 + random.below(4),
        leaves: 4,
    };
    let mut text = String::from(
        "(module (type $leaf (func (result i32)))\n\
        (elem declare func $leaf0 $leaf1 $leaf2 $leaf3)\n",
    );
    let mut line = |args: std::fmt::Arguments<'_>| {
        writeln!(text, "{args}").expect("writing to a string succeeds");
    };
    for table in &shape.tables {
        let index = if table.wide { "i64" } else { "i32" };
        let init = if table.element == "(ref $leaf)" { "(ref.func $leaf0)" } else { "" };
        line(format_args!("(table {index} {} 20 {} {init})", random.below(12), table.element));
    }
    for &wide in &shape.memories {
        line(format_args!("(memory {} 1 4)", if wide { "i64" } else { "i32" }));
    }
    line(format_args!(
        "(global $i (mut i32) (i32.const 0)) (global $l (mut i64) (i64.const 0))
        (global $v (mut v128) (v128.const i64x2 0 0)) (global $r (mut funcref) (ref.null func))
        (global $n (mut (ref $leaf)) (ref.func $leaf1)) (global $e (mut externref) (ref.null extern))"
    ));
    for &element in &shape.elements {
        let length = random.below(5);
        let items: Vec<String> = (0..length)
            .map(|_| match element {
                "externref" => "(ref.null extern)".into(),
                _ => reference(random, &shape, element),
            })
            .collect();
        line(format_args!("(elem {element} {})", items.join(" ")));
    }
    for (t, table) in shape.tables.iter().enumerate() {
        if table.element == "funcref" && random.below(2) == 0 {
            let index = if table.wide { "i64" } else { "i32" };
            let at = random.below(4);
            line(format_args!("(elem (table {t}) ({index}.const {at}) func $leaf2 $leaf3)"));
        }
    }
    for _ in 0..shape.data {
        match random.below(3) {
            0 => {
                let (m, &wide) = pick(random, &shape.memories);
                let index = if wide { "i64" } else { "i32" };
                line(format_args!(
                    "(data (memory {m}) ({index}.const {}) \"active\")",
                    random.below(9)
                ));
            }
            _ => line(format_args!("(data \"{}\")", &"passive"[..random.below(8)])),
        }
    }
    for leaf in 0..shape.leaves {
        line(format_args!("(func $leaf{leaf} (type $leaf) (i32.const {}))", leaf + 10));
    }
    for function in 0..6 {
        line(format_args!(
            "(func $f{function} (export \"f{function}\") (param i32 i32 externref) (result i32)
            (local $acc i32)"
        ));
        for _ in 0..random.below(7) + 1 {
            let statement = statement(random, &shape, function);
            line(format_args!("    {statement}"));
        }
        line(format_args!("    (local.get $acc))"));
    }
    text.push(')');
    text
}
